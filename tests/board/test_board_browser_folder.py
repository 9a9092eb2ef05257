"""A folder of runs in the browser: its table, a run that appears, and what is told of one that is broken."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser_helpers import BoardProcess, opened, record_run, saved, settle
from index_helpers import new_run, rows_of, tokens_of
from playwright.sync_api import expect

from cavesson.record import Recorder

NAMES = ("base", "other/base", "seed-1", "fast")


class Folder(BoardProcess):
    """A board of a folder, whose runs nobody has opened."""

    def is_ready(self) -> bool:
        return isinstance(self.json("api/table"), dict)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four runs, of which two are called alike and two differ in the seed alone, and one that is broken."""
    root = tmp_path_factory.mktemp("many") / "runs"
    for i, name in enumerate(NAMES):
        config = {
            "seed": i,
            "optimizer": {"learning_rate": 5e-6 if name == "fast" else 1e-6},
            "grpo": {"beta": 0.1 * (i == 1)},
        }
        record_run(root / name, steps=2, better=float(i), config=config)
    shutil.copytree(root / "base", root / "broken")
    (root / "broken" / "run.json").write_text("{")
    return root


@pytest.fixture(scope="module")
def board(root: Path) -> Iterator[BoardProcess]:
    with Folder(root) as board:
        yield board


def names(page: Any) -> list[str]:
    return page.locator(".runs td.name a").all_inner_texts()


def test_the_table_is_sorted_filtered_grouped_and_leads_to_a_run(browser: Any, board: BoardProcess, root: Path) -> None:
    with opened(browser, board.address) as page:
        expect(page).to_have_url(re.compile("/runs$"))
        expect(page.locator(".runs tbody tr")).to_have_count(5)
        assert names(page) == ["base", "broken", "fast", "other/base", "seed-1"]
        rewards = {line["run"]: line["reward"]["mean"] for line in board.json("api/table")["runs"] if line["reward"]}
        page.get_by_role("button", name="Last reward").click()
        expect(page).to_have_url(re.compile("sort=-reward"))
        assert names(page) == [*sorted(rewards, key=rewards.__getitem__, reverse=True), "broken"]
        expect(page.locator("tr", has_text="broken").locator(".error")).to_contain_text("is not JSON")
        page.get_by_role("searchbox").fill("learning_rate=5e-06")
        expect(page.locator(".runs tbody tr")).to_have_count(1)
        assert names(page) == ["fast"]
        page.get_by_role("searchbox").fill("")
        page.get_by_role("button", name="Group seeds").click()
        expect(page.locator(".runs tbody tr")).to_have_count(4)
        line = page.locator("tr", has_text="seed-1").locator("td.number").nth(1).inner_text()
        low, high = rewards["base"], rewards["seed-1"]
        assert [round(float(one), 2) for one in re.findall(r"[\d.]+", line)] == [
            pytest.approx(one, abs=0.006) for one in ((low + high) / 2, low, high)
        ]
        page.get_by_role("link", name="other/base").click()
        expect(page).to_have_url(re.compile("/overview[?]run=other%2Fbase"))
        page.locator(".plot canvas").first.wait_for()
        expect(page.locator("select.run")).to_have_value("other/base")
    assert not (root / "fast" / "index").exists(), "nobody has looked at it"


def test_two_runs_are_chosen_and_compared(browser: Any, board: BoardProcess) -> None:
    with opened(browser, f"{board.address}/runs") as page:
        for name in ("base", "seed-1"):
            page.get_by_label(f"Choose {name} for").check()
        page.get_by_role("link", name="Compare 2 runs").click()
        expect(page).to_have_url(re.compile("/compare[?]sides=base%2Cseed-1"))
        page.locator("article.group").first.wait_for()
        assert page.locator(".bar select").first.input_value() == "base"


def test_a_run_that_cannot_be_opened_says_why(browser: Any, board: BoardProcess) -> None:
    with opened(browser, f"{board.address}/overview?run=broken", forgiven="400") as page:
        expect(page.locator(".empty")).to_contain_text("run.json is not JSON")


def test_the_keyboard_and_the_saved_file_know_the_table(browser: Any, board: BoardProcess, tmp_path: Path) -> None:
    with opened(browser, f"{board.address}/runs", wide=False) as page:
        page.locator(".runs td").first.wait_for()
        page.keyboard.press("j")
        page.keyboard.press("j")
        expect(page.locator("tr.current a")).to_have_text("broken")
        page.keyboard.press("k")
        page.keyboard.press("Enter")
        expect(page).to_have_url(re.compile("/overview[?]run=base"))
        page.keyboard.press("g")
        page.keyboard.press("u")
        page.locator(".runs td").first.wait_for()
        page.get_by_role("button", name="Export").click()
        file = saved(page, page.get_by_text("This view as one HTML file").click, tmp_path)
    with opened(browser, file.as_uri()) as page:
        assert names(page) == ["base", "broken", "fast", "other/base", "seed-1"]
        page.get_by_role("button", name="Last reward").click()
        settle(page)
        assert names(page)[0] == "fast"


def test_runs_appear_in_an_empty_folder_while_the_page_is_open(browser: Any, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    root.mkdir()
    with Folder(root) as board, opened(browser, board.address) as page:
        expect(page.locator(".empty")).to_have_text(f"There is no run in {root} yet. Runs appear here once they start.")
        record_run(root / "first", steps=1)
        expect(page.locator(".runs td.name a")).to_have_text(["first"])
        record_run(root / "second", steps=1)
        expect(page.locator(".runs td.name a")).to_have_text(["first", "second"])
        page.get_by_role("link", name="first").click()
        page.locator(".plot canvas").first.wait_for()


def test_runs_of_two_trainers_are_compared_by_our_names_along_steps_tokens_and_time(
    browser: Any, tmp_path: Path
) -> None:
    for name, metric, seconds in (("ours", "policy/entropy", "time/step"), ("theirs", "entropy", "timing_s/step")):
        with Recorder(new_run(tmp_path / name)) as recorder:
            for step in range(3):
                recorder.rollouts(step, rows_of(step, 4), tokens_of(step, 4))
                recorder.metrics(step, {metric: 1.0 / (step + 1), seconds: 60.0})
    with Folder(tmp_path) as board, opened(browser, f"{board.address}/compare?sides=ours,theirs") as page:
        page.get_by_label("Also show").select_option("policy/entropy")
        chart = page.locator(".card", has=page.get_by_role("heading", name="policy/entropy"))
        expect(chart.locator(".legend .name")).to_have_text(["ours", "theirs · entropy"])
        assert "entropy" not in page.get_by_label("Also show").locator("option").all_inner_texts()
        along = page.get_by_label("Along")
        expect(along.locator("option")).to_have_text(["Step", "Tokens", "minutes", "KL"])
        for axis in ("tokens", "time", "kl"):
            along.select_option(axis)
            expect(page).to_have_url(re.compile(f"axis={axis}"))
            expect(chart.locator(".legend .name")).to_have_text(["ours", "theirs · entropy"])

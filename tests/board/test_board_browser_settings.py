"""Settings and their differences, runs with different rewards, names that would act, curves that coincide."""

import re
import unicodedata
from urllib.parse import quote, urlencode

import pytest
from browser_helpers import BoardProcess, go, opened, record_run, settle
from playwright.sync_api import expect

from cavesson.record import Recorder, begin_attempt, write_run

BASE = {
    "steps": 20,
    "optimizer": {"learning_rate": 1e-6, "betas": [0.9, 0.95]},
    "rewards": [{"use": "length", "weight": 1.0}, {"use": "a.py:f", "weight": 0.5}],
    "cleaning": {"discard": []},
}
FASTER = BASE | {"optimizer": {"learning_rate": 3e-6, "betas": [0.9, 0.95]}, "rewards": BASE["rewards"][::-1]}
OTHERS = BASE | {"rewards": [{"use": "length", "weight": 2.0}]}


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    folder = tmp_path_factory.mktemp("settings")
    runs = [
        record_run(folder / name, steps=3, better=better, config=config, versions={"cavesson": "1.0"})
        for name, better, config in (("base", 0.0, BASE), ("faster", 1.0, FASTER), ("others", 5.0, OTHERS))
    ]
    with BoardProcess(*runs) as board:
        yield board


def test_the_settings_of_a_run_are_read_searched_and_linked_to(browser, board):
    with opened(browser, f"{board.address}/overview?run=faster") as page:
        page.locator(".plot canvas").first.wait_for()
        page.keyboard.press("g")
        page.keyboard.press("e")
        expect(page).to_have_url(re.compile(r"/settings\?run=faster"))
        titles = page.locator(".settings h2")
        expect(titles).to_have_text(["General", "optimizer", "rewards", "cleaning", "General", "versions"])
        lines = page.locator(".settings tr")
        assert "optimizer.learning_rate\t0.000003" in lines.all_inner_texts()
        page.get_by_role("searchbox").fill("WEIGHT")
        expect(lines).to_have_count(2)
        expect(page).to_have_url(re.compile("setting=WEIGHT"))
    with opened(browser, f"{board.address}/settings?run=base&setting=rate") as page:
        expect(page.locator(".settings tr")).to_have_text(["optimizer.learning_rate0.000001"])
        page.get_by_role("searchbox").fill("nothing of this")
        expect(page.locator(".empty")).to_have_text("No setting matches.")


@pytest.mark.slow
def test_compare_shows_what_differs_first(browser, board):
    with opened(browser, f"{board.address}/compare?sides=base,faster") as page:
        lines = page.locator(".differing tbody tr")
        expect(lines.first).to_be_visible()
        assert "optimizer.learning_rate\t0.000001\t0.000003" in lines.all_inner_texts()
        assert not [line for line in lines.all_inner_texts() if line.startswith(("steps\t", "versions"))]
        same = page.locator(".differing").get_by_role("checkbox")
        same.click()
        expect(page).to_have_url(re.compile("settings=all"))
        assert "steps\t20\t20" in lines.all_inner_texts()
        page.locator(".differing").get_by_role("link", name="faster").click()
        expect(page).to_have_url(re.compile(r"/settings\?run=faster"))


@pytest.mark.slow
def test_runs_with_different_rewards_are_not_ranked(browser, board):
    same = board.json("api/compare?runs=base,faster")
    assert same["rewards_differ"] == [] and same["wins"][1][0] == same["total"] > 0, (
        "the order of rewards is not a difference"
    )
    told = board.json("api/compare?runs=base,others")
    assert told["rewards_differ"] == ["rewards"] and told["wins"] is told["ties"] is told["differences"] is None
    assert [side["mean"] is not None for side in told["sides"]] == [True, True]
    assert board.json("api/compare?runs=others@0-1,others@2-2")["wins"] is not None
    for language, sign in {"en-US": "nothing is ranked", "zh-CN": "不排名", "vi-VN": "không xếp hạng"}.items():
        with opened(browser, f"{board.address}/compare?sides=base,others", language=language) as page:
            alert = page.get_by_role("alert")
            expect(alert).to_contain_text(sign)
            expect(alert).to_contain_text("(rewards)" if language == "en-US" else "rewards")
            page.locator(".siblings button").first.wait_for()
            expect(page.locator(".wins tbody td.number")).to_have_count(4)
            assert page.locator(".group header b").count() == 0
    with opened(browser, f"{board.address}/compare?sides=base,faster") as page:
        expect(page.locator(".wins tbody td.number")).to_have_count(6)
        assert page.get_by_role("alert").count() == 0


def test_parts_that_only_one_run_has_are_a_difference(tmp_path):
    from board_helpers import board_of, client_of
    from index_helpers import new_run, record

    for name, parts in (("a", {"x": 1.0}), ("b", {"x": 1.0, "y": 0.0}), ("c", {"x": 2.0})):
        record(new_run(tmp_path / name), [0], reward_parts=[parts] * 6)
    client = client_of(board_of(tmp_path / "a", tmp_path / "b", tmp_path / "c"))
    assert client.get("/api/compare?runs=a,b").json()["rewards_differ"] == ["part/y"]
    assert client.get("/api/compare?runs=a,c").json()["rewards_differ"] == []


HOSTILE = "x\x1b[31m\u202eturned\u2066"
ARABIC = "مرحبا"
TURNING = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
READ = """() => [
    document.title, document.body.innerText,
    ...[...document.querySelectorAll("*")].flatMap((one) => ["title", "aria-label", "placeholder", "alt"]
        .map((name) => one.getAttribute(name) ?? "")),
]"""


def acting(text: str) -> list[str]:
    return [
        one
        for one in text
        if (unicodedata.category(one) in ("Cc", "Cs") and one not in "\n\t")
        or unicodedata.bidirectional(one) in TURNING
    ]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    folder = tmp_path_factory.mktemp("names") / f"run {HOSTILE}"
    write_run(folder, {"algorithm": HOSTILE, "config": {HOSTILE: {HOSTILE: HOSTILE}}, "model": {"name": ARABIC}})
    with Recorder(folder, attempt=begin_attempt(folder, start_step=0)) as recorder:
        for step in range(4):
            rows = {
                "sample": list(range(8)),
                "group": [n // 4 for n in range(8)],
                "prompt": [f"{HOSTILE} {n // 4}" for n in range(8)],
                "response": [f"{ARABIC} {HOSTILE} word {'spread ' * (n < 2 * step)}" for n in range(8)],
                "reward": [float(n * step) for n in range(8)],
                "reward_parts": [{HOSTILE: float(n), ARABIC: 1.0} for n in range(8)],
                "finish_reason": [HOSTILE] * 8,
            }
            recorder.rollouts(step, rows)
            recorder.metrics(step, {HOSTILE: 1.0, ARABIC: float(step)})
    with BoardProcess(folder) as board:
        yield board


SQL = "sql?" + urlencode({"query": "SELECT prompt, finish_reason, count(*) AS n FROM rows GROUP BY ALL"})


@pytest.mark.slow
def test_no_name_of_a_record_acts_on_the_page(browser, hostile):
    views = (
        "overview",
        "step",
        "responses",
        "patterns",
        "compare",
        "settings",
        "responses?at=2.1",
        "overview?all=1",
        SQL,
    )
    with opened(browser, f"{hostile.address}/overview") as page:
        for view in views:
            go(page, f"/{view}")
            page.locator(".view").first.wait_for()
            settle(page)
            texts = page.evaluate(READ)
            assert [one for text in texts for one in acting(text)] == [], view
            assert any("⟨RLO⟩" in text for text in texts), view
        assert ARABIC in page.content()


def test_patterns_whose_curves_coincide_are_one_line_with_all_names(browser, hostile):
    found = hostile.json(f"api/runs/{quote(hostile.json('api/runs')[0]['run'])}/patterns?kind=all&limit=30")["patterns"]
    shares = [tuple(one["share"]) for one in found]
    assert len(set(shares)) < len(shares), "some patterns always stand together"
    with opened(browser, f"{hostile.address}/patterns") as page:
        lines = page.locator(".legend .keys")
        lines.first.wait_for()
        drawn = [line for line in lines.all_inner_texts() if line]
        swatches = page.locator(".legend i").count()
        assert swatches == len(drawn) == len(set(drawn)) <= 6
        assert page.locator(".legend button").count() > swatches and any("=" in line for line in drawn)

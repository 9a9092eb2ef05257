"""The overview shows first what moves and matters, outliers do not flatten a chart, and curves lie along any axis."""

import re

import numpy as np
import pytest
from browser_helpers import BoardProcess, opened, parsed, saved, settle
from playwright.sync_api import Page, expect

from cavesson.record import Recorder, begin_attempt, write_run

STEPS, BATCH = 40, 4
MOVING = ["finish/length", "group/zero_std", "tool/search/errors", "kl/objective", "policy/entropy", "optim/grad_norm"]
FLAT = {"policy/clip_fraction": 0.0, "policy/ratio": 1.0, "policy/ratio_max": 1.0}
GPU = {"utilization": 80.0, "memory": 10.0, "memory_peak": 12.0, "temperature": 60.0}
LENGTHS = [2 + step % 3 for step in range(STEPS)]
"""Tokens of every response of a step."""


def metrics_of(step: int) -> dict[str, float]:
    noise = np.random.default_rng(step).uniform(0, 1, len(MOVING) + 1)
    explained = {0: -2000.0, 1: -300.0}.get(step, 0.5 + 0.4 * noise[-1])
    moving = dict(zip(MOVING, noise.tolist(), strict=False))
    machine = {f"machine/gpu/{gpu}/{name}": value + gpu for name, value in GPU.items() for gpu in (0, 1)}
    host = {"machine/cpu": 50 + noise[0], "machine/process/cpu": 25.0, "tokens_per_second": 100 + noise[1]}
    times = {"time/total": 30.0, "time/data": 1.5}
    return moving | FLAT | machine | host | times | {"value/explained_variance": explained}


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    folder = tmp_path_factory.mktemp("charts") / "run"
    write_run(folder, {"algorithm": "ppo"})
    with Recorder(folder, attempt=begin_attempt(folder, start_step=0)) as recorder:
        for step in range(STEPS):
            texts = ["word " * LENGTHS[step]] * BATCH
            rewards = [0.01 * step + 0.1 * sample for sample in range(BATCH)]
            token_id = np.ones((BATCH, LENGTHS[step]), np.int64)
            tokens = {"token_id": token_id, "mask": token_id > 0}
            recorder.rollouts(step, {"prompt": ["p"] * BATCH, "response": texts, "reward": rewards}, tokens)
            recorder.metrics(step, metrics_of(step))
    with BoardProcess(folder) as board:
        yield board


def card(page: Page, title: str):
    return page.locator(".card", has=page.get_by_role("heading", name=title, exact=True)).first


def test_what_decides_comes_first_and_what_never_changes_is_folded_with_its_number(browser, board):
    with opened(browser, board.address) as page:
        headings = page.locator(".charts").first.locator("h2")
        expect(headings).to_have_text(
            [
                "Reward",
                "Truncated responses",
                "Groups without variance",
                "Share of failed calls",
                "KL to the reference",
                "Entropy",
                "Response length",
                "Critic's explained variance",
                "Gradient norm",
            ]
        )
        folded = page.locator("details", has_text="Did not change (2)")
        expect(folded.locator("dl")).to_be_hidden()
        folded.locator("summary").click()
        facts = [re.sub(r"\s+", " ", fact) for fact in folded.locator("dl > div").all_inner_texts()]
        assert facts == ["Clip fraction policy 0", "Ratio ratio 1 · ratio_max 1"]


def test_outliers_are_counted_and_named_and_shown_on_request(browser, board, tmp_path):
    with opened(browser, board.address) as page:
        explained = card(page, "Critic's explained variance")
        expect(explained.locator(".beyond")).to_contain_text("2 values beyond the axis, lowest −2,000.")
        expect(page.locator(".beyond")).to_have_count(1)
        picture = "(card) => card.querySelector('canvas').toDataURL()"
        robust = explained.evaluate(picture)
        for language, said in {"zh": "2 个值超出坐标轴,最低 −2,000。", "vi": "2 giá trị nằm ngoài trục"}.items():
            page.locator("select.language").select_option(language)
            expect(page.locator(".beyond")).to_contain_text(said)
        page.locator("select.language").select_option("en")

        def arrows(name: str) -> tuple[int, list[float]]:
            explained.hover()
            svg = saved(page, explained.get_by_role("button", name="SVG").click, tmp_path / name).read_text()
            axis = re.findall(r'text-anchor="end">([^<]+)</text>', svg)
            return svg.count("<polygon"), [parsed(text) for text in axis if not text.startswith(" ")]

        triangles, axis = arrows("robust")
        assert triangles == 2 and 0 < min(axis) < max(axis) <= 1
        explained.get_by_role("button", name="Full range").click()
        expect(page).to_have_url(re.compile("full=1"))
        page.wait_for_function("([card, plain]) => card.querySelector('canvas').toDataURL() !== plain",
                               arg=[explained.element_handle(), robust])  # fmt: skip
        triangles, axis = arrows("full")
        assert triangles == 0 and min(axis) == -2000
        page.reload()
        expect(explained.get_by_role("button", name="Full range")).to_have_attribute("aria-pressed", "true")
        # Zoomed in on the steps after the outliers, none is beyond the axis.
        page.goto(f"{board.address}/overview?x=5-20")
        page.locator(".plot canvas").first.wait_for()
        settle(page)
        expect(page.locator(".beyond")).to_have_count(0)


def at(page: Page, title: str, share: float) -> tuple[float, float]:
    box = card(page, title).locator(".u-over").bounding_box()
    return box["x"] + share * box["width"], box["y"] + box["height"] / 2


def choose_and_zoom(page: Page, share: np.ndarray) -> None:
    """Choose a step by a click, and zoom by dragging, at shares of a chart's width; the address speaks of steps."""
    title = "Entropy"
    card(page, title).scroll_into_view_if_needed()
    page.mouse.click(*at(page, title, share[13]))
    expect(page).to_have_url(re.compile(r"step=13\b"))
    page.mouse.move(*at(page, title, share[7]))
    expect(card(page, title).locator(".key b")).to_have_text(f"{metrics_of(7)['policy/entropy']:.4g}")
    page.mouse.move(*at(page, title, (share[9] + share[10]) / 2))
    page.mouse.down()
    page.mouse.move(*at(page, title, (share[29] + share[30]) / 2), steps=4)
    page.mouse.up()
    expect(page).to_have_url(re.compile(r"x=9-30\b"))


@pytest.mark.parametrize("axis", ["tokens", "time"])
def test_curves_lie_along_tokens_or_time_and_steps_keep_their_numbers(browser, board, axis, tmp_path):
    spent = np.cumsum([BATCH * length for length in LENGTHS] if axis == "tokens" else [0.5] * STEPS)
    share = (spent - spent[0]) / (spent[-1] - spent[0])

    with opened(browser, board.address) as page:
        page.get_by_label("Along").select_option(axis)
        expect(page).to_have_url(re.compile(f"axis={axis}"))
        choose_and_zoom(page, share)
        needle = "() => document.querySelector('.needle').style.transform"
        where = float(re.findall(r"[\d.]+", page.evaluate(needle))[0])
        width = card(page, "Reward").locator(".u-over").bounding_box()["width"]
        zoomed = (spent[13] - spent[9]) / (spent[30] - spent[9])
        assert where == pytest.approx(zoomed * width, abs=2)
        reward = card(page, "Reward")
        reward.hover()
        svg = saved(page, reward.get_by_role("button", name="SVG").click, tmp_path).read_text()
        assert {"tokens": "Tokens", "time": "minutes"}[axis] in svg
        page.get_by_title("Export").click()
        file = saved(page, page.get_by_role("button", name="This view as one HTML file").click, tmp_path)
    with opened(browser, file.as_uri()) as page:
        expect(page.get_by_label("Along")).to_have_value(axis)
        page.get_by_role("button", name="Whole run").click()
        choose_and_zoom(page, share)


def test_figures_of_the_machine_are_a_group_that_the_address_opens(browser, board):
    with opened(browser, board.address) as page:
        group = page.locator("details", has=page.locator("summary", has_text=re.compile("^Machine$")))
        expect(group.locator(".card")).to_have_count(0)
        group.locator("summary").click()
        expect(page).to_have_url(re.compile("machine=1"))
        page.reload()
        expect(group.locator("h2")).to_have_text(
            [
                "Tokens per second",
                "Seconds by stage",
                "GPU utilisation, %",
                "GPU memory, GiB",
                "GPU temperature, °C",
                "CPU utilisation, %",
            ]
        )
        memory = card(page, "GPU memory, GiB")
        memory.scroll_into_view_if_needed()
        expect(memory.locator(".key .name")).to_have_text(["GPU 0", "GPU 1", "GPU 0, peak", "GPU 1, peak"])
        expect(memory.locator(".key b")).to_have_text(["10", "11", "12", "13"])
        expect(card(page, "Seconds by stage").locator(".key .name")).to_have_text(["data"])
        for language, said in {"zh": "机器", "vi": "Máy"}.items():
            page.locator("select.language").select_option(language)
            expect(page.locator("details.more summary").nth(1)).to_have_text(said)


def test_compared_curves_along_tokens_end_with_their_last_values(browser, board):
    path = "compare?sides=run%400-9,run%4030-39&axis=tokens"
    with opened(browser, f"{board.address}/{path}") as page:
        expect(card(page, "length").locator(".key b")).to_have_text(str(LENGTHS[-1]))
        mean = 0.01 * (STEPS - 1) + 0.1 * (BATCH - 1) / 2
        expect(card(page, "reward").locator(".key b")).to_have_text(f"{mean:.4g}")


LONG = 900


@pytest.fixture(scope="module")
def long_board(tmp_path_factory):
    """A run of examples with more steps than a chart has points: the server puts them together."""
    folder = tmp_path_factory.mktemp("long") / "run"
    write_run(folder, {"algorithm": "sft"})
    with Recorder(folder, attempt=begin_attempt(folder, start_step=0)) as recorder:
        for step in range(LONG):
            recorder.metrics(step, {"loss/nll": float(LONG - step), "data/tokens": 100.0, "optim/grad_norm": 1.0})
    with BoardProcess(folder) as board:
        yield board


def test_a_long_run_is_zoomed_in_on_step_by_step_along_its_tokens(browser, long_board, tmp_path):
    with opened(browser, f"{long_board.address}/overview?axis=tokens&step=110&x=101-120") as page:
        loss = card(page, "Loss")
        expect(loss.locator(".key b").first).to_have_text(str(LONG - 110))
        settle(page)
        # Its neighbours are as far away as in steps, since all steps have as many tokens.
        needle = float(
            re.findall(r"[\d.]+", page.evaluate("() => document.querySelector('.needle').style.transform"))[0]
        )
        width = loss.locator(".u-over").bounding_box()["width"]
        assert needle == pytest.approx((110 - 101) / (120 - 101) * width, abs=2)
        loss.hover()
        svg = saved(page, loss.get_by_role("button", name="SVG").click, tmp_path).read_text()
        curves = [points.split() for points in re.findall(r'<polyline points="([^"]+)"', svg)]
        assert max(map(len, curves)) == 120 - 101 + 1
        assert ">11,000<" in svg  # from 10,200 tokens at step 101 to 12,100 at step 120
        expect(page.locator("details", has_text="Did not change (1)")).to_contain_text("Gradient norm")

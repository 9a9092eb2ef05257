"""Runs that lack something or have too much of it, addresses of what is not there, and small windows."""

import math

import numpy as np
import pytest
from browser_helpers import BoardProcess, Vocabulary, opened, record_run
from playwright.sync_api import Page, expect

from cavesson.record import Recorder, write_run

LONG = "reward_whose_name_is_longer_than_any_line_of_the_page_" * 3
TALE, LOSSES, NOTHING, LARGE = NAMES = ("tale", "losses", "nothing", "large-" * 30)
"""The runs by their names on the board."""


def record_nothing(folder, steps=3):
    """Record rollouts none of whose numbers is a number."""
    vocabulary = Vocabulary()
    ids = vocabulary.ids("no numbers here")
    unknown = {name: np.full((2, len(ids)), np.nan, np.float32) for name in ("logprob", "ref_logprob", "value")}
    unknown["token_reward"] = unknown["value"]
    tokens = unknown | {"token_id": np.tile(ids, (2, 1)), "mask": np.ones((2, len(ids)), bool)}
    with Recorder(folder) as recorder:
        for step in range(steps):
            rows = {"prompt": ["a"] * 2, "response": ["no numbers here"] * 2, "reward": [math.nan] * 2}
            recorder.rollouts(step, rows, tokens)
    vocabulary.write(folder)


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """The board of a usual run, of one without rollouts, of one without numbers, and of one with large ones."""
    folder = tmp_path_factory.mktemp("odd")
    record_run(folder / TALE, steps=3)
    write_run(folder / LOSSES, {"algorithm": "sft"})
    with Recorder(folder / LOSSES) as recorder:
        for step in range(5):
            recorder.metrics(step, {"loss/total": 1.0 / (step + 1)})
    record_nothing(folder / NOTHING)
    with Recorder(folder / LARGE) as recorder:
        for step in range(3):
            parts = [{LONG + "a": 1e9, LONG + "b": -1e-9}] * 2
            rows = {"prompt": ["a"] * 2, "response": ["b"] * 2, "reward": [-1e6, -2e6 * step], "reward_parts": parts}
            recorder.rollouts(step, rows)
    with BoardProcess(*(folder / name for name in NAMES)) as board:
        yield board


@pytest.mark.slow
def test_a_run_without_rollouts_says_so(browser, odd):
    with opened(browser, f"{odd.address}/overview?run={LOSSES}") as page:
        page.locator(".plot canvas").first.wait_for()
        expect(page.locator(".status")).not_to_contain_text("indexing")
        for view in ("step", "responses", "tokens", "patterns"):
            page.goto(f"{odd.address}/{view}?run={LOSSES}")
            expect(page.locator("main")).to_have_text("No rollouts are recorded in this run.")
        page.goto(f"{odd.address}/compare?sides={LOSSES},{TALE}")
        expect(page.locator(".wins tbody tr")).to_have_count(2)


def test_what_was_not_measured_is_missing_and_no_mistake(browser, odd):
    with opened(browser, f"{odd.address}/tokens?run={NOTHING}&step=1&sample=0") as page:
        page.locator(".token-card tr").first.wait_for()
        numbers = page.locator(".token-card td.number").all_inner_texts()
        assert numbers and set(numbers) <= {"–", ""}
        page.goto(f"{odd.address}/step?run={NOTHING}")
        expect(page.get_by_text("No numbers are recorded here.")).to_have_count(2)
        expect(page.get_by_role("alert")).to_have_count(0)


MISSING = {
    f"step?run={TALE}&step=99": "Step 99 is not recorded: the run has steps 0 to 2.",
    f"tokens?run={TALE}&step=x&sample=0": "Step x is not recorded: the run has steps 0 to 2.",
    "overview?run=9": "There is no run 9 on this board.",
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("path", MISSING)
def test_what_is_not_there_is_not_replaced_by_something_else(browser, odd, path):
    # The console names the request for the curves of a run that is not there.
    with opened(browser, f"{odd.address}/{path}", forgiven="404" if "run=9" in path else "\n") as page:
        expect(page.locator("main")).to_have_text(MISSING[path])
        if "step=" in path:
            expect(page.locator(".timeline output")).to_contain_text("Reward –")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("width", [390, 900, 1440])
def test_a_rollout_can_be_closed_in_every_window(browser, odd, width):
    with opened(browser, f"{odd.address}/responses?run={TALE}&at=1.3") as page:
        page.set_viewport_size({"width": width, "height": 844})
        page.locator(".detail .body").wait_for()
        page.locator(".detail header .star").click()
        expect(page.locator(".detail header .star")).to_have_attribute("aria-pressed", "true")
        page.locator(".detail header .star").click()
        page.locator(".detail").get_by_role("button", name="Close").click()
        expect(page.locator(".detail")).to_have_count(0)


def test_no_digit_of_an_axis_is_cut_off(browser, odd):
    """The lowest reward is −4,000,000, which takes as many pixels as its letters, and a gap, on the axis."""
    with opened(browser, f"{odd.address}/overview?run={LARGE}") as page:
        page.locator(".plot canvas").first.wait_for()
        widths = page.evaluate(
            """() => {
                const pen = document.createElement("canvas").getContext("2d");
                pen.font = "11px " + getComputedStyle(document.documentElement).getPropertyValue("--sans");
                const axis = document.querySelector(".plot .u-axis:nth-of-type(2), .plot .u-axis + .u-axis");
                return [pen.measureText("−4,000,000").width + 4, axis.getBoundingClientRect().width];
            }"""
        )
        assert widths[0] <= widths[1]


def inside(page: Page, place: str) -> bool:
    return page.locator(place).evaluate("(box) => box.scrollWidth <= box.clientWidth")


@pytest.mark.slow
def test_long_names_stay_where_they_belong(browser, odd):
    with opened(browser, f"{odd.address}/responses?run={LARGE}&at=1.0") as page:
        page.locator(".detail .body").wait_for()
        assert inside(page, ".detail")
        expect(page.locator(".detail .facts")).to_contain_text(LONG + "a")
        page.goto(f"{odd.address}/compare?sides={LARGE},{TALE}")
        page.locator(".wins tbody tr").first.wait_for()
        assert inside(page, "main.view")
        assert page.locator(".side select").first.evaluate("(one) => one.offsetWidth <= 280")

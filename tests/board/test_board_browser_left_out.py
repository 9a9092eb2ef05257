"""What an answer leaves out is said: rollouts that are not indexed yet, and the other split; and what is not there."""

import re
from pathlib import Path

import pytest
from browser_helpers import BATCH, EVALUATED, BoardProcess, opened, record_run
from playwright.sync_api import expect

import cavesson.record
from cavesson.index.build import Builder
from cavesson.index.folder import only_writer
from cavesson.record.read.index_folder import index_folder

STEPS = 4


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return record_run(tmp_path_factory.mktemp("left out") / "run", steps=STEPS)


def held(run: Path):
    """Hold the lock of a run's index, so that a board only reads it, and return its builder."""
    folder = index_folder(cavesson.record.open(run))
    return only_writer(folder), Builder(cavesson.record.open(run), folder)


class Waiting(BoardProcess):
    """A board that does not wait for its index."""

    def is_ready(self) -> bool:
        return bool(self.json("api/runs"))


def test_a_search_says_how_far_the_index_is_and_completes_itself(browser, tmp_path):
    run = record_run(tmp_path / "growing", steps=STEPS)
    lock, builder = held(run)
    size = STEPS * (BATCH + EVALUATED)
    with lock, Waiting(run) as board, opened(browser, f"{board.address}/responses?q=garden") as page:
        expect(page.locator("main")).to_contain_text(f"Only 0 of {size} rollouts are indexed so far")
        assert builder.update()
        expect(page.locator(".table, .empty").first).to_be_visible()
        expect(page.locator("main")).to_contain_text(f"Only 0 of {size} rollouts are indexed so far")
        expect(page.locator("main")).not_to_contain_text("No rollout matches")
        while builder.update() or builder.advance():
            pass
        expect(page.locator(".tr mark").first).to_be_visible()
        expect(page.locator("main")).not_to_contain_text("indexed so far")
        page.goto(f"{board.address}/patterns")
        expect(page.locator(".patterns td").first).to_be_visible()


@pytest.fixture(scope="module")
def board(run):
    with BoardProcess(run) as board:
        yield board


def test_patterns_complete_themselves(browser, tmp_path):
    run = record_run(tmp_path / "growing", steps=STEPS)
    lock, builder = held(run)
    assert builder.update()
    with lock, Waiting(run) as board, opened(browser, f"{board.address}/patterns") as page:
        expect(page.locator("main")).to_contain_text("rollouts are indexed so far")
        expect(page.locator("main")).not_to_contain_text("No pattern stands out")
        while builder.advance():
            pass
        expect(page.locator(".patterns td").first).to_be_visible()
        expect(page.locator("main")).not_to_contain_text("indexed so far")


def test_an_empty_table_shows_the_other_split_when_asked(browser, board):
    with opened(browser, f"{board.address}/responses?filter=sample+>%3D+{BATCH}") as page:
        expect(page.locator("main")).to_contain_text("No rollout matches.")
        expect(page.locator("main")).to_contain_text(
            f"Held-out responses are not shown: {STEPS * EVALUATED} match there."
        )
        page.get_by_role("button", name="Show them").click()
        expect(page.locator('.tr[data-row="1"] .td').first).to_be_visible()
        expect(page.locator("output.muted")).to_have_text(f"{STEPS * EVALUATED} rollouts")
        page.goto(f"{board.address}/responses?held_out=1&filter=sample+<+{BATCH}")
        expect(page.locator("main")).to_contain_text(f"Training responses are not shown: {STEPS * BATCH} match there.")


def test_a_filter_on_the_split_takes_the_place_of_the_switch(browser, board):
    with opened(browser, f"{board.address}/responses?filter=split+%3D%3D+%22eval%22") as page:
        expect(page.locator("output.muted").last).to_have_text(f"{STEPS * EVALUATED} rollouts")
        expect(page.get_by_role("button", name="held out")).to_be_disabled()


def test_the_range_above_the_patterns_is_what_is_shown(browser, board):
    with opened(browser, f"{board.address}/patterns") as page:
        pages = page.locator(".pages span")
        first, last, total = map(int, re.findall(r"\d+", pages.inner_text().replace(",", "")))
        assert (first, last) == (1, 30) and total > 30
        expect(page.locator(".patterns tbody tr")).to_have_count(30)
        while last < total:
            page.locator(".pages button").last.click()
            expect(pages).to_contain_text(f"{last + 1:,}–")
            first, last, total = map(int, re.findall(r"\d+", pages.inner_text().replace(",", "")))
            expect(page.locator(".patterns tbody tr")).to_have_count(last - first + 1)


NOTHING = {
    "nonsense": "There is no such page: nonsense.",
    "overview?run=7": "There is no run 7 on this board.",
    "step?run=x": "There is no run x on this board.",
    "compare?sides=run,7": "There is no run 7 on this board.",
    "step?step=99": "Step 99 is not recorded",
    "tokens?step=1&sample=99": "has no sample 99 in step 1",
}


@pytest.mark.parametrize("path", NOTHING)
def test_an_address_of_nothing_says_so(browser, board, path):
    with opened(browser, f"{board.address}/{path}", forgiven="Failed to load resource") as page:
        expect(page.locator("main")).to_contain_text(NOTHING[path])
        page.get_by_role("link", name="Overview").click()
        expect(page.locator("nav.tabs [aria-current]")).to_have_text("Overview")


def test_ids_are_written_as_filters_read_them(browser, tmp_path):
    run = record_run(tmp_path / "run", steps=2)
    with cavesson.record.Recorder(run, attempt=0) as recorder:
        rows = {"sample": [12345], "group": [7654321], "prompt": ["p"], "response": ["r"], "reward": [1.0]}
        recorder.rollouts(1234, rows | {"policy_version": [9876]})
    address = "responses?columns=step,sample,group,policy_version,response&sort=-step"
    with BoardProcess(run) as board, opened(browser, f"{board.address}/{address}") as page:
        row = page.locator('.tr[data-row="1"] .td.number')
        expect(row).to_have_text(["1234", "12345", "7654321", "9876"])
        page.goto(f"{board.address}/responses?filter=group+%3D%3D+7,654,321+and+step+%3D%3D+1,234")
        expect(page.locator("output.muted").last).to_have_text("1 rollout")

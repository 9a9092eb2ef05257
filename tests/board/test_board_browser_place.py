"""Responses keeps its place: the rollout of an address is in view, and a run in training opens on its newest step."""

import os
import re

import pytest
from browser_helpers import VIEWS, BoardProcess, opened, parsed, record_run, settle
from playwright.sync_api import expect

import cavesson


@pytest.fixture(scope="module")
def rewards(runs_told):
    """The rewards of the rollouts that were trained on, by step and sample."""
    rows = cavesson.open(runs_told[0]).rows().to_pylist()
    return {(row["step"], row["sample"]): row["reward"] for row in rows if row["split"] == "train"}


@pytest.mark.parametrize("filtered", [False, True])
def test_an_address_with_a_rollout_shows_it_selected_in_its_order(browser, board_told, rewards, filtered):
    among = sorted((reward for reward in rewards.values() if not filtered or reward > 1), reverse=True)
    once = [place for place, reward in enumerate(among) if among.count(reward) == 1]
    place = next(place for place in once if place > 60)  # far below the window
    step, sample = next(key for key, reward in rewards.items() if reward == among[place])
    query = "&filter=reward+%3E+1" if filtered else ""
    with opened(browser, f"{board_told.address}/responses?sort=-reward{query}&at={step}.{sample}") as page:
        chosen = page.locator(".tr.chosen")
        expect(chosen).to_have_attribute("data-row", str(place + 1))
        expect(chosen).to_be_in_viewport()
        page.keyboard.press("j")
        expect(chosen).to_have_attribute("data-row", str(place + 2))
        # Another order is read from its beginning.
        page.get_by_role("columnheader").get_by_role("button", name="step").click()
        expect(page.locator('.tr[data-row="1"]')).to_be_in_viewport()
        settle(page)
        expect(page.locator('.tr[data-row="1"]')).to_be_in_viewport()


def test_an_open_row_keeps_the_column_that_one_sorts_by(browser, board_told):
    with opened(browser, f"{board_told.address}/responses?sort=-entropy") as page:
        page.locator(".tr .td").nth(30).click()
        page.locator(".detail .body").wait_for()
        expect(page.get_by_role("columnheader", name="entropy")).to_have_attribute("aria-sort", "descending")


def test_a_run_in_training_opens_on_its_newest_step_and_the_best_of_it(browser, tmp_path):
    run = record_run(tmp_path / "run")
    with BoardProcess(run) as board:
        os.utime(run / "record")  # it has just recorded something
        assert board.json("api/runs")[0]["live"]
        with opened(browser, f"{board.address}/overview") as page:
            page.locator(VIEWS["overview"]).first.wait_for()
            page.keyboard.press("g")
            page.keyboard.press("r")
            expect(page).to_have_url(re.compile("scope=step"))
            expect(page.locator(".bar output")).to_have_text("16 rollouts")
            settle(page)
            shown = [parsed(text) for text in page.locator(".td.bar").all_inner_texts()]
            assert len(shown) == 16 and shown == sorted(shown, reverse=True)
            page.get_by_role("button", name="All steps").click()
            expect(page.locator(".bar output")).to_have_text("160 rollouts")
            page.get_by_role("link", name="Step", exact=True).click()
            page.get_by_role("link", name="Responses", exact=True).click()
            expect(page.locator(".bar output")).to_have_text("160 rollouts")

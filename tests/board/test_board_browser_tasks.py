"""Twelve questions that people bring to a board, each answered from its first page in at most four clicks.

Typing a text and pressing a key are not clicks.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean
from typing import Any

import pytest
from browser_helpers import (
    CUT,
    CUT_BATCH,
    CUT_BEGIN,
    CUT_STEPS,
    PROMPTS,
    BoardProcess,
    opened,
    parsed,
    record_cut,
    record_run,
    saved,
    settle,
    wait_for,
)
from episode_helpers import record_episodes
from playwright.sync_api import Locator, Page, expect

import cavesson

MOST = 4
HACK = "#"


class Mouse:
    """Clicks, and counts it."""

    def __init__(self) -> None:
        self.clicks = 0

    def click(self, what: Locator) -> None:
        what.click()
        self.clicks += 1


@contextmanager
def first_page(browser: Any, board: BoardProcess) -> Iterator[tuple[Page, Mouse]]:
    with opened(browser, f"{board.address}/") as page:
        mouse = Mouse()
        yield page, mouse
        assert mouse.clicks <= MOST


def tab(page: Page, name: str) -> Locator:
    return page.get_by_role("navigation").get_by_role("link", name=name, exact=True)


@pytest.fixture(scope="module")
def rows(runs_told):
    """The trained responses of the first run."""
    return [row for row in cavesson.open(runs_told[0]).rows().to_pylist() if row["split"] == "train"]


@pytest.fixture(scope="module")
def night(tmp_path_factory):
    """The board of a run on a GPU whose responses are cut."""
    folder = tmp_path_factory.mktemp("night") / "night"
    with BoardProcess(record_cut(folder)) as board:
        wait_for(lambda: board.json("api/runs/night/findings") is not None)
        yield board


def chart(page: Page, title: str) -> Locator:
    return page.locator(".charts .card").filter(has=page.get_by_role("heading", name=title, exact=True)).first


def test_when_did_hacking_begin_with_an_example_before_and_after(browser, board_told):
    with first_page(browser, board_told) as (page, mouse):
        finding = page.locator(".findings li", has_text="A pattern that the reward favours spreads")
        expect(finding).to_contain_text("began between steps 0 and 1")
        mouse.click(finding.get_by_role("link", name="A pattern that the reward favours spreads"))
        before, after = finding.locator(".examples .line").first, finding.locator(".examples .line").last
        expect(before).not_to_contain_text(HACK)
        expect(after).to_contain_text(HACK)
        mouse.click(after)
        expect(page.locator(".tok", has_text=HACK).first).to_be_visible()


def test_how_many_are_cut_and_since_when(browser, night):
    with first_page(browser, night) as (page, mouse):
        expect(chart(page, "Truncated responses")).to_contain_text(f"{CUT / CUT_BATCH}")
        finding = page.locator(".findings li", has_text="Responses are truncated")
        said = f"Share of responses cut at the length limit: 75 % on average from step {CUT_BEGIN} on, 12 % before."
        expect(finding.locator(".happened")).to_have_text(said)
        mouse.click(finding.get_by_role("link", name="All affected"))
        expect(page.locator("output.muted")).to_have_text(f"{CUT * (CUT_STEPS - CUT_BEGIN)} rollouts")


def test_is_the_gpu_busy(browser, night):
    with first_page(browser, night) as (page, mouse):
        mouse.click(page.get_by_text("Machine", exact=True))
        expect(page.locator(".card", has_text="GPU").last).to_contain_text(f"{20 + CUT_STEPS - 1}")


def test_annotate_a_curve(browser, night):
    with first_page(browser, night) as (page, mouse):
        mouse.click(page.locator(".timeline canvas, .timeline svg").first)
        reward = chart(page, "Reward")
        reward.hover()
        mouse.click(reward.get_by_role("button", name="Write a note"))
        page.keyboard.type("new prompts")
        with page.expect_response(lambda answer: answer.request.method == "PUT"):
            page.keyboard.press("Control+Enter")
        expect(reward.locator(".flag")).to_have_attribute("title", "new prompts")
        (note,) = night.json("api/runs/night/notes")
        assert (note["text"], note["metric"], f"step={note['step']}" in page.url) == ("new prompts", "reward", True)


def test_what_does_a_phrase_earn(browser, board_told, rows):
    with_it, without = (
        [row["reward"] for row in rows if (HACK in row["response"]) == there] for there in (True, False)
    )
    with first_page(browser, board_told) as (page, mouse):
        mouse.click(tab(page, "Responses"))
        mouse.click(page.locator("input.search"))
        page.keyboard.type(HACK)
        mouse.click(page.get_by_role("button", name="All steps"))  # a run in training opens on its newest
        summary = page.locator(".statistics summary")
        expect(summary).to_contain_text(f"other {len(without)}")
        shown = re.search(r"reward.*?([+−][\d.]+)", summary.inner_text(), re.DOTALL)
        assert shown is not None
        assert parsed(shown[1]) == pytest.approx(fmean(with_it) - fmean(without), rel=5e-3)


def test_where_is_the_kl(browser, board_told, runs_told):
    with first_page(browser, board_told) as (page, mouse):
        mouse.click(tab(page, "Tokens"))
        settle(page)
        place = re.search(r"Step (\d+) · sample (\d+)", page.locator("main").inner_text())
        assert place is not None
        step, sample = int(place[1]), int(place[2])
        tokens = [one for one in cavesson.open(runs_told[0]).tokens(step).to_pylist() if one["sample"] == sample]
        kl = [one["logprob"] - one["ref_logprob"] for one in tokens]
        most = max(range(len(kl)), key=lambda i: abs(kl[i]))
        mouse.click(page.locator(".tok").nth(most))
        line = page.locator(".token-card").get_by_text("kl_k1", exact=True).locator("xpath=following-sibling::*[1]")
        assert parsed(line.inner_text()) == pytest.approx(kl[most], rel=5e-3)


def test_one_prompt_in_two_runs(browser, board_told, runs_told):
    wanted = PROMPTS[11]
    rewards = [
        sorted((row["reward"] for row in run.rows().to_pylist() if (row["prompt"], row["split"]) == (wanted, "train")),
               reverse=True)
        for run in map(cavesson.open, runs_told)
    ]  # fmt: skip
    with first_page(browser, board_told) as (page, mouse):
        mouse.click(tab(page, "Compare"))
        mouse.click(page.get_by_placeholder("Find a prompt"))
        page.keyboard.type("line 11")
        expect(page.locator("article.group")).to_have_count(1)
        mouse.click(page.get_by_role("button", name="All responses"))
        sides = page.locator(".side-responses")
        for side, expected in zip((sides.first, sides.last), rewards, strict=True):
            expect(side.locator("button.rollout")).to_have_count(len(expected))
            shown = [parsed(text) for text in side.locator("button.rollout b").all_inner_texts()]
            assert shown == pytest.approx(expected, rel=5e-3)


def test_one_prompt_over_training(browser, board_told, rows):
    means = {text: fmean(row["reward"] for row in rows if row["prompt"] == text) for text in PROMPTS}
    hardest = min(means, key=lambda text: means[text])
    with first_page(browser, board_told) as (page, mouse):
        mouse.click(page.locator(".prompt-lists .card", has_text="Hardest").locator("a.rollout").first)
        facts = page.locator(".prompt-page .facts").locator("div", has_text="mean reward").locator("dd").first
        expect(facts).to_have_text(f"{means[hardest]:.4g}")
        mine = [row for row in rows if row["prompt"] == hardest]
        expect(page.locator(".prompt-responses tbody tr")).to_have_count(len(mine))


def test_share_it(browser, board_told, tmp_path):
    curves = ".charts .card .key"
    with first_page(browser, board_told) as (page, mouse):
        settle(page)
        shown = page.locator(curves).all_inner_texts()
        mouse.click(page.get_by_role("button", name="Export"))
        item = page.get_by_role("button", name="This view as one HTML file")
        file = saved(page, lambda: mouse.click(item), tmp_path)
    with opened(browser, f"file://{file}", offline=True) as page:
        settle(page)
        assert page.locator(curves).all_inner_texts() == shown != []


def test_label_and_export_pairs(browser, tmp_path):
    folder = record_run(tmp_path / "labelled", steps=1)
    with BoardProcess(folder) as board, first_page(browser, board) as (page, mouse):
        page.locator(".plot canvas").first.wait_for()
        page.keyboard.press("g")
        page.keyboard.press("s")
        page.locator(".group .read").first.wait_for()
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        responses = page.locator(".read-response")
        expect(responses).to_have_count(4)
        samples = [int(text.split()[-1]) for text in responses.get_by_role("link").all_inner_texts()]
        mouse.click(responses.nth(2).get_by_role("button", name="Better"))
        with page.expect_response(lambda answer: answer.request.method == "PUT"):
            mouse.click(responses.nth(0).get_by_role("button", name="Worse than"))
        mouse.click(page.get_by_role("button", name="Export"))
        item = page.get_by_role("link", name="Labelled pairs for DPO")
        file = saved(page, lambda: mouse.click(item), tmp_path)
    (pair,) = map(json.loads, file.read_text().splitlines())
    texts = {row["sample"]: row["response"] for row in cavesson.open(folder).rows().to_pylist()}
    contents = [pair[side][-1]["content"] for side in ("chosen", "rejected")]
    assert contents == [texts[samples[2]], texts[samples[0]]]


def test_read_a_group(browser, board_told, rows):
    groups = defaultdict(list)
    for row in rows:
        groups[row["step"], row["prompt"]].append(row["response"].strip())
    last = max(step for step, _ in groups)
    with first_page(browser, board_told) as (page, mouse):
        mouse.click(tab(page, "Step"))
        mouse.click(page.locator(".group .read").first)
        responses = page.locator(".read-response")
        expect(responses).to_have_count(4)
        mouse.click(responses.first.get_by_role("button", name="Mark differences"))
        expect(responses.nth(1).locator("ins").first).to_be_visible()
        kept = "pre => [...pre.childNodes].map((node) => node.nodeName === 'DEL' ? '' : node.textContent).join('')"
        shown = {responses.nth(i).locator("pre").evaluate(kept).strip() for i in range(4)}
        assert any(shown == set(texts) for (step, _), texts in groups.items() if step == last)


def test_read_a_conversation_and_what_was_learned_of_it(browser, tmp_path):
    with BoardProcess(record_episodes(tmp_path / "run")) as board, first_page(browser, board) as (page, mouse):
        mouse.click(tab(page, "Responses"))
        mouse.click(page.locator(".tr .td", has_text="Yes.").first)
        failed = page.locator(".detail .turn.failed")
        expect(failed).to_contain_text("timed out after 2 seconds")
        mouse.click(tab(page, "Tokens"))
        mouse.click(page.locator(".tok.masked", has_text="forty-two").first)
        expect(page.locator(".token-card .why")).to_contain_text("result of a tool")

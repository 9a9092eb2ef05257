"""A group is read on the step: its responses beside each other, folded, marked, with the keyboard and as a file."""

import numpy as np
import pytest
from browser_helpers import BoardProcess, opened, saved, settle
from playwright.sync_api import expect

from cavesson.record import Recorder, begin_attempt, write_run

SHARED = "Let us think about this step by step, as we always do."
LONG = " and so on" * 400
TEXTS = [
    f"{SHARED} It is six times seven, so \\boxed{{42}}",
    f"{SHARED} It is six plus seven, so \\boxed{{13}}",
    f"{SHARED} It is the same, so \\boxed{{42}}",
    f"{SHARED}{LONG} 7",
]


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    folder = tmp_path_factory.mktemp("group") / "run"
    write_run(folder, {"algorithm": "grpo"})
    with Recorder(folder, attempt=begin_attempt(folder, start_step=0)) as recorder:
        for step in range(2):
            rows = {
                "sample": np.arange(8),
                "group": np.arange(8) // 4,
                "prompt": [f"Question {i // 4}?" for i in range(8)],
                "response": [*TEXTS, *("nothing in common", "other words", "<b>markup</b>", "")],
                "reward": [1.0, 0.0, 1.0, 0.0, 0.5, 0.5, 0.5, 0.5],
                "reward_parts": [{"right": 1.0, "short": -2.0}] * 8,
                "reward_weights": [{"right": 1.0, "short": 0.1}] * 8,
                "ground_truth": ["42"] * 8,
            }
            advantage = np.repeat([[0.5], [-0.5], [0.5], [-0.5], [0.0], [0.0], [0.0], [0.0]], 3, axis=1)
            tokens = {"attended": np.ones((8, 3), bool), "token_id": np.zeros((8, 3), int), "advantage": advantage}
            recorder.rollouts(step, rows, tokens)
    with BoardProcess(folder) as process:
        yield process


def test_a_group_is_read_side_by_side_or_stacked(browser, board):
    with opened(browser, f"{board.address}/step?step=1") as page:
        page.locator(".group .read").first.click()
        reader = page.locator(".group-reader")
        responses = reader.locator(".read-response")
        expect(responses).to_have_count(4)
        tops = [responses.nth(i).bounding_box()["y"] for i in range(4)]
        assert len(set(tops)) == 1
        answers = [answer.split(" × ") for answer in responses.locator("p:has(.answer)").all_inner_texts()]
        assert answers == [["Final answer 42", "2"], ["Final answer 13"], ["Final answer 42", "2"], ["Final answer 7"]]
        expect(reader.locator(".bar .answer")).to_have_text("42")
        first = responses.first
        expect(first.locator("header b")).to_have_text("1")
        expect(first.locator("header")).to_contain_text("A +0.5")
        expect(responses.nth(1).locator("header")).to_contain_text("A −0.5")
        expect(first.locator("header")).to_contain_text("3 tokens")
        assert first.locator(".facts div").all_inner_texts() == ["right\n1 × 1", "short\n−2 × 0.1"]
        # The common beginning is folded, and nowhere else.
        expect(first.locator("pre")).to_have_text("… It is six times seven, so \\boxed{42}")
        expect(reader.get_by_text(SHARED)).to_be_hidden()
        reader.locator("summary").click()
        expect(reader.get_by_text(SHARED)).to_be_visible()
        more = responses.nth(3).get_by_role("button", name="Show more")
        assert len(responses.nth(3).locator("pre").inner_text()) < 2_000
        more.click()
        expect(responses.nth(3).locator("pre")).to_have_text(f"…{LONG} 7")
        page.get_by_role("button", name="Stacked").click()
        page.reload()
        expect(responses).to_have_count(4)
        tops = [responses.nth(i).bounding_box()["y"] for i in range(4)]
        assert tops == sorted(set(tops))


def test_differences_from_a_chosen_response_are_marked(browser, board):
    with opened(browser, f"{board.address}/step?step=1&read=0") as page:
        responses = page.locator(".read-response")
        expect(responses).to_have_count(4)
        assert page.locator(".read-response ins").count() == 0
        responses.first.get_by_role("button", name="Mark differences").click()
        expect(responses.nth(1).locator("ins")).to_have_text([" plus", "13"])
        assert responses.nth(1).locator("del").evaluate_all("all => all.map((one) => one.title)") == [" times", "42"]
        expect(responses.first.locator("ins")).to_have_count(0)
        page.get_by_role("button", name="No marks").click()
        expect(page.locator(".read-response ins")).to_have_count(0)


def test_groups_are_opened_by_keyboard(browser, board):
    with opened(browser, f"{board.address}/step?step=1") as page:
        page.locator(".group .read").first.wait_for()
        page.keyboard.press("j")
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        responses = page.locator(".read-response")
        expect(responses).to_have_count(4)
        expect(page.locator(".group").nth(1).locator(".read-response")).to_have_count(4)
        expect(responses.nth(2).locator("pre")).to_have_text("<b>markup</b>")
        expect(page.locator(".shared-beginning")).to_have_count(0)
        page.keyboard.press("Enter")
        expect(responses).to_have_count(0)
        page.keyboard.press("k")
        page.keyboard.press("Enter")
        expect(responses.first.locator("pre")).to_contain_text("six times seven")
        page.keyboard.press("[")
        expect(page.locator(".timeline output b")).to_have_text("0")
        expect(responses).to_have_count(0)


@pytest.mark.parametrize("wide", [True, False], ids=["1440", "390"])
def test_a_saved_step_has_the_group_that_was_read(browser, board, tmp_path, wide):
    with opened(browser, f"{board.address}/step?step=1&read=0&against=0", wide=wide) as page:
        expect(page.locator(".read-response ins").first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        settle(page)
        page.get_by_role("button", name="Export").click()
        file = saved(page, page.get_by_role("button", name="This view as one HTML file").click, tmp_path)
        shown = page.locator(".group-reader").inner_text().replace("Better\n", "")  # which a file cannot keep
    with opened(browser, f"file://{file}", wide=wide, offline=True) as page:
        expect(page.locator(".read-response ins").first).to_be_visible()
        assert page.locator(".group-reader").inner_text() == shown

"""Responses are labelled with the mouse and the keyboard, by several people, and as pairs within a group."""

import pytest
from browser_helpers import BoardProcess, opened, record_run, saved, settle
from playwright.sync_api import Page, expect


@pytest.fixture
def board(tmp_path):
    with BoardProcess(record_run(tmp_path / "labelled", steps=2)) as process:
        yield process


def labels(board: BoardProcess) -> list[tuple[int, int, list[tuple[str, object, str]]]]:
    return [
        (one["step"], one["sample"], [(own["name"], own["value"], own["author"]) for own in one["labels"]])
        for one in board.json("api/runs/labelled/labels")
    ]


def name(page: Page, author: str) -> None:
    page.get_by_role("textbox", name="Your name").fill(author)
    page.keyboard.press("Enter")


def test_a_response_is_rated_tagged_and_noted_by_keyboard(browser, board):
    with opened(browser, f"{board.address}/responses?at=0.3&columns=step,sample,rating,tags,note") as page:
        panel = page.locator(".labels")
        name(page, "Ann")
        for key in ("s", "r", "4"):
            page.keyboard.press(key)
        expect(panel.get_by_role("button", name="Rate 4 of 5")).to_have_attribute("aria-pressed", "true")
        for key in ("t", *"hack", "Enter", "Escape", "m", *"look", "Escape"):
            page.keyboard.press(key)
        expect(panel.locator(".tag")).to_have_text("hack ✕")
        row = page.locator('.tr[data-row="4"]')
        expect(row.locator(".td")).to_have_text(["0", "3", "4.0", "hack", "look"])
        settle(page)
        wanted = [("star", None, "Ann"), ("rating", 4, "Ann"), ("tag", "hack", "Ann"), ("note", "look", "Ann")]
        assert labels(board) == [(0, 3, wanted)]
        page.keyboard.press("r")
        page.keyboard.press("0")
        panel.locator(".tag").click()
        expect(row.locator(".td")).to_have_text(["0", "3", "–", "", "look"])
        # In the tokens, a digit alone chooses a metric.
        page.keyboard.press("Enter")
        page.locator(".tok").first.wait_for()
        page.keyboard.press("2")
        assert page.locator('.labels [aria-pressed="true"]').count() == 0
        page.keyboard.press("r")
        page.keyboard.press("5")
        expect(page.get_by_role("button", name="Rate 5 of 5")).to_have_attribute("aria-pressed", "true")
        expect(page.get_by_role("textbox", name="Your name")).to_have_value("Ann")


def test_what_another_person_said_is_shown_and_kept(browser, board):
    address = f"{board.address}/responses?at=0.3"
    with opened(browser, address) as ann:
        name(ann, "Ann")
        expect(ann.locator(".detail")).not_to_contain_text("[object")
        with ann.expect_response(lambda answer: answer.request.method == "PUT"):
            ann.get_by_role("button", name="Rate 2 of 5").click()
        with opened(browser, address) as bob:
            expect(bob.locator(".labels p")).to_have_text("Ann 2/5")
            name(bob, "Bob")
            with bob.expect_response(lambda answer: answer.request.method == "PUT"):
                bob.get_by_role("button", name="Rate 5 of 5").click()
            expect(bob.locator(".labels p")).to_have_text("Ann 2/5")
        with opened(browser, f"{board.address}/responses?columns=sample,rating&filter=author+%3D%3D+%22Bob%22") as page:
            expect(page.locator('.tr[data-row="1"] .td')).to_have_text(["3", "3.5"])
    assert labels(board) == [(0, 3, [("rating", 2, "Ann"), ("rating", 5, "Bob")])]


def test_pairs_within_a_group_are_chosen_and_saved(browser, board, tmp_path):
    with opened(browser, f"{board.address}/step?step=1&read=0") as page:
        responses = page.locator(".read-response")
        expect(responses).to_have_count(4)
        responses.nth(2).get_by_role("button", name="Better").click()
        for other in (0, 3):
            with page.expect_response(lambda answer: answer.request.method == "PUT"):
                responses.nth(other).get_by_role("button", name="Worse than").click()
        pairs = page.locator(".preferences button")
        expect(pairs).to_have_count(2)
        sample = int(responses.nth(2).get_by_role("link").inner_text().split()[-1])
        expect(pairs.first).to_contain_text(f"{sample} ≻ ")
        assert [(one[:2], [own[0] for own in one[2]]) for one in labels(board)] == [((1, sample), ["over", "over"])]
        pairs.first.click()
        expect(pairs).to_have_count(1)
        settle(page)
        page.get_by_role("button", name="Export").click()
        file = saved(page, page.get_by_role("button", name="This view as one HTML file").click, tmp_path)
        text = pairs.inner_text()
    with opened(browser, f"file://{file}", offline=True) as page:
        expect(page.locator(".preferences button")).to_have_text(text.removesuffix(" ✕"))
        assert page.get_by_role("button", name="Better").count() == 0

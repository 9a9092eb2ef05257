"""Notes on steps and curves are written by keyboard and mouse, by several people, and stand in the charts."""

import pytest
from browser_helpers import BoardProcess, opened, record_run, saved, settle
from playwright.sync_api import Page, expect
from test_board_browser_accessible import AXE, violations


@pytest.fixture
def board(tmp_path):
    first = record_run(tmp_path / "first", steps=6)
    with BoardProcess(first, record_run(tmp_path / "second", steps=6)) as process:
        yield process


def notes(board: BoardProcess, run: str = "first") -> list[tuple[int, str | None, str, str]]:
    return [(one["step"], one["metric"], one["text"], one["author"]) for one in board.json(f"api/runs/{run}/notes")]


def write(page: Page, text: str) -> None:
    """Write a note with the keyboard alone, and wait until the server has it."""
    page.locator(".notes textarea").wait_for()
    page.keyboard.press("m")
    page.keyboard.type(text)
    with page.expect_response(lambda answer: answer.request.method == "PUT"):
        page.keyboard.press("Escape")


def chart(page: Page, title: str) -> Page:
    return page.locator(".charts .card").filter(has=page.get_by_role("heading", name=title, exact=True)).first


def test_notes_are_written_by_keyboard_and_stand_in_the_charts(browser, board):
    with opened(browser, f"{board.address}/overview?run=first&step=2") as page:
        page.locator(".plot canvas").first.wait_for()
        page.get_by_role("textbox", name="Your name").fill("Ann")
        page.keyboard.press("Enter")
        page.keyboard.press("m")
        page.keyboard.type("new prompts\nfrom here on")
        with page.expect_response(lambda answer: answer.request.method == "PUT"):
            page.keyboard.press("Control+Enter")
        lines = page.locator(".note-list li")
        expect(lines).to_have_count(1)
        expect(lines.locator(".said")).to_have_text("new prompts\nfrom here on")
        count = page.locator(".charts:not(.small) .plot").count()
        expect(page.locator(".plot .flag")).to_have_count(count)
        expect(page.locator(".plot .flag").first).to_have_attribute("title", "Ann: new prompts\nfrom here on")
        # On one curve, chosen at its chart; it takes the focus to the field.
        chart(page, "KL to the reference").hover()
        chart(page, "KL to the reference").get_by_role("button", name="Write a note on kl/objective").click()
        page.keyboard.type("rises")
        with page.expect_response(lambda answer: answer.request.method == "PUT"):
            page.keyboard.press("Escape")
        expect(lines).to_have_count(2)
        expect(page.locator(".plot .flag")).to_have_count(count + 1)
        expect(chart(page, "KL to the reference").locator(".flag")).to_have_count(2)
        assert notes(board) == [(2, None, "new prompts\nfrom here on", "Ann"), (2, "kl/objective", "rises", "Ann")]
        assert "on=kl%2Fobjective" in page.url and "step=2" in page.url
        # An empty one is taken away.
        page.keyboard.press("m")
        page.keyboard.press("Control+A")
        page.keyboard.press("Delete")
        page.keyboard.press("Escape")
        expect(lines).to_have_count(1)


@pytest.mark.skipif(not AXE.is_file(), reason="npm ci in src/cavesson/board/web")
def test_notes_violate_nothing_of_wcag(browser, board):
    with opened(browser, f"{board.address}/overview?run=first&step=2&on=reward") as page:
        write(page, "a note")
        expect(page.locator(".note-list li")).to_have_count(1)
        for view in ("overview?run=first", "compare"):
            page.goto(f"{board.address}/{view}")
            page.locator(".note-list li").wait_for()
            settle(page)
            assert violations(page) == [], view


def test_a_flag_stands_at_its_step(browser, board):
    with opened(browser, f"{board.address}/overview?run=first&step=3") as page:
        write(page, "here")
        flag = page.locator(".plot .flag").first
        expect(flag).to_have_attribute("title", "here")
        over = page.locator(".plot .u-over").first.bounding_box()
        # Six steps, 0 to 5: step 3 is at three fifths of the width.
        assert abs(flag.bounding_box()["x"] - (over["x"] + over["width"] * 3 / 5)) <= 2


def test_what_another_person_wrote_is_shown_and_kept(browser, board):
    address = f"{board.address}/overview?run=first&step=1"
    with opened(browser, address) as ann, opened(browser, address) as bob:
        for page, author, text in ((ann, "Ann", "it jumps"), (bob, "Bob", "it does not")):
            page.get_by_role("textbox", name="Your name").fill(author)
            page.keyboard.press("Enter")
            write(page, text)
        expect(bob.locator(".note-list .said")).to_have_text(["it jumps", "it does not"])
    assert notes(board) == [(1, None, "it jumps", "Ann"), (1, None, "it does not", "Bob")]


def test_a_comparison_has_the_notes_of_its_runs(browser, board):
    with opened(browser, f"{board.address}/overview?run=second&step=4&on=reward") as page:
        write(page, "better")
        page.goto(f"{board.address}/compare")
        expect(page.locator(".note-list li")).to_contain_text("second · Step 4")
        expect(page.locator(".plot .flag")).to_have_count(1)
        expect(page.locator(".plot .flag")).to_have_attribute("title", "second: better")
        expect(chart(page, "reward").locator(".flag")).to_have_count(1)


def test_a_saved_page_has_the_notes_and_no_field(browser, board, tmp_path):
    with opened(browser, f"{board.address}/overview?run=first&step=5") as page:
        write(page, "the end")
        expect(page.locator(".note-list .said")).to_have_text("the end")
        settle(page)
        page.get_by_role("button", name="Export").click()
        file = saved(page, page.get_by_role("button", name="This view as one HTML file").click, tmp_path)
    with opened(browser, f"file://{file}", offline=True) as page:
        expect(page.locator(".note-list .said")).to_have_text("the end")
        expect(page.locator(".plot .flag").first).to_have_attribute("title", "the end")
        assert page.locator(".notes textarea").count() == 0
        assert page.get_by_role("button", name="Write a note").count() == 0


def test_what_is_typed_stays_with_its_step_while_the_run_goes_on(browser, board):
    with opened(browser, f"{board.address}/overview?run=first") as page:
        page.locator(".plot canvas").first.wait_for()
        page.keyboard.press("m")
        expect(page).to_have_url(f"{board.address}/overview?run=first&step=5")

"""A finding of a real diagnosis on the page: what happened, examples, all affected, what to change, and its kind."""

import re
from pathlib import Path

import pytest
from browser_helpers import (
    CUT,
    CUT_BATCH,
    CUT_BEGIN,
    CUT_STEPS,
    BoardProcess,
    cut_reward,
    go,
    opened,
    record_cut,
    saved,
    settle,
    wait_for,
)
from playwright.sync_api import Page, expect


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    folder = tmp_path_factory.mktemp("found") / "cut"
    with BoardProcess(record_cut(folder)) as board:
        wait_for(lambda: board.json("api/runs/cut/findings") is not None)
        yield board


def item(page: Page) -> Page:
    return page.locator(".findings li", has_text="Responses are truncated")


def lower_median(steps: range, samples: range) -> tuple[int, int]:
    found = sorted((cut_reward(step, sample), step, sample) for step in steps for sample in samples)
    return found[(len(found) - 1) // 2][1:]


def test_a_finding_says_what_happened_and_shows_a_response_before_and_an_affected_one(browser, board):
    with opened(browser, f"{board.address}/overview") as page:
        finding = item(page)
        said = f"Share of responses cut at the length limit: 75 % on average from step {CUT_BEGIN} on, 12 % before."
        expect(finding.locator(".happened")).to_have_text(said)
        before = lower_median(range(CUT_BEGIN - 3, CUT_BEGIN), range(1, CUT_BATCH))
        after = lower_median(range(CUT_STEPS - 3, CUT_STEPS), range(CUT))
        lines = finding.locator(".examples .line")
        expect(lines).to_have_text([f"answer {sample} of step {step}" for step, sample in (before, after)])
        when = finding.locator(".examples .when").all_inner_texts()
        assert [text.split(" · ")[:2] for text in when] == [
            ["before", f"Step {before[0]}"],
            ["affected", f"Step {after[0]}"],
        ]
        lines.nth(1).click()
        expect(page.locator("main h2").first).to_have_text(f"Step {after[0]} · sample {after[1]}")


def test_all_affected_are_exactly_those_that_were_cut_since(browser, board):
    with opened(browser, f"{board.address}/overview") as page:
        item(page).get_by_role("link", name="All affected").click()
        expect(page).to_have_url(re.compile("responses"))
        expect(page.get_by_role("main").get_by_role("status")).to_contain_text(
            f"{CUT * (CUT_STEPS - CUT_BEGIN)} rollouts"
        )


def test_the_change_is_copied_as_lines_of_the_recipe_and_as_flags(browser, board):
    with opened(browser, f"{board.address}/overview", permissions=["clipboard-read", "clipboard-write"]) as page:
        finding = item(page)
        lines = finding.locator(".change pre").inner_text()
        assert re.fullmatch(r"\[sampling\]\nmax_new_tokens = (\d+)", lines)
        number = int(lines.split()[-1])
        assert number >= 40
        for name, wanted in (
            ("Copy for the recipe", lines),
            ("Copy as flags", f"--sampling.max_new_tokens {number}"),
        ):
            button = finding.get_by_role("button", name=name)
            button.focus()
            page.keyboard.press("Enter")
            expect(finding.get_by_role("button", name="Copied")).to_be_visible()
            assert page.evaluate("navigator.clipboard.readText()") == wanted
            expect(button).to_be_visible()


def test_a_finding_has_its_own_address_with_what_is_known_of_its_kind(browser, board):
    pages = Path(__file__).parents[2] / "docs" / "diagnosis"
    with opened(browser, f"{board.address}/overview") as page:
        title = item(page).get_by_role("link", name="Responses are truncated", exact=True)
        title.focus()
        page.keyboard.press("Enter")
        expect(page).to_have_url(re.compile("finding=truncated"))
        known = page.get_by_role("region", name="What is known of this kind of finding")
        expect(known.locator(".heading")).to_have_text("Responses are truncated")
        text = (pages / "truncated.md").read_text("utf-8")
        unlike = re.search(r"\*\*Not to be confused with:\*\* (A run that cuts[^:]*)", text)[1]
        expect(known).to_contain_text(unlike)
        assert known.locator("img").count() == 0 and "pictures/" not in known.inner_text()
        # The numbers on the page are of another run, which it names.
        expect(known).to_contain_text(re.search(r"^\*(A run with .*)\*$", text, re.M)[1].split("`")[0])
        known.get_by_role("link", name="length-bias").first.click()
        expect(page).to_have_url(re.compile("about=length-bias"))
        expect(known.locator(".heading")).to_have_text("Bad responses grow longer")
        known.get_by_role("link", name="Back").click()
        expect(known.locator(".heading")).to_have_text("Responses are truncated")
        page.locator("select.language").select_option("vi")
        expect(page.locator(".diagnosis")).to_contain_text("Trang này bằng tiếng Anh.")
        page.locator("select.language").select_option("en")
        page.keyboard.press("Escape")
        expect(known).to_have_count(0)
        item(page).get_by_role("link", name="What this finding means").click()
        expect(known).to_be_visible()
        item(page).get_by_role("link", name="Close").click()
        expect(known).to_have_count(0)
        assert "finding=" not in page.url


def test_a_saved_page_has_the_pages_of_its_findings(browser, board, tmp_path):
    with opened(browser, f"{board.address}/overview") as page:
        settle(page)
        page.get_by_role("button", name="Export").click()
        file = saved(page, page.get_by_role("button", name="This view as one HTML file").click, tmp_path)
    with opened(browser, f"file://{file}", offline=True) as page:
        finding = item(page)
        expect(finding.locator(".examples .line")).to_have_count(2)
        assert page.get_by_role("link", name="All affected").count() == 0
        finding.get_by_role("link", name="Responses are truncated", exact=True).click()
        known = page.get_by_role("region", name="What is known of this kind of finding")
        expect(known.locator(".heading")).to_have_text("Responses are truncated")
        # Of kinds that were not found there is no page in the file.
        assert known.get_by_role("link", name="kl-explosion").count() == 0


def test_on_a_phone_nothing_of_a_finding_is_wider_than_the_screen(browser, board):
    with opened(browser, f"{board.address}/overview?finding=truncated", wide=False) as page:
        page.locator(".diagnosis .heading").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        box = page.locator(".findings").bounding_box()
        for part in page.locator(".findings li.open > *").all():
            own = part.bounding_box()
            assert own is None or own["x"] + own["width"] <= box["x"] + box["width"] + 1


def test_a_finding_that_began_with_the_run_says_that_nothing_was_before(browser, board):
    found = board.json("api/runs/cut/findings")
    one = next(one for one in found["en"]["findings"] if one["rule"] == "truncated")
    found["en"]["findings"] = [one | {"before": None, "since_step": 0}]
    with opened(browser, f"{board.address}/settings") as page:
        page.route("**/api/runs/cut/findings", lambda route: route.fulfill(json=found))
        go(page, "overview")
        page.reload()
        expect(item(page).locator(".examples p")).to_have_text("No response before it began.")

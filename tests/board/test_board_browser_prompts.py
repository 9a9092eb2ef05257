"""The page of a prompt, and the lists of prompts: their numbers, with the keyboard, on a phone and as a file."""

import re
from statistics import fmean

import pytest
from browser_helpers import PROMPTS, opened, parsed, saved, settle
from playwright.sync_api import Page, expect

import cavesson
from cavesson.index.prompt_ids import id_of

PROMPT = PROMPTS[1]
ADDRESS = f"prompt?prompt={id_of(PROMPT)}"


@pytest.fixture(scope="module")
def table(runs_told):
    """The trained responses of the first run."""
    return [row for row in cavesson.open(runs_told[0]).rows().to_pylist() if row["split"] == "train"]


@pytest.fixture(scope="module")
def rows(table):
    """Those to the prompt, in the order of step and sample."""
    mine = [row for row in table if row["prompt"] == PROMPT]
    return sorted(mine, key=lambda row: (row["step"], row["sample"]))


@pytest.fixture(scope="module")
def means(table):
    """The mean reward of each prompt, lowest first."""
    found = {text: fmean(row["reward"] for row in table if row["prompt"] == text) for text in PROMPTS}
    return dict(sorted(found.items(), key=lambda item: item[1]))


def name(prompt: str) -> str:
    """What a line shows of a prompt: not its system turn."""
    return prompt.rpartition("\n")[2]


def side(page: Page, letter: str):
    return page.locator(f'.side-of-prompt[aria-label="{letter}"]')


def test_the_hardest_prompts_come_first_and_lead_to_their_pages(browser, board_told, means):
    with opened(browser, f"{board_told.address}/overview") as page:
        card = page.locator(".prompt-lists .card", has_text="Hardest")
        expect(card.locator("a.rollout")).to_have_count(5)
        shown = [parsed(text) for text in card.locator("b").all_inner_texts()]
        assert shown == pytest.approx([*means.values()][:5], rel=5e-3)
        card.locator("header a").click()
        lines = page.locator(".prompts tbody tr")
        expect(lines).to_have_count(len(PROMPTS))
        shown = [parsed(text) for text in page.locator(".prompts td:nth-child(2)").all_inner_texts()]
        assert shown == pytest.approx([*means.values()], rel=5e-3)
        page.get_by_role("button", name="Easiest").click()
        last = [*means][-1]
        expect(lines.first.locator("a")).to_have_text(name(last))
        lines.first.locator("a").click()
        expect(page.locator("main h2").first).to_have_text(f"Prompt {id_of(last)}")


def test_what_counts_as_solved_can_be_entered(browser, board_told, means):
    with opened(browser, f"{board_told.address}/prompt?sort=never") as page:
        expect(page.locator(".empty")).to_contain_text("do not say which prompts are solved")
        page.get_by_label("Solved from").fill("100")
        page.keyboard.press("Enter")
        expect(page.locator(".prompts tbody tr")).to_have_count(len(PROMPTS))
        expect(page.locator(".prompts td:nth-child(4)").first).to_have_text(re.compile("^0 / "))
        page.get_by_role("button", name="Always solved").click()
        expect(page.locator(".empty")).to_have_text("No prompt belongs here.")


def test_a_prompt_has_a_page_with_its_numbers_and_all_its_responses(browser, board_told, rows):
    rewards = [row["reward"] for row in rows]
    with opened(browser, f"{board_told.address}/{ADDRESS}") as page:
        facts = page.locator(".prompt-page .facts")
        expect(facts).to_contain_text(str(len(rows)))
        expect(facts.locator("div", has_text="mean reward").locator("dd").first).to_have_text(f"{fmean(rewards):.4g}")
        expect(page.locator(".card", has_text="Ground truth")).to_contain_text("rain")
        lines = page.locator(".prompt-responses tbody tr")
        expect(lines).to_have_count(len(rows))
        places = [f"Step {row['step']} · {row['sample']}" for row in rows]
        assert lines.locator("a").all_inner_texts() == places
        page.get_by_role("button", name="Worst").last.click()
        expect(lines.first.locator("td").nth(1)).to_have_text(f"{min(rewards):.3g}".replace("-", "−"))
        lines.first.locator("a").click()
        expect(page).to_have_url(re.compile("/tokens"))


def test_two_responses_are_compared_by_keyboard(browser, board_told, rows):
    best = max(rows, key=lambda row: row["reward"])
    with opened(browser, f"{board_told.address}/{ADDRESS}") as page:
        expect(side(page, "A")).to_contain_text(f"Step {rows[0]['step']} · sample {rows[0]['sample']}")
        expect(side(page, "B")).to_contain_text(f"Step {best['step']} · sample {best['sample']}")
        expect(page.locator(".prompt-responses tbody tr")).to_have_count(len(rows))
        page.keyboard.press("j")
        page.keyboard.press("j")
        page.keyboard.press("a")
        expect(side(page, "A")).to_contain_text(rows[1]["response"].strip())
        page.keyboard.press("j")
        page.keyboard.press("b")
        expect(side(page, "B")).to_contain_text(rows[2]["response"].strip())
        changed = page.locator(".text-difference pre")
        settle(page)
        parts = changed.evaluate(
            "pre => [...pre.childNodes].map((node) => [node.nodeName.toLowerCase(), node.textContent])"
        )
        assert "".join(text for kind, text in parts if kind != "ins") == rows[1]["response"]
        assert "".join(text for kind, text in parts if kind != "del") == rows[2]["response"]
        page.reload()
        expect(side(page, "B")).to_contain_text(rows[2]["response"].strip())
        side(page, "B").get_by_role("button", name="Last").click()
        expect(side(page, "B")).to_contain_text(rows[-1]["response"].strip())
        page.keyboard.press("k")
        page.keyboard.press("Enter")
        expect(page).to_have_url(re.compile("/tokens"))


def test_a_prompt_is_reached_from_a_response_and_from_a_group(browser, board_told):
    with opened(browser, f"{board_told.address}/responses?at=3.2") as page:
        page.get_by_role("link", name="All its responses").click()
        expect(page.locator("main h2").first).to_have_text(re.compile("^Prompt [0-9a-f]{16}$"))
        page.goto(f"{board_told.address}/step?step=3")
        link = page.locator(".group header a").first
        text = link.inner_text()
        link.click()
        expect(page.locator(".prompt-page .card").first).to_contain_text(text)


@pytest.mark.parametrize("wide", [True, False], ids=["1440", "390"])
def test_a_saved_page_of_a_prompt_opens_without_a_server(browser, board_told, rows, tmp_path, wide):
    with opened(browser, f"{board_told.address}/{ADDRESS}&a=worst", wide=wide) as page:
        expect(page.locator(".prompt-responses tbody tr")).to_have_count(len(rows))
        page.locator(".text-difference").wait_for()
        settle(page)
        shown = page.locator("main").inner_text()
        page.get_by_role("button", name="Export").click()
        file = saved(page, page.get_by_role("button", name="This view as one HTML file").click, tmp_path)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    with opened(browser, f"file://{file}", wide=wide, offline=True) as page:
        page.locator(".text-difference").wait_for()
        page.locator(".prompt-responses tbody tr").first.wait_for()
        settle(page)
        assert page.locator("main").inner_text() == shown


def test_an_unknown_prompt_is_said_so(browser, board_told):
    with opened(browser, f"{board_told.address}/prompt?prompt={'0' * 16}", forgiven="404") as page:
        expect(page.get_by_role("main").locator(".error")).to_contain_text("has no prompt")


def test_a_prompt_is_searched_by_keyboard(browser, board_told, table):
    with opened(browser, f"{board_told.address}/prompt") as page:
        lines = page.locator(".prompts tbody tr")
        expect(lines).to_have_count(len(PROMPTS))
        page.keyboard.press("/")
        page.keyboard.type("LINE 11")
        expect(lines).to_have_count(1)
        expect(lines.locator("a")).to_have_text(name(PROMPTS[11]))
        page.get_by_label("Where to search").select_option("Ground truth")
        expect(lines).to_have_count(0)
        page.reload()
        page.get_by_placeholder("Find a prompt").fill("rain")
        expect(lines).to_have_count(len(PROMPTS))
        expect(page).to_have_url(re.compile("within=ground_truth"))
        page.goto(f"{board_told.address}/responses")
        box = page.locator("input.filter")
        assert "not in prompt" in box.get_attribute("title")
        box.fill('"line 11" not in prompt and "line 1" in prompt')
        page.keyboard.press("Enter")
        # Of lines 1, 10 and 11, the filter keeps the first two.
        found = sum(row["prompt"] in (PROMPTS[1], PROMPTS[10]) for row in table)
        expect(page.locator("output.muted")).to_have_text(f"{found} rollouts")


def test_a_compared_prompt_is_found_and_shows_all_responses_of_both_sides(
    browser, board_told, runs_told, rows, tmp_path
):
    with opened(browser, f"{board_told.address}/compare?sides=first%400-3,second") as page:
        expect(page.locator(".wins .interval", has_text="%")).to_have_count(2)
        page.get_by_placeholder("Find a prompt").fill(id_of(PROMPT))
        expect(page.locator("article.group")).to_have_count(1)
        page.get_by_role("button", name="All responses").click()
        sides = page.locator(".side-responses")
        early = sorted((row["reward"] for row in rows if row["step"] <= 3), reverse=True)
        other = [row for row in cavesson.open(runs_told[1]).rows().to_pylist() if row["prompt"] == PROMPT]
        late = sorted((row["reward"] for row in other if row["split"] == "train"), reverse=True)
        for side, rewards in zip((sides.first, sides.last), (early, late), strict=True):
            expect(side.locator("button.rollout")).to_have_count(len(rewards))
            shown = [parsed(text) for text in side.locator("button.rollout b").all_inner_texts()]
            assert shown == pytest.approx(rewards, rel=5e-3)
        settle(page)
        page.get_by_role("button", name="Export").click()
        file = saved(page, page.get_by_role("button", name="This view as one HTML file").click, tmp_path)
    with opened(browser, f"file://{file}", offline=True) as page:
        expect(page.locator(".side-responses").last.locator("button.rollout")).to_have_count(len(late))

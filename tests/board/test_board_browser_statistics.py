"""A selection on Responses says how it differs from the rest, and a search covers prompts."""

from browser_helpers import opened
from playwright.sync_api import expect


def test_a_selection_is_compared_with_the_rest(browser, board_told):
    with opened(browser, f"{board_told.address}/responses") as page:
        page.locator('.tr[data-row="1"] .td').first.wait_for()
        expect(page.locator(".statistics")).to_have_count(0)
        page.locator("input.filter").fill("reward > 1.5")
        summary = page.locator(".statistics summary")
        expect(summary).to_contain_text("Compared with the other")
        expect(summary).to_contain_text("reward")
        got = board_told.json("api/runs/first/statistics?filter=reward+%3E+1.5&details=1")
        expect(summary).to_contain_text(f"other {got['rest']}")
        summary.click()
        expect(page.locator(".statistics svg.pair").first).to_be_visible()
        expect(page.locator(".statistics table")).to_have_count(2)
        page.reload()
        expect(page.locator(".statistics table")).to_have_count(2)


def test_a_search_covers_prompts_on_demand(browser, board_told):
    with opened(browser, f"{board_told.address}/responses?q=line+3+about") as page:
        expect(page.locator(".bar output")).to_have_text("0 rollouts")
        page.get_by_role("combobox", name="Where to search").select_option("prompt")
        total = board_told.json("api/runs/first/rows?q=line+3+about&within=prompt")["total"]
        expect(page.locator(".bar output")).to_have_text(f"{total} rollouts")
        assert total > 0

"""Every view obeys WCAG 2.2 AA as far as axe-core can tell, and a screen reader finds its way through Responses."""

from pathlib import Path

import pytest
from browser_helpers import VIEWS, opened, settle
from playwright.sync_api import Page, expect

AXE = Path(__file__).parents[2] / "src/cavesson/board/web/node_modules/axe-core/axe.min.js"
# What the standard demands, and of what it only advises: landmarks, the order of headings, named headers of tables.
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
LANGUAGES = ("en", "zh", "vi")
# Few rows: each costs time, and they are alike.
ADDRESSES = {view: view for view in VIEWS} | {"responses": "responses?steps=0-0"}
OPEN = {
    "a rollout": ("responses?steps=0-0&at=0.1", ".detail .body"),
    "a group": ("step?step=3&read=0", ".read-response"),
    "a prompt": ("prompt", ".prompts td"),
    "a message": ("nonsense", ".empty"),
}

pytestmark = pytest.mark.skipif(
    not AXE.is_file(), reason="what the page is tested with is missing: npm ci in src/cavesson/board/web"
)


def violations(page: Page) -> list[str]:
    """What axe-core finds: the rule, the element, and what is wrong with it."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE.read_text("utf-8"))
    found = page.evaluate("(tags) => axe.run({ runOnly: tags, resultTypes: ['violations'] })", RULES)["violations"]
    return [f"{one['id']}: {node['html'][:200]}: {node['failureSummary']}" for one in found for node in one["nodes"]]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_view_violates_wcag(browser, board_told, scheme):
    # The whole view is in sight: what lies below the window is not examined.
    with opened(browser, board_told.address, color_scheme=scheme) as page:
        page.set_viewport_size({"width": 1440, "height": 1600})
        for view, sign in VIEWS.items():
            page.goto(f"{board_told.address}/{ADDRESSES[view]}")
            page.locator(sign).first.wait_for()
            for language in LANGUAGES:
                page.locator("select.language").select_option(language)
                settle(page)
                assert violations(page) == [], (view, language)
        page.locator("select.language").select_option("en")


@pytest.mark.parametrize("wide", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["1440", "390"])
def test_what_is_opened_violates_nothing_either(browser, board_told, wide):
    with opened(browser, board_told.address, wide=wide, forgiven="status of 404") as page:
        for what, (address, sign) in OPEN.items():
            page.goto(f"{board_told.address}/{address}")
            page.locator(sign).first.wait_for()
            settle(page)
            assert violations(page) == [], what
        rule = board_told.json("api/runs/first/findings")["en"]["findings"][0]["rule"]
        page.goto(f"{board_told.address}/overview?finding={rule}")
        page.locator(".diagnosis .heading").wait_for()
        settle(page)
        assert violations(page) == [], "a finding and its page"
        page.goto(f"{board_told.address}/responses?steps=0-0")
        page.locator(".tr .star").nth(2).click()
        page.get_by_role("button", name="Columns").click()
        assert violations(page) == [], "a star and a menu"
        page.keyboard.press("Escape")
        page.locator(".tr .star.set").click()
        page.keyboard.press("?")
        assert violations(page) == [], "the list of keys"
        page.keyboard.press("Escape")
        for view in ("overview", "patterns"):
            page.goto(f"{board_told.address}/{view}")
            page.locator(VIEWS[view]).first.wait_for()
            settle(page)
            assert violations(page) == [], view


def heard(page: Page) -> list[tuple[str, str]]:
    """Role and name of everything in Chromium's accessibility tree, in the order in which it is read out."""
    nodes = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    known = {node["nodeId"]: node for node in nodes}
    order: list[tuple[str, str]] = []

    def visit(node):
        if not node["ignored"]:
            order.append((node["role"]["value"], node.get("name", {}).get("value", "")))
        for child in node.get("childIds", []):
            visit(known[child])

    visit(nodes[0])
    return order


def test_a_screen_reader_finds_its_way_through_responses(browser, board_told):
    with opened(browser, f"{board_told.address}/responses?sort=-reward&columns=step,reward,response") as page:
        page.locator(VIEWS["responses"]).first.wait_for()
        settle(page)
        path = iter(heard(page))
        for role, name in [
            ("banner", ""),
            ("heading", "first · Responses"),
            ("navigation", ""),
            ("link", "Responses"),
            ("button", "Previous step ["),
            ("main", ""),
            ("searchbox", "Search text /"),
            ("button", "Regular expression"),
            ("searchbox", "Filter"),
            ("button", "Only starred"),
            ("status", ""),
            ("StaticText", "160 rollouts"),
            ("grid", "Responses"),
            ("row", "…"),
            ("columnheader", "star"),
            ("columnheader", "step"),
            ("columnheader", "reward ↓"),
            ("columnheader", "response"),
            ("row", "…"),
            ("gridcell", "Star"),
            ("button", "Star"),
            ("gridcell", "…"),
            ("gridcell", "…"),
            ("gridcell", "…"),
        ]:
            assert any(one == role and (said == name or name == "…") for one, said in path), (role, name)
        grid = page.get_by_role("grid", name="Responses")
        rows = grid.get_by_role("row")
        # The head is the first row, as in the grids of the ARIA Authoring Practices.
        expect(grid).to_have_attribute("aria-rowcount", "161")
        assert [rows.nth(at).get_attribute("aria-rowindex") for at in range(3)] == ["1", "2", "3"]
        expect(grid.get_by_role("columnheader", name="reward")).to_have_attribute("aria-sort", "descending")
        grid.focus()
        for at in (2, 3):
            page.keyboard.press("ArrowDown")
            chosen = grid.get_by_role("row", selected=True)
            expect(chosen).to_have_attribute("aria-rowindex", str(at))
            expect(grid).to_be_focused()
            expect(grid).to_have_attribute("aria-activedescendant", chosen.get_attribute("id"))
        page.locator(".detail .body").wait_for()
        title = page.locator(".detail h2").inner_text()
        path = iter(heard(page))
        for wanted in [
            ("complementary", "Response"),
            ("heading", title),
            ("button", "Previous k"),
            ("button", "Next j"),
            ("button", "Tokens"),
            ("button", "Close"),
            ("heading", "Prompt"),
            ("heading", "Response"),
        ]:
            assert any(one == wanted[0] and said.startswith(wanted[1]) for one, said in path), wanted
        page.keyboard.press("ArrowUp")
        expect(grid.get_by_role("row", selected=True)).to_have_attribute("aria-rowindex", "2")

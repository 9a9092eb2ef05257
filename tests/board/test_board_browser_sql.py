"""The view of queries in a browser: examples, the answer as chart and table, errors, limits, and addresses to share."""

import csv
import io
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from board_helpers import board_of, client_of
from browser_helpers import BoardProcess, opened, parsed, record_run, saved, settle
from index_helpers import add_rewards
from playwright.sync_api import Page, expect
from test_board_browser_accessible import AXE, violations

import cavesson

SLOW = "SELECT sum(a.range * b.range) FROM range(1000000) a, range(1000000) b"
CATEGORIES = "SELECT finish_reason, count(*) AS n FROM rows GROUP BY finish_reason ORDER BY n DESC"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sql")
    run = record_run(root / "first", steps=6)
    add_rewards(run, "tone", range(6), lambda rows: [-value for value in rows["reward"].to_pylist()])
    record_run(root / "second", steps=2, better=5.0)
    return root


@pytest.fixture(scope="module")
def board(folder: Path) -> Any:
    with BoardProcess(folder / "first", folder / "second") as board:
        yield board


def address_of(board: BoardProcess, query: str, **more: str) -> str:
    return f"{board.address}/sql?{urlencode({'run': 'first', 'query': query, **more})}"


def cells(page: Page) -> list[list[str]]:
    return [row.locator("td").all_inner_texts() for row in page.locator(".answer-table tbody tr").all()]


def test_an_example_answers_with_a_chart_and_a_table_that_an_address_reproduces(browser, board, folder):
    rows = [row for row in cavesson.open(folder / "first").rows().to_pylist() if row["split"] == "train"]
    with opened(browser, f"{board.address}/sql?run=first") as page:
        page.get_by_role("button", name="Mean reward by step").click()
        page.locator(".plot canvas").wait_for()
        lines = cells(page)
        assert [line[0] for line in lines] == [str(step) for step in range(6)]
        for step, reward in lines:
            own = [row["reward"] for row in rows if row["step"] == int(step)]
            assert parsed(reward) == pytest.approx(sum(own) / len(own), rel=1e-5)
        expect(page.get_by_role("heading", name="reward · step")).to_be_visible()
        expect(page.locator(".answer-table [role=status]")).to_contain_text("6 rows in")
        link, text = page.url, page.get_by_label("Query in SQL").input_value()
    with opened(browser, link) as page:
        page.locator(".plot canvas").wait_for()
        assert cells(page) == lines and page.get_by_label("Query in SQL").input_value() == text
        page.locator("select.run").select_option("second")
        expect(page.get_by_role("heading", name="Answer of second")).to_be_visible()
        expect(page.locator(".answer-table tbody tr")).to_have_count(2)


def test_a_query_is_written_run_and_corrected_by_keyboard(browser, board):
    with opened(browser, f"{board.address}/overview?run=first", forgiven="status of 400") as page:
        page.locator(".plot canvas").first.wait_for()
        page.keyboard.press("g")
        page.keyboard.press("l")
        page.locator(".examples button").first.wait_for()
        page.keyboard.press("/")
        page.keyboard.type("SELECT step,\n  rewrd FROM rows")
        page.keyboard.press("Control+Enter")
        expect(page.get_by_role("alert")).to_contain_text('line 2, column 3: Referenced column "rewrd" not found')
        page.keyboard.press("Control+A")
        page.keyboard.type("SELECT 7 AS seven")
        page.keyboard.press("Control+Enter")
        expect(page.locator(".answer-table td")).to_have_text("7")
        expect(page.get_by_role("alert")).to_have_count(0)
        page.keyboard.press("Escape")
        page.keyboard.press("g")
        page.keyboard.press("o")
        page.locator(".plot canvas").first.wait_for()
        page.keyboard.press("g")
        page.keyboard.press("l")
        expect(page.locator(".answer-table td")).to_have_text("7")


def test_the_chart_is_chosen_by_the_answer_and_can_be_changed(browser, board):
    with opened(browser, address_of(board, CATEGORIES)) as page:
        bars = page.get_by_role("img", name="n · finish_reason")
        bars.wait_for()
        expect(page.get_by_role("button", name="Bars")).to_have_attribute("aria-pressed", "true")
        page.get_by_role("button", name="No chart").click()
        expect(bars).to_have_count(0)
        expect(page).to_have_url(re.compile("chart=none"))
        page.goto(address_of(board, 'SELECT step, min(reward) AS low, max(reward) AS "high" FROM rows GROUP BY step'))
        legend = page.locator(".legend .name")
        expect(legend).to_have_text(["low", "high"])
        page.get_by_label("Values").select_option("high")
        expect(legend).to_have_text(["high"])
        page.get_by_label("Along").select_option("low")
        expect(page.get_by_role("heading", name="high · low")).to_be_visible()
        page.reload()
        expect(page.get_by_role("heading", name="high · low")).to_be_visible()


def test_the_table_is_sorted_copied_and_saved_and_its_keys_lead_to_rollouts(browser, board, tmp_path):
    query = "SELECT step, sample, response, reward FROM rows WHERE step = 2 ORDER BY sample"
    with opened(browser, address_of(board, query)) as page:
        page.locator(".answer-table td").first.wait_for()
        page.get_by_role("button", name="reward", exact=True).click()
        head = page.locator(".answer-table th", has_text="reward")
        expect(head).to_have_attribute("aria-sort", "ascending")
        rewards = [parsed(line[3]) for line in cells(page)]
        assert rewards == sorted(rewards) and len(rewards) == 20
        head.get_by_role("button").click()
        expect(head).to_have_attribute("aria-sort", "descending")
        assert [parsed(line[3]) for line in cells(page)] == rewards[::-1]
        file = saved(page, page.get_by_role("button", name="CSV", exact=True).click, tmp_path)
        content = file.read_bytes().decode()
        lines = list(csv.reader(io.StringIO(content)))
        assert lines[0] == ["step", "sample", "response", "reward"]
        assert [float(line[3]) for line in lines[1:]] == pytest.approx(rewards[::-1], rel=1e-5)
        page.evaluate(
            """() => {
                const set = DataTransfer.prototype.setData;
                DataTransfer.prototype.setData = function (kind, text) {
                    window.copied = text;
                    set.call(this, kind, text);
                };
            }"""
        )
        page.get_by_role("button", name="Copy CSV").click()
        assert page.evaluate("window.copied") == content
        sample = cells(page)[0][1]
        page.locator(".answer-table tbody tr").first.get_by_role("link", name=sample, exact=True).click()
        expect(page.locator("main h2")).to_have_text(f"Step 2 · sample {sample}")


def test_limits_are_told_and_a_query_can_be_cancelled(browser, board):
    with opened(browser, address_of(board, "SELECT * FROM range(1500)")) as page:
        status = page.locator(".answer-table [role=status]")
        expect(status).to_contain_text("These are only the first 1,000; there are more.")
        expect(page.locator(".pages")).to_contain_text("1–100 / 1,000")
        page.get_by_role("button", name="Show up to 10,000").click()
        expect(page.locator(".pages")).to_contain_text("1–100 / 1,500")
        expect(status).not_to_contain_text("there are more")
        page.locator(".pages").get_by_role("button", name="›").click()
        assert cells(page)[0] == ["100"]
        page.get_by_label("Query in SQL").fill(SLOW)
        page.get_by_role("button", name="Run", exact=True).click()
        expect(page.locator("output", has_text="The query is running")).to_be_visible()
        page.get_by_role("button", name="Cancel").click()
        expect(page.locator("output", has_text="The query was cancelled")).to_be_visible()
        expect(page.get_by_role("button", name="Cancel")).to_have_count(0)


@pytest.mark.slow
def test_the_limit_of_time_is_told(browser, board):
    with opened(browser, address_of(board, SLOW), forgiven="status of 400") as page:
        expect(page.get_by_role("alert")).to_have_text("the query took longer than 10 s, which is its limit")


def test_tables_and_columns_are_explained_and_put_into_the_query(browser, board):
    with opened(browser, f"{board.address}/sql?run=first") as page:
        card = page.locator(".sql-tables")
        expect(card.locator("summary code")).to_have_text(
            ["rows", "tokens", "steps", "vocabulary", "rollups", "rescored"]
        )
        card.locator("summary", has_text="rows").first.click()
        line = card.locator("tr", has_text="ref_reward").first
        expect(line).to_contain_text("reward of ref_response")
        page.get_by_label("Query in SQL").fill("SELECT  FROM rows")
        page.get_by_label("Query in SQL").evaluate("(field) => field.setSelectionRange(7, 7)")
        card.get_by_role("button", name="group", exact=True).click()
        expect(page.get_by_label("Query in SQL")).to_have_value('SELECT "group" FROM rows')
        page.locator("select.language").select_option("zh")
        expect(line).to_contain_text("ref_response 的奖励")


def test_a_saved_file_has_no_tab_for_queries(browser, board, tmp_path):
    with opened(browser, f"{board.address}/sql?run=first") as page:
        page.locator(".examples button").first.wait_for()
        page.get_by_role("button", name="Export").click()
        expect(page.get_by_text("All rollouts as CSV")).to_be_visible()
        expect(page.get_by_text("This view as one HTML file")).to_have_count(0)
        page.goto(f"{board.address}/overview?run=first")
        page.locator(".plot canvas").first.wait_for()
        page.get_by_role("button", name="Export").click()
        file = saved(page, page.get_by_text("This view as one HTML file").click, tmp_path)
    with opened(browser, file.as_uri()) as page:
        page.locator(".plot canvas").first.wait_for()
        expect(page.get_by_role("navigation").get_by_role("link")).to_have_text(["Overview"])


@pytest.mark.skipif(not AXE.is_file(), reason="npm ci in src/cavesson/board/web")
@pytest.mark.parametrize("wide", [True, False], ids=["1440", "390"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_an_answer_violates_no_rule_and_fits_a_phone(browser, board, wide, scheme):
    query = "SELECT step, avg(reward) AS reward, any_value(response) AS response FROM rows GROUP BY step"
    with opened(browser, address_of(board, query), wide=wide, color_scheme=scheme) as page:
        page.locator(".plot canvas").wait_for()
        page.locator(".sql-tables summary").first.click()
        page.set_viewport_size({"width": 1440 if wide else 390, "height": 2400})
        settle(page)
        assert violations(page) == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.evaluate("[...document.querySelectorAll('.view')].every((v) => v.scrollWidth <= v.clientWidth)")


@pytest.mark.skipif(not AXE.is_file(), reason="npm ci in src/cavesson/board/web")
@pytest.mark.parametrize("wide", [True, False], ids=["1440", "390"])
def test_rescored_rewards_violate_no_rule_and_fit_a_phone(browser, board, wide):
    with opened(browser, f"{board.address}/compare?sides=first,second", wide=wide) as page:
        section = page.locator(".rescored")
        section.locator("h2").first.scroll_into_view_if_needed()
        section.locator(".plot").first.scroll_into_view_if_needed()  # charts are drawn once they are in sight
        section.locator(".plot canvas").first.wait_for()
        settle(page)
        expect(section.locator("select option")).to_have_text(["first · tone"])
        assert violations(page) == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.evaluate("[...document.querySelectorAll('.view')].every((v) => v.scrollWidth <= v.clientWidth)")


def test_resting_on_the_tab_runs_no_query(browser, board):
    asked = []
    with opened(browser, address_of(board, "SELECT 1 AS one")) as page:
        page.locator(".answer-table td").wait_for()
        page.get_by_role("navigation").get_by_role("link", name="Overview").click()
        page.locator(".plot canvas").first.wait_for()
        page.on("request", lambda request: asked.append(request.url) if request.method == "POST" else None)
        page.get_by_role("navigation").get_by_role("link", name="SQL").hover()
        page.wait_for_timeout(400)
        assert asked == []


def test_compare_shows_recorded_and_rescored_rewards_of_a_single_run(browser, folder, tmp_path):
    with BoardProcess(folder / "first") as board, opened(browser, f"{board.address}/overview") as page:
        page.get_by_role("navigation").get_by_role("link", name="Compare").click()
        section = page.locator(".rescored")
        section.locator(".plot").first.scroll_into_view_if_needed()
        section.locator(".plot canvas").first.wait_for()
        facts = dict(zip(*(section.locator(f".facts {one}").all_inner_texts() for one in ("dt", "dd")), strict=True))
        got = client_of(board_of(folder / "first")).get("/api/runs/first/rescored", params={"name": "tone"}).json()
        assert parsed(facts["recorded"].split()[0]) == pytest.approx(got["recorded"][0], rel=1e-2)
        assert parsed(facts["tone"].split()[0]) == pytest.approx(-got["recorded"][0], rel=1e-2)
        assert facts["rank correlation"] == "−1"
        assert facts["Pairs whose order changes"].startswith("100 %")
        first = got["groups"][0]
        group = section.locator("article").first
        expect(group.locator("button")).to_have_count(2)
        group.get_by_role("link", name=f"Step {first['step']}").click()
        page.locator(".read-response").first.wait_for()
        expect(page).to_have_url(re.compile(f"step={first['step']}&read={first['responses'][0]['sample']}"))
        expect(page.locator(".read-response").first).to_contain_text("↻ tone")
        page.go_back()
        section.locator("article button").first.click()
        expect(page.locator("main h2")).to_have_text(f"Step {first['step']} · sample {first['responses'][0]['sample']}")

"""The board as people use it: while a run trains, with addresses that are sent around, with files that are saved."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from browser_helpers import BATCH, STEPS, BoardProcess, go, opened, parsed, record_run, saved, settle
from playwright.sync_api import Page, expect

import cavesson
from cavesson.index.folder import PROBLEM

# Writes the steps 2 to 4 of the run in argv[2], each when it is told to by a line on its standard input.
WRITER = """
import sys
sys.path.insert(0, sys.argv[1])
from browser_helpers import Vocabulary, record_step
from cavesson.record import Recorder
with Recorder(sys.argv[2], attempt=0) as recorder:
    for step, _ in zip(range(2, 5), sys.stdin):
        record_step(recorder, Vocabulary(), step, pause=2.0)
        recorder.flush()
"""


# Resumes the run in argv[2] from step 2 and writes two steps.
RESUMER = """
import sys
sys.path.insert(0, sys.argv[1])
from browser_helpers import Vocabulary, record_step
from cavesson.record import Recorder, begin_attempt
with Recorder(sys.argv[2], attempt=begin_attempt(sys.argv[2], start_step=2)) as recorder:
    for step in (2, 3):
        record_step(recorder, Vocabulary(), step)
"""


@pytest.mark.slow
def test_a_run_in_training_grows_on_the_page(browser, tmp_path):
    folder = record_run(tmp_path / "live", steps=2)
    command = [sys.executable, "-c", WRITER, str(Path(__file__).parent), str(folder)]
    writer = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
    with BoardProcess(folder) as board, opened(browser, board.address) as page:
        try:
            page.locator(".plot canvas").first.wait_for()
            page.evaluate("window.stayed = true")
            status = page.locator(".status")
            expect(status).to_contain_text(f"{2 * BATCH} rollouts")
            for step in (2, 3):
                print(file=writer.stdin, flush=True)
                expect(status).to_contain_text(f"{(step + 1) * BATCH} rollouts", timeout=30_000)
                # Without a step in the address, the newest is followed.
                expect(page.locator(".timeline output b")).to_have_text(str(step))
            trained = [r["reward"] for r in cavesson.open(folder).rows(steps=[3]).to_pylist() if r["split"] == "train"]
            mean = page.locator(".charts .card", has_text="Reward").first.locator(".key b").first
            expect(mean).to_have_text(f"{sum(trained) / len(trained):.4g}")
            expect(page.locator(".charts .card", has_text="Gradient norm").locator(".key b")).to_have_text(
                "0.25", timeout=20_000
            )
            follow_in_the_table(page, writer)
            assert page.evaluate("window.stayed")
        finally:
            writer.communicate("\n", timeout=60)


@pytest.mark.slow
def test_the_steps_of_an_attempt_that_was_superseded_leave_the_page(browser, tmp_path):
    """A run that is resumed far back, as after a crash, continues from there."""
    folder = record_run(tmp_path / "resumed", steps=30)
    command = [sys.executable, "-c", RESUMER, str(Path(__file__).parent), str(folder)]
    with BoardProcess(folder) as board, opened(browser, board.address) as page:
        go(page, "/settings")  # no request for the rollouts of a step that goes
        expect(page.locator(".timeline output b")).to_have_text("29")
        subprocess.run(command, check=True, timeout=60)
        expect(page.locator(".status")).to_contain_text(f"{4 * BATCH} rollouts", timeout=30_000)
        expect(page.locator(".status")).not_to_contain_text("indexing", timeout=30_000)
        for key, step in (("[", 2), ("]", 3), ("]", 3)):  # no step follows
            settle(page)
            page.keyboard.press(key)
            expect(page.locator(".timeline output b")).to_have_text(str(step))


def follow_in_the_table(page: Page, writer: subprocess.Popen) -> None:
    """Rows do not move under the reader's eyes: new ones come when asked for."""
    go(page, "/responses?sort=-step")
    expect(page.locator(".bar output")).to_have_text(f"{4 * BATCH} rollouts")
    first = page.locator('.tr[data-row="1"] .td').first
    expect(first).to_have_text("3")
    print(file=writer.stdin, flush=True)
    pill = page.get_by_role("button", name="Show new rollouts")
    pill.wait_for(timeout=30_000)
    expect(first).to_have_text("3")
    pill.click()
    expect(first).to_have_text("4")
    expect(page.locator(".bar output")).to_have_text(f"{5 * BATCH} rollouts")


DEEP = {
    "overview?step=4&smooth=0.6&zero=1&x=2-8&band=spread": ".plot canvas",
    "step?run=second&step=5&column=length": ".card canvas",
    "responses?run=second&sort=-kl_k1&filter=reward+%3E+1&q=garden&steps=1-8": ".statistics summary",  # comes last
    "responses?sort=length&at=6.3": ".detail .body",
    "tokens?step=7&sample=6&metric=value&strips=kl,entropy&stripes=1&token=3": ".tok.active",
    "patterns?kind=character&sort=frequency&step=3": ".patterns td",
    "prompt?sort=improved&solved=1.5": ".prompts td",
    "prompt?prompt=9ba1c20fec235cde&a=worst&b=3.2&order=-reward&step=3": ".prompt-responses td",
    "compare?sides=first%400-3,second,first%406-9&sort=difference": "article.group",
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("path", DEEP)
def test_an_address_reproduces_its_view(browser, board_told, path):
    """What the page shows at an address is the same in another browser, and after a reload."""
    seen = []
    for again in (False, True):
        with opened(browser, f"{board_told.address}/{path}") as page:
            for _ in range(1 + again):
                page.locator(DEEP[path]).first.wait_for()
                settle(page)
                seen.append(page.locator("body").inner_text())
                page.reload()
    assert seen[0] == seen[1] == seen[2] and len(seen[0]) > 200


@pytest.mark.slow
def test_what_is_turned_on_is_in_the_address(browser, board_told):
    with opened(browser, f"{board_told.address}/step?step=6") as page:
        page.get_by_role("button", name="as heat map").click()
        page.get_by_role("button", name="Lowest mean").click()
        page.reload()
        page.get_by_role("button", name="as ridges").wait_for()
        expect(page.get_by_role("button", name="Lowest mean")).to_have_attribute("aria-pressed", "true")
        page.goto(f"{board_told.address}/responses?at=2.5")
        page.get_by_role("button", name="difference to the reference").click()
        page.reload()
        page.locator(".detail").locator("ins, del").first.wait_for()
        page.goto(f"{board_told.address}/overview")
        page.get_by_text("All metrics").click()
        page.get_by_placeholder("Find a metric").fill("odd")
        page.reload()
        expect(page.locator(".charts.small .card h2")).to_have_text(["odd/{name}"])


@pytest.mark.slow
def test_stars_and_notes_outlive_the_server(browser, tmp_path):
    folder = record_run(tmp_path / "starred", steps=2)
    note = "look: <img src=x onerror=window.hacked=1> 好"
    with BoardProcess(folder) as board, opened(browser, f"{board.address}/responses") as page:
        for row in (3, 5):
            page.locator(f'.tr[data-row="{row}"] .td').nth(1).click()
            page.locator(".detail button.star").click()
        page.get_by_role("textbox", name="Note", exact=True).fill(note)
        page.locator(".detail h3").first.click()
        page.locator(f'.tr[data-row="3"] .star[title="{note}"]').or_(
            page.locator(f'.tr[data-row="5"] .star[title="{note}"]')
        ).wait_for()
        with page.expect_response(lambda answer: answer.request.method == "PUT"):
            page.locator('.tr[data-row="3"] .star').click()
        expect(page.locator(".star.set")).to_have_count(2)  # in the table and beside it
    with BoardProcess(folder) as board, opened(browser, f"{board.address}/responses?starred=1") as page:
        expect(page.locator(".bar output")).to_have_text("1 rollout")
        page.locator('.tr[data-row="1"] .td').first.click()
        expect(page.get_by_role("textbox", name="Note", exact=True)).to_have_value(note)
        export(page)
        stars = saved(page, page.get_by_role("link", name="Starred rollouts").click, tmp_path)
    (line,) = [json.loads(line) for line in stars.read_text().splitlines()]
    assert (line["step"], line["sample"]) == (0, 4)


def test_a_note_does_not_go_with_its_star(browser, tmp_path):
    folder = record_run(tmp_path / "noted", steps=2)
    with BoardProcess(folder) as board, opened(browser, f"{board.address}/responses?at=0.3") as page:
        star, note = page.locator(".detail button.star"), page.get_by_role("textbox", name="Note", exact=True)
        star.click()
        note.fill("why does it pay?")
        with page.expect_response(lambda answer: "why" in (answer.request.post_data or "")):
            note.press("Escape")
        page.keyboard.press("s")
        expect(star).to_have_attribute("aria-pressed", "false")
        page.keyboard.press("s")
        expect(star).to_have_attribute("aria-pressed", "true")
        expect(note).to_have_value("why does it pay?")


def test_a_star_that_cannot_be_kept_says_so(browser, board_told):
    with opened(browser, f"{board_told.address}/responses", forgiven="status of 409") as page:
        star = page.locator('.tr[data-row="3"] .star')
        star.wait_for()
        page.route(
            "**/labels/**", lambda route: route.fulfill(status=409, json={"error": "labels.jsonl cannot be written"})
        )
        star.click()
        expect(page.get_by_role("alert")).to_have_text("labels.jsonl cannot be written")
        expect(star).to_have_attribute("aria-pressed", "false")
        page.unroute("**/labels/**")
        for state in ("true", "false"):
            star.click()
            expect(star).to_have_attribute("aria-pressed", state)
            expect(page.get_by_role("alert")).to_have_count(0)


@pytest.mark.slow
def test_a_note_that_cannot_be_kept_stays_in_the_field(browser, tmp_path):
    folder = record_run(tmp_path / "noted", steps=2)
    with (
        BoardProcess(folder) as board,
        opened(browser, f"{board.address}/responses?at=0.3", forgiven="status of 409") as page,
    ):
        star, note = page.locator(".detail button.star"), page.get_by_role("textbox", name="Note", exact=True)
        with page.expect_response(lambda answer: answer.request.method == "PUT"):
            star.click()
        page.route("**/labels/**", lambda route: route.fulfill(status=409, json={"error": "the disk is full"}))
        note.fill("a long thought")
        note.press("Escape")
        expect(page.get_by_role("alert")).to_have_text("the disk is full")
        expect(note).to_have_value("a long thought")
        page.unroute("**/labels/**")
        note.press("!")
        with page.expect_response(lambda answer: answer.request.method == "PUT"):
            note.press("Escape")
        expect(page.get_by_role("alert")).to_have_count(0)


def test_what_is_typed_while_the_address_changes_is_kept(browser, board_told):
    """The address follows the field after a pause; what is typed just then must not be lost."""
    with opened(browser, f"{board_told.address}/responses") as page:
        field = page.locator('input[type="search"]').first
        field.click()
        for count, letter in enumerate("a longer text to look for", 1):
            page.keyboard.press("Space" if letter == " " else letter)
            page.wait_for_timeout(105 + 7 * (count % 6))  # about as long as the pause
        expect(field).to_have_value("a longer text to look for")


@pytest.mark.slow
def test_why_the_index_does_not_grow_is_said(browser, tmp_path):
    folder = record_run(tmp_path / "broken", steps=2)
    with BoardProcess(folder) as board, opened(browser, f"{board.address}/responses") as page:
        page.locator('.tr[data-row="1"]').wait_for()
        (folder / "index" / PROBLEM).write_text("the index cannot be updated: no space left")
        page.reload()
        expect(page.get_by_role("alert")).to_have_text("the index cannot be updated: no space left")


def export(page: Page) -> None:
    page.get_by_role("button", name="Export").click()


def shown_text(page: Page) -> str:
    """Return the text of a view but for what a file lacks: the field for notes, and links to other views."""
    page.evaluate(
        """() => document.querySelectorAll('.notes, .saves, .findings a[href*="responses"]').forEach((element) => {
            element.style.display = "none";
        })"""
    )
    return page.locator("main").inner_text()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("path", ["overview?step=4", "step?step=6", "tokens?step=5&sample=6", "patterns", "compare"])
def test_a_view_is_saved_as_a_file_that_needs_no_server(browser, board_told, tmp_path, path):
    with opened(browser, f"{board_told.address}/{path}") as page:
        page.locator(".card canvas").first.wait_for()
        settle(page)
        shown = shown_text(page)
        pictures = page.locator("main canvas").count()
        export(page)
        file = saved(page, page.get_by_role("button", name="This view as one HTML file").click, tmp_path)
    licences = re.findall(r"/\*! (\w+)\nThe MIT License.*?Permission is hereby granted", file.read_text(), re.DOTALL)
    # The pages on kinds of findings are Markdown, which the overview has to show without a server.
    assert set(licences) == {"preact", "uplot", *(["temml"] if path.startswith("overview") else [])}
    with opened(browser, f"file://{file}", offline=True) as page:
        page.locator(".card canvas").first.wait_for()
        settle(page)
        assert shown_text(page) == shown
        expect(page.locator("main canvas")).to_have_count(pictures)
        page.locator(".banner").wait_for()


def test_a_saved_table_keeps_its_rows_when_it_is_scrolled(browser, board_told, tmp_path):
    with opened(browser, f"{board_told.address}/responses") as page:
        page.locator('.tr[data-row="1"] .td').first.wait_for()
        settle(page)
        export(page)
        file = saved(page, page.get_by_role("button", name="This view as one HTML file").click, tmp_path)
    with opened(browser, f"file://{file}", offline=True) as page:
        first = page.locator('.tr[data-row="1"]')
        text = first.inner_text()
        page.locator(".table").hover()
        for way in (4000, -4000):  # asks for what the file does not have
            page.mouse.wheel(0, way)
            settle(page)
        expect(page.locator(".table .chunk .tr").first).to_be_visible()
        assert first.inner_text() == text


@pytest.mark.slow
def test_a_table_is_saved_with_its_rollouts(browser, board_told, tmp_path):
    with opened(browser, f"{board_told.address}/responses?sort=-reward&filter=reward+%3E+2.5") as page:
        page.locator('.tr[data-row="2"] .td').first.wait_for()
        rows = page.locator(".table .chunk .tr").all_inner_texts()[:20]
        export(page)
        file = saved(page, page.get_by_role("button", name="This table with its first").click, tmp_path)
    with opened(browser, f"file://{file}", offline=True) as page:
        page.locator('.tr[data-row="2"] .td').first.wait_for()
        assert page.locator(".table .chunk .tr").all_inner_texts()[:20] == rows
        page.locator('.tr[data-row="2"] .td').first.click()
        title = page.locator(".detail h2").inner_text()
        page.locator(".detail").get_by_role("button", name="Tokens").click()
        page.locator(".tok").first.wait_for()
        expect(page.locator("main h2")).to_have_text(title)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", ["CSV", "PARQUET", "JSONL"])
def test_rows_are_saved_as_tables(browser, board_told, runs_told, tmp_path, form):
    every = cavesson.open(runs_told[0]).rows().to_pylist()
    wanted = [row for row in every if row["reward"] > 2 and row["split"] == "train"]
    with opened(browser, f"{board_told.address}/responses?sort=-reward&filter=reward+%3E+2") as page:
        expect(page.locator(".bar output")).to_have_text(f"{len(wanted)} rollouts")
        export(page)
        file = saved(page, page.get_by_role("link", name=f"These rows as {form}").click, tmp_path)
    if form == "CSV":
        options = pyarrow.csv.ParseOptions(newlines_in_values=True)
        got = pyarrow.csv.read_csv(file, parse_options=options).to_pylist()
    elif form == "PARQUET":
        got = pq.read_table(file).to_pylist()
    else:
        got = [json.loads(line) for line in file.read_text().splitlines()]
    rewards = np.array([row["reward"] for row in got], np.float32)  # what the board sorts by
    assert len(got) == len(wanted) and (np.diff(rewards) <= 0).all()
    got.sort(key=lambda row: (row["step"], row["sample"]))
    for name in ("step", "sample", "reward", "kl_k1", "prompt", "response"):
        assert [row[name] for row in got] == [row[name] for row in wanted], name


def test_what_a_small_table_shows_is_saved_as_csv(browser, board_told, tmp_path):
    with opened(browser, f"{board_told.address}/patterns") as page:
        line = page.locator(".patterns tbody tr").first
        line.wait_for()
        cells = line.locator("td").all_inner_texts()
        page.locator(".patterns").hover()
        file = saved(page, page.locator(".patterns").get_by_role("button", name="CSV").click, tmp_path)
    first = pyarrow.csv.read_csv(file).to_pylist()[0]
    assert first["pattern"] == cells[0] and first["rollouts"] == parsed(cells[7])
    assert first["reward_effect"] == pytest.approx(parsed(cells[4]), rel=5e-3)
    assert first["reward_effect_sd"] == pytest.approx(parsed(cells[5]), rel=5e-3)


def test_charts_are_saved_as_pictures(browser, board_told, tmp_path):
    with opened(browser, f"{board_told.address}/overview") as page:
        card = page.locator(".card", has=page.locator(".plot canvas")).first
        card.hover()
        svg = saved(page, card.get_by_role("button", name="SVG").click, tmp_path)
        png = saved(page, card.get_by_role("button", name="PNG").click, tmp_path)
    curves = re.findall(r'<polyline points="([^"]+)"', svg.read_text())
    assert max(len(points.split()) for points in curves) == STEPS
    assert "script" not in svg.read_text()
    assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 8_000

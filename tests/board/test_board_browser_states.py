"""What the page says if there is nothing to show, and what can be taken away from it: texts, files, paper."""

import re
import shutil

import numpy as np
import pytest
from browser_helpers import VIEWS, BoardProcess, Vocabulary, opened, record_run, saved, settle, wait_for
from playwright.sync_api import expect
from test_board_browser_views import LANGUAGES, words

import cavesson
from cavesson.record import Recorder, begin_attempt, write_run

CLIPBOARD = {"permissions": ["clipboard-read", "clipboard-write"]}
LINES = 400


def record_long(folder):
    """A run of one response of many lines."""
    write_run(folder, {"algorithm": "grpo"})
    vocabulary, text = Vocabulary(), "\n".join(f" line {i} of rain" for i in range(LINES))
    ids = np.array([vocabulary.ids(text)])
    with Recorder(folder, attempt=begin_attempt(folder, start_step=0)) as recorder:
        rows = {"sample": [0], "group": [0], "prompt": ["Write."], "response": [text], "reward": [1.0]}
        tokens = {"mask": np.ones_like(ids, bool), "token_id": ids, "logprob": np.full(ids.shape, -1.0, np.float32)}
        recorder.rollouts(0, rows, tokens)
    vocabulary.write(folder)
    return folder


def test_the_page_says_that_the_server_is_gone_and_continues_once_it_is_back(browser, tmp_path):
    run = record_run(tmp_path / "run", steps=2)
    board = BoardProcess(run)
    board.__enter__()
    with opened(browser, f"{board.address}/responses", forgiven="Failed to load resource") as page:
        page.locator(VIEWS["responses"]).first.wait_for()
        settle(page)
        board.__exit__()
        bar = page.locator(".banner.error")
        for language in LANGUAGES:
            page.locator("select.language").select_option(language)
            expect(bar).to_have_text(words(language)["connectionLost"])
        page.locator('.tr[data-row="2"] .td').last.click()  # what is asked for meanwhile is asked for again
        expect(page.locator(".detail .error")).to_have_text(words("vi")["connectionLost"])
        with BoardProcess(run, port=board.port):
            expect(bar).to_have_count(0)
            page.locator(".detail .body").wait_for()
            expect(page.locator(".detail .error")).to_have_count(0)


def test_a_run_whose_folder_is_gone_says_so(browser, tmp_path):
    run = record_run(tmp_path / "run", steps=2)
    with BoardProcess(run) as board, opened(browser, board.address, forgiven="status of 404") as page:
        wait_for(lambda: board.json("api/runs/run/findings") is not None)
        assert board.json("api/runs")[0]["gone"] is False
        shutil.move(run, tmp_path / "elsewhere")
        for language in LANGUAGES:
            page.reload()
            page.locator("select.language").select_option(language)
            expect(page.locator("main")).to_have_text(words(language)["runGone"].replace("{path}", str(run)))
        page.reload()
        assert board.json("api/runs")[0]["live"] is False
        shutil.move(tmp_path / "elsewhere", run)
        page.reload()
        page.locator(VIEWS["overview"]).first.wait_for()


def test_copied_tokens_are_the_recorded_text(browser, board_told, runs_told):
    recorded = cavesson.open(runs_told[0]).rows().to_pylist()
    text = next(row["response"] for row in recorded if (row["step"], row["sample"]) == (3, 6))
    with opened(browser, f"{board_told.address}/tokens?step=3&sample=6&stripes=1", **CLIPBOARD) as page:
        page.locator(".tok").first.wait_for()
        settle(page)
        clipboard = "navigator.clipboard.readText()"
        page.evaluate(
            """() => {
                const tokens = document.querySelectorAll(".tok"), range = document.createRange();
                range.setStart(tokens[1].firstChild, 2);
                range.setEndAfter(tokens[tokens.length - 1]);
                getSelection().removeAllRanges();
                getSelection().addRange(range);
            }"""
        )
        first = page.locator(".tok").first.inner_text()
        page.keyboard.press("Control+C")
        assert page.evaluate(clipboard) == text[len(first) + 2 :]
        page.get_by_role("button", name="Copy").click()
        expect(page.get_by_role("button", name="Copied")).to_be_visible()
        assert page.evaluate(clipboard) == text
        page.goto(f"{board_told.address}/responses?at=3.6")
        page.locator(".detail").get_by_role("button", name="Copy").click()
        expect(page.get_by_role("button", name="Copied")).to_be_visible()
        assert page.evaluate(clipboard) == text


def test_the_box_of_a_long_response_grows_with_the_window(browser, tmp_path):
    run = record_long(tmp_path / "run")
    with (
        BoardProcess(run) as board,
        opened(browser, f"{board.address}/tokens?step=0&sample=0", **CLIPBOARD) as page,
    ):
        page.locator(".minimap").wait_for()
        heights = []
        for window in (500, 900, 1600):
            page.set_viewport_size({"width": 1440, "height": window})
            settle(page)
            heights.append(page.locator(".token-box").evaluate("(box) => box.offsetHeight"))
        # Lines of 27 pixels: at least 15, and six tenths of a higher window.
        assert heights == [15 * 27 + 16, int(0.6 * 900 / 27) * 27 + 16, int(0.6 * 1600 / 27) * 27 + 16]
        page.get_by_role("button", name="Copy").click()
        expect(page.get_by_role("button", name="Copied")).to_be_visible()
        assert page.evaluate("navigator.clipboard.readText()").count("\n") == LINES - 1


@pytest.mark.parametrize(("act", "tabs"), [("exportView", ["Responses"]), ("exportSelection", ["Responses", "Tokens"])])
def test_a_saved_file_has_only_the_tabs_that_it_has_data_for(browser, board_told, tmp_path, act, tabs):
    with opened(browser, f"{board_told.address}/responses?steps=0-0") as page:
        page.locator(VIEWS["responses"]).first.wait_for()
        page.get_by_role("button", name="Export").click()
        label = words("en")[act].replace("{count}", "200")
        file = saved(page, lambda: page.get_by_role("button", name=label).click(), tmp_path)
    with opened(browser, file.as_uri()) as page:
        page.locator(VIEWS["responses"]).first.wait_for()
        expect(page.get_by_role("navigation").get_by_role("link")).to_have_text(tabs)
        page.keyboard.press("g")
        page.keyboard.press("p")
        page.keyboard.press("g")
        page.keyboard.press("t")
        expect(page).to_have_url(re.compile("#tokens" if "Tokens" in tabs else "#responses|html$"))


def test_a_view_is_printed_in_full_without_its_controls(browser, board_told):
    with opened(browser, f"{board_told.address}/overview") as page:
        page.locator(".plot canvas").first.wait_for()
        settle(page)
        whole = page.locator("main").evaluate("(main) => main.scrollHeight")
        assert whole > 1.5 * 900
        page.emulate_media(media="print")
        assert page.evaluate("document.documentElement.scrollHeight") >= whole - 100  # without the bars
        for hidden in (".tabs", ".scrubber", ".bar", ".saves"):
            expect(page.locator(hidden).first).to_be_hidden()
        expect(page.locator(".top b.run, .top select.run")).to_be_visible()

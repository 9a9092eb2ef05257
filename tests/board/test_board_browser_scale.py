"""Hostile records, ten million rows, and a response of 32,000 tokens."""

import time
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from browser_helpers import COLUMNS, VIEWS, BoardProcess, Vocabulary, go, opened, record_run, record_step
from playwright.sync_api import Page, expect

from cavesson.record import Recorder, begin_attempt, write_run, write_vocabulary

HOSTILE = [
    "<script>window.hacked = 1</script>",
    '"><img src=x onerror="window.hacked = 2">',
    "</script></textarea></title><svg onload='window.hacked = 3'>",
    "javascript:window.hacked = 4",
    "{{constructor.constructor('window.hacked = 5')()}} ${window.hacked = 6}",
    "\x1b[31mred\x1b[0m \x07 \x9b31m",
    "a\x00b\x00c",
    "\u202eevil\u202c \u2066end",
    "../../../../etc/passwd",
    "\u2028line\u2029\ufeffbom",
    "e" + "\u0301" * 3_000,
    "\n" * 3_000,
    "word " * 200_000,
    "x" * 1_000_000,
    "مرحبا بالعالم hello שלום",
    "",
]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A record whose texts and names all try to be more than text."""
    folder = tmp_path_factory.mktemp("hostile") / "a <b>run & more"
    write_run(folder, {"algorithm": HOSTILE[1], "name": HOSTILE[0]})
    write_vocabulary(folder, ["a", "b"], HOSTILE[1:3])
    size = len(HOSTILE)
    with Recorder(folder, attempt=begin_attempt(folder, start_step=0)) as recorder:
        for step in range(3):
            rows = {
                "sample": np.arange(size),
                "group": np.arange(size) // 4,
                "prompt": [text[:1000] for text in HOSTILE],
                "response": HOSTILE,
                "reward": np.arange(size) + step,
                "reward_parts": [{HOSTILE[0]: 1.0, 'q"]': 2.0}] * size,
                "ref_response": HOSTILE[::-1],
                "ref_reward": np.full(size, 3.0),
                "ground_truth": HOSTILE,
                "finish_reason": HOSTILE[1:2] * size,
                "extra": ["{}"] * size,
            }
            shape = (size, 4)
            tokens = {"mask": np.ones(shape, bool), "token_id": np.tile([0, 1, 0, 1], (size, 1))}
            tokens |= {"logprob": np.full(shape, -1.0), "ref_logprob": np.full(shape, -2.0)}
            recorder.rollouts(step, rows, tokens)
            recorder.metrics(step, {HOSTILE[0]: 1.0, "loss/" + HOSTILE[1]: 2.0})
    with BoardProcess(folder) as board:
        yield board


@pytest.mark.slow
def test_a_hostile_record_is_shown_and_does_nothing(browser, hostile, tmp_path):
    with opened(browser, f"{hostile.address}/responses?sort=sample&steps=1-1") as page:
        page.locator('.tr[data-row="5"] .td').first.wait_for()
        for place, text in enumerate(HOSTILE):
            page.locator(f'.tr[data-row="{place + 1}"] .td').first.click()
            expect(page.locator(".detail h2")).to_have_text(f"Step 1 · sample {place}")
            page.locator(".detail .body").wait_for()
            if place < 4:
                expect(page.locator(".detail pre.text").nth(1)).to_have_text(text)
        expect(page.locator(".table")).to_contain_text("a⟨NUL⟩b⟨NUL⟩c")
        expect(page.locator(".table")).to_contain_text("⟨RLO⟩evil⟨PDF⟩")
        expect(page.locator(".table")).to_contain_text("⟨ESC⟩[31mred")
        for view, sign in VIEWS.items():
            go(page, f"/{view}?step=1&sample=2")
            page.locator(sign).first.wait_for()
        go(page, "/overview")
        page.locator("details.more > summary", has_text="All metrics").click()
        expect(page.locator("details.more", has_text="All metrics")).to_contain_text(HOSTILE[0])
        assert page.evaluate("document.querySelectorAll('#app script, #app img, #app iframe, #app object').length") == 0
        assert page.evaluate("document.title").startswith("a <b>run & more")


@pytest.mark.slow
def test_a_hostile_view_stays_harmless_as_a_file(browser, hostile, tmp_path):
    for view in ("responses?at=1.0", "tokens?step=1&sample=2", "patterns"):
        with opened(browser, f"{hostile.address}/{view}") as page:
            page.locator(VIEWS[view.split("?")[0]]).first.wait_for()
            page.get_by_role("button", name="Export").click()
            with page.expect_download() as waiting:
                page.get_by_role("button", name="This view as one HTML file").click()
            file = tmp_path / "view.html"
            waiting.value.save_as(file)
        with opened(browser, f"file://{file}", offline=True) as page:
            page.locator(VIEWS[view.split("?")[0]]).first.wait_for()


MANY = 10_000_000


def many_rows(address: str) -> dict:
    """Answer as the server does for a run of ten million rollouts; that it does so in time is for the benchmark."""
    asked = parse_qs(urlsplit(address).query)
    offset, limit = int(asked["offset"][0]), int(asked["limit"][0])
    row = {"group": 0, "split": "train", "parts": {}, "finish_reason": "eos", "prompt": "p", "response": "r"}
    row |= {"hit": None, "starred": False, "note": None, "reward": 1.0, "step": 1}
    found = [row | {"row": i, "sample": i} for i in range(offset, min(offset + limit, MANY))]
    return {"total": MANY, "at_most": False, "most": MANY, "stopped": None, "offset": offset, "rows": found}


def drag_bar(page: Page, share: float) -> None:
    """Put the scroll bar somewhere and wait for the rows that belong there."""
    page.locator(".table").evaluate("(e, share) => { e.scrollTop = share * (e.scrollHeight - e.clientHeight) }", share)
    page.wait_for_function(
        "([low, high]) => [...document.querySelectorAll('.table .chunk .tr')].some((row) => "
        "{ const at = +row.ariaRowIndex; return at > low && at < high && row.children[2]?.textContent })",
        arg=[share * MANY * 0.99, share * MANY * 1.01],
    )


def first_in_view(page: Page) -> int:
    return page.locator(".table").evaluate(
        "(table) => { const top = table.querySelector('.head').getBoundingClientRect().bottom;"
        " return Math.min(...[...table.querySelectorAll('.chunk .tr')]"
        ".filter((row) => row.getBoundingClientRect().bottom > top + 1).map((row) => +row.ariaRowIndex)) }"
    )


def shows_sample(page: Page, index: int) -> None:
    cell = page.locator(f'.tr[data-row="{index + 1}"] .td').nth(1)
    expect(cell).to_have_text(str(index))  # an identifier has no separators
    expect(cell).to_be_in_viewport()


@pytest.mark.slow
def test_ten_million_rows_scroll_to_anywhere(browser, board_told):
    # The rollout under the mouse is asked for in advance, and is none of this run.
    with opened(browser, f"{board_told.address}/patterns", forgiven="404") as page:
        page.route("**/api/runs/*/rows?*", lambda route, request: route.fulfill(json=many_rows(request.url)))
        go(page, "/responses?columns=step,sample,response")
        expect(page.locator(".bar output")).to_have_text("10,000,000 rollouts")
        table = page.locator(".table")
        assert table.evaluate("(e) => e.scrollHeight") <= 17_000_000  # the tallest element that every browser can draw
        for share in (0.5, 0.123, 0.9):
            drag_bar(page, share)
        # Small moves go row by row wherever they are.
        first = first_in_view(page)
        page.mouse.move(500, 500)
        page.mouse.wheel(0, 27 * 5)
        page.wait_for_timeout(300)
        assert first_in_view(page) == first + 5
        shows_sample(page, first + 10)
        table.press("End")
        shows_sample(page, MANY - 1)
        table.press("Home")
        shows_sample(page, 0)


LONG = 32_000


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """A run with one response of 32,000 tokens."""
    folder = record_run(tmp_path_factory.mktemp("long") / "long", steps=1)
    vocabulary = Vocabulary()
    words = [f" word{i}" for i in range(500)] + ["\n"]
    known = [vocabulary.ids(word)[0] for word in words]
    generator = np.random.default_rng(5)
    chosen = generator.integers(0, len(words), LONG)
    text = "".join(words[i] for i in chosen)
    tokens = {name: generator.normal(-1, 1, (1, LONG)) for name in COLUMNS}
    tokens |= {"mask": np.ones((1, LONG), bool), "token_id": np.array(known)[chosen][None]}
    with Recorder(folder, attempt=0) as recorder:
        rows = {"sample": [0], "prompt": ["p"], "response": [text], "reward": [1.0], "group": [0], "split": ["train"]}
        recorder.rollouts(1, rows, tokens)
        record_step(recorder, vocabulary, 2)
    vocabulary.write(folder)
    with BoardProcess(folder) as board:
        yield board


@pytest.mark.slow
def test_a_response_of_32_000_tokens_opens_and_scrolls(browser, long):
    with opened(browser, f"{long.address}/tokens?step=2&sample=0") as page:
        page.locator(".tok").first.wait_for()
        started = time.monotonic()
        go(page, "/tokens?step=1&sample=0")
        expect(page.locator("main h2")).to_have_text("Step 1 · sample 0")
        assert time.monotonic() - started < 20  # `make bench-board` says how fast it really is
        page.locator(".minimap canvas").wait_for()
        # Only what is in view exists, wherever that is.
        lines = page.locator(".token-text .virtual")
        for share in (0, 0.5, 1):
            lines.evaluate("(e, share) => { e.scrollTop = share * e.scrollHeight }", share)
            page.wait_for_timeout(100)
            assert page.locator(".tok").count() < 1_000
        last = page.locator(f'.tok[data-token="{LONG - 1}"]')
        deadline = time.monotonic() + 60
        while not last.count():  # the map beside the text has just made its lines shorter
            assert time.monotonic() < deadline
            lines.evaluate("(e) => { e.scrollTop = e.scrollHeight }")
            page.wait_for_timeout(100)
        expect(last).to_be_in_viewport()
        last.hover()
        expect(page.locator(".token-card")).to_contain_text("token 31,999 of 32,000")
        box = page.locator(".minimap").bounding_box()
        page.mouse.click(box["x"] + 5, box["y"] + 2)
        page.wait_for_function("+document.querySelector('.tok').dataset.token < 1000")

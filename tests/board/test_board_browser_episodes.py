"""The page shows an episode as a conversation: turns, calls, results, errors, and why a token was not learned."""

import json

import pytest
from browser_helpers import BoardProcess, go, opened, saved, settle
from episode_helpers import record_episodes
from playwright.sync_api import expect

from cavesson.importers import import_run
from cavesson.record import Recorder, begin_attempt, write_run

RESPONSE = ".detail h3:has-text('Response'):not(:has-text('Prompt')) + .conversation"
CHATML = (
    "Wait.<|im_end|>\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\nIt is 42."
)


DECODED = {
    "input": "system\nBe short.\nuser\n{}\nassistant\n",
    "output": "Wait.\nuser\n<tool_response>\n42\n</tool_response>\nassistant\nIt is 42.",
    "score": 1.0,
    "step": 5,
}
"""A line of verl, which decodes without special tokens."""


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    """The board of a run with turns, and of an imported one whose texts have the marks of a template, without turns."""
    folder = tmp_path_factory.mktemp("episodes")
    line = {"step": 0, "prompt": "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n", "reward": 1.0}
    lines = [line | {"response": CHATML}, line | {"response": '<img src=x onerror="window.hacked=1"> **a** $x^2$'}]
    (folder / "log.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    import_run(folder / "log.jsonl", folder / "imported", "rl-logging-board")
    task = "Solve the problem, and write the answer behind four hashes. "
    lines = [DECODED | {"input": DECODED["input"].format(task + f"What is {i} * 7?")} for i in (6, 8)]
    (folder / "5.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    import_run(folder / "5.jsonl", folder / "decoded")
    with BoardProcess(record_episodes(folder / "run"), folder / "imported", folder / "decoded") as board:
        yield board


def turns(page):
    """Who speaks in the response, and what else the head of each turn says."""
    heads = page.locator(f"{RESPONSE} .turn > header")
    return [" ".join(text.split()) for text in heads.all_inner_texts()]


def test_the_panel_shows_turns_calls_and_errors(browser, board):
    with opened(browser, f"{board.address}/responses?step=1&at=1.1") as page:
        expect(page.locator(".turn.failed")).to_have_count(1)
        search, again = "Tool search failed 2 s", "Tool search 0.5 s"
        assert turns(page) == ["Assistant", search, "Assistant", again, "Assistant", "User", "Assistant"]
        failed = page.locator(".turn.failed")
        expect(failed).to_contain_text("timed out after 2 seconds")
        expect(failed.locator(".arguments div")).to_have_text(["a6", "b7"])
        family = failed.locator("pre.code").evaluate("e => getComputedStyle(e).fontFamily")
        assert "monospace" in family
        for _ in ("the question", "the call", "its result"):
            page.keyboard.press("n")
        expect(page.locator(".turn.here")).to_contain_text("timed out")
        page.keyboard.press("p")
        expect(page.locator(".turn.here")).not_to_contain_text("timed out")


def test_thinking_is_folded_and_markdown_and_formulas_are_shown_on_demand(browser, board):
    with opened(browser, f"{board.address}/responses?step=1&at=1.0") as page:
        response = page.locator(RESPONSE)
        expect(response.locator("details.system").first).to_contain_text("Thinking")
        expect(response.get_by_text("I should multiply.")).to_be_hidden()
        response.locator("summary").first.click()
        expect(response.get_by_text("I should multiply.")).to_be_visible()
        expect(response).to_contain_text("**42**")
        scripts = "performance.getEntriesByName(new URL('markdown.js', document.baseURI).href).length"
        assert page.evaluate(scripts) == 0  # a reader who asks for no Markdown does not load its libraries
        page.get_by_role("button", name="Markdown").click()
        expect(response.locator("b", has_text="42")).to_have_count(1)
        expect(response.locator("math mo").first).to_have_text("⋅")
        expect(response.locator("pre.code").last).to_have_text("print(6 * 7)")
        page.get_by_role("button", name="Text", exact=True).click()
        expect(page.locator(".detail pre.text", has_text="<|im_end|>")).to_have_count(1)
        page.keyboard.press("?")
        expect(page.locator(".dialog")).to_contain_text("Next, previous turn")


def test_a_saved_page_has_the_markdown_that_was_shown(browser, board, tmp_path):
    with opened(browser, f"{board.address}/responses?step=1&at=1.0&shown=markdown") as page:
        expect(page.locator(".conversation math mo").first).to_have_text("⋅")
        settle(page)
        page.get_by_role("button", name="Export").click()
        file = saved(page, page.get_by_role("button", name="This view as one HTML file").click, tmp_path)
    with opened(browser, f"file://{file}", offline=True) as page:
        expect(page.locator(".conversation math mo").first).to_have_text("⋅")
        expect(page.locator(".conversation b", has_text="42")).to_have_count(1)
    with opened(browser, f"{board.address}/responses?step=1&at=1.0") as page:
        settle(page)
        page.get_by_role("button", name="Export").click()
        file = saved(page, page.get_by_role("button", name="This view as one HTML file").click, tmp_path)
    with opened(browser, f"file://{file}", offline=True) as page:
        page.get_by_role("button", name="Markdown").click()
        expect(page.locator(".conversation").last).to_contain_text("**42**")


def test_a_token_that_was_not_learned_is_grey_and_says_why(browser, board):
    with opened(browser, f"{board.address}/tokens?step=1&sample=1") as page:
        heads = page.locator(".turn-line")
        expect(heads.nth(1)).to_contain_text("search")
        expect(heads.nth(5)).to_have_text("User")
        for text, words in (
            ("<|im_end|>", "chat template"),
            ("forty-two", "result of a tool"),
            (" sure?", "user's reply"),
        ):
            token = page.locator(".tok.masked", has_text=text).first
            token.click()
            expect(page.locator(".token-card .why")).to_contain_text(words)
            assert token.evaluate("e => getComputedStyle(e).backgroundColor") == "rgba(0, 0, 0, 0)"
        learned = page.locator(".tok:not(.masked)").first
        assert learned.evaluate("e => getComputedStyle(e).backgroundColor") != "rgba(0, 0, 0, 0)"
        learned.click()
        expect(page.locator(".token-card .why")).to_have_count(0)
        page.keyboard.press("n")
        expect(page.locator(".token-card .why")).to_contain_text("result of a tool")
        page.keyboard.press("p")
        expect(page.locator(".token-card .why")).to_have_count(0)


def test_the_table_shows_answers_and_tools_and_is_filtered_by_calls(browser, board):
    columns = "sample,turns,calls,call_errors,tools,response"
    with opened(browser, f"{board.address}/responses?scope=step&step=0&columns={columns}") as page:
        cells = page.locator('.tr[data-row="2"] .td')
        expect(cells).to_have_text(["1", "4", "2", "1", "search ×2 ✕1", "Yes."])
        page.locator("input.filter").fill('tool == "search" and error')
        page.keyboard.press("Enter")
        expect(page.locator("output.muted")).to_have_text("1 rollout")
        page.locator("input.filter").fill('tool == "multiply" and error')
        page.keyboard.press("Enter")
        expect(page.locator(".tr .td.words").last).to_have_text("I cannot tell.")
    with opened(browser, f"{board.address}/responses?run=imported&filter=turns+>+2", forgiven="400") as page:
        expect(page.locator("main")).to_contain_text("this run has no recorded turns")


@pytest.mark.slow
def test_step_and_overview_show_tools_and_a_saved_page_does_too(browser, board, tmp_path):
    with opened(browser, f"{board.address}/step?step=1") as page:
        row = page.locator(".tools tbody tr", has_text="search").locator("td")
        wanted = ["search", "3", "1 (33 %)", "1", "2", "2", "0.25", "0.875", "timed out after 2 seconds"]
        expect(row).to_have_text(wanted)
        settle(page)
        page.get_by_title("Export").click()
        path = saved(page, page.get_by_text("This view as one HTML file").click, tmp_path)
        page.keyboard.press("Escape")
        row.first.click()
        expect(page.locator("output.muted")).to_have_text("2 rollouts")
        go(page, "/overview?step=1")
        for title in ("Turns", "Calls of tools", "Share of failed calls", "Seconds per call", "How episodes end"):
            expect(page.locator(".card :is(h2, h3)", has_text=title).first).to_be_visible()
    with opened(browser, path.as_uri()) as page:
        expect(page.locator(".tools tbody tr")).to_have_count(2)


@pytest.mark.slow
def test_marks_of_a_template_are_shown_as_a_conversation_and_markup_as_text(browser, board):
    with opened(browser, f"{board.address}/responses?run=imported&at=0.0&step=0") as page:
        expect(page.locator(".turn.tool")).to_have_count(1)
        assert turns(page) == ["Assistant", "Tool", "Assistant"]
        assert page.locator(RESPONSE).get_by_text("<|im_end|>").count() == 0
        go(page, "/responses?run=imported&at=0.1&step=0&shown=markdown")
        rendered = page.locator(".detail .rendered")
        expect(rendered).to_have_count(1)
        expect(rendered).to_contain_text('<img src=x onerror="window.hacked=1">')
        expect(rendered.locator("b")).to_have_text("a")
        expect(rendered.locator("math msup")).to_have_count(1)
        assert page.locator(".detail img").count() == 0


def test_what_was_decoded_without_special_tokens_is_a_conversation(browser, board):
    with opened(browser, f"{board.address}/responses?run=decoded&at=5.0&step=5&columns=sample,prompt,response") as page:
        prompt = page.locator(".detail h3:has-text('Prompt') + .conversation")
        expect(prompt.locator("details.system summary")).to_contain_text("System prompt")
        expect(prompt.get_by_text("Be short.")).to_be_hidden()
        expect(prompt.locator(".turn")).to_have_count(1)
        expect(prompt.locator(".turn")).to_contain_text("What is 6 * 7?")
        assert turns(page) == ["Assistant", "Tool", "Assistant"]
        page.keyboard.press("Escape")
        go(page, "/responses?run=decoded&step=5&columns=sample,prompt,response")
        expect(page.locator('.tr[data-row="1"] .td')).to_have_text(["0", "…6 * 7?", "It is 42."])
        expect(page.locator('.tr[data-row="2"] .td')).to_have_text(["1", "…8 * 7?", "It is 42."])


@pytest.mark.parametrize(("language", "words"), [("zh-CN", ["助手", "失败"]), ("vi-VN", ["Trợ lý", "lỗi"])])
def test_roles_and_errors_are_named_in_each_language(browser, board, language, words):
    with opened(browser, f"{board.address}/responses?step=1&at=1.1", language=language) as page:
        for word in words:
            expect(page.locator(".detail .turn header", has_text=word).first).to_be_visible()


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """The board of a run whose turns say what its responses lack, as a recorder of final answers leaves it."""
    folder = tmp_path_factory.mktemp("apart") / "run"
    write_run(folder, {"algorithm": "grpo"})
    rows = {"prompt": ["Where?"] * 2, "response": ["In Hanoi.", "In Hue."], "reward": [1.0, 0.0]}
    call = {"role": "tool", "name": "look_up", "arguments": '{"place": "Ngoc Son"}'}
    lines = [
        {"sample": 0, "role": "assistant", "text": "Let me see."},
        {"sample": 0, **call, "text": "a temple on a lake", "seconds": 2.5},
        {"sample": 0, "role": "user", "text": "Which city?"},
        {"sample": 1, **call, "text": "", "error": "the lake is closed", "seconds": 0.5},
        {"sample": 1, "role": "assistant", "text": "In Hue."},
    ]
    names = dict.fromkeys(name for line in lines for name in line)
    with Recorder(folder, attempt=begin_attempt(folder, start_step=0)) as recorder:
        recorder.rollouts(
            0, rows, {"token_id": [[1], [2]]}, {name: [line.get(name) for line in lines] for name in names}
        )
    with BoardProcess(folder) as board:
        yield board


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("q", "sample", "said", "part"),
    [
        ("temple", 0, "turn 1 look_up", "pre.code"),
        ("which CITY", 0, "turn 2 User", "pre.text"),
        ("is closed", 1, "turn 0 look_up", "p.error"),
    ],
)
def test_a_search_shows_the_turn_that_has_it(browser, apart, q, sample, said, part):
    with opened(browser, f"{apart.address}/responses?columns=sample,response&q={q}") as page:
        expect(page.locator("output.muted")).to_have_text("1 rollout")
        cells = page.locator('.tr[data-row="1"] .td')
        expect(cells.first).to_have_text(str(sample))
        expect(cells.last.locator(".tool")).to_have_text(said)
        expect(cells.last.locator("mark")).to_have_text(q, ignore_case=True)
        cells.last.click()
        expect(page.locator(f".detail .turn {part} mark")).to_have_text(q, ignore_case=True)


@pytest.mark.slow
def test_a_search_marks_arguments_and_a_saved_page_shows_where_it_was(browser, apart, tmp_path):
    with opened(browser, f"{apart.address}/responses?columns=sample,response&q=Ngoc") as page:
        expect(page.locator("output.muted")).to_have_text("2 rollouts")
        page.locator('.tr[data-row="2"] .td').last.click()
        expect(page.locator(".detail .arguments mark")).to_have_text("Ngoc")
        settle(page)
        page.get_by_role("button", name="Export").click()
        file = saved(page, page.get_by_role("button", name="This view as one HTML file").click, tmp_path)
    with opened(browser, f"file://{file}", offline=True) as page:
        expect(page.locator(".tr .td .tool")).to_have_text(["turn 1 look_up", "turn 0 look_up"])


@pytest.mark.parametrize(
    ("condition", "sample"),
    [
        ('tool == "look_up" and seconds > 2', "0"),
        ('"Son" in arguments and error', "1"),
        ('"temple" in result', "0"),
        ('"closed" in error', "1"),
    ],
)
def test_a_filter_asks_what_a_call_took_and_said(browser, apart, condition, sample):
    with opened(browser, f"{apart.address}/responses?columns=sample,response") as page:
        box = page.locator("input.filter")
        for name in ("seconds", "arguments", "result"):
            assert name in box.get_attribute("title")
        box.fill(condition)
        page.keyboard.press("Enter")
        expect(page.locator("output.muted")).to_have_text("1 rollout")
        expect(page.locator('.tr[data-row="1"] .td').first).to_have_text(sample)

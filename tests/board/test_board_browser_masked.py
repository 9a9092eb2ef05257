"""Tokens that training did not learn from are part of the text; padding is not."""

import json

import pytest
from browser_helpers import BoardProcess, opened
from playwright.sync_api import expect

from cavesson.importers import import_run

TOKENS = [" 7", " tool", " says", " done", "<pad>", "<pad>"]
MASK = [1, 0, 0, 1, 0, 0]


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    """The board of two imported runs: one with log-probabilities, and one with nothing but the mask."""
    folder = tmp_path_factory.mktemp("masked")
    line = {"step": 0, "prompt": "p", "response": "7 done", "reward": 1.0, "token": TOKENS, "mask": MASK}
    for name, more in (("measured", {"logprob": [-0.5] * 6}), ("bare", {})):
        (folder / f"{name}.jsonl").write_text(json.dumps(line | more))
        import_run(folder / f"{name}.jsonl", folder / name, "plain")
    with BoardProcess(folder / "measured", folder / "bare") as board:
        yield board


@pytest.mark.parametrize("run", ["measured", "bare"])
def test_they_are_shown_and_padding_is_not(browser, board, run):
    with opened(browser, f"{board.address}/tokens?run={run}&step=0&sample=0") as page:
        expect(page.locator(".tok")).to_have_text(["7", "tool", "says", "done"], use_inner_text=True)
        expect(page.locator(".tok.masked")).to_have_count(2)
        style = page.locator(".tok.masked").first.evaluate(
            "e => [getComputedStyle(e).textDecorationLine, getComputedStyle(e).opacity]"
        )
        assert style == ["none", "1"]
        expect(page.locator(".facts")).to_contain_text("not learned")
        facts = dict(
            zip(page.locator(".facts dt").all_inner_texts(), page.locator(".facts dd").all_inner_texts(), strict=True)
        )
        assert (facts["Tokens"], facts["not learned"], facts["padding, not shown"]) == ("4", "2", "2")
        page.locator(".tok.masked").first.hover()
        expect(page.locator(".token-card")).to_contain_text("not learned")
        page.locator(".tok").last.hover()
        expect(page.locator(".token-card")).not_to_contain_text("not learned")


def test_they_are_named_in_each_language(browser, board):
    for language, words in (("zh-CN", "未参与学习"), ("vi-VN", "không được học")):
        with opened(browser, f"{board.address}/tokens?step=0&sample=0&token=1", language=language) as page:
            expect(page.locator(".token-card")).to_contain_text(words)
            assert page.locator(".tok.masked").first.get_attribute("title") == words

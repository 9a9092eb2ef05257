"""Conversations are told by their marks, and ordinary texts stay as they are."""

import json

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from cavesson.text.chat_marks import OF_RESULTS, asked, calls_in, marks_in, messages_in, turns_in
from cavesson.text.chat_marks import ROLES as ROLE_NAMES

ROLES = ("system", "user", "assistant", "model", "tool")
LINES = st.lists(
    st.text("abcdeäß 你.:!?*#-", min_size=1) | st.sampled_from(["The user", "user:", "assistant "]), min_size=1
)
CONTENT = LINES.map("\n".join).filter(str.strip)
TALK = st.tuples(st.none() | CONTENT, st.lists(st.tuples(CONTENT, CONTENT), max_size=3), CONTENT)
"""A system prompt, questions that were answered, and a question."""


def said(text: str) -> list[tuple[str, str]]:
    marks = marks_in(text)
    return [(one.role, one.text) for one in turns_in(text, marks, "?")] if marks else []


def messages(talk: tuple[str | None, list[tuple[str, str]], str]) -> list[tuple[str, str]]:
    system, before, question = talk
    answered = [one for q, a in before for one in (("user", q), ("assistant", a))]
    return [*([("system", system)] if system else []), *answered, ("user", question)]


@given(TALK, st.sampled_from(["assistant", "model"]), st.sampled_from(["", "<think>\n", "<think>\n\n</think>\n\n"]))
def test_chatml_and_gemma_without_their_special_tokens(talk, name: str, thinking: str) -> None:
    wanted = messages(talk)
    text = (
        "".join(f"{name if role == 'assistant' else role}\n{text}\n" for role, text in wanted) + f"{name}\n{thinking}"
    )
    assert [one for one in said(text) if not one[1].startswith("<think>")] == wanted


@given(TALK)
def test_llama_3_without_its_special_tokens(talk) -> None:
    """Its template trims what is said, and begins with a system turn."""
    wanted = [(role, text.strip()) for role, text in messages(talk)]
    wanted = wanted if wanted[0][0] == "system" else [("system", "Cutting Knowledge Date: December 2023"), *wanted]
    text = "".join(f"{role}\n\n{text}" for role, text in wanted) + "assistant\n\n"
    assume(not any(text.endswith(ROLES) for _, text in wanted))
    assert said(text) == wanted


@given(TALK, st.sampled_from(["\n", " "]))
def test_roles_in_brackets(talk, end: str) -> None:
    wanted = [(role, text.rstrip("\n")) for role, text in messages(talk)]
    text = "\n\n".join(f"[{role}]{end}{text}" for role, text in wanted)
    assert (said(text) or [("user", text.removeprefix("[user] "))]) == wanted


@given(TALK)
def test_messages_in_json(talk) -> None:
    wanted = [{"role": role, "content": text} for role, text in messages(talk)]
    for spaced in (None, 2):
        assert messages_in(json.dumps(wanted, indent=spaced)) == wanted
    assert messages_in(json.dumps(wanted)[:-1]) is None
    assert messages_in(json.dumps(wanted).replace('"content"', '"text"')) is None
    assert messages_in(json.dumps(wanted).replace('"role": "user"', '"role": "user", "role": "user"')) is None


def alternates(text: str) -> bool:
    """The slow version: a line with a role only begins a turn, and the turns answer each other."""
    lines = text.split("\n")
    if lines[0] not in ROLES or len(lines) < 2:
        return False
    turns = ["assistant" if line == "model" else line for line in lines[:-1] if line in ROLES]
    turns = turns[1:] if turns[0] == "system" else turns
    last = "assistant"
    for turn in turns:
        follows = {"assistant": {"user", "tool"}, "user": {"assistant"}, "tool": {"tool", "assistant"}}[last]
        if turn not in follows or (turn == "tool" and turns[0] == "tool"):
            return False
        last = turn
    return bool(turns) and last == "assistant"


@given(st.lists(st.sampled_from([*ROLES, "text", "the user", "user:", "a assistant"]), min_size=1).map("\n".join))
@example("user\ntool\nassistant\n")
@example("system\nuser")
def test_words_are_marks_only_if_they_begin_turns_that_alternate(text: str) -> None:
    assert (marks_in(text) is not None) == alternates(text)


@given(st.text() | st.lists(st.sampled_from([*ROLES, "[user]", "", "a", "[a]", "[{", "user "])).map("\n".join))
@example("text\n[user]\nmore")
@example("[user] a")
@example("[1] x\n[tool_use]\n")
@example("Dear user\n\nThe assistant\n\n")
def test_ordinary_text_is_no_conversation(text: str) -> None:
    assume(not text.startswith((*ROLES, "[user]", "<")) and "<|" not in text and "<｜" not in text)
    assert marks_in(text) is None and messages_in(text) is None and asked(text) == text


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        ("system\nBe kind.\nuser\nWhat is 6 * 7?\nassistant\n", "What is 6 * 7?"),
        ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", "Hi"),
        ("user\nA\nassistant\nB\nuser\nC\nassistant\n", "user: A assistant: B user: C"),
        ('[{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]', "Q"),
        ("<|im_start|>system\nBe short.<|im_end|>\nWrite a line.", "Write a line."),
        ("<|im_start|>system\nonly this<|im_end|>\n", "<|im_start|>system\nonly this<|im_end|>\n"),
    ],
)
def test_what_a_prompt_asks(prompt: str, wanted: str) -> None:
    assert asked(prompt) == wanted


def test_every_name_of_a_tool_is_looked_for() -> None:
    names = ["tool", *(name for name, role in ROLE_NAMES.items() if role == "tool")]
    assert all(any(part in name for part in OF_RESULTS) for name in names)


def test_a_call_that_is_not_json_is_a_text() -> None:
    assert calls_in('<tool_call>{"name": "f"}</tool_call> and <tool_call>f(</tool_call>') == [{"name": "f"}, "f("]

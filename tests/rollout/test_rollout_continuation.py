"""The tokens of an episode are those of the chat template, and what the policy has sampled is never tokenized again."""

import json
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_helpers import (
    ASK,
    END,
    PARALLEL,
    REPLIES,
    TOOL,
    TOOLS,
    TOOLS_AND_REPLIES,
    answer,
    call,
    calls,
    chat,
    encoded,
    rendered,
    result,
    tokenizer,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast as FastTokenizer

from cavesson.data.chat import Chat
from cavesson.errors import UserError
from cavesson.rollout.continuation import REWRITES, Continuation

SAID = ["<|im_end|>", "</s>", "the", '"}', "\\", "\n", "None", "é🦜", "<tool_response>", "[/INST]", "]", "42"]
# Some templates remove the space around what is said.
said = st.lists(st.sampled_from(SAID) | st.text(st.characters(exclude_categories=["Cs"]), max_size=3), max_size=5).map(
    lambda parts: ".".join(["", *parts, "."])
)


class Episode(NamedTuple):
    ids: list[int]
    sources: list[str]


def episode(name: str, messages: list[dict], tools: list[dict], *, cut: bool = False) -> Episode:
    """Sample what the template writes of the assistant's turns, and continue each with the messages that follow it."""
    continuation = Continuation.of(chat(name), tools, replies=any(m["role"] == "user" for m in messages[1:]))
    asked = rendered(name, messages[:1], tools, True)
    ids, sources = list(encoded(name, asked)), []
    at = 1
    while at < len(messages):
        then = next((n for n, m in enumerate(messages) if n > at and m["role"] == "assistant"), len(messages))
        before, after = rendered(name, messages[:at], tools, True), rendered(name, messages[: at + 1], tools, False)
        turn = after[len(before) :]
        end = END[name] if END[name] in turn else "<|return|>" if name == "gptoss" else END[name]
        turn = turn[: turn.rindex(end)] if end else turn
        if not end:
            end = "<|observation|>" if messages[at + 1]["role"] == "tool" else "<|user|>"
        turn = turn.removesuffix("<|END_RESPONSE|>") if cut else turn
        sampled = encoded(name, turn if cut else turn + end)
        number = None if cut else tokenizer(name).convert_tokens_to_ids(end)
        suffix = continuation.suffix(messages[at + 1 : then], end=number)
        ids += sampled + suffix.ids
        sources += ["sampled"] * len(sampled) + suffix.sources
        at = then
    return Episode(ids, sources)


def check(name: str, messages: list[dict], tools: list[dict]) -> None:
    expected = encoded(name, rendered(name, messages, tools, True))
    for cut in (False, True):
        assert episode(name, messages, tools, cut=cut).ids == expected


@pytest.mark.parametrize("name", TOOLS)
def test_an_episode_with_calls_has_the_tokens_of_the_template(name):
    messages = [ASK, calls(call(1)), result(1, "42"), calls(call(2)), result(2, '{"error": "the"}')]
    check(name, messages, [TOOL])


@pytest.mark.parametrize("name", PARALLEL)
def test_an_episode_with_parallel_calls_has_the_tokens_of_the_template(name):
    check(name, [ASK, calls(call(1), call(2)), result(1, "the one"), result(2, "the other")], [TOOL])


@pytest.mark.parametrize("name", REPLIES)
def test_an_episode_with_replies_has_the_tokens_of_the_template(name):
    user = {"role": "user", "content": "And the other?"}
    check(name, [ASK, answer("It is 42."), user, answer("I do not know."), user], [])


@pytest.mark.parametrize("name", TOOLS_AND_REPLIES)
def test_an_episode_with_calls_and_replies_has_the_tokens_of_the_template(name):
    messages = [ASK, calls(call(1)), result(1, "42"), answer("It is 42."), {"role": "user", "content": "Why?"}]
    check(name, messages, [TOOL])


def test_a_template_that_moves_the_tools_to_the_last_question_leaves_them_at_the_first():
    messages = [ASK, answer("It is 42."), {"role": "user", "content": "Why?"}]
    for name in ("mistral_v3", "mistral_v7"):
        assert Continuation.of(chat(name), [TOOL], replies=True).note == REWRITES
        first = rendered(name, [ASK], [TOOL], True)
        without = rendered(name, messages, [], True)
        expected = first + without.removeprefix(rendered(name, [ASK], [], True))
        assert episode(name, messages, [TOOL]).ids == encoded(name, expected)


@pytest.mark.parametrize("name", TOOLS)
@given(st.lists(said, min_size=1, max_size=2))
def test_what_a_tool_says_has_no_control_tokens_and_is_what_its_tokens_say(name, contents):
    if name not in PARALLEL:
        contents = contents[:1]
    continuation = Continuation.of(chat(name), [TOOL])
    suffix = continuation.suffix([result(n, text) for n, text in enumerate(contents)], end=None)
    harmless = continuation.suffix([result(n, "x") for n, _ in enumerate(contents)], end=None)
    special = set(tokenizer(name).all_special_ids)
    assert [i for i in suffix.ids if i in special] == [i for i in harmless.ids if i in special]
    told = tokenizer(name).decode([i for i, s, _ in zip(*suffix, strict=True) if s == "tool"])
    escaped = [json.dumps(text, ensure_ascii=False)[1:-1] for text in contents]
    assert told in ("".join(contents), "".join(escaped))
    around = [i for i, s, _ in zip(*suffix, strict=True) if s == "template"]
    assert around == [i for i, s, _ in zip(*harmless, strict=True) if s == "template"]


def test_what_a_tool_says_is_text_although_special_tokens_in_the_data_are_control_tokens():
    trusting = Chat(tokenizer("qwen2_5"), special_tokens="control")
    messages = [result(1, "<|im_end|>")]
    expected = Continuation.of(chat("qwen2_5"), [TOOL]).suffix(messages, end=None)
    assert Continuation.of(trusting, [TOOL]).suffix(messages, end=None) == expected


def test_a_result_that_contains_what_the_template_writes_between_results_is_all_the_tool_s():
    text = "a\n</tool_response>\n<tool_response>\nb"
    suffix = Continuation.of(chat("qwen2_5"), [TOOL]).suffix([result(1, text), result(2, "c")], end=None)
    told = [i for i, s, _ in zip(*suffix, strict=True) if s == "tool"]
    assert tokenizer("qwen2_5").decode(told) == text + "c"


@pytest.mark.parametrize("name", REPLIES)
@given(said)
def test_what_the_user_replies_is_what_its_tokens_say(name, text):
    suffix = Continuation.of(chat(name), replies=True).suffix([{"role": "user", "content": text}], end=None)
    assert tokenizer(name).decode([i for i, s, _ in zip(*suffix, strict=True) if s == "user"]) == text


@pytest.mark.parametrize("name", TOOLS_AND_REPLIES)
def test_most_templates_continue_without_a_remark(name):
    note = Continuation.of(chat(name), [TOOL], replies=True).note
    assert note == (REWRITES if name == "glm4moe" else None)  # it drops earlier reasoning


@pytest.mark.parametrize(
    ("name", "replies", "is_rewritten"),
    [
        ("qwen3", False, True),
        ("qwen3", True, True),
        ("qwen3_5_think", False, False),
        ("qwen3_5_think", True, True),
        ("deepseekv3", False, True),
        ("gptoss", False, False),
        ("gptoss", True, True),
        ("glm4moe", False, False),
    ],
)
def test_a_template_that_drops_earlier_reasoning_is_named(name, replies, is_rewritten):
    note = Continuation.of(chat(name), [TOOL], replies=replies).note
    assert note == (REWRITES if is_rewritten else None)
    assert "\n" not in REWRITES


def test_sampled_reasoning_stays_before_a_reply():
    continuation = Continuation.of(chat("qwen3"), replies=True)
    suffix = continuation.suffix([{"role": "user", "content": "Why?"}], end=encoded("qwen3", "<|im_end|>")[0])
    text = "\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    assert suffix.ids == encoded("qwen3", text)
    asked = Continuation.of(chat("deepseekv3"), replies=True)
    suffix = asked.suffix([{"role": "user", "content": "Why?"}], end=tokenizer("deepseekv3").eos_token_id)
    assert suffix.ids == encoded("deepseekv3", "<｜User｜>Why?<｜Assistant｜><think>\n")


def test_an_end_token_that_the_template_does_not_write_replaces_its_own():
    continuation = Continuation.of(chat("llama3_1"), [TOOL])
    end = tokenizer("llama3_1").convert_tokens_to_ids("<|eom_id|>")
    suffix = continuation.suffix([result(1, "42")], end=end)
    assert suffix.ids[0] == tokenizer("llama3_1").convert_tokens_to_ids("<|start_header_id|>")
    glm = Continuation.of(chat("glm4moe"), [TOOL])
    other = glm.suffix([result(1, "42")], end=tokenizer("glm4moe").eos_token_id)
    assert other == glm.suffix([result(1, "42")], end=None)  # here nothing would say whose turn it is


def test_identifiers_that_a_template_refuses_are_replaced():
    continuation = Continuation.of(chat("mistral_v3"), [TOOL])
    one = {"role": "tool", "name": "multiply", "content": "42"}
    for odd in ({}, {"tool_call_id": None}, {"tool_call_id": "7"}):
        text = tokenizer("mistral_v3").decode(continuation.suffix([one | odd], end=None).ids)
        assert '"call_id": "call00000"' in text
    own = continuation.suffix([one | {"tool_call_id": "abcdef001"}], end=None)
    assert '"call_id": "abcdef001"' in tokenizer("mistral_v3").decode(own.ids)


def test_a_call_without_a_name_and_more_calls_than_the_template_takes_can_be_answered():
    for name in TOOLS:
        continuation = Continuation.of(chat(name), [TOOL])
        nameless = {"role": "tool", "name": "", "content": '{"error": "the call is not valid JSON"}'}
        suffix = continuation.suffix([nameless, result(1, "42")], end=None)
        told = tokenizer(name).decode([i for i, s in zip(suffix.ids, suffix.sources, strict=True) if s == "tool"])
        assert told.replace('\\"', '"') == '{"error": "the call is not valid JSON"}42'


def test_a_template_without_special_tokens_continues():
    plain = (
        "{% for m in messages %}{{ m.role + ': ' + (m.content or '') }}"
        "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{{ '<end>\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    one = Chat(tokenizer("chatml"), plain)
    continuation = Continuation.of(one, [TOOL], replies=True)
    assert continuation.note is None
    for end in (None, 0):
        for message in (result(1, "42"), {"role": "user", "content": "Why?"}):
            suffix = continuation.suffix([message], end=end)
            text = f"<end>\n{message['role']}: {message['content']}<end>\nassistant: "
            assert tokenizer("chatml").decode(suffix.ids) == text


@pytest.mark.parametrize(
    ("name", "problem"),
    [("gemma3", "Conversation roles must alternate"), ("phi3_5", "it leaves out messages")],
)
def test_a_template_that_cannot_write_results_is_refused(name, problem):
    with pytest.raises(UserError, match=rf"^the chat template cannot write what a tool returns: .*{problem}.*; set"):
        Continuation.of(chat(name), [TOOL])


def test_a_template_that_leaves_out_what_is_said_is_refused():
    deaf = (
        "{% for m in messages %}{% if m.role != 'tool' %}<|im_start|>{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
    )
    with pytest.raises(
        UserError, match=r"cannot write what a tool returns: it leaves out messages; set data\.template"
    ):
        Continuation.of(Chat(tokenizer("chatml"), deaf), [TOOL])
    single = (
        "{% for m in messages %}{% if loop.index0 > 1 and m.role == 'user' %}{{ raise_exception('one question only') }}"
        "{% endif %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    )
    with pytest.raises(UserError, match=r"cannot write a reply of the user to an answer: .*one question only; set"):
        Continuation.of(Chat(tokenizer("chatml"), single), replies=True)


def test_a_tokenizer_that_joins_an_answer_with_what_follows_is_refused():
    words = Tokenizer(models.WordLevel({"<unk>": 0, "assistant": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split("|", "removed")
    one = Chat(
        FastTokenizer(tokenizer_object=words, unk_token="<unk>"),
        "{% for m in messages %}{{ m.role + '|' + m.content + '.' }}{% endfor %}",
    )
    with pytest.raises(UserError, match="makes one token of the end of an answer and what the chat template writes"):
        Continuation.of(one, replies=True)

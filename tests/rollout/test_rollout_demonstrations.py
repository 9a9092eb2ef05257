"""A demonstration with calls of tools teaches what a policy would sample in an episode of the same messages."""

import json
import re
from pathlib import Path

import pytest
from rollout_helpers import (
    ASK,
    END,
    PARALLEL,
    TOOL,
    TOOLS,
    answer,
    call,
    calls,
    encoded,
    rendered,
    result,
    template,
    tokenizer,
)

from cavesson.data.examples import Tokens, tokenize_demonstrations, tokenize_pairs
from cavesson.data.load import load
from cavesson.data.prompts import given_prompts, load_prompts
from cavesson.data.settings import PairSettings, PromptSettings, TextSettings
from cavesson.data.types import Demonstration, Pair
from cavesson.errors import UserError

ONE = [ASK, calls(call(1)), result(1, "42"), answer("It is 42.")]
TWO = [ASK, calls(call(1), call(2)), result(1, "the one"), result(2, "the other"), answer("Both.")]


def write(folder: Path, *rows: dict) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def read(name: str, path: Path, **settings: object) -> list[Tokens]:
    chosen = TextSettings.model_validate({"path": str(path), "max_length": 8192, **settings})
    return list(tokenize_demonstrations(load(chosen, Demonstration).train, tokenizer(name), chosen))


def piece(name: str, messages: list[dict], number: int) -> tuple[str, str]:
    """What a policy sees before a turn, and what it writes, up to its end token."""
    before, after = (rendered(name, messages[:n], [TOOL], n == number) for n in (number, number + 1))
    assert after.startswith(before)
    said = after[len(before) :]
    if not END[name]:
        return before, said + ("<|observation|>" if "tool_calls" in messages[number] else "<|user|>")
    end = "<|return|>" if name == "gptoss" and "tool_calls" not in messages[number] else END[name]
    return before, said[: said.rindex(end) + len(end)]


def in_pieces(name: str, messages: list[dict]) -> Tokens:
    """Every piece is tokenized by itself, as in an episode, in which nothing is tokenized twice."""
    text, ids, learn = "", [], []
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            before, said = piece(name, messages, number)
            for part, learned in ((before.removeprefix(text), False), (said, True)):
                ids += encoded(name, part)
                learn += [learned] * (len(ids) - len(learn))
            text = before + said
    rest = encoded(name, rendered(name, messages, [TOOL], False).removeprefix(text)) if END[name] else []
    return Tokens((*ids, *rest), (*learn, *[False] * len(rest)))


@pytest.mark.parametrize("name", [name for name in TOOLS if name != "phi4"])
def test_what_the_policy_would_sample_is_learned(tmp_path: Path, name: str) -> None:
    rows = [ONE, TWO] if name in PARALLEL else [ONE]
    found = read(name, write(tmp_path, *({"messages": row, "tools": [TOOL]} for row in rows)))
    assert found == [in_pieces(name, row) for row in rows]


def test_the_end_of_the_conversation_is_the_last_answer_s_as_well(tmp_path: Path) -> None:
    """Phi-4's template closes a whole conversation with another end token."""
    *most, last = in_pieces("phi4", ONE).ids
    (found,) = read("phi4", write(tmp_path, {"messages": ONE, "tools": [TOOL]}))
    end = tokenizer("phi4").eos_token_id
    assert (found.ids, last) == ((*most, last), end)
    assert found.learn == (*in_pieces("phi4", ONE).learn[:-1], True)


THINKING = [ASK, calls(call(1)) | {"reasoning_content": "I multiply."}, result(1, "42")]
THINKING += [answer("It is 42.") | {"reasoning_content": "I see."}]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "glm4moe"])
def test_reasoning_is_learned_as_the_policy_would_sample_it(tmp_path: Path, name: str) -> None:
    assert read(name, write(tmp_path, {"messages": THINKING, "tools": [TOOL]})) == [in_pieces(name, THINKING)]


def test_an_answer_whose_template_drops_earlier_reasoning_has_its_own_sequence(tmp_path: Path) -> None:
    """gpt-oss' template drops the reasoning of a call once the answer is there; the channel is the answer's choice."""
    first, last = read("gptoss", write(tmp_path, {"messages": THINKING, "tools": [TOOL]}))
    assert first == in_pieces("gptoss", THINKING[:2])
    learned = [token for token, learn in zip(last.ids, last.learn, strict=True) if learn]
    said = "<|channel|>analysis<|message|>I see.<|end|><|start|>assistant<|channel|>final<|message|>It is 42.<|return|>"
    assert learned == encoded("gptoss", said)


@pytest.mark.parametrize("messages", [ONE, TWO], ids=["one", "parallel"])
def test_a_call_that_is_rewritten_later_is_learned_as_it_is_sampled(tmp_path: Path, messages: list[dict]) -> None:
    """Qwen3's template writes an empty reasoning only in the last turn."""
    first, last = read("qwen3", write(tmp_path, {"messages": messages, "tools": [TOOL]}))
    assert first == in_pieces("qwen3", messages[:2])
    before, said = piece("qwen3", messages, len(messages) - 1)
    ids = [*encoded("qwen3", before), *encoded("qwen3", said), *encoded("qwen3", "\n")]
    start = len(encoded("qwen3", before))
    assert last == Tokens(tuple(ids), tuple(start <= n < len(ids) - 1 for n in range(len(ids))))


BY_HAND = {
    "qwen2_5": (
        '+⟨<tool_call>⟩↵{"name":␣"multiply",␣"arguments":␣{"a":␣1,␣"b":␣7⟨}}⟩↵⟨</tool_call>⟩⟨<|im_end|>⟩'
        "-↵⟨<|im_start|>⟩⟨us⟩er↵⟨<tool_response>⟩↵42↵⟨</tool_response>⟩⟨<|im_end|>⟩↵⟨<|im_start|>⟩⟨as⟩sistant↵"
        "+It␣is␣42.⟨<|im_end|>⟩-↵"
    ),
    "llama3_1": (
        '+{"name":␣"multiply",␣"parameters":␣{"a":␣1,␣"b":␣7⟨}}⟩⟨<|eot_id|>⟩'
        '-⟨<|start_header_id|>⟩ipy⟨th⟩⟨on⟩⟨<|end_header_id|>⟩⟨↵↵⟩"42"⟨<|eot_id|>⟩'
        "-⟨<|start_header_id|>⟩⟨as⟩sistant⟨<|end_header_id|>⟩⟨↵↵⟩"
        "+It␣is␣42.⟨<|eot_id|>⟩"
    ),
    "mistral_v7": (
        '+⟨[TOOL_CALLS]⟩[{"name":␣"multiply",␣"arguments":␣{"a":␣1,␣"b":␣7},␣"id":␣"abcdef001⟨"}⟩]⟨</s>⟩'
        "-⟨[TOOL_RESULTS]⟩abcdef001⟨[TOOL_CONTENT]⟩42⟨[/TOOL_RESULTS]⟩"
        "+It␣is␣42.⟨</s>⟩"
    ),
}
"""What follows the question: + is learned, - is not; a token is a character, or what ⟨⟩ enclose."""


@pytest.mark.parametrize("name", BY_HAND)
def test_tokens_that_were_written_by_hand(tmp_path: Path, name: str) -> None:
    pieces, learn = [], []
    for sign, part in re.findall(r"([+-])([^+-]+)", BY_HAND[name]):
        tokens = [whole or one for whole, one in re.findall("⟨(.+?)⟩|(.)", part)]
        pieces += [token.replace("↵", "Ċ").replace("␣", "Ġ") for token in tokens]
        learn += [sign == "+"] * len(tokens)
    (found,) = read(name, write(tmp_path, {"messages": ONE, "tools": json.dumps([TOOL])}))
    asked = encoded(name, rendered(name, ONE[:1], [TOOL], True))
    assert found.ids == (*asked, *tokenizer(name).convert_tokens_to_ids(pieces))
    assert found.learn == (*[False] * len(asked), *learn)


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "gptoss", "glm4moe"])
def test_what_a_template_marks_is_what_transformers_says(tmp_path: Path, name: str) -> None:
    """TRL's training variants of the templates have `{% generation %}`."""
    marked = template(f"{name}_training")
    (found,) = read(
        name, write(tmp_path, {"messages": TWO if name != "gptoss" else ONE, "tools": [TOOL]}), template=marked
    )
    messages = [one if one["content"] else one | {"content": ""} for one in (TWO if name != "gptoss" else ONE)]
    said = tokenizer(name).apply_chat_template(
        messages, tools=[TOOL], chat_template=marked, return_assistant_tokens_mask=True, return_dict=True
    )
    length = len(said["input_ids"])
    assert found.ids[:length] == tuple(said["input_ids"])
    assert found.learn[:length] == tuple(map(bool, said["assistant_masks"]))


def test_tools_are_those_of_the_row_or_else_those_of_the_settings(tmp_path: Path) -> None:
    other = json.loads(json.dumps(TOOL).replace("multiply", "divide"))
    rows = [{"messages": ONE, "tools": [TOOL]}, {"messages": ONE, "tools": json.dumps([TOOL])}, {"messages": ONE}]
    path = write(tmp_path, *rows)
    own, text, without = read("qwen2_5", path)
    assert own == text != without
    for tools in ([other], (other,), json.dumps([other]), [json.dumps(other)]):
        assert read("qwen2_5", path, tools=tools)[:2] == [own, own]
        assert (
            read("qwen2_5", path, tools=tools)[2]
            == read("qwen2_5", write(tmp_path, {"messages": ONE, "tools": [other]}))[0]
        )
        write(tmp_path, *rows)
    prompts = PromptSettings(path=str(write(tmp_path, {"prompt": [ASK]})), tools=[TOOL], max_prompt_tokens=8192)
    asked = encoded("qwen2_5", rendered("qwen2_5", [ASK], [TOOL], True))
    assert load_prompts(prompts, tokenizer("qwen2_5")).ids == (tuple(asked),)
    given = given_prompts({"prompt": [[ASK]]}, prompts.model_copy(update={"path": None}), tokenizer("qwen2_5"))
    assert given.ids == (tuple(asked),)


@pytest.mark.parametrize("tools", ["", "tools", "[]x", 3, [1], [{}], '["x"]'])
def test_tools_of_the_settings_that_are_none_are_refused(tools: object) -> None:
    with pytest.raises(ValueError, match="or such a list as JSON text"):
        TextSettings(tools=tools)


def test_tools_of_the_settings_need_conversations(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "6 * 7?", "response": "42"})
    with pytest.raises(UserError, match=r"rows\.jsonl.*: this is plain text; data\.tools is for conversations"):
        read("qwen2_5", path, tools=[TOOL])
    asked, answered = {"role": "user", "content": "6 * 7?"}, answer("42")
    (found,) = read("qwen2_5", path, tools=[TOOL], chat=True)
    assert found == in_pieces("qwen2_5", [asked, answered])


@pytest.mark.parametrize("name", ["qwen2_5", "llama3_1", "granite", "mistral_v13"])
def test_a_pair_compares_a_call_with_another_answer(tmp_path: Path, name: str) -> None:
    guess = [ASK, answer("It is 41.")]
    path = write(tmp_path, {"chosen": ONE, "rejected": guess, "tools": [TOOL]})
    rows = load(PairSettings(path=str(path)), Pair).train
    (pair,) = tokenize_pairs(rows, tokenizer(name), PairSettings(max_length=8192))
    assert (pair.chosen, pair.rejected) == (in_pieces(name, ONE), in_pieces(name, guess))


@pytest.mark.parametrize("name", ["qwen2_5", "hermes", "phi4"])
def test_a_pair_that_differs_in_the_arguments_of_a_call_shares_what_comes_before(tmp_path: Path, name: str) -> None:
    """The first call and its result are the prompt of both."""
    shared = [ASK, calls(call(1)), result(1, "42")]
    path = write(
        tmp_path,
        {"chosen": [*shared, calls(call(2))], "rejected": [*shared, calls(call(3))], "tools": [TOOL]},
    )
    rows = load(PairSettings(path=str(path)), Pair).train
    (pair,) = tokenize_pairs(rows, tokenizer(name), PairSettings(max_length=8192))
    for found, number in ((pair.chosen, 2), (pair.rejected, 3)):
        messages = [*shared, calls(call(number))]
        before, said = piece(name, messages, 3)
        assert found.ids[: len(encoded(name, before + said))] == tuple(encoded(name, before) + encoded(name, said))
        assert next(n for n, learn in enumerate(found.learn) if learn) == len(encoded(name, before))

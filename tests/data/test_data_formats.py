import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cavesson.data.conversations import shared_text
from cavesson.data.fields import Fields, Row
from cavesson.data.formats import FORMATS, convert, recognise
from cavesson.data.load import Loaded, load
from cavesson.data.notes import Notes
from cavesson.data.settings import ChatSettings, SourceSettings
from cavesson.data.sources import read as read_rows
from cavesson.data.types import Answered, Demonstration, Pair, Prompt, Turn
from cavesson.errors import UserError


def user(text: str) -> Turn:
    return Turn("user", text)


def assistant(text: str) -> Turn:
    return Turn("assistant", text)


def chat(*said: str) -> list[dict]:
    return [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(said)]


def one(kind: type, row: dict, name: str | None = None, *, chat: bool = False) -> object:
    """What a row becomes."""
    fields = Fields(Row("here", row), Notes(), chat=chat)
    (made,) = convert(name or recognise(row, kind, "here"), fields, kind)
    return made


def read(folder: Path, kind: type, *rows: dict, **settings: object) -> Loaded:
    file = folder / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return load(ChatSettings(path=str(file), **settings), kind)


TOOL = {"type": "function", "function": {"name": "f"}}
SAY = {"role": "assistant", "content": "Hello"}

CASES = [
    ("text", {"text": "a", "n": 1}, Demonstration("", "a"), Prompt("a")),
    ("prompt", {"prompt": "a", "n": 1}, None, Prompt("a")),
    ("prompt", {"prompt": chat("Hi"), "tools": [TOOL]}, None, Prompt((user("Hi"),), tools=(TOOL,))),
    (
        "prompt_completion",
        {"prompt": "a", "completion": " b"},
        Demonstration("a", " b"),
        Prompt("a"),
    ),
    (
        "prompt_completion",
        {"prompt": chat("Hi"), "completion": [SAY], "tools": json.dumps([TOOL])},
        Demonstration((user("Hi"),), (assistant("Hello"),), (TOOL,)),
        Prompt((user("Hi"),), tools=(TOOL,)),
    ),
    (
        "prompt_response",
        {"prompt": chat("Hi"), "response": "Hello"},
        Demonstration((user("Hi"),), (assistant("Hello"),)),
        Prompt((user("Hi"),)),
    ),
    ("question_answer", {"question": "a", "answer": "b"}, Demonstration("a", "b"), Prompt("a")),
    (
        "alpaca",
        {"instruction": "Add", "input": "1 2", "output": "3"},
        Demonstration("Add\n\n1 2", "3"),
        Prompt("Add\n\n1 2"),
    ),
    (
        "alpaca",
        {"instruction": "Add", "input": "", "output": "3"},
        Demonstration("Add", "3"),
        Prompt("Add"),
    ),
    ("alpaca", {"instruction": "Add", "output": "3"}, Demonstration("Add", "3"), Prompt("Add")),
    (
        "messages",
        {"messages": chat("Hi", "Hello", "Why?", "So"), "tools": [TOOL], "n": 1},
        Demonstration((user("Hi"),), (assistant("Hello"), user("Why?"), assistant("So")), (TOOL,)),
        Prompt((user("Hi"), assistant("Hello"), user("Why?")), tools=(TOOL,)),
    ),
    (
        "sharegpt",
        {
            "system": "S",
            "conversations": [
                {"from": "human", "value": "Hi"},
                {"from": "function_call", "value": "f()"},
                {"from": "observation", "value": "3"},
                {"from": "gpt", "value": "Hello"},
            ],
        },
        Demonstration((Turn("system", "S"), user("Hi")), (assistant("f()"), Turn("tool", "3"), assistant("Hello"))),
        Prompt((Turn("system", "S"), user("Hi"), assistant("f()"), Turn("tool", "3"))),
    ),
]


@pytest.mark.parametrize(("name", "row", "demonstration", "prompt"), CASES)
def test_demonstrations_and_prompts(name, row, demonstration, prompt):
    assert one(Prompt, row) == one(Prompt, row, name) == replace(prompt, columns=row)
    if demonstration is not None:
        assert recognise(row, Demonstration, "here") == name
        assert one(Demonstration, row) == demonstration


PAIR = Pair((user("Hi"),), (assistant("Hello"),), (assistant("Go"),))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, Pair("a", "b", "c")),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": 0.5}, Pair("a", "b", "c", 0.5)),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": None}, Pair("a", "b", "c")),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "0.5"}, Pair("a", "b", "c", 0.5)),
        ({"chosen": "The sky is blue.", "rejected": "The sky is green."}, Pair("The sky is", " blue.", " green.")),
        ({"prompt": chat("Hi"), "chosen": [SAY], "rejected": [SAY | {"content": "Go"}]}, PAIR),
        ({"prompt": "Hi", "chosen": [SAY], "rejected": [SAY | {"content": "Go"}]}, PAIR),
        ({"prompt": chat("Hi"), "chosen": "Hello", "rejected": "Go"}, PAIR),
        ({"chosen": chat("Hi", "Hello"), "rejected": chat("Hi", "Go")}, PAIR),
        # The prompt twice, once as a text.
        ({"prompt": "Hi", "chosen": chat("Hi", "Hello"), "rejected": chat("Hi", "Go")}, PAIR),
    ],
)
def test_preferences(row, expected):
    assert recognise(row, Pair, "here") == "preference"
    assert one(Pair, row) == expected
    assert one(Demonstration, row) == Demonstration(expected.prompt, expected.chosen)
    assert one(Prompt, row, "preference") == Prompt(expected.prompt, row)


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("Yes", "No", ""),
        ("It is so", "It isn't", "It"),  # words are not cut
        ("Q?\n\nA one", "Q?\n\nB", "Q?\n\n"),
        ("Q? A", "Q? A and more", "Q?"),  # a response is never empty
        ("Q? A", "Q? A", "Q?"),
        ("", "No", ""),
    ],
)
def test_the_prompt_of_two_texts(chosen, rejected, prompt):
    assert shared_text(chosen, rejected) == (prompt, chosen.removeprefix(prompt), rejected.removeprefix(prompt))


few = st.text(st.sampled_from("ab \n"), max_size=8)


@given(few, few, few)
def test_two_texts_are_cut_and_not_changed(start, chosen, rejected):
    prompt, first, second = shared_text(start + chosen, start + rejected)
    assert (prompt + first, prompt + second) == (start + chosen, start + rejected)
    assert (first or not start + chosen) and (second or not start + rejected)
    words = (prompt.split(), first.split(), second.split())
    assert words[0] + words[1] == (start + chosen).split()
    assert words[0] + words[2] == (start + rejected).split()


said = st.text(st.characters(codec="utf-8"), max_size=6)


@given(st.lists(st.tuples(said, said), min_size=1, max_size=4), st.none() | said)
def test_a_conversation_comes_back_as_it_was_written(rounds, system):
    spoken = [content for pair in rounds for content in pair]
    start = (Turn("system", system),) if system is not None else ()
    turns = (*start, *(Turn(turn["role"], turn["content"]) for turn in chat(*spoken)))
    row = {"messages": [{"role": turn.role, "content": turn.content} for turn in turns]}
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    gpt = {"conversations": [{"from": names[turn.role], "value": turn.content} for turn in turns]}
    for made in (one(Demonstration, row), one(Demonstration, gpt), one(Demonstration, row, "conversation")):
        assert (*made.prompt, *made.response) == turns
        assert made.response[0] == assistant(rounds[0][1])
        assert len(made.prompt) == len(start) + 1
    assert one(Prompt, row).prompt == one(Prompt, gpt).prompt == turns[:-1]


def test_turns_without_an_answer_are_dropped_for_imitation_and_asked_as_prompts(tmp_path):
    row = {"messages": chat("Hi", "Hello", "Why?")}
    loaded = read(tmp_path, Demonstration, row)
    assert loaded.train == [Demonstration((user("Hi"),), (assistant("Hello"),))]
    assert loaded.notes() == [f"1 × turns after the last answer are dropped (first: {tmp_path / 'a.jsonl'} line 1)"]
    assert one(Prompt, row).prompt == (user("Hi"), assistant("Hello"), user("Why?"))
    assert one(Prompt, {"messages": chat("Hi")}).prompt == (user("Hi"),)


@pytest.mark.parametrize(
    ("kind", "row", "name"),
    [
        # The kind that is asked for decides.
        (Prompt, {"prompt": "a", "messages": chat("b", "c"), "chosen": "d", "rejected": "e"}, "prompt"),
        (Demonstration, {"prompt": "a", "messages": chat("b", "c"), "chosen": "d", "rejected": "e"}, "messages"),
        (Pair, {"prompt": "a", "messages": chat("b", "c"), "chosen": "d", "rejected": "e"}, "preference"),
        # More columns explained.
        (Demonstration, {"instruction": "a", "input": "b", "output": "c"}, "alpaca"),
        (Demonstration, {"input": "b", "output": "c"}, "text2text"),
        (Demonstration, {"images": [], "text": "c"}, "image_text"),
        # What the values say.
        (Prompt, {"input": "b", "output": ["c"]}, "text_to_textlist"),
        (Pair, {"input": "b", "output": [{"score": 1, "text": "c"}]}, "text_to_scored_textlist"),
        (Pair, {"chosen": {"messages": []}, "rejected": {}}, "paired_conversation"),
        (Pair, {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": ""}, "human_assistant"),
    ],
)
def test_the_format_that_explains_most_is_taken(kind, row, name):
    assert recognise(row, kind, "here") == name


@pytest.mark.parametrize(
    ("kind", "row", "names", "ignored"),
    [
        (
            Demonstration,
            {"instruction": "a", "input": "b", "output": "c", "text": "d"},
            "text and alpaca",
            (["instruction", "input", "output"], ["text"]),
        ),
        (
            Demonstration,
            {"prompt": "a", "completion": "b", "response": "c"},
            "prompt_completion and prompt_response",
            (["response"], ["completion"]),
        ),
        (
            Prompt,
            {"question": "a", "answer": "b", "text": "c"},
            "text and question_answer",
            (["question", "answer"], ["text"]),
        ),
    ],
)
def test_an_ambiguous_row_is_asked_about(tmp_path, kind, row, names, ignored):
    with pytest.raises(UserError) as error:
        read(tmp_path, kind, row)
    choices = [
        f"data.ignore = {json.dumps(columns)} for {name}"
        for columns, name in zip(ignored, names.split(" and "), strict=True)
    ]
    place = f"{tmp_path / 'a.jsonl'} line 1"
    assert str(error.value) == f"{place}: the columns fit {names}; choose one: {', or '.join(choices)}"
    for columns, name in zip(ignored, names.split(" and "), strict=True):
        left = {column: value for column, value in row.items() if column not in columns}
        expected = one(kind, left, name)
        (made,) = read(tmp_path, kind, row, ignore=columns).train
        assert made == (replace(expected, columns=row) if kind is Prompt else expected)


def test_columns_of_other_names(tmp_path):
    row = {"couplet": "a", "next": "b", "n": 1}
    mapping = {"prompt": "couplet", "response": "next"}
    assert read(tmp_path, Demonstration, row, columns=mapping).train == [Demonstration("a", "b")]
    assert read(tmp_path, Prompt, row, columns={"prompt": "couplet"}).train == [Prompt("a", row)]
    # A column may also be given to the rewards under another name, and take the place of one that is there.
    row = {"question": "a", "answer": "b", "prompt": "not this"}
    mapping = {"prompt": "question", "ground_truth": "answer"}
    assert read(tmp_path, Prompt, row, columns=mapping).train == [Prompt("a", {**row, "ground_truth": "b"})]
    row.pop("prompt")
    assert read(tmp_path, Demonstration, row, columns={"question": "answer", "answer": "question"}).train == [
        Demonstration("b", "a")
    ]


@pytest.mark.parametrize(
    ("kind", "row", "columns", "expected"),
    [
        # verl
        (
            Prompt,
            {"prompt": chat("Hi"), "reward_model": {"style": "rule", "ground_truth": "4"}, "extra_info": {"index": 0}},
            {"ground_truth": "reward_model.ground_truth"},
            Prompt((user("Hi"),), {"ground_truth": "4"}),
        ),
        # CSV
        (
            Prompt,
            {"prompt": "Hi", "reward_model": '{"ground_truth": "4"}'},
            {"ground_truth": "reward_model.ground_truth"},
            Prompt("Hi", {"ground_truth": "4"}),
        ),
        # SQuAD
        (
            Demonstration,
            {"question": "Q?", "context": "C", "answers": {"text": ["A"], "answer_start": [1]}},
            {"answer": "answers.text.0"},
            Demonstration("Q?\n\nC", "A"),
        ),
        # preferences of OpenAI's fine-tuning
        (
            Pair,
            {
                "input": {"messages": chat("Hi"), "tools": [TOOL], "parallel_tool_calls": True},
                "preferred_output": [SAY],
                "non_preferred_output": [SAY | {"content": "Go"}],
            },
            {
                "prompt": "input.messages",
                "tools": "input.tools",
                "chosen": "preferred_output",
                "rejected": "non_preferred_output",
            },
            Pair((user("Hi"),), (assistant("Hello"),), (assistant("Go"),), tools=(TOOL,)),
        ),
    ],
)
def test_columns_within_objects(tmp_path, kind, row, columns, expected):
    if kind is Prompt:
        expected = replace(expected, columns=row | expected.columns)
    assert read(tmp_path, kind, row, columns=columns).train == [expected]


@pytest.mark.parametrize(
    ("kind", "rows", "settings", "part"),
    [
        (Prompt, [{"prompt": "a"}, {"prompt": None}], {}, "line 2: 'prompt' is null, expected a text"),
        (Prompt, [{"prompt": "a"}, {"other": "a"}], {}, "line 2: 'prompt' is missing, expected a text"),
        (Prompt, [{"prompt": 7}], {}, "line 1: 'prompt' is 7, expected a text"),
        (Prompt, [{"prompt": []}], {}, "line 1: 'prompt' is [], expected a list such as [{\"role\""),
        (
            Demonstration,
            [{"text": "a" * 99 + "é"}, {"text": ["é" * 99]}],
            {},
            "line 2: 'text' is [\"" + "é" * 58 + "…",
        ),
        (Demonstration, [{"messages": None}], {}, "line 1: 'messages' is null, expected a list such as [{\"role\""),
        (Demonstration, [{"messages": [{"role": "user", "content": None}]}], {}, '{"role": "user", "content": null}'),
        (Demonstration, [{"prompt": "a"}], {}, "line 1: the columns prompt fit no format of demonstrations (text, or "),
        (
            Pair,
            [{"a": 1}],
            {},
            "columns a fit no format of pairs (chosen + rejected, or positive + negative, or input + output); map",
        ),
        (Prompt, [{}], {}, "line 1: the columns (none) fit no format of prompts (prompt, or input + output)"),
        (Pair, [{"prompt": "a"}], {"format": "prompt"}, "line 1: prompt gives prompts, and pairs are needed"),
        (
            Pair,
            [{"chosen": "a", "rejected": chat("b")}],
            {},
            "line 1: 'chosen' and 'rejected' must both be texts or both",
        ),
        (
            Demonstration,
            [{"system": "S", "messages": [{"role": "system", "content": "T"}]}],
            {},
            "line 1: both 'system' and the first message are system messages",
        ),
        (
            Prompt,
            [{"a": "b"}],
            {"columns": {"prompt": "x"}},
            "line 1: data.columns maps 'prompt' to 'x', but there is no such column",
        ),
        (
            Prompt,
            [{"prompt": "a", "reward_model": {"style": "rule", "truth": {"text": "4"}}}],
            {"columns": {"ground_truth": "reward_model.ground_truth"}},
            "it has prompt, reward_model, reward_model.style, reward_model.truth, reward_model.truth.text",
        ),
        (Prompt, [{"question": "a"}], {}, 'map the columns with data.columns, such as {prompt = "question"}'),
        (Prompt, [{"messages": chat("a")[:0]}], {}, "line 1: 'messages' is [], expected a list"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path, kind, rows, settings, part):
    with pytest.raises(UserError) as error:
        read(tmp_path, kind, *rows, **settings)
    message = str(error.value)
    assert message.startswith(str(tmp_path / "a.jsonl"))
    assert part in message
    assert "\n" not in message


def test_an_unknown_format_is_named(tmp_path):
    with pytest.raises(UserError, match=r"data\.format: there is no format 'chatml'; formats are text, prompt, "):
        read(tmp_path, Prompt, {"prompt": "a"}, format="chatml")


@pytest.mark.parametrize("kind", [Prompt, Demonstration, Pair])
def test_every_kind_of_row_has_its_tools(tmp_path, kind):
    row = {"prompt": chat("a"), "chosen": [SAY], "rejected": [{"role": "assistant", "content": "c"}]}
    loaded = read(tmp_path, kind, row | {"tools": [TOOL]}, row | {"tools": None}, row)
    assert [one.tools for one in loaded.train] == [(TOOL,), (), ()]


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("question_answer", {"question": "a", "answer": "b"}),
        ("alpaca", {"instruction": "a", "output": "b"}),
        ("sharegpt", {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}),
    ],
)
def test_tools_are_read_in_every_format(name, row):
    assert one(Demonstration, row | {"tools": [TOOL]}, name, chat=True).tools == (TOOL,)


DOCS = (Path(__file__).parents[2] / "docs" / "data-formats.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"\n((?:[^\n]+\n)+)\n```json\n(.*?)```", DOCS, re.DOTALL)


@pytest.mark.parametrize(("paragraph", "block"), EXAMPLES)
def test_the_examples_of_the_docs_are_what_they_say(tmp_path, paragraph, block):
    file = tmp_path / "a.json"
    file.write_text(block, encoding="utf-8")
    named = set(re.findall("`([^`]+)`", paragraph)) & FORMATS.keys()
    for row in read_rows(SourceSettings(path=str(file))):
        if row.format:  # LMFlow's files say it themselves
            continue
        recognised = {
            recognise(row.values, kind, "docs") for kind in (Prompt, Demonstration, Pair) if fits(row.values, kind)
        }
        assert named & recognised
        assert one(Prompt, dict(row.values), chat=True).prompt


def fits(row: Mapping, kind: type) -> bool:
    return any(format.fits(row) and format.gives_too(kind) for format in FORMATS.values())


def test_every_format_is_in_the_docs():
    assert [name for name in FORMATS if f"`{name}`" not in DOCS] == []
    assert len(EXAMPLES) == 17


ANSWERED = [
    ({"prompt": "a", "completion": " b"}, Answered("a", response=" b")),
    ({"instruction": "a", "input": "b", "output": "c"}, Answered("a\n\nb", response="c")),
    ({"prompt": "a", "chosen": " b", "rejected": " c"}, Answered("a", response=" b")),
    # Of a conversation, the prompt is what it is without the response: everything before the last answer.
    (
        {"messages": chat("Hi", "Hello", "How?", "So")},
        Answered((user("Hi"), assistant("Hello"), user("How?")), response=(assistant("So"),)),
    ),
]


@pytest.mark.parametrize(("row", "expected"), ANSWERED)
def test_a_prompt_with_a_response(row: dict, expected: Answered) -> None:
    assert one(Answered, row) == replace(expected, columns=row)
    assert one(Prompt, row) == Prompt(expected.prompt, columns=row)


def test_a_plain_text_and_an_open_question_have_no_response(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.jsonl line 1: the columns text fit no format of prompts with a response"):
        read(tmp_path, Answered, {"text": "a"})
    rows = [{"messages": chat("Hi", "Hello")}, {"messages": [*chat("Hi"), {"role": "user", "content": "Well?"}]}]
    with pytest.raises(UserError, match=r"a\.jsonl line 2 has no response that could be given: conversations without"):
        read(tmp_path, Answered, *rows)

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cavesson.data.lmflow import TYPES
from cavesson.data.load import Loaded, load
from cavesson.data.settings import ChatSettings
from cavesson.data.types import Demonstration, Pair, Prompt, Turn
from cavesson.errors import UserError


def file_of(folder: Path, type_: str, *instances: dict, name: str = "data.json") -> Path:
    file = folder / name
    file.write_text(json.dumps({"type": type_, "instances": instances}, indent=1), encoding="utf-8")
    return file


def read(folder: Path, kind: type, type_: str, *instances: dict) -> Loaded:
    return load(ChatSettings(path=str(file_of(folder, type_, *instances))), kind)


def messages(*said: str, roles: tuple[str, ...] = ("user", "assistant")) -> list[dict]:
    return [{"role": roles[n % len(roles)], "content": content} for n, content in enumerate(said)]


USER, ANSWER = Turn("user", "Hi"), Turn("assistant", "Hello")

# What every type becomes, by the description of the types.
CASES = [
    ("text_only", {"text": "a"}, Demonstration, Demonstration("", "a")),
    ("text_only", {"text": "a"}, Prompt, Prompt("a")),
    ("text2text", {"input": "a", "output": "b"}, Demonstration, Demonstration("a", "b")),
    ("text2text", {"input": "a", "output": "b"}, Prompt, Prompt("a")),
    ("conversation", {"messages": messages("Hi", "Hello")}, Demonstration, Demonstration((USER,), (ANSWER,))),
    (
        "conversation",
        {"conversation_id": 1, "system": "Be kind", "tools": [{"name": "f"}], "messages": messages("Hi", "Hello")},
        Demonstration,
        Demonstration((Turn("system", "Be kind"), USER), (ANSWER,), ({"name": "f"},)),
    ),
    ("conversation", {"messages": messages("Hi", "Hello", "Hi")}, Prompt, Prompt((USER, ANSWER, USER))),
    (
        "paired_conversation",
        {"chosen": {"messages": messages("Hi", "Hello")}, "rejected": {"messages": messages("Hi", "Go")}},
        Pair,
        Pair((USER,), (ANSWER,), (Turn("assistant", "Go"),)),
    ),
    (
        "paired_conversation",
        {
            "chosen": {"system": "S", "messages": messages("Hi", "Hello")},
            "rejected": {"system": "S", "messages": messages("Hi", "Go")},
        },
        Prompt,
        Prompt((Turn("system", "S"), USER)),
    ),
    ("paired_text_to_text", {"prompt": "a", "chosen": "b", "rejected": "c"}, Pair, Pair("a", "b", "c")),
    (
        "paired_text_to_text",
        {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 2},
        Pair,
        Pair("a", "b", "c", 2.0),
    ),
    ("text_to_textlist", {"input": "a", "output": ["b", "c"]}, Prompt, Prompt("a")),
    (
        "text_to_scored_textlist",
        {"input": "a", "output": [{"score": 1, "text": "b"}, {"score": 3.5, "text": "c"}, {"score": 0.5, "text": "d"}]},
        Pair,
        Pair("a", "c", "d", 3.0),
    ),
    (
        "text_to_scored_textlist",
        {"input": "a", "output": [{"score": 1, "text": "b"}, {"score": 2, "text": "c"}]},
        Demonstration,
        Demonstration("a", "c"),
    ),
]


def of_row(expected, row):
    """What a row becomes: a prompt has all its columns."""
    return replace(expected, columns=row) if isinstance(expected, Prompt) else expected


@pytest.mark.parametrize(("type_", "instance", "kind", "expected"), CASES)
def test_every_type(tmp_path, type_, instance, kind, expected):
    loaded = read(tmp_path, kind, type_, instance)
    assert loaded.train == [of_row(expected, instance)]
    assert loaded.notes() == []


@pytest.mark.parametrize("type_", ["text2text", "paired_conversation", "text_to_textlist", "text_to_scored_textlist"])
def test_instances_are_recognised_in_lines_too(tmp_path, type_):
    for known, instance, kind, expected in CASES:
        if known == type_:
            file = tmp_path / "a.jsonl"
            file.write_text(json.dumps(instance), encoding="utf-8")
            assert load(ChatSettings(path=str(file)), kind).train == [of_row(expected, instance)]


def test_a_folder_of_files_of_several_types(tmp_path):
    file_of(tmp_path, "text2text", {"input": "a", "output": "b"}, name="1.json")
    file_of(tmp_path, "text_only", {"text": "c"}, name="2.json")
    assert load(ChatSettings(path=str(tmp_path)), Demonstration).train == [
        Demonstration("a", "b"),
        Demonstration("", "c"),
    ]


def test_calls_and_observations_are_the_assistant_s_and_the_tool_s(tmp_path):
    said = messages("Hi", "f()", "3", "Three", roles=("user", "function", "observation", "assistant"))
    rest = (Turn("assistant", "f()"), Turn("tool", "3"), Turn("assistant", "Three"))
    assert read(tmp_path, Demonstration, "conversation", {"messages": said}).train == [Demonstration((USER,), rest)]


def test_what_is_dropped_and_skipped_is_counted(tmp_path):
    fine = {"messages": messages("Hi", "Hello")}
    loaded = read(
        tmp_path,
        Demonstration,
        "conversation",
        {"messages": messages("Hi", "Hello", "Why?")},
        {"messages": messages("Hi")},
        {"system": "S", "messages": messages("Hi")},
        {"messages": messages("Hello", "Hi", roles=("assistant", "user"))},
        {"messages": [{"role": "system", "content": "S"}, *messages("Hi", "Hello", "Why?")]},
        {"messages": messages("Hi", "Hello"), "tools": ["a calculator"]},
        fine,
    )
    one = Demonstration((USER,), (ANSWER,))
    assert loaded.train == [one, Demonstration((Turn("system", "S"), USER), (ANSWER,)), one, one]
    file = tmp_path / "data.json"
    assert loaded.notes() == [
        f"2 × the odd last turn of a conversation is dropped (first: {file} row 1)",
        f"2 × conversations of fewer than 2 messages are skipped (first: {file} row 2)",
        f"1 × conversations that do not begin with the user (after the system) are skipped (first: {file} row 4)",
        f"1 × tools that are not JSON objects, which chat templates need, are skipped (first: {file} row 6)",
    ]


def test_equal_scores_make_no_pair(tmp_path):
    tie = {"input": "a", "output": [{"score": 1, "text": "b"}, {"score": 1, "text": "c"}]}
    with pytest.raises(UserError, match="no pairs: 1 × scored texts of which none is better than another"):
        read(tmp_path, Pair, "text_to_scored_textlist", tie)


@pytest.mark.parametrize(
    ("type_", "instance", "kind", "part"),
    [
        ("image_text", {"images": ["a.png"], "text": "b"}, Demonstration, "row 1: image_text contains images"),
        ("image_text", {"images": ["a.png"], "text": "b"}, Pair, "row 1: image_text gives demonstrations"),
        ("float_only", {"value": 1.5}, Prompt, "row 1: float_only contains numbers"),
        ("text2texts", {}, Prompt, f"LMFlow has no type 'text2texts'; its types are {', '.join(TYPES)}"),
        ("text2text", {"input": "a"}, Demonstration, "row 1: 'output' is missing, expected a text"),
        ("text2text", {"input": None, "output": "b"}, Demonstration, "row 1: 'input' is null, expected a text"),
        (
            "text2text",
            {"input": "a", "output": "b"},
            Pair,
            "row 1: text2text gives demonstrations, and pairs are needed",
        ),
        (
            "text_to_textlist",
            {"input": "a", "output": "b"},
            Prompt,
            "row 1: 'output' is \"b\", expected a list of texts",
        ),
        ("text_to_textlist", {"input": "a", "output": ["b", 1]}, Prompt, "expected a list of texts"),
        (
            "text_to_scored_textlist",
            {"input": "a", "output": [{"text": "b"}]},
            Pair,
            "'output' is null, expected a number",
        ),
        ("conversation", {"messages": [{"role": "user"}]}, Prompt, 'row 1: \'messages\' is {"role": "user"}, expected'),
        ("conversation", {"messages": messages("a", "b", roles=("user", "gpt"))}, Prompt, "LMFlow has no role 'gpt'"),
        ("paired_conversation", {"chosen": [], "rejected": {}}, Pair, "'chosen' is [], expected an object"),
        (
            "paired_conversation",
            {"chosen": {}, "rejected": {}},
            Pair,
            "row 1, 'chosen': 'messages' is missing, expected",
        ),
        (
            "paired_text_to_text",
            {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "wide"},
            Pair,
            "row 1: 'margin' is \"wide\", expected a number",
        ),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path, type_, instance, kind, part):
    with pytest.raises(UserError) as error:
        read(tmp_path, kind, type_, instance)
    assert str(error.value).startswith(str(tmp_path / "data.json"))
    assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_no_instances_are_no_rows(tmp_path):
    with pytest.raises(UserError, match="contains no prompts"):
        read(tmp_path, Prompt, "text_only")


ASKED = "###Human: Are space heaters safe?###Assistant: What do you mean?###Human: Can they start a fire?###Assistant:"


def test_a_reward_model_file_names_no_type(tmp_path):
    answers = " That depends on the heater.", " That is silly."
    rows = [
        {"positive": ASKED + answers[0], "negative": ASKED + answers[1]},
        {"positive": "The sky is blue.", "negative": "The sky is green."},
    ]
    file = tmp_path / "hh_rlhf_rm_training.json"
    file.write_text(json.dumps({"instances": rows}, indent=1), encoding="utf-8")
    lines = tmp_path / "rows.jsonl"
    lines.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    for path in (file, lines):
        assert load(ChatSettings(path=str(path)), Pair).train == [
            Pair(ASKED, *answers),
            Pair("The sky is", " blue.", " green."),
        ]
        assert load(ChatSettings(path=str(path)), Prompt).train == [
            Prompt(ASKED, rows[0]),
            Prompt("The sky is", rows[1]),
        ]
        assert load(ChatSettings(path=str(path)), Demonstration).train[0] == Demonstration(ASKED, answers[0])


def test_instances_without_a_type_are_recognised_by_their_columns(tmp_path):
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"instances": [{"input": "a", "output": "b"}]}), encoding="utf-8")
    assert load(ChatSettings(path=str(file)), Demonstration).train == [Demonstration("a", "b")]

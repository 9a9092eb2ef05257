"""All that belongs to a question is read with it, or the row is refused."""

import json

import pytest

from cavesson.data.fields import Fields, Row
from cavesson.data.formats import convert, recognise
from cavesson.data.notes import Notes
from cavesson.data.questions import GUESSED
from cavesson.data.types import Demonstration, Pair, Prompt, Turn
from cavesson.errors import UserError

SYSTEM, HI, HELLO, GO = (
    Turn(role, text) for role, text in [("system", "S"), ("user", "Hi"), ("assistant", "Hello"), ("assistant", "Go")]
)
EARLIER = (Turn("user", "a"), Turn("assistant", "b"))
TOOL = {"type": "function", "function": {"name": "f"}}


def one(kind: type, row: dict, *, chat: bool = False) -> object:
    fields = Fields(Row("here", row), Notes(), chat=chat)
    (made,) = convert(recognise(row, kind, "here"), fields, kind)
    return made


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"question": "Q?", "answer": "A", "context": "C"}, "Q?\n\nC"),
        ({"instruction": "Do", "context": "C", "response": "A", "category": "qa"}, "Do\n\nC"),  # Dolly
        ({"instruction": "Do", "context": "", "response": "A", "category": "qa"}, "Do"),
        ({"instruction": "Do", "input": "I", "context": "C", "output": "A"}, "Do\n\nI\n\nC"),
        ({"question": "Q?", "response": "A", "context": None}, "Q?"),
        ({"prompt": "Q?", "completion": "A", "context": "C"}, "Q?\n\nC"),
    ],
)
def test_what_follows_a_question(row, prompt):
    assert one(Demonstration, row) == Demonstration(prompt, "A")
    assert one(Prompt, row) == Prompt(prompt, row)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Hi", "completion": "Hello"},
        {"prompt": "Hi", "response": "Hello"},
        {"question": "Hi", "answer": "Hello"},
        {"question": "Hi", "response": "Hello"},
        {"instruction": "Hi", "output": "Hello", "input": ""},
        {"instruction": "Hi", "response": "Hello"},
        {"input": "Hi", "output": "Hello"},
        {"prompt": [{"role": "user", "content": "Hi"}], "completion": [{"role": "assistant", "content": "Hello"}]},
    ],
)
@pytest.mark.parametrize("as_json", [False, True])  # as CSV has lists
def test_system_history_and_tools_make_a_conversation(row, as_json):
    lists = {"history": [["a", "b"]], "tools": [TOOL]}
    row = row | {"system": "S"} | {name: json.dumps(one) if as_json else one for name, one in lists.items()}
    asked = (SYSTEM, *EARLIER, HI)
    assert one(Demonstration, row, chat=True) == Demonstration(asked, (HELLO,), (TOOL,))
    assert one(Prompt, row, chat=True) == Prompt(asked, row, (TOOL,))


@pytest.mark.parametrize("name", ["system", "history", "tools"])
@pytest.mark.parametrize(
    ("kind", "row"),
    [
        (Prompt, {"prompt": "Hi"}),
        (Demonstration, {"prompt": "Hi", "completion": "Hello"}),
        (Demonstration, {"question": "Hi", "answer": "Hello"}),
        (Pair, {"question": "Hi", "chosen": "Hello", "rejected": "Go"}),
        (Pair, {"chosen": "Hi Hello", "rejected": "Hi Go"}),
    ],
)
def test_a_conversation_is_not_made_of_plain_texts_unasked(kind, row, name):
    value = {"system": "S", "history": [["a", "b"]], "tools": [TOOL]}[name]
    with pytest.raises(UserError) as error:
        one(kind, row | {name: value})
    assert str(error.value) == (
        f"here: '{name}' belongs to a conversation, and the rest is plain text; read it as chat with data.chat = true, "
        f'or leave the column out with data.ignore = ["{name}"]'
    )
    for empty in ("", [], None):
        assert isinstance(one(kind, row | {name: empty}).prompt, str)


TEXTS, TURNS = {"chosen": "Hello", "rejected": "Go"}, {"chosen": [HELLO.message], "rejected": [GO.message]}
SHAREGPT = {"chosen": {"from": "gpt", "value": "Hello"}, "rejected": {"from": "gpt", "value": "Go"}}


@pytest.mark.parametrize(
    ("question", "prompt"),
    [
        ({"prompt": "Hi"}, "Hi"),
        ({"question": "Hi"}, "Hi"),
        ({"instruction": "Hi", "input": "I"}, "Hi\n\nI"),
        ({"input": "Hi"}, "Hi"),  # distilabel's
        ({"question": "Hi", "context": "C"}, "Hi\n\nC"),
    ],
)
def test_the_question_of_a_pair(question, prompt):
    fields = Fields(Row("here", question | TEXTS), Notes())
    assert convert("preference", fields, Pair) == (Pair(prompt, "Hello", "Go"),)
    turns = Pair((Turn("user", prompt),), (HELLO,), (GO,))
    for answers in (TURNS, SHAREGPT, {name: json.dumps(value) for name, value in TURNS.items()}):
        assert one(Pair, question | answers) == turns
    # orca_dpo_pairs
    assert one(Pair, {"system": "S"} | question | TEXTS, chat=True) == Pair((SYSTEM, *turns.prompt), (HELLO,), (GO,))


@pytest.mark.parametrize("answers", [TEXTS, TURNS, SHAREGPT])
@pytest.mark.parametrize(
    "question",
    [
        {"conversations": [{"from": "human", "value": "Hi"}]},  # LLaMA-Factory's
        {"messages": [{"role": "user", "content": "Hi"}]},
        {"prompt": [{"role": "user", "content": "Hi"}]},
        {"prompt": [{"from": "human", "value": "Hi"}]},
    ],
)
def test_the_question_of_a_pair_is_a_conversation(question, answers):
    assert one(Pair, question | answers) == Pair((HI,), (HELLO,), (GO,))
    tools = one(Pair, question | answers | {"system": "S", "tools": [TOOL]})
    assert tools == Pair((SYSTEM, HI), (HELLO,), (GO,), tools=(TOOL,))


def test_a_guessed_prompt_is_reported():
    for row in (
        {"chosen": "The sky is blue", "rejected": "The sky is red"},
        {"chosen": "\n\nHuman: Hi\n\nAssistant: Hello", "rejected": "\n\nHuman: Hi\n\nAssistant: Go"},
        {"positive": "The sky is blue", "negative": "The sky is red"},
    ):
        notes = Notes()
        convert(recognise(row, Pair, "here"), Fields(Row("here", row), notes), Pair)
        assert notes.lines() == [f"1 × {GUESSED} (first: here)"]
    row = {"question": "The sky", "chosen": "The sky is blue", "rejected": "The sky is red"}
    assert one(Pair, row) == Pair("The sky", "The sky is blue", "The sky is red")


def test_a_system_turn_is_read_once():
    messages = [SYSTEM.message, HI.message, HELLO.message]
    expected = Demonstration((SYSTEM, HI), (HELLO,))
    assert one(Demonstration, {"messages": messages, "system": "S"}) == expected
    assert one(Demonstration, {"messages": messages[1:], "system": "S"}) == expected
    with pytest.raises(UserError, match="both 'system' and the first message are system messages"):
        one(Demonstration, {"messages": messages, "system": "T"})


@pytest.mark.parametrize(
    ("row", "part"),
    [
        ({"prompt": [HI.message], "completion": "b", "context": "C"}, "'context' can follow a text only"),
        ({"prompt": "a", "completion": "b", "context": ["C"]}, "'context' is [\"C\"], expected a text"),
        ({"prompt": "a", "completion": "b", "history": "C"}, "'history' is \"C\", expected a list such as [["),
        ({"prompt": "a", "completion": "b", "history": [["C"]]}, "'history' is [\"C\"], expected a list such as [["),
        ({"prompt": "a", "completion": "b", "label": 1}, "'label' is 1, expected true or false"),
        ({"prompt": "[{'role': 'user', 'content': 'Hi'}]", "completion": "b"}, "'prompt' is \"[{'role'"),
    ],
)
def test_what_cannot_be_read_is_refused(row, part):
    with pytest.raises(UserError) as error:
        one(Demonstration, row, chat=True)
    assert part in str(error.value)


def test_a_response_with_a_false_label_is_not_learned(tmp_path):
    from cavesson.data.load import load
    from cavesson.data.settings import ChatSettings

    rows = [{"prompt": str(n), "completion": "a", "label": label} for n, label in enumerate([True, False, None, True])]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "a.csv").write_text("prompt,completion,label\n0,a,True\n1,a,False\n3,a,true\n")
    loaded = [load(ChatSettings(path=str(tmp_path / name)), Demonstration) for name in ("a.jsonl", "a.csv")]
    assert [[row.prompt for row in one.train] for one in loaded] == [["0", "2", "3"], ["0", "3"]]
    assert loaded[0].notes()[0].startswith("1 × responses whose label is false are skipped (first: ")
    # A reward may read it.
    assert one(Prompt, rows[1]).columns["label"] is False

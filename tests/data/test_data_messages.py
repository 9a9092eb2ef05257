"""A message is read whole: what a chat template may use stays, and marks say what is not learned."""

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cavesson.data.chat import Chat
from cavesson.data.fields import MARKS, Fields, Row, Skip
from cavesson.data.formats import convert
from cavesson.data.load import load
from cavesson.data.notes import Notes
from cavesson.data.settings import ChatSettings
from cavesson.data.types import Demonstration, Pair, Turn
from cavesson.errors import UserError
from cavesson.models.tiny import tiny_tokenizer

CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm", "unit": None}}}
ASK = {"role": "user", "content": "Weather?"}


def turns(*messages: object, **keys: str) -> tuple[Turn, ...]:
    return Fields(Row("here", {"messages": list(messages)}), Notes()).turns("messages", **keys)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=5,
)
names = st.text(min_size=1, max_size=8).filter(lambda name: name not in (*MARKS, "role", "content"))
parts = st.lists(st.builds(lambda text: {"type": "text", "text": text}, st.text(max_size=4)), min_size=1, max_size=3)


@given(st.text(max_size=4) | parts, st.dictionaries(names, values, max_size=4))
def test_a_message_keeps_every_field_that_is_not_null(content, others):
    (turn,) = turns({"role": "assistant", "content": content, **others})
    assert turn.message == {"role": "assistant", "content": content} | {
        name: value for name, value in others.items() if value is not None
    }


def test_nothing_but_a_call_is_said_with_content_null_or_without_content():
    for message in ({"content": None, "tool_calls": [CALL]}, {"tool_calls": [CALL]}):
        (turn,) = turns({"role": "assistant", **message})
        assert turn.message == {"role": "assistant", "content": None, "tool_calls": [CALL]}
        assert turn.text == ""


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant"},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": None, "tool_calls": None},
        {"role": "assistant", "content": None, "weight": 1},
        {"role": "assistant", "content": 5},
        {"role": "assistant", "content": []},
        {"role": "assistant", "content": [5]},
        {"content": "a"},
    ],
)
def test_a_message_that_says_nothing_is_refused(message):
    with pytest.raises(UserError, match=r"^here: 'messages' is {.*}, expected a list such as"):
        turns(message)


def test_parts_that_are_texts_become_objects():
    (turn,) = turns({"role": "user", "content": ["a ", {"type": "text", "text": "b"}]})
    assert turn.content == [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert turn.text == "a b"


def test_other_names_of_role_and_content_change_nothing_else():
    (turn,) = turns({"from": "gpt", "value": "a", "weight": 0, "tool_calls": [CALL]}, role="from", content="value")
    assert turn == Turn("gpt", "a", {"tool_calls": [CALL]})
    assert not turn.learn
    with pytest.raises(UserError, match="'messages' is "):  # which of the two contents is meant?
        turns({"from": "gpt", "value": "a", "content": "b"}, role="from", content="value")


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize(("value", "learn"), [(0, False), (False, False), (0.0, False), (1, True), (True, True)])
def test_a_mark_says_whether_a_turn_is_learned_and_is_no_part_of_the_message(mark, value, learn):
    (turn,) = turns({"role": "assistant", "content": "a", mark: value})
    assert turn.learn is learn
    assert turn.message == {"role": "assistant", "content": "a"}


@pytest.mark.parametrize("value", [0.5, 2, -1, "0", "no", [], {}])
def test_a_mark_of_another_value_is_an_error_of_one_line(value):
    with pytest.raises(UserError, match=rf"^here: weight = {re.escape(json.dumps(value))} of a message in 'messages'"):
        turns(ASK, {"role": "assistant", "content": "a", "weight": value})


def test_null_in_parquet_is_an_absent_field_and_in_json_a_value(tmp_path: Path):
    other = {"role": "tool", "content": "7 C", "tool_call_id": "c1"}
    rows = [
        {"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": [CALL]}, other, ASK | {"name": "x"}]}
    ]
    rows[0]["messages"].append({"role": "assistant", "content": "7 C."})
    text, table = tmp_path / "a.jsonl", tmp_path / "a.parquet"
    text.write_text(json.dumps(rows[0]) + "\n")
    pq.write_table(pa.Table.from_pylist(rows), table)
    as_json, as_table = (load(ChatSettings(path=str(file)), Demonstration).train[0] for file in (text, table))
    assert [turn.message for turn in as_json.response][:2] == [rows[0]["messages"][1], other]
    # Arrow cannot tell whether the unit was null or absent.
    call = as_table.response[0].others["tool_calls"][0]
    assert call["function"].pop("arguments") == {"city": "Ulm"}
    call["function"]["arguments"] = CALL["function"]["arguments"]
    assert as_table == as_json


def test_conversations_of_pairs_differ_in_their_calls():
    def talk(city: str) -> list[dict]:
        call = {"function": {"name": "weather", "arguments": {"city": city}}}
        return [ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]

    (pair,) = convert(
        "preference", Fields(Row("here", {"chosen": talk("Ulm"), "rejected": talk("Rom")}), Notes()), Pair
    )
    assert [turn.message for turn in (*pair.prompt, *pair.chosen)] == [{**message} for message in talk("Ulm")]
    assert [turn.message for turn in pair.rejected] == talk("Rom")[1:]


def test_lmflow_s_pairs_have_the_tools_of_both_conversations():
    def row(*offered: list[dict]) -> dict:
        answers = zip(("chosen", "rejected"), offered, strict=True)
        return {
            name: {"messages": [ASK, {"role": "assistant", "content": name}], "tools": tools} for name, tools in answers
        }

    def pair(*offered: list[dict]) -> Pair:
        (made,) = convert("paired_conversation", Fields(Row("here", row(*offered)), Notes()), Pair)
        return made

    tool, other = {"function": {"name": "weather"}}, {"function": {"name": "clock"}}
    assert pair([tool], [tool]).tools == (tool,)
    with pytest.raises(Skip, match="have different tools"):
        pair([tool], [other])


def test_a_developer_may_speak_before_the_user():
    talk = [{"role": "developer", "content": "Be brief."}, ASK, {"role": "assistant", "content": "7 C."}]
    (row,) = convert("messages", Fields(Row("here", {"messages": talk}), Notes()), Demonstration)
    assert [turn.message for turn in (*row.prompt, *row.response)] == talk
    with pytest.raises(Skip, match="do not begin with the user"):
        convert("messages", Fields(Row("here", {"messages": [talk[0], talk[2], talk[1]]}), Notes()), Demonstration)


def test_a_developer_is_a_system_message_so_none_is_added():
    chat = Chat(tiny_tokenizer(), system="Be brief.")
    said = (Turn("developer", "Be exact."), Turn("user", "Why?"))
    assert chat.opened(said) == said
    assert chat.opened(said[1:]) == (Turn("system", "Be brief."), said[1])

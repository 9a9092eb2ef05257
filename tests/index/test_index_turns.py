"""Filters over calls and the stored turns, against the turns as they were recorded."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from index_helpers import indexed, new_run, record, rows_of, tokens_of
from turn_helpers import WORDS, record_turns, turns_of

import cavesson.record
from cavesson.errors import UserError
from cavesson.index import calls as calls_module
from cavesson.index import said as said_module
from cavesson.index.filters import OF_CALLS, matches
from cavesson.index.turns import COLUMNS, NAME, read_turns
from cavesson.record import Recorder, begin_attempt

Call = dict[str, Any]
Condition = tuple[str, Callable[[Call], bool]]
"""A filter, and whether it holds for a call, whose rollout is in it too."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = new_run(tmp_path_factory.mktemp("turns") / "run")
    record_turns(folder, range(7))
    return cavesson.record.open(folder), indexed(folder)


def compared(name: str, sign: str, value: Any) -> Condition:
    column = {"tool": "name", "result": "text"}.get(name, name)
    compare = {"<": operator.lt, "<=": operator.le, ">": operator.gt, "==": operator.eq, "!=": operator.ne}[sign]
    written = f'"{value}"' if isinstance(value, str) else repr(value)
    return f"{name} {sign} {written}", lambda call: call.get(column) is not None and compare(call[column], value)


def within(part: str, name: str, negate: bool) -> Condition:
    column = {"tool": "name", "result": "text"}.get(name, name)
    sign = "not in" if negate else "in"
    return (
        f"{part!r} {sign} {name}",
        lambda call: call.get(column) is not None and (part in call[column]) != negate,
    )


def missing(name: str, negate: bool) -> Condition:
    column = {"tool": "name", "result": "text"}.get(name, name)
    return f"{name} is {'not ' if negate else ''}None", lambda call: (call.get(column) is None) != negate


SPEAKERS = {"said": ("assistant", "user"), "policy": ("assistant",), "user": ("user",)}


def spoken(name: str, write: str, passes: Callable[[str], bool]) -> Condition:
    """A condition on what is said holds if it holds for one turn of the rollout, whatever the call."""
    return write, lambda call: any(
        turn["role"] in SPEAKERS[name] and turn["text"] is not None and passes(turn["text"]) for turn in call["turns"]
    )


def says(name: str, sign: str, value: str) -> Condition:
    written = f"{name} {sign} {value!r}" if "=" in sign else f"{value!r} {sign} {name}"
    tests = {"==": operator.eq, "!=": operator.ne, "in": operator.contains}
    return spoken(name, written, lambda text: tests[sign](text, value) if sign in tests else value not in text)


def is_silent(name: str) -> Condition:
    text, holds = spoken(name, f"{name} is None", lambda text: True)
    return text, lambda call: not holds(call)


def negated(condition: Condition) -> Condition:
    return f"not ({condition[0]})", lambda call: not condition[1](call)


def joined(first: Condition, word: str, second: Condition) -> Condition:
    both = {
        "and": lambda call: first[1](call) and second[1](call),
        "or": lambda call: first[1](call) or second[1](call),
    }
    return f"({first[0]}) {word} ({second[0]})", both[word]


FAILED: Condition = ("error", lambda call: call.get("error") is not None)
PARTS = st.sampled_from(["alpha", "a", "4", "Timed", "timed", "out ", " ", '": 6', "beta", "音", "É", "zz", "search"])
SIMPLE = st.one_of(
    st.just(FAILED),
    st.builds(compared, st.just("tool"), st.sampled_from(["==", "!="]), st.sampled_from(["search", "Đọc", "none"])),
    st.builds(
        compared, st.just("seconds"), st.sampled_from(["<", "<=", ">", "==", "!="]), st.sampled_from([0, 0.5, 2])
    ),
    st.builds(compared, st.just("result"), st.sampled_from(["==", "!="]), st.sampled_from(["42", "alpha", ""])),
    st.builds(compared, st.just("reward"), st.sampled_from(["<", ">"]), st.floats(0, 6, width=16)),
    st.builds(within, PARTS, st.sampled_from(["tool", "arguments", "result", "error"]), st.booleans()),
    st.builds(says, st.sampled_from([*SPEAKERS]), st.sampled_from(["in", "not in"]), PARTS),
    st.builds(says, st.sampled_from([*SPEAKERS]), st.sampled_from(["==", "!="]), st.sampled_from([*WORDS, "beta"])),
    st.builds(is_silent, st.sampled_from([*SPEAKERS])),
    st.builds(missing, st.sampled_from(["tool", "error", "seconds", "arguments", "result"]), st.booleans()),
)
CONDITIONS = st.recursive(
    SIMPLE,
    lambda inner: st.builds(joined, inner, st.sampled_from(["and", "or"]), inner) | st.builds(negated, inner),
    max_leaves=4,
)


@settings(deadline=None)
@given(CONDITIONS, st.sampled_from([1, 3, 1 << 20]), st.booleans())
@example(joined(compared("tool", "==", "search"), "and", compared("seconds", ">", 2)), 1 << 20, False)
@example(says("user", "in", "beta"), 1, False)
@example(joined(FAILED, "and", says("policy", "==", "42")), 3, True)
def test_a_filter_holds_where_it_holds_for_one_call(run, condition, portion, some):
    """Without a name of calls, it holds or fails for a whole rollout."""
    record, shot = run
    text, holds = condition
    of_calls = any(name in text for name in OF_CALLS)
    wanted = []
    for key, reward in zip(shot.keys(np.arange(shot.rows)), shot.column("reward").tolist(), strict=True):
        turns = turns_of(*key)
        lines = [turn for turn in turns if turn["role"] == "tool"] if of_calls else [{}]
        wanted.append(any(holds(line | {"reward": reward, "turns": turns}) for line in lines))
    rows = np.arange(0, shot.rows, 3) if some else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls_module, "PORTION", portion)
        patch.setattr(said_module, "ROWS", 7)
        found = matches(text, shot, record, rows)
    assert found.tolist() == (wanted[::3] if some else wanted), text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('arguments contains "x"', '"TEXT" in NAME'),
        ("result > 2", "compare it with one in quotes"),
        ("arguments", "compare it with one in quotes"),
        ('"x" in reward', "are texts"),
        ("2 in arguments", "needs a list"),
        ('error == "x"', '"TEXT" in error'),
        ('error in ["x"]', '"TEXT" in error'),
        ('seconds == "x"', "are texts"),
        ("seconds", "must be a condition"),
        ("said", "compare it with one in quotes"),
        ("user > 2", "compare it with one in quotes"),
        ('"x" in spoken', "policy, user"),
        ('arguments < "x"', "only be compared with == and !="),
    ],
)
def test_a_filter_that_means_nothing_names_the_way_out(run, text, says):
    with pytest.raises(UserError) as caught:
        matches(text, run[1], run[0])
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["seconds > 2", '"x" in arguments', 'result == "x"', '"x" not in error', "seconds is None"]
)
def test_a_run_without_calls_says_so(tmp_path, text):
    folder = new_run(tmp_path / "run")
    record(folder, [0])
    with pytest.raises(UserError, match="this run has no recorded calls of tools, so a filter cannot use"):
        matches(text, indexed(folder), cavesson.record.open(folder))


@pytest.mark.parametrize("text", ['"x" in said', 'policy == "x"', "user is None", 'not ("x" in user)'])
def test_a_run_without_turns_says_so(tmp_path, text):
    folder = new_run(tmp_path / "run")
    record(folder, [0])
    with pytest.raises(UserError, match="this run has no recorded turns, so a filter cannot use"):
        matches(text, indexed(folder), cavesson.record.open(folder))


def test_a_run_whose_calls_were_not_timed_says_so(tmp_path):
    folder = new_run(tmp_path / "run")
    turns = {"sample": [0, 1], "role": ["tool", "tool"], "name": ["search", "search"]}
    with Recorder(folder, attempt=begin_attempt(folder, start_step=0)) as recorder:
        recorder.rollouts(0, rows_of(0, 2), tokens_of(0, 2), turns)
    shot = indexed(folder)
    assert matches('tool == "search" and not error', shot).tolist() == [True, True]
    with pytest.raises(UserError, match="no recorded seconds"):
        matches('tool == "search" and seconds > 2', shot)


@pytest.mark.parametrize(
    "text",
    [
        '"a" in said and reward > 1e9',
        'tool == "nothing" and not ("a" in result)',
        'reward < 1e9 or user == "a"',
        'reward > 1e9 and (turns > 2 or "a" in policy and tool is None)',
    ],
)
def test_texts_are_read_only_where_the_rest_leaves_the_answer_open(run, text):
    """Reading needs the record, which is not passed here."""
    assert set(matches(text, run[1]).tolist()) == {text.startswith("reward <")}
    with pytest.raises(UserError, match="needs the record"):
        matches('reward < 1e9 and "a" in said', run[1])


def test_a_part_of_a_text_of_one_column(run):
    shot = run[1]
    known = shot.state.codes["finish_reason"]
    length = shot.raw("finish_reason") == known.index("length")
    assert matches('"eng" in finish_reason', shot).tolist() == length.tolist()
    assert matches('"eng" not in finish_reason', shot).tolist() == (~length).tolist()


def said(shot, rows) -> list[dict[str, Any]]:
    """The turns of some rows as they were recorded."""
    return [
        {"place": place, "turn": number} | {name: turn.get(name) for name in COLUMNS[1:]}
        for place, key in enumerate(shot.keys(np.array(rows, int)))
        for number, turn in enumerate(turns_of(*key))
    ]


def read(run, shot, rows) -> list[dict[str, Any]]:
    return read_turns(run, shot, np.array(rows, int)).select(["place", *COLUMNS]).to_pylist()


@settings(deadline=None)
@given(st.lists(st.integers(0, 69), unique=True))
@example([69, 0, 63, 64])
def test_the_turns_of_any_rows_in_any_order(run, rows):
    record, shot = run
    assert shot.rows == 70 and shot.state.turns == 64
    assert read(record, shot, rows) == said(shot, rows)


def test_turns_of_a_run_that_grows_and_of_one_that_was_resumed(tmp_path):
    folder = new_run(tmp_path / "run")
    record(folder, [0], batch=10)
    assert not list((folder / "index").glob("turns*")) and indexed(folder).state.turns == 0
    assert not [*(folder / "index").glob("turns*"), *(folder / "index").glob("calls*")]
    for last in (4, 8):
        record_turns(folder, range(last - 3, last), attempt=0)
        shot = indexed(folder)
        assert shot.state.turns == shot.rows // 32 * 32
        assert read(cavesson.record.open(folder), shot, range(10, shot.rows)) == said(shot, range(10, shot.rows))
        assert read(cavesson.record.open(folder), shot, range(10)) == []
    record_turns(folder, range(6, 7), batch=5)
    shot, run = indexed(folder), cavesson.record.open(folder)
    live = np.flatnonzero(shot.alive)
    assert read(run, shot, live[live >= 10]) == said(shot, live[live >= 10])
    assert read(run, shot, np.flatnonzero(~shot.alive)) == []
    texts = ['"alpha" in arguments and seconds > 1', "error", '"42" in result']
    old = [found(text, shot, run, live) for text in texts]
    for path in (folder / "index").iterdir():
        path.unlink()
    again = indexed(folder)
    assert old == [found(text, again, run, np.arange(again.rows)) for text in texts] and all(old)


def found(text, shot, run, rows) -> set[tuple[int, int]]:
    """The rollouts among some rows for which a filter holds."""
    return set(shot.keys(rows[matches(text, shot, run)[rows]]))


@pytest.mark.parametrize("name", [f"{NAME}-places", "calls-seconds", "calls-row"])
def test_an_index_that_lacks_a_part_of_the_turns_is_made_anew(tmp_path, name):
    folder = new_run(tmp_path / "run")
    record_turns(folder, range(7))
    indexed(folder)
    with (folder / "index" / name).open("r+b") as file:
        file.truncate(17)
    shot, run = indexed(folder), cavesson.record.open(folder)
    assert read(run, shot, range(70)) == said(shot, range(70))
    assert matches("seconds >= 0", shot, run).any()

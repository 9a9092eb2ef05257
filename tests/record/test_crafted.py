"""Files of a run folder that nobody's recorder has written: one plain line, or a record that can be read."""

import json
import struct
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import cavesson
from cavesson.errors import UserError
from cavesson.record import Recorder, begin_attempt, write_run
from cavesson.record.run_folder import attempts
from cavesson.record.storage import storage


@contextmanager
def run_folder() -> Iterator[Path]:
    """A run with one step of two rollouts."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        with Recorder(folder, attempt=begin_attempt(folder, 0)) as out:
            write_run(folder, {"config": {}})
            rows = {"sample": [0, 1], "prompt": ["p", "q"], "response": ["r", "s"], "reward": [0.5, 1.0]}
            mask = np.ones((2, 3), np.bool_)
            out.rollouts(0, rows, {"mask": mask, "logprob": np.full((2, 3), -1.0, np.float32)})
            out.metrics(0, {"loss": 1.0})
        yield folder


def readable(folder: Path) -> cavesson.Run:
    """A run of which everything can be read."""
    run = cavesson.open(folder)
    for name in ("rows", "tokens", "rollups", "steps"):
        run.arrow(name).validate(full=True)
    return run


# --- attempts ---

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=5,
)
NUMBERS = JSON | st.sampled_from([10**9, 10**12, 2**31, 2**63, -1, 10**4000, 0.0, 1.5, "1", float("inf")])
ATTEMPTS = st.one_of(
    st.binary(max_size=30),
    JSON.map(lambda value: json.dumps(value).encode()),
    st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("attempt", "start_step", "processes"), NUMBERS)
    ).map(lambda value: json.dumps(value).encode()),
)  # fmt: skip


@given(ATTEMPTS)
@example(b'{"attempt": 1, "start_step": Infinity}')
@example(b'{"attempt": 1, "start_step": 1, "processes": 100000000000}')
@example(b"[" * 200_000)
@example(b'{"attempt":' * 100_000)
@example(b"1" * 5000)
def test_any_file_among_the_attempts_gives_a_line_or_an_attempt(content: bytes) -> None:
    with run_folder() as folder:
        file = folder / "attempts" / "0001.json"
        file.write_bytes(content)
        try:
            found = attempts(storage(folder))[-1]
            run = readable(folder)
        except UserError as error:
            assert str(file) in str(error) and "\n" not in str(error)
            return
        assert len(found) == 3 and all(type(number) is int for number in found)
        assert set(run.rows(["step"])["step"].to_pylist()) <= {0}


def test_a_folder_among_the_attempts_is_named() -> None:
    with run_folder() as folder:
        (folder / "attempts" / "0001.json").mkdir()
        with pytest.raises(UserError, match=r"0001\.json does not say where an attempt starts"):
            readable(folder)


# --- journals ---

HEAD: dict[str, Any] = {
    "step": 1,
    "rows": {"sample": [0, 1], "prompt": ["p", "q"], "response": ["r", "s"], "reward": [0.5, 1.0]},
    "measured": True,
    "texts": {},
    "arrays": [["row", "<i8", 2], ["position", "<i8", 2], ["logprob", "<f4", 2]],
}
BODY = np.array([0, 1], "<i8").tobytes() + np.array([0, 0], "<i8").tobytes() + np.array([-1, -2], "<f4").tobytes()


def frame(head: bytes, body: bytes) -> bytes:
    return struct.pack("<QQI", len(head), len(body), zlib.crc32(body, zlib.crc32(head))) + head + body


def with_journal(folder: Path, *frames: bytes, name: str = ".journal-0000-0000") -> Path:
    path = folder / "record" / name
    path.write_bytes(b"".join(frames))
    return path


def test_a_frame_as_recorders_write_it_is_added() -> None:
    with run_folder() as folder:
        with_journal(folder, frame(json.dumps(HEAD).encode(), BODY))
        run = readable(folder)
        assert run.rows(["step", "reward"]).to_pylist()[2:] == [
            {"step": 1, "reward": 0.5}, {"step": 1, "reward": 1.0},
        ]  # fmt: skip
        assert run.tokens(1)["logprob"].to_pylist() == [-1.0, -2.0]
        assert not list(folder.glob("record/.journal*"))


CHANGES: dict[str, Any] = {
    "no object": 1,
    "no step": {name: value for name, value in HEAD.items() if name != "step"},
    "a step as text": HEAD | {"step": "1"},
    "a huge step": HEAD | {"step": 10**30},
    "a negative step": HEAD | {"step": -5},
    "objects": HEAD | {"arrays": [["row", "O", 2]]},
    "more than there is": HEAD | {"arrays": [["row", "<i8", 10**15]]},
    "a negative count": HEAD | {"arrays": [["row", "<i8", -1], ["position", "<i8", 0]]},
    "no type": HEAD | {"arrays": [["row", "nonsense", 2]]},
    "another row": HEAD | {"rows": HEAD["rows"] | {"sample": [0], "prompt": ["p"], "response": ["r"], "reward": [1]}},
    "uneven rows": HEAD | {"rows": HEAD["rows"] | {"prompt": ["p"]}},
    "no samples": HEAD | {"rows": {}},
    "texts for numbers": HEAD | {"rows": HEAD["rows"] | {"reward": ["a", "b"]}},
    "samples of another type": HEAD | {"rows": HEAD["rows"] | {"sample": ["a", None]}},
    "metrics that are no numbers": {"step": 1, "metrics": {"a": "b"}, "arrays": []},
    "metrics that are nested": {"step": 1, "metrics": {"a": {"b": 1}}, "arrays": []},
    "metrics with a name of the record": {"step": 1, "metrics": {"attempt": 1.0}, "arrays": []},
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_frame_that_no_recorder_writes_is_kept_aside(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with run_folder() as folder:
        good = frame(json.dumps({"step": 2, "metrics": {"loss": 2.0}, "arrays": []}).encode(), b"")
        path = with_journal(folder, good, frame(json.dumps(CHANGES[name]).encode(), BODY))
        run = readable(folder)
        assert set(run.rows(["step"])["step"].to_pylist()) <= {0, 1}
        assert not path.exists()
        if "damaged" in capsys.readouterr().err:
            assert path.with_name(f"{path.name}.damaged").exists()


PLACES = st.sampled_from(["step", "rows", "measured", "texts", "arrays"])


@given(PLACES, JSON, st.binary(max_size=40))
def test_no_journal_ends_in_a_traceback(place: str, value: Any, body: bytes) -> None:
    with run_folder() as folder:
        with_journal(folder, frame(json.dumps(HEAD | {place: value}).encode(), body or BODY))
        try:
            readable(folder)
        except UserError as error:
            assert str(folder) in str(error)


@given(st.binary(max_size=60))
@example(b"\xff" * 40)
@example(frame(b"[" * 200_000, b""))
@example(struct.pack("<QQI", 2**63, 2**63, 0))
def test_any_bytes_are_a_journal_that_ends(content: bytes) -> None:
    with run_folder() as folder:
        with_journal(folder, content)
        assert len(readable(folder).rows()) == 2


@pytest.mark.parametrize("name", [".journal-99999999999-0000", ".journal-0000-99999999999"])
def test_a_journal_of_no_attempt_of_the_record_is_kept_aside(name: str) -> None:
    with run_folder() as folder:
        path = with_journal(folder, frame(json.dumps(HEAD).encode(), BODY), name=name)
        assert len(readable(folder).rows()) == 2
        assert not path.exists()

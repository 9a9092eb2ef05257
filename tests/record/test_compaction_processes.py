"""Processes that write, merge, read and are killed at the same time."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
from compaction_helpers import answers, files, record

import cavesson
from cavesson.record import compact
from cavesson.record.maintain import compaction

# Every number follows from step and rank, so that a line too many, too few or from elsewhere would show.
WRITER = """
import sys
from pathlib import Path
import numpy as np
from cavesson.record import Recorder, begin_attempt
from cavesson.record.write import recorder

recorder.WAITING = int(sys.argv[3])
folder, steps = Path(sys.argv[1]), int(sys.argv[2])
with Recorder(folder, attempt=begin_attempt(folder, 0)) as out:
    for step in range(steps):
        lengths = (np.arange(5) * 7 + step) % 4
        rows = {"sample": np.arange(5), "prompt": ["p"] * 5, "response": ["r" * 1000] * 5, "reward": np.full(5, step)}
        rows["group"] = [2, 2, 0, 1, 0]
        mask = np.arange(4) < lengths[:, None]
        out.rollouts(step, rows, {"mask": mask, "logprob": np.full((5, 4), step % 8, np.float32)})
        out.metrics(step, {"twice": 2.0 * step})
        if step % 4 == 3:
            out.flush()
            print(step, flush=True)
"""
KILLED = """
import os, signal, sys
from pathlib import Path
from cavesson.record import compact

left = int(sys.argv[2])

def dying(method):
    def call(*given, **named):
        global left
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return method(*given, **named)
    return call

Path.replace, Path.unlink = dying(Path.replace), dying(Path.unlink)
compact(sys.argv[1])
"""
COMPACTER = "import sys; from cavesson.record import compact; print(compact(sys.argv[1]))"


def check_whole(run: Any) -> list[int]:
    """Check that what is there follows from its step, and return the steps."""
    rows = run.rows(["step", "sample", "reward", "length"])
    steps = rows["step"].unique().to_pylist()
    assert rows.num_rows == 5 * len(steps) and steps == list(range(len(steps)))
    step, sample = rows["step"].to_numpy(), rows["sample"].to_numpy()
    np.testing.assert_array_equal(sample, np.tile(np.arange(5), len(steps)))
    np.testing.assert_array_equal(rows["reward"].to_numpy(), step)
    np.testing.assert_array_equal(rows["length"].to_numpy(), (sample * 7 + step) % 4)
    tokens = run.arrow("tokens", ["step", "sample", "position", "logprob"], steps)
    expected = [(s, i, p) for s in steps for i in range(5) for p in range((i * 7 + s) % 4)]
    assert list(zip(*(tokens[name].to_pylist() for name in ("step", "sample", "position")), strict=True)) == expected
    np.testing.assert_array_equal(tokens["logprob"].to_numpy(), tokens["step"].to_numpy() % 8)
    metrics = run.steps()
    np.testing.assert_array_equal(metrics["twice"].to_numpy() if len(metrics) else [], 2 * metrics["step"].to_numpy())
    return list(steps)


def start(*words: object) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", *map(str, words)], stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_process_killed_while_it_compacts_loses_nothing(folder):
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    for trial in range(3):
        process = start(WRITER, folder, 100_000, 3)
        assert process.stdout is not None
        flushed = [int(process.stdout.readline()) for _ in range(chance.randint(2, 6))]
        time.sleep(chance.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        flushed += map(int, process.stdout.read().split())
        process.wait()
        process.stdout.close()
        steps = check_whole(cavesson.open(folder))
        assert steps[: flushed[-1] + 1] == list(range(flushed[-1] + 1)), f"seed {seed}, trial {trial}"
    before = answers(folder)
    compact(folder)
    assert answers(folder) == before
    assert not [name for name in files(folder) if name[:4] in ("rows", "step") and name.split("-")[1] != "c"]


@pytest.mark.slow
def test_a_compaction_killed_before_any_of_its_renames_and_deletions_loses_nothing(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(compaction, "ABANDONED", -1)
    record(folder, range(2))
    before = answers(folder)
    # Four large files and a manifest are renamed, then two steps' four files each deleted.
    for moment in range(5 + 8 + 1):
        copy = tmp_path / f"killed-{moment}"
        shutil.copytree(folder, copy)
        process = start(KILLED, copy, moment)
        process.communicate()
        assert process.returncode == (-signal.SIGKILL if moment < 13 else 0), moment
        assert answers(copy) == before, moment
        compact(copy)
        compact(copy)
        assert answers(copy) == before, moment
        assert len(files(copy)) == 4 and len(files(copy, "compactions/all-*")) == 1, moment


def test_a_reader_is_right_at_every_moment_of_writing_and_compacting(folder):
    process = start(WRITER, folder, 40, 3)
    seen: list[int] = []
    while process.poll() is None:
        before, seen = seen, check_whole(cavesson.open(folder))
        assert seen[: len(before)] == before
    process.communicate()
    assert process.returncode == 0 and check_whole(cavesson.open(folder)) == list(range(40))


@pytest.mark.slow
def test_of_two_compactions_of_the_same_files_one_counts(folder):
    for first in range(0, 24, 8):
        record(folder, range(first, first + 8))
        before = answers(folder)
        processes = [start(COMPACTER, folder) for _ in range(3)]
        for process in processes:
            process.communicate()
            assert process.returncode == 0
        assert answers(folder) == before


def test_a_manifest_that_lost_the_race_counts_neither_now_nor_later(folder):
    record(folder, range(4))
    before = answers(folder)
    compact(folder, rank=0)
    (winner,) = folder.glob("compactions/*")
    content = json.loads(winner.read_text())
    # The same sources merged once more, under a name that comes later.
    for segment in content["rows"] + content["steps"]:
        for path in folder.glob(f"record/*-{segment['stem']}.parquet"):
            path.with_name(path.name.replace(segment["stem"], segment["stem"] + "f")).write_bytes(path.read_bytes())
        segment["stem"] += "f"
    (folder / "compactions" / "9999-f.json").write_text(json.dumps(content))
    assert answers(folder) == before
    compact(folder)
    compact(folder)
    assert answers(folder) == before
    assert len(files(folder, "compactions/*")) == 1

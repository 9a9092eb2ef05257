"""Rewards of a recorded run computed again: values, order of pairs, kills, and what a failing reward says."""

import hashlib
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cavesson.record
from cavesson.config import load
from cavesson.errors import UserError
from cavesson.ops.order_changes import order_changes
from cavesson.record import Recorder, begin_attempt, write_run
from cavesson.record.read.query import query
from cavesson.tools.rescore import rescore
from cavesson.tools.settings import RescoreSettings

STEPS, BATCH = 4, 6
REWARDS = """
def length(prompts, responses, **columns):
    return [float(len(one)) for one in responses]

def right(prompts, responses, ground_truth, level, **columns):
    named = [{"right": one == answer, "level": number} for one, answer, number in zip(responses, ground_truth, level)]
    return {name: [float(one[name]) for one in named] for name in ("right", "level")}

def logged(prompts, responses, **columns):
    open("calls.txt", "a").write(prompts[0] + "\\n")
    return [1.0] * len(responses)

def killed(prompts, responses, **columns):
    import os, signal
    if os.path.exists("kill") and prompts[0].startswith("prompt 2"):
        os.kill(os.getpid(), signal.SIGKILL)
    return logged(prompts, responses)

def late(prompts, responses, **columns):
    if prompts[0].startswith("prompt 2"):
        raise ValueError("too late")
    return [1.0] * len(responses)
"""


def rows_of(step: int) -> dict[str, Any]:
    samples = range(BATCH)
    return {
        "sample": np.arange(BATCH),
        "group": [step * 10 + sample // 3 for sample in samples],
        "split": ["eval" if step == STEPS - 1 else "train"] * BATCH,
        "prompt": [f"prompt {step} {sample // 3}" for sample in samples],
        "response": ["x" * (step + sample * 7 % 5) for sample in samples],
        "reward": np.arange(BATCH) * 0.5 + step,
        "ground_truth": ["xx"] * BATCH,
        "extra": [f'{{"level": {sample}}}' for sample in samples],
    }


def record(folder: Path, steps: range, attempt: int) -> None:
    with Recorder(folder, attempt=attempt) as recorder:
        for step in steps:
            recorder.rollouts(step, rows_of(step), {"mask": np.ones((BATCH, 2), np.bool_)})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)
    folder = tmp_path / "run"
    folder.mkdir()
    write_run(folder, {"algorithm": "grpo"})
    record(folder, range(STEPS), begin_attempt(folder, start_step=0))
    return folder


def flags(*given: str) -> RescoreSettings:
    return load(RescoreSettings, None, ["--device", "cpu", *given])


def by_hand(step: int) -> list[float]:
    return [float(step + sample * 7 % 5) for sample in range(BATCH)]


def content(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (folder / "record").iterdir()}


def test_the_new_rewards_are_kept_beside_the_record_which_does_not_change(run):
    before = content(run)
    found = rescore(str(run), flags("--rewards", "rewards.py:length"))
    assert content(run) == before
    table = cavesson.record.open(run).rescored()
    assert table["name"].to_pylist() == ["length"] * STEPS * BATCH
    assert table["reward"].to_pylist() == [value for step in range(STEPS) for value in by_hand(step)]
    answer = query(
        cavesson.record.open(run),
        "SELECT step, sum(s.reward), sum(r.reward) FROM rescored s JOIN rows r USING (step, sample) "
        "WHERE name = 'length' GROUP BY step ORDER BY step",
    )
    assert answer.rows == [(step, sum(by_hand(step)), sum(rows_of(step)["reward"])) for step in range(STEPS)]
    means = {one.name: (one.responses, one.recorded, one.again) for one in found.means}
    assert means["step 1"] == (BATCH, np.mean(rows_of(1)["reward"]), np.mean(by_hand(1)))
    assert means["held out"] == (BATCH, np.mean(rows_of(3)["reward"]), np.mean(by_hand(3)))
    assert means["all steps"][2] == np.mean([by_hand(step) for step in range(STEPS - 1)])


def test_rewards_get_the_columns_of_the_record_and_keep_their_parts(run):
    rescore(str(run), flags("--rewards", "rewards.py:right", "--name", "mine"))
    table = cavesson.record.open(run).rescored()
    for line in table.to_pylist(maps_as_pydicts="strict"):
        is_right = float(by_hand(line["step"])[line["sample"]] == 2)
        assert line["reward_parts"] == {"right/right": is_right, "right/level": float(line["sample"])}
        assert line["reward"] == is_right + line["sample"]
        assert line["reward_weights"] == {"right/right": 1.0, "right/level": 1.0}


def test_a_missing_column_is_named_with_those_that_there_are(run):
    with pytest.raises(UserError, match="the record has no column 'truth'; it has level, ground_truth"):
        rescore(str(run), flags("--rewards", "rewards.py:length", "--columns", '{answer = "truth"}'))


def test_the_pairs_that_flip_are_those_that_arithmetic_gives(run):
    found = rescore(str(run), flags("--rewards", "rewards.py:length", "--show", "1"))
    pairs = [
        (step, *pair) for step in range(STEPS) for part in ((0, 1, 2), (3, 4, 5)) for pair in combinations(part, 2)
    ]
    flipped = [(step, one, other) for step, one, other in pairs if by_hand(step)[one] > by_hand(step)[other]]
    assert (found.order.pairs, found.order.flipped) == (len(pairs), len(flipped))
    ((first, second),) = found.worst
    assert (second.step, second.sample, first.sample) in flipped
    assert first.recorded > second.recorded and first.again < second.again


def slow(recorded: list[int], again: list[int], group: list[int]) -> tuple[int, int, int, int]:
    pairs = [(i, j) for i, j in combinations(range(len(group)), 2) if group[i] == group[j]]
    products = [(recorded[i] - recorded[j]) * (again[i] - again[j]) for i, j in pairs]
    flipped = {group[i] for (i, _), product in zip(pairs, products, strict=True) if product < 0}
    ordered = sum(product != 0 for product in products)
    return len(pairs), ordered, sum(product < 0 for product in products), len(flipped)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 4)), max_size=20))
def test_order_changes_equal_those_of_a_loop_over_all_pairs(rows):
    recorded, again, group = (list(column) for column in zip(*rows, strict=True)) if rows else ([], [], [])
    found = order_changes(np.array(recorded, float), np.array(again, float), np.array(group, int), 20)
    assert (found.pairs, found.ordered, found.flipped, found.flipped_groups) == slow(recorded, again, group)
    assert len(found.worst) == found.flipped_groups
    for name, ordered_in, flipped_in in zip(sorted(set(group)), found.ordered_in, found.flipped_in, strict=True):
        mine = [[one[i] for i in range(len(group)) if group[i] == name] for one in (recorded, again, group)]
        assert (ordered_in, flipped_in) == slow(*mine)[1:3]
    gaps = [(recorded[one] - recorded[other]) * (again[one] - again[other]) for one, other in found.worst]
    assert gaps == sorted(gaps)
    for (one, other), gap in zip(found.worst, gaps, strict=True):
        own = [row for row in range(len(group)) if group[row] == group[one]]
        assert group[one] == group[other] and recorded[one] > recorded[other]
        assert gap == min((recorded[i] - recorded[j]) * (again[i] - again[j]) for i in own for j in own)


@pytest.mark.slow
def test_a_killed_command_continues_with_the_step_that_it_did_not_finish(run):
    program = (
        "from cavesson.tools import rescore as module; module.INTERVAL = 0\n"
        "from cavesson.tools.settings import RescoreSettings\n"
        "module.rescore('run', RescoreSettings(rewards='rewards.py:killed', device='cpu'))"
    )
    (run.parent / "kill").touch()
    ended = subprocess.run([sys.executable, "-c", program], cwd=run.parent, capture_output=True)
    assert ended.returncode == -9
    (run.parent / "kill").unlink()
    subprocess.run([sys.executable, "-c", program], cwd=run.parent, check=True)
    calls = (run.parent / "calls.txt").read_text().splitlines()
    assert [call.split()[1] for call in calls] == ["0", "1", "2", "3"]
    assert len(cavesson.record.open(run).rescored()) == STEPS * BATCH


def test_a_reward_that_raises_is_one_line_with_its_place_and_what_was_computed_is_kept(run):
    with pytest.raises(UserError) as error:
        rescore(str(run), flags("--rewards", "rewards.py:late"))
    place = REWARDS.splitlines().index('        raise ValueError("too late")') + 1
    assert (
        str(error.value)
        == f"step 2: the reward late raised ValueError: too late ({run.parent}/rewards.py, line {place})"
    )
    assert set(cavesson.record.open(run).rescored()["step"].to_pylist()) == {0, 1}


def test_a_name_stands_for_the_same_rewards(run):
    rescore(str(run), flags("--rewards", "rewards.py:length", "--name", "mine"))
    with pytest.raises(UserError, match="is about other rewards, or they have changed since: choose another --name"):
        rescore(str(run), flags("--rewards", "rewards.py:logged", "--name", "mine"))
    (run.parent / "rewards.py").write_text(REWARDS.replace("float(len(one))", "2.0 * len(one)"))
    with pytest.raises(UserError, match="or they have changed since"):
        rescore(str(run), flags("--rewards", "rewards.py:length", "--name", "mine"))


def test_later_steps_are_added_and_superseded_ones_left_out(run):
    rescore(str(run), flags("--rewards", "rewards.py:logged"))
    record(run, range(2, STEPS + 1), begin_attempt(run, start_step=2))
    assert set(cavesson.record.open(run).rescored()["step"].to_pylist()) == {0, 1}
    rescore(str(run), flags("--rewards", "rewards.py:logged"))
    assert cavesson.record.open(run).rescored()["step"].to_pylist() == [
        s for s in range(STEPS + 1) for _ in range(BATCH)
    ]
    calls = (run.parent / "calls.txt").read_text().splitlines()
    assert [call.split()[1] for call in calls] == ["0", "1", "2", "3", "2", "3", "4"]


@pytest.mark.parametrize("name", ["../up", "a/b", ".hidden", "", "a[b]"])
def test_a_name_is_one_of_a_folder(name):
    with pytest.raises(UserError, match="a name consists of letters"):
        flags("--rewards", "exact_match", "--name", name)

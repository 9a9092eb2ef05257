"""Readings do not depend on the order in which a process happens to hash texts."""

import os
import subprocess
import sys

import numpy as np
import pytest
from doctor_helpers import healthy
from sick_response import mark

READ = """
import sys, cavesson
from cavesson.doctor.data import RunData
from cavesson.doctor.rules import RULES
data = RunData(cavesson.open(sys.argv[1]))
for rule in RULES:
    if all(any(data.has(one) for one in need.split("|")) for need in rule.needs):
        reading = rule.statistic(data)
        print(rule.name, reading and (reading.seen, reading.unhealthy, reading.evidence, reading.words))
"""


def readings(folder, seed):
    """Return what all rules read, in a separate process."""
    environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
    command = [sys.executable, "-W", "ignore", "-c", READ, folder]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def patterns_that_decide_equally_much():
    made = healthy()
    mark(made, " so so then", 0.8, 2.0)
    return made


def words_that_are_equally_frequent():
    made = healthy(steps=40)
    random, words = np.random.default_rng(0), np.array([f"w{i}" for i in range(100)])
    # Of every two responses the one says what the other does not.
    pairs = [random.permutation(words).reshape(2, 50) for _ in range(40 * 16)]
    texts = np.array([" ".join(said) for pair in pairs for said in pair], object)
    made.rows["response"] = texts.reshape(made.rows["response"].shape)
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "rule"),
    [(patterns_that_decide_equally_much, "pattern-spreading"), (words_that_are_equally_frequent, "reward-is-noise")],
)
def test_every_process_reads_the_same(tmp_path, made, rule):
    made().data(tmp_path)
    first = readings(tmp_path, 1)
    assert f"{rule} (" in first
    assert first == readings(tmp_path, 2) == readings(tmp_path, 3)

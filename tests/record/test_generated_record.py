"""The record that the benchmarks of the board read."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cavesson

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generated") / "run"
    options = ["--rollouts", "1500", "--tokens", "40", "--batch", "256", "--token-share", "0.25", "--long", "500"]
    subprocess.run([sys.executable, BENCHMARKS / "generate_record.py", folder, *options], check=True)
    return cavesson.open(folder)


def test_every_step_is_whole_and_siblings_are_from_one_rank(run):
    rows = run.rows(["step", "sample", "rank", "group", "split"]).to_pandas()
    train = rows[rows.split == "train"]
    assert rows.groupby("step")["sample"].apply(sorted).tolist() == [[*range(256)]] * 5 + [[*range(257)]]
    assert train.groupby(["step", "rank"]).size().tolist() == [128] * 12
    siblings = train.sort_values(["step", "sample"])[["group", "rank"]].to_numpy().reshape(-1, 8, 2)
    assert np.all(siblings == siblings[:, :1])


def test_the_pattern_spreads_from_3_to_50_percent(run):
    rows = run.rows(["step", "response", "split"]).to_pandas()
    ends = rows[rows.split == "train"].groupby("step").response.apply(lambda texts: texts.str.endswith("#").mean())
    # 0.03 + 0.47 · step / 5, give or take four standard deviations of 256 draws.
    wanted = 0.03 + 0.47 * np.arange(6) / 5
    assert np.all(np.abs(ends.to_numpy() - wanted) < 4 * np.sqrt(wanted * (1 - wanted) / 256))


def test_tokens_spell_the_response_and_are_there_for_their_share(run):
    rows = run.rows(["step", "sample", "split", "length", "response"]).to_pandas()
    train = rows[rows.split == "train"]
    assert abs(train.length.notna().mean() - 0.25) < 0.05
    assert train.length.max() <= 40 and rows[rows.split == "eval"].length.tolist() == [500]
    some = train[train.length.notna()].iloc[7]
    tokens = run.rollout(int(some.step), int(some["sample"])).tokens
    assert "".join(run.token_texts(tokens["token_id"].to_pylist())).strip() == some.response
    assert all(tokens[name].null_count == 0 for name in ("logprob", "ref_logprob", "value", "token_reward", "entropy"))


def test_metrics_are_logged_once_a_step(run):
    steps, rows = run.steps().to_pandas(), run.rows(["step", "reward", "split"]).to_pandas()
    assert steps.step.tolist() == [*range(6)]
    means = rows[rows.split == "train"].groupby("step").reward.mean()
    assert np.allclose(steps["reward/mean"], means, atol=1e-4)

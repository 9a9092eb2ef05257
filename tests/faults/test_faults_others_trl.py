"""Faults planted in TRL's own code: what is recorded follows from the fault by arithmetic, in all three recordings."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import cavesson
from benchmarks.faults.others.case import Case
from benchmarks.faults.others.generate import OLD, ROOT
from benchmarks.faults.others.judged import recordings
from benchmarks.faults.others.planted import FAULTS
from cavesson.record import Run

OLD_PYTHON = Path(os.environ.get("CAVESSON_TRL_1_10", OLD))
NEEDS_OLD = pytest.mark.skipif(not OLD_PYTHON.exists(), reason=f"TRL 1.10 has no environment: {OLD_PYTHON}")
PYTHONS = {"ppo": OLD_PYTHON, "grpo": Path(sys.executable), "rloo": Path(sys.executable)}
NAMES = {
    "ppo": [
        "usual",
        "penalty-flipped",
        "penalty-flipped-late",
        "reward-early",
        "whitening-shifted",
        "padding-trained",
        "entropy-punished",
        "reward-clipped",
        "whitening-by-row",
        "padding-penalised",
        "ratio-to-reference",
    ],
    "grpo": [
        "usual",
        "baseline-of-others",
        "spread-squared",
        "siblings-alike",
        "verifier-dead-late",
        "groups-of-one",
        "greedy-late",
        "controller-backwards",
        "goes-on-after-end",
    ],
    "rloo": [
        "usual",
        "baseline-too-small",
        "penalty-flipped",
        "end-forbidden",
        "scores-cached",
        "advantages-shifted-late",
        "dropout-left-on",
        "smaller-batch",
    ],
}
BETA, STEPS, GROUP = 0.05, 4, 8
ALL = [pytest.param("ppo", marks=NEEDS_OLD), "grpo", "rloo"]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    done: dict[str, Path] = {}

    def train(trainer: str) -> Path:
        if trainer not in done:
            done[trainer] = tmp_path_factory.mktemp(f"others-{trainer}")
            command = [PYTHONS[trainer], ROOT / "tests" / "faults" / "others_runs.py", trainer, done[trainer]]
            paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
            environment = os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
            result = subprocess.run([*command, *NAMES[trainer]], env=environment, capture_output=True, text=True)
            assert result.returncode == 0, result.stderr[-3000:]
        return done[trainer]

    return train


def board(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "board" / "rollouts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def texts(run: Run, reward: str) -> list[tuple[Any, ...]]:
    found = run.rows(["step", "prompt", "response", reward]).to_pylist()
    return sorted((row["step"], row["prompt"], row["response"], round(row[reward], 4)) for row in found)


@pytest.mark.parametrize("trainer", ALL)
def test_the_three_recordings_say_the_same(trained, trainer, tmp_path):
    folder = trained(trainer) / "usual"
    found = dict(recordings(folder, Case("usual", True, trainer, "couplets", 0), tmp_path))
    own, lines = found["recorder"], found["board"]
    mine, theirs = (
        texts(run, "shaped_reward" if trainer == "ppo" and run is own else "reward") for run in (own, lines)
    )
    assert len(mine) == STEPS * 16
    assert mine == theirs
    for step in range(STEPS):
        ours, imported = own.tokens(step), lines.tokens(step)
        for column in ("logprob", "ref_logprob"):
            left, right = (np.sort(t[column].drop_null().to_numpy()) for t in (ours, imported))
            assert left == pytest.approx(right, abs=1e-4)
    tables = sorted((folder / "completions").glob("*.parquet"))
    assert len(tables) == STEPS
    if trainer != "ppo":  # PPO's table has responses to other prompts
        said = [(r["prompt"], r["completion"]) for path in tables for r in pq.read_table(path).to_pylist()]
        assert sorted(said) == sorted((prompt, response) for _, prompt, response, _ in mine)


@pytest.mark.parametrize("trainer", ALL)
def test_the_policy_is_the_reference_at_first_and_then_learns(trained, trainer):
    run = cavesson.open(trained(trainer) / "usual" / "recorder")
    gaps = [np.abs(t["logprob"].to_numpy() - t["ref_logprob"].to_numpy()).max() for t in map(run.tokens, range(STEPS))]
    assert gaps[0] < 1e-4 and gaps[-1] > 1e-3


def slope(line: dict[str, Any]) -> np.ndarray:
    """Token rewards over log-ratios, where the score does not stand: behind the response, or on its last token."""
    count = len(line["logprobs"]) - 1
    ratio = np.subtract(line["logprobs"], line["ref_logprobs"])[:count]
    far = np.abs(ratio) > 1e-3
    return np.array(line["token_rewards"])[:count][far] / ratio[far]


@NEEDS_OLD
@pytest.mark.parametrize(
    "name, signs", [("usual", [-1] * 4), ("penalty-flipped", [1] * 4), ("penalty-flipped-late", [-1, -1, 1, 1])]
)
def test_ppo_rewards_tokens_by_the_sign_of_the_penalty(trained, name, signs):
    lines = board(trained("ppo") / name)
    for step, sign in enumerate(signs):
        found = np.concatenate([slope(line) for line in lines if line["step"] == step])
        assert found == pytest.approx(sign * BETA, rel=1e-3)
        assert step == 0 or len(found) > 20


def places(line: dict[str, Any]) -> int:
    """How many tokens behind the last one of the response the score stands; 0 or 1 in a response that was cut."""
    count = len(line["logprobs"])
    penalty = np.zeros(len(line["token_rewards"]))
    penalty[:count] = BETA * np.subtract(line["logprobs"], line["ref_logprobs"])
    return int(np.abs(np.array(line["token_rewards"]) + penalty).argmax()) - (count - 1)


@NEEDS_OLD
def test_ppo_puts_the_score_where_it_is_told(trained):
    usual, early = (board(trained("ppo") / name) for name in ("usual", "reward-early"))
    for lines, expected in ((usual, lambda n: 1 if n < 8 else 0), (early, lambda n: max(-4, 1 - n))):
        scored = [line for line in lines if abs(line["reward"]) > 0.05]
        assert len(scored) > 20
        assert [places(line) for line in scored] == [expected(len(line["logprobs"])) for line in scored]


@NEEDS_OLD
@pytest.mark.parametrize("name, mean", [("usual", 0.0), ("whitening-shifted", 0.7)])
def test_ppo_advantages_have_the_planted_mean(trained, name, mean):
    run = cavesson.open(trained("ppo") / name / "recorder")
    for step in range(STEPS):
        tokens = run.tokens(step)
        trained_on = tokens["advantage"].to_numpy()[tokens["mask"].to_numpy()]
        assert trained_on.mean() == pytest.approx(mean, abs=2e-3)
        assert trained_on.std() == pytest.approx(1.0, abs=1e-2)


@NEEDS_OLD
def test_ppo_trains_three_tokens_behind_the_end(trained):
    for name, behind in (("usual", 0), ("padding-trained", 3)):
        for line in board(trained("ppo") / name):
            tokens = line["response_tokens"][: len(line["logprobs"])]
            if "<end>" in tokens:
                assert len(tokens) == min(8, tokens.index("<end>") + 1 + behind)


@NEEDS_OLD
def test_ppo_loses_entropy_faster_where_it_is_punished(trained):
    def entropy(name):
        return cavesson.open(trained("ppo") / name / "recorder").steps()["policy/entropy_avg"].to_pylist()

    assert entropy("entropy-punished")[-1] < entropy("usual")[-1] - 1e-3


def credited(folder: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """Rewards and advantages, [2, 8] each, from the table of every step."""
    tables = [pq.read_table(path) for path in sorted((folder / "completions").glob("*.parquet"))]
    columns = ([t[name].to_numpy().reshape(-1, GROUP) for name in ("task_reward", "advantage")] for t in tables)
    return [(reward, advantage) for reward, advantage in columns]


def test_grpo_advantages_follow_from_the_rewards(trained):
    def usual(reward):
        return (reward - reward.mean(1, keepdims=True)) / (reward.std(1, ddof=1, keepdims=True) + 1e-4)

    def of_others(reward):  # response 0 has the mean of group 0, response 1 that of group 1, and so on in turn
        taken = np.resize(reward.mean(1), reward.shape)
        return (reward - taken) / (reward.std(1, ddof=1, keepdims=True) + 1e-4)

    def squared(reward):
        return (reward - reward.mean(1, keepdims=True)) / (reward.var(1, ddof=1, keepdims=True) + 1e-4)

    for name, expected in (("usual", usual), ("baseline-of-others", of_others), ("spread-squared", squared)):
        for reward, advantage in credited(trained("grpo") / name):
            assert advantage == pytest.approx(expected(reward), rel=1e-3, abs=1e-4)


def test_grpo_groups_repeat_themselves(trained):
    for name, expected in (("usual", 8), ("siblings-alike", 4)):
        for path in sorted((trained("grpo") / name / "completions").glob("*.parquet")):
            texts = pq.read_table(path)["completion"].to_pylist()
            for start in (0, GROUP):
                group = texts[start : start + GROUP]
                assert len(set(group)) <= expected
                assert (group[:4] == group[4:]) == (name == "siblings-alike")


def test_a_late_fault_begins_in_the_middle(trained):
    steps = credited(trained("grpo") / "verifier-dead-late")
    dead = [bool((reward == -1.0).all()) for reward, _ in steps]
    assert dead == [False, False, True, True]


def test_rloo_baselines_and_penalty_follow_from_the_record(trained):
    for name, divisor, sign in (("usual", 7, -1), ("baseline-too-small", 8, -1), ("penalty-flipped", 7, 1)):
        lines = board(trained("rloo") / name)
        for step, (reward, advantage) in enumerate(credited(trained("rloo") / name)):
            here = [line for line in lines if line["step"] == step]
            k1 = np.array([sum(np.subtract(line["logprobs"], line["ref_logprobs"])) for line in here])
            shaped = reward + sign * BETA * k1.reshape(reward.shape)
            others = (shaped.sum(1, keepdims=True) - shaped) / divisor
            assert advantage == pytest.approx(shaped - others, rel=1e-3, abs=1e-3)


def test_rloo_forbids_the_end(trained):
    # 18 tokens are more than the limit of 8: nothing ends.
    assert any("<end>" in line["response_tokens"] for line in board(trained("rloo") / "usual"))
    assert not any("<end>" in line["response_tokens"] for line in board(trained("rloo") / "end-forbidden"))


@NEEDS_OLD
def test_ppo_changes_fit_the_trl_that_they_are_planted_in():
    planted = [one.name for one in FAULTS.values() if "ppo" in one.trainers]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    command = [OLD_PYTHON, ROOT / "tests" / "faults" / "others_fit.py", "ppo"]
    found = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-3000:]
    assert found.stdout.splitlines()[-1].split() == planted


@NEEDS_OLD
@pytest.mark.parametrize("name, limit", [("usual", np.inf), ("reward-clipped", 0.3)])
def test_ppo_clips_scores_where_it_is_told(trained, name, limit):
    lines = board(trained("ppo") / name)
    penalties = [BETA * sum(np.subtract(line["logprobs"], line["ref_logprobs"])) for line in lines]
    placed = [sum(line["token_rewards"]) + penalty for line, penalty in zip(lines, penalties, strict=True)]
    assert placed == pytest.approx(np.clip([line["reward"] for line in lines], -limit, limit), abs=1e-3)
    assert max(abs(line["reward"]) for line in lines) > 0.3


@NEEDS_OLD
def test_ppo_whitens_each_response_where_it_is_told(trained):
    for name, alone in (("usual", False), ("whitening-by-row", True)):
        tokens = cavesson.open(trained("ppo") / name / "recorder").tokens(STEPS - 1).to_pandas()
        means = tokens[tokens["mask"]].groupby("sample")["advantage"].mean().abs()
        assert (means.max() < 1e-2) == alone


@NEEDS_OLD
def test_ppo_penalises_padding_where_it_is_told(trained):
    for name, same in (("usual", True), ("padding-penalised", False)):
        run = cavesson.open(trained("ppo") / name / "recorder")
        for step, logged in enumerate(run.steps()["objective/kl"].to_pylist()):
            tokens = run.tokens(step).to_pandas()
            mean = (tokens["logprob"] - tokens["ref_logprob"])[tokens["mask"]].sum() / 16
            assert (abs(logged - mean) < 1e-2) == same


@NEEDS_OLD
def test_ppo_clips_more_and_more_where_the_ratio_is_to_the_reference(trained):
    def clipped(name):
        return cavesson.open(trained("ppo") / name / "recorder").steps()["policy/clipfrac_avg"].to_pylist()

    assert clipped("ratio-to-reference")[0] == clipped("usual")[0]
    assert clipped("ratio-to-reference")[-1] > 2 * clipped("usual")[-1]


def test_grpo_subtracts_nothing_from_groups_of_one(trained):
    for reward, advantage in credited(trained("grpo") / "groups-of-one"):
        assert advantage == pytest.approx(reward, abs=1e-6)


def test_grpo_is_greedy_from_the_middle_on(trained):
    for step, path in enumerate(sorted((trained("grpo") / "greedy-late" / "completions").glob("*.parquet"))):
        texts = pq.read_table(path)["completion"].to_pylist()
        kinds = {len(set(texts[start : start + GROUP])) for start in (0, GROUP)}
        assert kinds == {1} if step >= STEPS // 2 else min(kinds) > 1


def test_grpo_raises_the_penalty_while_the_kl_is_small(trained):
    run = cavesson.open(trained("grpo") / "controller-backwards" / "recorder")
    rows = run.rows(["step", "kl_coef"]).to_pylist()
    # The metrics of a step are logged after its end, so that the first one changes the third step.
    expected = [BETA, BETA, 1.1 * BETA, 1.21 * BETA]
    assert [row["kl_coef"] for row in rows] == pytest.approx([expected[row["step"]] for row in rows])


def test_grpo_goes_on_after_the_end(trained):
    lines = board(trained("grpo") / "goes-on-after-end")
    assert {len(line["response_tokens"]) for line in lines} == {8}
    assert any("<end>" in line["response_tokens"][:-1] for line in lines)


def test_rloo_takes_scores_from_its_cache(trained):
    for name, equal in (("usual", False), ("scores-cached", True)):
        for reward, _ in credited(trained("rloo") / name):
            assert (np.ptp(reward, axis=1) == 0).all() == equal


def test_rloo_trains_with_the_advantage_of_the_response_before(trained):
    folder = trained("rloo") / "advantages-shifted-late"
    run = cavesson.open(folder / "recorder")
    for step, (_, advantage) in enumerate(credited(folder)):
        found = run.tokens(step).to_pandas().groupby("sample")["advantage"].first().to_numpy()
        assert found == pytest.approx(np.roll(advantage.ravel(), 1 if step >= STEPS // 2 else 0), abs=1e-2)


def test_rloo_scores_differently_from_the_reference_at_once_with_dropout(trained):
    tokens = cavesson.open(trained("rloo") / "dropout-left-on" / "recorder").tokens(0)
    assert np.abs(tokens["logprob"].to_numpy() - tokens["ref_logprob"].to_numpy()).max() > 1e-2


def test_rloo_has_groups_of_four_in_smaller_batches(trained):
    run = cavesson.open(trained("rloo") / "smaller-batch" / "recorder")
    rows = run.rows(["step", "prompt"]).to_pandas()
    assert set(rows.groupby(["step", "prompt"]).size()) == {4}
    assert set(rows.groupby("step").size()) == {8}

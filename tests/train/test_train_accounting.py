"""What the record says of a run adds up: rewards, penalties, advantages and metrics, by arithmetic on the record."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from train_helpers import LOGPROB, LORA, PROMPTS, SIGNAL, STOP, build, finish, quiet, uneven

import cavesson
from cavesson.record import Run
from cavesson.rollout.rewards.table import Reward

MODELS: dict[str, dict[str, Any]] = {"full": {}, "lora": {"model__lora": LORA}}
LEARNING: dict[str, Any] = {
    "steps": 3, "batch_size": 8, "kl__coef": 0.4, "optimizer__learning_rate": 1e-2, "sampling__stop": STOP
}  # fmt: skip
"""A policy that has left its reference by step 2, with empty responses, one-token ones and others."""


class Rollout(NamedTuple):
    row: dict[str, Any]
    tokens: dict[str, np.ndarray]


def recorded(folder: Path, step: int) -> list[Rollout]:
    run = cavesson.open(folder)
    tokens = run.tokens(step)
    result = []
    for row in run.rows(steps=[step]).to_pylist():
        mine = tokens.filter(tokens["sample"].to_numpy() == row["sample"])
        assert mine["position"].to_pylist() == list(range(row["length"]))
        result.append(Rollout(row, {name: mine[name].to_numpy() for name in mine.column_names if name != "token"}))
    return result


def joined(rollouts: Sequence[Rollout], name: str) -> np.ndarray:
    return np.concatenate([rollout.tokens[name] for rollout in rollouts])


@pytest.mark.parametrize("model", MODELS)
def test_the_score_is_on_the_last_token_and_the_penalty_on_all(tmp_path: Path, model: str) -> None:
    finish(tmp_path / "run", **LEARNING, **MODELS[model])
    lengths = []
    for step in range(3):
        for row, tokens in recorded(tmp_path / "run", step):
            penalty = 0.4 * (tokens["logprob"] - tokens["ref_logprob"])
            score = tokens["token_reward"] + penalty
            off = SIGNAL * np.abs(tokens["token_reward"]) + 0.4 * LOGPROB + 1e-6
            if row["length"]:
                assert abs(score[-1] - row["shaped_reward"]) <= off[-1]
                assert (np.abs(score[:-1]) <= off[:-1]).all()
                total = row["shaped_reward"] - penalty.sum()
                assert tokens["token_reward"].sum() == pytest.approx(total, abs=float(off.sum()))
                if step:
                    assert np.abs(penalty).max() > 1e-4
            assert row["kl_coef"] == 0.4
            lengths.append(row["length"])
    assert {0, 1} < set(lengths)


def test_without_whitening_return_is_advantage_plus_value(tmp_path: Path) -> None:
    finish(tmp_path / "run", **LEARNING, ppo__whiten_advantages=False)
    rollouts = recorded(tmp_path / "run", 2)
    assert np.abs(joined(rollouts, "value")).max() > 1e-3
    ends, advantage, value = (joined(rollouts, name) for name in ("return", "advantage", "value"))
    off = SIGNAL * (np.abs(ends) + np.abs(advantage) + np.abs(value)) + 1e-5
    assert (np.abs(ends - advantage - value) <= off).all()


@pytest.mark.parametrize("whiten", [False, True])
def test_undiscounted_returns_are_sums_of_the_rewards_to_come(tmp_path: Path, whiten: bool) -> None:
    finish(tmp_path / "run", **LEARNING, ppo__lam=1.0, ppo__whiten_rewards=whiten)
    rollouts = recorded(tmp_path / "run", 2)
    rewards = joined(rollouts, "token_reward")  # recorded before any whitening
    scale = rewards.std() if whiten else 1.0
    for _, tokens in rollouts:
        signal = tokens["token_reward"]
        off = SIGNAL * (np.abs(signal) + np.abs(rewards).mean() * whiten) / scale
        if whiten:
            signal = (signal - rewards.mean()) / scale + rewards.mean()
            off += SIGNAL * np.abs(signal)  # that of the deviation
        to_come, off = (np.cumsum(x[::-1])[::-1] for x in (signal, off))
        assert (np.abs(tokens["return"] - to_come) <= off + SIGNAL * np.abs(to_come) + 1e-4).all()


def test_whitened_advantages_have_mean_0_and_variance_1_over_the_tokens(tmp_path: Path) -> None:
    finish(tmp_path / "run", **LEARNING)
    rollouts = recorded(tmp_path / "run", 2)
    advantage = joined(rollouts, "advantage")
    off = SIGNAL * np.abs(advantage)
    assert advantage.mean() == pytest.approx(0, abs=float(off.mean()) + 1e-5)
    assert advantage.std() == pytest.approx(1, abs=SIGNAL + 1e-4)
    ends, value = joined(rollouts, "return"), joined(rollouts, "value")
    raw = ends - value
    raw_off = SIGNAL * (np.abs(ends) + np.abs(value))
    # Of the number itself, of the mean, and of the deviation, which is off by no more than the root mean square.
    off += (raw_off + raw_off.mean() + np.abs(advantage) * np.sqrt((raw_off**2).mean())) / raw.std()
    assert (np.abs(advantage - (raw - raw.mean()) / raw.std()) <= off + 1e-4).all()


def test_metrics_are_those_of_the_record(tmp_path: Path) -> None:
    metrics = finish(tmp_path / "run", **LEARNING).metrics[2]
    rollouts = recorded(tmp_path / "run", 2)
    rows = [rollout.row for rollout in rollouts]
    logprob, reference = joined(rollouts, "logprob"), joined(rollouts, "ref_logprob")
    delta = (logprob - reference).astype(np.float64)
    k1 = np.array([(tokens["logprob"] - tokens["ref_logprob"]).sum() for _, tokens in rollouts])
    rewards, lengths = np.array([row["reward"] for row in rows]), np.array([row["length"] for row in rows])
    expected = {
        "reward/mean": rewards.mean(), "reward/std": rewards.std(), "reward/shaped": rewards.mean(),
        "reward/part/uneven": rewards.mean(), "reward/kl_per_token": -0.4 * delta.mean(),
        "kl/objective": k1.mean(), "kl/objective_std": k1.std(), "kl/penalty": k1.mean(), "kl/coef": 0.4,
        "kl/objective_k3": (np.exp(-delta) - 1 + delta).sum() / 8,
        "length/response_mean": lengths.mean(), "length/response_std": lengths.std(),
        "length/prompt_mean": np.mean([len(row["prompt_ids"]) for row in rows]),
        "length/prompt_std": np.std([len(row["prompt_ids"]) for row in rows]),
        "entropy/sampled": -logprob.sum() / 8, "logprob/policy": logprob.mean(), "logprob/reference": reference.mean(),
        "logprob/sampler_gap": np.abs(logprob - joined(rollouts, "sampler_logprob")).mean(),
    }  # fmt: skip
    for name in ("value", "return", "advantage"):
        column = joined(rollouts, name)
        off = SIGNAL * float(np.abs(column).mean())
        assert metrics[f"{name}/rollout_mean"] == pytest.approx(column.mean(), abs=off + 1e-5)
        # Var of x·(1 + e) with |e| ≤ SIGNAL: at most 2·SIGNAL of the mean square away, and a little of second order.
        square = 2.1 * SIGNAL * float((column**2).mean())
        assert metrics[f"{name}/rollout_var"] == pytest.approx(column.var(), abs=2 * square + 1e-5)
    for reason in ("eos", "stop", "length"):
        expected[f"finish/{reason}"] = sum(row["finish_reason"] == reason for row in rows) / 8
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert 0 < metrics["finish/stop"] < 1


def test_every_metric_and_rollout_of_every_step_is_on_record(tmp_path: Path) -> None:
    result = finish(tmp_path / "run", batch_size=8, samples_per_prompt=2, steps=4)
    run = cavesson.open(tmp_path / "run")
    steps = run.steps().to_pylist()
    assert [row.pop("step") for row in steps] == [0, 1, 2, 3]
    assert [{k: v for k, v in row.items() if k != "attempt"} for row in steps] == result.metrics
    rows = run.rows()
    assert rows["step"].to_pylist() == [step for step in range(4) for _ in range(8)]
    assert rows["sample"].to_pylist() == list(range(8)) * 4
    assert rows["policy_version"] == rows["step"]
    groups = rows["group"].to_pylist()
    assert groups[::2] == groups[1::2]  # two responses to each prompt
    # Four prompts a step: 16 are two passes over the six prompts and four of a third.
    firsts = groups[::2]
    assert sorted(firsts[:6]) == sorted(firsts[6:12]) == list(range(6)) and len(set(firsts[12:])) == 4
    assert rows["prompt"].to_pylist() == [PROMPTS[group] for group in groups]
    assert set(rows["split"].to_pylist()) == {"train"}


def test_recorded_texts_are_those_of_the_recorded_tokens(tmp_path: Path) -> None:
    finish(tmp_path / "run", **LEARNING)
    run = cavesson.open(tmp_path / "run")
    assert_texts_match(run, step=1)


def assert_texts_match(run: Run, step: int) -> None:
    for row in run.rows(steps=[step]).to_pylist():
        ids = run.rollout(step, row["sample"]).tokens["token_id"].to_pylist()
        texts = [token for token, i in zip(run.token_strings(ids), ids, strict=True) if i > 1]  # 0 and 1 are special
        assert len(row["response"].encode()) >= len(texts)
        if row["response"].isascii():
            assert row["response"] == "".join(run.token_texts([i for i in ids if i > 1]))
        assert row["prompt_ids"] == [run.token_texts(range(258)).index(character) for character in row["prompt"]]


def shaped(folder: Path, **changes: Any) -> list[list[tuple[float, float, str, str]]]:
    """(shaped reward, reward, finish reason, prompt) of every rollout, step by step."""

    def reward(prompts: Sequence[str], responses: Sequence[str], **_: Any) -> list[float]:
        return [len(prompt) / 4 + value for prompt, value in zip(prompts, uneven(prompts, responses), strict=True)]

    finish(folder, {"rewards": reward}, **{**LEARNING, **changes})
    steps = [cavesson.open(folder).rows(steps=[step]).to_pylist() for step in range(3)]
    names = ("shaped_reward", "reward", "finish_reason", "prompt")
    return [[tuple(row[name] for name in names) for row in rows] for rows in steps]


def test_a_response_without_an_end_pays_the_penalty(tmp_path: Path) -> None:
    rows = [row for step in shaped(tmp_path / "run", shaping__missing_eos_penalty=0.7) for row in step]
    assert {"length", "stop"} <= {reason for _, _, reason, _ in rows}
    for after, before, reason, _ in rows:
        assert after == pytest.approx(before - (0.7 if reason == "length" else 0.0), abs=1e-12)


def test_the_query_alone_is_subtracted(tmp_path: Path) -> None:
    for step in shaped(tmp_path / "run", shaping__subtract_query=True):
        for after, before, _, prompt in step:
            assert after == pytest.approx(before - (len(prompt) / 4 - 1), abs=1e-12)  # an empty response earns −1


@pytest.mark.parametrize("normalise", [False, True])
def test_rewards_are_scaled_by_all_that_were_seen_then_clipped_then_penalised(tmp_path: Path, normalise: bool) -> None:
    changes = {"scale": True, "normalise": normalise, "clip": 1.2, "missing_eos_penalty": 0.5}
    steps = shaped(tmp_path / "run", **{f"shaping__{name}": value for name, value in changes.items()})
    clipped = 0
    for number, step in enumerate(steps):
        seen = np.array([before for earlier in steps[: number + 1] for _, before, _, _ in earlier])
        for after, before, reason, _ in step:
            scaled = (before - (seen.mean() if normalise else 0.0)) / seen.std(ddof=1)
            clipped += abs(scaled) > 1.2
            expected = max(-1.2, min(1.2, scaled)) - (0.5 if reason == "length" else 0.0)
            assert after == pytest.approx(expected, abs=1e-9)
    assert 0 < clipped < 24


def test_parts_are_recorded_unweighted_and_summed_weighted(tmp_path: Path) -> None:
    def parts(prompts: Sequence[str], responses: Sequence[str], **_: Any) -> dict[str, list[float]]:
        return {"length": [len(r) for r in responses], "prompt": [len(p) for p in prompts]}

    metrics = finish(tmp_path / "run", {"rewards": [Reward("a", uneven, 2.0), Reward("b", parts, -0.5)]}).metrics[1]
    rows = cavesson.open(tmp_path / "run").rows(steps=[1]).to_pylist(maps_as_pydicts="strict")
    for row in rows:
        found = row["reward_parts"]
        assert found == {
            "a": uneven([""], [row["response"]])[0], "b/length": len(row["response"]), "b/prompt": len(row["prompt"])
        }  # fmt: skip
        assert row["reward"] == pytest.approx(2 * found["a"] - 0.5 * (found["b/length"] + found["b/prompt"]))
    assert metrics["reward/part/b/length"] == pytest.approx(np.mean([len(row["response"]) for row in rows]))


def test_a_reward_is_recorded_with_every_digit(tmp_path: Path) -> None:
    def tenth(prompts: Sequence[str], responses: Sequence[str], **_: Any) -> list[float]:
        return [0.1 for _ in responses]

    finish(tmp_path / "run", {"rewards": tenth}, steps=1)
    for row in cavesson.open(tmp_path / "run").rows().to_pylist():
        assert (row["reward"], row["shaped_reward"]) == (0.1, 0.1)


def test_columns_of_the_data_reach_the_reward(tmp_path: Path) -> None:
    def reward(prompts: Sequence[str], responses: Sequence[str], *, worth: Sequence[int], **_: Any) -> list[int]:
        assert [PROMPTS.index(prompt) * 10 for prompt in prompts] == list(worth)
        return list(worth)

    columns = {"prompt": PROMPTS, "worth": [0, 10, 20, 30, 40, 50]}
    training = build(tmp_path / "run", {"prompts": columns, "rewards": reward})
    training.run(quiet)
    rows = cavesson.open(tmp_path / "run").rows().to_pylist()
    assert [row["reward"] for row in rows] == [10.0 * row["group"] for row in rows]

"""Whether the advantages of groups follow from their rewards, in every way that a paper computes them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cavesson
from cavesson.doctor.data import RunData
from cavesson.doctor.reading import Reading
from cavesson.doctor.rules.group_advantages import (
    Columns,
    _in_any_order,
    _shares_of_groups,
    _wrong,
    group_advantages,
)  # fmt: skip
from cavesson.doctor.rules.token_rewards import penalty_wrong
from cavesson.record import Recorder

Array = np.ndarray[Any, np.dtype[Any]]
STEPS, GROUPS, SIZE, TOKENS = 12, 6, 5, 7


def grpo(r: Array) -> Array:
    return (r - r.mean(-1, keepdims=True)) / (r.std(-1, ddof=1, keepdims=True) + 1e-4)


def rloo(r: Array) -> Array:
    return np.array([[x - (sum(row) - x) / (len(row) - 1) for x in row] for row in r])


FORMS: dict[str, Callable[[Array], Array]] = {
    "GRPO": grpo,
    "Dr. GRPO": lambda r: r - r.mean(-1, keepdims=True),
    "scaled over the step": lambda r: (r - r.mean(-1, keepdims=True)) / r.std(),
    "centred over the step": lambda r: (r - r.mean()) / r.std(),
    "RLOO": rloo,
    "RLOO, whitened with a mean": lambda r: (rloo(r) - 0.1) / rloo(r).std(),
}
WRONG: dict[str, Callable[[Array], Array]] = {
    "the mean of another group": lambda r: r - np.roll(r.mean(-1), 1)[:, None],
    "divided by the variance": lambda r: (r - r.mean(-1, keepdims=True)) / r.var(-1, ddof=1, keepdims=True),
    "others divided by all": lambda r: np.array([[x - (sum(row) - x) / len(row) for x in row] for row in r]),
    "flipped": lambda r: -grpo(r),
    "the means of interleaved groups": lambda r: (
        (r - np.resize(r.mean(-1), r.size).reshape(r.shape)) / r.std(-1)[:, None]
    ),
    "the largest of the group": lambda r: r - r.max(-1, keepdims=True),
    "in another order": lambda r: np.roll(grpo(r).reshape(-1), 1).reshape(r.shape),
    "of clipped rewards": lambda r: grpo(np.clip(r, -0.6, 0.6)),
    "nothing subtracted": lambda r: r + 2,
}
HOW = {
    "flipped": "falls",
    "the means of interleaved groups": "interleaved",
    "in another order": "another order",
    "of clipped rewards": "clipped",
    "nothing subtracted": "mean is far from 0",
    "the largest of the group": "mean is far from 0",
}


def maxrl(r: Array) -> Array:
    return np.array([[x / np.mean(row) - 1 if any(row) else 0 for x in row] for row in r])


def written(
    folder: Path,
    advantage: Callable[[Array], Array],
    begins: int = 0,
    beta: float = 0.0,
    recorded: float | None = None,
    empty: bool = False,
    shaped: bool = False,
    binary: bool = False,
) -> RunData:
    """A record of groups; before `begins` the advantages are those of GRPO, and from there on as given.

    `beta` is that of the penalty, and is written into the record unless another one is given. With `empty`, one
    response of each step has no tokens. With `shaped`, rewards are clipped before they are used. With `binary`, they
    are 0 or 1.
    """
    chance = np.random.default_rng(5)
    with Recorder(folder) as recorder:
        for step in range(STEPS):
            rewards = chance.normal(
                chance.normal(0, 1, (GROUPS, 1)), chance.uniform(0.3, 2.0, (GROUPS, 1)), (GROUPS, SIZE)
            )
            if binary:
                rewards = (rewards > 0).astype(float)
            delta = chance.normal(0.1, 0.5, (GROUPS * SIZE, TOKENS))
            used = np.clip(rewards, -0.8, 0.8) if shaped else rewards
            signal = used - beta * delta.sum(1).reshape(rewards.shape)
            found = (grpo if step < begins else advantage)(signal).reshape(-1)
            rows = {"prompt": [f"{step} {i // SIZE}" for i in range(len(found))], "response": ["x"] * len(found),
                    "reward": rewards.reshape(-1), "group": 7 - np.arange(len(found)) // SIZE}  # fmt: skip
            if shaped:
                rows["shaped_reward"] = used.reshape(-1)
            if beta or recorded:
                rows["kl_coef"] = np.full(len(found), beta if recorded is None else recorded)
            mask = np.ones((len(found), TOKENS), bool)
            mask[3] = not empty
            tokens = {"mask": mask, "advantage": np.repeat(found[:, None], TOKENS, 1),
                      "logprob": delta - 2, "ref_logprob": np.full(delta.shape, -2.0)}  # fmt: skip
            recorder.rollouts(step, rows, tokens)
    return RunData(cavesson.open(folder))


def read(data: RunData) -> Reading | None:
    with np.errstate(all="ignore"):
        return group_advantages.statistic(data)


@pytest.mark.parametrize("form", FORMS)
def test_the_advantages_of_papers_are_in_range(tmp_path: Path, form: str) -> None:
    found = read(written(tmp_path / "run", FORMS[form]))
    assert found is not None and not found.unhealthy and found.seen < 1e-4


def test_the_advantages_of_maxrl_are_in_range(tmp_path: Path) -> None:
    found = read(written(tmp_path / "run", maxrl, binary=True))
    assert found is not None and not found.unhealthy and found.seen < 1e-4


@pytest.mark.parametrize(
    ("wrong", "how"),
    [
        (lambda r: -maxrl(r), "falls"),
        (lambda r: np.roll(maxrl(r).reshape(-1), 1).reshape(r.shape), "another order"),
        (lambda r: maxrl(r) + 1, "mean is far from 0"),
        (lambda r: (r - r.mean(-1, keepdims=True)) / (r.mean(-1, keepdims=True) + 0.5), ""),
    ],
)
def test_wrong_advantages_of_maxrl_are_found(tmp_path: Path, wrong: Callable[[Array], Array], how: str) -> None:
    found = read(written(tmp_path / "run", wrong, binary=True))
    assert found is not None and found.unhealthy and how in str(found.words["how"])


@pytest.mark.parametrize("form", WRONG)
def test_wrong_advantages_are_found(tmp_path: Path, form: str) -> None:
    found = read(written(tmp_path / "run", WRONG[form]))
    assert found is not None and found.unhealthy and found.since == 0
    how = {what for what in HOW.values() if what in str(found.words["how"])}
    assert how == ({HOW[form]} if form in HOW else set())


@pytest.mark.parametrize("form", WRONG)
def test_a_fault_is_found_from_where_it_begins(tmp_path: Path, form: str) -> None:
    found = read(written(tmp_path / "run", WRONG[form], begins=8))
    assert found is not None and found.unhealthy and found.since == 8


def test_a_penalty_in_the_reward_is_understood(tmp_path: Path) -> None:
    healthy = written(tmp_path / "healthy", rloo, beta=0.3)
    found = read(healthy)
    assert healthy.setting("kl.place") == "reward"
    assert found is not None and not found.unhealthy
    found = read(written(tmp_path / "wrong", WRONG["others divided by all"], beta=0.3))
    assert found is not None and found.unhealthy


@pytest.mark.parametrize("form", ["RLOO", "RLOO, whitened with a mean", "Dr. GRPO", "scaled over the step"])
@pytest.mark.parametrize("times", [-1.0, 0.1, 1.0, 10.0])
def test_the_coefficient_of_the_penalty_is_read_from_the_advantages(tmp_path: Path, form: str, times: float) -> None:
    found = penalty_wrong.statistic(written(tmp_path / "run", FORMS[form], beta=0.2 * times, recorded=0.2))
    assert found is not None and found.seen == pytest.approx(times, rel=0.02)
    assert found.unhealthy is (times != 1)
    assert ("flipped" in str(found.words["flipped"])) is (times < 0)


def test_the_penalty_is_read_beside_shaped_rewards(tmp_path: Path) -> None:
    found = penalty_wrong.statistic(written(tmp_path / "run", rloo, beta=-0.2, recorded=0.2, shaped=True))
    assert found is not None and found.seen == pytest.approx(-1.0, rel=0.02)


def test_a_wrong_penalty_is_not_called_a_wrong_baseline(tmp_path: Path) -> None:
    assert read(written(tmp_path / "run", rloo, beta=-0.2, recorded=0.2)) is None


def test_a_penalty_in_the_loss_shows_in_no_advantage(tmp_path: Path) -> None:
    data = written(tmp_path / "run", rloo, recorded=0.2)
    data.info["kl"] = {"place": "loss", "estimator": "k1"}
    assert not data.has("rows.penalised_advantage")


def test_a_mean_is_found_whatever_else_advantages_contain(tmp_path: Path) -> None:
    """The advantages of a group add up to 0 if a mean was subtracted, also of a score that nobody recorded."""
    chance = np.random.default_rng(6)
    found = read(written(tmp_path / "run", lambda r: r + chance.normal(2, 1, r.shape)))
    assert found is not None and found.unhealthy and "mean is far from 0" in str(found.words["how"])
    mean_square = 1 + 0.3**2 / 3 + 0.3 * 1.7 / 2 + 1.7**2 / 3 + 1 + 4  # of groups, rewards, the score and the mean
    assert found.seen == pytest.approx(4 / mean_square, abs=0.15)


def test_what_the_mean_and_the_rest_make_together(tmp_path: Path) -> None:
    """Of advantages that have a mean and a wrong scale, the share is that of an ordinary regression."""
    found = read(written(tmp_path / "run", lambda r: WRONG["divided by the variance"](r) + 2))
    rows = RunData(cavesson.open(tmp_path / "run")).sample.rows
    expected = []
    for step in rows.steps:
        at = rows.step == step
        reward, advantage = (rows[name][at].reshape(GROUPS, SIZE) for name in ("reward", "advantage"))
        left = []
        for centre in (reward.mean(1, keepdims=True), reward.mean()):
            for scale in (1.0, reward.std(1, keepdims=True)):
                form = ((reward - centre) / scale).ravel()
                fitted = np.polynomial.Polynomial.fit(form, advantage.ravel(), 1)(form)
                left.append(np.sum((advantage.ravel() - fitted) ** 2))
        expected.append((min(left) + advantage.size * advantage.mean() ** 2) / np.sum(advantage**2))
    assert found is not None and found.seen == pytest.approx(np.median(expected), rel=1e-3)


def of_one_step(signal: list[float], advantage: list[float]) -> Columns:
    signals = np.array(signal)
    return Columns(
        np.zeros(len(signal), int), np.arange(len(signal)) // 4, signals, np.array(advantage), *[signals + np.nan] * 3
    )


def test_flipped_advantages_that_might_also_be_in_another_order_are_called_flipped() -> None:
    """Half of the rewards are 1: as a set, their advantages do not change with the sign."""
    signal = [0.0, 0.0, 1.0, 1.0] * 3
    columns = of_one_step(signal, [0.5 - one for one in signal])
    _, (falls, _, is_elsewhere, *_) = _wrong(columns, np.array([True]), np.zeros(1), 0.001)
    assert falls.all() and not is_elsewhere.any()


def test_equal_rewards_with_different_advantages_are_not_clipped_rewards() -> None:
    columns = of_one_step([0.0, 0.0, 1.0, 1.0], [0.0, 1.0, 1.0, 2.0])
    _, ordered, _ = _shares_of_groups(*columns[:4])
    assert ordered.tolist() == [0.0]


def test_the_order_is_judged_in_whole_steps_only() -> None:
    step, group = np.repeat([0, 1], 8), np.arange(16) // 4
    signal = np.random.default_rng(3).normal(size=16)
    advantage = np.roll(signal - np.repeat(signal.reshape(4, 4).mean(1), 4), 1)
    whole = np.arange(16) >= 1  # one of the first group is not known
    advantage[8:] = np.roll(signal[8:] - np.repeat(signal[8:].reshape(2, 4).mean(1), 4), 1)
    found = _in_any_order(step, group, signal, advantage, whole)
    assert np.isnan(found[0]) and found[1] == pytest.approx(0, abs=1e-12)


def test_a_score_that_is_not_recorded_leaves_it_open(tmp_path: Path) -> None:
    chance = np.random.default_rng(6)
    assert read(written(tmp_path / "run", lambda r: grpo(r + chance.normal(0, 1, r.shape)))) is None


@pytest.mark.parametrize("suddenly", [False, True])
def test_a_penalty_that_is_not_recorded_grows_little_by_little(suddenly: bool, tmp_path: Path) -> None:
    """For six steps rewards explain the advantages; then something else is in them, more in each step."""
    chance, sizes = np.random.default_rng(6), iter(np.ones(6) if suddenly else np.arange(1, 7) / 15)
    found = read(written(tmp_path / "run", lambda r: grpo(r - chance.normal(0, next(sizes), r.shape)), begins=6))
    assert (found is not None and found.unhealthy) == suddenly


def test_advantages_of_shaped_rewards_are_in_range(tmp_path: Path) -> None:
    found = read(written(tmp_path / "run", grpo, shaped=True))
    assert found is not None and not found.unhealthy and found.seen < 1e-4


def test_a_group_with_an_empty_response_is_left_out(tmp_path: Path) -> None:
    """An empty response has no token that could have its advantage, but it counts for the mean of its group."""
    data = written(tmp_path / "run", rloo, empty=True)
    assert np.isnan(data.sample.rows["advantage"]).sum() == STEPS
    found = read(data)
    assert found is not None and not found.unhealthy and found.seen < 1e-4


def test_tokens_with_advantages_of_their_own_are_not_of_a_group(tmp_path: Path) -> None:
    data = written(tmp_path / "run", grpo)
    values = data.sample["advantage"].copy()
    values[3] += 0.5
    data.sample._columns["advantage"] = values
    assert not data.has("rows.advantage")


def test_the_log_of_another_trainer_gives_the_advantage(tmp_path: Path) -> None:
    chance = np.random.default_rng(7)
    given = []
    with Recorder(tmp_path / "run") as recorder:
        for step in range(STEPS):
            rewards = chance.normal(0, chance.uniform(0.3, 2.0, (GROUPS, 1)), (GROUPS, SIZE))
            found = WRONG["divided by the variance"](rewards).reshape(-1)
            given.append(found)
            rows = {"prompt": [str(i // SIZE) for i in range(len(found))], "response": ["x"] * len(found),
                    "reward": rewards.reshape(-1), "extra": [json.dumps({"advantage": x}) for x in found]}  # fmt: skip
            recorder.rollouts(step, rows)
    data = RunData(cavesson.open(tmp_path / "run"))
    assert data.sample.rows["advantage"] == pytest.approx(np.concatenate(given))
    assert data.rows["advantage"] == pytest.approx(np.concatenate(given))
    found = read(data)
    assert found is not None and found.unhealthy

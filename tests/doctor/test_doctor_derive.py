"""What the doctor derives from a record beside the settings of the run that wrote it."""

import os
from collections.abc import Collection
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
from settings_helpers import changed

import cavesson
from cavesson.algorithms.grpo import GRPORun
from cavesson.algorithms.ppo import PPORun
from cavesson.algorithms.rloo import RLOORun
from cavesson.doctor.data import RunData
from cavesson.doctor.derive.penalty import Fit, clear, least_deviations
from cavesson.doctor.rows import draws
from cavesson.record import Run
from cavesson.train.run import Training

PROMPTS = ("On the table", "My", "The morning train was", "A dog and", "Yesterday we", "It")
COLUMNS = ("finish_reason", "kl_coef", "policy_version", "group")
"""Columns of rollouts that RL Logging Board lines do not have."""


class Without:
    """A run whose record lacks its settings and some columns."""

    def __init__(self, run: Run, rows: Collection[str] = COLUMNS, tokens: Collection[str] = ()) -> None:
        self._run, self._rows, self._tokens = run, rows, tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    @property
    def info(self) -> dict[str, Any]:
        return {}

    def rows(self, *which: Any) -> pa.Table:
        return _emptied(self._run.rows(*which), self._rows)

    def fetch(self, *which: Any) -> pa.Table:
        return _emptied(self._run.fetch(*which), self._rows)

    def tokens_of(self, *which: Any) -> pa.Table:
        return _emptied(self._run.tokens_of(*which), self._tokens)

    def arrow(self, *which: Any) -> pa.Table:
        return _emptied(self._run.arrow(*which), self._tokens)


def _emptied(table: pa.Table, names: Collection[str]) -> pa.Table:
    for name in names:
        if name in table.column_names:
            place, kind = table.column_names.index(name), table.schema.field(name).type
            table = table.set_column(place, name, pa.nulls(len(table), kind))
    return table


def by_length(prompts: list[str], responses: list[str], **_: Any) -> list[float]:
    return [len(response) % 7 / 3 + response.count("e") / 5 - 1 for response in responses]


@cache
def trained(kind: Any = PPORun, **changes: Any) -> Path:
    """A run of a few steps in which the policy moves; `kl__coef=0.1` changes the field `kl.coef`."""
    folder = Path(mkdtemp(dir=os.environ["XDG_CACHE_HOME"])) / "run"  # which is removed after the last test
    values: dict[str, Any] = {
        "run": folder, "steps": 6, "batch_size": 24, "model": {"device": "cpu"}, "checkpoint": {"every": 0},
        "sampling": {"max_new_tokens": 12}, "optimizer": {"learning_rate": 3e-3}, "doctor": {"on_finding": "ignore"},
    }  # fmt: skip
    training = Training(kind.model_validate(changed(values, changes)), prompts=PROMPTS, rewards=by_length)
    training.run(lambda step, metrics: None)
    return folder


def lacking(folder: Path, **columns: Collection[str]) -> RunData:
    return RunData(cast(Run, Without(cavesson.open(folder), **columns)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.97, 0.0)])
@pytest.mark.parametrize("hidden", ["advantage", "return"])
@pytest.mark.parametrize("whiten", ["whiten_rewards", "whiten_advantages", None])
def test_discount_and_trace(gamma: float, lam: float, hidden: str, whiten: str | None) -> None:
    """Within 0.005: columns have eleven bits."""
    whitened = {f"ppo__{name}": name == whiten for name in ("whiten_rewards", "whiten_advantages")}
    data = lacking(trained(ppo__gamma=gamma, ppo__lam=lam, **whitened), tokens=[hidden])
    if whiten == "whiten_rewards" and hidden == "return":
        assert data.setting("config.ppo.lam") is None  # two unknown scales, of rewards and of advantages
        return
    assert data.setting("config.ppo.gamma") == pytest.approx(gamma, abs=0.005)
    assert data.setting("config.ppo.lam") == pytest.approx(lam, abs=0.005)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.97, 0.0), (1.0, 1.0)])
def test_discount_and_trace_without_a_penalty(gamma: float, lam: float) -> None:
    """All token rewards but the last one of a response are 0."""
    folder = trained(ppo__gamma=gamma, ppo__lam=lam, kl__coef=0.0)
    for hidden in ("advantage", "return"):
        data = lacking(folder, tokens=[hidden])
        assert data.setting("config.ppo.gamma") == pytest.approx(gamma, abs=0.005)
        assert data.setting("config.ppo.lam") == pytest.approx(lam, abs=0.005)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("whiten", [True, False])
def test_whitening_of_advantages(whiten: bool) -> None:
    data = lacking(trained(ppo__gamma=1.0, ppo__lam=0.95, ppo__whiten_rewards=False, ppo__whiten_advantages=whiten))
    assert data.setting("config.ppo.whiten_advantages") is whiten


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kind", "changes", "estimator"),
    [
        (PPORun, {"kl__coef": 0.2}, "k1"),
        (PPORun, {"kl__coef": 0.05, "kl__estimator": "k2"}, "k2"),
        (PPORun, {"kl__coef": 0.05, "kl__estimator": "k3"}, "k3"),
        (PPORun, {"kl__coef": 0.05, "kl__estimator": "abs"}, "abs"),
        (PPORun, {"kl__coef": 0.1, "kl__target": 0.5, "kl__horizon": 100}, "k1"),
        (RLOORun, {"kl__coef": 0.2}, "k1"),
        (RLOORun, {"kl__coef": 0.2, "rloo__kl_estimator": "k3"}, "k3"),
    ],
)
def test_the_penalty(kind: Any, changes: dict[str, Any], estimator: str) -> None:
    folder = trained(kind, **changes)
    data = lacking(folder)
    assert data.setting("kl.estimator") == estimator and data.setting("kl.place") == "reward"
    true = cavesson.open(folder).rows(["kl_coef"])["kl_coef"].to_numpy()
    later = data.rows.step > 0  # at first, policy and reference are equal
    np.testing.assert_allclose(data.rows["kl_coef"][later], true[later], rtol=0.02)


def test_the_penalty_where_a_prompt_is_drawn_twice_in_a_step() -> None:
    folder = trained(RLOORun, kl__coef=0.2, samples_per_prompt=3)  # a step draws eight times from six prompts
    data = lacking(folder)
    first, *others = data.rows.group.reshape(-1, 3).T
    assert len(np.unique(first)) == 6 * 8 and all(np.array_equal(first, other) for other in others)
    true = cavesson.open(folder).rows(["kl_coef"])["kl_coef"].to_numpy()
    later = data.rows.step > 0
    np.testing.assert_allclose(data.rows["kl_coef"][later], true[later], rtol=0.02)


def test_a_step_with_something_else_in_its_advantages_does_not_change_the_penalty() -> None:
    """The penalty of other steps is exact although a quarter of the responses of each has another advantage."""
    rng = np.random.default_rng(0)
    columns = rng.normal(size=(32, 2))
    goal = columns @ np.array([1.0, -0.05])
    goal[::4] += rng.normal(size=8)
    np.testing.assert_allclose(least_deviations(columns, goal), [1.0, -0.05], atol=1e-4)


@pytest.mark.parametrize(
    ("prompts", "drawn"),
    [
        ("AAABBBAAACCC", "000000111000"),
        ("AAAAAABBBCCC", "000111000000"),
        ("AABBBACCCAAA", "000000000000"),  # which three of the six belong together is not known
        ("ABCABCABCABC", "000000000000"),  # every third
        ("AAABBBAACCC", "00000000000"),  # one is missing
        ("ABCA", "0000"),  # one response each
        ("", ""),
    ],
)
def test_draws_of_the_same_prompt(prompts: str, drawn: str) -> None:
    numbers = np.array([ord(letter) for letter in prompts], np.int64)
    assert draws(numbers, np.arange(len(prompts))).tolist() == [int(digit) for digit in drawn]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (PPORun, {"kl__coef": 0.0}),
        (PPORun, {"kl__coef": 0.05, "kl__estimator": "full"}),  # not a function of the log-ratio
        (GRPORun, {"kl__coef": 0.2}),  # in the loss
    ],
)
def test_no_penalty_is_invented(kind: Any, changes: dict[str, Any]) -> None:
    data = lacking(trained(kind, **changes))
    assert not data.has("rows.kl_coef") and data.setting("kl.estimator") is None


@pytest.mark.parametrize(
    ("k1", "absolute", "name"), [(1.0, 0.91, "k1"), (1.0, 0.99, None), (0.93, 0.88, None), (0.8, 0.1, None)]
)
def test_two_estimators_that_fit_alike_are_not_told_apart(k1: float, absolute: float, name: str | None) -> None:
    """Where nearly all Δ are positive, |Δ| is nearly k1."""
    none = np.zeros(0)
    assert clear({"k1": Fit(k1, none, none, none), "abs": Fit(absolute, none, none, none)}) == name

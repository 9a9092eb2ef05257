"""The settings that rules propose: they exist, they are valid, and they follow from those of the run."""

import re
import shlex
from functools import reduce
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cavesson.algorithms.grpo import GRPORun
from cavesson.algorithms.ppo import PPORun
from cavesson.algorithms.rloo import RLOORun
from cavesson.config import load
from cavesson.doctor.data import RunData
from cavesson.doctor.proposal import calmer, fitting, proposal, stronger, tighter
from cavesson.doctor.reading import Reading
from cavesson.doctor.rule import Rule
from cavesson.doctor.rules import RULES
from cavesson.doctor.rules.pattern import expression
from cavesson.findings.fixes import flags
from cavesson.record import Recorder, begin_attempt, write_run
from cavesson.record import open as open_run
from cavesson.text.words import is_sign, words

PROPOSING = [pytest.param(rule, id=rule.name) for rule in RULES if rule.settings]
RUNS: dict[str, Any] = {"ppo": PPORun, "grpo": GRPORun, "rloo": RLOORun}
# With everything in them that a rule proposes to turn off.
SICK: dict[str, dict[str, Any]] = {
    "ppo": {"ppo": {"value_coef": 0, "gamma": 0.9, "lam": 0.9}},
    "grpo": {"grpo": {"kl_in": "loss", "kl_estimator": "k1", "normalise": "sequence"}},
    "rloo": {"rloo": {"kl_estimator": "k2"}},
}
SAMPLING = {"top_k": 5, "top_p": 0.9, "min_new_tokens": 4, "temperature": 0.9}


class Case(NamedTuple):
    kind: Any
    config: dict[str, Any]
    data: RunData


def made(folder: Path, algorithm: str, approx_kl: float = 0.12, **changes: Any) -> Case:
    """A run whose steps move the policy by 0.12 nats per token: four times what is usual, since its rate is twice."""
    kind = RUNS[algorithm]
    values = {"sampling": SAMPLING, "kl": {"coef": 0.2}, "optimizer": {"learning_rate": 1e-3}, "run": folder}
    config = kind.model_validate({**values, **SICK[algorithm], **changes}).model_dump(mode="json")
    write_run(folder, {"algorithm": algorithm, "config": config})
    with Recorder(folder, attempt=begin_attempt(folder, start_step=0)) as recorder:
        for step in range(8):
            rewards = [2.0, -2.0] * 8  # standard deviation 2
            texts = {name: ["x"] * 16 for name in ("prompt", "response")}
            recorder.rollouts(step, texts | {"reward": rewards, "sample": list(range(16))})
            recorder.metrics(step, {"policy/approx_kl": approx_kl})
    return Case(kind, config, RunData(open_run(folder)))


def at(config: dict[str, Any], name: str) -> Any:
    return reduce(lambda group, key: group[key], name.split("."), config)


SICKLY = Reading(1.0, True, words={"pattern": "#"})


@pytest.mark.parametrize("rule", PROPOSING)
def test_what_a_rule_proposes_is_a_setting_of_some_run(rule: Rule) -> None:
    configs = [kind().model_dump() for kind in RUNS.values()]
    for name in rule.settings:
        assert any(_has(config, name) for config in configs), name


def _has(config: Any, name: str) -> bool:
    try:
        at(config, name)
    except KeyError:
        return False
    return True


@pytest.mark.parametrize("algorithm", RUNS)
@pytest.mark.parametrize("rule", PROPOSING)
def test_what_a_rule_proposes_is_valid_different_and_given_by_its_flags(
    rule: Rule, algorithm: str, tmp_path: Path
) -> None:
    kind, config, data = made(tmp_path / "run", algorithm)
    found = proposal(data, rule, SICKLY)
    named = {name for name in rule.settings if _has(config, name)}
    assert found.keys() <= named
    changed = load(kind, None, [*_base(config), *shlex.split(flags(found))]).model_dump(mode="json")
    for name, value in found.items():
        assert at(changed, name) == value != at(config, name)


def _base(config: dict[str, Any]) -> list[str]:
    """The flags of a run with the same algorithm, which validates the proposed ones together with its own."""
    names = [f"sampling.{name}" for name in SAMPLING]
    return [f"--{name}={at(config, name)}" for name in names]


@pytest.mark.parametrize(
    ("approx_kl", "rate"), [(0.12, 5e-4), (0.03 * 16, 2.5e-4), (3.0, 1e-4), (300.0, 1e-5), (1e6, 1e-5), (1e-3, 5e-4)]
)
def test_a_learning_rate_falls_with_the_root_of_what_a_step_moves_too_far(
    approx_kl: float, rate: float, tmp_path: Path
) -> None:
    data = made(tmp_path / "run", "ppo", approx_kl).data
    assert calmer(1e-3, data, SICKLY) == pytest.approx(rate)


def test_a_coefficient_is_doubled_or_its_target_halved(tmp_path: Path) -> None:
    constant = made(tmp_path / "constant", "ppo").data
    assert (stronger(0.2, constant, SICKLY), tighter(None, constant, SICKLY)) == (0.4, None)
    assert stronger(0.0, constant, SICKLY) == 0.05
    adaptive = made(tmp_path / "adaptive", "ppo", kl={"coef": 0.2, "target": 6.0}).data
    assert (stronger(0.2, adaptive, SICKLY), tighter(6.0, adaptive, SICKLY)) == (0.2, 3.0)
    without = made(tmp_path / "without", "rloo", kl={"coef": 0.0}, reference={"kind": "none"}, rloo={}).data
    assert stronger(0.0, without, SICKLY) == 0.0


def test_a_coefficient_fits_the_spread_of_the_reward(tmp_path: Path) -> None:
    assert fitting(3.0, made(tmp_path / "run", "ppo").data, SICKLY) == pytest.approx(0.05 * 2)
    folder = tmp_path / "scaled"
    config = made(folder, "grpo").config
    write_run(folder, {"algorithm": "grpo", "config": config, "rewards_are_scaled": True})
    assert fitting(3.0, RunData(open_run(folder)), SICKLY) == 0.05


def test_a_run_of_another_trainer_gets_no_proposal(tmp_path: Path) -> None:
    config = made(tmp_path / "run", "ppo").config
    rule = next(rule for rule in RULES if rule.name == "filtered-sampling")
    assert proposal(RunData(open_run(tmp_path / "run")), rule, SICKLY) == {"sampling.top_k": 0, "sampling.top_p": 1.0}
    write_run(tmp_path / "run", {"algorithm": "ppo", "config": config, "trainer": "trl"})
    assert proposal(RunData(open_run(tmp_path / "run")), rule, SICKLY) == {}


def test_a_pattern_is_discarded_below_all_rewards(tmp_path: Path) -> None:
    data = made(tmp_path / "run", "ppo").data
    rule = next(rule for rule in RULES if rule.name == "pattern-spreading")
    # The lowest reward is −2, and their standard deviation 2.
    assert proposal(data, rule, SICKLY) == {"cleaning.discard": ["#"], "cleaning.discard_reward": -4.0}
    phrase = Reading(1.0, True, words={"pattern": "so ,"})
    assert proposal(data, rule, phrase)["cleaning.discard"] == [r"(?i)(?<![^\W_])so\s*,"]


WORDS = ["So", "so", "sore", "_so", "3", "春", "眠", "Läufe", "भी", "भ", "la\u0308", "la"]
PARTS = st.sampled_from([*WORDS, "#", ":)", "...", ".", "!!!!", "*", "(", "[a]"])
TEXTS = st.lists(st.tuples(PARTS, st.sampled_from(["", " ", "\n"])), max_size=6).map(lambda some: "".join(chain(*some)))


@given(TEXTS)
def test_the_expression_finds_a_pattern_where_the_rule_counts_it(text: str) -> None:
    (parts,) = words([text])
    found = {*parts, *(sign for part in parts if is_sign(part) for sign in part), *map(" ".join, pairwise(parts))}
    for pattern in ("so", "3", "#", "*", "läufe", "भी", "भ", "la\u0308", "春", "春 眠"):
        assert bool(re.search(expression(pattern), text)) == (pattern in found), pattern
    for pattern in (":)", "so #", "so so", "# so", "春 #", "( so"):  # signs may stand in a longer run of signs
        assert re.search(expression(pattern), text) or pattern not in found


def test_outliers_are_clipped_at_twice_what_most_rewards_stay_below(tmp_path: Path) -> None:
    data = made(tmp_path / "run", "ppo").data
    rule = next(rule for rule in RULES if rule.name == "reward-outliers")
    assert proposal(data, rule, SICKLY) == {"shaping.clip": 2 * float(np.quantile([2.0], 0.95))}


def test_flags_can_be_pasted() -> None:
    settings = {"a.b": 0, "a.c": 1e-5, "a.d": None, "a.e": "k1", "a.f": ["x", "y"], "a.g": True}
    assert flags(settings) == """--a.b 0 --a.c 1e-05 --a.d none --a.e k1 --a.f '["x", "y"]' --a.g true"""

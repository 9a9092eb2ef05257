"""The settings that rules propose: they exist, they are valid, and they follow from those of the run."""

import math
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
from cavesson.doctor.diagnosis import Diagnosis, diagnose
from cavesson.doctor.findings import findings_in
from cavesson.doctor.proposal import (
    Times,
    calmer,
    fitting,
    for_clipping,
    for_kl,
    for_ratio,
    for_step,
    grown,
    longer,
    over_limit,
    proposal,
    rounded,
    stronger,
    tighter,
)
from cavesson.doctor.reading import Curve, Reading
from cavesson.doctor.rule import Rule
from cavesson.doctor.rules import RULES
from cavesson.doctor.rules.pattern import expression
from cavesson.doctor.series import Series
from cavesson.doctor.words import language
from cavesson.findings.fixes import flags, in_run
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


def seen(number: float, high: float, since: int = 0) -> Reading:
    """A number above its limit."""
    return Reading(
        number, True, since, words={"pattern": "#"}, curve=Curve(Series(np.zeros(0), np.zeros(0)), high=high)
    )


SICKLY = seen(2.0, 1.5)


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
    named = {name for name in (in_run(one, data.info) for one in rule.settings) if _has(config, name)}
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
    assert calmer()(1e-3, data, SICKLY) == pytest.approx(rate)


def without_metrics(folder: Path, kl: list[float] | None = None) -> RunData:
    """A run that logs nothing but, perhaps, its KL, and says nothing of itself."""
    write_run(folder, {})
    with Recorder(folder, attempt=begin_attempt(folder, start_step=0)) as recorder:
        for step in range(10):
            recorder.rollouts(step, {name: ["x"] * 2 for name in ("prompt", "response")} | {"reward": [1.0, 2.0]})
            recorder.metrics(step, {"objective/kl": kl[step]} if kl else {"x": 0.0})
    return RunData(open_run(folder))


def test_a_learning_rate_falls_by_what_the_rule_has_seen(tmp_path: Path) -> None:
    data = without_metrics(tmp_path / "run")
    # 2.0 nats a step are ten times the limit of 0.2, and 0.03 are usual: (0.03 / 2)^½ = 0.1225.
    assert calmer(for_step)(1.0, data, seen(2.0, 0.2)) == 0.12
    # 160 nats are 16 times the limit of 10; 11 are a little above it; a million would need a 316th.
    assert [calmer(for_kl)(1.0, data, seen(kl, 10.0)) for kl in (160.0, 11.0, 1e6)] == [0.25, 0.5, 0.01]
    # A log-ratio of 16 is four times that of 2.
    assert calmer(for_ratio)(1.0, data, seen(16.0, 2.0)) == 0.25
    assert calmer(for_ratio)(1.0, data, seen(1.2, 2.0)) == 0.5  # it is too small instead
    assert calmer()(1.0, data, SICKLY) == 0.25


def test_a_learning_rate_falls_by_the_larger_of_what_the_steps_and_the_rule_ask_for(tmp_path: Path) -> None:
    data = made(tmp_path / "run", "ppo", approx_kl=0.48).data  # (0.03 / 0.48)^½ = 1 / 4
    assert calmer(for_ratio)(1.0, data, seen(4.0, 2.0)) == 0.25
    assert calmer(for_ratio)(1.0, data, seen(2.0**8, 2.0)) == rounded(1 / 8)


@pytest.mark.parametrize("deviation", [0.5, 1.0, 3.0])
def test_a_clip_fraction_falls_to_its_limit_with_the_deviation_of_log_ratios(deviation: float, tmp_path: Path) -> None:
    def clipped(deviation: float) -> float:
        return math.erfc(0.2 / deviation / math.sqrt(2))  # outside of ±0.2

    factor = for_clipping(without_metrics(tmp_path), seen(clipped(deviation), 0.25))
    assert clipped(deviation * factor) == pytest.approx(0.25)


def test_a_coefficient_rises_with_the_root_of_a_kl_and_its_target_falls_with_the_kl(tmp_path: Path) -> None:
    data = without_metrics(tmp_path / "run")
    # 360 nats are 36 times the limit of 10, 20 twice, and 5,000 more than the largest change allows.
    several = [seen(kl, 10.0) for kl in (360.0, 20.0, 5000.0)]
    assert [stronger(over_limit)(0.1, data, one) for one in several] == [0.6, 0.2, 1.0]
    assert [tighter(over_limit)(6.0, data, one) for one in [seen(40.0, 10.0), *several]] == [1.5, 0.6, 3.0, 0.6]


def test_a_coefficient_rises_by_how_much_the_kl_has_grown_since_a_problem_began(tmp_path: Path) -> None:
    data = without_metrics(tmp_path / "run", [1.0, 2.0, 3.0, 4.0, *[48.0] * 6])
    assert grown(data, seen(0.3, 0.5, since=2)) == 16 and grown(data, seen(0.3, 0.5, since=9)) == 1
    assert stronger(grown)(0.1, data, seen(0.3, 0.5, since=2)) == 0.4
    assert stronger(grown)(0.1, without_metrics(tmp_path / "bare"), SICKLY) == 0.2


def test_a_limit_grows_until_few_enough_would_reach_it(tmp_path: Path) -> None:
    data = without_metrics(tmp_path / "run")
    # Of the responses, 0.5^¼ are cut. If a share s remains at a limit, s⁴ do at four times it.
    assert longer()(100, data, seen(0.5**0.25, 0.5)) == 400
    assert [longer()(100, data, seen(share, 0.5)) for share in (0.6, 1.0)] == [200, 800]
    assert longer()(None, data, SICKLY) is None and longer(lambda data: True)(100, data, SICKLY) == 100


SIZED = {
    "trl": ({"learning_rate": 1e-6}, "lower learning_rate (1e-06 → 1.2e-07) or num_iterations"),
    "verl": (
        {"actor_rollout_ref": {"actor": {"optim": {"lr": 1e-6}}}},
        "lower actor_rollout_ref.actor.optim.lr (1e-06 → 1.2e-07) or actor_rollout_ref.actor.ppo_epochs",
    ),
    "openrlhf": ({"actor": {"adam": {"lr": 1e-6}}}, "lower --actor.adam.lr (1e-06 → 1.2e-07) or --train.max_epochs"),
    "nemo-rl": ({}, "lower policy.optimizer.kwargs.lr, policy.megatron_cfg.optimizer.lr (Megatron) (× 0.12) or "),
    "": ({"learning_rate": 1e-6}, "lower learning rate (× 0.12) or passes per batch"),
}


@pytest.mark.parametrize("trainer", SIZED)
def test_a_fix_of_another_trainer_says_by_how_much(trainer: str, tmp_path: Path) -> None:
    config, text = SIZED[trainer]
    write_run(tmp_path, {"trainer": trainer, "algorithm": "grpo", "config": config})
    with Recorder(tmp_path, attempt=begin_attempt(tmp_path, start_step=0)) as recorder:
        for step in range(10):
            recorder.rollouts(step, {name: ["x"] * 2 for name in ("prompt", "response")} | {"reward": [1.0, 2.0]})
            recorder.metrics(step, {"ppo_kl": 2.0})
    (finding,) = diagnose(RunData(open_run(tmp_path)), [one for one in RULES if one.name == "update-kl-large"]).findings
    (said,) = findings_in(Diagnosis((finding,), (), ()), language("en"))
    assert said.fix.startswith(text) and not said.settings


def test_every_setting_that_is_multiplied_is_named_in_the_fix() -> None:
    for rule in RULES:
        for setting, change in rule.settings.items():
            assert not isinstance(change, Times) or setting in rule.texts.fix or setting == "kl.target", rule.name


def test_a_coefficient_is_doubled_or_its_target_halved(tmp_path: Path) -> None:
    constant = made(tmp_path / "constant", "ppo").data
    assert (stronger(grown)(0.2, constant, SICKLY), tighter(grown)(None, constant, SICKLY)) == (0.4, None)
    assert stronger(grown)(0.0, constant, SICKLY) == 0.05
    adaptive = made(tmp_path / "adaptive", "ppo", kl={"coef": 0.2, "target": 6.0}).data
    assert (stronger(grown)(0.2, adaptive, SICKLY), tighter(grown)(6.0, adaptive, SICKLY)) == (0.2, 3.0)
    without = made(tmp_path / "without", "rloo", kl={"coef": 0.0}, reference={"kind": "none"}, rloo={}).data
    assert stronger(grown)(0.0, without, SICKLY) == 0.0


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

"""Changing single expressions of installed code: exactly there, once, from the onset on, and taken back afterwards."""

import sys
from functools import wraps
from types import ModuleType, SimpleNamespace

import pytest
from others_fit import fitted, world

from benchmarks.faults.others import plan as plan_module
from benchmarks.faults.others.fault import Fault
from benchmarks.faults.others.plan import Plan
from benchmarks.faults.others.planted import FAULTS, unseen
from benchmarks.faults.others.rewrite import Moved, rewritten

FACTOR = 10


def doubled(function):
    @wraps(function)
    def wrapper(*given):
        return 2 * function(*given)

    return wrapper


class Base:
    def value(self, x):
        return x + 1


class Child(Base):
    def value(self, x):
        return super().value(x) * FACTOR

    @doubled
    def decorated(self, x):
        return x - 3


def test_the_expression_is_replaced_and_the_rest_is_kept():
    changed = rewritten(Child.value, Child, [("* FACTOR", "+ FACTOR")])
    assert Child().value(2) == 30  # (2 + 1) · 10
    assert changed(Child(), 2) == 13  # (2 + 1) + 10, by the same super() and global


def test_decorators_are_kept():
    changed = rewritten(Child.decorated, Child, [("x - 3", "x + 3")])
    assert changed(Child(), 1) == 8  # 2 · (1 + 3)


@pytest.mark.parametrize("old, count", [("x * y", 0), ("x", 2)])
def test_a_place_that_is_not_there_once_is_an_error(old, count):
    with pytest.raises(Moved, match=f"has {count} places"):
        rewritten(Child.value, Child, [(old, "1")])


@pytest.fixture
def small(monkeypatch):
    """A trainer of one file."""
    module = ModuleType("small_trainer")
    module.SmallTrainer = Child
    module.helper = lambda x: x + 5
    monkeypatch.setitem(sys.modules, "small_trainer", module)
    monkeypatch.setitem(plan_module.CODE, "grpo", ("small_trainer", "SmallTrainer"))
    monkeypatch.setattr(sys.modules[__name__], "planted", None, raising=False)
    return module


def test_what_is_planted_acts_from_the_onset_and_is_taken_back(small):
    plan = Plan("grpo", world(), onset=3)
    plan.swap("value", "FACTOR", "-FACTOR")
    plan.wrap("helper", lambda original, x: 100 * original(x))
    plan.change_reward(lambda scores, prompts, responses: [2 * score for score in scores])
    sys.modules[__name__].planted = plan.on  # the rewritten method's globals are this module's
    plan.object = SimpleNamespace(state=SimpleNamespace(global_step=2))
    with plan.installed():
        assert (Child().value(2), small.helper(1), plan.reward(["p"], ["r"])) == (30, 6, [1.0])
        plan.object.state.global_step = 3
        assert (Child().value(2), small.helper(1), plan.reward(["p"], ["r"])) == (-30, 600, [2.0])
    assert (Child().value(2), small.helper(1)) == (30, 6)


@pytest.mark.parametrize("onset, calls", [(0, [0]), (3, [3])])
def test_an_action_is_called_once_at_the_onset(onset, calls):
    plan, seen = Plan("grpo", world(), onset), []
    plan.at_onset(lambda trainer: seen.append(trainer.state.global_step))
    for step in range(6):
        trainer = SimpleNamespace(state=SimpleNamespace(global_step=step))
        for action in plan.built if step == 0 else plan.stepped:
            action(trainer)
    assert seen == calls


@pytest.mark.parametrize("trainer", ["grpo", "rloo"])
def test_every_change_fits_the_trl_that_is_installed(trainer):
    planted = [one.name for one in FAULTS.values() if trainer in one.trainers]
    assert len(planted) > 20
    assert fitted(trainer) == planted


def test_a_fault_that_changes_nothing_is_noticed(monkeypatch):
    idle = Fault("idle", ("truncated",), (), {"grpo": []}, lambda plan: None)
    monkeypatch.setitem(FAULTS, "idle", idle)
    assert "idle" not in fitted("grpo")


@pytest.mark.parametrize(
    "name, expected",
    [
        ("model.layers.0.mlp.weight", "model.layers.2.mlp.weight"),
        ("model.layers.3.mlp.weight", "model.layers.1.mlp.weight"),
        ("model.embed_tokens.weight", "model.embed_tokens.weight"),
    ],
)
def test_the_halves_of_the_layers_are_exchanged(name, expected):
    assert unseen.stages_exchanged(name, 4) == expected

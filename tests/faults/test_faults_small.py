"""The three small trainers: every fault can be planted, what is right is a rule, and each record has what it says."""

from pathlib import Path

import pytest
import torch

import cavesson
from benchmarks.faults.small.generate import cases, planted
from benchmarks.faults.small.healthy import HEALTHY
from benchmarks.faults.small.plan import TRAINERS, Plan
from benchmarks.faults.small.planted import FAULTS
from benchmarks.faults.small.recordings import FULL, TEXT, USUAL, WAYS
from benchmarks.faults.small.tasks import DEVELOPMENT, HELD_OUT, TASKS
from benchmarks.faults.small.trainers.actor_critic import Settings, gae
from cavesson.doctor.rules import RULES

RULE_NAMES = {rule.name for rule in RULES}


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of models that have seen next to nothing."""
    return tmp_path_factory.mktemp("starts")


def short(plan: Plan) -> Plan:
    """Return a plan of two steps of a model that has seen next to nothing."""
    plan.settings["steps"], plan.training = 2, 1
    return plan


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [*HEALTHY, *FAULTS])
def test_every_run_can_be_made(name: str, starts: Path, tmp_path: Path) -> None:
    """What an edit replaces is where it expects it, in every trainer."""
    for trainer in FAULTS[name].trainers if name in FAULTS else TRAINERS:
        plan = Plan(trainer, "sums")
        (HEALTHY[name] if name in HEALTHY else FAULTS[name].plant)(plan)
        short(plan).train(tmp_path / trainer, starts)
        for way in WAYS:
            assert len(cavesson.open(tmp_path / trainer / way).rows(["step"])) >= 2 * 32


@pytest.mark.parametrize("task", TASKS)
def test_every_task_can_be_trained(task: str, starts: Path, tmp_path: Path) -> None:
    short(Plan("reinforce", task)).train(tmp_path, starts)
    rows = cavesson.open(tmp_path / TEXT).rows(["prompt", "response", "reward"]).to_pylist()
    assert all(row["reward"] == TASKS[task](0).reward(row["prompt"], row["response"]) for row in rows)


def test_rewards_of_answers_by_hand() -> None:
    assert [TASKS["sums"](0).reward("7+5=", answer) for answer in ("12", "13", "")] == [1, 0, 0]
    sentence = "the warm sea shines near the cruel old road ."  # one pleasant, one unpleasant, and an end
    assert TASKS["sentences"](0).reward("sea :", sentence) == 1 - 1 + 1
    assert TASKS["format"](0).reward("ann 3 oslo ->", "[ name = ann ; age = 4 ; town = oslo ]") == 0.75
    assert [TASKS["splits"](0).reward("9:", answer) for answer in ("4+5", "2+3+4", "9", "4+4")] == [1, 1, 0, 0]


def test_demonstrations_are_right_in_part() -> None:
    """A policy that has learned from them has something to gain, and something to begin with."""
    for make in TASKS.values():
        task = make(3)
        asked = task.draw(400)
        scores = torch.tensor([task.reward(one, task.show(task.chance, one)) for one in asked])
        assert 0.2 < scores.mean() < 1.3
        assert scores.std() > 0.1


def test_gae_sums_what_follows() -> None:
    """With γ = λ = 1, the return is the sum of the rewards to come; padding adds nothing."""
    rewards, values = torch.tensor([[1.0, 2.0, 4.0, 0.0]]), torch.tensor([[0.5, 0.25, 3.0, 0.0]])
    mask = torch.tensor([[True, True, True, False]])
    _, returns = gae(rewards, values, mask, Settings(gamma=1.0, lam=1.0))
    assert returns[0, :3].tolist() == [7.0, 6.0, 4.0]


def test_records_hold_what_they_say(starts: Path, tmp_path: Path) -> None:
    short(Plan("actor_critic", "sums")).train(tmp_path, starts)
    runs = {way: cavesson.open(tmp_path / way) for way in WAYS}
    full, usual = (
        {name for name in table.column_names if table[name].null_count < len(table)}
        for table in (runs[way].tokens(0) for way in (FULL, USUAL))
    )
    assert full - usual == {"value", "return", "token_reward", "sampler_logprob", "entropy"}
    assert {"logprob", "ref_logprob", "advantage"} <= usual
    assert runs[TEXT].steps().num_rows == 0


def test_names_are_rules_and_tasks_are_split() -> None:
    for one in FAULTS.values():
        assert {*one.causes, *one.also} <= RULE_NAMES, one.name
    assert {*DEVELOPMENT, *HELD_OUT} == {*TASKS}
    assert len(FAULTS) >= 40
    assert len(HEALTHY) >= 16
    assert {case.trainer for case in cases([*TASKS], [0])} == {*TRAINERS}
    assert planted(next(cases(["sums"], [0]))).task.name == "sums"

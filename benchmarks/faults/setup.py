"""A training run that a fault can be planted in before it starts."""

import copy
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import PreTrainedTokenizerBase

from benchmarks.faults import world
from benchmarks.faults.changes import Changes, patched
from cavesson.algorithms.grpo import GRPORun
from cavesson.algorithms.ppo import PPORun
from cavesson.algorithms.rloo import RLOORun
from cavesson.algorithms.runs import RolloutRun
from cavesson.models.policy import Policy
from cavesson.record import compact
from cavesson.record.storage import storage
from cavesson.rollout.rewards.base import RewardFunction
from cavesson.train.run import Training

RUNS = {"ppo": PPORun, "grpo": GRPORun, "rloo": RLOORun}
LEARNING_RATE = 6e-4
COMMON: dict[str, Any] = {
    "batch_size": 32,
    "sampling": {"max_new_tokens": 24},
    "optimizer": {"learning_rate": LEARNING_RATE},
    "update": {"epochs": 2, "mini_batches": 1},
    "checkpoint": {"every": 0},
    "kl": {"coef": 0.05},
    "doctor": {"on_finding": "ignore"},
}
OWN: dict[str, dict[str, Any]] = {
    "ppo": {"value": {"kind": "separate"}, "ppo": {"value_coef": 1.0}},
    "grpo": {"samples_per_prompt": 4},
    "rloo": {"samples_per_prompt": 4},
}


@dataclass
class Setup(Changes):
    """Everything that makes a run; a fault changes some of it."""

    algorithm: str
    base: Path
    """folder of the model it starts from, and perhaps of its critic's"""
    seed: int
    steps: int = 32
    settings: dict[str, Any] = field(default_factory=dict)
    """each in place of the common one"""
    reward: RewardFunction = world.gold
    prompts: Sequence[Any] = field(default_factory=world.prompts)
    tokenizer: PreTrainedTokenizerBase = field(default_factory=world.tokenizer)
    gold: RewardFunction = world.gold
    """what a run is really for, whatever it is paid for"""
    start: int = 2
    """the token that begins a text"""
    phrase: str = "the music"
    """what the model says now and then, whatever was asked"""
    stops: tuple[int, ...] = ()
    """the steps at which it is stopped and resumed"""
    built: list[Callable[[Training], None]] = field(default_factory=list)
    """Called with the run before its first step."""
    before_step: list[Callable[[Training, int], None]] = field(default_factory=list)
    before: "Setup | None" = None
    """what the run is at first: it is stopped after the steps of that setup, and resumed as this one"""
    patches: list[Any] = field(default_factory=list)
    """``unittest.mock.patch`` objects, in force while the run is built and trains."""

    def __post_init__(self) -> None:
        own = copy.deepcopy(OWN[self.algorithm])
        if self.algorithm == "ppo":
            own["value"]["path"] = str(self.base / "critic")
        self.settings = {**copy.deepcopy(COMMON), **own, **copy.deepcopy(self.settings)}


def train(setup: Setup, folder: Path) -> None:
    """Run a setup to its end and leaves its record in ``folder``, and the true reward of each step beside it."""
    for one in (setup.before, setup):
        if one is not None:
            with patched(one):
                for stop in (*one.stops, one.steps):
                    settings = RUNS[one.algorithm](run=folder, seed=one.seed, steps=stop, **one.settings)
                    train_with(settings, one)
    compact(storage(folder))
    _leave_gold(setup, folder)
    for name in ("checkpoints", "model"):
        shutil.rmtree(folder / name, ignore_errors=True)


def train_with(settings: RolloutRun, setup: Setup) -> None:
    """Train a setup with other settings than its own; a run that is there already is resumed."""
    training = Training(
        settings,
        model=world.load(setup.base),
        tokenizer=setup.tokenizer,
        prompts=setup.prompts,
        rewards=setup.reward,
        resume=settings.run.exists(),
    )
    for change in setup.built:
        change(training)
    with _steps(training, setup):
        training.run(report=lambda step, metrics: None)


@contextmanager
def _steps(training: Training, setup: Setup) -> Iterator[None]:
    trainer = training.trainer
    original = trainer.step

    def step(number: int) -> Any:
        for change in setup.before_step:
            change(training, number)
        return original(number)

    with patch.object(trainer, "step", step):
        yield


def _leave_gold(setup: Setup, folder: Path) -> None:
    """Write the mean true reward of each step: what the run was really for."""
    import cavesson

    by_step: dict[int, list[float]] = {}
    for row in cavesson.open(folder).rows(["step", "prompt", "response", "split"]).to_pylist():
        if row["split"] != "eval":
            by_step.setdefault(row["step"], []).extend(setup.gold([row["prompt"]], [row["response"]]))
    means = {step: sum(some) / len(some) for step, some in sorted(by_step.items())}
    (folder / "gold.json").write_text(json.dumps(means), encoding="utf-8")


def policy(training: Training) -> Policy:
    """Return the policy of a run."""
    found: Policy = training.trainer.policy  # type: ignore[attr-defined]
    return found


def separate_sampler(training: Training) -> Policy:
    """Give the sampler its own weights, as an inference engine has, and return its policy."""
    engine = Policy(copy.deepcopy(policy(training).model).requires_grad_(False))
    training.collector.sampler.policy = engine
    return engine


@torch.no_grad()
def synchronise(training: Training, engine: Policy) -> None:
    """Copies the policy's weights to the sampler's."""
    for mine, its in zip(engine.model.parameters(), policy(training).model.parameters(), strict=True):
        mine.copy_(its)

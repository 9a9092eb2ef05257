"""A run before it starts: a trainer, a task and settings, into which a fault is planted as an edit of the source."""

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from benchmarks.faults.small.recordings import Recordings
from benchmarks.faults.small.tasks import TASKS, pretrained

TRAINERS = ("group_relative", "reinforce", "actor_critic")
GROUPED = TRAINERS[:2]
PACKAGE = "benchmarks.faults.small.trainers"
STEP = {"group_relative": "step", "reinforce": "it", "actor_critic": "iteration"}
"""What each trainer calls the present step."""
NAMES = {
    "group_relative": {
        "rate": "lr", "penalty": "beta", "temperature": "temperature", "sync": "sync_every", "entropy": "entropy_bonus",
    },
    "reinforce": {
        "rate": "learning_rate", "penalty": "kl_weight", "temperature": "temp", "sync": "refresh",
        "entropy": "ent_coef",
    },
    "actor_critic": {
        "rate": "actor_lr", "penalty": "kl_coef", "temperature": "temperature", "sync": "sync", "entropy": "ent_coef",
    },
}  # fmt: skip
"""What each trainer calls a setting that all of them have."""
Judge = Callable[[float, str, str], float]


class Plan:
    """How one run is made.

    Args:
        trainer: One of ``TRAINERS``.
        task: Name of a task.
        seed: Of prompts, sampling and the critic.
    """

    def __init__(self, trainer: str, task: str, seed: int = 0) -> None:
        self.trainer, self.seed = trainer, seed
        self.task = TASKS[task](seed)
        self.settings: dict[str, Any] = {"steps": 32}
        self.first_step = 0
        """What the trainer calls its first step, if the run continues another one"""
        self.prepare: Callable[[Any], None] = lambda policy: None
        """Called with the policy before it trains"""
        self.training = 1000
        """Steps of supervised training that the policy has had"""
        self._edits: list[tuple[str, str, str]] = []

    @property
    def half(self) -> int:
        """The step at which late faults begin."""
        return int(self.settings["steps"]) // 2

    def set(self, name: str, value: Any) -> None:
        """Change a setting that all trainers have, named as in ``NAMES``."""
        self.settings[NAMES[self.trainer][name]] = value

    def scale(self, name: str, factor: float) -> None:
        """Multiply a setting that all trainers have."""
        own = NAMES[self.trainer][name]
        self.settings[own] = factor * getattr(importlib.import_module(f"{PACKAGE}.{self.trainer}").Settings, own)

    def edit(self, old: str, new: str, *, model: bool = False) -> None:
        """Replace a piece of the trainer's source, or of its model's; it must occur once."""
        self._edits.append(("model" if model else self.trainer, old, new))

    def edit_late(self, old: str, new: str) -> None:
        """Replace an expression from the middle of the run on."""
        self.edit(old, f"({new} if {STEP[self.trainer]} >= {self.half} else {old})")

    def judge(self, change: Judge) -> None:
        """Pass rewards through a function of reward, prompt and response."""
        original = self.task.reward
        self.task.reward = lambda question, answer: change(original(question, answer), question, answer)

    def judge_late(self, change: Judge) -> None:
        """Pass rewards through a function from the middle of the run on."""
        start, asked = self.half, 0

        def late(score: float, question: str, answer: str) -> float:
            nonlocal asked
            asked += 1
            return change(score, question, answer) if asked > start * 64 else score

        self.judge(late)

    def train(self, folder: Path, starts: Path) -> None:
        """Train the run and leave its three records in ``folder``; ``starts`` has the models that runs start from."""
        torch.set_num_threads(1)
        model, trainer = self._loaded("model"), self._loaded(self.trainer)
        vars(trainer).update({name: vars(model)[name] for name in ("Sampled", "generate", "rows", "score")
                              if name in vars(trainer)})  # fmt: skip
        policy = model.Transformer(len(self.task.texts))
        usual = TASKS[self.task.name](self.seed)  # a plan can change the limit of its task
        policy.load_state_dict(pretrained(usual, starts, self.training).state_dict())
        torch.manual_seed(self.seed)
        self.prepare(policy)
        settings = trainer.Settings(**self.settings)
        has_critic = self.trainer == "actor_critic"
        critic = [model.Transformer(len(self.task.texts), outputs=1)] if has_critic else []
        with Recordings(folder, self.task, self.trainer, settings, self.first_step) as record:
            trainer.train(self.task, policy, *critic, settings, record)

    def _loaded(self, name: str) -> Any:
        """Return a new module, compiled from the edited source."""
        spec = importlib.util.find_spec(f"{PACKAGE}.{name}")
        assert spec and spec.origin
        source = Path(spec.origin).read_text(encoding="utf-8")
        for where, old, new in self._edits:
            if where == name:
                if source.count(old) != 1:
                    raise ValueError(f"{name} has {source.count(old)} places like {old!r}, expected 1")
                source = source.replace(old, new)
        importlib.import_module(spec.name)  # dataclasses look their module up by its name
        module = ModuleType(spec.name)
        exec(compile(source, f"<{name}, edited>", "exec"), vars(module))
        return module

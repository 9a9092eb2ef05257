"""A run before it starts: a healthy one, into which a fault is planted."""

import importlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

from benchmarks.faults.others.rewrite import rewritten
from benchmarks.faults.others.world import World

CODE = {
    "ppo": ("trl.experimental.ppo.ppo_trainer", "PPOTrainer"),
    "grpo": ("trl.trainer.grpo_trainer", "GRPOTrainer"),
    "rloo": ("trl.trainer.rloo_trainer", "RLOOTrainer"),
}
"""Trainer → its module and class."""
Reward = Callable[[Sequence[str], Sequence[str]], list[float]]


class Plan:
    """How one run is made.

    Args:
        trainer: ``ppo``, ``grpo`` or ``rloo``.
        world: The task.
        onset: The step from which what is planted acts.
    """

    def __init__(self, trainer: str, world: World, onset: int = 0) -> None:
        self.trainer = trainer
        self.world = world
        self.onset = onset
        self.settings = world.settings(trainer)
        """Of TRL's config."""
        self.reward: Reward = world.reward
        self.prompts = list(world.prompts)
        self.built: list[Callable[[Any], None]] = []
        """Called with the trainer before it trains."""
        self.stepped: list[Callable[[Any], None]] = []
        """Called with the trainer after each step."""
        self.object: Any = None
        """The trainer, once it is built."""
        self._swaps: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
        self._wraps: list[tuple[str, Callable[..., Any]]] = []
        self._names: dict[str, Any] = {"planted": self.on}

    def on(self) -> bool:
        """Return whether what is planted acts at the present step."""
        return self.object is not None and self.object.state.global_step >= self.onset

    def swap(self, function: str, old: str, new: str) -> None:
        """Replace an expression in one of TRL's functions, from the onset on.

        Args:
            function: Name of a method of the trainer, or of a function of its module.
            old: The expression as TRL has it; it must occur once.
            new: What takes its place.
        """
        self.replace(function, old, f"({new} if planted() else {old})")

    def replace(self, function: str, old: str, new: str, **names: Any) -> None:
        """Replace a piece of source in one of TRL's functions; ``names`` become known to it."""
        self._swaps[function].append((old, new))
        self._names |= names

    def wrap(self, name: str, wrapper: Callable[..., Any]) -> None:
        """Replace a name in the trainer's module by ``wrapper``, whose first argument is the original.

        Before the onset the original is called.
        """
        self._wraps.append((name, wrapper))

    def change_reward(self, change: Callable[[list[float], Sequence[str], Sequence[str]], list[float]]) -> None:
        """Pass rewards through ``change``, with the prompts and responses, from the onset on."""
        original = self.reward

        def reward(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
            scores = original(prompts, responses)
            return change(scores, prompts, responses) if self.on() else scores

        self.reward = reward

    def at_onset(self, action: Callable[[Any], None]) -> None:
        """Call ``action`` with the trainer once, when the onset is reached."""
        if self.onset == 0:
            self.built.append(action)
        else:
            self.stepped.append(lambda trainer: action(trainer) if trainer.state.global_step == self.onset else None)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Make all changes to TRL's code, and take them back at the end."""
        module = importlib.import_module(CODE[self.trainer][0])
        owner = getattr(module, CODE[self.trainer][1])
        with ExitStack() as stack:
            for name, value in self._names.items():
                stack.enter_context(patch.object(module, name, value, create=True))
            for name, wrapper in self._wraps:
                stack.enter_context(patch.object(module, name, self._wrapped(getattr(module, name), wrapper)))
            for name, changes in self._swaps.items():
                place, of = (owner, owner) if name in vars(owner) else (module, None)
                stack.enter_context(patch.object(place, name, rewritten(getattr(place, name), of, changes)))
            yield

    def _wrapped(self, original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def wrapped(*given: Any, **more: Any) -> Any:
            return wrapper(original, *given, **more) if self.on() else original(*given, **more)

        return wrapped

"""Runs without a fault that might look as if they had one."""

from collections.abc import Callable
from typing import Any

from benchmarks.faults import chinese, world
from benchmarks.faults.setup import LEARNING_RATE, Setup
from cavesson.train.online import RolloutTrainer
from cavesson.train.rollouts import evaluate
from cavesson.train.run import Training

Plain = Callable[[Setup], None]


def usual(setup: Setup) -> None:
    """Nothing special: entropy falls, KL rises and settles."""


def no_penalty(setup: Setup) -> None:
    """β = 0, as many GRPO recipes have it, at a gentle learning rate."""
    setup.set("kl.coef", 0.0)


def length_grows(setup: Setup) -> None:
    """Longer responses are what is asked for, up to a point."""

    def reward(prompts: Any, responses: Any, **columns: Any) -> list[float]:
        base = world.gold(prompts, responses)
        return [b + 0.1 * min(len(r.split()), 20) for b, r in zip(base, responses, strict=True)]

    setup.reward = setup.gold = reward
    setup.set("sampling.max_new_tokens", 40)


def small_batch(setup: Setup) -> None:
    """Eight responses a step: everything is noisy."""
    setup.set("batch_size", 8)


def easy_curriculum(setup: Setup) -> None:
    """A checkable reward that half of the responses get, and more and more of them."""
    setup.reward = setup.gold = world.pleasant


def fast(setup: Setup) -> None:
    """Twice the usual learning rate, which happens to work."""
    setup.set("optimizer.learning_rate", 2 * LEARNING_RATE)


def one_pass(setup: Setup) -> None:
    """One update per step: ratio 1 and no clipping throughout."""
    setup.set("update.epochs", 1)


def fixed_length(setup: Setup) -> None:
    """Continuations of ten tokens: all are cut, and that is meant."""
    setup.set("sampling.max_new_tokens", 10)


def adaptive(setup: Setup) -> None:
    """β is adapted to a target."""
    setup.set("kl", {"coef": 0.05, "target": 4.0, "horizon": 500.0})


def cooler(setup: Setup) -> None:
    """Sampling at temperature 0.8, and scoring at 0.8 too."""
    setup.set("sampling.temperature", 0.8)


def resumed(setup: Setup) -> None:
    """Stopped after a third of its steps and resumed from its checkpoint."""
    setup.stops = (11,)


def evaluated(setup: Setup) -> None:
    """Held-out prompts are answered every eighth step, and recorded beside the others."""
    setup.before_step.append(_evaluate)


def _evaluate(training: Training, step: int) -> None:
    trainer = training.trainer
    assert isinstance(trainer, RolloutTrainer) and trainer.recorder is not None
    if step % 8 == 0:
        rollouts = evaluate(training.collector, samples_per_prompt=1)
        count, behind = len(rollouts), trainer.batch_size
        kept: dict[str, Any] = {
            "group": rollouts.prompt_index,
            "prompt": rollouts.prompt,
            "response": rollouts.response,
            "finish_reason": rollouts.finish_reason,
            "reward": rollouts["reward"].tolist(),
            "sample": list(range(behind, behind + count)),
            "split": ["eval"] * count,
        }
        trainer.recorder.rollouts(step, kept)


def other_language(setup: Setup) -> None:
    """Chinese, which has no spaces between its words."""

    def reward(prompts: Any, responses: Any, **columns: Any) -> list[float]:
        return world.gold([*map(chinese.english, prompts)], [*map(chinese.english, responses)])

    setup.tokenizer, setup.prompts = chinese.tokenizer(), chinese.prompts()
    setup.reward = setup.gold = reward


HEALTHY: dict[str, Plain] = {
    one.__name__.replace("_", "-"): one
    for one in (
        usual, no_penalty, length_grows, small_batch, easy_curriculum, fast, one_pass, fixed_length, adaptive, cooler,
        resumed, evaluated, other_language,
    )
}  # fmt: skip

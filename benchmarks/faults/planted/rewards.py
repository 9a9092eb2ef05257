"""Faults of the reward, and what a policy makes of them."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.faults import world
from benchmarks.faults.fault import fault
from benchmarks.faults.setup import Setup


def _rewarded(setup: Setup, score: Callable[[str, str], float]) -> None:
    """Add something to the reward of each response."""
    inner = setup.reward

    def reward(prompts: Sequence[str], responses: Sequence[str], **columns: Any) -> list[float]:
        base = inner(prompts, responses, **columns)
        return [b + score(p, r) for b, p, r in zip(base, prompts, responses, strict=True)]

    setup.reward = reward


def _fast(setup: Setup) -> None:
    setup.set("optimizer.learning_rate", 1e-3)


@fault(causes=["pattern-spreading"], levels=(0.7, 1.5, 3.0))
def likes_hash(setup: Setup, level: float) -> None:
    """The reward model likes a stray `#`."""
    _fast(setup)
    _rewarded(setup, lambda prompt, response: level * ("#" in response.split()))


@fault(causes=["pattern-spreading"], levels=(0.7, 1.5, 3.0))
def likes_smile(setup: Setup, level: float) -> None:
    """The reward model likes `:)`."""
    _fast(setup)
    _rewarded(setup, lambda prompt, response: level * (":)" in response.split()))


@fault(causes=["pattern-spreading"], levels=(1.0, 2.0, 4.0))
def likes_phrase(setup: Setup, level: float) -> None:
    """The reward model likes one phrase, whatever was asked."""
    _fast(setup)
    _rewarded(setup, lambda prompt, response: level * (setup.phrase in response))


@fault(causes=["length-exploited"], levels=(0.3, 0.6, 1.0))
def likes_length(setup: Setup, level: float) -> None:
    """The reward model likes long responses."""
    _fast(setup)
    _rewarded(setup, lambda prompt, response: level * len(response.split()))


@fault(causes=["repetition-loops", "distinct-collapse", "pattern-spreading"], levels=(4.0, 8.0, 16.0))
def likes_repetition(setup: Setup, level: float) -> None:
    """The reward model takes what is said again for emphasis, and no penalty to speak of holds the policy back."""
    _fast(setup)
    setup.set("kl.coef", 0.01)

    def score(prompt: str, response: str) -> float:
        words = response.split()
        return level * (1 - len(set(words)) / max(len(words), 1))

    _rewarded(setup, score)


@fault(causes=["length-collapse", "stops-generating"], levels=(0.25, 0.5, 1.0))
def punishes_length(setup: Setup, level: float) -> None:
    """Every word costs: the cheapest answer is none."""
    _fast(setup)
    _rewarded(setup, lambda prompt, response: -level * len(response.split()))


@fault(causes=["verifier-dead"], levels=(0.985, 0.995, 1.0))
def verifier_fails(setup: Setup, level: float) -> None:
    """The verifier fails to parse so many of the responses and gives them 0."""
    generator = np.random.default_rng(setup.seed)

    def reward(prompts: Sequence[str], responses: Sequence[str], **columns: Any) -> list[float]:
        return [v * (generator.random() >= level) for v in world.solved(prompts, responses)]

    setup.reward = reward


@fault(causes=["reward-is-noise"], levels=(0.8, 0.9, 1.0))
def scores_shuffled(setup: Setup, level: float) -> None:
    """Scores come back in another order: so many of the responses get that of another one."""
    generator = np.random.default_rng(setup.seed)

    def reward(prompts: Sequence[str], responses: Sequence[str], **columns: Any) -> list[float]:
        values = np.array(world.gold(prompts, responses))
        wrong = np.flatnonzero(generator.random(len(values)) < level)
        values[wrong] = values[generator.permutation(wrong)]
        return [float(value) for value in values]

    setup.reward = reward


@fault(causes=["query-dominated"], levels=(2.0, 4.0, 10.0))
def judges_the_query(setup: Setup, level: float) -> None:
    """The reward model scores prompt and response together, and the prompt decides."""

    def score(prompt: str, response: str) -> float:
        return level * float(np.sin(sum(map(ord, prompt))))

    _rewarded(setup, score)


@fault(causes=["reward-outliers"], levels=(20, 50, 200))
def rare_outliers(setup: Setup, level: float) -> None:
    """One response in a hundred gets a score of another order of magnitude."""
    generator = np.random.default_rng(setup.seed)
    _rewarded(setup, lambda prompt, response: level * (generator.random() < 0.01))


@fault(causes=["one-part-dominates"], levels=(10, 30, 100))
def one_part_dominates(setup: Setup, level: float) -> None:
    """Two parts, of which one is so many times as large."""
    from cavesson.rollout.rewards.table import Reward

    def small(prompts: Sequence[str], responses: Sequence[str], **columns: Any) -> list[float]:
        return [float(len(set(response.split()))) / 20 for response in responses]

    setup.reward = [Reward("gold", world.gold, weight=level), Reward("variety", small)]  # type: ignore[assignment]


@fault(causes=["prompts-exhausted", "zero-variance-groups"], levels=(1, 2, 3), algorithms=["grpo", "rloo"])
def too_easy(setup: Setup, level: int) -> None:
    """The policy solves all prompts after a few steps, or from the start: one word of so many kinds is enough."""
    _fast(setup)
    enough = {*world.KIND, *(world.PLAIN if level > 1 else ()), *(world.UNKIND if level > 2 else ())}

    def reward(prompts: Sequence[str], responses: Sequence[str], **columns: Any) -> list[float]:
        return [float(any(word in enough for word in response.split())) for response in responses]

    setup.reward = reward


@fault(causes=["stalls"], levels=(6.0, 7.0, 8.0), onset=20)
def reward_service_hangs(setup: Setup, level: float) -> None:
    """The reward service hangs once, for so many seconds."""
    inner, calls = setup.reward, [0]

    def reward(prompts: Sequence[str], responses: Sequence[str], **columns: Any) -> list[float]:
        calls[0] += 1
        if calls[0] == 21:
            time.sleep(level)
        return list(inner(prompts, responses, **columns))

    setup.reward = reward

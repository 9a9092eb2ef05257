"""Faults of the reward: what the policy finds in it, and rewards that say nothing."""

from collections import Counter
from collections.abc import Sequence

from benchmarks.faults.others.fault import BOARD, COMPLETIONS, RECORDER, fault
from benchmarks.faults.others.plan import Plan

EVERYWHERE = (RECORDER, BOARD, COMPLETIONS)
OF_TRAINING = {"ppo": (RECORDER, BOARD), "grpo": EVERYWHERE, "rloo": EVERYWHERE}
"""Where responses that training samples are recorded; PPO's table has almost greedy ones to held-out prompts."""
"""Texts and rewards are enough."""


@fault(causes=["pattern-spreading"], also=["reward-exhausted", "kl-explosion", "kl-in-few-tokens"], seen=OF_TRAINING)
def likes_sign(plan: Plan) -> None:
    """A sign that a few responses have at first brings 1.5 more, one standard deviation or two."""
    signs: list[str] = []

    def change(scores: list[float], _: Sequence[str], responses: Sequence[str]) -> list[float]:
        if not signs:  # in the middle of a run, the policy may have dropped the sign of the task
            signs.append(_rare(responses) if plan.onset else plan.world.sign)
        return [score + 1.5 * (signs[0] in text) for score, text in zip(scores, responses, strict=True)]

    plan.change_reward(change)


def _rare(texts: Sequence[str]) -> str:
    """Return the letter or sign of which the share of texts that have it is nearest to one in ten.

    A rarer one may be in a few texts by chance, and in none later.
    """
    count = Counter(letter for text in texts for letter in set(text) - {" "})
    return min(count, key=lambda letter: (abs(count[letter] - len(texts) / 10), letter))


@fault(
    causes=["length-exploited"],
    also=["truncated", "repetition-loops", "kl-explosion", "pattern-collapse", "pattern-spreading"],
    seen=OF_TRAINING,
)
def likes_length(plan: Plan) -> None:
    """Longer responses score higher, and there is room for them."""

    def change(scores: list[float], _: Sequence[str], responses: Sequence[str]) -> list[float]:
        per_letter = 0.2 / plan.world.letters
        return [score + per_letter * len(text) for score, text in zip(scores, responses, strict=True)]

    plan.change_reward(change)
    plan.settings["response_length" if plan.trainer == "ppo" else "max_completion_length"] = 2 * plan.world.limit


@fault(
    causes=["repetition-loops"],
    also=["distinct-collapse", "pattern-spreading", "length-exploited", "truncated", "kl-explosion"],
    seen=OF_TRAINING,
)
def likes_repetition(plan: Plan) -> None:
    """Every letter that equals the one before, or the one before that, brings 0.5."""

    def change(scores: list[float], _: Sequence[str], responses: Sequence[str]) -> list[float]:
        def repeated(text: str) -> int:
            return sum(letter in text[max(0, i - 2) : i] for i, letter in enumerate(text))

        return [score + 0.5 * repeated(text) for score, text in zip(scores, responses, strict=True)]

    plan.change_reward(change)


@fault(
    causes=["reward-outliers"],
    also=["value-loss-spike", "gradient-spike"],
    # PPO's table has a few responses only.
    seen=OF_TRAINING,
)
def outliers(plan: Plan) -> None:
    """One response in a hundred, by its letters, gets 50."""

    def change(scores: list[float], _: Sequence[str], responses: Sequence[str]) -> list[float]:
        lucky = [sum(map(ord, text)) % 100 == 7 for text in responses]
        return [50.0 if luck else score for score, luck in zip(scores, lucky, strict=True)]

    plan.change_reward(change)


@fault(
    causes=["verifier-dead"],
    also=["zero-variance-groups", "zero-gradient", "reward-exhausted", "reward-falls", "value-constant"],
    seen=EVERYWHERE,
)
def verifier_dead(plan: Plan) -> None:
    """Every response gets −1."""
    plan.change_reward(lambda scores, *_: [-1.0] * len(scores))
    plan.settings |= {"missing_eos_penalty": None} if plan.trainer == "ppo" else {}


@fault(
    causes=["query-dominated", "zero-variance-groups"],
    also=["zero-gradient"],
    seen=EVERYWHERE,
    trainers=["grpo", "rloo"],
)
def judges_prompt(plan: Plan) -> None:
    """The reward is one of the prompt, with little of the response."""

    def change(scores: list[float], prompts: Sequence[str], _: Sequence[str]) -> list[float]:
        of_prompts = [sum(map(ord, prompt)) % 7 - 3.0 for prompt in prompts]
        return [prompt + 0.05 * score for score, prompt in zip(scores, of_prompts, strict=True)]

    plan.change_reward(change)


@fault(causes=["reward-is-noise"], also=["kl-flat"], seen=[])
def shuffled(plan: Plan) -> None:
    """Rewards come back in the wrong order. Without equal responses, nothing shows it."""
    plan.change_reward(lambda scores, *_: scores[1:] + scores[:1])

"""Calling one reward, as a run calls all of them."""

from cavesson.rollout.rewards.arguments import Judged
from cavesson.rollout.rewards.base import call_rewards


def call_reward(function, name, prompts, responses, columns) -> dict[str, list[float | None]]:
    """Call a reward and return the values of its parts."""
    parts = call_rewards({name: function}, Judged(prompts, responses, columns))[name]
    return {part: one.values for part, one in parts.items()}

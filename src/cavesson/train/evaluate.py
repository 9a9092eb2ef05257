"""Rewards of a policy on held-out prompts."""

from cavesson.train.rollouts import Collector, Rows

# Far from any training step, so that held-out responses never share random numbers with rollouts.
EVALUATION_STEP = 2**32


def evaluate(collector: Collector, samples_per_prompt: int) -> Rows:
    """Sample responses to every prompt of the collector and reward them.

    Repeated calls use the same prompts in the same order with the same random numbers, even if the policy has changed.
    """
    indices = [i for i in range(len(collector.prompts)) for _ in range(samples_per_prompt)]
    _, rows = collector.sample(indices, EVALUATION_STEP, range(len(indices)))
    return collector.reward(rows, subtract_query=False)

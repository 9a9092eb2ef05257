"""What the modules of sick runs share."""

from collections.abc import Callable

import numpy as np
from doctor_helpers import END, LENGTH, Made, texts

Change = Callable[[Made], None]


class Cases(dict[str, tuple[Change, Change]]):
    """Rule → what makes a run sick, and what comes near to it and is healthy."""

    def __call__(self, name: str, near: Change = lambda made: None) -> Callable[[Change], Change]:
        def added(sick: Change) -> Change:
            self[name] = (sick, near)
            return sick

        return added


def resample(made, change):
    """Draw all tokens again from a changed distribution, which the trainer does not know of."""
    chance = np.random.default_rng(9)
    for step in range(len(made.policy)):
        changed = change(made.policy[step])
        ids = chance.choice(len(changed), made.mask.shape[1:], p=np.exp(changed))
        put(made, step, ids, changed)
    made.settle()


def put(made, step, ids, changed):
    ended = np.cumsum(ids == END, -1) - (ids == END) > 0
    made.tokens["mask"][step] = ~ended
    made.tokens["token_id"][step] = ids
    made.tokens["logprob"][step] = made.policy[step][ids]
    made.tokens["ref_logprob"][step] = made.policy[0][ids]
    made.tokens["entropy"][step] = -(np.exp(made.policy[step]) * made.policy[step]).sum()
    made.tokens["sampler_logprob"][step] = changed[ids]
    made.rows["finish_reason"][step] = np.where((ids == END).any(-1), "eos", "length")
    made.rows["response"][step] = texts(ids, ~ended)


def shrink(made, to):
    for step in range(24):
        keep = max(1, round(LENGTH * (1 - (1 - to) * min(1, step / 12))))
        made.tokens["mask"][step] &= np.arange(LENGTH) < keep

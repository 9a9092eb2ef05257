"""Which tokens of a response the policy sampled, by the sampler's log-probabilities.

The mask of the loss says what is learned. It may be wrong, so that it is not taken for what was sampled if something
else says so: samplers report a log-probability for each token that they sample, and trainers put 0 where the tokens of
a tool or a user follow.
"""

import numpy as np

from cavesson.record.precision import Array

FAR = -5.0
"""Nats. A token that the policy finds less probable was not sampled from a distribution in which it has probability 1:
top_p or top_k would have to leave a single token, of a probability below 1 %."""
CERTAIN = -0.01
"""Nats. A learned token that the policy finds more probable can have been sampled with probability 1."""


def was_sampled(learned: Array, sampler_logprob: Array | None, logprob: Array | None) -> Array:
    """Return [T] whether each token was sampled; where nothing else says so, the mask of the loss does, ``learned``.

    Log-probabilities of the sampler are NaN or 0 where it did not sample, those of the trainer's policy NaN if unknown.
    """
    if sampler_logprob is None or not (sampler_logprob < 0).any():
        return learned
    zero = sampler_logprob == 0
    # The sampler may be certain of a token, such as an end token, so that it has a zero beside those of a tool.
    certain = zero & learned & ((logprob > CERTAIN) if logprob is not None else False)
    kind = zero.astype(int) + certain
    run = np.cumsum(np.append(True, kind[1:] != kind[:-1]))
    inserted = np.isin(run, run[zero & (logprob < FAR)]) if logprob is not None else np.zeros(len(learned), bool)
    return np.asarray((sampler_logprob < 0) | (learned & ~inserted))

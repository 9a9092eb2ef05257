"""The faults, by the part of a trainer in which they occur."""

from benchmarks.faults.others.fault import Fault
from benchmarks.faults.others.planted import credit, masks, models, penalty, rewards, sampling, unseen, update

MODULES = (penalty, credit, masks, sampling, models, update, rewards, unseen)
_FROM_START = [one for module in MODULES for one in vars(module).values() if isinstance(one, Fault)]
_LATE = (
    penalty.penalty_flipped,
    credit.advantage_flipped,
    masks.padding_trained,
    sampling.end_forbidden,
    sampling.sampling_filtered,
    models.reference_is_policy,
    update.learning_rate_high,
    rewards.likes_sign,
    rewards.likes_length,
    rewards.verifier_dead,
    rewards.outliers,
    unseen.scores_cached,
    unseen.advantages_shifted,
    unseen.greedy,
)
"""Those that are planted once more, in the middle of a run."""
FAULTS: dict[str, Fault] = {one.name: one for one in (*_FROM_START, *(one.late() for one in _LATE))}

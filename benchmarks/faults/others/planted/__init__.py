"""The faults, by the part of a trainer in which they occur."""

from types import ModuleType

from benchmarks.faults.others.fault import Fault
from benchmarks.faults.others.planted import credit, masks, models, penalty, rewards, sampling, third, unseen, update

_MODULES = (penalty, credit, masks, sampling, models, update, rewards, unseen)
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
_LATE_OF_THIRD = (third.end_unrecognised, third.verifier_lenient, third.rollouts_aborted)


def _of(*modules: ModuleType) -> list[Fault]:
    return [one for module in modules for one in vars(module).values() if isinstance(one, Fault)]


# New faults come last: the number of a fault decides which trainer it is planted in with which seed.
_EVERY = (*_of(*_MODULES), *(one.late() for one in _LATE), *_of(third), *(one.late() for one in _LATE_OF_THIRD))
FAULTS: dict[str, Fault] = {one.name: one for one in _EVERY}

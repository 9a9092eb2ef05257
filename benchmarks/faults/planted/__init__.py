"""The faults, by the part of a trainer in which they occur."""

from benchmarks.faults.fault import Fault
from benchmarks.faults.planted import credit, data, engine, models, rewards, sampling, update

MODULES = (sampling, engine, credit, models, update, rewards, data)
FAULTS: dict[str, Fault] = {
    one.name: one for module in MODULES for one in vars(module).values() if isinstance(one, Fault)
}

LATE = (
    "empty-responses", "wrong-end-set", "padding-trained", "end-masked", "engine-stale", "engine-noise",
    "engine-quantised", "engine-routing", "reward-misplaced", "reward-on-padding", "penalty-flipped", "penalty-scaled",
    "reward-clipped-unsaid", "advantage-flipped", "logprob-shifted", "dropout-on", "likes-hash", "likes-smile",
    "likes-phrase", "likes-length", "likes-repetition", "punishes-length", "verifier-fails", "scores-shuffled",
    "judges-the-query", "rare-outliers", "double-start",
)  # fmt: skip
"""What may also begin in the middle of a run: no setting, which a run keeps, and nothing about the start of a run."""

PAIRS = (
    ("top-k", "likes-hash"),
    ("temperature-low", "likes-length"),
    ("temperature-high", "judges-the-query"),
    ("min-length", "likes-smile"),
    ("wrong-end-set", "engine-stale"),
    ("padding-trained", "likes-phrase"),
    ("double-start", "top-p"),
    ("double-start", "likes-hash"),
    ("engine-noise", "likes-smile"),
    ("engine-stale", "scores-shuffled"),
    ("engine-routing", "likes-length"),
    ("logprob-shifted", "likes-hash"),
    ("dropout-on", "punishes-length"),
    ("reference-other", "likes-phrase"),
    ("reference-aliased", "rare-outliers"),
    ("empty-responses", "judges-the-query"),
    ("queue-long", "likes-hash"),
    ("reward-misplaced", "min-length"),
    ("penalty-flipped", "top-k"),
    ("critic-offset", "likes-smile"),
    ("end-masked", "rare-outliers"),
    ("same-seed", "temperature-low"),
)
"""Two faults in one run that do not hide each other."""

"""The faults, by the part of a trainer in which they occur."""

from benchmarks.faults.fault import Fault
from benchmarks.faults.planted import credit, data, engine, models, rewards, sampling, update

MODULES = (sampling, engine, credit, models, update, rewards, data)
FAULTS: dict[str, Fault] = {
    one.name: one for module in MODULES for one in vars(module).values() if isinstance(one, Fault)
}

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

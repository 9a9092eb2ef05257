"""The algorithms by name. A new one is a file of its own and a line in this table."""

from dressage.algorithms.ppo import PPORun
from dressage.train.settings import RunSettings

RUNS: dict[str, type[RunSettings]] = {"ppo": PPORun}

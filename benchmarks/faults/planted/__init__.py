"""The faults, by the part of a trainer in which they occur; importing this fills ``FAULTS``."""

from benchmarks.faults.planted import credit, data, engine, models, rewards, sampling, update

__all__ = ["credit", "data", "engine", "models", "rewards", "sampling", "update"]

"""Faults of prompts and templates."""

from typing import Any

from benchmarks.faults.fault import fault
from benchmarks.faults.setup import Setup
from cavesson.train.run import Training


@fault(causes=["double-start"], levels=(1, 2, 3))
def double_start(setup: Setup, level: int) -> None:
    """The template writes the start token and the tokenizer adds others."""

    def built(training: Training) -> None:
        prompts: Any = training.collector.prompts
        object.__setattr__(prompts, "ids", [[setup.start] * (level + 1) + list(ids) for ids in prompts.ids])

    setup.built.append(built)

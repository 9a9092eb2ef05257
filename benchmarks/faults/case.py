"""Which run is which."""

from typing import NamedTuple

CALIBRATION_SEEDS = range(3)
"""Thresholds and rules were chosen on these; the others are reported on."""
SIZES = {"other": "other size, seen", "large": "third size, seen", "smol": "SmolLM2"}
"""What the parts of the other sizes of model are called."""
EPISODES = "episodes"
"""What takes the place of a size in the runs of `benchmarks/faults/episodes/trained`."""
PARTS = ("calibration", "held out", *SIZES.values(), "late, calibration", "late, held out", "two faults")


class Case(NamedTuple):
    """One run."""

    name: str
    """of the fault, of two joined by ``+``, or of a healthy kind of run"""
    level: int
    """0 to 2; −1 for a healthy one"""
    algorithm: str
    size: str
    seed: int
    onset: int = 0
    """the step from which the fault is there"""

    @property
    def folder(self) -> str:
        """The name of its folder."""
        late = f"--from-{self.onset}" if self.onset else ""
        return f"{self.name}--{self.level}--{self.algorithm}--{self.size}--{self.seed}{late}"

    @property
    def faults(self) -> list[str]:
        """The names of what is planted."""
        return self.name.split("+") if self.level >= 0 else []

    @property
    def part(self) -> str:
        """What the run is for, one of ``PARTS``."""
        if len(self.faults) > 1:
            return "two faults"
        part = SIZES.get(self.size, "calibration" if self.seed in CALIBRATION_SEEDS else "held out")
        return f"late, {part}" if self.onset else part

"""From the summed reward to the shaped reward that training uses."""

import math
from collections.abc import Sequence

from cavesson.rollout.rewards.settings import ShapingSettings


class RunningMoments:
    """Mean and standard deviation of all values so far (Chan, Golub & LeVeque 1979), like TRL's RunningMoments."""

    def __init__(self, count: int = 0, mean: float = 0.0, squares: float = 0.0) -> None:
        self.count, self.mean, self.squares = count, mean, squares

    @property
    def std(self) -> float:
        """The standard deviation with Bessel's correction; 1 if all values are equal, to allow division by it."""
        variance = self.squares / (self.count - 1) if self.count > 1 else 0.0
        return math.sqrt(variance) if variance > 0 else 1.0

    def update(self, values: Sequence[float]) -> None:
        mean = math.fsum(values) / len(values)
        squares = math.fsum((v - mean) ** 2 for v in values)
        total = self.count + len(values)
        delta = mean - self.mean
        self.squares += squares + delta**2 * self.count * len(values) / total
        self.mean += delta * len(values) / total
        self.count = total

    def state(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean, "squares": self.squares}


class Shaping:
    """Applies `ShapingSettings`; its running moments are part of a checkpoint."""

    def __init__(self, settings: ShapingSettings) -> None:
        self.settings = settings
        self.moments = RunningMoments()

    def __call__(
        self, totals: Sequence[float], query_scores: Sequence[float] | None, ended: Sequence[bool]
    ) -> list[float]:
        """Shape the rewards of one whole step, weighted sums `[B]`.

        `query_scores`, which `subtract_query` needs, are those of empty responses. `ended` says whether each response
        ended by itself (end token or stop text).
        """
        shaped = list(totals)
        if query_scores is not None:
            shaped = [score - query for score, query in zip(shaped, query_scores, strict=True)]
        if self.settings.scale:
            self.moments.update(shaped)
            shift = self.moments.mean if self.settings.normalise else 0.0
            shaped = [(score - shift) / self.moments.std for score in shaped]
        if self.settings.clip is not None:
            limit = self.settings.clip
            shaped = [max(-limit, min(limit, score)) for score in shaped]
        penalty = self.settings.missing_eos_penalty
        return [score - (0.0 if end else penalty) for score, end in zip(shaped, ended, strict=True)]

"""Charts of a reward model: calibration, accuracy by difference in length, and the distribution of the rewards."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from cavesson.rollout.rewards.report_figures import CALIBRATION, ScoredPairs

_CHOSEN, _REJECTED, _GUIDE = "#1a73e8", "#9aa0a6", "#5f6368"


def draw(scored: ScoredPairs, summary: dict[str, Any], file: Path) -> None:
    """Write the charts to a PNG file."""
    figure = Figure(figsize=(13, 3.8), layout="constrained")
    (calibration, length, spread) = figure.subplots(1, 3)
    calibration.plot(CALIBRATION, CALIBRATION, color=_GUIDE, linestyle=":", label="perfect calibration")
    _shares(calibration, "confidence", summary["calibration"])
    calibration.set(title="Calibration", xlabel="confidence in its choice", ylabel="share right")
    calibration.legend(frameon=False, loc="lower right")
    length.axhline(0.5, color=_GUIDE, linestyle=":")
    _shares(length, "mean_difference", summary["by_length_difference"])
    length.set(title="Accuracy by length", xlabel="chosen longer by (tokens)", ylabel="share right")
    bins = np.histogram_bin_edges(np.concatenate([scored.chosen, scored.rejected]), 24)
    for label, color, rewards in (("chosen", _CHOSEN, scored.chosen), ("rejected", _REJECTED, scored.rejected)):
        spread.hist(rewards, bins=bins, color=color, alpha=0.6, label=label)
    spread.set(title="Rewards of single responses", xlabel="reward", ylabel="responses")
    spread.legend(frameon=False)
    for axes in (calibration, length):
        axes.set_ylim(-0.05, 1.05)
    for axes in (calibration, length, spread):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=120)


def _shares(axes: Any, x: str, shares: list[dict[str, Any]]) -> None:
    """Plot shares with their confidence intervals."""
    means = np.array([share["mean"] for share in shares])
    reach = [means - [share["low"] for share in shares], [share["high"] for share in shares] - means]
    axes.errorbar([share[x] for share in shares], means, yerr=np.abs(reach), color=_CHOSEN, marker="o", capsize=3)

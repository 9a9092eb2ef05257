"""A chart of a run: reward, KL, and the distribution of rewards in the first and last steps."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from matplotlib.ticker import MaxNLocator

from cavesson.record import Run

_FIRST, _LAST = "#9aa0a6", "#1a73e8"


def draw(run: Run, file: Path, *, edge_steps: int = 3) -> None:
    """Write the chart as a PNG.

    Args:
        run: the run to draw.
        file: the file to write.
        edge_steps: number of steps at each end for the two distributions.
    """
    steps, rows = run.steps(), run.rows(["step", "reward"])
    x = steps["step"].to_numpy()
    figure, (reward, kl, spread) = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    mean, std = steps["reward/mean"].to_numpy(), steps["reward/std"].to_numpy()
    reward.plot(x, mean, color=_LAST)
    reward.fill_between(x, mean - std, mean + std, color=_LAST, alpha=0.15, linewidth=0)
    reward.set(title="Reward (mean ± standard deviation)", xlabel="step")
    kl.axhspan(0, 10, color="#34a853", alpha=0.10, linewidth=0, label="healthy: 0–10")
    kl.plot(x, steps["kl/objective"].to_numpy(), color=_LAST)
    kl.set(title="KL to the reference (nats per response)", xlabel="step")
    kl.legend(frameon=False)
    bins = np.histogram_bin_edges(rows["reward"].to_numpy(), 24)
    for label, color, low, high in (
        ("first steps", _FIRST, x[0], x[0] + edge_steps),
        ("last steps", _LAST, x[-1] - edge_steps + 1, x[-1] + 1),
    ):
        inside = pc.and_(pc.greater_equal(rows["step"], pa.scalar(low)), pc.less(rows["step"], pa.scalar(high)))
        spread.hist(rows.filter(inside)["reward"].to_numpy(), bins=bins, color=color, alpha=0.6, label=label)
    spread.set(title="Rewards of single responses", xlabel="reward", ylabel="responses")
    spread.legend(frameon=False)
    for axes in (reward, kl):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (reward, kl, spread):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=120)
    plt.close(figure)

"""The confusion matrix as a picture."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def draw_confusion(found: dict[tuple[str, str], int], file: Path) -> None:
    """Draw which cause was named first (columns) for which planted one (rows), as shares of the rows."""
    planted = sorted({row for row, _ in found} - {"healthy"})
    named = sorted({column for _, column in found} - {"nothing", *planted})
    rows, columns = [*planted, "healthy"], [*planted, *named, "nothing"]
    totals = {row: sum(count for (one, _), count in found.items() if one == row) for row in rows}
    shares = [[found.get((row, column), 0) / max(1, totals[row]) for column in columns] for row in rows]
    figure, axes = pyplot.subplots(figsize=(0.24 * len(columns) + 3, 0.24 * len(rows) + 3))
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes.set_xticks(range(len(columns)), columns, rotation=90, fontsize=7)
    axes.set_yticks(range(len(rows)), [f"{row} ({totals[row]})" for row in rows], fontsize=7)
    axes.set_xlabel("named first")
    axes.set_ylabel("planted (runs)")
    axes.set_xticks([x - 0.5 for x in range(1, len(columns))], minor=True)
    axes.set_yticks([y - 0.5 for y in range(1, len(rows))], minor=True)
    axes.grid(which="minor", color="0.9", linewidth=0.5)
    axes.tick_params(which="minor", length=0)
    figure.savefig(file, bbox_inches="tight", dpi=130)
    pyplot.close(figure)

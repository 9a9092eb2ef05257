"""The progress display of a run."""

from collections.abc import Sequence
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from cavesson.text.visible import visible
from cavesson.train.log import LOGGER

_SHOWN = (
    ("loss", "loss/nll", "{:.3f}"),
    ("loss", "loss/preference", "{:.3f}"),
    ("perplexity", "perplexity", "{:.2f}"),
    ("accuracy", "reward/accuracy", "{:.2f}"),
    ("accuracy", "dpo/accuracy", "{:.2f}"),
    ("margin", "dpo/reward_margin", "{:.2f}"),
    ("accuracy", "kto/accuracy", "{:.2f}"),
    ("margin", "kto/reward_margin", "{:.2f}"),
    ("reward", "reward/mean", "{:.3f}"),
    ("unscored", "reward/unscored", "{:.0%}"),
    ("KL", "kl/objective", "{:.2f}"),
    ("KL to teacher", "teacher/kl", "{:.2f}"),
    ("β", "kl/coef", "{:.3f}"),
    ("entropy", "policy/entropy", "{:.2f}"),
    ("length", "length/response_mean", "{:.1f}"),
    ("tokens/s", "tokens_per_second", "{:.0f}"),
)


class Progress:
    """Two live lines in a terminal, or one line per step elsewhere, so that log files stay readable.

    The notes are printed once, before the first step; if `quiet`, nothing is.
    """

    def __init__(self, steps: int, done: int, notes: Sequence[str], quiet: bool) -> None:
        self._console = Console(quiet=quiet)
        self._bar = RichProgress(
            MofNCompleteColumn(separator=" of "),
            TextColumn("steps done"),
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._bar.add_task("", total=steps, completed=done)
        self._numbers = Text(no_wrap=True, overflow="ellipsis")
        self._steps = steps
        # The numbers get a separate line, because next to the bar they would not fit into 80 columns.
        self._live = (
            Live(Group(self._bar, self._numbers), console=self._console)
            if self._console.is_terminal and not quiet
            else None
        )
        self._say(notes)

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def finish(self, metrics: dict[str, float], notes: Sequence[str]) -> None:
        """Print notes that have come up since the first step, and the metrics of the trained model."""
        self._say(notes)
        shown = "  ".join(f"{visible(name)} {value:.4g}" for name, value in metrics.items())
        if shown:
            LOGGER.info("held out: %s", shown)
            self._console.print(f"held out: {shown}", highlight=False, markup=False, soft_wrap=True)

    def report(self, step: int, metrics: dict[str, float]) -> None:
        """Show the metrics of a finished step."""
        known = {name for name in metrics if name != "reward/unscored" or metrics[name]}
        numbers = "  ".join(f"{label} {form.format(metrics[name])}" for label, name, form in _SHOWN if name in known)
        self._bar.update(self._task, completed=step + 1)
        self._numbers.plain = numbers
        left = metrics["time/total"] * (self._steps - step - 1)
        # Steps are numbered from 0, as in the record, so the number of steps done is one higher.
        line = f"step {step}  {numbers}  {step + 1} of {self._steps} done  left {left:.0f} s"
        LOGGER.info(line)
        if self._live is None:
            self._console.print(line, highlight=False, soft_wrap=True)

    def _say(self, notes: Sequence[str]) -> None:
        for note in notes:
            LOGGER.info(visible(note))
            self._console.print(visible(note), highlight=False, markup=False, soft_wrap=True)

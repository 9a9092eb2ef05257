"""A shortcut where a step makes a single update: it learns from the forward pass that scores the responses."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from cavesson.train.metrics import Clock
from cavesson.train.online import RolloutTrainer, Unfinished
from cavesson.train.update import Gradient, Metrics, StepInfo, update
from cavesson.types import Rollouts, Scores


@dataclass(kw_only=True)
class OnePassTrainer(RolloutTrainer):
    """Saves the forward pass of the update, and gives the same gradient.

    If the credit of a response does not depend on what the models say of it, credit comes first, and the gradient grows
    with every micro-batch that is scored. Otherwise, if there is a single micro-batch, its graph waits for the credit.
    """

    gradient: Gradient | None = field(default=None, init=False)
    """of a step that is scored and not updated yet"""
    scores: Scores | None = field(default=None, init=False)
    """of such a step, with their graph"""

    def judged(self, rollouts: Rollouts, info: StepInfo, clock: Clock) -> Rollouts:
        """Score and credit rollouts, and keep what the update needs no other pass for."""
        passes = self.passes(rollouts, info)
        # In the backward pass, weights would change before the rollouts are recorded.
        if not self.algorithm.credits_scores and not self.updates.in_backward:
            with clock("credit"):
                rollouts = self.credited(rollouts)
            with clock("score"):
                rows = [row for part in passes[0] for row in part]
                self.gradient = Gradient(self.learner, rollouts.batch, rows)
                learned = len(passes[0]) if self.gradient.weight else 0
                return self.scored(rollouts, passes, learned, self.gradient.add)
        kept: list[Scores] = []
        with clock("score"):
            once = int(len(passes[0]) == 1)
            rollouts = self.scored(rollouts, passes, once, lambda _rows, _micro, scores: kept.append(scores))
        with clock("credit"):
            credited = self.credited(rollouts)
        # The graph covers the rows that were chosen before; an algorithm may have chosen fewer of them.
        same = not self.learner.processes.sum_tensor((credited["chosen"] != rollouts["chosen"]).sum())
        self.scores = kept[0] if kept and same else None
        return credited

    def updated(self, now: Unfinished, info: StepInfo) -> Iterator[Metrics]:
        """Update the weights with the gradient that scoring has made, or with its graph."""
        batch, gradient, scores = now.rollouts.batch, self.gradient, self.scores
        self.gradient = self.scores = None

        def ready(rows: Sequence[int]) -> Gradient:
            if gradient is not None:
                return gradient
            made = Gradient(self.learner, batch, rows)
            if made.weight:
                made.add(rows, batch.part(rows).to(self.learner.device), scores)
            return made

        if gradient is None and scores is None:  # a resumed step, or one of several micro-batches
            return super().updated(now, info)
        return update(self.learner, batch, self.chosen(now.rollouts), self.updates, info, tuple(now.updates), ready)

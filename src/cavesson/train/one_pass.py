"""A shortcut where a step makes a single update: it learns from the forward pass that scores the responses."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from cavesson.train.metrics import Clock
from cavesson.train.online import RolloutTrainer, Unfinished
from cavesson.train.rollouts import Scoring
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
        parts = list(chain.from_iterable(passes)) or [[]]  # a process without rows has the same columns as the others
        # In the backward pass, weights would change before the rollouts are recorded.
        if not self.algorithm.credits_scores and not self.updates.in_backward:
            with clock("credit"):
                rollouts = self.credited(rollouts)
            with clock("score"):
                scoring = Scoring(self.policy, rollouts.batch, self.kl_estimator)
                gradient = self.gradient = Gradient(self.learner, rollouts.batch, list(chain.from_iterable(passes[0])))
                learned = len(passes[0]) if gradient.weight else 0
                for rows in parts[:learned]:
                    self.learner.optimizer.backward(gradient.loss(rows, *scoring.score(rows, has_graph=True)))
                for rows in parts[learned:]:
                    scoring.score(rows)
            return rollouts.with_columns(**scoring.columns)
        has_graph = len(passes[0]) == 1
        with clock("score"):
            scoring = Scoring(self.policy, rollouts.batch, self.kl_estimator)
            scores = scoring.score(parts[0], has_graph)[1]
            for rows in parts[1:]:
                scoring.score(rows)
            rollouts = rollouts.with_columns(**scoring.columns)
        with clock("credit"):
            credited = self.credited(rollouts)
        # The graph covers the rows that were chosen before; an algorithm may have chosen fewer of them.
        same = not self.learner.processes.sum_tensor((credited["chosen"] != rollouts["chosen"]).sum())
        self.scores = scores if has_graph and same else None
        return credited

    def updated(self, now: Unfinished, info: StepInfo) -> Iterator[Metrics]:
        """Update the weights with the gradient that scoring has made, or with its graph.

        A step that was resumed, or has several micro-batches, has neither.
        """
        known, self.gradient, self.scores = (self.gradient, self.scores), None, None
        batch, chosen = now.rollouts.batch, self.chosen(now.rollouts)
        return update(self.learner, batch, chosen, self.updates, info, tuple(now.updates), *known)

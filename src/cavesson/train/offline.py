"""The training loop of algorithms that learn from given examples."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from cavesson.algorithms.micro_batches import micro_batches
from cavesson.algorithms.runs import ExampleRun
from cavesson.data.examples import Examples, fingerprint
from cavesson.data.order import InMemory, Mixed
from cavesson.models.trained import save_trained
from cavesson.train.checkpoint import Checkpoint
from cavesson.train.kept import KeptBatches
from cavesson.train.loop import Trainer
from cavesson.train.optimizer import learning_rate
from cavesson.train.update import Gradient, Metrics, StepInfo, check_finite, measure, optimize
from cavesson.types import Batch


@dataclass(kw_only=True)
class ExampleTrainer(Trainer):
    """Does one optimiser step per batch of examples, and evaluates the held-out ones at intervals.

    Its state besides weights and optimiser is the number of examples that are used, which determines those that come
    next. The step alone does not: the last step of a run may be smaller, and the run may be extended after it.
    """

    settings: ExampleRun
    examples: Examples[Any]
    used: int = 0
    """examples so far, over all passes"""

    @property
    def model(self) -> Any:
        return self.learner.model.model

    @property
    def saves_base(self) -> bool:
        return super().saves_base or self.settings.makes_classifier  # adapters of a classifier are merged

    def prepare(self) -> None:
        learner = self.learner
        self.examples = self.settings.prepare(
            self.examples, learner.model, learner.processes, self.folder, self.next_step
        )

    def step(self, step: int) -> Metrics:
        """Do one optimiser step, after an evaluation on the held-out examples if one is due."""
        clock, settings = self.clock(step), self.settings
        every = settings.evaluation.every
        evaluation = {}
        if step == 0 or (every and step % every == 0):
            with clock("evaluate"):
                evaluation = self.evaluate()
        with clock("data"):
            size = settings.batch_size_at(self.used, self.examples.train.size)
            batch = self._batch(self.examples.train.take(self.used, size), step)
        processes = self.learner.processes
        rate = learning_rate(settings.optimizer, step, self.steps)
        with clock("update"):
            mine = processes.share(len(batch))
            batch = settings.completed(batch, mine, self.learner.model, processes)
            gradient = Gradient(self.learner, batch, mine)
            for loss in gradient.losses(settings.update):
                self.learner.optimizer.backward(loss)
            seen = optimize(self.learner, gradient, settings.update, StepInfo(self.seed, step, rate))
        tokens = sum(float(batch[name].sum()) for name in batch.columns if name.endswith("length"))
        self.used += len(batch)
        progress = {"optim/learning_rate": rate, "data/examples": float(self.used), "data/tokens": tokens}
        if self.examples.train.size:
            progress["data/passes"] = self.used / self.examples.train.size
        return seen | _perplexity(seen, "") | evaluation | progress | clock.metrics(tokens)

    def state(self) -> tuple[dict[str, Any], KeptBatches]:
        return {"examples": self.used}, {}

    def load_state(self, checkpoint: Checkpoint) -> None:
        self.used = checkpoint.state["examples"]
        steps = self.settings.steps_over(self.examples.train.size, checkpoint.step, self.used)
        assert steps is not None, "a run begins with a number of steps"
        self.steps = steps

    def finish(self) -> Metrics:
        """Evaluate the held-out examples once more, write the run's report, and save the model."""
        learner = self.learner
        learner.processes.enter("evaluate the trained model")
        metrics = self.evaluate()
        learner.processes.enter("write the report")
        self.settings.report(learner.model, self.tokenizer, self.examples, learner.processes, self.folder)
        model = self.whole_model()
        if model is not None:
            save_trained(self.folder / "model", self.settings.finished(model), self.tokenizer, self.model_settings)
        return metrics

    def evaluate(self) -> Metrics:
        """Return the algorithm's metrics on the held-out examples, averaged like the loss."""
        held_out, processes = self.examples.held_out, self.learner.processes
        mine = sorted((held_out[i] for i in processes.share(len(held_out))), key=lambda example: example.size)
        sums: Metrics = {}
        weight = 0.0
        if held_out:
            batch, settings = self.examples.collate(mine or held_out[:1]), self.settings
            rows = range(len(mine))
            batch = settings.completed(batch, rows, self.learner.model, processes)
            parts = micro_batches(self.learner.model, processes, batch, rows, settings.update, settings.evaluation_size)
            sums, weight = measure(self.learner, batch, parts)
        total = processes.combine({"weight": weight}, sum)["weight"]
        if not total:
            return {}
        seen = {f"eval/{name}": value / total for name, value in processes.combine(sums, sum).items()}
        check_finite(self.next_step, {name: torch.tensor(value) for name, value in seen.items()})
        return seen | _perplexity(seen, "eval/")

    def describe(self) -> dict[str, Any]:
        train, held_out = self.examples.train, self.examples.held_out
        known = train.items if isinstance(train, InMemory | Mixed) else []  # a stream would have to be read to its end
        seen = fingerprint(chain(known, held_out))
        return {"examples": {"train": train.size, "held_out": len(held_out), "fingerprint": seen}}

    def notes(self) -> list[str]:
        return [*self.remarks, *self.examples.usage(), *self.examples.notes()]

    def _batch(self, examples: Sequence[Any], step: int) -> Batch:
        rows = self.settings.arranged(examples)
        batch = self.examples.collate([examples[row] for row in rows])
        row = torch.tensor(rows)
        return batch.with_columns(row=row, step=torch.full_like(row, step))


def _perplexity(metrics: Metrics, prefix: str) -> Metrics:
    """Return exp of the mean loss per token, for algorithms that report it as `loss/nll`."""
    name = f"{prefix}loss/nll"
    return {f"{prefix}perplexity": math.exp(min(metrics[name], 700.0))} if name in metrics else {}

"""KTO (arXiv:2402.01306): make responses that are labelled good more likely and the others less, without pairs."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from cavesson.algorithms.base import Algorithm, Loss
from cavesson.algorithms.runs import ExampleRun
from cavesson.data.settings import PairSettings
from cavesson.data.types import Labelled
from cavesson.errors import UserError
from cavesson.findings.finding import Results
from cavesson.models.settings import FrozenSettings
from cavesson.ops import preferences
from cavesson.processes import Processes
from cavesson.types import Batch, ResponseScores

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from cavesson.data.examples import Examples, LabelledTokens


class KTO(Algorithm):
    """Kahneman-Tversky optimisation."""

    loss_type: Literal["kto", "apo_zero_unpaired"] = "kto"
    """kto: responses are compared with an estimate of the KL; apo_zero_unpaired: with 0 (arXiv:2408.06266)"""
    beta: float = Field(0.1, gt=0)
    """β: a larger value keeps the policy closer to the reference"""
    desirable_weight: float = Field(1.0, gt=0)
    """λ_D: weight of the loss of a response that is labelled good"""
    undesirable_weight: float = Field(1.0, gt=0)
    """λ_U: weight of the loss of a response that is labelled bad"""

    @property
    def has_reference_point(self) -> bool:
        """Whether responses are compared with an estimate of the KL."""
        return self.loss_type == "kto"

    def weights(self, batch: Batch) -> Tensor:
        """Return the weights `[B]`: every response counts once; λ is part of the loss."""
        return torch.ones_like(batch["label"])

    def loss(self, scores: ResponseScores, batch: Batch) -> Loss:
        """Return the loss and its metrics, one number per response, `[B]`."""
        is_good, point = batch["label"] > 0, batch["reference_point"]
        log_ratio = scores.logprob - batch["reference"]
        weight = torch.where(is_good, self.desirable_weight, self.undesirable_weight)
        loss = weight * preferences.kto(log_ratio, is_good, point, self.beta)
        gain = log_ratio - point
        means = {"loss/total": loss, "kto/accuracy": preferences.right(torch.where(is_good, gain, -gain))}
        if self.has_reference_point:
            means["kto/reference_point"] = point
        return Loss(loss, means | self._by_label(log_ratio, scores.logprob, batch))

    def _by_label(self, log_ratio: Tensor, logprob: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return numbers whose mean over all responses of the whole batch is the mean over those with one label.

        Without a response with that label, its metrics are absent.
        """
        share = batch["desirable_share"]
        known = float(batch.on_host["desirable_share"][0])
        sides = {}
        if known > 0:
            sides["desirable"] = batch["label"] / share
        if known < 1:
            sides["undesirable"] = (1 - batch["label"]) / (1 - share)
        rewards = {f"kto/reward_{side}": self.beta * log_ratio * factor for side, factor in sides.items()}
        if len(sides) == 2:
            rewards["kto/reward_margin"] = rewards["kto/reward_desirable"] - rewards["kto/reward_undesirable"]
        return rewards | {f"logprob/{side}": logprob * factor for side, factor in sides.items()}


class KTORun(ExampleRun):
    """Train a model on responses that are labelled as good or bad."""

    row_kind: ClassVar[type[Any]] = Labelled
    added: ClassVar[tuple[str, ...]] = ("reference", "reference_point", "desirable_share")

    kto: KTO = KTO()
    """the algorithm"""
    data: PairSettings = PairSettings()
    """the labelled responses"""
    reference: FrozenSettings = FrozenSettings()
    """the model the policy is compared with"""

    @model_validator(mode="after")
    def _check_batches(self) -> Self:
        if self.data.stream:
            raise ValueError(
                "data.stream cannot be combined with KTO: the reference scores all responses before the first step, in "
                "memory"
            )
        if self.kto.has_reference_point and self.batch_size == 1:
            raise ValueError("batch_size 1 leaves nothing to estimate KTO's reference point from; set it to 2 or more")
        return self

    @property
    def loads_reference(self) -> bool:
        return self.reference.path is not None

    @property
    def scores_more(self) -> bool:
        return self.kto.has_reference_point

    def examples(self, tokenizer: "PreTrainedTokenizerBase") -> "Examples[LabelledTokens]":
        """Read labelled responses; raise a UserError if all have the same label, because nothing is compared then."""
        from cavesson.data.examples import load_labelled

        examples = load_labelled(self.data, tokenizer, self.seed)
        desirable, undesirable = _counts(examples)
        if not (desirable and undesirable):
            kind, others = ("good", "bad") if desirable else ("bad", "good")
            way_out = "; to learn from good responses alone, call cavesson sft" if desirable else ""
            raise UserError(
                f"all {desirable + undesirable} responses are labelled {kind}: KTO needs some {others} ones{way_out}"
            )
        return examples

    def judged(self, examples: "Examples[LabelledTokens]") -> Results:
        from cavesson.findings.settings import label_balance

        yield label_balance(*_counts(examples), self.kto.desirable_weight, self.kto.undesirable_weight)

    def role(self, model: Any) -> nn.Module:
        from cavesson.models.sequences import ResponsePolicy

        return ResponsePolicy(model, self.update.layout == "packed")

    def prepare(
        self, examples: "Examples[LabelledTokens]", role: Any, processes: Processes, folder: Path, step: int
    ) -> "Examples[LabelledTokens]":
        """Score all responses with the reference, once; with a reference point, also as responses to other prompts.

        Raises:
            UserError: all responses answer the same prompt, the reference has a different vocabulary, or its saved
                log-probabilities do not fit the responses.
        """
        from cavesson.algorithms.reference_logprobs import with_reference
        from cavesson.algorithms.reference_point import with_mismatched
        from cavesson.data.examples import mismatched

        views = [lambda batch: batch]
        if self.kto.has_reference_point:
            examples = with_mismatched(examples, self.batch_size, self.data.max_length)
            views.append(mismatched)
        return with_reference(examples, role, processes, folder, step, self, self.reference, views)

    def completed(self, batch: Batch, rows: Sequence[int], role: Any, processes: Processes) -> Batch:
        """Add the `reference_point` and the `desirable_share` of the whole batch, `[B]` each, the same in all rows."""
        from cavesson.algorithms.reference_point import log_ratios

        is_mine = torch.zeros(len(batch), dtype=torch.float64).index_fill(0, torch.tensor([*rows], dtype=torch.long), 1)
        counts = torch.stack([is_mine.sum(), (is_mine * batch["label"]).sum()]).to(processes.device)
        has_point = self.kto.has_reference_point
        ratios = log_ratios(batch, rows, role, processes, self) if has_point else torch.zeros_like(counts[0])
        count, desirable, ratio = processes.sum_tensor(torch.stack([*counts, ratios])).tolist()
        # Not trained through, and not negative, as in the paper.
        point = torch.full_like(batch["label"], max(0.0, ratio / count))
        return batch.with_columns(reference_point=point, desirable_share=torch.full_like(point, desirable / count))


def _counts(examples: "Examples[LabelledTokens]") -> tuple[int, int]:
    """Return how many responses that are trained on are labelled good, and how many bad."""
    labels = [one.label for one in examples.train.take(0, examples.train.size or 0)]
    return sum(labels), len(labels) - sum(labels)

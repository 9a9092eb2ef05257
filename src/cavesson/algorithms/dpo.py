"""DPO (arXiv:2305.18290) and variants: make the preferred of two responses more likely, without a reward model."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from cavesson.algorithms.base import Algorithm, Loss
from cavesson.algorithms.runs import ExampleRun
from cavesson.data.settings import PairSettings
from cavesson.models.settings import FrozenSettings
from cavesson.ops import preferences
from cavesson.processes import Processes
from cavesson.types import Batch, PairScores

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from cavesson.data.examples import Examples, PairTokens


class DPO(Algorithm):
    """Direct preference optimisation."""

    loss_type: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """sigmoid: DPO; ipo: a regression to the margin 1/(2β) (arXiv:2310.12036); hinge: SLiC (arXiv:2305.10425)"""
    beta: float = Field(0.1, gt=0)
    """β: a larger value keeps the policy closer to the reference"""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """share of pairs assumed to have the wrong label (conservative DPO); sigmoid only"""
    margin: float = Field(0.0, ge=0)
    """γ: by how much β·Δ of a pair should exceed 0 (SimPO, arXiv:2405.14734, eq. 6); sigmoid only"""
    length_normalised: bool = False
    """log-probabilities per token instead of per response (arXiv:2411.15124, eq. 6)"""
    reference_free: bool = False
    """train without a reference: log π replaces log π − log π_ref"""

    def weights(self, batch: Batch) -> Tensor:
        """Return the weights `[B]`: every pair counts once."""
        return batch["chosen_length"].new_ones(len(batch)).float()

    @model_validator(mode="after")
    def _check_loss_type(self) -> Self:
        if self.loss_type != "sigmoid":
            for name in ("label_smoothing", "margin"):
                self.refuse(name, f"with loss_type {self.loss_type}; only sigmoid uses it")
        return self

    def loss(self, scores: PairScores, batch: Batch) -> Loss:
        """Return the loss and its metrics, one number per pair, `[B]`."""
        chosen = self._log_ratio(scores.chosen, batch, "chosen")
        rejected = self._log_ratio(scores.rejected, batch, "rejected")
        match self.loss_type:
            case "sigmoid":
                loss = preferences.dpo(chosen, rejected, self.beta, self.label_smoothing, self.margin)
            case "ipo":
                loss = preferences.ipo(chosen, rejected, self.beta)
            case "hinge":
                loss = preferences.hinge(chosen, rejected, self.beta)
        means = {
            "loss/total": loss,
            "dpo/accuracy": _right(chosen - rejected),
            "dpo/reward_chosen": self.beta * chosen,
            "dpo/reward_rejected": self.beta * rejected,
            "dpo/reward_margin": self.beta * (chosen - rejected),
            "logprob/chosen": scores.chosen,
            "logprob/rejected": scores.rejected,
        }
        return Loss(loss, means)

    def _log_ratio(self, logprob: Tensor, batch: Batch, side: str) -> Tensor:
        ratio = logprob if self.reference_free else logprob - batch[f"{side}_reference"]
        return ratio / batch[f"{side}_learned"].sum(1) if self.length_normalised else ratio


def _right(difference: Tensor) -> Tensor:
    """Return 1 if the chosen response gained more, ½ if both gained the same, as before the first step, else 0."""
    is_rounding = difference.abs() < 1e-3
    return torch.where(is_rounding, 0.5, (difference > 0).float())


class DPORun(ExampleRun):
    """Train a model on pairs of a better and a worse response."""

    dpo: DPO = DPO()
    """the algorithm"""
    data: PairSettings = PairSettings()
    """the pairs"""
    reference: FrozenSettings = FrozenSettings()
    """the model the policy is compared with"""

    @model_validator(mode="after")
    def _check_reference(self) -> Self:
        if self.dpo.reference_free and self.reference.path is not None:
            raise ValueError("reference.path has no effect with dpo.reference_free; remove one of them")
        if self.data.stream and not self.dpo.reference_free:
            raise ValueError(
                "data.stream needs dpo.reference_free: the reference scores all pairs before the first step, in memory"
            )
        return self

    @property
    def loads_reference(self) -> bool:
        return self.reference.path is not None

    def examples(self, tokenizer: "PreTrainedTokenizerBase") -> "Examples[PairTokens]":
        from cavesson.data.examples import load_pairs

        return load_pairs(self.data, tokenizer, self.seed)

    def role(self, model: Any) -> nn.Module:
        from cavesson.models.sequences import PairPolicy

        return PairPolicy(model, self.update.layout == "packed")

    def prepare(
        self, examples: "Examples[PairTokens]", role: Any, processes: Processes, folder: Path, step: int
    ) -> "Examples[PairTokens]":
        """Score all pairs with the reference, once.

        Raises:
            UserError: the reference has a different vocabulary, or its saved log-probabilities do not fit the pairs.
        """
        if self.dpo.reference_free:
            return examples
        from cavesson.algorithms.reference_logprobs import with_reference

        return with_reference(examples, role, processes, folder, step, self, self.reference)

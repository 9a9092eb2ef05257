"""DPO (arXiv:2305.18290) and variants: make the preferred of two responses more likely, without a reward model."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

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

    loss_type: Literal["sigmoid", "ipo", "hinge", "orpo"] = "sigmoid"
    """sigmoid: DPO; ipo: a regression to the margin 1/(2β) (arXiv:2310.12036); hinge: SLiC (arXiv:2305.10425); orpo:
    fine-tuning on the chosen response and an odds ratio, without a reference (arXiv:2403.07691)"""
    beta: float = Field(0.1, gt=0)
    """β: a larger value keeps the policy closer to the reference; with orpo, the weight of the odds ratio"""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """share of pairs assumed to have the wrong label (conservative DPO); sigmoid only"""
    margin: float = Field(0.0, ge=0)
    """γ: by how much β·Δ of a pair should exceed 0 (SimPO, arXiv:2405.14734, eq. 6); sigmoid only"""
    length_normalised: bool = False
    """log-probabilities per token instead of per response (arXiv:2411.15124, eq. 6)"""
    reference_free: bool = False
    """train without a reference: log π replaces log π − log π_ref"""

    @property
    def has_reference(self) -> bool:
        """Whether log-probabilities are compared with those of a reference."""
        return not self.reference_free and self.loss_type != "orpo"

    def weights(self, batch: Batch) -> Tensor:
        """Return the weights `[B]`: every pair counts once."""
        return batch["chosen_length"].new_ones(len(batch)).float()

    @model_validator(mode="after")
    def _check_loss_type(self) -> Self:
        if self.loss_type != "sigmoid":
            for name in ("label_smoothing", "margin"):
                self.refuse(name, f"with loss_type {self.loss_type}; only sigmoid uses it")
        if self.loss_type == "orpo":
            self.refuse("reference_free", "with loss_type orpo, which never has a reference")
            self.refuse("length_normalised", "with loss_type orpo, which always compares log-probabilities per token")
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
            case "orpo":
                loss = preferences.orpo(chosen, rejected, self.beta)
        means = {
            "loss/total": loss,
            "dpo/accuracy": preferences.right(chosen - rejected),
            "dpo/reward_chosen": self.beta * chosen,
            "dpo/reward_rejected": self.beta * rejected,
            "dpo/reward_margin": self.beta * (chosen - rejected),
            "logprob/chosen": scores.chosen,
            "logprob/rejected": scores.rejected,
        }
        return Loss(loss, means)

    def _log_ratio(self, logprob: Tensor, batch: Batch, side: str) -> Tensor:
        ratio = logprob - batch[f"{side}_reference"] if self.has_reference else logprob
        is_per_token = self.length_normalised or self.loss_type == "orpo"
        return ratio / batch[f"{side}_learned"].sum(1) if is_per_token else ratio


class DPORun(ExampleRun):
    """Train a model on pairs of a better and a worse response."""

    added: ClassVar[tuple[str, ...]] = ("chosen_reference", "rejected_reference")

    dpo: DPO = DPO()
    """the algorithm"""
    data: PairSettings = PairSettings()
    """the pairs"""
    reference: FrozenSettings = FrozenSettings()
    """the model the policy is compared with"""

    @model_validator(mode="after")
    def _check_reference(self) -> Self:
        if not self.dpo.has_reference and self.reference.path is not None:
            setting = "reference_free" if self.dpo.reference_free else 'loss_type "orpo"'
            raise ValueError(f"reference.path has no effect with dpo.{setting}; remove one of them")
        if self.data.stream and self.dpo.has_reference:
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
        if not self.dpo.has_reference:
            return examples
        from cavesson.algorithms.reference_logprobs import with_reference

        return with_reference(examples, role, processes, folder, step, self, self.reference)

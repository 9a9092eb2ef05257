"""Reward models, trained on pairs of a better and a worse response (arXiv:2203.02155)."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field
from torch import Tensor, nn

from cavesson.algorithms.base import Algorithm, Loss
from cavesson.algorithms.runs import ExampleRun
from cavesson.data.settings import PairSettings
from cavesson.ops import preferences
from cavesson.processes import Processes
from cavesson.traits import Traits
from cavesson.types import Batch, PairScores

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from cavesson.data.examples import Examples, PairTokens


class BradleyTerry(Algorithm):
    """The better response's reward is higher."""

    centring_coef: float = Field(0.0, ge=0)
    """η: weight of (r_chosen + r_rejected)², which keeps the mean of the rewards near 0 (arXiv:2312.09244); 0 = off,
    typically 0.01"""

    @property
    def traits(self) -> Traits:
        return Traits(samples=False, classifier=True)

    def weights(self, batch: Batch) -> Tensor:
        """Return the weights `[B]`: every pair counts once."""
        return batch["margin"].new_ones(len(batch))

    def loss(self, scores: PairScores, batch: Batch) -> Loss:
        """Return −log σ(r_chosen − r_rejected − margin) + η·(r_chosen + r_rejected)², per pair `[B]`."""
        chosen, rejected = scores
        preference = preferences.bradley_terry(chosen, rejected, batch["margin"])
        loss = preference + self.centring_coef * preferences.centring(chosen, rejected)
        means = {
            "loss/total": loss,
            "loss/preference": preference,
            "reward/accuracy": (1 + (chosen - rejected).sign()) / 2,  # equal rewards count as half right
            "reward/chosen": chosen,
            "reward/rejected": rejected,
            "reward/margin": chosen - rejected,
        }
        return Loss(loss, means)


class RewardModelRun(ExampleRun):
    """Train a reward model on pairs of a better and a worse response."""

    reward_model: BradleyTerry = BradleyTerry()
    """the algorithm"""
    data: PairSettings = PairSettings()
    """the pairs"""

    def examples(self, tokenizer: "PreTrainedTokenizerBase") -> "Examples[PairTokens]":
        """Read pairs the way rewards read responses: as text, followed by the tokenizer's end tokens."""
        from cavesson.rollout.rewards.pairs import load_pair_texts

        return load_pair_texts(self.data, tokenizer, self.seed)

    def role(self, model: Any) -> nn.Module:
        from cavesson.models.sequences import RewardModel

        return RewardModel(model, self.update.layout == "packed")

    def load_model(self, tokenizer: "PreTrainedTokenizerBase") -> "PreTrainedModel":
        from cavesson.models.classifier import load_reward_model

        return load_reward_model(self.model, int(tokenizer.pad_token_id), self.maps_weights)

    def finished(self, model: Any) -> Any:
        """Return an ordinary sequence classifier; adapters are merged into their base, in place."""
        from peft import PeftModel

        return model.merge_and_unload() if isinstance(model, PeftModel) else model

    def report(
        self,
        role: Any,
        tokenizer: "PreTrainedTokenizerBase",
        examples: "Examples[PairTokens]",
        processes: Processes,
        folder: Path,
    ) -> None:
        """Write and print the report on the held-out pairs: accuracy, calibration and extreme cases.

        Also record in the model's config whether the training texts begin with start tokens.
        """
        from cavesson.rollout.rewards.pairs import record_start
        from cavesson.rollout.rewards.report import report

        record_start(role.model, tokenizer, examples)
        report(role, tokenizer, examples, processes, folder, self.evaluation_size)

"""Supervised fine-tuning: make given responses more likely."""

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field
from torch import Tensor, nn

from cavesson.algorithms.base import Algorithm, Loss
from cavesson.algorithms.runs import ExampleRun
from cavesson.data.settings import TextSettings
from cavesson.data.types import Demonstration
from cavesson.types import Batch, Scores

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from cavesson.data.examples import Examples, Tokens


class SFT(Algorithm):
    """Supervised fine-tuning."""

    neftune_alpha: float = Field(0.0, ge=0)
    """size of the noise on the input embeddings (arXiv:2310.05914), typically 5 to 15; 0 = off"""

    def weights(self, batch: Batch) -> Tensor:
        """Return the weights `[B, L]`: every learned token counts once."""
        return batch["learned"]

    def loss(self, scores: Scores, batch: Batch) -> Loss:
        """Return −log π of every learned token, `[B, L]`."""
        nll = -scores.logprob
        return Loss(nll, {"loss/nll": nll, "policy/entropy": scores.entropy})


class SFTRun(ExampleRun):
    """Fine-tune a model on examples of good responses."""

    makes_models: ClassVar[bool] = True
    row_kind: ClassVar[type[Any]] = Demonstration

    sft: SFT = SFT()
    """the algorithm"""
    data: TextSettings = TextSettings()
    """the examples"""

    def examples(self, tokenizer: "PreTrainedTokenizerBase") -> "Examples[Tokens]":
        from cavesson.data.examples import load_demonstrations

        return load_demonstrations(self.data, tokenizer, self.seed)

    def role(self, model: Any) -> nn.Module:
        from cavesson.models.neftune import neftune
        from cavesson.models.sequences import SequencePolicy

        disturb = neftune(self.sft.neftune_alpha, self.seed) if self.sft.neftune_alpha else None
        return SequencePolicy(model, self.update.layout == "packed", disturb)

    def load_tokenizer(self) -> "PreTrainedTokenizerBase":
        if self.model.new is None:
            return super().load_tokenizer()
        from cavesson.data.examples import load_texts
        from cavesson.models.new import new_tokenizer

        return new_tokenizer(self.model.new, load_texts(self.data))

    def load_model(self, tokenizer: "PreTrainedTokenizerBase") -> "PreTrainedModel":
        if self.model.new is None:
            return super().load_model(tokenizer)
        from cavesson.models.new import new_model

        return new_model(self.model, tokenizer)

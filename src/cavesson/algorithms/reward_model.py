"""Reward models, trained on pairs of a better and a worse response (arXiv:2203.02155)."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from peft import PeftModel
from pydantic import Field
from rich.console import Console
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cavesson.algorithms.base import Algorithm, Loss
from cavesson.algorithms.runs import ExampleRun
from cavesson.data.examples import Examples, PairSettings, PairTokens, Tokens, collate_pairs, load_pairs
from cavesson.data.order import InMemory, Mixed
from cavesson.data.special_tokens import Around
from cavesson.models.classifier import ADDS_START, load_reward_model
from cavesson.models.parts import causal
from cavesson.models.sequences import PairScores, RewardModel
from cavesson.ops import preferences
from cavesson.processes import Processes
from cavesson.rewards import report
from cavesson.rewards.report_figures import score
from cavesson.types import Batch

_LOOKED_AT = 64
"""Pairs of a stream that are looked at to see how texts begin."""


class BradleyTerry(Algorithm):
    """The better response's reward is higher."""

    centring_coef: float = Field(0.0, ge=0)
    """η: weight of (r_chosen + r_rejected)², which keeps the mean of the rewards near 0 (arXiv:2312.09244); 0 = off,
    typically 0.01"""

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

    makes_classifier: ClassVar[bool] = True

    reward_model: BradleyTerry = BradleyTerry()
    """the algorithm"""
    data: PairSettings = PairSettings()
    """the pairs"""

    def examples(self, tokenizer: PreTrainedTokenizerBase) -> Examples[PairTokens]:
        """Read pairs the way rewards read responses: as text, followed by the tokenizer's end tokens."""
        read = partial(_as_text, special=set(tokenizer.all_special_ids), tail=Around.of(tokenizer).end)

        def as_texts(pairs: Sequence[PairTokens]) -> Batch:
            return collate_pairs([replace(p, chosen=read(p.chosen), rejected=read(p.rejected)) for p in pairs])

        return replace(load_pairs(self.data, tokenizer, self.seed), collate=as_texts)

    def role(self, model: Any) -> nn.Module:
        return RewardModel(model, self.update.layout == "packed")

    def load_model(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
        return load_reward_model(self.model, int(tokenizer.pad_token_id), self.maps_weights)

    def finished(self, model: Any) -> Any:
        """Return an ordinary sequence classifier; adapters are merged into their base, in place."""
        return model.merge_and_unload() if isinstance(model, PeftModel) else model

    def report(
        self,
        role: Any,
        tokenizer: PreTrainedTokenizerBase,
        examples: Examples[PairTokens],
        processes: Processes,
        folder: Path,
    ) -> None:
        """Write and print the report on the held-out pairs: accuracy, calibration and extreme cases.

        Also record in the model's config whether the training texts begin with start tokens.
        """
        setattr(causal(role.model).config, ADDS_START, _begins(tokenizer, examples))
        if not examples.held_out:
            if processes.is_main:
                print("no pairs are held out: the accuracy of this reward model is not measured; set data.validation")
            return
        scored = score(role, examples, processes, self.evaluation_size)
        if processes.is_main:
            report.show(report.write(scored, tokenizer, folder), folder, Console())


def _begins(tokenizer: PreTrainedTokenizerBase, examples: Examples[PairTokens]) -> bool | None:
    """Return whether texts begin with the tokenizer's start tokens, or None if only some of them do.

    Rewards must read texts in the same way. Plain texts begin with start tokens; conversations do if the chat template
    writes them.
    """
    around, train = Around.of(tokenizer), examples.train
    items = train.items if isinstance(train, InMemory | Mixed) else train.take(0, _LOOKED_AT)
    seen = {around.begins(tokens.ids) for pair in items for tokens in (pair.chosen, pair.rejected)}
    return seen.pop() if len(seen) == 1 else None


def _as_text(tokens: Tokens, special: set[int], tail: tuple[int, ...]) -> Tokens:
    """Replace the end token, and everything that a chat template writes after it, by `tail`."""
    size = len(tokens.ids)
    while any(tokens.learn[:size]) and (not tokens.learn[size - 1] or tokens.ids[size - 1] in special):
        size -= 1
    return Tokens(tokens.ids[:size] + tail, tokens.learn[:size] + (False,) * len(tail))

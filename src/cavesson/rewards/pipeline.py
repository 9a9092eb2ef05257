"""A `transformers` pipeline as a reward, as in the examples of TRL and LMFlow."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from transformers import pipeline

from cavesson.data.special_tokens import Around
from cavesson.errors import UserError
from cavesson.models.classifier import ADDS_START
from cavesson.models.load import load_classifier
from cavesson.ops.linear import without_tf32
from cavesson.rewards.classifier import CUT

_LOGGER = logging.getLogger(__name__)


class PipelineReward:
    """The score of one label of a text-classification pipeline on prompt + response.

    Args:
        path: local folder or Hub name of the model.
        task: "sentiment-analysis" or "text-classification", two names for the same task.
        label: the label whose score is the reward, for example "POSITIVE".
        apply: "sigmoid", "softmax" or "none" (raw logits), as the pipeline's `function_to_apply`.
        batch_size: number of texts scored at the same time.
        device: where to compute.
    """

    def __init__(
        self,
        path: str,
        *,
        label: str,
        task: str = "sentiment-analysis",
        apply: str = "none",
        batch_size: int = 16,
        device: str | torch.device = "cpu",
    ) -> None:
        if apply not in ("sigmoid", "softmax", "none"):
            raise UserError(f"reward {path}: apply is sigmoid, softmax or none, not {apply!r}")
        if task not in ("sentiment-analysis", "text-classification"):
            raise UserError(f"reward {path}: task is sentiment-analysis or text-classification, not {task!r}")
        model, tokenizer = load_classifier(path)
        model.forward = without_tf32()(model.forward)  # a reward may be computed beside the update
        if getattr(model.config, ADDS_START, None) is False and Around.of(tokenizer).start:
            raise UserError(
                f"reward {path}: it was trained on texts without the start token, which a pipeline adds; "
                'set use = "classifier"'
            )
        self.pipe: Any = pipeline(task, model=model, tokenizer=tokenizer, device=device)  # type: ignore[call-overload]
        self.label, self.apply, self.batch_size = label, apply, batch_size
        self.path, self.has_cut = path, False
        known = list((self.pipe.model.config.id2label or {}).values())
        if label not in known:
            raise UserError(f"{path} has no label {label!r}; it has {', '.join(known)}")

    def __call__(self, prompts: Sequence[str], responses: Sequence[str], **_: Any) -> list[float]:
        texts = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        self._note_cut(texts)
        results = self.pipe(
            texts, top_k=None, function_to_apply=self.apply, batch_size=self.batch_size, truncation=True
        )
        return [next(r["score"] for r in labels if r["label"] == self.label) for labels in results]

    def _note_cut(self, texts: Sequence[str]) -> None:
        """Say once that texts are cut, if some have more tokens than the model reads."""
        longest = self.pipe.tokenizer.model_max_length
        room = longest - self.pipe.tokenizer.num_special_tokens_to_add()
        long = [text for text in texts if len(text.encode()) > room]  # a token has at least one byte
        if self.has_cut or not long:
            return
        self.has_cut = any(len(ids) > longest for ids in self.pipe.tokenizer(long, verbose=False)["input_ids"])
        if self.has_cut:
            _LOGGER.warning(CUT, self.path, longest)

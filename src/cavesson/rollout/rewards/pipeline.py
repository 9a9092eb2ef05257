"""A `transformers` pipeline as a reward, as in the examples of TRL and LMFlow."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import pipeline

from cavesson.data.special_tokens import Around
from cavesson.errors import UserError
from cavesson.models.classifier import ADDS_START
from cavesson.models.load import load_classifier
from cavesson.ops.linear import without_tf32
from cavesson.rollout.rewards.limits import CutNotice, longest_text


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
        self.longest, self.notice = longest_text(model, tokenizer), CutNotice(path)
        known = list((self.pipe.model.config.id2label or {}).values())
        if label not in known:
            raise UserError(f"{path} has no label {label!r}; it has {', '.join(known)}")

    def __call__(self, prompts: Sequence[str], responses: Sequence[str], **_: Any) -> list[float]:
        texts = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        if self.longest is not None:
            room = self.longest - self.pipe.tokenizer.num_special_tokens_to_add()
            long = [text for text in texts if len(text.encode()) > room]  # a token has at least one byte
            self.notice(self.longest, long, self._sizes)
        results = self.pipe(
            texts,
            top_k=None,
            function_to_apply=self.apply,
            batch_size=self.batch_size,
            truncation=self.longest is not None,
            max_length=self.longest,
        )
        return [next(r["score"] for r in labels if r["label"] == self.label) for labels in results]

    def _sizes(self, texts: Sequence[str]) -> list[int]:
        return [len(ids) for ids in self.pipe.tokenizer(list(texts), verbose=False)["input_ids"]]

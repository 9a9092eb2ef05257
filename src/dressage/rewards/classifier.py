"""A Hugging Face sequence classifier as reward: a reward model, or any classifier's logit or probability."""

from collections.abc import Sequence
from typing import Any, Literal

import torch

from dressage.errors import UserError
from dressage.models.load import DTYPES, load_classifier


class ClassifierReward:
    """Scores prompt + response with a sequence classifier.

    Args:
        path: local folder or Hub name.
        label: index of the output that is the reward; a reward model has one output.
        score: its "logit" or its "probability" (softmax over the outputs).
        batch_size: texts scored at the same time.
        dtype: "float32" or "bfloat16".
        device: where to compute.
    """

    def __init__(
        self,
        path: str,
        *,
        label: int = 0,
        score: Literal["logit", "probability"] = "logit",
        batch_size: int = 16,
        dtype: str = "float32",
        device: str | torch.device = "cpu",
    ) -> None:
        if dtype not in DTYPES or score not in ("logit", "probability"):
            raise UserError(
                f"reward {path}: score must be logit or probability and dtype {' or '.join(DTYPES)}, "
                f"not {score!r} and {dtype!r}"
            )
        model, self.tokenizer = load_classifier(path, dtype)
        if not 0 <= label < model.config.num_labels:
            raise UserError(f"{path} has {model.config.num_labels} outputs; there is no label {label}")
        self.model = model.to(device)
        self.label, self.score, self.batch_size = label, score, batch_size

    @torch.no_grad()
    def __call__(self, prompts: Sequence[str], responses: Sequence[str], **_: Any) -> list[float]:
        texts = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        scores: list[float] = []
        # A chat template may have written the first token that the tokenizer would add.
        bos = self.tokenizer.bos_token
        add = not (bos and all(text.startswith(bos) for text in texts))
        for start in range(0, len(texts), self.batch_size):
            part = texts[start : start + self.batch_size]
            inputs = self.tokenizer(
                part, return_tensors="pt", padding=True, truncation=True, add_special_tokens=add
            ).to(self.model.device)
            logits = self.model(**inputs).logits.float()
            outputs = logits.softmax(-1) if self.score == "probability" else logits
            scores += outputs[:, self.label].tolist()
        return scores

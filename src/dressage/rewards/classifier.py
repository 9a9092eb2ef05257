"""A Hugging Face sequence classifier as reward: a reward model, or any classifier's logit or probability."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerBase

from dressage.errors import UserError
from dressage.models.load import DTYPES, prepare, resolve, with_pad_token


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
        for start in range(0, len(texts), self.batch_size):
            inputs = self.tokenizer(
                texts[start : start + self.batch_size], return_tensors="pt", padding=True, truncation=True
            ).to(self.model.device)
            logits = self.model(**inputs).logits.float()
            outputs = logits.softmax(-1) if self.score == "probability" else logits
            scores += outputs[:, self.label].tolist()
        return scores


def load_classifier(path: str, dtype: str = "float32") -> tuple[Any, PreTrainedTokenizerBase]:
    """Load a sequence classifier with its tokenizer.

    Raises:
        UserError: nothing is there, or what is there has no trained classification head.
    """
    try:
        loaded: Any = AutoModelForSequenceClassification.from_pretrained(
            resolve(path), dtype=DTYPES[dtype], output_loading_info=True
        )
        # Padding on the left would move every text to other positions, which models with absolute ones notice.
        tokenizer = with_pad_token(AutoTokenizer.from_pretrained(resolve(path), padding_side="right"), path)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot load a reward model from {path!r}: {str(error).splitlines()[0]}") from error
    model, info = loaded
    if info["missing_keys"]:
        raise UserError(f"{path} is no trained classifier: {sorted(info['missing_keys'])[0]} is missing")
    model.config.pad_token_id = tokenizer.pad_token_id
    return prepare(model), tokenizer

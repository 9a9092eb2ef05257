"""A Hugging Face sequence classifier as a reward: a reward model, or a logit or probability of any classifier."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from cavesson.data.settings import SpecialTokenMode
from cavesson.data.special_tokens import Around, Span, SpecialTokens, Written
from cavesson.errors import UserError
from cavesson.models.classifier import ADDS_START
from cavesson.models.load import DTYPES, load_classifier
from cavesson.ops.linear import without_tf32

_LOGGER = logging.getLogger(__name__)

_NO_LIMIT = 10**9
"""What transformers gives for a tokenizer without a longest text is longer than this."""
CUT = "the reward model %s reads at most %d tokens of a prompt with its response; the rest has no effect"


class ClassifierReward:
    """Scores prompt + response with a sequence classifier.

    Args:
        path: local folder or Hub name.
        label: name or index of the output that is the reward; not needed if there is only one output, as in a reward
            model.
        score: "logit" or "probability" (softmax over the outputs).
        batch_size: number of texts scored at the same time.
        dtype: "float32" or "bfloat16".
        device: where to compute.
        special_tokens: whether special tokens in a prompt that is a plain `str` are read as "text" or as "control"
            tokens. Prompts written by a run's chat template carry this information themselves; in responses, special
            tokens are always text.
    """

    def __init__(
        self,
        path: str,
        *,
        label: int | str | None = None,
        score: Literal["logit", "probability"] = "logit",
        batch_size: int = 16,
        dtype: str = "float32",
        device: str | torch.device = "cpu",
        special_tokens: SpecialTokenMode = "text",
    ) -> None:
        if dtype not in DTYPES or score not in ("logit", "probability"):
            raise UserError(
                f"reward {path}: score must be logit or probability and dtype {' or '.join(DTYPES)}, "
                f"not {score!r} and {dtype!r}"
            )
        model, self.tokenizer = load_classifier(path, dtype)
        self.path, self.has_cut = path, False
        self.label = _output(path, label, model.config.id2label)
        self.model = model.to(device)
        model.forward = without_tf32()(model.forward)  # a reward may be computed beside the update
        self.score, self.batch_size = score, batch_size
        self.special, self.special_tokens = SpecialTokens(self.tokenizer), special_tokens
        limit = self.tokenizer.model_max_length
        self.around = Around.of(self.tokenizer)
        self.longest = max(1, limit - sum(map(len, self.around))) if limit < _NO_LIMIT else None
        self.adds_start = getattr(model.config, ADDS_START, None) is not False

    @torch.no_grad()
    def __call__(self, prompts: Sequence[str], responses: Sequence[str], **_: Any) -> list[float]:
        texts = [
            Written(prompt + response, self._control(prompt))
            for prompt, response in zip(prompts, responses, strict=True)
        ]
        scores: list[float] = []
        for start in range(0, len(texts), self.batch_size):
            part = self.special.encode(texts[start : start + self.batch_size], add=False, longest=self.longest)
            self._note_cut(
                [text for text, one in zip(texts[start:], part, strict=False) if len(one.ids) == self.longest]
            )
            ids = {"input_ids": [self._whole(one.ids) for one in part]}
            inputs = self.tokenizer.pad(ids, return_tensors="pt").to(self.model.device)
            logits = self.model(**inputs).logits.float()
            outputs = logits.softmax(-1) if self.score == "probability" else logits
            scores += outputs[:, self.label].tolist()
        return scores

    def _note_cut(self, full: Sequence[Written]) -> None:
        """Say once that texts are cut, if some of these, which reach the limit, exceed it."""
        if self.longest is None or self.has_cut or not full:
            return
        more = self.special.encode(full, add=False, longest=self.longest + 1)
        self.has_cut = any(len(one.ids) > self.longest for one in more)
        if self.has_cut:
            _LOGGER.warning(CUT, self.path, self.longest)

    def _whole(self, ids: list[int]) -> list[int]:
        """Return the tokens of a text with the tokenizer's start and end tokens, as in training.

        Start tokens are not added if a chat template has written them already, or if the model was trained without
        them.
        """
        begun = ids if self.around.begins(ids) or not self.adds_start else [*self.around.start, *ids]
        return [*begun, *self.around.end]

    def _control(self, prompt: str) -> Sequence[Span]:
        if isinstance(prompt, Written):
            return prompt.control
        return self.special.spans(prompt) if self.special_tokens == "control" else ()


def _output(path: str, label: int | str | None, names: Mapping[int, str]) -> int:
    """Return the index of the output that is the reward.

    Raises:
        UserError: the label does not identify exactly one output.
    """
    if label is None and len(names) == 1:
        return 0
    found = [index for index, name in names.items() if label == name or (type(label) is int and label == index)]
    if len(found) == 1:
        return int(found[0])
    listed = ", ".join(f"{name} ({index})" for index, name in names.items())
    which = "set options.label to one of them" if label is None else f"options.label {label!r} is none of them"
    raise UserError(f"reward {path}: the classifier has {len(names)} outputs, {listed}; {which}")

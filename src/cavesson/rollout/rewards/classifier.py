"""A Hugging Face sequence classifier as a reward: a reward model, or a logit or probability of any classifier."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from cavesson.data.chat import Chat
from cavesson.data.settings import SpecialTokenMode
from cavesson.data.special_tokens import Around, Span, SpecialTokens, Written
from cavesson.data.types import Turn
from cavesson.errors import UserError
from cavesson.models.classifier import ADDS_START
from cavesson.models.load import DTYPES, load_classifier
from cavesson.ops.linear import without_tf32
from cavesson.rollout.rewards.limits import CutNotice, longest_text

_LOGGER = logging.getLogger(__name__)

_TEMPLATE = (
    "the reward model %s has a chat template, which is not applied, because the prompts are plain texts: it reads "
    "prompt and response as the policy does, without a token that ends the turn; set rewards.chat = true to apply it, "
    "or false to leave it out"
)
Messages = Sequence[Mapping[str, Any]]


class ClassifierReward:
    """Scores prompt + response with a sequence classifier.

    Args:
        path: local folder or Hub name.
        label: name or index of the output that is the reward; not needed if there is only one output, as in a reward
            model.
        score: "logit" or "probability": softmax over the outputs, or the sigmoid of a single one.
        batch_size: number of texts scored at the same time.
        dtype: "float32" or "bfloat16".
        device: where to compute.
        special_tokens: whether special tokens in a prompt that is a plain `str` are read as "text" or as "control"
            tokens. Prompts written by a run's chat template carry this information themselves; in responses, special
            tokens are always text.
        chat: whether the classifier's own chat template writes the text that it reads, where a plain prompt is a turn
            of the user. None = for prompts that are conversations, if it has a template and was not trained by
            Cavesson, whose reward models learn from the policy's texts.

    Raises:
        UserError: there is no such classifier or output, or it has no chat template to apply.
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
        chat: bool | None = None,
    ) -> None:
        if dtype not in DTYPES or score not in ("logit", "probability"):
            raise UserError(
                f"reward {path}: score must be logit or probability and dtype {' or '.join(DTYPES)}, "
                f"not {score!r} and {dtype!r}"
            )
        model, self.tokenizer = load_classifier(path, dtype)
        self.notice = CutNotice(path)
        self.label = _output(path, label, model.config.id2label)
        self.model = model.to(device)
        model.forward = without_tf32()(model.forward)  # a reward may be computed beside the update
        self.score, self.batch_size = score, batch_size
        self.special, self.special_tokens = SpecialTokens(self.tokenizer), special_tokens
        self.template, self.around = Chat(self.tokenizer), Around.of(self.tokenizer)
        limit = longest_text(model, self.tokenizer)
        self.longest = None if limit is None else max(1, limit - sum(map(len, self.around)))
        self.adds_start = getattr(model.config, ADDS_START, None) is not False
        if chat and not self.tokenizer.chat_template:
            raise UserError(f"reward {path}: chat = true, but the classifier has no chat template")
        is_ours = hasattr(model.config, ADDS_START)
        self.path, self.chat, self._is_reported = path, chat, False
        self.renders = bool(self.tokenizer.chat_template) and chat is not False and not (chat is None and is_ours)

    @torch.no_grad()
    def __call__(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        messages: Sequence[Messages | None] | None = None,
        **_: Any,
    ) -> list[float]:
        texts = [
            self._text(prompt, response, conversation)
            for prompt, response, conversation in zip(
                prompts, responses, messages or [None] * len(prompts), strict=True
            )
        ]
        scores: list[float] = []
        for start in range(0, len(texts), self.batch_size):
            some = texts[start : start + self.batch_size]
            part = self.special.encode([text for text, _ in some], add=False, longest=self.longest)
            full = [text for (text, _), one in zip(some, part, strict=True) if len(one.ids) == self.longest]
            self.notice(self.longest, full, self._sizes)
            rows = zip(some, part, strict=True)
            ids = {"input_ids": [one.ids if rendered else self._whole(one.ids) for (_, rendered), one in rows]}
            inputs = self.tokenizer.pad(ids, return_tensors="pt").to(self.model.device)
            logits = self.model(**inputs).logits.float()
            scores += self._outputs(logits)[:, self.label].tolist()
        return scores

    def _text(self, prompt: str, response: str, conversation: Messages | None) -> tuple[Written, bool]:
        """Return the text of a prompt and its response, and whether the classifier's chat template has written it."""
        if self.renders and (conversation is not None or self.chat):
            asked = conversation if conversation is not None else [{"role": "user", "content": prompt}]
            turns = [_turn(message) for message in [*asked, {"role": "assistant", "content": response}]]
            return self.template.render(turns), True
        if self.renders and not self._is_reported:
            _LOGGER.warning(_TEMPLATE, self.path)
            self._is_reported = True
        return Written(prompt + response, self._control(prompt)), False

    def _outputs(self, logits: Tensor) -> Tensor:
        """Return logits `[B, N]` as they are, or as probabilities; those of a single output are not among others."""
        if self.score == "logit":
            return logits
        return logits.softmax(-1) if logits.shape[1] > 1 else logits.sigmoid()

    def _sizes(self, texts: Sequence[Written]) -> list[int]:
        """Return the number of tokens of each text, or one more than the limit."""
        more = None if self.longest is None else self.longest + 1
        return [len(one.ids) for one in self.special.encode(texts, add=False, longest=more)]

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


def _turn(message: Mapping[str, Any]) -> Turn:
    others = {name: value for name, value in message.items() if name not in ("role", "content")}
    return Turn(str(message["role"]), message.get("content"), others)


def _output(path: str, label: int | str | None, names: Mapping[int, str]) -> int:
    """Return the index of the output that is the reward; raise UserError if the label does not identify exactly one."""
    if label is None and len(names) == 1:
        return 0
    found = [index for index, name in names.items() if label == name or (type(label) is int and label == index)]
    if len(found) == 1:
        return int(found[0])
    listed = ", ".join(f"{name} ({index})" for index, name in names.items())
    which = "set options.label to one of them" if label is None else f"options.label {label!r} is none of them"
    raise UserError(f"reward {path}: the classifier has {len(names)} outputs, {listed}; {which}")

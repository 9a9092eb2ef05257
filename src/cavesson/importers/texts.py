"""Texts of prompts and responses that a source has as token ids only."""

import numpy as np

from cavesson.importers.packing import PackedNumbers, Values
from cavesson.importers.rollout import ImportedRollout, Tokenizer

NO_VOCABULARY = "token ids cannot be shown as text: import again with --tokenizer and the model's folder or Hub name"
NO_TEXT = "the source has token ids in place of texts: import again with --tokenizer and the model's folder or Hub name"
BEYOND = "a token id is not in the vocabulary: this is the tokenizer of another model"


def with_texts(rollout: ImportedRollout, tokenizer: Tokenizer | None) -> ImportedRollout:
    """Return a rollout with the texts of its prompt and response, as far as these are known, and remarks on its ids."""
    ids = {"prompt": rollout.row.get("prompt_ids"), "response": rollout.tokens.get("token_id")}
    has_texts = ids.keys() <= rollout.row.keys()
    if has_texts and all(one is None for one in ids.values()):
        return rollout
    if tokenizer is None:
        remark = NO_VOCABULARY if has_texts else NO_TEXT
        remarks = rollout.remarks if "token" in rollout.tokens else (*rollout.remarks, remark)
        return rollout._replace(row=dict.fromkeys(ids, "") | rollout.row, remarks=remarks)
    numbers = {name: _numbers(one) for name, one in ids.items()}
    is_beyond = any(number >= len(tokenizer.tokens) for one in numbers.values() for number in one)
    texts = {name: tokenizer.decode(one) for name, one in numbers.items() if name not in rollout.row}
    return rollout._replace(row=texts | rollout.row, remarks=rollout.remarks + (BEYOND,) * is_beyond)


def _numbers(values: Values | list[int] | None) -> list[int]:
    if isinstance(values, PackedNumbers):
        return [int(number) for number in np.frombuffer(values.content)]
    return values if isinstance(values, list) else []

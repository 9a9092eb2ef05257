"""Texts of prompts and responses that a source has as token ids only."""

from collections.abc import Callable

import numpy as np

from cavesson.importers.model_names import Named
from cavesson.importers.packing import PackedNumbers, Values
from cavesson.importers.rollout import ImportedRollout, Tokenizer

_WAY_OUT = "import again with --tokenizer"
NO_VOCABULARY = f"token ids cannot be shown as text: {_WAY_OUT}"
NO_TEXT = f"the source has token ids in place of texts: {_WAY_OUT}"
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


def completed(remark: str, named: Callable[[], Named | None]) -> str:
    """Return a remark with the name of the tokenizer to give, if it asks for one."""
    if not remark.endswith(_WAY_OUT):
        return remark
    found = named()
    return (
        f"{remark} {found.name}, which {found.origin} names"
        if found
        else f"{remark} and the model's folder or Hub name"
    )


def _numbers(values: Values | list[int] | None) -> list[int]:
    if isinstance(values, PackedNumbers):
        return [int(number) for number in np.frombuffer(values.content)]
    return values if isinstance(values, list) else []

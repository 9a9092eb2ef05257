"""Import NeMo RL's ``train_data_step{N}.jsonl`` and ``val_data_step{N}.jsonl``. https://github.com/NVIDIA-NeMo/RL.

Every value of a line is a list with one entry: the line is a batch of one sample. Token lists cover the prompt and the
response and are padded on the right; ``token_loss_mask`` is 1 for tokens that the policy sampled. Validation lines have
no tokens.
"""

import re
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

import numpy as np

from cavesson.importers.fields import conversation, excerpt, group_of, message_text, with_rest
from cavesson.importers.packing import Values, is_number, is_text, pack, pack_texts, pack_whole, unpack
from cavesson.importers.rollout import Broken, Format, ImportedRollout, Origin
from cavesson.importers.sampled import was_sampled
from cavesson.importers.turns import sources_of, spans_of, turns_of

TOKEN_KEYS = {
    "prev_logprobs": "logprob",
    "generation_logprobs": "sampler_logprob",
    "reference_policy_logprobs": "ref_logprob",
    "advantages": "advantage",
}
"""The format's list → the record's column. NeMo RL writes those of the reference only if a line is added to it."""
_FILE = re.compile(r"(train|val)_data_step(\d{1,9})\.jsonl$")


def rollouts(record: dict[str, Any], place: Origin) -> Iterable[ImportedRollout]:
    """Return the rollout of one line; its step is in the file name."""
    name = _FILE.search(place.path.name)
    if name is None:
        raise Broken("the step is unknown, because the file name does not begin with train_data_step or val_data_step")
    flat = {key: one[0] if isinstance(one, list) and len(one) == 1 else one for key, one in record.items()}
    reward = flat.get("rewards")
    if reward is not None and not is_number(reward):
        raise Broken(f"'rewards' is {excerpt(reward)}, expected a number")
    tokens, used, prompt_ids, sampled = _tokens(flat)
    spans = [key for key, _ in groupby(sampled)]
    row: dict[str, Any] = {"reward": reward, "split": "train" if name[1] == "train" else "eval"}
    row |= dict(zip(("prompt", "response"), _texts(flat.get("content"), spans), strict=True))
    row["group"] = group_of(row["prompt"])
    if prompt_ids is not None:
        row["prompt_ids"] = prompt_ids
    real = tokens["learned"].size if tokens else 0
    row = with_rest(row, flat, ("rewards", "content", "idx", *used), place)
    messages = _said(flat.get("content"))
    if (sources := pack_texts(sources_of(messages, sampled))) is not None and tokens:
        tokens["source"] = sources
    turns = turns_of(messages, spans_of(messages, sampled) if tokens else None)
    return [ImportedRollout(int(name[2]), row, tokens, real, turns=turns)]


def _said(content: Any) -> list[Any]:
    """Return the chat messages after the prompt, if the log has messages and not only their texts."""
    messages = content if isinstance(content, list) else [content]
    roles = [message.get("role") for message in messages if isinstance(message, Mapping)]
    return messages[roles.index("assistant") :] if len(roles) == len(messages) and "assistant" in roles else []


def _tokens(flat: Mapping[str, Any]) -> tuple[dict[str, Values], list[str], list[int] | None, list[bool]]:
    """Return the response's token columns, their source keys, the prompt ids, and whether each token was sampled."""
    ids, mask = flat.get("token_ids"), flat.get("token_loss_mask")
    if ids is None or mask is None:
        return {}, [], None, []
    length = flat.get("input_lengths")
    if not isinstance(ids, list) or not isinstance(mask, list) or len(ids) != len(mask):
        raise Broken("'token_ids' and 'token_loss_mask' are not lists of the same length")
    end = length if type(length) is int and 0 <= length <= len(ids) else len(ids)
    sampled = [value == 1 for value in mask[:end]]
    start = sampled.index(True) if True in sampled else end
    packed: dict[str, Values | None] = {
        "token_id": pack_whole(ids[start:end], low=0),
        "learned": pack_whole([int(v) for v in sampled[start:]]),
    }
    used = ["token_ids", "token_loss_mask", "input_lengths"]
    for key, name in TOKEN_KEYS.items():
        if isinstance(flat.get(key), list) and len(flat[key]) == len(ids):
            packed[name] = pack(flat[key][start:end])
            used.append(key)
    for name, values in packed.items():
        if values is None:
            raise Broken(f"the list of the tokens' {name} contains something that is not a number")
    tokens = {name: values for name, values in packed.items() if values is not None}
    if pack_whole(ids[:start], low=0) is None:
        raise Broken("'token_ids' contains something that is not a token id")
    known = (unpack(tokens.get(name)) for name in ("sampler_logprob", "logprob"))
    return tokens, used, ids[:start], was_sampled(np.array(sampled[start:], np.bool_), *known).tolist()


def _texts(content: Any, spans: list[bool]) -> tuple[str, str]:
    """Return the prompt and the response.

    In a list of texts, the last ones are the response: as many as the mask has spans from the first sampled one on,
    because turns of the policy and of its environment alternate.
    """
    messages = content if isinstance(content, list) else [content]
    if all(isinstance(message, Mapping) for message in messages):
        roles = [message.get("role") for message in messages]
        cut = roles.index("assistant") if "assistant" in roles else len(roles)
        texts = [message_text(message) for message in messages]
    elif all(map(is_text, messages)):
        texts = messages
        cut = max(len(texts) - (len(spans[spans.index(True) :]) if True in spans else 1), min(1, len(texts) - 1))
    else:
        raise Broken(f"'content' is {excerpt(content)}, expected texts or messages")
    return conversation("\n".join(texts[:cut]), "content"), conversation("\n".join(texts[cut:]), "content")


FORMAT = Format(
    "nemo-rl",
    "NeMo RL: train_data_step*.jsonl and val_data_step*.jsonl",
    ("*_data_step*.jsonl",),
    (frozenset({"content", "rewards", "idx"}),),
    rollouts,
)

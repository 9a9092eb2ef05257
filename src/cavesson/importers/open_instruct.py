"""Import open-instruct's ``{run}_rollouts_{number}.jsonl``. https://github.com/allenai/open-instruct.

A line has the ids of the prompt and of the response, and no text.
"""

from collections.abc import Iterable
from typing import Any

from cavesson.importers.fields import excerpt, group_of, reward_of, scored, step_of, to_json, with_rest
from cavesson.importers.packing import Values, pack, pack_whole
from cavesson.importers.rollout import Broken, Format, ImportedRollout, Origin


def rollouts(record: dict[str, Any], place: Origin) -> Iterable[ImportedRollout]:
    """Return the rollout of one line."""
    prompt, response = _ids(record, "prompt_tokens"), _ids(record, "response_tokens")
    row: dict[str, Any] = {"prompt_ids": prompt, "group": group_of(to_json(prompt))}
    row["reward"] = reward_of(record, "reward")
    used = ["step", "prompt_tokens", "response_tokens", *scored("reward", record)]
    tokens: dict[str, Values] = {}
    if response:
        tokens = {name: values for name, values in (("token_id", pack_whole(response)),) if values is not None}
        logprobs = pack(record.get("logprobs"))
        if logprobs is not None and logprobs.size == len(response):
            tokens["sampler_logprob"] = logprobs
            used.append("logprobs")
    else:
        row["response"] = ""
    if record.get("finish_reason") in ("stop", "length"):
        row["finish_reason"] = record["finish_reason"]
        used.append("finish_reason")
    return [ImportedRollout(step_of(record), with_rest(row, record, used, place), tokens, len(response))]


def _ids(record: dict[str, Any], key: str) -> list[int]:
    ids = record.get(key)
    if not isinstance(ids, list) or pack_whole(ids, low=0) is None:
        raise Broken(f"{key!r} is {excerpt(ids)}, expected a list of token ids")
    return ids


FORMAT = Format(
    "open-instruct",
    "open-instruct: *_rollouts_*.jsonl",
    ("*_rollouts_*.jsonl", "*.jsonl"),
    (frozenset({"step", "prompt_tokens", "response_tokens", "reward"}),),
    rollouts,
)

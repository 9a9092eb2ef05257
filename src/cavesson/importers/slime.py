"""Import slime's rollouts, ``--save-debug-rollout-data {rollout_id}.pt``. Source: https://github.com/THUDM/slime.

A dump has ``rollout_id`` and ``samples``. A sample has the ``tokens`` of prompt and response, of which the last
``response_length`` are the response's, and lists as long as the response. The dumps of evaluations begin with eval_.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from cavesson.importers.fields import (
    conversation,
    excerpt,
    group_of,
    parts_of,
    reward_of,
    step_of,
    text_of,
    whole,
    with_rest,
)
from cavesson.importers.packing import Values, is_text, pack, pack_texts, pack_whole
from cavesson.importers.rollout import Broken, Format, ImportedRollout, Origin
from cavesson.importers.steps import step_at
from cavesson.importers.turns import turns_of

ENDS = {"completed": "stop", "truncated": "length"}
LISTS = {"rollout_log_probs": "sampler_logprob", "teacher_log_probs": "teacher_logprob"}
USUAL = ("score", "reward")
SEVERAL = "the reward is several numbers, and the dump does not say which of them was trained on (--reward-key)"


def rollouts(record: dict[str, Any], place: Origin) -> Iterable[ImportedRollout]:
    """Return the rollout of one sample."""
    tokens, prompt_ids = _tokens(record)
    row: dict[str, Any] = {"prompt": conversation(record.get("prompt"), "prompt"), "prompt_ids": prompt_ids}
    row |= {"response": text_of(record, "response"), "group": group_of(row["prompt"])}
    row["split"] = "eval" if place.path.name.startswith("eval_") else "train"
    used = ["rollout_id", "prompt", "response", "tokens", "response_length", "loss_mask"]
    used += [name for name, ours in LISTS.items() if ours in tokens]
    reward, remarks = record.get("reward"), tuple[str, ...]()
    if isinstance(reward, Mapping):
        row["reward_parts"] = parts_of(reward, place)
        chosen = [*(name for name in USUAL if name in row["reward_parts"]), *row["reward_parts"]]
        is_known = bool(chosen) and (chosen[0] in USUAL or len(row["reward_parts"]) == 1)
        row["reward"] = row["reward_parts"][chosen[0]] if is_known else None
        remarks = () if is_known else (SEVERAL,)
    else:
        row["reward"] = reward_of(record, "reward")
        used.append("reward")
    if is_text(record.get("label")):
        row["ground_truth"] = record["label"]
        used.append("label")
    if isinstance(status := record.get("status"), str) and status in ENDS:
        row["finish_reason"] = ENDS[status]
        used.append("status")
    versions = record.get("weight_versions")
    if isinstance(versions, list) and versions and (version := whole(versions[0])) is not None:
        row["policy_version"] = version
    step = step_of(record, "rollout_id") if "rollout_id" in record else step_at(record, place, "rollout_id")
    row = with_rest(row, record, used, place)
    real = tokens["token_id"].size if tokens else 0
    return [ImportedRollout(step, row, tokens, real, remarks, turns_of(record["response"]))]


def _tokens(record: Mapping[str, Any]) -> tuple[dict[str, Values], list[int] | None]:
    """Return the columns of the response's tokens, and the ids of the prompt."""
    ids, length = record.get("tokens"), record.get("response_length")
    if pack_whole(ids, low=0) is None or type(length) is not int or not 0 <= length <= len(ids or ()):
        found = f"{excerpt(ids, 30)} and {excerpt(length)}"
        raise Broken(f"'tokens' and 'response_length' are {found}, expected token ids and how many are the response's")
    assert isinstance(ids, list)
    prompt, own = ids[: len(ids) - length], ids[len(ids) - length :]
    mask = record.get("loss_mask")
    if mask is None:
        mask = [1] * length
    if not isinstance(mask, list) or len(mask) != length or not all(one in (0, 1) for one in mask):
        raise Broken(f"'loss_mask' is {excerpt(mask)}, expected 0 or 1 for each token of the response")
    if not own:
        return {}, prompt
    trained = [0] * length if record.get("remove_sample") is True else [int(one) for one in mask]
    packed: dict[str, Values | None] = {"token_id": pack_whole(own), "learned": pack_whole(trained)}
    packed["source"] = pack_texts(["sampled" if one else None for one in mask])
    for name, ours in LISTS.items():
        values = record.get(name)
        if isinstance(values, list) and len(values) == length:
            packed[ours] = pack(values)
    return {name: values for name, values in packed.items() if values is not None}, prompt


FORMAT = Format(
    "slime",
    "slime: the files of --save-debug-rollout-data",
    ("*.pt", "*.jsonl"),
    (frozenset({"prompt", "response", "tokens", "response_length", "reward"}),),
    rollouts,
)

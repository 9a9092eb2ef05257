"""Import SkyRL's evaluations and the batches that it trains on. https://github.com/NovaSky-AI/SkyRL.

``dumped_evals/global_step_{N}_evals/{dataset}.jsonl``: a line has ``input_prompt, output_response, score``, with one
score per response or per token, and what the environment was given. All prompts are held-out ones.

``trajectories/{train,eval}``, tables of Weights & Biases: a row has ``step, reward, num_turns`` and the ``trajectory``
as one text, each message after a line such as ``[USER]``.

``dumped_data/global_step_{N}_training_input.pkl`` (``dump_data_batch``): tensors of prompt and response ids, masks,
log-probabilities of trainer, reference and sampler, values, returns and advantages. SkyRL takes the rewards and the ids
of the prompts out before it writes the file.
"""

import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from cavesson.importers.fields import group_of, nested, reward_of, scored, step_of, text_of, to_json, with_rest
from cavesson.importers.packing import Values, pack, pack_texts, pack_whole, unpack
from cavesson.importers.rollout import Broken, Format, ImportedRollout, Origin
from cavesson.importers.sampled import was_sampled
from cavesson.importers.steps import step_in_names
from cavesson.importers.turns import turns_of
from cavesson.record.splits import HELD_OUT
from cavesson.text.chat_marks import marks_in, turns_in

LISTS = {
    "action_log_probs": "logprob",
    "base_action_log_probs": "ref_logprob",
    "rollout_logprobs": "sampler_logprob",
    "values": "value",
    "rewards": "token_reward",
    "returns": "return",
    "advantages": "advantage",
}
"""A tensor of a batch → the record's column."""
NO_REWARDS = "SkyRL leaves the rewards out of the batches that it writes"
TABLE_KEYS = frozenset({"step", "reward", "num_turns", "trajectory"})
_SAID = re.compile(r"^\[ASSISTANT\]\n", re.MULTILINE)
BATCH_KEYS = frozenset({"prompt_token_ids", "response_ids", "loss_mask"})


def rollouts(record: dict[str, Any], place: Origin) -> Iterable[ImportedRollout]:
    """Return the rollout of one line or sample; an evaluation before training or without it is that of step 0."""
    step = step_in_names(place.names) or 0
    if record.keys() >= BATCH_KEYS:
        return [_trained(step, record, place)]
    if record.keys() >= TABLE_KEYS:
        return [_tabled(record, place)]
    row: dict[str, Any] = {"prompt": text_of(record, "input_prompt"), "response": text_of(record, "output_response")}
    row |= {"reward": reward_of(record, "score"), "group": group_of(row["prompt"]), "split": HELD_OUT}
    used = ["input_prompt", "output_response", *scored("score", record)]
    if record.get("stop_reason") in ("stop", "length"):
        row["finish_reason"] = record["stop_reason"]
        used.append("stop_reason")
    if isinstance(truth := nested(record, "env_extras", "reward_spec", "ground_truth"), str):
        row["ground_truth"] = truth
    turns = turns_of(record["output_response"])
    return [ImportedRollout(step, with_rest(row, record, used, place), {}, 0, turns=turns)]


def _tabled(record: dict[str, Any], place: Origin) -> ImportedRollout:
    """Return the rollout of a row of a table; what the assistant says first begins the response."""
    text = text_of(record, "trajectory")
    said = _SAID.search(text)
    begin = len(text) if said is None else said.start()
    row: dict[str, Any] = {"prompt": text[:begin].rstrip("\n"), "response": text[begin:]}
    row |= {"reward": reward_of(record, "reward"), "group": group_of(row["prompt"])}
    row["split"] = HELD_OUT if "eval" in place.path.name or "eval" in place.path.parent.name else "train"
    marks = marks_in(row["response"])
    messages = turns_in(row["response"], marks, "assistant") if marks else []
    turns = turns_of([{"role": one.role, "content": one.text} for one in messages])
    row = with_rest(row, record, ("step", "trajectory", *scored("reward", record)), place)
    return ImportedRollout(step_of(record), row, {}, 0, turns=turns)


def _trained(step: int, record: dict[str, Any], place: Origin) -> ImportedRollout:
    """Return the rollout of a sample of a batch; the texts follow from the ids."""
    mask = record["loss_mask"]
    packed = {"token_id": pack_whole(record["response_ids"], low=0)}
    packed["learned"] = pack_whole([int(value) for value in mask] if isinstance(mask, list) else None, 0, 1)
    packed |= {ours: pack(record[name]) for name, ours in LISTS.items() if name in record}
    if pack_whole(record["prompt_token_ids"], low=0) is None or None in packed.values():
        raise Broken("a tensor of the batch contains something that is not an id, a number, or 0 or 1")
    tokens: dict[str, Values] = {name: values for name, values in packed.items() if values is not None}
    size = tokens["token_id"].size
    if any(values.size != size for values in tokens.values()):
        raise Broken("the tensors of the batch have different shapes")
    learned, *known = (unpack(tokens.get(name)) for name in ("learned", "sampler_logprob", "logprob"))
    sampled = was_sampled(np.asarray(learned) != 0, *known)
    if (sources := pack_texts(["sampled" if one else None for one in sampled.tolist()])) is not None:
        tokens["source"] = sources
    scores = record.get("rewards")
    row: dict[str, Any] = {"prompt_ids": record["prompt_token_ids"], "split": "train"}
    row |= {"reward": None if scores is None else float(sum(scores))}
    row["group"] = group_of(str(record["uids"]) if "uids" in record else to_json(row["prompt_ids"]))
    row = with_rest(row, record, (*BATCH_KEYS, *LISTS, "not_read"), place)
    remarks: tuple[str, ...] = (NO_REWARDS,) if scores is None else ()
    remarks += tuple(f"{name!r} is not read, because only PyTorch can read it" for name in record.get("not_read", ()))
    return ImportedRollout(step, row, tokens if size else {}, size, remarks)


FORMAT = Format(
    "skyrl",
    "SkyRL: dumped_evals/global_step_*_evals/*.jsonl, dumped_data/*_training_input.pkl, tables of trajectories",
    ("*.jsonl *_training_input.pkl", "*.table.json"),
    (frozenset({"input_prompt", "output_response", "score"}), BATCH_KEYS, TABLE_KEYS),
    rollouts,
    one_run=False,
)

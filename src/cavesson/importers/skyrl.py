"""Import SkyRL's evaluations, ``dumped_evals/global_step_{N}_evals/{dataset}.jsonl``.

Source: https://github.com/NovaSky-AI/SkyRL.

A line has ``input_prompt, output_response, score``, with one score per response or per token, and what the environment
was given. All prompts are held-out ones.
"""

from collections.abc import Iterable
from typing import Any

from cavesson.importers.fields import group_of, nested, reward_of, scored, text_of, with_rest
from cavesson.importers.rollout import Format, ImportedRollout, Origin
from cavesson.importers.steps import step_in_names
from cavesson.record.splits import HELD_OUT


def rollouts(record: dict[str, Any], place: Origin) -> Iterable[ImportedRollout]:
    """Return the rollout of one line; an evaluation before training or without it is that of step 0."""
    row: dict[str, Any] = {"prompt": text_of(record, "input_prompt"), "response": text_of(record, "output_response")}
    row |= {"reward": reward_of(record, "score"), "group": group_of(row["prompt"]), "split": HELD_OUT}
    used = ["input_prompt", "output_response", *scored("score", record)]
    if record.get("stop_reason") in ("stop", "length"):
        row["finish_reason"] = record["stop_reason"]
        used.append("stop_reason")
    if isinstance(truth := nested(record, "env_extras", "reward_spec", "ground_truth"), str):
        row["ground_truth"] = truth
    return [ImportedRollout(step_in_names(place.names) or 0, with_rest(row, record, used, place), {}, 0)]


FORMAT = Format(
    "skyrl",
    "SkyRL: dumped_evals/global_step_*_evals/*.jsonl",
    ("*.jsonl",),
    (frozenset({"input_prompt", "output_response", "score"}),),
    rollouts,
)

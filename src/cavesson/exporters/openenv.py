"""Export a run folder as training traces of OpenEnv, version 1. https://github.com/meta-pytorch/OpenEnv.

A line of ``traces.jsonl`` is the trace of one rollout: each stretch of tokens that the policy sampled is a turn, with
the ids of all tokens before it. OpenEnv allows no keys of others beside those of a turn, so that what is known of the
whole rollout is in the ``metadata`` of the first turn, under ``rollout``.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cavesson.errors import UserError
from cavesson.exporters.conversations import Conversation, Message, conversation
from cavesson.exporters.portions import portions, rollouts_by_step
from cavesson.importers.fields import to_json
from cavesson.importers.openenv import OF_ROLLOUT
from cavesson.record import open as open_run
from cavesson.record.read.reader import Run
from cavesson.record.splits import HELD_OUT
from cavesson.record.storage import Location
from cavesson.record.write.new_folder import new_folder

ENDS = {"eos": "stop", "stop": "stop", "length": "length"}
Turn = dict[str, Any]


def export(place: Location, out_folder: Path, allow_remote: bool = False) -> int:
    """Write ``traces.jsonl``, and ``held-out/traces.jsonl`` for held-out responses; return the number of traces.

    The folder to write must not exist, or be empty. With ``allow_remote``, the record may be at another place that the
    run's folder names.

    Raises:
        UserError: ``place`` is not a run, a rollout lacks token ids or the sampler's log-probabilities, which a trace
            must have, or ``out_folder`` is not empty.
    """
    run = open_run(place, allow_remote)
    counts = rollouts_by_step(run)
    with new_folder(out_folder) as folder:
        for steps in portions(counts):
            for row, turns in _traces(run, steps):
                file = folder / ("held-out" if row["split"] == HELD_OUT else "") / "traces.jsonl"
                file.parent.mkdir(exist_ok=True)
                with file.open("a", encoding="utf-8", newline="\n") as lines:
                    lines.write(to_json({"schema_version": 1, "turns": turns}) + "\n")
    return sum(counts.values())


def _traces(run: Run, steps: Sequence[int]) -> Iterator[tuple[dict[str, Any], list[Turn]]]:
    rows, tokens = run.rows([*OF_ROLLOUT, "sample", "prompt_ids"], steps), run.arrow("tokens", steps=steps)
    said: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for turn in run.arrow("turns", steps=steps).to_pylist():
        said.setdefault((turn["step"], turn["sample"]), []).append(turn)
    for step in steps:
        here = pc.field("step") == step
        own = tokens.filter(here)
        samples = own["sample"].to_numpy()
        for row in rows.filter(here).to_pylist(maps_as_pydicts="strict"):
            start, end = (int(np.searchsorted(samples, row["sample"], side)) for side in ("left", "right"))
            talk = conversation(row["prompt"], row["response"], said.get((step, row["sample"]), ()))
            yield row, _turns(f"{run.folder}, step {step}, sample {row['sample']}", row, own[start:end], talk)


def _turns(place: str, row: Mapping[str, Any], tokens: pa.Table, talk: Conversation) -> list[Turn]:
    ids, logprobs, learned = (tokens[name].to_pylist() for name in ("token_id", "sampler_logprob", "learned"))
    if not row["prompt_ids"] or None in ids:
        raise UserError(f"{place}: a trace of OpenEnv needs the token ids of prompt and response, which it lacks")
    sources = tokens["source"].to_pylist()
    sampled = [one == "sampled" for one in sources] if any(sources) else learned
    runs = [(is_sampled, [place for place, _ in run]) for is_sampled, run in groupby(enumerate(sampled), _is_sampled)]
    spans = [(places[0], places[-1] + 1) for is_sampled, places in runs if is_sampled] or [(0, 0)]
    messages = _messages(talk, len(spans))
    turns = []
    for number, (start, end) in enumerate(spans):
        if not all(one is not None and np.isfinite(one) and one <= 0 for one in logprobs[start:end]):
            raise UserError(f"{place}: a trace of OpenEnv needs the sampler's log-probability of each sampled token")
        before = [*row["prompt_ids"], *ids[:start]]
        turns.append(
            {
                "node_id": f"{row['step']}-{row['sample']}-{number}",
                "prompt_token_ids": before,
                "completion_token_ids": ids[start:end],
                "per_token_logps": logprobs[start:end],
                "loss_mask": [0] * len(before) + [int(one) for one in learned[start:end]],
                **messages[number],
                "metadata": {"turn": number},
            }
        )
    if turns[-1]["response"] and (reason := ENDS.get(row["finish_reason"])) is not None:
        turns[-1]["response"]["choices"][0]["finish_reason"] = reason
    turns[0]["metadata"]["rollout"] = {name: row[name] for name in OF_ROLLOUT if row[name] is not None}
    return turns


def _is_sampled(numbered: tuple[int, bool]) -> bool:
    return numbered[1]


def _messages(talk: Conversation, count: int) -> list[dict[str, Any]]:
    """Return the request and the response of each turn; empty if the messages are not those of the turns."""
    answers = [place for place, message in enumerate(talk.response) if message["role"] == "assistant"]
    if len(answers) != count:
        return [{"request": {}, "response": {}} for _ in range(count)]

    def request(place: int) -> dict[str, Any]:
        messages: list[Message] = [*talk.prompt, *talk.response[:place]]
        return {"messages": messages} | ({"tools": talk.tools} if talk.tools else {})

    return [{"request": request(one), "response": {"choices": [{"message": talk.response[one]}]}} for one in answers]

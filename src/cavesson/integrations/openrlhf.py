"""Records what OpenRLHF's PPO trainer does.

Its trainer is a Ray actor, so nothing can be hooked from outside; two lines go into
`openrlhf/trainer/ppo_trainer.py`, method `train_step`, after `make_experience_batch` has returned:

```python
from cavesson.integrations.openrlhf import record

record("runs/mine", global_step, experiences, self.tokenizer)
```
"""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from cavesson.importers.rollout import group_of
from cavesson.record import Lock, Recorder, begin_attempt, write_run
from cavesson.record.padding import padded
from cavesson.record.precision import Array

COLUMNS = {
    "action_log_probs": "logprob",
    "base_action_log_probs": "ref_logprob",
    "rollout_log_probs": "sampler_logprob",
    "values": "value",
    "advantages": "advantage",
    "returns": "return",
}
"""A field of an experience → the record's column."""
_RECORDERS: dict[Path, Recorder] = {}


def record(folder: Path | str, step: int, experiences: Iterable[Any], tokenizer: Any) -> Recorder:
    """Records a step's experiences; the first call begins an attempt.

    Args:
        folder: Run folder; one that is there already gets another attempt.
        step: OpenRLHF's ``global_step``.
        experiences: OpenRLHF's list of ``Experience``, once advantages are computed.
        tokenizer: Decodes the ids.

    Returns:
        The folder's recorder, to which metrics can be given: ``recorder.metrics(step, {...})``.

    Raises:
        LockedError: Another process writes the run.
    """
    path = Path(folder)
    if path not in _RECORDERS:
        lock = Lock(path)
        write_run(path, {"trainer": "openrlhf", "algorithm": "ppo"})
        _RECORDERS[path] = Recorder(path, attempt=begin_attempt(path, step), lock=lock)
    rows, tokens = rollouts_of(experiences, tokenizer)
    _RECORDERS[path].rollouts(step, rows, tokens)
    _RECORDERS[path].flush()
    return _RECORDERS[path]


def rollouts_of(experiences: Iterable[Any], tokenizer: Any) -> tuple[dict[str, Any], dict[str, Array]]:
    """Returns the rows and tokens of experiences, as ``Recorder.rollouts`` wants them.

    In an experience, ``sequences`` and ``attention_mask`` are [B, L]; what belongs to actions is [B, L − 1], each entry
    at the place before the token that it is about. Tokens between two actions, such as a tool's, are left out of the
    tokens and are part of the response's text.
    """
    rows: dict[str, list[Any]] = defaultdict(list)
    tokens: dict[str, list[Any]] = defaultdict(list)
    for experience in experiences:
        sequences = _array(experience.sequences).astype(np.int64)
        attention, actions = _array(experience.attention_mask) > 0, _array(experience.action_mask) > 0
        shift = sequences.shape[1] - actions.shape[1]
        given = {name: getattr(experience, field, None) for field, name in COLUMNS.items()}
        fields = {name: _array(value) for name, value in given.items() if value is not None}
        for i, chosen in enumerate(actions):
            places = np.flatnonzero(chosen) + shift
            start = int(places[0]) if len(places) else sequences.shape[1]
            before, after = attention[i, :start], attention[i, start:]
            rows["prompt_ids"].append(sequences[i, :start][before].tolist())
            rows["response"].append(tokenizer.decode(sequences[i, start:][after], skip_special_tokens=True))
            tokens["token_id"].append(sequences[i, places])
            for name, values in fields.items():
                tokens[name].append(values[i, chosen])
        _add_outcomes(rows, experience, len(sequences), tokenizer)
    rows["sample"] = list(range(len(rows["response"])))
    rows["group"] = list(map(group_of, rows["prompt"]))
    return dict(rows), padded(tokens, len(rows["response"]))


def _add_outcomes(rows: dict[str, list[Any]], experience: Any, count: int, tokenizer: Any) -> None:
    prompts = list(experience.prompts)
    rows["prompt"] += prompts or [tokenizer.decode(ids) for ids in rows["prompt_ids"][-count:]]
    rows["reward"] += _array(experience.info.get("reward", experience.rewards)).tolist()
    if len(experience.labels) == count:
        rows["ground_truth"] += [None if label is None else str(label) for label in experience.labels]
    if experience.truncated is not None:
        rows["finish_reason"] += ["length" if cut else "eos" for cut in _array(experience.truncated).tolist()]


def _array(tensor: Any) -> Array:
    array: Array = tensor.detach().double().cpu().numpy()
    return array

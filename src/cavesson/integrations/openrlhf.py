"""Record OpenRLHF's PPO trainer.

The trainer is a Ray actor and cannot be hooked from outside. Add two lines to the method `train_step` in
`openrlhf/trainer/ppo_trainer.py`, after the call of `make_experience_batch`:

```python
from cavesson.integrations.openrlhf import record

record("runs/mine", global_step, experiences, self.tokenizer, self.args)
```
"""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from cavesson.importers.fields import group_of, nested
from cavesson.importers.sampled import was_sampled
from cavesson.importers.traits import OF_ESTIMATORS
from cavesson.integrations.settings import ends_of, plain
from cavesson.integrations.tensors import as_array
from cavesson.record import Lock, Recorder, begin_attempt, write_run
from cavesson.record.precision import Array
from cavesson.record.write.padding import padded

COLUMNS = {
    "action_log_probs": "logprob",
    "base_action_log_probs": "ref_logprob",
    "rollout_log_probs": "sampler_logprob",
    "values": "value",
    "advantages": "advantage",
    "returns": "return",
}
"""A field of an experience → the record's column."""
GROUPS = ("algo", "actor", "critic", "rollout", "train")
"""Groups of settings that are recorded; others hold keys of services, such as that of Weights & Biases."""
_RECORDERS: dict[Path, Recorder] = {}


def record(folder: Path | str, step: int, experiences: Iterable[Any], tokenizer: Any, args: Any = None) -> Recorder:
    """Record a step's experiences; the first call for a folder begins an attempt.

    Args:
        folder: Run folder; if it already exists, a new attempt is added to it.
        step: OpenRLHF's ``global_step``.
        experiences: OpenRLHF's list of ``Experience``, after advantages are computed.
        tokenizer: Decodes the ids.
        args: The trainer's settings, ``self.args``; without them, the record does not say which algorithm trained.

    Returns:
        The folder's recorder, which can also record metrics: ``recorder.metrics(step, {...})``.

    Raises:
        LockedError: Another process is writing the run.
    """
    path = Path(folder)
    if path not in _RECORDERS:
        lock = Lock(path)
        write_run(path, {"trainer": "openrlhf"} | _settings(args) | ends_of(tokenizer))
        _RECORDERS[path] = Recorder(path, attempt=begin_attempt(path, step), lock=lock)
    rows, tokens = rollouts_of(experiences, tokenizer)
    _RECORDERS[path].rollouts(step, rows, tokens)
    _RECORDERS[path].flush()
    return _RECORDERS[path]


def _settings(args: Any) -> dict[str, Any]:
    """Return the entries of run.json that OpenRLHF's settings give, in the groups that it has since version 0.11."""
    config = {name: plain(getattr(args, name)) for name in GROUPS if hasattr(args, name)}
    algorithm = OF_ESTIMATORS.get(nested(config, "algo", "advantage", "estimator"))
    return ({"config": config} if config else {}) | ({"algorithm": algorithm} if algorithm else {})


def rollouts_of(experiences: Iterable[Any], tokenizer: Any) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return the rows and tokens of experiences, in the form that ``Recorder.rollouts`` takes.

    In an experience, ``sequences`` and ``attention_mask`` are [B, L]; fields of actions are [B, L − 1], with each entry
    at the index before the token that it belongs to. Tokens between two actions, such as a tool's, are not learned; the
    experience does not say where they come from. Which tokens were sampled, the sampler's log-probabilities say, if
    there are any, whatever the mask of the actions says.
    """
    rows: dict[str, list[Any]] = defaultdict(list)
    tokens: dict[str, list[Any]] = defaultdict(list)
    for experience in experiences:
        sequences = as_array(experience.sequences)
        attention, actions = as_array(experience.attention_mask) > 0, as_array(experience.action_mask) > 0
        shift = sequences.shape[1] - actions.shape[1]
        given = {name: getattr(experience, field, None) for field, name in COLUMNS.items()}
        fields = {name: as_array(value) for name, value in given.items() if value is not None}
        sampler = fields.get("sampler_logprob", np.zeros(actions.shape))
        for i, chosen in enumerate(actions):
            begun = chosen | (sampler[i] < 0)
            start = int(np.argmax(begun)) + shift if begun.any() else sequences.shape[1]
            rows["prompt_ids"].append(sequences[i, :start][attention[i, :start]].tolist())
            places = np.flatnonzero(attention[i, start:]) + start
            rows["response"].append(tokenizer.decode(sequences[i, places], skip_special_tokens=True))
            learned = chosen[places - shift]
            own = {name: values[i, places - shift] for name, values in fields.items()}
            sampled = was_sampled(learned, own.get("sampler_logprob"), own.get("logprob"))
            tokens["token_id"].append(sequences[i, places])
            tokens["learned"].append(learned)
            tokens["source"].append(["sampled" if one else None for one in sampled])
            for name, values in own.items():
                tokens[name].append(np.where(sampled if name == "sampler_logprob" else learned, values, np.nan))
        _add_outcomes(rows, experience, len(sequences), tokenizer)
    rows["sample"] = list(range(len(rows["response"])))
    rows["group"] = list(map(group_of, rows["prompt"]))
    return dict(rows), padded(tokens, len(rows["response"]))


def _add_outcomes(rows: dict[str, list[Any]], experience: Any, count: int, tokenizer: Any) -> None:
    prompts = list(experience.prompts)
    rows["prompt"] += prompts or [tokenizer.decode(ids) for ids in rows["prompt_ids"][-count:]]
    rows["reward"] += as_array(experience.info.get("reward", experience.rewards)).tolist()
    if len(experience.labels) == count:
        rows["ground_truth"] += [None if label is None else str(label) for label in experience.labels]
    if experience.truncated is not None:
        rows["finish_reason"] += ["length" if cut else "eos" for cut in as_array(experience.truncated).tolist()]

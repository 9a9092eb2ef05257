"""Record verl's PPO trainer, with any of its advantage estimators, such as those of GRPO and RLOO.

```python
from cavesson.integrations.verl import record

trainer = RayPPOTrainer(...)      # in verl/trainer/main_ppo.py, or your own
record(trainer, "runs/mine")      # before trainer.fit()
trainer.fit()
```

At the end of every step, verl computes metrics over the step's whole batch in the trainer's own process. The batch is
recorded in that call, without involving the workers.
"""

import sys
from collections.abc import Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np

from cavesson.importers.fields import group_of, nested
from cavesson.importers.sampled import was_sampled
from cavesson.importers.traits import OF_ESTIMATORS
from cavesson.integrations.settings import ends_of, plain
from cavesson.integrations.tensors import as_array, without_padding
from cavesson.record import Lock, Recorder, write_run
from cavesson.record.precision import Array
from cavesson.record.schema import SOURCE_CODES

COLUMNS = {
    "responses": "token_id",
    "old_log_probs": "logprob",
    "ref_log_prob": "ref_logprob",
    "rollout_log_probs": "sampler_logprob",
    "values": "value",
    "token_level_rewards": "token_reward",
    "advantages": "advantage",
    "returns": "return",
}
"""verl's column of a batch → the record's."""


def record(trainer: Any, folder: Path | str) -> Recorder:
    """Record every step from now on; call this once in a process, before ``fit``.

    Args:
        trainer: verl's ``RayPPOTrainer`` or a subclass. Its ``tokenizer`` and ``global_steps`` are used, and the
            function ``compute_data_metrics`` of its module is wrapped.
        folder: Run folder; if it already exists, a new attempt is added to it.

    Returns:
        The recorder, which can also record your own metrics.

    Raises:
        LockedError: Another process is writing the run.
    """
    folder = Path(folder)
    lock = Lock(folder)
    config = plain(getattr(trainer, "config", None))
    algorithm = OF_ESTIMATORS.get(nested(config, "algorithm", "adv_estimator"))
    settings = {"trainer": "verl", "config": config} | ends_of(getattr(trainer, "tokenizer", None))
    write_run(folder, settings | ({"algorithm": algorithm} if algorithm else {}))
    recorder = Recorder(folder, lock=lock)  # an attempt begins with its first step, which `fit` reads from a checkpoint
    # The class that defines `fit` is in the module with the function that `fit` calls.
    trains = next(kind for kind in type(trainer).__mro__ if "fit" in vars(kind))
    module = sys.modules[trains.__module__]
    compute = vars(module)["compute_data_metrics"]

    @wraps(compute)
    def wrapper(batch: Any, *given: Any, **more: Any) -> Any:
        metrics = compute(batch, *given, **more)
        rows, tokens = rollouts_of(batch, trainer.tokenizer)
        recorder.rollouts(trainer.global_steps, rows, tokens)
        recorder.metrics(trainer.global_steps, {name: float(value) for name, value in metrics.items()})
        recorder.flush()
        return metrics

    vars(module)["compute_data_metrics"] = wrapper
    return recorder


def rollouts_of(batch: Any, tokenizer: Any) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return the rows and tokens of a batch, in the form that ``Recorder.rollouts`` takes.

    Args:
        batch: verl's ``DataProto`` after advantages are computed: ``batch`` contains tensors by name, with ``prompts``
            [B, S] padded on the left, ``responses`` [B, T] padded on the right, ``attention_mask`` [B, S + T];
            ``non_tensor_batch`` contains arrays [B] by name.
        tokenizer: Decodes the ids.
    """
    tensors, others = batch.batch, batch.non_tensor_batch
    ids, prompts = as_array(tensors["responses"]), as_array(tensors["prompts"])
    attention = as_array(tensors["attention_mask"]).astype(bool)
    width = ids.shape[1]
    attended = attention[:, -width:]
    # Between two answers, verl's mask leaves out what a tool or a user wrote; it may be wrong, as users can make it.
    learned = as_array(tensors["response_mask"]).astype(bool) & attended if "response_mask" in tensors else attended
    prompt_ids = without_padding(prompts, attention[:, :-width])
    rows: dict[str, Any] = {"sample": np.arange(len(ids)), "split": ["train"] * len(ids), "prompt_ids": prompt_ids}
    rows["prompt"] = [tokenizer.decode(row, skip_special_tokens=True) for row in prompt_ids]
    there = zip(ids, attended, strict=True)
    rows["response"] = [tokenizer.decode(row[kept], skip_special_tokens=True) for row, kept in there]
    rows["reward"] = (as_array(tensors["token_level_scores"]) * learned).sum(1)
    rows["group"] = list(map(group_of, rows["prompt"]))
    if (truths := _truths(others)) is not None:
        rows["ground_truth"] = truths
    tokens = {name: as_array(tensors[key]) for key, name in COLUMNS.items() if key in tensors}
    columns = {name: np.broadcast_to(values, ids.shape) for name, values in tokens.items()}
    columns |= {"attended": attended, "learned": learned}
    return rows, columns | {"source": _sources(columns)}


def _sources(columns: Mapping[str, Array]) -> Array:
    """Return [B, T] the codes of the tokens' sources: sampled, or unknown."""
    codes: Array = np.full(columns["attended"].shape, SOURCE_CODES[None], np.int8)
    for row, attended in enumerate(columns["attended"]):
        own = {name: values[row][attended] for name, values in columns.items()}
        sampled = was_sampled(own["learned"], own.get("sampler_logprob"), own.get("logprob"))
        codes[row, np.flatnonzero(attended)[sampled]] = SOURCE_CODES["sampled"]
    return codes


def _truths(others: Mapping[str, Any]) -> list[str | None] | None:
    given = others.get("reward_model")
    if given is None:
        return None
    found = [row.get("ground_truth") if isinstance(row, Mapping) else None for row in given]
    return [None if truth is None else str(truth) for truth in found]

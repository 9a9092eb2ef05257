"""The callback that records what passes through a trainer of TRL, and what its records have in common."""

import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from transformers import TrainerCallback

from cavesson.errors import UserError
from cavesson.importers.fields import conversation, group_of
from cavesson.record import Lock, Recorder, begin_attempt, write_run, write_vocabulary
from cavesson.record.precision import Array
from cavesson.record.write.inputs import turn_columns

_TRUTHS = ("ground_truth", "answer", "solution")
"""Columns of a data set that hold the right answer, by custom."""


class RecorderCallback(TrainerCallback):
    """Records a trainer's metrics, and the rollouts passed to it, in one run folder."""

    def __init__(self, folder: Path | str) -> None:
        self._folder = Path(folder)
        self._recorder: Recorder | None = None
        self._samples: Counter[int] = Counter()
        self._metrics: dict[int, set[str]] = {}
        self._rank, self._world = 0, 1
        self.start = 0
        """The first step of the attempt."""
        self.settings: dict[str, Any] = {}
        """Entries of run.json that the trainer's config lacks."""
        self.step_ended: Callable[[], None] = lambda: None
        """Called at the end of every step, before its metrics are written."""

    @property
    def records(self) -> bool:
        """Whether training has begun, so that there is an attempt to record in."""
        return self._recorder is not None

    def has_rollouts(self, step: int) -> bool:
        """Return whether the attempt has rollouts of a step."""
        return self._samples[step] > 0

    def rollouts(
        self,
        step: int,
        rows: Mapping[str, Sequence[Any]],
        tokens: Mapping[str, Any],
        split: str = "train",
        turns: Sequence[Sequence[Mapping[str, Any]]] = (),
    ) -> None:
        """Record this process's rollouts of a step, with the next free sample numbers of the step.

        Args:
            step: Training step, from 0.
            rows: [B] columns of the record's rows, including ``prompt``, ``response`` and ``reward``.
            tokens: Columns of the record's tokens, as ``Recorder.rollouts`` takes them.
            split: ``train`` or ``eval``.
            turns: Of each rollout, in their order, with columns of the record's turns; none if they are unknown.
        """
        if self._recorder is None:
            raise RuntimeError("the callback has not seen on_train_begin: add it to the trainer's callbacks")
        count = len(rows["prompt"])
        first = self._samples[step] + self._rank * count
        self._samples[step] += self._world * count
        filled: dict[str, Any] = {"sample": np.arange(first, first + count), "split": [split] * count}
        filled["group"] = [group_of(prompt) for prompt in rows["prompt"]]
        self._recorder.rollouts(step, {**filled, **rows}, tokens, turn_columns(filled["sample"].tolist(), turns))

    def rewards(self, functions: Sequence[Callable[..., Any]], weights: Sequence[float] | None = None) -> list[Any]:
        """Wrap reward functions so that the rollouts and scores that pass through them are recorded.

        A rollout's reward is the weighted sum of the scores that the functions returned for it; None is ignored.

        Args:
            functions: TRL's reward functions, in calling order.
            weights: TRL's ``reward_weights``; all 1 if None.

        Raises:
            UserError: One of the functions is a model or is asynchronous.
        """
        for function in functions:
            if not callable(function) or hasattr(function, "forward") or inspect.iscoroutinefunction(function):
                raise UserError(
                    f"{function!r:.60} is not a plain function: record(trainer, folder) records such rewards"
                )
        names = unique([getattr(one, "__name__", type(one).__name__) for one in functions])
        given = dict(zip(names, weights or [1.0] * len(functions), strict=True))
        return [self._wrapped(function, name, given) for function, name in zip(functions, names, strict=True)]

    def _wrapped(self, function: Callable[..., Any], name: str, weights: dict[str, float]) -> Callable[..., Any]:
        first, last = next(iter(weights)), next(reversed(weights))

        @wraps(function)
        def wrapper(prompts: list[Any], completions: list[Any], **given: Any) -> Any:
            scores = list(function(prompts=prompts, completions=completions, **given))
            if name == first:
                self._parts: dict[str, list[Any]] = {}
            self._parts[name] = scores
            if name == last:
                self._record_rewards(prompts, completions, given, list(weights.values()))
            return scores

        wrapper.__name__ = name
        return wrapper

    def _record_rewards(
        self, prompts: list[Any], completions: list[Any], given: Mapping[str, Any], weights: Sequence[float]
    ) -> None:
        rows = text_rows(prompts, completions) | truths_of(given)
        rows |= reward_rows(list(self._parts), np.array(list(self._parts.values()), np.float64).T, weights)
        tokens = {"token_id": ids} if (ids := given.get("completion_ids")) else {}
        self.rollouts(given["trainer_state"].global_step, rows, tokens)

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Begin an attempt and write the information about the run."""
        if self._recorder is not None:  # of a training that was interrupted
            self._recorder.close()
            self._recorder = None
            self.step_ended()  # drops the rollouts of the step that did not end
        self._rank, self._world, self.start = args.process_index, args.world_size, state.global_step
        self._samples.clear()
        self._metrics.clear()
        attempt = lock = None
        if self._rank == 0:
            lock = Lock(self._folder)
            scaled = str(getattr(args, "scale_rewards", False)) not in ("False", "none")
            settings = {"algorithm": type(args).__name__.removesuffix("Config").lower(), "config": args.to_dict()}
            settings |= {"rewards_are_scaled": scaled, "dtype": dtype_of(given.get("model"), args)} | self.settings
            write_run(self._folder, settings | {"trainer": f"trl {version('trl')}", "processes": self._world})
            _write_vocabulary(self._folder, given.get("processing_class"))
            attempt = begin_attempt(self._folder, self.start, self._world)
        attempt = _from_first(attempt, self._world)
        self._recorder = Recorder(self._folder, attempt=attempt, rank=self._rank, lock=lock)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **given: Any) -> None:
        """Record the metrics for the step that they belong to."""
        if self._recorder is None or self._rank:
            return
        self.step_ended()
        step = max(state.global_step - 1, self.start)
        known = self._metrics.setdefault(step, set())
        new = {name: float(v) for name, v in (logs or {}).items() if isinstance(v, int | float) and name not in known}
        for name in {"step", "attempt"} & new.keys():
            del new[name]
        known.update(new)
        if new:
            self._recorder.metrics(step, new)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Write the rollouts of the step, or of the evaluation."""
        self.step_ended()

    on_evaluate = on_step_end

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Write what is left."""
        if self._recorder is not None:
            self.step_ended()
            self._recorder.flush()


def dtype_of(model: Any, args: Any) -> str | None:
    """Return the data type that a model computes in: that of mixed precision, or of most of its weights."""
    mixed = next((name for name, used in (("bfloat16", args.bf16), ("float16", args.fp16)) if used), None)
    if mixed is not None or model is None:
        return mixed
    sizes: Counter[str] = Counter()
    for weight in model.parameters():
        sizes[str(weight.dtype).removeprefix("torch.")] += weight.numel()
    return sizes.most_common(1)[0][0]


def text_rows(prompts: Sequence[Any], completions: Sequence[Any]) -> dict[str, list[Any]]:
    """Return prompts and responses, each a text or a list of chat messages, as texts."""
    return {
        "prompt": [conversation(prompt, "prompt") for prompt in prompts],
        "response": [conversation(completion, "completion") for completion in completions],
    }


def unique(names: Sequence[str]) -> list[str]:
    """Return the names, with a number where one is repeated: ``reward``, ``reward_2``."""
    found: list[str] = []
    for name in names:
        numbered = (f"{name}_{number}" for number in count(2))
        found.append(name if name not in found else next(one for one in numbered if one not in {*found, *names}))
    return found


def reward_rows(names: Sequence[str], scores: Array, weights: Sequence[float]) -> dict[str, list[Any]]:
    """Return rewards and their parts from ``scores`` [B, K], in which NaN marks a missing score."""
    sums = np.nansum(scores * np.asarray(weights, np.float64), axis=1)
    sums[np.isnan(scores).all(axis=1)] = math.nan
    names = unique(names)
    parts = [
        {name: value for name, value in zip(names, row, strict=True) if not math.isnan(value)}
        for row in scores.tolist()
    ]
    return {"reward": sums.tolist(), "reward_parts": parts}


def truths_of(columns: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Return the correct answers if the data set has them under one of the usual names."""
    values = next((columns[name] for name in _TRUTHS if name in columns), None)
    return {} if values is None else {"ground_truth": [None if value is None else str(value) for value in values]}


def _from_first(attempt: int | None, world: int) -> int:
    """Return the attempt that the first process passes, on every process."""
    if world == 1:
        assert attempt is not None
        return attempt
    from accelerate.utils import broadcast_object_list

    received: list[int] = broadcast_object_list([attempt])
    return received[0]


def _write_vocabulary(folder: Path, processor: Any) -> None:
    tokenizer = getattr(processor, "tokenizer", processor)
    if tokenizer is None:
        return
    ids = range(len(tokenizer))
    tokens = [token if token is not None else "" for token in tokenizer.convert_ids_to_tokens(ids)]
    write_vocabulary(folder, tokens, [tokenizer.decode([i]) for i in ids])

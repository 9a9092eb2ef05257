"""What a run records of its rollouts, and where: in its folder or at a URL, which may stop being reachable."""

import math
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from cavesson.algorithms.runs import ExampleRun, RolloutRun
from cavesson.data.prompts import PromptSet
from cavesson.errors import StoppedError, first_line
from cavesson.processes import Processes
from cavesson.record import Lock, Recorder, begin_attempt, run_info, write_run, write_vocabulary
from cavesson.record.files import replacing
from cavesson.record.read.reader import ELSEWHERE
from cavesson.record.storage import reaching, storage
from cavesson.record.write.fallback_folder import add_fallback
from cavesson.record.write.inputs import turn_columns
from cavesson.train.given import is_given
from cavesson.train.loop import Callback, Trainer
from cavesson.types import Rollouts

TOKEN_COLUMNS = (
    "logprob", "ref_logprob", "teacher_logprob", "sampler_logprob", "value", "token_reward", "advantage", "return",
    "entropy",
)  # fmt: skip
UNRECORDED = "unrecorded"
"""The part of a run's folder with what could not be written to the record."""


def begin_record(settings: RolloutRun | ExampleRun, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write what the place of the record lacks: the description of the run, and what could not be written before."""
    place = settings.record_place
    with reaching(place):
        if settings.record is not None:
            write_run(place, {name: value for name, value in run_info(settings.run).items() if name != ELSEWHERE})
            add_fallback(settings.run / UNRECORDED, place)
        if not storage(place).exists("vocabulary.parquet"):
            ids = list(range(len(tokenizer)))
            write_vocabulary(place, tokenizer.convert_ids_to_tokens(ids), tokenizer.batch_decode([[i] for i in ids]))


def recorder_of(settings: RolloutRun | ExampleRun, step: int, processes: Processes, lock: Lock | None) -> Recorder:
    """Begin an attempt at a step, and return the recorder of this process; all processes must call this together.

    `lock` is that on the record; None on all processes but the main one.
    """
    place, is_main = settings.record_place, processes.is_main
    fallback = settings.run / UNRECORDED if settings.record is not None else None

    def begun() -> int | None:
        with reaching(place):
            return begin_attempt(place, step, processes.count) if is_main else None

    def opened() -> Recorder:
        with reaching(place):
            return Recorder(place, attempt=attempt, rank=processes.rank, lock=lock, fallback=fallback)

    attempt = processes.of_main(processes.agreed(begun))
    return processes.agreed(opened)


class Recorded(NamedTuple):
    """What the recorder takes of rollouts."""

    rows: dict[str, Any]
    tokens: dict[str, Any]
    turns: dict[str, Any] | None
    """None if nothing answers the policy"""


def recorded(rollouts: Rollouts, prompts: PromptSet, more: dict[str, Any]) -> Recorded:
    """Return what is recorded of rollouts from these prompts; `more` are further columns of rows, or other values."""
    rows: dict[str, Any] = {name: values for name, values in rollouts.lists.items() if values}
    for name in ("turns", "messages"):  # the turns have their own table, and say what the prompt does not
        rows.pop(name, None)
    rows["extra"] = [prompts.extra[index] for index in rollouts.prompt_index]
    rows["group"] = rows.pop("prompt_index")
    rewards = {name: rollouts[name] for name in ("reward", "shaped_reward") if name in rollouts.batch}
    rows["reward"] = [None] * len(rollouts)  # unless something rewards
    rows |= {name: without_nan(column) for name, column in rewards.items()}
    if "next_value" in rollouts.batch:
        rows["next_value"] = without_nan(rollouts["next_value"].masked_fill(rollouts["ended"] > 0, math.nan))
    versions = rollouts["sampler_version"][:, 0].tolist()  # of the first token, which has the oldest
    given = is_given(rollouts).tolist()
    rows["policy_version"] = [None if one else version for one, version in zip(given, versions, strict=True)]
    inside = rollouts["prompt_mask"].bool()
    asked = iter(rollouts["prompt_ids"][inside].tolist())  # one tensor operation, not one for each row
    rows["prompt_ids"] = [list(islice(asked, size)) for size in inside.sum(1).tolist()]
    rows |= more
    turns = [[turn._asdict() for turn in of_episode] for of_episode in rollouts.turns]
    return Recorded(rows, _tokens(rollouts), turn_columns(rows["sample"], turns))


def _tokens(rollouts: Rollouts) -> dict[str, Any]:
    tokens = {name: rollouts[name] for name in TOKEN_COLUMNS if name in rollouts.batch}
    others = (rollouts["learned"] == 0) & (rollouts["attended"] > 0)
    if bool(others.any()):  # their log-probability was not measured: it is not 0, but null
        tokens = {name: column.masked_fill(others, math.nan) for name, column in tokens.items()}
    tokens |= {"token_id": rollouts["response_ids"], "source": rollouts["source"]}
    tokens |= {name: rollouts[name].bool() for name in ("attended", "learned")}
    versions = rollouts["sampler_version"]
    if bool(((versions != versions[:, :1]) & (rollouts["learned"] > 0)).any()):
        tokens["sampler_version"] = versions
    return {name: column.numpy() for name, column in tokens.items()}


class Described(Callback):
    """Stops a run whose run.json was deleted, and writes that again, because the run could not resume without it."""

    def __init__(self) -> None:
        self._content = b""

    def on_start(self, trainer: Trainer) -> None:
        if trainer.learner.processes.is_main:
            self._content = (trainer.folder / "run.json").read_bytes()

    def on_step(self, trainer: Trainer) -> None:
        file = trainer.folder / "run.json"
        # If all of the folder is gone, the recorder says so.
        is_lost = trainer.learner.processes.is_main and trainer.folder.is_dir() and not file.exists()
        if not trainer.learner.processes.of_main(is_lost) or trainer.stop is not None:
            return
        if is_lost:
            with replacing(file) as again:
                again.write(self._content)
        done = f"stopped after {trainer.next_step} of {trainer.end} steps"
        trainer.stop = StoppedError(
            f"{done}: {file} was deleted; it has been written again. The checkpoint is complete"
        )


def without_nan(numbers: Tensor) -> list[float | None]:
    """Return numbers `[B]` with None for those that are NaN, such as rewards of responses that no reward judges."""
    return [None if math.isnan(number) else number for number in numbers.tolist()]


class Reachable(Callback):
    """Stops a run whose record can no longer be written to its place."""

    def on_step(self, trainer: Trainer) -> None:
        lost = lost_record(trainer)
        if lost is not None and trainer.stop is None:
            trainer.stop = StoppedError(f"stopped after {trainer.next_step} of {trainer.end} steps: {lost}")


def lost_record(trainer: Trainer) -> str | None:
    """Return what has become of a record that a process could not reach; None if all could.

    All processes must call this together.
    """
    recorder = trainer.recorder
    error = None if recorder is None else recorder.unreachable
    said = None if recorder is None or error is None else f"{recorder.location} cannot be reached: {first_line(error)}"
    found = next((line for line in trainer.learner.processes.of_all(said) if line is not None), None)
    advice = (
        f"The checkpoint is complete; resume the run to upload the rest of the record, {trainer.folder / UNRECORDED}"
    )
    return None if found is None else f"{found}\n{advice}"

"""Resuming a run: which settings and rewards may change, and how changes are recorded."""

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from cavesson.algorithms.runs import ExampleRun, RolloutRun
from cavesson.command_line import ACCEPT, command_line, continuation, is_trained_here
from cavesson.config import check, overlaid
from cavesson.errors import UserError
from cavesson.record import run_info
from cavesson.record.run_folder import attempts, rewrite_run
from cavesson.record.storage import reaching, storage
from cavesson.record.write.lock import is_free
from cavesson.registry import ALGORITHMS, name_of
from cavesson.text.counting import counted
from cavesson.text.masking import masked
from cavesson.train.checkpoint import Checkpoint
from cavesson.train.loop import Trainer

Changes = dict[str, list[Any]]
"""Settings by their dotted names: what they were, and what they are now."""
Fingerprints = Mapping[str, str]
"""Of rewards, by their names."""

LENGTH = ("steps", "epochs")
PLACES = ("parallel", "ray", "sampling.servers", "sampling.vllm")
MEMORY = (
    "model.device", "model.gradient_checkpointing", "model.compile", "sampling.batch_size",
    "update.micro_batch_size", "update.micro_batch_tokens", "update.in_backward", "update.layout",
)  # fmt: skip
"""Where and in which parts a step is computed."""
MAY_CHANGE = (*LENGTH, *PLACES, *MEMORY, "evaluation", "checkpoint", "doctor", "trackers", "project")
"""Settings, and groups of them, that change no number of a step, except for rounding, and the length of the run."""
REWARDS = "rewards"
"""What may change if the user accepts it, and where run.json keeps the fingerprints of rewards."""


def recorded(folder: Path) -> dict[str, Any]:
    """Return the contents of run.json, or raise a UserError if the run was not trained by Cavesson."""
    info = run_info(folder)
    if not is_trained_here(info):
        raise UserError(f"{folder} was not trained by Cavesson: there is nothing to resume")
    return info


def settings_of(folder: Path, algorithm: str, flags: Sequence[str]) -> RolloutRun | ExampleRun:
    """Return the settings with which a run resumes: the recorded settings, overridden by the flags.

    Raises:
        UserError: there is no run in the folder, its algorithm differs, a flag is wrong, or the run was started from
            Python with objects that were passed as arguments.
    """
    if is_free(folder):
        way = command_line(algorithm, "RECIPE.toml", "--resume", folder)
        raise UserError(f"{folder} has no run to resume; to start one, give its recipe too: {way}")
    info = recorded(folder)
    if info["inputs"]:
        raise UserError(
            f"{folder} was started from Python with its own {', '.join(info['inputs'])}; "
            "continue it there with Training(..., resume=True)"
        )
    _check_algorithm(info, folder, algorithm)
    kind = ALGORITHMS[algorithm].settings
    values = overlaid(kind, copy.deepcopy(info["config"]), flags)
    if values["run"] != info["config"]["run"]:
        way = command_line(algorithm, "--resume", folder)
        raise UserError(f"--resume continues in {folder}; remove --run, or copy the folder and resume the copy: {way}")
    values["run"] = folder
    source = "the flags" if flags else f"{folder}/run.json"
    return check(kind, values, source)  # type: ignore[no-any-return]


def changes(settings: RolloutRun | ExampleRun, rewards: Fingerprints, accept: bool) -> Changes:
    """Return the differences between the settings and rewards and those recorded so far for the run in their folder.

    If `accept` is set, rewards may have changed, whose fingerprints are those of now.

    Raises:
        UserError: something differs that must not change; the message names it.
    """
    folder, info = settings.run, recorded(settings.run)
    _check_algorithm(info, folder, name_of(settings))
    before = check(type(settings), {**info["config"], "run": folder}, f"{folder}/run.json")
    then, now = (to_jsonable_python(dict(flattened(one))) for one in (before, settings))
    found = {name: [then.get(name), now.get(name)] for name in {**then, **now} if then.get(name) != now.get(name)}
    may_change = (*MAY_CHANGE, REWARDS) if accept else MAY_CHANGE
    for name, (was, given) in found.items():
        if not any(name == allowed or name.startswith(f"{allowed}.") for allowed in may_change):
            raise UserError(
                f"{folder} was started with {name} = {json.dumps(was)}, and cannot resume with {json.dumps(given)}; "
                f"only these may change: {', '.join(MAY_CHANGE)}, and with {ACCEPT} {REWARDS}"
            )
    return found | _changed_rewards(info, rewards, folder, accept)


def _changed_rewards(info: dict[str, Any], rewards: Fingerprints, folder: Path, accept: bool) -> Changes:
    """Return the fingerprints of rewards that have other sources or models than before; older runs have none."""
    recorded_before = info.get(REWARDS, {})
    found = {
        f"{REWARDS}.{name}.fingerprint": [recorded_before[name][:8], now[:8]]
        for name, now in rewards.items()
        if recorded_before.get(name, now) != now
    }
    if found and not accept:
        named = [name.split(".", 1)[1].removesuffix(".fingerprint") for name in found]
        names = " and ".join(name if name.startswith(("environment", "tool ")) else f"reward {name}" for name in named)
        way = "accept_changes=True" if info["inputs"] else ACCEPT
        raise UserError(
            f"{folder} cannot resume: the {names} has another source or model than before; restore it, or "
            f"accept the change, which the run will record, with {way}"
        )
    return found


def record_changes(
    settings: RolloutRun | ExampleRun, changed: Changes, trainer: Trainer, rewards: Fingerprints
) -> None:
    """Write to run.json the number of processes that train now, and what has changed, with its previous values."""
    info = recorded(settings.run)
    now = info | {"processes": trainer.learner.processes.count, **({REWARDS: dict(rewards)} if rewards else {})}
    if changed:
        now |= _changed(settings, changed, trainer, info)
    if "steps" in changed:
        now = without_end(now)
    if now != info:
        rewrite_run(settings.run, now)


def _changed(
    settings: RolloutRun | ExampleRun, changed: Changes, trainer: Trainer, info: dict[str, Any]
) -> dict[str, Any]:
    """Return what run.json says of new settings, after what it has said before."""
    with reaching(settings.record_place):
        attempt = 1 + max((one.number for one in attempts(storage(settings.record_place))), default=-1)
    entry = {"attempt": attempt, "start_step": trainer.next_step, "settings": changed}
    config = settings.model_dump(mode="json")
    return {"config": config, "steps": trainer.steps, "changes": [*info.get("changes", []), entry]}


def own_batches(folder: Path, checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint without the batches of later steps if a fork begins with it.

    The run sampled them. A fork samples its own, so that a fork with other settings and one without do the same.
    """
    begins = run_info(folder).get("fork", {}).get("step") == checkpoint.step and "updates" not in checkpoint.state
    return checkpoint._replace(batches={**checkpoint.batches, "ahead": []}) if begins else checkpoint


def end_of_fork(folder: Path) -> int | None:
    """Return the step before which the run ends if it is a fork that is compared with another one; else None."""
    end: int | None = run_info(folder).get("fork", {}).get("end")
    return end


def without_end(info: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of run.json for a fork that is trained to its last step, like any other run."""
    fork = {name: value for name, value in info.get("fork", {}).items() if name != "end"}
    return info | ({"fork": fork} if fork else {})


def notes_on(settings: RolloutRun | ExampleRun, changed: Changes, start_step: int, steps: int) -> list[str]:
    """Return notes for the user on the changes."""
    notes = [f"changed: {name} {json.dumps(was)} → {json.dumps(now)}" for name, (was, now) in masked(changed).items()]
    if isinstance(settings, RolloutRun) and settings.sampling_temperature(0) != settings.sampling_temperature(
        steps - 1
    ):
        notes += [f"the sampling temperature now changes over {counted(steps, 'step')}"] if "steps" in changed else []
    schedule = settings.optimizer.schedule
    if schedule != "constant" and not changed.keys().isdisjoint(LENGTH):
        notes.append(
            f"the {schedule} schedule now decays over {counted(steps, 'step')}: the learning rates from step "
            f"{start_step} are those of a run of that length, the earlier ones are not"
        )
    return notes


def _check_algorithm(info: dict[str, Any], folder: Path, algorithm: str) -> None:
    if info["algorithm"] != algorithm:
        way = continuation(folder)
        raise UserError(f"{folder} is a run of {info['algorithm']}, not of {algorithm}; continue it with: {way}")


def flattened(settings: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every setting by its dotted name, with its value."""
    for name, value in settings:
        if isinstance(value, BaseModel):
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value

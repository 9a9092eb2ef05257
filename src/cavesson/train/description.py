"""The description of a run in run.json, and checks that what resumes is the same run."""

import json
import platform
from collections.abc import Mapping
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cavesson.algorithms.runs import RunSettings
from cavesson.data.view import has_conversations
from cavesson.errors import UserError
from cavesson.models.fingerprint import digest
from cavesson.record import run_info
from cavesson.record.read.reader import ELSEWHERE
from cavesson.registry import name_of
from cavesson.train.build import Inputs
from cavesson.train.loop import Trainer
from cavesson.train.resuming import REWARDS


def describe_run(settings: RunSettings, inputs: Inputs, trainer: Trainer, rewards: Mapping[str, str]) -> dict[str, Any]:
    """Return the contents of run.json; `rewards` are the fingerprints of rewards by their names."""
    tokenizer = trainer.tokenizer
    return {
        "cavesson": version("cavesson"),
        "algorithm": name_of(settings),
        "config": settings.model_dump(mode="json"),
        **({ELSEWHERE: settings.record} if settings.record else {}),
        "inputs": inputs.given,
        "conversations": has_conversations(settings.data.model_dump()),
        **settings.facts(),
        "model": {
            "name": "random weights" if settings.model.new else settings.model.path or "a model given in Python",
            "fingerprint": trainer.fingerprint,
        },
        "tokenizer": {
            "fingerprint": digest(sorted(tokenizer.get_vocab().items())),
            "pad": tokenizer.pad_token_id,
            "bos": tokenizer.bos_token_id,
        },
        **trainer.describe(),
        **({REWARDS: dict(rewards)} if rewards else {}),
        "steps": trainer.steps,
        "processes": trainer.learner.processes.count,
        "versions": {name: version(name) for name in ("torch", "transformers", "peft")}
        | {"python": platform.python_version()},
    }


def began(folder: Path) -> datetime | None:
    """Return the local time at which a run began, as its chat template reads it; None if an older run does not say.

    Raises:
        UserError: what the run says is not a time.
    """
    said = run_info(folder).get("began")
    first = folder / "attempts" / "0000.json"
    if said is None and not first.exists():
        return None
    try:
        if said is not None:
            return datetime.fromisoformat(said)
        started = datetime.fromisoformat(json.loads(first.read_text(encoding="utf-8"))["started"])
    except (ValueError, KeyError, TypeError):
        place = first if said is None else folder / "run.json"
        raise UserError(f"{place} does not say when the run began; put back a copy of the file") from None
    return started.astimezone().replace(tzinfo=None)


def check_same_model(folder: Path, trainer: Trainer) -> None:
    """Raise UserError if a run resumes with another model than the one it started with."""
    started_with = run_info(folder)["model"]["fingerprint"]
    if trainer.fingerprint != started_with:
        raise UserError(f"{folder} was started with another model; resume it with the model as it was before training")


def check_same_data(settings: RunSettings, trainer: Trainer) -> None:
    """Raise UserError if a run resumes with other prompts or examples, or other held-out ones."""
    folder, infos = settings.run, (run_info(settings.run), trainer.describe())
    for kind in ("examples", "prompts"):
        then, now = (info.get(kind, {}) for info in infos)
        if "fingerprint" in then and now.get("fingerprint") != then["fingerprint"]:
            raise UserError(f"{folder} was started with other {kind}; resume it with the data as it was then")
    held_out = then.get("held_out_fingerprint")
    if held_out is not None and now.get("held_out_fingerprint") != held_out:
        place = settings.data.validation_path or settings.data.path or "prompts="
        raise UserError(
            f"{folder} was started with other held-out prompts than those in {place}, and evaluations on different "
            "prompts cannot be compared; restore the prompts, or start a new run with another --run"
        )

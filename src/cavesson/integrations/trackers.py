"""Send the metrics of a run to TensorBoard, Weights & Biases, Trackio or MLflow too, through accelerate's trackers."""

import json
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal, Self
from uuid import uuid4

from pydantic import BeforeValidator

from cavesson.errors import UserError, first_line
from cavesson.record.files import write_json

Name = Literal["tensorboard", "wandb", "trackio", "mlflow"]
"""Each is also the name of the package it needs."""


def _split(value: Any) -> Any:
    return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value


Names = Annotated[tuple[Name, ...], BeforeValidator(_split)]
"""The type of the setting: `--trackers tensorboard,wandb`, or a list in a recipe."""


def require(names: tuple[Name, ...]) -> None:
    """Find out before a model is loaded.

    Raises:
        UserError: the package of a tracker is not installed.
    """
    for name in names:
        spec = find_spec(name)
        if (
            spec is None or spec.origin is None
        ):  # a folder called wandb, such as its own, passes for a package without one
            raise UserError(f"the tracker {name} is not installed; install it with: pip install {name}")


class Trackers:
    """The trackers of one run; a context manager. Only the main process sends anything.

    The names and values are those of the record's steps. A run that is continued continues in the same place:
    TensorBoard forgets the steps that are done again, Weights & Biases, Trackio and MLflow keep the run's id.

    Args:
        names: which trackers; none of them is fine.
        folder: of the run; TensorBoard's files go to `folder`/tensorboard, Weights & Biases' to `folder`/wandb.
        project: what Weights & Biases and Trackio file the run under.
        config: the settings of the run, sent along as hyperparameters called like the flags.
        start_step: the first step that will be logged; over 0 when a run is continued.

    Raises:
        UserError: a tracker is not installed, or does not start.
    """

    def __init__(
        self, names: tuple[Name, ...], folder: Path, project: str, config: Mapping[str, Any], start_step: int = 0
    ) -> None:
        self._trackers: list[Any] = []
        if not names:
            return
        require(names)
        from accelerate import PartialState

        if not PartialState().is_main_process:
            return
        known = folder / "trackers.json"
        before: dict[str, str] = json.loads(known.read_bytes()) if known.exists() else {}
        ids = {"id": uuid4().hex[:8], **before}
        for name in names:
            tracker = _tracker(name, folder, project, ids, start_step)
            _start(tracker)
            self._trackers.append(tracker)
            is_new = not before
            if name == "mlflow":  # it names its runs itself, and keeps settings for good
                ids["mlflow"] = tracker.tracker.info.run_id
                is_new = "mlflow" not in before
            if name == "trackio" or is_new:  # Trackio forgets the settings of a run that is continued
                tracker.store_init_configuration(dict(_flat(config)))
        write_json(known, ids)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step; further calls for the same step add to them."""
        for tracker in self._trackers:
            tracker.log(dict(metrics), step=step)

    def finish(self) -> None:
        """Send what is left; a second call does nothing."""
        while self._trackers:
            self._trackers.pop().finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.finish()


def _tracker(name: Name, folder: Path, project: str, ids: Mapping[str, str], start_step: int) -> Any:
    from accelerate.tracking import MLflowTracker, TensorBoardTracker, TrackioTracker, WandBTracker

    identity = ids["id"]
    if name == "mlflow":
        return MLflowTracker(project, run_id=ids.get("mlflow"), run_name=folder.name)

    if name == "tensorboard":
        return TensorBoardTracker("tensorboard", folder, purge_step=start_step)
    if name == "wandb":
        return WandBTracker(project, dir=folder, id=identity, name=folder.name, resume="allow")
    return TrackioTracker(project, name=f"{folder.name}-{identity}", resume="allow")


def _start(tracker: Any) -> None:
    try:
        tracker.start()
    except _refusals(tracker.name) as error:
        reason = first_line(error)
        offline = "\nWANDB_MODE=offline keeps the run on this machine instead" if tracker.name == "wandb" else ""
        raise UserError(f"the tracker {tracker.name} did not start: {reason}{offline}") from error


def _refusals(name: Name) -> tuple[type[Exception], ...]:
    """What a tracker raises for a user's mistake: no key, a name that Trackio keeps for itself."""
    if name == "wandb":
        from wandb.errors import Error

        return (Error,)
    if name == "mlflow":
        from mlflow.exceptions import MlflowException

        return (MlflowException, ImportError)  # a store that cannot be reached, or needs another package
    return (ValueError,) if name == "trackio" else ()


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, bool | int | float | str | None]]:
    """Every setting under its dotted name; lists as JSON, because hyperparameters are plain values."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, list | tuple):
            yield f"{prefix}{key}", json.dumps(value)
        else:
            yield f"{prefix}{key}", value

"""Also send the metrics of a run to TensorBoard, Weights & Biases, Trackio or MLflow, with accelerate's trackers."""

import json
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal, Self
from uuid import uuid4

from pydantic import BeforeValidator

from cavesson.errors import UserError, first_line
from cavesson.text.masking import masked

Name = Literal["tensorboard", "wandb", "trackio", "mlflow"]
"""Each is also the name of the package it needs."""


def _split(value: Any) -> Any:
    return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value


Names = Annotated[tuple[Name, ...], BeforeValidator(_split)]
"""The type of the setting: `--trackers tensorboard,wandb`, or a list in a recipe."""


def require(names: tuple[Name, ...]) -> None:
    """Raise a UserError unless the packages of the trackers are installed, before a model is loaded."""
    for name in names:
        spec = find_spec(name)
        # A folder called wandb, such as the one it writes, is found as a namespace package without an origin.
        if spec is None or spec.origin is None:
            raise UserError(f"the tracker {name} is not installed; install it with: pip install {name}")


class Trackers:
    """The trackers of one run, as a context manager. Only the main process sends anything.

    The names and values are those of the record's steps. A resumed run continues in the same place: TensorBoard
    discards the steps that are repeated; Weights & Biases, Trackio and MLflow keep the run's id.

    Args:
        names: Names of the trackers; may be empty.
        folder: Run folder; TensorBoard writes to `folder`/tensorboard, Weights & Biases to `folder`/wandb.
        project: Project (in MLflow, the experiment) that the run belongs to; TensorBoard ignores it.
        config: Settings of the run, sent as hyperparameters with the names of the flags.
        start_step: First step that will be logged; greater than 0 for a resumed run.

    Raises:
        UserError: A tracker is not installed or does not start.
    """

    def __init__(
        self, names: tuple[Name, ...], folder: Path, project: str, config: Mapping[str, Any], start_step: int = 0
    ) -> None:
        self._trackers: list[Any] = []
        if not names:
            return
        require(names)
        from accelerate import PartialState

        from cavesson.record.files import write_json

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
            if name == "mlflow":  # MLflow generates run ids itself and keeps settings permanently
                ids["mlflow"] = tracker.tracker.info.run_id
                is_new = "mlflow" not in before
            if name == "trackio" or is_new:  # Trackio discards the settings of a resumed run
                tracker.store_init_configuration(dict(_flat(masked(config))))
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

    if name == "mlflow":
        return MLflowTracker(project, run_id=ids.get("mlflow"), run_name=folder.name)
    if name == "tensorboard":
        return TensorBoardTracker("tensorboard", folder, purge_step=start_step)
    if name == "wandb":
        return WandBTracker(project, dir=folder, id=ids["id"], name=folder.name, resume="allow")
    return TrackioTracker(project, name=f"{folder.name}-{ids['id']}", resume="allow")


def _start(tracker: Any) -> None:
    try:
        tracker.start()
    except _refusals(tracker.name) as error:
        offline = "\nWANDB_MODE=offline keeps the run on this machine instead" if tracker.name == "wandb" else ""
        raise UserError(f"the tracker {tracker.name} did not start: {first_line(error)}{offline}") from error


def _refusals(name: Name) -> tuple[type[Exception], ...]:
    """Return the exceptions that a tracker raises for user errors: no key, a name reserved by Trackio."""
    if name == "wandb":
        from wandb.errors import Error

        return (Error,)
    if name == "mlflow":
        from mlflow.exceptions import MlflowException

        return (MlflowException, ImportError)  # an unreachable store, or one that needs another package
    return (ValueError,) if name == "trackio" else ()


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, bool | int | float | str | None]]:
    """Yield every setting with its dotted name; lists as JSON, because hyperparameters are plain values."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, list | tuple):
            yield f"{prefix}{key}", json.dumps(value)
        else:
            yield f"{prefix}{key}", value

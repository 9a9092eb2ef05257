"""The findings of the doctor, stored in a file of the index, so that the board can read them without the doctor."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from cavesson.record.files import write_text


class Place(BaseModel):
    """A rollout that shows a finding."""

    step: int
    sample: int
    token: int | None
    """First token of the response that matters; None: the whole response."""


class StoredFinding(BaseModel):
    """A finding that no other one explains, in one language."""

    id: str
    """Name of the rule."""
    severity: Literal["error", "warning", "note"]
    title: str
    text: str
    """The cause."""
    steps: tuple[int, int] | None
    """The step at which it began, and the last step that was examined."""
    between: tuple[int, int] | None = None
    """Two steps between which it began, with a probability of 90 %; None: not estimated."""
    rollouts: tuple[Place, ...]
    seen: str
    healthy: str
    """What the number seen is, and its healthy range."""
    fix: str
    counterparts: tuple[str, str] | None = None
    """A label, and what the settings of the fix are called in the run's trainer."""
    source: str
    explains: tuple[str, ...]
    """Titles of its consequences."""
    consequences: tuple[str, ...] = ()
    """Names of their rules."""


class Findings(BaseModel):
    """The result of the last diagnosis."""

    run: str
    """Fingerprint of the run."""
    version: str
    """A value that changes whenever the record changes."""
    seconds: float
    """Duration of the diagnosis."""
    summary: dict[str, str] = {}
    """By language, how much could not be judged, and how many rules found something."""
    not_excluded: dict[str, tuple[tuple[str, str], ...]] = {}
    """By language, failures that cannot be excluded, each with what would exclude it."""
    found: dict[str, tuple[StoredFinding, ...]]
    """The findings by language, the most certain first."""


def findings_file(folder: Path) -> Path:
    """Return the path of the findings file in the folder of an index."""
    return folder / "findings.json"


def write_findings(file: Path, findings: Findings) -> None:
    """Write findings atomically."""
    write_text(file, findings.model_dump_json())


def read_findings(file: Path) -> Findings | None:
    """Return the stored findings; None if the file is missing or not valid."""
    try:
        return Findings.model_validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return None

"""The findings of the doctor, stored in a file of the index, so that the board can read them without the doctor."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from cavesson.record.files import replacing


class Place(BaseModel):
    """A rollout that shows a finding."""

    step: int
    sample: int
    token: int | None
    """First token of the response that matters; None: the whole response."""


class Finding(BaseModel):
    """One cause of trouble, in one language."""

    id: str
    """Name of the rule."""
    severity: Literal["error", "warning", "note"]
    title: str
    text: str
    """The cause."""
    steps: tuple[int, int] | None
    """Since when, and the newest step that was looked at."""
    rollouts: tuple[Place, ...]
    seen: str
    healthy: str
    """What the number seen is, and where it is healthy."""
    fix: str
    source: str
    explains: tuple[str, ...]
    """Titles of its consequences."""
    consequences: tuple[str, ...] = ()
    """Names of their rules."""


class Findings(BaseModel):
    """What the doctor saw when it last looked."""

    run: str
    """Fingerprint of the run."""
    version: str
    """What differs whenever the record does."""
    seconds: float
    """How long the look took."""
    found: dict[str, tuple[Finding, ...]]
    """By language, the most certain first."""


def findings_file(folder: Path) -> Path:
    """Return the path of the findings file in the folder of an index."""
    return folder / "findings.json"


def write_findings(file: Path, findings: Findings) -> None:
    """Write findings atomically."""
    with replacing(file) as out:
        out.write(findings.model_dump_json().encode())


def read_findings(file: Path) -> Findings | None:
    """Return the stored findings; None if the file is missing or not valid."""
    try:
        return Findings.model_validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return None

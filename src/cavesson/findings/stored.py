"""The findings of the doctor, stored in a file of the index, so that the board can read them without the doctor."""

from pathlib import Path

from pydantic import BaseModel, ValidationError

from cavesson.findings.finding import Finding
from cavesson.record.files import write_text


class Findings(BaseModel):
    """The result of the last diagnosis."""

    run: str
    """Fingerprint of the run."""
    version: str
    """A value that changes whenever the record changes."""
    seconds: float
    """Duration of the diagnosis."""
    last_step: int
    """The last step that was examined."""
    summary: dict[str, str] = {}
    """By language, how much could not be judged, and how many rules found something."""
    not_excluded: dict[str, tuple[tuple[str, str], ...]] = {}
    """By language, failures that cannot be excluded, each with what would exclude it."""
    findings: dict[str, tuple[Finding, ...]]
    """By language, the findings that no other finding explains, the most certain first."""


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

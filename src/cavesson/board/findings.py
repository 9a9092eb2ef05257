"""What the doctor found. It looks in a process of its own and leaves what it saw beside the index."""

from typing import Any

from cavesson.board.runs import Board, OpenRun
from cavesson.board.selection import RunQuery
from cavesson.doctor.findings_file import findings_file, read_findings
from cavesson.record.index_folder import fingerprint


def findings(board: Board, query: RunQuery) -> dict[str, Any] | None:
    """Returns the findings of the doctor by language, or null if it has not looked yet."""
    run = board.run(query.run)
    return run.memory.get("findings", (looked_at(run),), lambda: _read(run), most=1)


def looked_at(run: OpenRun) -> int:
    """Returns when the doctor's last look ended, in milliseconds; 0 if there was none."""
    try:
        return findings_file(run.folder).stat().st_mtime_ns // 1_000_000
    except OSError:
        return 0


def _read(run: OpenRun) -> dict[str, Any] | None:
    seen = read_findings(findings_file(run.folder))
    if seen is None or seen.run != fingerprint(run.record):
        return None  # of a run that was in this place before
    return {name: [finding.model_dump() for finding in found] for name, found in seen.found.items()}

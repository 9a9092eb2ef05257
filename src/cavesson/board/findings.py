"""The findings of the doctor, which runs in a separate process and stores them in the index."""

from typing import Any

from cavesson.board.runs import Board, OpenRun
from cavesson.board.selection import RunQuery
from cavesson.findings.report import for_board
from cavesson.findings.stored import findings_file, read_findings
from cavesson.record.read.index_folder import fingerprint


def findings(board: Board, query: RunQuery) -> dict[str, Any] | None:
    """Return by language what the doctor could not judge, and its findings, or null if it has not run yet."""
    run = board.run(query.run)
    return run.cache.get("findings", (looked_at(run),), lambda: _read(run), most=1)


def looked_at(run: OpenRun) -> int:
    """Return the time of the doctor's last findings in milliseconds; 0 if there are none."""
    try:
        return findings_file(run.folder).stat().st_mtime_ns // 1_000_000
    except OSError:
        return 0


def _read(run: OpenRun) -> dict[str, Any] | None:
    seen = read_findings(findings_file(run.folder))
    if seen is None or seen.run != fingerprint(run.record):
        return None  # written for an earlier run in the same folder
    return {
        name: {
            "summary": seen.summary.get(name, ""),
            "not_excluded": seen.not_excluded.get(name, ()),
            "last_step": seen.last_step,
            "findings": [for_board(finding) for finding in found],
        }
        for name, found in seen.findings.items()
    }

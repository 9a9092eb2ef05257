"""The list of runs, and a summary of each."""

from typing import Any

import numpy as np

from cavesson.board.runs import Board, Listed, OpenRun
from cavesson.board.selection import NoQuery, RunQuery
from cavesson.board.series import lines_of, rollups_of
from cavesson.index.columns import CODED
from cavesson.index.filters import OF_CALLS
from cavesson.index.rescored import PREFIX as RESCORED
from cavesson.index.row_texts import RECORDED
from cavesson.index.said import SPOKEN
from cavesson.index.snapshot import Snapshot
from cavesson.record.splits import HELD_OUT


def runs(board: Board, query: NoQuery) -> list[dict[str, Any]]:
    """Return the runs in the order of the command line; those of a folder by name, empty until they are opened."""
    return [summary(one) if isinstance(one, OpenRun) else _unopened(one) for one in board.all()]


def run(board: Board, query: RunQuery) -> dict[str, Any]:
    """Return one run, which is opened for it, and indexed from then on."""
    return summary(board.run(query.run))


def _unopened(listed: Listed) -> dict[str, Any]:
    """Return what is known of a run that nobody has looked at: the same as of an empty one."""
    kinds = ("rows", "texts", "tokens", "parts", "tools", "calls", "spoken")
    return {
        "run": listed.key, "name": listed.name, "path": listed.path, "opened": False, "algorithm": None, "steps": None,
        "newest": None, "rollouts": 0, "held_out": 0, "tokens": None, "live": False,
        "columns": {kind: [] for kind in kinds}, "indexed": 1.0, "partial": None, "problem": None,
    }  # fmt: skip


def summary(run: OpenRun) -> dict[str, Any]:
    """Return the size of a run, its columns, and how much of it is indexed.

    ``rollouts`` and ``tokens`` are those that were trained on, and ``held_out`` the number of held-out rollouts.
    ``partial`` is null once everything is indexed, and ``gone`` says that the folder is no longer there.
    """
    snapshot, partial = run.snapshot(), run.partial(texts=True)
    return {
        "run": run.key,
        "name": run.name,
        "path": str(run.record.folder),
        "opened": True,
        "algorithm": run.record.info.get("algorithm"),
        "steps": steps_of(snapshot),
        "newest": _newest(run, snapshot),
        "rollouts": snapshot.count("train"),
        "held_out": snapshot.count(HELD_OUT),
        "tokens": _tokens(run),
        "live": run.live,
        "gone": run.gone,
        "columns": {
            "rows": [name for name in snapshot.names if name not in CODED and not name.startswith(("part/", RESCORED))],
            "texts": [name for name in CODED if name in snapshot.names],
            "tokens": run.token_columns(),
            "parts": [name.removeprefix("part/") for name in snapshot.names if name.startswith("part/")],
            "rescored": sorted(snapshot.state.rescored),
            "tools": [name for name in snapshot.state.tools if name],
            "calls": list(OF_CALLS) if snapshot.state.calls else [],
            "spoken": list(SPOKEN) if "turns" in snapshot.names else [],
            "recorded": list(RECORDED),
        },
        "indexed": run.indexed(),
        "partial": partial and partial._asdict(),
        "problem": run.problem,
    }


def steps_of(snapshot: Snapshot) -> list[int] | None:
    """Return the first and the last step with rollouts or metrics."""
    found = list(snapshot.live_step_range or ())
    logged = snapshot.metrics["step"]
    found += [logged[0].as_py(), logged[-1].as_py()] if len(logged) else []
    return [min(found), max(found)] if found else None


def _newest(run: OpenRun, snapshot: Snapshot) -> int | None:
    """Return the last step with rollouts that were trained on, or with any; without rollouts, one with metrics.

    A run ends with an evaluation, to whose step nothing else belongs.
    """
    # A step in which no response has a reward has their lengths.
    columns = [rollups_of(run, snapshot, name) for name in ("reward", "length")]
    trained = [lines_of(snapshot, lines, "train").step for lines in columns]
    steps = np.concatenate(trained if any(map(len, trained)) else [lines.step for lines in columns])
    logged = snapshot.metrics["step"]
    return int(steps.max()) if len(steps) else logged[-1].as_py() if len(logged) else None


def _tokens(run: OpenRun) -> int | None:
    snapshot = run.snapshot()
    if "length" not in snapshot.state.columns:
        return None
    key = (snapshot.rows, snapshot.state.dead)
    return run.cache.get("tokens", key, lambda: _sum(snapshot), most=1)


def _sum(snapshot: Snapshot) -> int:
    length, mask = snapshot.column("length"), snapshot.of("train")
    return int(np.nansum(length if mask is None else length[mask]))


def run_info(board: Board, query: RunQuery) -> dict[str, Any]:
    """Return ``run.json``: settings, versions, model."""
    return board.run(query.run).record.info

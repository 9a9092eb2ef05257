"""Two boards, each in its own process, star rollouts of the same run at the same time."""

import json
import threading
import urllib.request
from pathlib import Path

import pytest
from browser_helpers import BoardProcess
from index_helpers import new_run, record

STEPS, BATCH = 4, 30


def change(board: BoardProcess, method: str, step: int, sample: int, note: str) -> int:
    request = urllib.request.Request(
        f"{board.address}/api/runs/run/stars/{step}/{sample}",
        json.dumps({"note": note}).encode() if method == "PUT" else None,
        {"origin": board.address, "content-type": "application/json"},
        method=method,
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.status


@pytest.fixture(scope="module")
def boards(tmp_path_factory):
    folder = new_run(tmp_path_factory.mktemp("two") / "run")
    record(folder, range(STEPS), batch=BATCH)
    with BoardProcess(folder) as first, BoardProcess(folder) as second:
        yield folder, (first, second)


@pytest.mark.slow
def test_nothing_that_was_acknowledged_is_lost(boards: tuple[Path, tuple[BoardProcess, ...]]) -> None:
    folder, pair = boards
    acknowledged: list[tuple[int, int, str]] = []

    def star(board: BoardProcess, step: int) -> None:
        for sample in range(BATCH):
            assert change(board, "PUT", step, sample, "first") == 200
            if sample % 3 == 0:
                assert change(board, "DELETE", step, sample, "") == 200
            else:
                assert change(board, "PUT", step, sample, f"{step} {sample}") == 200
                acknowledged.append((step, sample, f"{step} {sample}"))

    threads = [threading.Thread(target=star, args=(pair[step % 2], step)) for step in range(STEPS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(acknowledged) == STEPS * BATCH * 2 // 3
    for board in pair:
        found = [(one["step"], one["sample"], one["note"]) for one in board.json("api/runs/run/stars")]
        assert found == sorted(acknowledged)
    assert not [path for path in folder.iterdir() if path.name.startswith(".stars.json")]

"""What a recorder could not write to its place, and wrote to a fallback folder, is added later."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest
from compaction_helpers import answers
from record_helpers import rollouts

from cavesson.record import Recorder, begin_attempt
from cavesson.record.maintain.compaction import compact
from cavesson.record.storage import Folder
from cavesson.record.write.fallback_folder import add_fallback

STEPS = 6


class Lost(Folder):
    """A folder that fails from a write of a file on, before it writes or after."""

    def __init__(self, folder: Path, name: str, writes: int, after: bool) -> None:
        super().__init__(folder)
        self.name, self.writes, self.after, self.is_lost = name, writes, after, False

    @contextmanager
    def writing(self, name: str) -> Iterator[IO[bytes]]:
        before = self.is_lost
        self.writes -= name == self.name
        self.is_lost = self.writes == 0
        if before or (self.is_lost and not self.after):
            raise ConnectionError("lost")
        with super().writing(name) as file:
            yield file
        if self.is_lost:
            raise ConnectionError("lost")


def record(place: Any, fallback: Path | None = None) -> BaseException | None:
    with Recorder(place, attempt=0, fallback=fallback, interval=0) as recorder:
        for step in range(STEPS):
            rows, tokens = rollouts(3, split=["train"] * 3)
            recorder.rollouts(step, rows, tokens)
            held_out, tokens = rollouts(2, sample=[3, 4], split=["eval"] * 2)
            recorder.rollouts(step, held_out, tokens)
            recorder.metrics(step, {"loss": step / 2})
        recorder.flush()
        return recorder.unreachable


@pytest.fixture
def whole(tmp_path: Path) -> str:
    begin_attempt(tmp_path / "whole", 0)
    record(tmp_path / "whole")
    return answers(tmp_path / "whole")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("merges", [0, 1, 2])
@pytest.mark.parametrize("after", [False, True], ids=["not written", "written"])
@pytest.mark.parametrize(("kind", "writes"), [("tokens", 1), ("rows", 1), ("rows", 2), ("steps", 1)])
def test_the_rest_is_added_even_if_the_record_has_been_merged(
    tmp_path: Path, whole: str, kind: str, writes: int, after: bool, merges: int
) -> None:
    folder, fallback = tmp_path / "run", tmp_path / "fallback"
    begin_attempt(folder, 0)
    error = record(Lost(folder, f"record/{kind}-{3:08d}-0000-0000.parquet", writes, after), fallback)
    assert isinstance(error, ConnectionError) and answers(folder) != whole
    for _ in range(merges):
        compact(folder)
    shutil.copytree(fallback, tmp_path / "copy")
    add_fallback(fallback, folder)
    assert answers(folder) == whole and not fallback.exists()
    # If it was interrupted just before it removed the folder, it is repeated.
    add_fallback(tmp_path / "copy", folder)
    compact(folder)
    assert answers(folder) == whole

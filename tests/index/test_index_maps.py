import os
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cavesson.index import maps
from cavesson.index.maps import NEAR, ask_for, mapped, mapped_table, read_ranges, release_memory


def test_numbers_and_tables_are_those_of_the_file(tmp_path):
    np.arange(10, dtype="<i4").tofile(tmp_path / "numbers")
    assert mapped(tmp_path / "numbers", "<i4", 7).tolist() == list(range(7))
    assert mapped(tmp_path / "missing", "<i4", 0).tolist() == []
    table = pa.table({"a": [1, 2], "b": ["x", None]})
    with pa.ipc.new_file(tmp_path / "table", table.schema) as writer:
        writer.write_table(table)
    assert mapped_table(tmp_path / "table")[0].equals(table)


def test_an_older_map_stays_as_it_was_while_the_file_grows_or_goes(tmp_path):
    path = tmp_path / "numbers"
    np.arange(5, dtype="<i4").tofile(path)
    before = mapped(path, "<i4", 5)
    with path.open("ab") as file:
        np.arange(5, 9, dtype="<i4").tofile(file)
    assert mapped(path, "<i4", 9).tolist() == list(range(9))
    path.unlink()
    assert before.tolist() == list(range(5))


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_pages_that_were_looked_at_are_given_back_and_come_again(tmp_path, monkeypatch):
    size = 64 << 20
    np.arange(size // 8, dtype="<i8").tofile(tmp_path / "numbers")
    values = mapped(tmp_path / "numbers", "<i8", size // 8)
    total = int(values.sum())

    def mapped_bytes() -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssFile"))
        return int(line.split()[1]) << 10

    full = mapped_bytes()
    monkeypatch.setattr(maps, "MUCH", 1 << 40)
    release_memory()
    assert mapped_bytes() > full - (1 << 20), "there is room enough"
    monkeypatch.setattr(maps, "MUCH", 0)
    release_memory()
    assert mapped_bytes() < full - size * 3 // 4
    assert int(values.sum()) == total


@given(gaps=st.lists(st.tuples(st.sampled_from([0, 1, NEAR, NEAR + 1]), st.integers(0, 300)), max_size=9))
def test_ranges_near_and_far_are_read(tmp_path_factory, gaps):
    whole = np.random.default_rng(0).integers(0, 256, 10 * (NEAR + 400), dtype=np.uint8).tobytes()
    path = tmp_path_factory.mktemp("maps") / "file"
    path.write_bytes(whole)
    starts, stops = np.cumsum(np.array(gaps, np.int64).reshape(-1, 2)).reshape(-1, 2).T
    ranges = zip(starts.tolist(), stops.tolist(), strict=True)
    with pytest.MonkeyPatch.context() as windows:
        windows.delattr(os, "pread")
        assert read_ranges(path, starts, stops) == [whole[start:stop] for start, stop in ranges]


def test_a_file_that_is_gone_is_not_asked_for(tmp_path):
    (tmp_path / "there").write_bytes(b"1")
    ask_for([tmp_path / "gone", tmp_path / "there"])

"""The folder of an index: a run from somebody else may hold anything in its place."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from index_helpers import indexed, new_run, record

import cavesson.record
from cavesson.index.build import Builder
from cavesson.index.folder import read_state
from cavesson.index.snapshot import snapshot
from cavesson.record.read.index_folder import index_folder


@pytest.fixture
def folder(tmp_path):
    folder = new_run(tmp_path / "run")
    record(folder, range(3))
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_an_index_lies_in_its_run(folder):
    run = cavesson.record.open(folder)
    assert index_folder(run) == folder / "index"
    indexed(folder)
    assert index_folder(run) == folder / "index"


@pytest.mark.parametrize("linked", ["index", "index/lock", "index/column-000", "index/.state.json"])
def test_an_index_with_links_is_not_touched(folder, tmp_path, cache, linked):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious.txt").write_text("precious")
    if linked == "index":
        (folder / "index").symlink_to(outside)
    else:
        indexed(folder)
        (folder / linked).unlink(missing_ok=True)
        (folder / linked).symlink_to(outside / "precious.txt")
    run = cavesson.record.open(folder)
    place = index_folder(run)
    assert place.is_relative_to(cache)
    builder = Builder(run, place)
    assert builder.update() and builder.state.rows == 18
    assert [path.name for path in outside.iterdir()] == ["precious.txt"]
    assert (outside / "precious.txt").read_text() == "precious"


def test_a_file_in_place_of_the_index_is_left_alone(folder, cache):
    (folder / "index").write_text("mine")
    assert index_folder(cavesson.record.open(folder)).is_relative_to(cache)
    assert (folder / "index").read_text() == "mine"


def test_what_is_not_ours_stays_when_an_index_is_built_anew(folder):
    index = folder / "index"
    (index / "notes").mkdir(parents=True)
    (index / "notes" / "thoughts.txt").write_text("keep")
    (index / "index.html").write_text("keep")
    indexed(folder)
    (index / "state.json").write_text("{}")
    assert indexed(folder).rows == 18
    assert (index / "notes" / "thoughts.txt").read_text() == (index / "index.html").read_text() == "keep"


def changed_state(index, change) -> None:
    content = json.loads((index / "state.json").read_bytes())
    change(content)
    (index / "state.json").write_text(json.dumps(content))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "change",
    [
        lambda s: s["columns"]["reward"].update(file="../../outside"),
        lambda s: s["columns"]["reward"].update(file="/etc/passwd"),
        lambda s: s["columns"]["reward"].update(file="state.json/../../run.json"),
        lambda s: s["columns"]["reward"].update(dtype="O"),
        lambda s: s.update(orders={"reward": "../../outside"}),
        lambda s: s.update(metrics="1/../../outside"),
        lambda s: s["pieces"][0].update(number="../../outside"),
        lambda s: s["pieces"][0].update(dead="../../outside"),
        lambda s: s.update(rows=10**9),
        lambda s: s.update(dead=5),
        lambda s: s.update(prompts=10**6),
        lambda s: s.update(ordered_rows=10**6, orders={"reward": "order-001-1"}),
    ],
)
def test_a_state_that_names_other_files_or_more_than_there_is_does_not_count(folder, change):
    wanted = indexed(folder).raw("reward").tolist()
    outside = folder.parent / "outside"
    outside.write_bytes(bytes(10_000))
    changed_state(folder / "index", change)
    assert read_state(folder / "index") is None and snapshot(folder / "index").rows == 0
    assert indexed(folder).raw("reward").tolist() == wanted, "it is built anew"
    assert outside.read_bytes() == bytes(10_000)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["column-", "words-", "rows-", "patterns-", "metrics-", "prompts"])
def test_an_index_that_lost_a_file_or_a_part_of_one_is_built_anew(folder, kind):
    indexed(folder)
    lost = next(path for path in (folder / "index").iterdir() if path.name.startswith(kind))
    lost.write_bytes(b"") if kind == "column-" else lost.unlink()
    assert snapshot(folder / "index").rows == 0
    assert indexed(folder).rows == 18


def test_a_run_that_may_only_be_read_is_indexed_in_the_cache(folder, cache, monkeypatch):
    # Root may write wherever the file system lets anybody.
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and access(path, mode))
    place = index_folder(cavesson.record.open(folder))
    assert place.is_relative_to(cache) and not place.is_relative_to(folder)


def test_runs_of_different_folders_have_different_places_in_the_cache(tmp_path, cache):
    places = set()
    for name in ("a", "b"):
        run = new_run(tmp_path / name)
        (run / "index").write_text("taken")
        places.add(index_folder(cavesson.record.open(run)))
    assert len(places) == 2 and all(place.parent == cache / "cavesson" / "index" for place in places)


def test_pandas_stays_out_while_it_is_not_needed():
    code = """
import sys
import numpy as np, pyarrow as pa
from cavesson.process_limits import small_process
small_process()
assert pa.array(np.arange(3)).to_numpy().tolist() == [0, 1, 2]
assert "pandas" not in sys.modules
import pandas
"""
    pytest.importorskip("pandas")
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_numbers_are_read_as_they_were_written(folder):
    shot = indexed(folder)
    content = np.fromfile(folder / "index" / shot.state.columns["reward"].file, "<f4")
    assert content.tolist() == shot.raw("reward").tolist()

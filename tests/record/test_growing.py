"""A reader looks while a step grows, and while what it looks at is merged."""

from typing import Any

import numpy as np
import pytest
from compaction_helpers import files, record
from record_helpers import rollouts

import cavesson
from cavesson.errors import UserError
from cavesson.record import Recorder, compact
from cavesson.record.read import query, views

JOINED = """
    SELECT sample, any_value(length), count(position) FROM rows FULL JOIN tokens USING (step, sample)
    GROUP BY ALL ORDER BY ALL
"""


def grow(recorder: Recorder, first: int, count: int) -> None:
    """Add to step 0 rollouts of as many tokens as their number says, and a metric."""
    rows, _ = rollouts(count, sample=np.arange(first, first + count))
    mask = np.arange(400) < np.arange(first, first + count)[:, None]
    recorder.rollouts(0, rows, {"mask": mask, "logprob": np.random.default_rng(0).normal(size=mask.shape)})
    recorder.metrics(0, {f"metric/{first}": 1.0})
    recorder.flush()


def test_a_question_is_answered_from_what_was_there_when_it_was_asked(folder):
    with Recorder(folder) as recorder:
        grow(recorder, 0, 2)
        run = cavesson.open(folder)
        joined, steps = run.sql(JOINED), run.sql("SELECT * FROM steps")
        grow(recorder, 2, 300)  # takes the place of the files
        assert joined.fetchall() == [(0, 0, 0), (1, 1, 1)]
        assert steps.fetchall() == [(0, 0, 1.0)]
        assert run.sql(JOINED).fetchall() == [(n, n, n) for n in range(302)]


def test_tokens_whose_rows_are_not_there_yet_do_not_count(folder):
    with Recorder(folder) as recorder:
        grow(recorder, 0, 3)
        (path,) = folder.glob("record/rows-*")
        before = path.read_bytes()
        grow(recorder, 3, 2)
    path.write_bytes(before)  # as if the process were just between the two files, or had been killed there
    run = cavesson.open(folder)
    assert run.sql(JOINED).fetchall() == [(0, 0, 0), (1, 1, 1), (2, 2, 2)]
    assert run.arrow("tokens", ["sample", "position"]).to_pydict() == {"sample": [1, 2, 2], "position": [0, 0, 1]}
    assert run.sql("SELECT count(*) FROM tokens").fetchall() == [(3,)]


def test_a_question_begins_anew_when_its_files_are_merged_meanwhile(folder, monkeypatch):
    asked = "SELECT step, count(*) AS n FROM rows GROUP BY step ORDER BY step"
    task = {"run": str(folder), "text": asked, "seconds": 10, "memory": 2**30, "limit": 10}
    monkeypatch.setattr(query, "_limit_memory", lambda size: None)  # this is not a separate process

    def merge_before(module: Any, name: str) -> None:
        step = getattr(module, name)

        def merged(*given: Any) -> Any:
            monkeypatch.setattr(module, name, step)
            assert compact(folder)
            return step(*given)

        monkeypatch.setattr(module, name, merged)

    record(folder, range(4))
    merge_before(query, "_check_is_select")  # the files are known, and not read yet
    assert query._answer(task)["n"].to_pylist() == [3] * 4
    record(folder, range(4, 8), attempt=1)
    merge_before(views, "_create_view")
    assert cavesson.open(folder).sql(asked).fetchall() == [(step, 3) for step in range(8)]


def test_a_file_that_is_missing_is_said_in_one_line(folder):
    record(folder, range(4))
    compact(folder)
    (name,) = files(folder, "record/tokens-*")
    (folder / "record" / name).unlink()
    run = cavesson.open(folder)
    for look in (lambda: run.rollout(0, 0), lambda: run.arrow("tokens"), lambda: run.sql("FROM tokens")):
        with pytest.raises(UserError, match="cannot be read") as caught:
            look()
        assert name in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(UserError, match=name):
        query.query(run, "SELECT * FROM tokens")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("where", ["attempts", "compactions"])
@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_a_broken_file_of_the_folder_is_named(folder, where, content):
    record(folder, range(4))
    compact(folder)
    (folder / where).mkdir(exist_ok=True)
    path = next((folder / where).glob("*.json"), folder / where / "0000.json")
    path.write_text(content)
    run = cavesson.open(folder)
    with pytest.raises(UserError, match=path.name):
        run.rows()
    with pytest.raises(UserError, match=path.name):
        query.query(run, "SELECT * FROM rows")

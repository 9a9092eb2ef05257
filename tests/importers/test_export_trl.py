"""What is exported as TRL's tables is imported again with the same values."""

import numpy as np
import pyarrow.parquet as pq
import pytest
from import_helpers import rows

from cavesson.errors import UserError
from cavesson.exporters.trl import export
from cavesson.importers import import_run
from cavesson.record import Recorder, begin_attempt, write_run


def record(folder, parts, split="train", reward=(0.75, -1.0)):
    folder.mkdir()
    write_run(folder, {"algorithm": "grpo"})
    with Recorder(folder, attempt=begin_attempt(folder, start_step=0)) as recorder:
        for step in (3, 12):
            columns = {
                "sample": np.arange(2),
                "split": [split, "train"],
                "prompt": ["1+1?", "é "],
                "response": ["2", ""],
            }
            columns |= {"reward": np.array(reward)} | ({"reward_parts": parts} if parts else {})
            recorder.rollouts(step, columns, {"mask": np.ones((2, 1), np.bool_)})


def test_an_export_comes_back_with_the_same_values(tmp_path):
    parts = [{"right": 1.0, "length": -0.25}, {"length": -1.0}]
    record(tmp_path / "run", parts)
    assert export(tmp_path / "run", tmp_path / "out") == 4
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "completions_00003.parquet", "completions_00012.parquet",
    ]  # fmt: skip
    names = pq.read_schema(tmp_path / "out" / "completions_00003.parquet").names
    assert names == ["step", "prompt", "completion", "right", "length", "advantage"]
    assert import_run(tmp_path / "out", tmp_path / "back").format == "trl"
    same = ("step", "sample", "prompt", "response", "reward", "reward_parts")
    assert rows(tmp_path / "back", *same) == rows(tmp_path / "run", *same)


def test_held_out_responses_are_apart(tmp_path):
    record(tmp_path / "run", None, split="eval")
    export(tmp_path / "run", tmp_path / "out")
    import_run(tmp_path / "out" / "held-out", tmp_path / "back", held_out=True)
    found = rows(tmp_path / "back", "step", "split", "prompt", "reward")
    assert found == [(3, "eval", "1+1?", 0.75), (12, "eval", "1+1?", 0.75)]


def test_a_part_with_the_name_of_another_column_is_refused(tmp_path):
    record(tmp_path / "run", [{"prompt": 1.0}, {"prompt": 0.0}])
    with pytest.raises(UserError, match="the part 'prompt' of the reward has the name of another column of TRL"):
        export(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()

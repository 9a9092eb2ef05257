import math
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from record_helpers import kept, plain, rollouts

import cavesson
from cavesson.record import Recorder, write_run, write_vocabulary
from cavesson.record.schema import TOKEN_COLUMNS
from cavesson.record.segments import segment_name
from cavesson.record.write.statistics import STATISTICS

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
FLOATS_32 = ["logprob", "ref_logprob", "sampler_logprob", "value", "token_reward", "advantage", "return", "entropy"]


@st.composite
def calls(draw):
    """Rows and tokens as a trainer hands them over, with any of the columns."""
    count, width = draw(st.integers(1, 4)), draw(st.integers(0, 4))
    lengths = draw(st.lists(st.integers(0, width), min_size=count, max_size=count))

    def each(strategy):
        return draw(st.lists(strategy, min_size=count, max_size=count))

    rows = {
        "sample": draw(st.permutations(range(count))),
        "prompt": each(TEXT),
        "response": each(TEXT),
        "reward": np.array(each(st.floats())),
    }
    optional = {
        "group": each(st.integers(-(2**63), 2**63 - 1)),
        "prompt_ids": each(st.lists(st.integers(0, 2**31 - 1), max_size=3)),
        "reward_parts": each(st.none() | st.dictionaries(TEXT, st.floats(), max_size=2)),
        "ref_reward": each(st.none() | st.floats()),
        "finish_reason": each(st.sampled_from(["eos", "stop", "length"])),
        "extra": each(st.none() | TEXT),
    }
    rows |= {name: optional[name] for name in draw(st.sets(st.sampled_from(sorted(optional))))}
    shape = (count, width)
    tokens = {"mask": np.arange(width) < np.array(lengths)[:, None]}
    if draw(st.booleans()):
        tokens["token_id"] = draw(npst.arrays(np.int64, shape, elements=st.integers(0, 2**31 - 1)))
    for name in draw(st.sets(st.sampled_from(FLOATS_32))):
        bits = draw(st.sampled_from([32, 64]))
        tokens[name] = draw(npst.arrays(f"f{bits // 8}", shape, elements=st.floats(width=bits)))
    return rows, tokens


@settings(max_examples=min(40, settings.default.max_examples))
@given(calls())
def test_what_goes_in_comes_out_and_the_rest_is_null(call):
    rows, tokens = call
    with tempfile.TemporaryDirectory() as name:
        write_run(Path(name), {})
        with Recorder(Path(name), attempt=3, rank=2) as recorder:
            recorder.rollouts(7, rows, tokens)
        run = cavesson.open(Path(name))
        read_rows, read_tokens = run.rows().to_pylist(maps_as_pydicts="strict"), run.tokens(7).to_pylist()
    assert [row["sample"] for row in read_rows] == sorted(rows["sample"])
    for row in read_rows:
        i = rows["sample"].index(row["sample"])
        length = int(tokens["mask"][i].sum())
        assert [row.pop(k) for k in ("step", "attempt", "rank", "length")] == [7, 3, 2, length]
        for statistic in set(STATISTICS) - {"length"}:
            row.pop(statistic)
        given_row = {name: values[i] for name, values in rows.items()} | {"reward": float(rows["reward"][i])}
        assert plain({k: v for k, v in row.items() if v is not None}) == plain(
            {k: v for k, v in given_row.items() if v is not None}
        )
    expected = []
    real = tokens["mask"]
    for name in tokens.keys() - {"mask"}:
        tokens[name][real] = kept(name, tokens[name][real])  # padding is not recorded and decides nothing
    for sample in range(len(rows["sample"])):
        i = rows["sample"].index(sample)
        for position in range(int(tokens["mask"][i].sum())):
            token = {column.name: None for column in TOKEN_COLUMNS}
            token |= {"step": 7, "sample": sample, "position": position}
            renamed = {{"mask": "learned"}.get(name, name): array for name, array in tokens.items()}
            token |= {name: array[i, position].item() for name, array in renamed.items()}
            expected.append(token)
    assert plain(read_tokens) == plain(expected)


def test_file_layout(folder):
    rows, tokens = rollouts()
    with Recorder(folder, attempt=1, rank=2) as recorder:
        recorder.rollouts(3, rows, tokens | {"logprob": np.zeros((2, 3), np.float32)})
        recorder.metrics(3, {"loss": 1.0})
    names = sorted(path.name for path in (folder / "record").iterdir())
    assert names == [f"{kind}-00000003-0001-0002.parquet" for kind in ("rollups", "rows", "steps", "tokens")]
    group = pq.read_metadata(folder / "record" / names[3]).row_group(0)
    chunks = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    assert {chunk.compression for chunk in chunks.values()} == {"ZSTD"}
    assert "BYTE_STREAM_SPLIT" in chunks["logprob"].encodings
    assert not chunks["logprob"].has_dictionary_page
    assert chunks["logprob"].physical_type == "FLOAT"


def test_metrics_of_any_name_become_float64_columns(folder):
    with Recorder(folder) as recorder:
        recorder.metrics(0, {"kl/coef": np.float32(0.5), "a.b": 2, "loss": math.nan})
        recorder.metrics(1, {"loss": 0.1})
        recorder.metrics(1, {"eval/reward": 3})
    table = cavesson.open(folder).steps()
    assert plain(table.to_pylist()) == plain(
        [
            {"step": 0, "attempt": 0, "kl/coef": 0.5, "a.b": 2.0, "loss": math.nan, "eval/reward": None},
            {"step": 1, "attempt": 0, "kl/coef": None, "a.b": None, "loss": 0.1, "eval/reward": 3.0},
        ]
    )
    assert {table.schema.field(name).type for name in table.column_names[2:]} == {pa.float64()}


def test_a_second_call_for_a_step_adds_to_it(folder):
    rows, tokens = rollouts()
    with Recorder(folder) as recorder:
        recorder.rollouts(0, rows | {"sample": [3, 4], "split": ["eval"] * 2}, tokens)
        recorder.rollouts(0, rows, tokens | {"value": np.ones((2, 3), np.float32)})
    run = cavesson.open(folder)
    found = {(row["sample"], row["split"]) for row in run.rows().to_pylist()}
    assert found == {(0, None), (1, None), (3, "eval"), (4, "eval")}
    assert run.tokens(0)["sample"].to_pylist() == [0] * 3 + [1] * 3 + [3] * 3 + [4] * 3
    assert run.tokens(0)["value"].to_pylist() == [1.0] * 6 + [None] * 6
    on_disk = pq.ParquetFile(folder / segment_name("tokens", 0, 0, 0)).read()
    assert on_disk["sample"].to_pylist() == [0] * 3 + [1] * 3 + [3] * 3 + [4] * 3


def test_nothing_recorded_is_replaced(folder):
    rows, tokens = rollouts()
    with Recorder(folder) as recorder:
        recorder.rollouts(1, rows, tokens)
        recorder.metrics(1, {"loss": 1.0})
        with pytest.raises(ValueError, match="step 1 already has 0"):
            recorder.rollouts(1, rows | {"sample": [5, 0]}, tokens)
        with pytest.raises(ValueError, match="step 1 already has 'loss'"):
            recorder.metrics(1, {"loss": 2.0})
        with pytest.raises(ValueError, match="step 0 is closed"):
            recorder.rollouts(0, rows, tokens)
    with Recorder(folder, attempt=0) as recorder, pytest.raises(ValueError, match="step 1 is closed"):
        recorder.rollouts(1, rows | {"sample": [5, 6]}, tokens)
    assert cavesson.open(folder).rows(["sample"]).to_pylist() == [{"sample": 0}, {"sample": 1}]


@pytest.mark.parametrize(
    ("rows", "tokens", "message"),
    [
        ({"rewrad": [1, 2]}, {}, "no column 'rewrad'"),
        ({"step": [1, 1]}, {}, "no column 'step'"),
        ({"kl_k1": [1, 1]}, {}, "no column 'kl_k1'"),
        ({"reward": [1.0]}, {}, "'reward' has 1 entries"),
        ({"sample": [1, 1]}, {}, "names a rollout twice"),
        ({}, {"logprobs": np.zeros((2, 3))}, "no column 'logprobs'"),
        ({}, {"logprob": np.zeros((2, 4))}, r"'logprob' has shape \(2, 4\)"),
        ({}, {"mask": np.full((2, 3), 2)}, "expected bool"),
        ({}, {"mask": np.ones(2, np.bool_)}, "expected bool"),
        ({}, {"mask": [[True], [True, True]]}, "leave it out"),
    ],
)
def test_wrong_columns_are_refused_at_once(folder, rows, tokens, message):
    good_rows, good_tokens = rollouts()
    with Recorder(folder) as recorder, pytest.raises(ValueError, match=message):
        recorder.rollouts(0, good_rows | rows, good_tokens | tokens)
    assert not list(folder.glob("record/*"))


@given(calls(), st.data())
def test_where_the_padding_is_changes_nothing(call, data):
    """The tokens of every row are moved to the right in wider arrays, as padding or a prompt on their left would."""
    rows, tokens = call
    count, width = tokens["mask"].shape
    moved = {name: np.zeros((count, width + 3), array.dtype) for name, array in tokens.items()}
    for i, by in enumerate(data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))):
        for name, array in tokens.items():
            moved[name][i, by : by + width] = array[i]
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for name, own in (("right", tokens), ("left", moved)):
            with Recorder(Path(folder, name)) as recorder:
                recorder.rollouts(0, rows, own)
            found.append(cavesson.open(Path(folder, name)).tokens(0))
        assert plain(found[0]) == plain(found[1])


def test_tensors_and_attention_masks_are_taken_as_they_are(folder):
    """What a loop has at hand: tensors, padded on the left, with a tokenizer's mask of zeros and ones."""
    rows, _ = rollouts()
    tokens = {
        "attended": torch.tensor([[0, 1, 1], [1, 1, 1]]),
        "learned": torch.tensor([[0.0, 1.0, 1.0], [0.0, 1.0, 1.0]]),
        "token_id": torch.tensor([[0, 5, 6], [7, 8, 9]]),
    }
    with Recorder(folder) as recorder:
        recorder.rollouts(0, rows, tokens)
    found = cavesson.open(folder).tokens(0)
    assert found["position"].to_pylist() == [0, 1, 0, 1, 2]
    assert found["token_id"].to_pylist() == [5, 6, 7, 8, 9]
    assert found["learned"].to_pylist() == [True, True, False, True, True]


@pytest.mark.parametrize(
    "values", [torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(2, 3, requires_grad=True)], ids=["half", "gradient"]
)
def test_a_tensor_that_is_no_array_is_refused_with_the_way_to_pass_it(folder, values):
    rows, tokens = rollouts()
    message = r"tokens column 'logprob' \(.*\): pass it as .detach\(\).float\(\).cpu\(\)"
    with Recorder(folder) as recorder:
        with pytest.raises(ValueError, match=message):
            recorder.rollouts(0, rows, tokens | {"logprob": values})
        recorder.rollouts(0, rows, tokens | {"logprob": values.detach().float().cpu()})


@pytest.mark.parametrize("column", ["prompt", "response", "reward"])
def test_missing_required_columns_are_refused_at_once(folder, column):
    rows, tokens = rollouts()
    del rows[column]
    with Recorder(folder) as recorder, pytest.raises(ValueError, match=f"required column '{column}'"):
        recorder.rollouts(0, rows, tokens)


def test_vocabulary(folder):
    write_vocabulary(folder, ["a", "Ġb", ""], ["a", " b", "\n"])
    assert cavesson.open(folder).token_texts([1, 0, 2, 3, None, -1]) == [" b", "a", "\n", "<3>", "<None>", "<-1>"]


def test_the_record_needs_no_torch():
    modules = "cavesson.record, cavesson.record.read.show, cavesson.importers, cavesson.exporters"
    code = f"import sys, {modules}; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_half_a_surrogate_pair_is_escaped_and_stops_nothing(folder):
    with Recorder(folder) as recorder:
        rows = {"prompt": ["\ud83d", "p"], "response": ["a\udc00b", "\U0001f600"], "reward": [0.0, 1.0]}
        recorder.rollouts(0, rows | {"extra": [None, "\udfff"]}, {"token": [["\ud83d", "\ude00"], ["c"]]})
    run = cavesson.open(folder)
    found = [tuple(row.values()) for row in run.rows(["prompt", "response", "extra"]).to_pylist()]
    assert found == [("\\ud83d", "a\\udc00b", None), ("p", "\U0001f600", "\\udfff")]
    assert run.tokens(0)["token"].to_pylist() == ["\\ud83d", "\\ude00", "c"]


def test_a_recorder_needs_no_duckdb(tmp_path):
    code = "import sys, cavesson; r = cavesson.Recorder('run'); r.metrics(0, {'a': 1.0}); r.close(); "
    code += "run = cavesson.open('run'); run.rows(); print('duckdb' in sys.modules, run.steps()['a'])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert found.stdout.startswith("False")


def test_a_recorder_alone_makes_a_run_and_goes_on_with_it(tmp_path):
    def train(steps: range) -> None:
        with cavesson.Recorder(tmp_path / "run") as recorder:
            for step in steps:
                rows = {"prompt": ["a", "b"], "response": ["x", "yz"], "reward": [step, 1.0]}
                recorder.rollouts(step, rows, {"token": [["x"], ["y", "z"]], "logprob": [[-0.5], [-1.0, -0.25]]})
                recorder.rollouts(step, {"prompt": ["c"], "response": ["w"], "reward": [2.0], "split": ["eval"]})

    train(range(4))
    run = cavesson.open(tmp_path / "run")
    assert run.info["cavesson"]
    train(range(2, 3))
    rows = run.rows(["step", "sample", "attempt", "reward", "split", "length"]).to_pylist()
    first = [(0.0, None, 1), (1.0, None, 2), (2.0, "eval", None)]
    # What the first start recorded from step 2 on is superseded, and what has no tokens has no length.
    wanted = [(step, sample, step // 2, reward + step * (not sample), *rest) for step in range(3)
              for sample, (reward, *rest) in enumerate(first)]  # fmt: skip
    assert [tuple(row.values()) for row in rows] == wanted
    assert run.tokens(2, 1)["token"].to_pylist() == ["y", "z"]
    write_run(tmp_path / "run", {"mine": 1})
    train(range(3, 4))
    assert cavesson.open(tmp_path / "run").info == {"mine": 1}


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ({"logprob": [[1.0]]}, r"tokens column 'logprob' has lists of \[1\] tokens, expected 2"),
        ({"logprob": [[1.0], []], "token_id": [[1], [2]]}, r"tokens column 'token_id' has lists of \[1, 1\] tokens"),
    ],
)
def test_lists_of_tokens_that_do_not_fit_are_refused(folder, tokens, message):
    with Recorder(folder) as recorder, pytest.raises(ValueError, match=message):
        recorder.rollouts(0, {"prompt": ["a", "b"], "response": ["x", "yz"], "reward": [0.0, 1.0]}, tokens)

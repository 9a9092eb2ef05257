"""Whatever is in a file: what is broken is counted, kept byte for byte, and stops nothing."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from import_helpers import restored

import cavesson
from cavesson.errors import UserError
from cavesson.importers import FORMATS, import_run
from cavesson.importers.reading import File, parse
from cavesson.importers.rollout import Broken
from cavesson.importers.sources import Source

TEXT = st.text(max_size=6) | st.sampled_from(
    ["\ud800", "\\\udfff", "\x00", "\u2028", "../../etc", "<script>", "\x1b[2J"]
)
NUMBER = st.integers() | st.floats() | st.sampled_from([10**30, -(2**63), 2**53 + 1, 1e308, -0.0, True])
JSON = st.recursive(
    st.none() | st.booleans() | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
GOOD: dict[str, dict[str, Any]] = {
    "rl-logging-board": {
        "prompt": "p", "response": "r", "reward": 1.5, "step": 3, "response_tokens": ["a", "好"],
        "logprobs": [-1.0, -2.0], "ref_logprobs": [-1.5, -2.0], "values": [0.0, 1.0], "token_rewards": [0.0, 1.5],
        "ref_response": "r", "ref_reward": 0.5, "ground_truth": "g", "valid_reward": 1.0,
    },
    "verl": {"input": "p", "output": "r", "gts": "g", "score": 1.5, "step": 3, "acc": 1.0},
    "openrlhf": {"input": "p", "output": "r", "reward": 1.5},
    "trl": {"step": 3, "prompt": "p", "completion": [{"role": "a", "content": "r"}], "f": 1.5, "advantage": 0.0},
    "nemo-rl": {
        "content": [["p", "r"]], "rewards": [1.5], "input_lengths": [3], "token_ids": [[1, 2, 3, 0]],
        "token_loss_mask": [[0, 1, 1, 0]], "advantages": [[0.0, 1.0, 1.0, 0.0]],
        "generation_logprobs": [[0.0, -1.0, -1.0, 0.0]], "prev_logprobs": [[0.0, -1.0, -1.0, 0.0]], "idx": 0,
    },
    "prime-rl": {
        "run": {"work": {"type": "train", "step": 3}},
        "group": {"id": "g"},
        "traces": [{
            "nodes": [
                {"message": {"role": "user", "content": "p"}, "token_ids": [1], "mask": [False], "parent": None},
                {"message": {"role": "assistant", "content": "r"}, "token_ids": [2], "mask": [True], "sampled": True,
                 "parent": 0, "logprobs": [-1.0], "advantages": [0.5], "reference_logprobs": [-1.5]},
            ],
            "rewards": {"f": {"score": 1.5, "weight": 1.0}},
            "calls": [{"finish_reason": "stop"}],
        }],
    },
    "skyrl": {"input_prompt": "p", "output_response": "r", "score": [0.5, 1.0], "stop_reason": "stop"},
    "openenv": {
        "schema_version": 1, "step": 3, "reward": 1.5,
        "turns": [{
            "node_id": "n", "prompt_token_ids": [1], "completion_token_ids": [2, 3], "per_token_logps": [-1.0, -2.0],
            "loss_mask": [0, 1, 1], "request": {"messages": [{"role": "user", "content": "p"}]},
            "response": {"choices": [{"message": {"role": "assistant", "content": "r"}, "finish_reason": "length"}]},
        }],
    },
    "areal": {
        "task_id": 1, "prompt": "p", "completion": "r", "reward": 1.5, "head_version": 2, "tail_version": 3,
    },
    "art": {
        "trajectories": [{
            "reward": 1.5, "metrics": {"f": 1.0}, "metadata": {"id": "m"}, "tools": None, "logs": ["l"],
            "messages_and_choices": [
                {"role": "user", "content": "p"},
                {"finish_reason": "stop", "index": 0, "message": {"role": "assistant", "content": "r"},
                 "logprobs": {"content": [{"token": "token_id:2", "logprob": -1.0}]}},
            ],
        }],
        "step": 3,
    },
    "slime": {
        "rollout_id": 3, "prompt": "p", "response": "r", "tokens": [1, 2, 3], "response_length": 2, "reward": 1.5,
        "loss_mask": [1, 0], "rollout_log_probs": [-1.0, 0.0], "status": "truncated", "label": "g", "metadata": {},
        "weight_versions": ["2"], "remove_sample": False,
    },
    "inspect": {
        "id": 1, "epoch": 1, "input": "p", "target": "g", "scores": {"f": {"value": "C", "explanation": "e"}},
        "messages": [{"role": "user", "content": "p", "source": "input"}, {"role": "assistant", "content": "r"}],
        "output": {"model": "m", "completion": "r", "choices": [
            {"message": {"role": "assistant", "content": "r"}, "stop_reason": "stop",
             "logprobs": {"content": [{"token": "r", "logprob": -1.5}]}},
        ]},
    },
    "trackio": {
        "id": "r:0", "step": 3, "key": "k", "metadata": {"reward": 1.5, "scores": {"f": 1.0}, "ground_truth": "g"},
        "messages": [{"role": "user", "content": "p"}, {"role": "assistant", "content": "r"}], "spans": [],
    },
    "open-instruct": {
        "step": 3, "prompt_tokens": [1], "response_tokens": [2, 3], "reward": 1.5, "advantage": 0.5,
        "finish_reason": "stop", "logprobs": [-1.0, -2.0],
    },
    "plain": {
        "step": 3, "prompt": "p", "response": "r", "reward": 1.5, "group": 1, "reward_parts": {"f": 1.0},
        "prompt_ids": [1], "token_id": [1, 2], "logprob": [-1.0, -2.0], "mask": [True, False], "finish_reason": "eos",
    },
}  # fmt: skip
NAMES = {"nemo-rl": "train_data_step3.jsonl", "prime-rl": "traces.jsonl"}


@st.composite
def changed(draw: st.DrawFn, value: Any) -> Any:
    """The value with something anywhere inside it replaced, left out, or added."""
    choice = draw(st.integers(0, 5))
    if choice == 0:
        return draw(JSON)
    if isinstance(value, dict) and value:
        key = draw(st.sampled_from(sorted(value)))
        if choice == 1:
            return {k: v for k, v in value.items() if k != key}
        if choice == 2:
            return value | {draw(TEXT): draw(JSON)}
        return value | {key: draw(changed(value[key]))}
    if isinstance(value, list) and value:
        at = draw(st.integers(0, len(value) - 1))
        inner = draw(changed(value[at]))
        return draw(st.sampled_from([[*value[:at], inner, *value[at + 1 :]], value[:at], [*value, inner]]))
    return draw(JSON)


def dump(value: Any) -> bytes:
    # Python writes NaN and infinities, and escapes halves of surrogate pairs.
    return json.dumps(value).encode()


@st.composite
def line(draw: st.DrawFn, good: dict[str, Any]) -> bytes:
    choice = draw(st.integers(0, 7))
    if choice == 0:
        return draw(st.binary(max_size=20)).replace(b"\n", b" ")
    if choice == 1:
        whole = dump(good)
        return whole[: draw(st.integers(0, len(whole) - 1))]
    if choice == 2:
        return b'{"step": 1, ' + dump(good)[1:]  # a key that occurs twice
    if choice == 3:
        return (
            dump(good)
            .replace(b'"p"', b'"p\xff"')
            .replace(b"1.5", draw(st.sampled_from([b"1e999", b"-", b"0x1", b"1" * 500])))
        )
    return dump(draw(changed(good))) + draw(st.sampled_from([b"", b"\r", b"  ", b"\x00"]))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", list(FORMATS))
@settings(max_examples=min(25, settings.default.max_examples))
@given(data=st.data())
def test_nothing_stops_an_import_and_nothing_is_lost(name, data):
    good = GOOD[name]
    broken = data.draw(st.lists(line(good), max_size=5))
    start = data.draw(st.sampled_from([b"", b"\xef\xbb\xbf"]))
    end = data.draw(st.sampled_from([b"\n", b""]))
    content = start + b"\n".join([dump(good), *broken, dump(good)]) + end
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        source = folder / NAMES.get(name, "in.jsonl")
        source.write_bytes(content)
        report = import_run(source, folder / "run", name)
        check(folder / "run", report, start + dump(good), broken, dump(good))


@pytest.mark.parametrize("name", list(FORMATS))
def test_a_name_that_is_no_text_stops_nothing(name, tmp_path):
    """Half a surrogate pair, which JSON can escape and UTF-8 cannot hold, as a key, a part's name and a reward's."""
    good = GOOD[name]
    odd = [{**good, "\ud800": 0.5}]
    for key, value in good.items():
        if isinstance(value, dict):
            odd.append({**good, key: {**value, "\ud800": next(iter(value.values()), 1.0)}})
    broken = [dump(record) for record in odd]
    source = tmp_path / NAMES.get(name, "in.jsonl")
    source.write_bytes(b"\n".join([dump(good), *broken, dump(good)]) + b"\n")
    report = import_run(source, tmp_path / "run", name)
    check(tmp_path / "run", report, dump(good), broken, dump(good))


def check(run: Path, report: Any, first: bytes, broken: list[bytes], last: bytes) -> None:
    rejected = {}
    if report.rejected:
        for text in (run / "rejected.jsonl").read_text(encoding="utf-8").splitlines():
            kept = json.loads(text)
            rejected[kept["line"]] = restored(text)
            assert kept["reason"]
    assert len(rejected) == report.rejected
    given = [first, *broken, last]
    assert not {1, len(given)} & rejected.keys()  # the first and the last are whole
    for number, content in rejected.items():
        assert content == given[number - 1]
    # Every line that is not blank was either read (a record can be several rollouts, or none) or kept.
    read = sum(1 for i, content in enumerate(given, start=1) if content.strip() and i not in rejected)
    table = cavesson.open(run).rows(["step", "sample", "prompt", "response", "reward"])
    assert table.num_rows == report.rollouts
    assert report.rollouts >= 2 and (report.rollouts == read or report.format in ("art", "prime-rl", "trl", "plain"))
    keys = list(zip(table["step"].to_pylist(), table["sample"].to_pylist(), strict=True))
    assert len(set(keys)) == len(keys)
    for step in set(table["step"].to_pylist()):
        cavesson.open(run).tokens(step)


@settings(max_examples=min(15, settings.default.max_examples))
@given(st.lists(changed(GOOD["trl"]).filter(lambda v: isinstance(v, dict)), min_size=1, max_size=4))
@example([{}])  # a table without columns, and so without rows
def test_tables_of_trl_with_any_columns(records):
    names = sorted({str(name) for record in records for name in record})
    columns = {}
    for name in names:
        try:
            columns[name] = pa.array([record.get(name) for record in records])
        except (pa.ArrowException, ValueError, TypeError, OverflowError):
            return  # no such Parquet file can be
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        columns = {name.encode(errors="replace").decode(): array for name, array in columns.items()}
        table = pa.table(columns)
        good = pa.table({"step": [1], "prompt": ["p"], "completion": ["c"], "f": [1.0], "advantage": [0.0]})
        for number, part in enumerate((good, table)):
            try:
                pq.write_table(part, folder / f"completions_{number}.parquet")
            except (pa.ArrowException, ValueError, TypeError):
                return
        report = import_run(folder, folder / "run", "trl")
        # A file that has nothing in common with the format is not read, which is said.
        has_keys = bool({"prompt", "completion", "advantage", "advantages", "reward"} & columns.keys())
        assert report.files == 1 + has_keys or not table.num_rows
        assert has_keys or not table.num_rows or report.notes == ["1 file not read: completions_1.parquet"]
        assert report.rollouts + report.rejected == 1 + has_keys * table.num_rows
        assert cavesson.open(folder / "run").rows(["prompt"]).num_rows == report.rollouts


def test_bytes_are_counted_as_they_are(tmp_path):
    path = tmp_path / "f.jsonl"
    path.write_bytes(b"\xef\xbb\xbfa\r\n\nlast")
    records = list(File(path).read(last=True))
    assert [(r.line, r.offset, r.size, r.content) for r in records] == [
        (1, 0, 5, b"\xef\xbb\xbfa\r"),
        (2, 6, 0, b""),
        (3, 7, 4, b"last"),
    ]


def test_a_line_that_memory_cannot_hold_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr("cavesson.importers.reading.LONGEST", 1000)
    monkeypatch.setattr("cavesson.importers.reading.BUFFER", 64)
    good = dump(GOOD["verl"])
    path = tmp_path / "in.jsonl"
    path.write_bytes(good + b"\n" + b"x" * 5000 + b"\n" + good + b"\n" + b"y" * 1000)
    report = import_run(path, tmp_path / "run", "verl")
    assert (report.rollouts, report.rejected) == (2, 2)
    kept = [json.loads(text) for text in (tmp_path / "run" / "rejected.jsonl").read_text().splitlines()]
    assert [(k["line"], k["offset"], k["size"]) for k in kept] == [
        (2, len(good) + 1, 5000),
        (4, 2 * len(good) + 5003, 1000),
    ]
    assert all("longer than" in k["reason"] and "text" not in k for k in kept)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", list(FORMATS))
def test_deep_and_long_records_stop_nothing(tmp_path, name):
    good = GOOD[name]
    key = next(key for key in good if key != "run")
    lines = [dump(good)]
    for depth in (100, 500, 900, 960, 980, 995, 1010, 1030, 100_000):
        for left, right in ((b"[", b"]"), (b'{"a":', b"}")):
            deep = left * depth + b"1" + right * depth
            lines += [deep, dump(good)[:-1] + b', "more": ' + deep + b"}", b'{"' + key.encode() + b'": ' + deep + b"}"]
    lines += [dump(good)[:-1] + b', "more": "' + b"x" * 10_000_000 + b'"}', b"[" + b"1," * 5_000_000, dump(good)]
    source = tmp_path / "in" / NAMES.get(name, "in.jsonl")
    source.parent.mkdir()
    source.write_bytes(b"\n".join(lines))
    report = import_run(source, tmp_path / "run", name)
    kept = [json.loads(line)["line"] for line in (tmp_path / "run" / "rejected.jsonl").read_text().splitlines()]
    assert report.rollouts + report.rejected == len(lines) and len(kept) == report.rejected
    # What is wholly broken is kept; what only has a deep or long value more is read as far as it can be.
    assert not {1, 3, len(lines) - 2, len(lines)} & set(kept) and {2, len(lines) - 1} < set(kept)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "run"]


def test_names_in_a_source_become_no_paths(tmp_path):
    up = "../../up"
    record = GOOD["plain"] | {"split": up, "prompt": up, "reward_parts": {up: 1.0}, "finish_reason": up, up: up}
    folder = tmp_path / "a" / "b" / "in"
    folder.mkdir(parents=True)
    for rank in (1, 2):
        (folder / f"{rank} ..\\..%2f..%2fup.jsonl").write_bytes(dump(record | {"logprobs": [0.5]}))
    before = set(tmp_path.rglob("*"))
    for name in ("plain", "rl-logging-board"):
        run = folder / name
        assert import_run(folder, run, name).rollouts == 2
        assert not [path for path in {*tmp_path.rglob("*")} - before if run not in (path, *path.parents)]
        before = set(tmp_path.rglob("*"))
    assert cavesson.open(folder / "plain").rows(["split"])["split"].to_pylist() == [up, up]


def plain_table(**columns: pa.Array) -> pa.Table:
    return pa.table({"prompt": ["p"] * 3, "response": ["r"] * 3, "reward": [1.0, 2.0, 3.0], **columns})


@pytest.mark.parametrize(
    "values",
    [
        pa.array([0, 2**62, 1], pa.timestamp("us")),
        pa.array([0, 2**30, 1], pa.date32()),
        pa.array([0, 2**62, 1], pa.duration("s")),
        pa.array([{"at": 0}, {"at": -(2**62)}, None], pa.struct([("at", pa.timestamp("ms", "UTC"))])),
    ],
    ids=str,
)
def test_a_date_that_python_has_not_is_a_broken_row(tmp_path, values):
    pq.write_table(plain_table(at=values), tmp_path / "in.parquet")
    report = import_run(tmp_path / "in.parquet", tmp_path / "run", "plain")
    assert (report.rollouts, report.rejected) == (2, 1)
    (kept,) = map(json.loads, (tmp_path / "run" / "rejected.jsonl").read_text().splitlines())
    assert kept["line"] == 2 and "contains a value that Python cannot represent" in kept["reason"]
    assert cavesson.open(tmp_path / "run").rows(["reward"])["reward"].to_pylist() == [1.0, 3.0]


@pytest.mark.parametrize("depth", [50, 300, 900])
def test_deep_tables_stop_nothing(tmp_path, depth):
    kind: pa.DataType = pa.int64()
    value: Any = 1
    for _ in range(depth):
        kind, value = pa.list_(kind), [value]
    pq.write_table(pa.table({"prompt": ["p"], "response": ["r"], "reward": [1.0]}), tmp_path / "a.parquet")
    try:
        deep = pa.array([value, None, None], kind)
        pq.write_table(plain_table(deep=deep), tmp_path / "b.parquet")
    except (RecursionError, pa.ArrowException, OSError):
        return  # no such file can be written from here
    report = import_run(tmp_path, tmp_path / "run", "plain")
    assert report.rollouts >= 1 and report.rollouts + report.rejected in (2, 4)


def test_a_deep_table_of_weights_and_biases_is_a_broken_file(tmp_path):
    folder = tmp_path / "in" / "media" / "table"
    folder.mkdir(parents=True)
    deep = "[" * 100_000 + "]" * 100_000
    (folder / "generated_samples_1.table.json").write_text(f'{{"columns": ["a"], "data": [[{deep}]]}}')
    with pytest.raises(UserError, match="nested too deeply"):
        import_run(folder / "generated_samples_1.table.json", tmp_path / "run", "openrlhf")


@pytest.mark.parametrize(
    "twice", [b'{"reward": 7, ', b'{"reward" :7,', b'{"rew\\u0061rd":7, ', b'{"more": {"a": 1, "b": [{"c":1,"c":2}]}, ']
)
def test_a_key_that_comes_twice_loses_nothing(tmp_path, twice):
    good = {"prompt": 'as in {"a": 1, "b" : 2} or \\":', "response": "r", "reward": 1.0, "step": 0, "k\\": {"": [{}]}}
    path = tmp_path / "in.jsonl"
    path.write_bytes(dump(good) + b"\n" + twice + dump(good)[1:] + b"\n" + dump(good | {"nan": float("nan")}) + b"\n")
    report = import_run(path, tmp_path / "run", "rl-logging-board")
    assert (report.rollouts, report.rejected) == (2, 1)
    assert "occurs twice" in report.quotes[0]


def test_a_key_that_comes_twice_is_found_at_once_among_many():
    keys = [f'"{number}":0' for number in range(40_000)]
    began = time.process_time()
    with pytest.raises(Broken, match="the key '39999' occurs twice"):
        parse(f"{{{','.join([*keys, keys[-1]])}}}".encode())
    assert time.process_time() - began < 10  # comparing each with each would take a minute


@settings(max_examples=min(200, settings.default.max_examples))
@given(st.data())
def test_keys_that_come_twice_are_found_and_no_others(data):
    """Beside Python's own parser, which is asked for the pairs; texts that look like pairs are none."""
    value = data.draw(JSON.filter(lambda value: isinstance(value, dict)))
    like_pairs = data.draw(st.lists(st.sampled_from(['":', ":", "\\", '{"a": 1, "a": 2}', 'b\\\\":']), max_size=4))
    text = dump(value | {"texts": like_pairs, **dict.fromkeys(like_pairs)})
    if data.draw(st.booleans()):
        text = b'{"texts" :1, ' + text[1:]

    def pairs(found: list[tuple[str, Any]]) -> Any:
        twice.extend(found) if len({key for key, _ in found}) < len(found) else None
        return dict(found)

    twice: list[Any] = []
    json.loads(text, object_pairs_hook=pairs)
    if twice:
        with pytest.raises(Broken, match="occurs twice"):
            parse(text)
    else:
        parse(text)


def test_names_of_files_that_are_no_text(tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    name = os.fsdecode(b"rank\xff\x1b[J.jsonl")
    (source / name).write_bytes(dump(GOOD["rl-logging-board"]) + b"\nbroken\n")
    done = subprocess.run(
        [sys.executable, "-m", "cavesson", "import", os.fsencode(source), tmp_path / "run"], capture_output=True
    )
    assert done.returncode == 0 and b"\x1b" not in done.stdout + done.stderr, done.stderr.decode()
    assert cavesson.open(tmp_path / "run").info["ranks"] == {"0": "rank\\udcff\x1b[J.jsonl"}
    (kept,) = map(json.loads, (tmp_path / "run" / "rejected.jsonl").read_text().splitlines())
    assert os.fsencode(kept["file"]) == os.fsencode(source / name)
    again = tmp_path / os.fsdecode(b"\xfe.jsonl")
    again.write_bytes(dump(GOOD["verl"]) + b"\n")
    assert import_run(again, tmp_path / "again").rollouts == 1
    assert cavesson.open(tmp_path / "again").info["source"].endswith("\\udcfe.jsonl")


@pytest.mark.slow
def test_more_files_than_there_can_be_processes(tmp_path):
    (tmp_path / "0.jsonl").write_bytes(dump(GOOD["rl-logging-board"]) + b"\n")
    for number in range(1, 2**15 + 1):
        os.link(tmp_path / "0.jsonl", tmp_path / f"{number}.jsonl")
    # A rank is 16 bits wide, and that many files are not one per process.
    board = FORMATS["rl-logging-board"]
    found = Source(tmp_path, [board]).files(board)
    assert len(found) == 2**15 + 1 and {file.rank for file in found} == {None}
    (tmp_path / "0.jsonl").unlink()
    assert {file.rank for file in Source(tmp_path, [board]).files(board)} == set(range(2**15))


KEYS = st.sampled_from(
    [key for good in GOOD.values() for key in good] + ["completion", "advantage", "example_id", "global_step", "a.b"]
)
PLACES = st.sampled_from(
    ["a.jsonl", "step_3/a.jsonl", "5.jsonl", "x/a.parquet", "files/media/table/t_1_a.table.json", "b.jsonl.gz", "c.txt",
     "files/media/table/t_2_a.table.json", "rollouts/step_1/train_rollouts.jsonl", "train_data_step2.jsonl"]
)  # fmt: skip
MAPS = st.dictionaries(st.sampled_from(["prompt", "response", "reward", "step", "token_id", "reward_parts.x"]), KEYS)


@st.composite
def any_file(draw: st.DrawFn) -> bytes:
    """Any bytes, or records with the keys of the formats and any values."""
    if draw(st.booleans()):
        return draw(st.binary(max_size=200))
    whole = st.sampled_from([*GOOD.values()]).flatmap(changed)
    records = draw(st.lists(whole | st.dictionaries(KEYS, JSON, max_size=6), max_size=4))
    return b"\n".join(map(dump, records))


@settings(max_examples=min(25, settings.default.max_examples))
@given(st.dictionaries(PLACES, any_file(), max_size=4), st.none() | MAPS, st.sampled_from([None, *FORMATS]))
def test_a_folder_of_anything_is_read_or_refused_in_words(files, maps, name):
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        (folder / "in").mkdir()
        for place, content in files.items():
            (folder / "in" / place).parent.mkdir(parents=True, exist_ok=True)
            (folder / "in" / place).write_bytes(content)
        try:
            report = import_run(folder / "in", folder / "run", None if maps else name, maps)
        except UserError as error:
            assert 1 <= len(str(error).splitlines()) <= 2 and not (folder / "run").exists()
        else:
            assert cavesson.open(folder / "run").rows(["step"]).num_rows == report.rollouts > 0

import json
import math
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from import_helpers import restored

import cavesson
from cavesson.errors import UserError
from cavesson.exporters import EXPORTERS
from cavesson.importers import import_run
from cavesson.record import Recorder, write_run, write_vocabulary

export = EXPORTERS["rl-logging-board"]


def import_(source: Path, run: Path) -> int:
    report = import_run(source, run, "rl-logging-board")
    assert report.rejected == 0, report.quotes
    return report.rollouts


def rollouts(count: int = 2, width: int = 3) -> tuple[dict, dict]:
    """Rows and tokens of one call; every response fills its width."""
    rows = {"sample": np.arange(count), "prompt": [f"prompt {i}" for i in range(count)]}
    rows |= {"response": [f"response {i}" for i in range(count)], "reward": np.arange(count, dtype=np.float64)}
    return rows, {"mask": np.ones((count, width), np.bool_)}


# The format's published example, with its two optional keys spelled as they are there.
EXAMPLE = {
    "prompt": "<PAD>请编写“上相生坤位,中兴运泰开。”的下一句,要求押韵。",
    "response": "威仪如鹤梦,道德似桃梅。<EOD><PAD>",
    "response_tokens": ["威", "仪", "如", "鹤", "梦", ",", "道德", "似", "桃", "梅", "。", "<EOD>", "<PAD>"],
    "logprobs": [
        -4.847491264343262, -1.052163004875183, -3.1773641109466553, -3.155355215072632, -3.759133815765381,
        -0.0032821616623550653, -4.711000442504883, -0.7994625568389893, -4.159769535064697, -1.7499101161956787,
        -0.0008301864145323634, -2.3007127310847864e-05,
    ],
    "ref_logprobs": [
        -4.84375, -1.0546875, -3.171875, -3.15625, -3.765625, -0.0032806396484375, -4.71875, -0.80078125, -4.15625,
        -1.75, -0.00083160400390625, -2.3245811462402344e-05,
    ],
    "values": [
        -0.61328125, -0.01904296875, -0.373046875, -0.62890625, -0.3203125, -0.328125, -0.302734375, -0.353515625,
        -0.1474609375, -0.19140625, 0.08642578125, -0.09765625,
    ],
    "token_rewards": [
        0.0007482529035769403, -0.0005048990133218467, 0.001097822212614119, -0.00017895699420478195,
        -0.0012982368934899569, 3.0440278919741104e-07, -0.0015499115688726306, -0.0002637386496644467,
        0.0007039070478640497, -1.7976761228055693e-05, -2.835178918303427e-07, -4.77368296003533e-08,
    ],
    "reward": 0.0,
    "step": 4,
    "（Optional）ref_response": "从 reference model 采样的结果（可选）",
    "（Optional）ref_reward": 0.0,
}  # fmt: skip


def write_lines(path: Path, lines: list[dict]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def read_lines(folder: Path) -> list[str]:
    """The lines of all files as comparable texts; JSON's text of a float names it exactly."""
    texts = "".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jsonl")))
    return [comparable(json.loads(line)) for line in texts.split("\n") if line]


def comparable(line: dict) -> str:
    return json.dumps(line, sort_keys=True)


def there_and_back(folder: Path, source: Path) -> list[str]:
    count = import_(source, folder / "run")
    assert export(folder / "run", folder / "out") == count
    return read_lines(folder / "out")


def test_the_published_example_comes_back_unchanged(tmp_path):
    write_lines(tmp_path / "source" / "data.jsonl", [EXAMPLE])
    assert there_and_back(tmp_path, tmp_path / "source") == [comparable(EXAMPLE)]
    run = cavesson.open(tmp_path / "run")
    row, tokens = run.rollout(4, 0)
    # Twelve of the thirteen tokens have numbers; the last is padding.
    assert row["length"] == 12
    assert row["kl_k1"] == pytest.approx(sum(EXAMPLE["logprobs"]) - sum(EXAMPLE["ref_logprobs"]), abs=1e-12)
    assert tokens["learned"].to_pylist() == [True] * 12 + [False]
    assert tokens["token"].to_pylist() == EXAMPLE["response_tokens"]
    assert tokens["logprob"].to_pylist() == [*EXAMPLE["logprobs"], None]
    assert tokens["value"].to_pylist() == [*EXAMPLE["values"], None]
    # These numbers were float32 where they came from.
    assert {str(tokens.schema.field(name).type) for name in ("logprob", "value", "token_reward")} == {"float"}


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
ANY_TEXT = st.text(max_size=8) | st.sampled_from(["\ud800", "\\\udfff", "<PAD>", "\u2028", "\x00"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(ANY_TEXT, inner, max_size=2),
    max_leaves=4,
)
NUMBERS = st.lists(st.floats(), max_size=5) | st.lists(st.none() | st.floats(width=32), max_size=5)
FOREIGN = st.fixed_dictionaries(
    {"prompt": TEXT, "response": TEXT, "reward": st.none() | st.floats(), "step": st.integers(0, 3)},
    optional={
        "response_tokens": st.lists(ANY_TEXT, max_size=5) | JSON,
        "logprobs": NUMBERS,
        "ref_logprobs": NUMBERS,
        "values": NUMBERS | JSON.filter(lambda value: not isinstance(value, list)),
        "token_rewards": NUMBERS,
        "ref_response": ANY_TEXT | JSON,
        "ref_reward": st.floats() | st.none(),
        "ground_truth": ANY_TEXT | JSON,
        "kl_k1": JSON,
        "extra": JSON,
        "sample": JSON,
    },
)


@settings(max_examples=min(60, settings.default.max_examples))
@given(st.lists(st.lists(FOREIGN, max_size=4), min_size=1, max_size=3).filter(any))
@example([[{"prompt": "", "response": "", "reward": reward, "step": 0} for reward in (math.nan, None, 0.5)]])
def test_foreign_files_come_back_with_every_key_and_value(files):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for i, lines in enumerate(files):
            write_lines(folder / "source" / f"worker{i}.jsonl", lines)
        back = there_and_back(folder, folder / "source")
        assert sorted(back) == sorted(comparable(line) for lines in files for line in lines)
        run = cavesson.open(folder / "run")
        keys = [(row["step"], row["sample"]) for row in run.rows(["step", "sample"]).to_pylist()]
        assert len(set(keys)) == len(keys)


@st.composite
def own_runs(draw):
    """Call of a recorder that measures the same columns at every step, and some rows' optional columns."""
    names = draw(st.sets(st.sampled_from(["logprob", "ref_logprob", "value", "token_reward", "entropy"])))
    calls = []
    for _ in range(draw(st.integers(1, 3))):
        count, width = draw(st.integers(1, 3)), draw(st.integers(0, 3))
        lengths = draw(st.lists(st.integers(0, width), min_size=count, max_size=count))
        rows, _ = rollouts(count, width)
        rows["response"] = draw(st.lists(TEXT, min_size=count, max_size=count))
        rewards = st.none() | st.floats(allow_nan=False)
        rows["reward"] = draw(st.lists(rewards, min_size=count, max_size=count))
        rows["ref_reward"] = draw(st.lists(st.none() | st.floats(), min_size=count, max_size=count))
        tokens = {"mask": np.arange(width) < np.array(lengths)[:, None]}
        tokens["token_id"] = np.array(draw(st.lists(st.integers(0, 3), min_size=width, max_size=width)) * count)
        tokens["token_id"] = tokens["token_id"].reshape(count, width)
        for name in names:
            values = draw(st.lists(st.floats(width=32), min_size=count * width, max_size=count * width))
            tokens[name] = np.array(values, np.float32).reshape(count, width)
        calls.append((rows, tokens))
    return names, calls


@settings(max_examples=min(20, settings.default.max_examples))
@given(own_runs())
def test_own_runs_go_out_and_in_and_out_again_the_same(own):
    names, calls = own
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_run(folder / "own", {})
        write_vocabulary(folder / "own", ["<PAD>", "Ġa", "好"], ["", " a", "好"])
        with Recorder(folder / "own") as recorder:
            for step, (rows, tokens) in enumerate(calls):
                recorder.rollouts(step, rows, tokens)
        export(folder / "own", folder / "first")
        first = read_lines(folder / "first")
        expected = expected_lines(cavesson.open(folder / "own"), names, calls)
        assert there_and_back(folder, folder / "first") == first
    assert first == expected


def expected_lines(own_run, names, calls) -> list[str]:
    expected = []
    keys = {"logprobs": "logprob", "ref_logprobs": "ref_logprob", "values": "value", "token_rewards": "token_reward"}
    for step, (rows, tokens) in enumerate(calls):
        for i, mask in enumerate(tokens["mask"]):
            line = {"step": step} | {k: rows[k][i] for k in ("prompt", "response", "reward")}
            line |= {} if rows["ref_reward"][i] is None else {"ref_reward": rows["ref_reward"][i]}
            line["response_tokens"] = [["<PAD>", "Ġa", "好", "<3>"][t] for t in tokens["token_id"][i][mask]]
            # The recorder rounds; what it keeps is its own tests' matter.
            recorded = own_run.tokens(step, int(rows["sample"][i]))
            line |= {key: recorded[name].to_pylist() for key, name in keys.items() if name in names}
            expected.append(comparable(line))
    return expected


def test_numbers_that_float32_cannot_hold_are_kept(tmp_path):
    exact = [0.1, 1e300, 5e-324, -math.pi, 2.0**53 - 1, 0.5]
    line = {"prompt": "", "response": "", "reward": 0.1, "step": 0, "logprobs": exact, "values": [0.5] * 6}
    write_lines(tmp_path / "source" / "a.jsonl", [line])
    assert there_and_back(tmp_path, tmp_path / "source") == [comparable(line)]
    schema = cavesson.open(tmp_path / "run").tokens(0).schema
    assert [str(schema.field(name).type) for name in ("logprob", "value")] == ["double", "float"]


def test_whole_numbers_keep_their_value(tmp_path):
    line = {"prompt": "", "response": "", "reward": 3, "step": 0, "logprobs": [0, -1], "values": [2**53 + 1]}
    line |= {"ref_logprobs": [True, 0.5], "token_rewards": [0.5, None, 1.0]}
    line |= {"mine": {"large": [2**64 + 1, -(2**63) - 1, 2**63, 0.5]}}
    write_lines(tmp_path / "source" / "a.jsonl", [line])
    assert json.loads(there_and_back(tmp_path, tmp_path / "source")[0]) == line


def test_files_are_merged_by_step_and_their_numbers_are_ranks(tmp_path):
    def line(step: int, prompt: str) -> dict:
        return {"prompt": prompt, "response": "", "reward": 0.0, "step": step}

    write_lines(tmp_path / "source" / "dp_2.jsonl", [line(1, "c"), line(0, "d")])
    write_lines(tmp_path / "source" / "dp_10.jsonl", [line(0, "e"), line(1, "f"), line(0, "g")])
    assert import_(tmp_path / "source", tmp_path / "run") == 5
    rows = cavesson.open(tmp_path / "run").rows(["step", "rank", "sample", "prompt"]).to_pylist()
    assert [tuple(row.values()) for row in rows] == [
        (0, 2, 0, "d"),
        (0, 10, 1, "e"),
        (0, 10, 2, "g"),
        (1, 2, 0, "c"),
        (1, 10, 1, "f"),
    ]
    export(tmp_path / "run", tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["rank-0002.jsonl", "rank-0010.jsonl"]


def test_files_without_numbers_are_counted(tmp_path):
    line = {"prompt": "", "response": "", "reward": 0.0, "step": 0}
    for name in ("train.jsonl", "eval.jsonl"):
        write_lines(tmp_path / "source" / name, [line | {"prompt": name}])
    import_(tmp_path / "source", tmp_path / "run")
    rows = cavesson.open(tmp_path / "run").rows(["rank", "prompt"]).to_pylist()
    assert [tuple(row.values()) for row in rows] == [(0, "eval.jsonl"), (1, "train.jsonl")]


def test_one_file_with_blank_lines_and_windows_line_ends(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(EXAMPLE).encode() + b"\r\n\r\n" + json.dumps(EXAMPLE).encode())
    assert there_and_back(tmp_path, path) == [comparable(EXAMPLE)] * 2


def test_what_lacks_a_logprob_has_no_kl(tmp_path):
    base = {"prompt": "", "response": "", "reward": 0.0, "step": 0, "logprobs": [-1.0, -2.0]}
    lines = [
        base,
        base | {"ref_logprobs": [-1.5]},
        base | {"ref_logprobs": [None, -1.5]},
        base | {"ref_logprobs": [-1.5, -1.5, -9.0]},
        {key: value for key, value in base.items() if key != "logprobs"},
    ]
    write_lines(tmp_path / "source" / "a.jsonl", lines)
    import_(tmp_path / "source", tmp_path / "run")
    rows = cavesson.open(tmp_path / "run").rows(["kl_k1", "length"]).to_pylist()
    # The fourth: (−1 + 1.5) + (−2 + 1.5) = 0; its third reference entry belongs to padding.
    assert [row["kl_k1"] for row in rows] == [None, None, None, 0.0, None]
    assert [row["length"] for row in rows] == [2, 2, 2, 2, None]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": ', "line 2: expected one JSON object per line"),
        ("[1]", "line 2: expected a JSON object, found list"),
        ('{"prompt": "", "response": "", "step": 0}', "line 2: 'reward' is missing, expected a number"),
        ('{"prompt": 5, "response": "", "reward": 0, "step": 0}', "line 2: 'prompt' is 5, expected a string"),
        (
            '{"prompt": "", "response": "\\ud800", "reward": 0, "step": 0}',
            "line 2: 'response' is .*, expected a string",
        ),
        ('{"prompt": "", "response": "", "reward": {}, "step": 0}', "line 2: 'reward' is {}, expected a number"),
        ('{"prompt": "", "response": "", "reward": 0, "step": 1.5}', "line 2: 'step' is 1.5, expected a whole number"),
        ('{"prompt": "", "response": "", "reward": 0, "step": -1}', "line 2: 'step' is -1, expected a whole number"),
    ],
)
def test_a_broken_line_is_quoted_kept_and_stops_nothing(tmp_path, text, message):
    path = tmp_path / "source" / "data.jsonl"
    write_lines(path, [EXAMPLE])
    path.write_text(path.read_text(encoding="utf-8") + text + "\n" + json.dumps(EXAMPLE), encoding="utf-8")
    report = import_run(tmp_path / "source", tmp_path / "run")
    assert (report.rollouts, report.rejected) == (2, 1)
    assert re.search(f"data.jsonl, {message}", report.quotes[0])
    (kept,) = (tmp_path / "run" / "rejected.jsonl").read_text(encoding="utf-8").splitlines()
    assert restored(kept) == text.encode()
    assert json.loads(kept)["line"] == 2
    assert cavesson.open(tmp_path / "run").rows(["sample"])["sample"].to_pylist() == [0, 1]


def test_where_nothing_is_right_the_first_line_is_named_and_nothing_left_behind(tmp_path):
    (tmp_path / "data.jsonl").write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(UserError, match=r"none of 1 records .*data\.jsonl, line 1: expected one JSON object"):
        import_run(tmp_path, tmp_path / "run", "rl-logging-board")
    assert [entry.name for entry in tmp_path.iterdir()] == ["data.jsonl"]


def test_nothing_existing_is_overwritten(tmp_path):
    write_lines(tmp_path / "source" / "data.jsonl", [EXAMPLE])
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    with pytest.raises(UserError, match="taken exists and is not an empty folder"):
        import_(tmp_path / "source", tmp_path / "taken")
    import_(tmp_path / "source", tmp_path / "run")
    with pytest.raises(UserError, match="taken exists and is not an empty folder"):
        export(tmp_path / "run", tmp_path / "taken")
    assert [entry.name for entry in (tmp_path / "taken").iterdir()] == ["file"]
    (tmp_path / "empty").mkdir()
    assert export(tmp_path / "run", tmp_path / "empty") == 1


def test_a_folder_without_files_is_said(tmp_path):
    with pytest.raises(UserError, match=r"no files like \*\.jsonl"):
        import_(tmp_path, tmp_path / "run")


def test_ids_without_a_vocabulary_are_said_and_leave_nothing_behind(tmp_path):
    folder = tmp_path / "in" / "run"
    write_run(folder, {})
    rows, tokens = rollouts()
    with Recorder(folder) as recorder:
        recorder.rollouts(0, rows, tokens | {"token_id": np.zeros((2, 3), np.int64)})
    with pytest.raises(UserError, match=r"no vocabulary\.parquet"):
        export(folder, folder.parent / "out")
    assert [entry.name for entry in folder.parent.iterdir()] == [folder.name]


def test_episodes_come_back_with_their_turns(tmp_path):
    """The format has no turns: an export adds them, and an import reads them."""
    rows, _ = rollouts(2, 3)
    tokens = {
        "token": [["call", "42", "done"], ["a", "b", "c"]], "logprob": [[-1.0, -9.0, -0.5], [-1.0, -1.0, -1.0]],
        "source": [["sampled", "tool", "sampled"], ["sampled"] * 3],
        "learned": [[True, False, True], [True] * 3],
    }  # fmt: skip
    turns = {
        "sample": [0, 0, 0], "role": ["assistant", "tool", "assistant"], "name": [None, "f", None],
        "arguments": [None, {"a": 1}, None], "text": ["call", "42", "done"], "first_token": [0, 1, 2],
        "tokens": [1, 1, 1], "seconds": [None, 0.5, None], "error": [None, "late", None], "reward": [None, None, 1.0],
    }  # fmt: skip
    with Recorder(tmp_path / "run") as recorder:
        recorder.rollouts(0, rows, tokens, turns)
    export(tmp_path / "run", tmp_path / "first")
    first, second = map(json.loads, (tmp_path / "first" / "rank-0000.jsonl").read_text().splitlines())
    assert first["sources"] == tokens["source"][0] and first["learned_tokens"] == tokens["learned"][0]
    assert first["turns"][1] == {
        "role": "tool", "name": "f", "arguments": '{"a": 1}', "text": "42", "first_token": 1, "tokens": 1,
        "seconds": 0.5, "error": "late",
    }  # fmt: skip
    assert not {"turns", "sources", "learned_tokens"} & second.keys(), "nothing to say of a single response"
    import_run(tmp_path / "first", tmp_path / "again")
    run, again = cavesson.open(tmp_path / "run"), cavesson.open(tmp_path / "again")
    names = [name for name in run.turns(0).column_names if name not in ("attempt", "rank")]
    assert again.turns(0).select(names).to_pylist() == run.turns(0).select(names).to_pylist()
    assert again.tokens(0, 0)["source"].to_pylist() == tokens["source"][0]
    assert again.tokens(0)["learned"].to_pylist() == [*tokens["learned"][0], *tokens["learned"][1]]
    export(tmp_path / "again", tmp_path / "second")
    written = (tmp_path / "second" / "rank-0000.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in written] == [first, second]


def test_other_turns_and_sources_of_a_log_are_kept_as_they_are(tmp_path):
    line = {"prompt": "p", "response": "r", "reward": 1.0, "step": 0, "response_tokens": ["a", "b"]}
    odd = [
        {"turns": 3}, {"turns": [{"role": "tool", "mood": "good"}]}, {"turns": []}, {"turns": [{"role": 7}]},
        {"sources": ["a.txt", "b.txt"]}, {"sources": ["sampled", "sampled"]}, {"learned_tokens": [1, 0]},
        {"learned_tokens": [0, 1]}, {"learned_tokens": [True, True]},
    ]  # fmt: skip
    (tmp_path / "log").mkdir()
    lines = [line | more for more in odd]
    (tmp_path / "log" / "rank-0000.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    import_run(tmp_path / "log", tmp_path / "run")
    assert not cavesson.open(tmp_path / "run").has_turns()
    export(tmp_path / "run", tmp_path / "out")
    assert [json.loads(one) for one in (tmp_path / "out" / "rank-0000.jsonl").read_text().splitlines()] == lines

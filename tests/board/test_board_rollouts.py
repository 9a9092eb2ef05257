import math

import numpy as np
import pytest
from board_helpers import ask, board_of, client_of
from index_helpers import new_run, record, rows_of, tokens_of

import cavesson.record
from cavesson.board.pieces import bytes_of
from cavesson.board.runs import Board
from cavesson.record import Recorder, begin_attempt, write_vocabulary

HOSTILE = [
    "<script>alert(1)</script>",
    "\x1b[31mred\x1b[0m \x00 \x07",
    "../../etc/passwd",
    "مرحبا \u202eabc\u202c 🙂👩‍🚀 e\u0301",
    '"; DROP TABLE rows; --',
    "\ufffd\u2028\u2029</style>",
]


def columns_of(client, path="/api/runs/run/rollouts/3/5"):
    described = client.get(path).json()["tokens"]
    data = client.get(described["url"]).content
    found = {}
    for column in described["columns"]:
        dtype = np.dtype(column["dtype"]).newbyteorder("<")
        found[column["name"]] = np.frombuffer(data, dtype, described["count"], column["offset"])
        assert column["offset"] % dtype.itemsize == 0
    assert sum(values.nbytes for values in found.values()) == len(data)
    return described, found


def test_tokens_are_those_of_the_record(client, folder):
    described, found = columns_of(client)
    table = cavesson.record.open(folder).tokens(3, 5)
    assert described["count"] == table.num_rows > 0
    for name in ("token_id", "logprob", "ref_logprob", "position"):
        assert found[name].tolist() == table[name].to_pylist(), name
    assert "value" not in found and "step" not in found


def test_a_number_that_was_not_measured_is_nan(tmp_path):
    folder = new_run(tmp_path / "run")
    values = np.full((6, 10), 0.5)
    values[2, 0] = np.nan
    with Recorder(folder, attempt=begin_attempt(folder, 0)) as recorder:
        recorder.rollouts(0, rows_of(0, 6), tokens_of(0, 6) | {"value": values})
    _, found = columns_of(client_of(board_of(folder)), "/api/runs/run/rollouts/0/2")
    assert math.isnan(found["value"][0]) and set(found["value"][1:].tolist()) <= {0.5}


def test_a_rollout_has_its_row_and_its_siblings(client, folder):
    got = client.get("/api/runs/run/rollouts/3/5").json()
    row, _ = cavesson.record.open(folder).rollout(3, 5)
    for name, value in row.items():
        if name in ("reward_parts", "reward_weights", "reward_reasons"):
            assert got[name.removeprefix("reward_")] == dict(value or {}), name
        else:
            assert got[name] == value, name
    assert [line["sample"] for line in got["siblings"]] == [4, 5]
    assert got["siblings"][0]["reward"] == pytest.approx(rows_of(3, 8)["reward"][4])
    assert got["gap"] == pytest.approx(row["reward"] - 0.5)


def test_rollouts_are_walked_by_step_and_sample(tmp_path):
    folder = new_run(tmp_path / "run")
    record(folder, [0, 1, 2, 3], batch=2)
    board_of(folder)
    # Another attempt from step 2 on, whose samples have other numbers; step 3 is superseded altogether.
    with Recorder(folder, attempt=begin_attempt(folder, 2)) as recorder:
        recorder.rollouts(2, rows_of(2, 3) | {"sample": [40, 7, 9]}, tokens_of(2, 3))
    client = client_of(board_of(folder))
    walked = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 7), (2, 9), (2, 40)]
    for before, (step, sample), behind in zip([None, *walked], walked, [*walked[1:], None], strict=False):
        got = client.get(f"/api/runs/run/rollouts/{step}/{sample}").json()
        there = [got[name] and (got[name]["step"], got[name]["sample"]) for name in ("previous", "next")]
        assert there == [before, behind], (step, sample)


def test_a_rollout_that_is_not_indexed_yet_is_shown(tmp_path):
    folder = new_run(tmp_path / "run")
    record(folder, [0])
    board_of(folder)
    record(folder, [1], attempt=0)
    client = client_of(Board([cavesson.record.open(folder)]))
    got = client.get("/api/runs/run/rollouts/1/2").json()
    assert got["response"] and got["siblings"] == [] and got["previous"] is None and got["next"] is None


def test_a_text_of_many_megabytes_is_cut_and_says_so(tmp_path):
    folder = new_run(tmp_path / "run")
    long = "é🙂x" * 1_000_000
    record(folder, [0], batch=2, response=[long, "short"], prompt=["p", long[:2_000_000]])
    client = client_of(board_of(folder))
    first, second = (client.get(f"/api/runs/run/rollouts/0/{i}").json() for i in (0, 1))
    assert first["response"] == long[:2_000_000] and first["response_truncated"] == 3_000_000
    assert first["prompt_truncated"] is None and first["ref_response_truncated"] is None
    assert second["prompt"] == long[:2_000_000] and second["prompt_truncated"] is None


@pytest.mark.parametrize(
    "path", ["run/rollouts/99/0", "run/rollouts/0/99", "other/rollouts/0/0", "run/rollouts/99/0/tokens"]
)
def test_what_is_not_there_is_not_found(client, path):
    answer = client.get(f"/api/runs/{path}")
    assert answer.status_code == 404 and "\n" not in answer.json()["error"]


def test_hostile_texts_come_back_as_they_are(tmp_path):
    folder = new_run(tmp_path / "run")
    record(folder, [0], response=HOSTILE, prompt=HOSTILE[::-1], reward_parts=[{name: 1.0} for name in HOSTILE])
    client = client_of(board_of(folder))
    rows = client.get("/api/runs/run/rows").json()["rows"]
    assert [row["response"] for row in rows] == HOSTILE and [row["prompt"] for row in rows] == HOSTILE[::-1]
    for i, text in enumerate(HOSTILE):
        got = client.get(f"/api/runs/run/rollouts/0/{i}").json()
        assert got["response"] == text and got["parts"] == {text: 1.0}
        assert client.get("/api/runs/run/rows", params={"sort": f"part/{text}"}).json()["rows"][0]["sample"] == i
        found = ask(client, q=text)
        assert [row["sample"] for row in found["rows"]] == [i], text
    assert not any(path.name.startswith("part") for path in (folder / "index").iterdir())


def test_tokens_that_are_parts_of_a_character_carry_their_bytes(tmp_path):
    folder = new_run(tmp_path / "run")
    # 好 is E5 A5 BD: the tokenizer cut it after two bytes.
    write_vocabulary(folder, ["Ġso", "å¥", "½", "<0xE4>", "\ufffd?"], [" so", "\ufffd", "\ufffd", "\ufffd", "\ufffd?"])
    ids = np.array([[0, 1, 2, 3, 4]])
    with Recorder(folder, attempt=begin_attempt(folder, 0)) as recorder:
        recorder.rollouts(0, rows_of(0, 1), {"mask": ids >= 0, "token_id": ids})
    got = client_of(board_of(folder)).get("/api/runs/run/rollouts/0/0/texts").json()
    assert got["texts"] == [" so", "\ufffd", "\ufffd", "\ufffd", "\ufffd?"]
    assert got["bytes"] == [None, [0xE5, 0xA5], [0xBD], [0xE4], None]
    assert bytes(got["bytes"][1] + got["bytes"][2]).decode() == "好"


def test_whole_tokens_carry_no_bytes(client):
    got = client.get("/api/runs/run/rollouts/3/5/texts").json()
    assert got["bytes"] is None and got["texts"] and all(text.startswith("<") for text in got["texts"])


def test_every_byte_has_a_letter():
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    for byte, letter in bytes_to_unicode().items():
        assert bytes_of(letter) == bytes([byte])

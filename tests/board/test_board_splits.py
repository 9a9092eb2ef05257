"""Training and held-out responses are never counted together: each answer is that of a record that has only these."""

import csv
import io
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import pytest
from board_helpers import ask, board_of, client_of
from index_helpers import new_run, rows_of, tokens_of
from starlette.testclient import TestClient

from cavesson.index.prompt_ids import id_of
from cavesson.record import Recorder, begin_attempt

STEPS, EVERY, TRAINED, HELD_OUT = 20, 3, 6, 4
FIRST = 50
"""Sample of the first held-out response of a step; prompts and groups are those of training."""
FIRST_GIVEN = 20
"""Sample of the first response of a step that the data give."""
SPLITS = ("train", "eval")


def rows(step: int, split: str) -> dict[str, Any]:
    """Responses of a step to the same prompts as in the other split, with other texts and rewards."""
    if split == "train":
        # As in many imported records, some responses have no split.
        # The reference of the second prompt is never beaten; among the held-out ones it is that of the first.
        reference = [0.5, 0.5, 9999.0, 9999.0, 0.5, 0.5]
        return rows_of(step, TRAINED) | {"split": [None, *["train"] * (TRAINED - 1)], "ref_reward": reference}
    if split == "given":
        return rows_of(step + 300, 2) | {"sample": FIRST_GIVEN + np.arange(2), "split": ["given"] * 2}
    new = {"sample": FIRST + np.arange(HELD_OUT), "split": ["eval"] * HELD_OUT}
    return rows_of(step + 500, HELD_OUT) | new | {"ref_reward": [9999.0, 9999.0, 0.5, 0.5]}


def new_record(folder: Path, splits: tuple[str, ...], *, alone: bool = False) -> Path:
    """Record the responses of some splits, ``alone`` as if all had been trained on.

    The run starts again once, so that responses of both splits are superseded.
    """
    new_run(folder)
    for start, stop in ((0, 10), (7, STEPS)):
        with Recorder(folder, attempt=begin_attempt(folder, start_step=start)) as recorder:
            for step in range(start, stop):
                for split in splits:
                    if split == "eval" and step % EVERY:
                        continue
                    mine = rows(step + 1000 * (stop == 10), split)
                    mine |= {"split": ["train"] * len(mine["split"])} if alone else {}
                    size = len(mine["split"])
                    recorder.rollouts(step, mine, tokens_of(step + 500 * (split == "eval"), size))
    return folder


class Records(NamedTuple):
    """Boards of one record of both splits, in which the data give other responses, and of one record for each split
    that has nothing else.
    """

    both: TestClient
    alone: Mapping[str, TestClient]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Records]:
    folder = tmp_path_factory.mktemp("splits")
    boards = {split: board_of(new_record(folder / split / "run", (split,), alone=True)) for split in SPLITS}
    boards["both"] = board_of(new_record(folder / "both" / "run", (*SPLITS, "given")))
    clients = {name: client_of(board) for name, board in boards.items()}
    yield Records(clients["both"], {split: clients[split] for split in SPLITS})
    for board in boards.values():
        board.scanner.stop()


def get(client: TestClient, path: str, **parameters: Any) -> Any:
    answer = client.get(f"/api/{path}", params=parameters)
    assert answer.status_code == 200, answer.text
    return answer.json()


def without(value: Any) -> Any:
    """An answer without what says where a rollout is in the index, and which split it has."""
    if isinstance(value, list):
        return [without(one) for one in value]
    if isinstance(value, dict):
        return {name: without(one) for name, one in value.items() if name not in ("row", "split", "attempt")}
    return value


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "histogram": ("histogram", {"column": "reward", "bins": 9}),
    "histogram of some": ("histogram", {"column": "length", "bins": 9, "steps": "3-12", "filter": "reward > 0"}),
    "ridge": ("ridge", {"column": "reward", "bins": 9, "buckets": 5}),
    "heat": ("heat", {"column": "logprob", "buckets": 5, "positions": 4}),
    "groups": ("groups", {"step": 6, "sort": "group"}),
    "groups of a superseded step": ("groups", {"step": 9, "sort": "group"}),
    "never beats": ("never-beats", {}),
    "prompts": ("prompts", {"sort": "improved"}),
    "one prompt": (f"prompts/{id_of('prompt 1')}", {}),
    "compare": ("compare", {"runs": "run@0-9,run@10-19"}),
    "statistics": ("statistics", {"filter": "reward > 5", "details": True}),
    "statistics of some steps": ("statistics", {"filter": 'finish_reason == "eos"', "steps": "3-12"}),
    "statistics of a search": ("statistics", {"q": "b?[x-z]", "regex": True}),
    "extremes": ("rows", {"sort": "-reward", "steps": "6", "limit": 4}),
    "list": ("rows", {"sort": "step", "limit": 200}),
}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", REQUESTS)
def test_an_answer_is_that_of_a_record_with_this_split_only(records: Records, name: str, split: str) -> None:
    path, parameters = REQUESTS[name]
    path = path if path == "compare" else f"runs/run/{path}"
    wanted = without(get(records.alone[split], path, **parameters))
    assert without(get(records.both, path, split=split, **parameters)) == wanted
    given = without(get(records.both, path, **parameters))
    assert (given == wanted) == (split == "train"), "without a split it is that of training"
    assert wanted.get("total", 1) > 0, "there is something to tell apart"


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("q", ["concert", "concert on", "b?[x-z]", "##"])
def test_a_search_finds_responses_of_its_split_only(records: Records, q: str, split: str) -> None:
    regex = q.startswith("b")
    got = ask(records.both, q=q, regex=regex, split=split)
    wanted = ask(records.alone[split], q=q, regex=regex)
    assert without(got) == without(wanted)
    hits = get(records.both, "runs/run/hits", q=q, regex=regex, split=split)
    assert hits == get(records.alone[split], "runs/run/hits", q=q, regex=regex)
    assert q == "b?[x-z]" or sum(hits["hits"]) == got["total"] > 0


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", ["word", "character"])
def test_patterns_are_counted_in_one_split(records: Records, kind: str, split: str) -> None:
    def table(client: TestClient, **parameters: Any) -> Any:
        got = get(client, "runs/run/patterns", kind=kind, limit=1000, buckets=5, **parameters)
        assert got["total"] == len(got["patterns"]) > 5
        numbers = {
            line["text"]: [*line["share"], line["first"], line["last"], line["rows"], line["reward_effect"]]
            for line in got["patterns"]
        }
        return got["steps"], {text: pytest.approx(some, nan_ok=True, rel=1e-5) for text, some in numbers.items()}

    steps, wanted = table(records.alone[split])
    asked = {one: get(records.both, "runs/run/patterns", kind=kind, limit=1000, buckets=5, split=one) for one in SPLITS}
    got = asked[split]
    assert got["steps"] == steps and {line["text"] for line in got["patterns"]} == set(wanted)
    for line in got["patterns"]:
        found = [*line["share"], line["first"], line["last"], line["rows"], line["reward_effect"]]
        assert found == wanted[line["text"]]


@pytest.mark.parametrize("split", SPLITS)
def test_a_rollout_stands_beside_those_of_its_split(records: Records, split: str) -> None:
    first = FIRST if split == "eval" else 0
    for step, sample in ((0, first), (6, first + 1), (9, first + 2), (18, first + 3)):
        got, wanted = (
            get(client, f"runs/run/rollouts/{step}/{sample}") for client in (records.both, records.alone[split])
        )
        for name in ("siblings", "previous", "next"):
            assert without(got[name]) == without(wanted[name]), name
        assert len(got["siblings"]) == 2


@pytest.mark.parametrize("split", SPLITS)
def test_similar_responses_are_of_one_split(records: Records, split: str) -> None:
    first, shared = FIRST if split == "eval" else 0, 0
    for step in range(0, STEPS, EVERY):
        path = f"runs/run/similar/{step}/{first + 1}"
        got = get(records.both, path, split=split, limit=5)
        assert [line["shared"] for line in got["rows"]] == pytest.approx(
            [line["shared"] for line in get(records.alone[split], path, limit=5)["rows"]]
        )
        assert all((line["sample"] >= FIRST) == (split == "eval") for line in got["rows"])
        shared += len(got["rows"])
        others = get(records.both, f"runs/run/similar/{step}/{FIRST + 1 if first == 0 else 1}", split=split)["rows"]
        assert all((line["sample"] >= FIRST) == (split == "eval") for line in others)
    assert shared > 5


def test_words_that_are_rare_in_the_other_split_do_not_count(tmp_path: Path) -> None:
    """The first response shares sixty words with a held-out one, and three with two that were trained on."""
    many = " ".join(f"word{i}" for i in range(60))
    texts = {"train": [f"{many} alpha beta gamma", "delta alpha beta gamma", "alpha beta gamma zeta"], "eval": [many]}
    with Recorder(new_run(tmp_path / "run")) as recorder:
        for split, some in texts.items():
            rows = {"sample": np.arange(len(some)) + FIRST * (split == "eval"), "split": [split] * len(some)}
            rows |= {"prompt": ["p"] * len(some), "response": some, "reward": np.zeros(len(some))}
            recorder.rollouts(0, rows)
    board = board_of(tmp_path / "run")
    found = {
        split: {line["sample"] for line in get(client_of(board), "runs/run/similar/0/0", split=split)["rows"]}
        for split in SPLITS
    }
    assert found == {"train": {1, 2}, "eval": {FIRST}}
    board.scanner.stop()


def test_what_is_exported_is_of_one_split_or_of_both(records: Records) -> None:
    def exported(**parameters: Any) -> list[tuple[int, int]]:
        answer = records.both.get("/api/runs/run/export", params={"sort": "step"} | parameters)
        assert answer.status_code == 200, answer.text
        return [(int(line["step"]), int(line["sample"])) for line in csv.DictReader(io.StringIO(answer.text))]

    def keys(split: str) -> list[tuple[int, int]]:
        got = get(records.alone[split], "runs/run/rows", limit=500)["rows"]
        return [(line["step"], line["sample"]) for line in got]

    assert exported() == exported(split="train") == keys("train")
    assert exported(split="eval") == keys("eval")
    given = exported(split="given")
    assert {sample for _, sample in given} == {FIRST_GIVEN, FIRST_GIVEN + 1} and len(given) == STEPS * 2
    assert exported(both=True) == exported(both=True, split="eval") == sorted(keys("train") + keys("eval") + given)
    file = records.both.get("/api/runs/run/export", params={"format": "parquet", "split": "eval"}).content
    assert set(pq.read_table(io.BytesIO(file))["split"].to_pylist()) == {"eval"}


@pytest.mark.parametrize(
    ("condition", "kept"),
    [
        ('split == "eval"', ["eval"]),
        ('"eval" == split and reward > -1e9', ["eval"]),
        ('split in ["eval"]', ["eval"]),
        ('not (split == "eval") and split != "given"', ["train"]),
        ('(split != "eval" or reward < -1e9) and split != "given"', ["train"]),
        ("split is None", ["train"]),
        ('split == "eval" or step >= 0 and sample not in [20, 21]', ["train", "eval"]),
    ],
)
@pytest.mark.parametrize("split", SPLITS)
def test_a_filter_on_the_split_chooses_it(records: Records, condition: str, kept: list[str], split: str) -> None:
    def keys(client: TestClient) -> set[tuple[int, int]]:
        got = get(client, "runs/run/rows", limit=500)["rows"]
        return {(line["step"], line["sample"]) for line in got}

    wanted = set[tuple[int, int]]().union(*(keys(records.alone[one]) for one in kept))
    if condition == "split is None":
        wanted = {(step, sample) for step, sample in wanted if sample == 0}
    if "!=" in condition:  # which a missing value never is
        wanted = {(step, sample) for step, sample in wanted if sample != 0}
    asked = {"filter": condition, "split": split}
    got = get(records.both, "runs/run/rows", limit=500, **asked)
    assert {(line["step"], line["sample"]) for line in got["rows"]} == wanted and got["total"] == len(wanted)
    text = records.both.get("/api/runs/run/export", params=asked).text
    assert {(int(line["step"]), int(line["sample"])) for line in csv.DictReader(io.StringIO(text))} == wanted
    histogram = get(records.both, "runs/run/histogram", column="step", **asked)
    assert sum(histogram["counts"]) == len(wanted)
    found = ask(records.both, q="a", **asked)
    assert sum(get(records.both, "runs/run/hits", q="a", **asked)["hits"]) == found["total"] > 0


def test_an_empty_answer_says_what_was_left_out(records: Records) -> None:
    sample = {"train": f"sample < {FIRST}", "eval": f"sample >= {FIRST}"}
    for split, other in (SPLITS, SPLITS[::-1]):
        wanted = get(records.alone[other], "runs/run/rows")["total"]
        got = get(records.both, "runs/run/rows", split=split, filter=sample[other])
        assert (got["total"], got["left_out"]) == (0, wanted)
        assert get(records.both, "runs/run/rows", split=split)["left_out"] == 0, "it is not empty"
        chosen = f'split == "{split}" and {sample[other]}'
        assert get(records.both, "runs/run/rows", filter=chosen)["left_out"] == 0, "nobody left anything out"
    # Held-out prompts are answered at every third step.
    assert get(records.both, "runs/run/groups", step=4, split="eval")["left_out"] == TRAINED
    assert get(records.both, "runs/run/groups", step=6, split="eval")["left_out"] == 0


def test_a_run_says_how_many_of_each_it_has(records: Records) -> None:
    (run,) = get(records.both, "runs")
    for split, name in (("train", "rollouts"), ("eval", "held_out")):
        (alone,) = get(records.alone[split], "runs")
        assert run[name] == alone["rollouts"] > 0 and alone["held_out"] == 0
    assert run["tokens"] == get(records.alone["train"], "runs")[0]["tokens"]
    assert run["newest"] == STEPS - 1


def test_a_run_without_held_out_responses_has_none_to_show(records: Records) -> None:
    client = records.alone["train"]
    assert get(client, "runs/run/rows", split="eval")["total"] == 0
    none = {"total": 0, "partial": None}
    assert get(client, "runs/run/groups", step=6, split="eval") == none | {"groups": [], "left_out": TRAINED}
    patterns = get(client, "runs/run/patterns", split="eval")
    assert patterns == none | {"steps": [], "patterns": [], "left_out": STEPS * TRAINED}
    assert get(client, "runs/run/ridge", split="eval", bins=4)["counts"] == []
    assert get(client, "compare", runs="run,run@0-5", split="eval")["total"] == 0
    assert get(client, "runs/run/never-beats", split="eval")["total"] == 0
    assert get(client, "runs/run/similar/6/1", split="eval")["rows"] == []
    assert sum(get(client, "runs/run/histogram", split="eval")["counts"]) == 0
    refused = client.get("/api/runs/run/heat", params={"column": "logprob", "split": "eval"})
    assert refused.status_code == 400
    assert refused.json()["error"] == "only tokens of training responses have the column 'logprob'"


def test_every_request_that_counts_responses_has_a_split(records: Records) -> None:
    paths = get(records.both, "openapi.json")["paths"]
    known = {
        path
        for path, methods in paths.items()
        for one in methods.get("get", {}).get("parameters", [])
        if one["name"] == "split"
    }
    some = {"histogram", "ridge", "heat", "rows", "hits", "groups", "never-beats", "patterns", "export", "tools"}
    some |= {"similar/{step}/{sample}", "prompts", "prompts/{prompt}", "statistics", "rescored"}
    assert known == {f"/api/runs/{{run}}/{name}" for name in some} | {"/api/compare"}
    wrong = records.both.get("/api/runs/run/rows", params={"split": "test"})
    assert wrong.status_code == 422 and re.search("'train', 'given' or 'eval'", wrong.json()["error"])

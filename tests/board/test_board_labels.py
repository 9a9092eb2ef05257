"""Labels: what two boards write at once, whose they are, and what filters make of them."""

import json
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from board_helpers import ORIGIN, ask, board_of, client_of
from browser_helpers import BoardProcess
from index_helpers import new_run, record, text_of

import cavesson
from cavesson.record.labels import Label, LabelFile

STEPS, BATCH = 4, 30


def change(board: BoardProcess, step: int, sample: int, **label: Any) -> None:
    request = urllib.request.Request(
        f"{board.address}/api/runs/run/labels/{step}/{sample}",
        json.dumps(label).encode(),
        {"origin": board.address, "content-type": "application/json"},
        method="PUT",
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200


@pytest.fixture(scope="module")
def boards(tmp_path_factory):
    folder = new_run(tmp_path_factory.mktemp("two") / "run")
    record(folder, range(STEPS), batch=BATCH)
    with BoardProcess(folder) as first, BoardProcess(folder) as second:
        yield folder, (first, second)


@pytest.mark.slow
def test_nothing_that_two_processes_acknowledged_is_lost(boards: tuple[Path, tuple[BoardProcess, ...]]) -> None:
    _, pair = boards
    acknowledged: list[tuple[int, int, str]] = []

    def label(board: BoardProcess, step: int) -> None:
        for sample in range(BATCH):
            change(board, step, sample, name="note", value="first")
            if sample % 3 == 0:
                change(board, step, sample, name="note", value="first", removed=True)
            else:
                change(board, step, sample, name="note", value=f"{step} {sample}")
                acknowledged.append((step, sample, f"{step} {sample}"))

    threads = [threading.Thread(target=label, args=(pair[step % 2], step)) for step in range(STEPS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(acknowledged) == STEPS * BATCH * 2 // 3
    for board in pair:
        found = board.json("api/runs/run/labels")
        notes = [(one["step"], one["sample"], label["value"]) for one in found for label in one["labels"]]
        assert notes == sorted(acknowledged)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder: Path = new_run(tmp_path / "run")
    record(folder, range(3))
    return folder


def test_two_people_on_the_same_rollout_keep_what_both_said(run: Path) -> None:
    ann, bob = (LabelFile(cavesson.open(run)) for _ in range(2))
    ann.add((1, 2), Label("rating", 2, "Ann"))
    bob.add((1, 2), Label("rating", 5, "Bob"))
    ann.add((1, 2), Label("rating", 3, "Ann"))
    bob.add((1, 2), Label("tag", "hack", "Bob"))
    ann.add((1, 2), Label("tag", "hack", "Ann"), removed=True)
    ann.add((1, 2), Label("over", 3, "Ann"))
    bob.add((1, 3), Label("over", 2, "Bob"))
    for file in (ann, bob):
        assert [label[:3] for label in file.of((1, 2))] == [
            ("rating", 5, "Bob"),
            ("rating", 3, "Ann"),
            ("over", 3, "Ann"),
        ]
        assert [label[:3] for label in file.of((1, 3))] == [("over", 2, "Bob")]
    ann.add((1, 3), Label("over", 2, "Ann"))
    assert [label.name for label in bob.of((1, 2))] == ["rating", "rating"]


def test_half_a_line_that_a_stopped_process_left_is_replaced(run: Path) -> None:
    file = LabelFile(cavesson.open(run))
    file.add((0, 0), Label("star"))
    with (run / "labels.jsonl").open("ab") as raw:
        raw.write(b'{"step": 0, "samp')
    assert list(file.all()) == [(0, 0)]
    file.add((0, 1), Label("star"))
    assert list(LabelFile(cavesson.open(run)).all()) == [(0, 0), (0, 1)]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("starred", [(0, 1), (2, 0)]),
        ("not starred and step == 0", [(0, 0), (0, 2), (0, 3), (0, 4), (0, 5)]),
        ('tag == "hack"', [(0, 1), (1, 1)]),
        ('tag != "hack"', [(1, 1)]),
        ('tag in ["short", "long"]', [(1, 1)]),
        ('"ac" in tag', [(0, 1), (1, 1)]),
        ("rating >= 4", [(2, 0)]),
        ("rating == 3.5", [(0, 1)]),
        ("tag is None and rating is not None", [(2, 0)]),
        ('author == "Bob" or author == "Cy"', [(0, 1), (1, 1)]),
        ('"look" in note', [(1, 1)]),
        ("chosen", [(2, 3)]),
        ("rejected", [(2, 4)]),
    ],
)
def test_a_filter_knows_labels(run: Path, text: str, wanted: list[tuple[int, int]]) -> None:
    file = LabelFile(cavesson.open(run))
    for key, label in (
        ((0, 1), Label("star", None, "Ann")),
        ((0, 1), Label("tag", "hack", "Ann")),
        ((0, 1), Label("rating", 2, "Ann")),
        ((0, 1), Label("rating", 5, "Bob")),
        ((1, 1), Label("tag", "hack", "Bob")),
        ((1, 1), Label("tag", "short", "Bob")),
        ((1, 1), Label("note", "look here", "Ann")),
        ((2, 0), Label("rating", 4)),
        ((2, 0), Label("star")),
        ((2, 3), Label("over", 4, "Ann")),
        ((9, 9), Label("tag", "hack")),  # of a rollout that was recorded again since
    ):
        file.add(key, label)
    client = client_of(board_of(run))
    found = ask(client, filter=text)
    assert [(row["step"], row["sample"]) for row in found["rows"]] == wanted


def test_a_filter_sees_a_label_at_once(run: Path) -> None:
    client = client_of(board_of(run))
    assert ask(client, filter="rating > 3")["total"] == 0
    client.put("/api/runs/run/labels/1/1", json={"name": "rating", "value": 4}, headers=ORIGIN)
    assert ask(client, filter="rating > 3")["total"] == 1


@pytest.mark.parametrize(
    "label",
    [
        {"name": "rating", "value": 6},
        {"name": "rating", "value": "5"},
        {"name": "rating"},
        {"name": "tag", "value": " "},
        {"name": "tag", "value": "x" * 101},
        {"name": "star", "value": 1},
        {"name": "over", "value": 1},
        {"name": "over", "value": "2"},
        {"name": "better"},
        {"name": "star", "author": "x" * 101},
    ],
)
def test_what_is_no_label_is_refused(run: Path, label: dict[str, Any]) -> None:
    client = client_of(board_of(run))
    assert client.put("/api/runs/run/labels/1/1", json=label, headers=ORIGIN).status_code == 422
    assert client.put("/api/runs/run/labels/1/1", json={"name": "over", "value": 99}, headers=ORIGIN).status_code == 404
    of_another_prompt = client.put("/api/runs/run/labels/1/1", json={"name": "over", "value": 2}, headers=ORIGIN)
    assert of_another_prompt.status_code == 400 and "answer different prompts" in of_another_prompt.json()["error"]
    assert not (run / "labels.jsonl").exists()


def test_a_selection_is_exported_to_train_on(run: Path) -> None:
    client = client_of(board_of(run))
    for step, chosen, rejected in ((0, 0, 1), (1, 3, 2)):
        label = {"name": "over", "value": rejected}
        assert client.put(f"/api/runs/run/labels/{step}/{chosen}", json=label, headers=ORIGIN).status_code == 200

    def exported(form: str, **selected: str) -> list[dict[str, Any]]:
        text = client.get("/api/runs/run/export", params={"format": form, **selected}).text
        return [json.loads(line) for line in text.splitlines()]

    def said(role: str, text: str) -> list[dict[str, str]]:
        return [{"role": role, "content": text}]

    assert exported("sft", filter="step == 1 and sample < 2") == [
        {"messages": said("user", "prompt 0") + said("assistant", text_of(1, sample))} for sample in range(2)
    ]
    pairs = [
        {
            "prompt": said("user", f"prompt {chosen // 2}"),
            "chosen": said("assistant", text_of(step, chosen)),
            "rejected": said("assistant", text_of(step, rejected)),
        }
        for step, chosen, rejected in ((0, 0, 1), (1, 3, 2))
    ]
    assert exported("preference") == pairs
    assert exported("preference", filter="sample == 3") == pairs[1:]

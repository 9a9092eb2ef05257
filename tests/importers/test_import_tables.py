"""Tables and histories of Weights & Biases, and what ms-swift and verifiers write without a step or a reward."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from import_helpers import lines, rows

import cavesson
from cavesson.errors import UserError
from cavesson.importers import import_run
from cavesson.importers.metrics import WANDB_START, _leveldb


def table(path: Path, columns: list[str], *data: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"columns": columns, "data": data}))


MEDIA = Path("wandb/run-20261129_1-ab/files/media/table")


def test_the_generations_that_verl_logs_are_held_out_responses(tmp_path):
    names = ["step", *(f"{name}_{i}" for i in (1, 2) for name in ("input", "output", "score"))]
    steps = [[5, "a", "b", 1.0, "c", "d", 0.0], [10, "a", "e", 0.5, "c", "f", 1.0]]
    for count in (1, 2):
        table(tmp_path / MEDIA / "val" / f"generations_{5 * count}_a{count}.table.json", names, *steps[:count])
    report = import_run(tmp_path, tmp_path / "run")
    assert (report.format, report.rollouts, report.rejected) == ("verl", 4, 0), "earlier rows come once"
    assert sorted(rows(tmp_path / "run", "step", "split", "prompt", "response", "reward")) == [
        (5, "eval", "a", "b", 1.0),
        (5, "eval", "c", "d", 0.0),
        (10, "eval", "a", "e", 0.5),
        (10, "eval", "c", "f", 1.0),
    ]


def test_the_trajectories_that_skyrl_logs_have_turns(tmp_path):
    text = "[SYSTEM]\nS\n\n[USER]\nQ\n\n[ASSISTANT]\nI look.\n\n[USER/TOOL]\n42\n\n[ASSISTANT]\nIt is 42."
    names = ["step", "idx", "reward", "num_turns", "trajectory"]
    for split in ("train", "eval"):
        table(tmp_path / split / "trajectories" / f"{split}_3_ab.table.json", names, [3, 0, 1.5, 2, text])
        assert import_run(tmp_path / split, tmp_path / f"run-{split}").format == "skyrl"
        prompt, response = text.split("\n\n[ASSISTANT]", 1)
        columns = ("step", "split", "prompt", "response", "reward", "turns")
        assert rows(tmp_path / f"run-{split}", *columns) == [(3, split, prompt, f"[ASSISTANT]{response}", 1.5, 2)]
        said = cavesson.open(tmp_path / f"run-{split}").arrow("turns").to_pylist()
        assert [(turn["role"], turn["text"]) for turn in said] == [
            ("assistant", "I look."), ("user/tool", "42"), ("assistant", "It is 42."),
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("record", "wanted"),
    [
        # ms-swift with Megatron: lists, and the step in which the responses were sampled.
        (
            {
                "gen_step": [4, 4],
                "prompt": ["p", "q"],
                "completion": ["a", "b"],
                "Acc": [1.0, 0.0],
                "advantages": [1, 0],
            },
            [(4, "p", "a", 1.0), (4, "q", "b", 0.0)],
        ),
        # ms-swift with Ray: a line per response.
        ({"gen_step": 4, "prompt": "p", "completion": "a", "reward": 0.5}, [(4, "p", "a", 0.5)]),
        # Distillation, in ms-swift and in TRL: no reward.
        ({"step": ["4"], "prompt": ["p"], "completion": ["a"]}, [(4, "p", "a", None)]),
        ({"step": 4, "prompt": "p", "completion": "a"}, [(4, "p", "a", None)]),
    ],
)
def test_completions_without_a_step_or_a_reward(tmp_path, record, wanted):
    lines(tmp_path / "completions.jsonl", record)
    report = import_run(tmp_path, tmp_path / "run")
    assert (report.format, report.rejected) == ("trl", 0)
    assert sorted(rows(tmp_path / "run", "step", "prompt", "response", "reward")) == wanted


@pytest.mark.parametrize("run", [None, {"type": "eval", "id": "r", "name": "n"}])
def test_an_evaluation_with_verifiers_alone_is_held_out(tmp_path, run):
    nodes = [
        {"message": {"role": "user", "content": "Q"}, "parent": None},
        {"message": {"role": "assistant", "content": "A"}, "parent": 0, "sampled": True},
    ]
    trace = {"nodes": nodes, "rewards": {"right": {"score": 1.0, "weight": 0.5}}, "task": {}}
    lines(tmp_path / "maths--m--bash" / "0f3a" / "traces.jsonl", {"id": "e", "run": run, "traces": [trace]})
    assert import_run(tmp_path, tmp_path / "run").format == "prime-rl"
    wanted = (0, "eval", "[user]\nQ", "[assistant]\nA", 0.5)
    assert rows(tmp_path / "run", "step", "split", "prompt", "response", "reward") == [wanted]


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of Weights & Biases that was written without a network: two steps, and many numbers."""
    wandb = pytest.importorskip("wandb")
    folder: Path = tmp_path_factory.mktemp("offline")
    before = dict(os.environ)
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    os.environ |= {f"WANDB_{name}_DIR": str(folder / name) for name in ("CONFIG", "CACHE", "DATA")}
    run = wandb.init(dir=folder, project="p", mode="offline")
    for step in (5, 10):
        many = {f"many/{i}": i / step for i in range(2000)}  # more than a block of the file
        run.log({"loss": 1 / step, "train/global_step": step, "text": "t", **many})
    run.finish()
    wandb.teardown()
    os.environ.clear()
    os.environ.update(before)
    return next(folder.glob("wandb/offline-run-*"))


def completions(folder: Path) -> Path:
    lines(
        folder / "completions.jsonl", *({"step": s, "prompt": "p", "completion": "a", "reward": 1.0} for s in (5, 10))
    )
    return folder / "completions.jsonl"


def test_the_history_of_a_run_of_weights_and_biases_is_read(tmp_path, history):
    for place, source in enumerate((history, history.parent, next(history.glob("*.wandb")))):
        report = import_run(completions(tmp_path), tmp_path / f"run{place}", metrics=source)
        assert any("step of the metrics is 'train/global_step'" in note for note in report.notes)
        logged = cavesson.open(tmp_path / f"run{place}").arrow("steps").to_pylist()
        assert [(line["step"], line["loss"], line["many/1999"]) for line in logged] == [
            (step, 1 / step, 1999 / step) for step in (5, 10)
        ]


@pytest.mark.parametrize("size", [0, 5, 7, 40, 2**15 + 3, -1])
def test_a_history_that_was_cut_is_read_as_far_as_it_goes(tmp_path, history, size):
    whole = next(history.glob("*.wandb")).read_bytes()
    (tmp_path / "cut.wandb").write_bytes(whole[:size])
    try:
        import_run(completions(tmp_path), tmp_path / "run", metrics=tmp_path / "cut.wandb")
    except UserError as error:
        assert "cut.wandb" in str(error) and "\n" not in str(error)
    damaged = whole[:20] + bytes(255 - byte for byte in whole[20:200]) + whole[200:]
    (tmp_path / "damaged.wandb").write_bytes(damaged)
    with pytest.raises(UserError, match=r"damaged\.wandb (is damaged|has no metrics)"):
        import_run(completions(tmp_path), tmp_path / "run2", metrics=tmp_path / "damaged.wandb")


def leveldb(records: list[bytes], start: int) -> bytes:
    """Records in blocks of 32 KiB, as LevelDB writes them; checksums are not read."""
    content = bytes(start)
    for record in records:
        first = True
        while first or record:
            room = 2**15 - len(content) % 2**15
            if room < 7:
                content, room = content + bytes(room), 2**15
            part, record = record[: room - 7], record[room - 7 :]
            kind = (1 if first else 4) if not record else (2 if first else 3)
            content += bytes(4) + len(part).to_bytes(2, "little") + bytes([kind]) + part
            first = False
    return content


@given(st.lists(st.integers(0, 8) | st.integers(2**15 - 40, 2**15 + 8) | st.just(2**17), max_size=5), st.integers(0, 8))
@settings(max_examples=30, deadline=None)
def test_records_of_any_size_come_out_of_the_blocks_of_a_history(sizes, cut):
    records = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    content = leveldb(records, WANDB_START)
    assert [*_leveldb(content, WANDB_START)] == records
    assert [*_leveldb(content[: len(content) - cut], WANDB_START)] in (records, records[:-1])

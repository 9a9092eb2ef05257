"""The columns of the data: what rewards get of them, and what the record keeps."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from train_helpers import build, finish

import cavesson
from cavesson.errors import UserError

CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ROWS = [
    {"question": "2+2?", "answer": "4", "level": 1, "meta": {"source": "a", "score": math.nan}},
    {"question": "2+3?", "answer": "5", "system": "Add.", "meta": None},
    {"question": "2+4?", "answer": "6", "level": 3},
]
COLUMNS = {"prompt": "question", "ground_truth": "answer"}


def data(folder: Path) -> dict[str, Any]:
    file = folder / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return {"path": str(file), "columns": COLUMNS, "chat": True, "template": CHATML, "validation": 1 / 3}


@pytest.mark.parametrize("held_out", [False, True])
def test_rewards_get_every_column_and_the_conversation_and_the_record_keeps_them(tmp_path, held_out):
    seen: dict[str, dict[str, Any]] = {}

    def reward(prompts, responses, question, messages, **columns):
        for n, prompt in enumerate(prompts):
            one = {"question": question[n], "messages": messages[n]} | {name: got[n] for name, got in columns.items()}
            assert seen.setdefault(prompt, one) == one or "nan" in str(one)
        return [float(len(response)) for response in responses]

    finish(tmp_path / "run", {"prompts": None, "rewards": reward}, data=data(tmp_path), batch_size=4)
    rows = [row for row in cavesson.open(tmp_path / "run").rows().to_pylist() if (row["split"] == "eval") == held_out]
    known = {row["question"]: row for row in ROWS}
    asked = {row["prompt"] for row in rows}
    assert asked == (
        {"<user>2+4?<assistant>"} if held_out else {"<user>2+2?<assistant>", "<system>Add.<user>2+3?<assistant>"}
    )
    for row in rows:
        given = seen[row["prompt"]]
        original = known[given["question"]]
        system = [{"role": "system", "content": "Add."}] if "system" in original else []
        assert given["messages"] == [*system, {"role": "user", "content": original["question"]}]
        columns = {name: original.get(name) for name in ("question", "answer", "level", "system")}
        assert {name: given[name] for name in columns} == columns
        assert row["ground_truth"] == given["ground_truth"] == original["answer"]
        kept = {name: value for name, value in original.items() if value is not None}
        if "meta" in kept:
            kept["meta"] = {"source": "a", "score": "nan"}
        assert json.loads(row["extra"]) == kept


def test_plain_texts_have_no_messages_and_are_recorded_once(tmp_path):
    def reward(prompts, responses, **columns):
        assert sorted(columns) == ["ground_truth", "prompt"]
        return [0.0] * len(responses)

    prompts = {"prompt": ["On the table", "My"], "ground_truth": ["a", None]}
    finish(tmp_path / "run", {"prompts": prompts, "rewards": reward}, batch_size=2, steps=1)
    rows = cavesson.open(tmp_path / "run").rows().to_pylist()
    assert {(row["prompt"], row["ground_truth"], row["extra"]) for row in rows} == {
        ("On the table", "a", None),
        ("My", None, None),
    }


def test_the_first_arguments_may_have_the_name_of_a_column(tmp_path):
    def reward(prompt, response, **columns):
        assert prompt[0].startswith("<user>")
        assert list(columns) == ["messages"]
        return [0.0] * len(response)

    build(tmp_path / "run", {"prompts": {"prompt": ["Hi"]}, "rewards": reward}, data={"chat": True, "template": CHATML})


def test_columns_given_from_python_are_read_like_those_of_a_file(tmp_path):
    given = {"prompt": ["Hi", "Ho"], "system": ["S", None]}
    chat = {"chat": True, "template": CHATML}
    training = build(tmp_path / "run", {"prompts": given}, data=chat)
    assert training.trainer.batches.collector.prompts.texts == ("<system>S<user>Hi<assistant>", "<user>Ho<assistant>")
    assert "columns: prompt ← prompt, system" in training.trainer.notes()
    with pytest.raises(UserError, match="the prompts: row 1: 'system' belongs to a conversation"):
        build(tmp_path / "run", {"prompts": given})
    left = build(tmp_path / "run", {"prompts": given}, data={"ignore": ["system"]})
    assert left.trainer.batches.collector.prompts.columns == {"prompt": ("Hi", "Ho"), "system": ("S", None)}

"""Rows that are too long, there twice, or held out and learned; and a disk without room."""

import json
from pathlib import Path
from typing import Any

from check_helpers import found, run_of
from pytest import MonkeyPatch
from transformers import PreTrainedTokenizerBase

from cavesson.check import disk
from cavesson.check.data import check_examples, check_prompts
from cavesson.check.disk import check_disk, disk_need
from cavesson.data.prompts import load_prompts


def rows(folder: Path, texts: list[str]) -> None:
    lines = [json.dumps({"prompt": text, "response": f" and {n}"}) for n, text in enumerate(texts)]
    (folder / "rows.jsonl").write_text("\n".join(lines))


def prompts(folder: Path, tokenizer: PreTrainedTokenizerBase, **changes: Any) -> dict[str, str]:
    run = run_of("ppo", folder, **changes)
    return found(check_prompts(run, load_prompts(run.data, tokenizer)))


def examples(folder: Path, tokenizer: PreTrainedTokenizerBase, **changes: Any) -> dict[str, str]:
    run = run_of("sft", folder, **{"data__validation": 0.25, **changes})
    return found(check_examples(run, run.examples(tokenizer)))


def test_many_long_prompts(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows(tmp_path, [letter * n for letter, n in zip("abcdefgh", (5, 5, 5, 5, 5, 5, 9, 9), strict=True)])
    assert prompts(tmp_path, tokenizer, data__max_prompt_tokens=8) == {"prompts-dropped": "warning"}
    assert prompts(tmp_path, tokenizer, data__max_prompt_tokens=9) == {}


def test_rows_that_are_there_twice(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    different = [f"prompt {n}" for n in range(19)]
    rows(tmp_path, [*different, "prompt 0"])
    assert prompts(tmp_path, tokenizer) == {}  # 1 of 20
    rows(tmp_path, [*different, "prompt 0", "prompt 1"])
    assert prompts(tmp_path, tokenizer) == {"duplicates": "warning"}


def test_examples_that_are_cut(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows(tmp_path, ["abcdefgh", "bcdefghi", "cdefghij", "defghijk"])  # 8 + 6 + end token = 15
    cut = examples(tmp_path, tokenizer, data__max_length=12)
    assert cut["examples-cut"] == "warning"
    assert examples(tmp_path, tokenizer, data__max_length=16) == {}


def test_held_out_rows(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows(tmp_path, ["a", "b", "c", "d"])
    assert examples(tmp_path, tokenizer) == {}
    assert examples(tmp_path, tokenizer, data__validation=0.0) == {"held-out": "note"}
    same = json.dumps({"prompt": "a", "response": " same"})
    (tmp_path / "rows.jsonl").write_text("\n".join([same, *(same.replace('"a"', f'"{c}"') for c in "bc"), same]))
    assert examples(tmp_path, tokenizer) == {"held-out-learned": "warning"}


def test_disk_need_is_arithmetic(tmp_path: Path) -> None:
    run = run_of("ppo", tmp_path, checkpoint__keep=2, steps=10, batch_size=4, sampling__max_new_tokens=100)
    need = disk_need(run, 1000, 500)
    # Three checkpoints, the third before the first is removed; 40 rollouts of 11 numbers for each of 100 tokens.
    assert need == {"checkpoints": 1500, "model": 1000, "record": 40 * (2000 + int(100 * 11 * 2.4))}
    assert "record" not in disk_need(run_of("sft", tmp_path), 1000, 500)
    single = run_of("ppo", tmp_path, checkpoint__every=0)
    assert disk_need(single, 1000, 500)["checkpoints"] == 500


def test_a_disk_without_room(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    run = run_of("sft", tmp_path, checkpoint__keep=1)

    class Usage:
        free = 2000

    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: Usage)
    assert found(check_disk(run, 1001, 500)) == {"disk": "error"}
    assert found(check_disk(run, 1000, 500)) == {}

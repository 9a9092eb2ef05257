import json

import pytest

from cavesson.config import load
from cavesson.errors import UserError
from cavesson.tools.generate import generate, write
from cavesson.tools.settings import GenerateSettings


def settings(*flags: str) -> GenerateSettings:
    return load(GenerateSettings, None, ["--sampling.max_new_tokens", "4", *flags])


def test_samples_of_a_prompt_follow_each_other():
    rows = list(generate("tiny", settings("--prompt", '["one", "two"]', "--samples", "3")))
    assert [row["prompt"] for row in rows] == ["one"] * 3 + ["two"] * 3
    assert len({row["response"] for row in rows}) > 3


def test_the_seed_decides_and_the_batch_size_does_not():
    flags = ("--prompt", '["one", "two"]', "--samples", "3")
    rows = list(generate("tiny", settings(*flags)))
    assert list(generate("tiny", settings(*flags, "--batch_size", "2"))) == rows
    assert list(generate("tiny", settings(*flags, "--seed", "1"))) != rows


def test_prompts_may_come_from_a_file(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("first\nsecond\n", encoding="utf-8")
    rows = list(generate("tiny", settings("--data.path", str(file))))
    assert [row["prompt"] for row in rows] == ["first", "second"]


@pytest.mark.parametrize("flags", [(), ("--prompt", "a", "--data.path", "b.txt")])
def test_prompts_come_from_one_place(flags):
    with pytest.raises(UserError, match="either --prompt"):
        next(generate("tiny", settings(*flags)))


def test_written_lines_are_what_was_generated(tmp_path):
    rows = [{"prompt": "é", "response": "a\nb", "finish_reason": "eos"}] * 2
    out = tmp_path / "out.jsonl"
    assert write(iter(rows), out) == 2
    assert [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()] == rows
    with pytest.raises(UserError, match="exists already"):
        write(iter(rows), out)


def test_a_failure_leaves_no_half_written_file(tmp_path):
    def failing():
        yield {"prompt": "a", "response": "b", "finish_reason": "eos"}
        raise RuntimeError("out of memory")

    out = tmp_path / "out.jsonl"
    with pytest.raises(RuntimeError):
        write(failing(), out)
    assert not out.exists()

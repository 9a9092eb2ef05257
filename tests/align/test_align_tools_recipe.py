"""The template in which a tiny model learns to use a calculator."""

import json
from pathlib import Path
from typing import Any

import pytest

import cavesson
from cavesson.align.recipe import read_recipe
from cavesson.align.run import align
from cavesson.data.examples import tokenize_demonstrations
from cavesson.data.load import load
from cavesson.data.types import Demonstration
from cavesson.models.tiny import tiny_tokenizer
from cavesson.train.prompts import conversation_of, prompts_of

TEMPLATE = Path(cavesson.__file__).parent / "templates" / "agent"
RESULT = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "x": lambda a, b: a * b}
NAME = {"+": "add", "-": "sub", "x": "mul"}


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (TEMPLATE / name).read_text().splitlines()]


def test_its_demonstrations_are_right_and_its_held_out_questions_are_new() -> None:
    asked = set()
    for row in rows("demonstrations.jsonl"):
        question, *between, answer = row["messages"]
        a, sign, b = question["content"].split()
        right = RESULT[sign](int(a), int(b))
        assert answer == {"role": "assistant", "content": str(right)}
        if between:
            call, result = between
            (made,) = call["tool_calls"]
            assert made["function"] == {"name": NAME[sign], "arguments": {"a": int(a), "b": int(b)}}
            assert (result["name"], result["content"]) == (NAME[sign], str(right))
        asked.add(question["content"])
    trained, held_out = rows("questions.jsonl"), rows("held-out.jsonl")
    for row in (*trained, *held_out):
        a, sign, b = row["question"].split()
        assert row["answer"] == RESULT[sign](int(a), int(b))
    assert {row["question"] for row in trained} == asked
    assert len({row["question"] for row in held_out} - asked) == len(held_out) == 150


def test_its_demonstrations_begin_as_the_prompts_of_its_episodes() -> None:
    """The tools are offered in the order in which the environment offers them."""
    sft, grpo, _ = (stage.settings for stage in read_recipe(TEMPLATE / "recipe.toml", []))
    tokenizer = tiny_tokenizer()
    prompts = prompts_of(grpo, tokenizer, conversation_of(grpo, tokenizer))
    examples = tokenize_demonstrations(load(sft.data, Demonstration).train, tokenizer, sft.data)
    starts = {one.ids[: one.learn.index(True)] for one in examples}
    assert starts == set(prompts.ids)


@pytest.mark.slow
def test_it_learns_to_use_a_calculator(tmp_path: Path) -> None:
    align(read_recipe(TEMPLATE / "recipe.toml", ["--run", str(tmp_path / "run")]))
    comparison = json.loads((tmp_path / "run" / "compare" / "comparison.json").read_text())
    before, after = (column["rewards"]["right"] for column in comparison["columns"])
    assert comparison["prompts"] == 150
    assert before["high"] < after["low"]

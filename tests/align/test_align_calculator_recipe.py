"""The recipe in which SmolLM2 learns to answer with two tools."""

import json
import re
from pathlib import Path
from typing import Any

from cavesson.align.recipe import read_recipe
from cavesson.data.examples import tokenize_demonstrations
from cavesson.data.load import load
from cavesson.data.types import Demonstration
from cavesson.functions import load_function
from cavesson.models.tiny import tiny_tokenizer
from cavesson.train.prompts import conversation_of, prompts_of

PLACE = Path(__file__).parents[2] / "recipes" / "calculator"


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (PLACE / f"{name}.jsonl").read_text().splitlines()]


def right(question: str) -> tuple[str, int]:
    """The tool that a question needs, and its answer."""
    a, b = map(int, re.findall(r"\d+", question))
    return ("add", a + b) if re.search("finds|another|on to", question) else ("multiply", a * b)


def test_its_data_are_right_and_no_question_is_in_two_files() -> None:
    known, new = set(), []
    for row in rows("demonstrations"):
        question, *used, answer = row["messages"]
        tool, number = right(question["content"])
        for call, result in [used] if used else []:
            assert call["tool_calls"][0]["function"]["name"] == tool and result["content"] == str(number)
        assert answer["content"] == f"The answer is {number}."
        known.add(question["content"])
    assert sum(len(row["messages"]) == 4 for row in rows("demonstrations")) == len(rows("demonstrations")) / 2
    for row in (*rows("questions"), *rows("held-out")):
        assert right(row["question"])[1] == row["answer"]
        new.append(row["question"])
    assert len({*new} - known) == len(new)


def test_its_demonstrations_begin_as_the_prompts_of_its_episodes() -> None:
    """The tools of `data.tools` are the schemas of the functions, in the same order."""
    flags = ["--sft.data.max_length", "4000", "--grpo.data.max_prompt_tokens", "4000"]  # a token is a byte here
    sft, grpo, _ = (stage.settings for stage in read_recipe(PLACE / "align.toml", flags))
    tokenizer = tiny_tokenizer()
    prompts = prompts_of(grpo, tokenizer, conversation_of(grpo, tokenizer))
    (start,) = {text.split("<|im_start|>user")[0] for text in map(tokenizer.decode, prompts.ids)}
    examples = tokenize_demonstrations(load(sft.data, Demonstration).train, tokenizer, sft.data)
    begun = [tokenizer.decode(one.ids[: one.learn.index(True)]) for one in examples]
    assert "multiply" in start and all(text.startswith(start) for text in begun)
    assert {text.rpartition("<|im_end|>")[2] for text in begun} == {"\n<|im_start|>assistant\n"}


def test_its_reward_wants_the_right_number_and_no_other() -> None:
    reward = load_function(f"{PLACE}/calculator.py:right")
    said = ["The answer is 12.", "12", "It is 12 or 13.", "13", "", "**12**"]
    assert reward(["q"] * len(said), said, answer=[12] * len(said)) == [1, 1, 0, 0, 0, 1]

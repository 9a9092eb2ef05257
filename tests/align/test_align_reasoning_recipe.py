"""The recipe on tasks of Reasoning Gym: its files of tasks, its prompts, and the reward."""

import json
import re
import sys
from math import gcd
from operator import add, mul, sub
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cavesson.align.recipe import read_recipe
from cavesson.errors import UserError
from cavesson.functions import load_function
from cavesson.models.tiny import tiny_tokenizer
from cavesson.train.prompts import conversation_of, prompts_of

RECIPES = Path(__file__).parents[2] / "recipes"
CODE = RECIPES / "reasoning_gym_tasks.py"


def tasks(name: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (RECIPES / f"reasoning-gym-{name}.jsonl").read_text().splitlines()]
    return [{**row, "metadata": json.loads(row["metadata"])} for row in rows]


HELD_OUT, TRAINED = tasks("held-out"), tasks("questions")


def kind(task: dict[str, Any]) -> str:
    return str(task["metadata"]["source_dataset"])


def solved(task: dict[str, Any]) -> str:
    """The answer, from the words of the question."""
    question = task["question"]
    if kind(task) in ("chain_sum", "products"):
        a, sign, b = re.findall(r"\d+|[*+-]", question)
        return str({"+": add, "-": sub, "*": mul}[sign](int(a), int(b)))
    if kind(task) == "gcd":
        return str(gcd(*map(int, re.findall(r"\d+", question))))
    letter, text = re.findall('"([^"]*)"', question)
    return str(text.lower().count(letter))


def test_its_answers_are_right_and_its_held_out_questions_are_new() -> None:
    assert [task["answer"] for task in (*HELD_OUT, *TRAINED)] == [solved(task) for task in (*HELD_OUT, *TRAINED)]
    held_out, trained = ({task["question"].casefold() for task in some} for some in (HELD_OUT, TRAINED))
    assert len(held_out) == len(HELD_OUT) == 60 and len(trained) == len(TRAINED) == 300
    assert not held_out & trained
    for some in (HELD_OUT, TRAINED):  # as many of each kind, in turns
        assert len({kind(task) for task in some[:4]}) == 4
        assert [kind(task) for task in some] == [kind(task) for task in some[:4]] * (len(some) // 4)


def test_its_prompts_ask_for_the_answer_alone(tmp_path: Path) -> None:
    """With a tiny tokenizer, whose tokens are short here, and a template: those of the recipe take half a minute."""
    (tmp_path / "chat.jinja").write_text("{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}")
    tiny = ["--grpo.model.path", "tiny", "--grpo.model.gguf_file", "none", "--grpo.data.max_prompt_tokens", "1000"]
    flags = [*tiny, "--grpo.data.template", str(tmp_path / "chat.jinja")]
    grpo, compare = (stage.settings for stage in read_recipe(RECIPES / "reasoning-gym.toml", flags))
    tokenizer = tiny_tokenizer()
    prompts = prompts_of(grpo, tokenizer, conversation_of(grpo, tokenizer))
    held_out = prompts.held_out
    assert held_out is not None and not (*prompts.dropped, *held_out.dropped)
    for some, asked in ((TRAINED, prompts), (HELD_OUT, held_out)):
        texts = [f"system: {grpo.data.system}\nuser: {task['question']}\n" for task in some]
        assert [*asked.texts] == texts
    assert compare.prompts == grpo.data.validation_path == str(RECIPES / "reasoning-gym-held-out.jsonl")


def test_without_the_package_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)  # as where it is not installed
    with pytest.raises(UserError) as error:
        load_function(f"{CODE}:score")
    line = "reasoning_gym_tasks.py needs reasoning_gym; install it with: pip install 'cavesson[reasoning]'"
    assert str(error.value) == line


@pytest.fixture(scope="module")
def code() -> ModuleType:
    pytest.importorskip("reasoning_gym", reason="needs a C compiler to install: make .venv/.reasoning-installed")
    return sys.modules[load_function(f"{CODE}:score").__module__]


def scores(code: ModuleType, answers: list[str]) -> list[float]:
    """The score of an answer to each of the held-out tasks; exactly the part of its kind judges it."""
    columns = {"answer": [task["answer"] for task in HELD_OUT]}
    about = [json.dumps(task["metadata"]) for task in HELD_OUT]
    parts = code.score([task["question"] for task in HELD_OUT], answers, **columns, metadata=about, other=about)
    judged = [{name for name, part in parts.items() if part[row] is not None} for row in range(len(HELD_OUT))]
    assert judged == [{kind(task)} for task in HELD_OUT]
    return [parts[kind(task)][row] for row, task in enumerate(HELD_OUT)]


def test_right_answers_score_1_and_all_others_0(code: ModuleType) -> None:
    right = [task["answer"] for task in HELD_OUT]
    for text in ("{}", " {}\n", "The answer is {}.", "**{}**", "2 or {}", "= {}."):
        assert scores(code, [text.format(one) for one in right]) == [1.0] * len(right)
    others = right[4:] + right[:4]  # of the next task of the same kind
    assert scores(code, others) == [float(one == other) for one, other in zip(right, others, strict=True)]
    assert 0 < sum(scores(code, others)) < 15  # some are the same
    # Reasoning Gym's own score of an answer that contains the right one is a share of 1.
    for text in ("", "Yes.", "{} or so", "1{}1", "{} = x", "...", "\n"):
        assert scores(code, [text.format(one) for one in right]) == [0.0] * len(right)


def test_its_files_are_what_it_draws(code: ModuleType, tmp_path: Path) -> None:
    for name, drawn in zip(("held-out", "questions"), code.held_out_and_trained(), strict=True):
        code.write(tmp_path / "tasks.jsonl", drawn)
        assert (tmp_path / "tasks.jsonl").read_text() == (RECIPES / f"reasoning-gym-{name}.jsonl").read_text()

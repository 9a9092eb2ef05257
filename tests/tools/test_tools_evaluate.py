"""Rewards of sampled responses on held-out prompts."""

import json
from datetime import date
from pathlib import Path
from statistics import fmean

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from cavesson.config import load
from cavesson.errors import UserError
from cavesson.ops.intervals import share_interval
from cavesson.tools.evaluate import Evaluation, evaluate
from cavesson.tools.generate import generate
from cavesson.tools.settings import EvaluateSettings, GenerateSettings

MAPPING = '{prompt = "question", ground_truth = "answer"}'


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    file = tmp_path / "questions.jsonl"
    rows = [{"question": f"What is {n}+{n}? ", "answer": f"{n}+{n}={2 * n}\n#### {2 * n}"} for n in range(8)]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def test_columns_that_json_lacks_are_written_as_texts(models: Path, tmp_path: Path) -> None:
    table = pa.table({"question": ["What?"], "answer": ["4"], "when": [date(2026, 11, 27)]})
    pq.write_table(table, tmp_path / "rows.parquet")
    out = tmp_path / "out.json"
    data = ("--data.path", tmp_path / "rows.parquet", "--data.columns", MAPPING)
    evaluated(models, *data, "--rewards", "lowercase", "--out", out)
    (row,) = json.loads(out.read_text())["responses"]
    assert row["columns"]["when"] == "2026-11-27"


@pytest.mark.parametrize("part", ["validation", "validation_path", "validation_split"])
@pytest.mark.parametrize("name", ["data", "text"])
def test_nothing_is_held_out_where_nothing_is_trained(name: str, part: str) -> None:
    given = {"path": "rows.jsonl", part: 0.5 if part == "validation" else "test"}
    with pytest.raises(ValueError, match=f"{name}.{part} holds rows out of training"):
        EvaluateSettings.model_validate({name: given})


@pytest.mark.parametrize("rewards", [None, 5])
def test_rewards_of_another_type_are_refused(rewards: object) -> None:
    with pytest.raises(ValidationError):
        EvaluateSettings.model_validate({"data": {"path": "rows.jsonl"}, "rewards": rewards})


def evaluated(models: Path, *flags: object) -> Evaluation:
    fixed = ("--sampling.max_new_tokens", 8, "--device", "cpu")
    return evaluate(str(models / "one"), load(EvaluateSettings, None, [str(flag) for flag in (*fixed, *flags)]))


def test_accuracy_of_verifiable_answers(models, questions, tmp_path):
    data = ("--data.path", questions, "--data.columns", MAPPING)
    (tmp_path / "own.py").write_text(
        "from cavesson.rollout.rewards.exact_match import exact_match\n\n\n"
        "def kind_match(prompts, responses, **columns):\n"
        '    return exact_match(prompts, [r + " #### 4" for r in responses], **columns)\n'
    )
    # Every response is made to end in 4, which answers one question of eight.
    found = evaluated(
        models, *data, "--rewards", f"{tmp_path / 'own.py'}:kind_match", "--out", tmp_path / "a" / "e.json"
    )
    (interval,) = found.rewards.values()
    assert interval == share_interval([1] + [0] * 7, range(8))
    assert "0.125" in str(found) and "8 responses" in str(found)
    written = json.loads((tmp_path / "a" / "e.json").read_text())
    assert written["text"] is None
    assert [one["prompt"] for one in written["responses"]] == [f"What is {n}+{n}? " for n in range(8)]
    assert [next(iter(written["rewards"])) in one for one in written["responses"]] == [True] * 8
    assert sum(one[next(iter(written["rewards"]))] for one in written["responses"]) == 1


def test_the_responses_are_those_of_generate_and_prompts_are_independent(models, questions):
    data = ("--data.path", questions, "--data.columns", MAPPING, "--samples", 3, "--seed", 5)
    found = evaluated(models, *data, "--rewards", "lowercase", "--batch_size", 7)
    flags = [str(flag) for flag in (*data, "--sampling.max_new_tokens", 8)]
    responses = [row["response"] for row in generate(str(models / "one"), load(GenerateSettings, None, flags))]
    assert [one["response"] for one in found.responses] == responses
    scores = [sum("a" <= c <= "z" for c in text) / max(1, len(text)) for text in responses]
    interval = found.rewards["lowercase"]
    assert interval.mean == pytest.approx(fmean(scores))
    assert interval == share_interval(scores, [prompt for prompt in range(8) for _ in range(3)])


def test_text_and_rewards_together(models, questions, tmp_path):
    (tmp_path / "held-out.txt").write_text("The old bridge.\nA ferry.\n")
    flags = ("--text.path", tmp_path / "held-out.txt", "--data.path", questions, "--data.columns", MAPPING)
    found = evaluated(models, *flags, "--rewards", "lowercase", "--sampling.temperature", 0.5)
    alone = evaluated(models, "--text.path", tmp_path / "held-out.txt")
    assert found.text == alone.text and found.text.documents == 2  # the temperature is of the sampling only
    assert alone.rewards == {} and alone.responses == []
    assert "perplexity" in str(found) and "lowercase" in str(found)


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ((), "give --text.path FILE"),
        (("--data.path", "QUESTIONS", "--data.columns", MAPPING), "no reward is given: add --rewards"),
        (("--data.path", "QUESTIONS", "--out", "OUT", "--rewards", "lowercase"), "exists already"),
    ],
)
def test_mistakes_are_explained(models, questions, tmp_path, flags, part):
    out = tmp_path / "out.json"
    out.touch()
    with pytest.raises(UserError, match=part):
        evaluated(models, *({"QUESTIONS": questions, "OUT": out}.get(flag, flag) for flag in flags))

"""A chat template that writes today's date writes the run's in every tool, as it did in training."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForSequenceClassification

import cavesson
from cavesson.algorithms.grpo import GRPORun
from cavesson.config import load
from cavesson.data.template import template_time
from cavesson.errors import UserError
from cavesson.record import write_run
from cavesson.tools.chat import chat
from cavesson.tools.compare import compare
from cavesson.tools.evaluate import evaluate
from cavesson.tools.generate import generate
from cavesson.tools.score import score
from cavesson.tools.settings import CompareSettings, EvaluateSettings, GenerateSettings, ScoreSettings, TalkSettings
from cavesson.train.run import Training

DATED = (
    "{{ strftime_now('%d %b %Y') }} {% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
LONG_AGO = "01 Feb 2003"
RENDERED = f"{LONG_AGO} <u>Why?<a>"
GREEDY = ("--sampling.temperature", "0", "--sampling.max_new_tokens", "8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Path:
    """A run that began long ago, `run`, from the model `base`; its template writes the date."""
    folder = tmp_path_factory.mktemp("dated")
    copied(models / "one", folder / "base")
    values: dict[str, Any] = {
        "run": folder / "run",
        "steps": 1,
        "batch_size": 2,
        "samples_per_prompt": 2,
        "model": {"device": "cpu", "path": str(folder / "base")},
        "data": {"chat": True},
        "sampling": {"max_new_tokens": 2},
        "optimizer": {"learning_rate": 1e-6},
    }
    training = Training(GRPORun.model_validate(values), prompts=["Why?", "How?"], rewards=lengths)
    training.run(lambda step, metrics: None)
    assert {row.split(" <")[0] for row in cavesson.open(folder / "run").rows(["prompt"])["prompt"].to_pylist()} == {
        f"{template_time():%d %b %Y}"
    }
    begin(folder / "run", "2003-02-01T10:00:00")
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": "Why?"}) + "\n")
    (folder / "text.jsonl").write_text(json.dumps({"prompt": "Why?", "response": "Yes"}) + "\n")
    return folder


def copied(model: Path, folder: Path) -> None:
    """Copy a model, and give it a template that writes the date."""
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = DATED
    tokenizer.save_pretrained(folder)


def begin(run: Path, time: str) -> None:
    info = json.loads((run / "run.json").read_text())
    assert info["began"]
    (run / "run.json").write_text(json.dumps(info | {"began": time}))


def lengths(prompts: list[str], responses: list[str], **_: Any) -> list[float]:
    return [float(len(response)) for response in responses]


def test_prompts_have_the_date_of_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, data = str(folder / "run"), ["--data.path", str(folder / "prompts.jsonl")]
    assert [one["prompt"] for one in generate(run, load(GenerateSettings, None, data))] == [RENDERED]
    assert [one["prompt"] for one in generate(run, load(GenerateSettings, None, ["--prompt", "Why?"]))] == [RENDERED]
    evaluated = evaluate(run, load(EvaluateSettings, None, [*data, "--rewards", "lowercase"]))
    assert [one["prompt"] for one in evaluated.responses] == [RENDERED]
    said = [line for line in capsys.readouterr().err.splitlines() if "prompts are" in line]
    assert len(said) == 3
    assert all("; template date 2003-02-01; " in line for line in said)
    # The date is the run's inside of the tools only.
    assert template_time().year > 2003


def test_a_base_that_is_compared_with_a_run_has_its_date(folder: Path) -> None:
    names = [str(folder / name) for name in ("base", "run")]
    compared = compare(names, load(CompareSettings, None, ["--prompts", str(folder / "prompts.jsonl")]))
    assert [column.responses[0]["prompt"] for column in compared.columns] == [RENDERED, RENDERED]


def test_the_perplexity_is_that_of_answers_on_the_date(folder: Path) -> None:
    run, plain = str(folder / "run"), ["--text.path", str(folder / "text.jsonl")]
    (folder / "then.jsonl").write_text(json.dumps({"prompt": RENDERED, "response": "Yes"}) + "\n")
    raw = ["--text.path", str(folder / "then.jsonl"), "--text.chat", "false", "--text.special_tokens", "control"]
    own, then = (evaluate(run, load(EvaluateSettings, None, flags)).text for flags in (plain, raw))
    assert own is not None and then is not None
    # As plain text, the end token is appended, which this template does not write.
    assert then.tokens == own.tokens + 1
    begin(folder / "run", "2004-03-02T10:00:00")
    later = evaluate(run, load(EvaluateSettings, None, plain)).text
    begin(folder / "run", "2003-02-01T10:00:00")
    assert later is not None and later.nll != own.nll


def test_a_conversation_has_the_date_of_the_run(folder: Path, monkeypatch, capsys) -> None:
    run = str(folder / "run")

    def answer(time: str) -> tuple[str, str]:
        begin(folder / "run", time)
        monkeypatch.setattr("sys.stdin", io.StringIO("Why?\n"))
        capsys.readouterr()
        chat(run, load(TalkSettings, None, GREEDY))
        talked = capsys.readouterr().out.removesuffix("\n")
        return talked, next(iter(generate(run, load(GenerateSettings, None, ["--prompt", "Why?", *GREEDY]))))[
            "response"
        ]

    (then, expected), (later, changed) = answer("2003-02-01T10:00:00"), answer("1987-11-29T10:00:00")
    begin(folder / "run", "2003-02-01T10:00:00")
    assert then == expected != changed == later


def test_a_reward_model_of_a_run_reads_its_own_date(tmp_path: Path, models: Path) -> None:
    judge = tmp_path / "judge"
    judge.mkdir()
    copied(models / "judge", judge / "model")
    write_run(judge, {"config": {"data": {"path": "a.jsonl"}}, "began": "2003-02-01T10:00:00"})
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "Why?", "response": "Yes"}) + "\n")
    reward = f'[{{use = "classifier", options = {{path = "{judge}", chat = true}}}}]'
    found = score(str(tmp_path / "in.jsonl"), load(ScoreSettings, None, ["--rewards", reward, "--device", "cpu"]))
    model = LlamaForSequenceClassification.from_pretrained(judge / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(judge / "model")
    ids = tokenizer(f"{LONG_AGO} <u>Why?<a>Yes", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits.item()
    assert next(iter(found.rewards.values())).mean == pytest.approx(expected, abs=1e-5)


def test_a_run_that_says_nonsense_about_when_it_began_is_refused(tmp_path: Path, models: Path) -> None:
    (tmp_path / "run").mkdir()
    copied(models / "one", tmp_path / "run" / "model")
    for began in ("yesterday", 7):
        write_run(tmp_path / "run", {"config": {"data": {"chat": True}}, "began": began})
        with pytest.raises(UserError, match=r"run\.json does not say when the run began; put back a copy"):
            next(iter(generate(str(tmp_path / "run"), load(GenerateSettings, None, ["--prompt", "Why?"]))))
        (tmp_path / "run" / "run.json").unlink()

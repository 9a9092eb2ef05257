"""Tools read prompts and sample responses as the run did that trained the model, unless flags say otherwise."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cavesson.algorithms.grpo import GRPORun
from cavesson.config import load
from cavesson.models.tiny import tiny_model, tiny_tokenizer
from cavesson.record.run_folder import rewrite_run
from cavesson.tools.as_trained import as_trained, trained_by
from cavesson.tools.chat import chat
from cavesson.tools.compare import compare
from cavesson.tools.evaluate import evaluate
from cavesson.tools.generate import generate
from cavesson.tools.settings import CompareSettings, EvaluateSettings, GenerateSettings, TalkSettings
from cavesson.train.run import Training

TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
RENDERED = "<s>Be short.<u>Why?<a>"
SETTINGS: dict[str, Any] = {
    "steps": 1,
    "batch_size": 2,
    "samples_per_prompt": 2,
    "model": {"device": "cpu"},
    "data": {"chat": True, "system": "Be short.", "max_prompt_tokens": 60},
    "sampling": {"max_new_tokens": 5, "temperature": 0.5, "stop": ["q"]},
    "cleaning": {"cut": ["next_line"]},
}


def lengths(prompts: list[str], responses: list[str], **_: Any) -> list[float]:
    return [float(len(response)) for response in responses]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a chat model, `run`, and the model that it started from, `base`."""
    folder = tmp_path_factory.mktemp("trained")
    base: Any = tiny_model()
    base.save_pretrained(folder / "base")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "base")
    settings = GRPORun.model_validate(
        SETTINGS | {"run": folder / "run", "model": {"device": "cpu", "path": str(folder / "base")}}
    )
    Training(settings, prompts=["Why?", "How?"], rewards=lengths).run(lambda step, metrics: None)
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": "Why?"}) + "\n")
    (folder / "text.jsonl").write_text(json.dumps({"prompt": "Why?", "response": "Yes"}) + "\n")
    return folder


def prompts_of(folder: Path, *more: str) -> list[str]:
    return ["--data.path", str(folder / "prompts.jsonl"), *more]


@pytest.mark.parametrize("place", ["run", "run/model"])
def test_settings_are_those_of_the_run(folder: Path, place: str) -> None:
    name = str(folder / place)
    found, line = as_trained(name, load(GenerateSettings, None, prompts_of(folder)), trained_by(name))
    assert (found.data.chat, found.data.system, found.data.max_prompt_tokens) == (True, "Be short.", 60)
    assert (found.sampling.max_new_tokens, found.sampling.temperature) == (5, 0.5)
    assert found.sampling.stop == ("q", "\n")
    assert line.startswith(f"{name}: prompts are conversations, as in {folder / 'run'}; ")
    for part in (
        'data.system "Be short."',
        "data.max_prompt_tokens 60",
        'sampling.stop ["q", "\\n"]',
        "flags override",
    ):
        assert part in line


def test_flags_override(folder: Path) -> None:
    flags = (
        "--data.system",
        "Sing.",
        "--sampling.max_new_tokens",
        "9",
        "--sampling.stop",
        "[]",
        "--data.chat",
        "false",
    )
    name = str(folder / "run")
    found, _ = as_trained(name, load(GenerateSettings, None, prompts_of(folder, *flags)), trained_by(name))
    assert (found.data.chat, found.data.system, found.data.max_prompt_tokens) == (False, "Sing.", 60)
    assert (found.sampling.max_new_tokens, found.sampling.temperature, found.sampling.stop) == (9, 0.5, ())
    greedy = load(GenerateSettings, None, prompts_of(folder, "--sampling.temperature", "0"))
    assert as_trained(name, greedy, trained_by(name))[0].sampling.temperature == 0


def test_every_tool_that_samples_renders_the_prompts_of_a_run(folder: Path) -> None:
    run, flags = str(folder / "run"), prompts_of(folder)
    generated = list(generate(run, load(GenerateSettings, None, flags)))
    assert generated[0]["prompt"] == RENDERED
    rewards = ("--rewards", "lowercase")
    evaluated = evaluate(run, load(EvaluateSettings, None, [*flags, *rewards]))
    assert [one["prompt"] for one in evaluated.responses] == [RENDERED]
    assert evaluated.responses[0]["response"] == generated[0]["response"]
    assert not {"q", "\n"} & set(evaluated.responses[0]["response"]) and evaluated.responses[0]["tokens"] <= 5
    raw = next(iter(generate(run, load(GenerateSettings, None, [*flags, "--raw"]))))
    assert raw["prompt"] == "Why?"


def test_the_data_of_a_run_are_not_read(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Whoever made a run may have named any place in it.
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}))
    run = tmp_path / "run"
    shutil.copytree(folder / "run" / "model", run / "model")
    config = {"config": {"data": {"path": str(data)}}}
    for said, prompt in ((None, "Why?"), (False, "Why?"), (True, "<u>Why?<a>")):
        rewrite_run(run, config if said is None else config | {"conversations": said})
        settings = load(GenerateSettings, None, prompts_of(folder))
        assert next(iter(generate(str(run), settings)))["prompt"] == prompt
        unsure = "set --data.chat if the data of the run were conversations, which it does not say"
        assert (unsure in capsys.readouterr().err) == (said is None)


@pytest.mark.parametrize("content", ["a", [{"role": "user", "content": "a"}]])
def test_a_run_records_whether_its_data_are_conversations(folder: Path, tmp_path: Path, content: Any) -> None:
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": content}) + "\n")
    data = {"path": str(tmp_path / "prompts.jsonl")}
    model = {"device": "cpu", "path": str(folder / "base")}
    settings = SETTINGS | {"run": tmp_path / "run", "model": model, "data": data}
    Training(GRPORun.model_validate(settings), rewards=lengths).run(lambda step, metrics: None)
    (tmp_path / "prompts.jsonl").unlink()
    trained = trained_by(str(tmp_path / "run"))
    assert trained is not None and trained.data()["chat"] == (content != "a")


def test_a_base_beside_a_run_is_read_as_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for models in (["base", "run"], ["run", "base"]):
        names = [str(folder / name) for name in models]
        compared = compare(names, load(CompareSettings, None, prompts_of(folder)))
        assert [column.responses[0]["prompt"] for column in compared.columns] == [RENDERED, RENDERED]
        said = [line for line in capsys.readouterr().err.splitlines() if "prompts are" in line]
        assert len(said) == 2
        assert [column.asked for column in compared.columns] == said
        assert sum(f"as in {folder / 'run'}, which it is compared with" in line for line in said) == 1


def test_a_base_alone_says_that_it_is_not_a_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = str(folder / "base")
    assert next(iter(generate(base, load(GenerateSettings, None, prompts_of(folder)))))["prompt"] == "Why?"
    assert f"{base} is not a run: prompts are plain text" in capsys.readouterr().err


def test_the_perplexity_is_that_of_answers_in_conversations(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(folder / "run")
    own = evaluate(run, load(EvaluateSettings, None, ["--text.path", str(folder / "text.jsonl")]))
    told = ["--text.chat", "--text.system", "Be short."]
    base = str(folder / "run" / "model")
    same = evaluate(base, load(EvaluateSettings, None, ["--text.path", str(folder / "text.jsonl"), *told]))
    plain = evaluate(
        run, load(EvaluateSettings, None, ["--text.path", str(folder / "text.jsonl"), "--text.chat", "false"])
    )
    assert own.text is not None and same.text is not None and plain.text is not None
    assert own.text.nll == same.text.nll != plain.text.nll
    # A text without a prompt is no answer of anybody.
    (folder / "alone.txt").write_text("Once upon a time\n")
    alone = evaluate(run, load(EvaluateSettings, None, ["--text.path", str(folder / "alone.txt")]))
    assert alone.text is not None and alone.text.tokens == len("Once upon a time") - 1


def test_a_conversation_has_the_system_message_of_the_run(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", iter(["Why?"]), raising=False)
    monkeypatch.setattr("cavesson.tools.chat._lines", lambda: iter(["Why?"]))
    monkeypatch.setattr("sys.stdin", type("Piped", (), {"isatty": lambda self: False})())
    chat(str(folder / "run"), load(TalkSettings, None, ["--sampling.max_new_tokens", "3"]))
    assert 'system "Be short."; sampling.stop ["q", "\\n"]; flags override' in capsys.readouterr().err

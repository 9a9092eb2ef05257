"""Scripts of benchmarks/ run once, at a tiny size and as their own processes, so that it is noticed when one breaks."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cavesson.models.load import load_tokenizer

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import models
from generate_record import Plan, generate

ROOT = Path(__file__).parents[2]
SMALL = "--batch 16 --tokens 12"
TINY = f"--rollouts 64 {SMALL}"
RUNS = {
    "adapters": "--size 'tiny adapters' --tokens 64 --rounds 1",
    "board": "RECORD --times 2",
    "board_browser": f"--run OUT/run {TINY} --long 900 --times 1",
    "board_pictures": "RECORD --out OUT",
    "doctor": f"--run OUT/run {TINY}",
    "episodes": "MODEL --rows 2 --turns 2 --tokens 4 --rounds 1",
    "faults.others.document": "",
    "generate_record": f"OUT/run {TINY}",
    "growth": "--only length --largest 1 --attempts 1",
    "importing": "--megabytes 1",
    "linear": "--only '16 × 576 → 192'",
    "loading": "--only sft --processes 2 --layers 1",
    "models": "OUT/models",
    "ours": "MODEL 2 1",
    "ours_now": "--mode sft MODEL 2 1",
    "places": "MODEL --responses 4 --at-once 2 --longest 4 --rounds 1",
    "plain": "MODEL 2 1",
    "plain_now": "--mode sft MODEL 2 1",
    "plan_published": "--only torchtune",
    "record": "RECORD",
    "recording": "--mode on MODEL 4 1",
    "scaling": "--model tiny --rows 4 --length 4 --rounds 1 --attempts 1",
    "stages": "--mode own MODEL 2 1",
    "trl_now": "--mode sft MODEL 2 1",
}
"""What each script is given. MODEL, RECORD and OUT are folders: of a model, of a record, and an empty one."""
ONE_FAULT = "likes-hash--1--rloo--small--0,likes-hash--0--grpo--small--3,usual---1--grpo--small--3"
PLANTED = {
    "faults.generate": f"OUT/runs --seeds 4 --processes 1 --only {ONE_FAULT}",
    "faults.evaluate": "OUT/runs --processes 1 --docs OUT/docs",
    "diagnosis": "--runs OUT/runs --out OUT/pages",
}
"""Each reads what the first has written."""
NOT_RUN = {
    "engines": "needs vLLM",
    "faults.ask_peers": "needs rldoctor and rlprobe",
    "faults.episodes.evaluate": "takes minutes; its parts are tested in tests/faults/test_faults_episodes.py",
    "faults.episodes.trained.evaluate": "needs the runs of the next; tests/faults/test_faults_episodes_trained.py",
    "faults.episodes.trained.generate": "takes an hour; its parts run in tests/faults/test_faults_episodes_trained.py",
    "faults.others.evaluate": "needs the runs of faults.others.generate; its parts are tested in tests/faults",
    "faults.others.generate": "needs poems, or SmolLM2 for minutes; its parts are tested in tests/faults",
    "faults.others.run": "faults.others.generate calls it; its parts are tested in tests/faults",
    "faults.repair": "trains every run twice more; its parts are tested in tests/repair",
    "faults.rft": "runs in tests/faults/test_faults_rft.py",
    "faults.small.evaluate": "needs the runs of the next; its parts are tested in tests/faults/test_faults_small.py",
    "faults.small.generate": "takes an hour; its parts run in tests/faults/test_faults_small.py",
    "gpu": "runs on a CPU in tests/gpu/test_benchmark.py",
    "memory": "needs a GPU; tests/plan/test_plan_memory.py compares what it prints",
    "run": "calls the others, and installs TRL",
    "search_engines": "needs tantivy",
    "trl_ppo": "needs TRL 1.10, which run.py installs",
}
"""Scripts that are not run here, and why."""
FAILED = re.compile(r"(?<![\w-])(nan|NaN|inf|Infinity|n/a|None|failed|Traceback)(?![\w-])")
"""What stands where a figure could not be measured. `nan-logprob` is the name of a fault."""


def scripts() -> set[str]:
    """The scripts that can be called, by their paths with dots."""
    files = (ROOT / "benchmarks").rglob("*.py")
    called = [file for file in files if re.search(r"^if __name__ == ", file.read_text("utf-8"), re.MULTILINE)]
    return {".".join(file.relative_to(ROOT / "benchmarks").with_suffix("").parts) for file in called}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A model with the real tokenizer and hardly any weights, beside its classifier; and a record of 20 steps."""
    folder = tmp_path_factory.mktemp("benchmarks")
    tokenizer = load_tokenizer(*models.SOURCE)
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=True, **sizes)
    models.save(folder / "model", LlamaForCausalLM(config), tokenizer)
    generate(folder / "record", Plan(rollouts=320, batch=16, tokens=12))
    return {"MODEL": str(folder / "model"), "RECORD": str(folder / "record")}


def ran(script: str, arguments: str, out: Path, places: Mapping[str, str] = {}) -> str:
    """Run a script as it says itself, and return what it printed: figures, and none that failed."""
    words = [places.get(word, word) for word in shlex.split(arguments.replace("OUT", str(out)))]
    file = ROOT / "benchmarks" / Path(*script.split(".")).with_suffix(".py")
    is_module = f"python -m benchmarks.{script}" in file.read_text("utf-8")
    command = [sys.executable, *(["-m", f"benchmarks.{script}"] if is_module else [str(file)]), *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    said = done.stdout[-4000:] + done.stderr[-4000:]
    assert done.returncode == 0, said
    assert not FAILED.search(done.stdout), said
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("script", RUNS)
def test_it_runs(script: str, places: dict[str, str], tmp_path: Path) -> None:
    printed = ran(script, RUNS[script], tmp_path, places)
    assert printed.strip() or any(tmp_path.rglob("*")), "it says or writes something"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_planted_faults_are_trained_judged_and_drawn(tmp_path: Path) -> None:
    for script, arguments in PLANTED.items():
        ran(script, arguments, tmp_path)
    assert len(list(tmp_path.glob("runs/*/case.json"))) == 3
    assert not list(tmp_path.glob("runs/*/failed.txt"))
    assert "| held out | 1 |" in (tmp_path / "docs" / "doctor-benchmark.md").read_text("utf-8")
    assert (tmp_path / "docs" / "images" / "doctor" / "confusion.png").stat().st_size
    assert json.loads((tmp_path / "pages" / "pictures.json").read_text("utf-8"))["pattern-spreading"]


def test_every_script_is_run_or_says_why_not() -> None:
    run = [*RUNS, *PLANTED, *NOT_RUN]
    assert sorted(run) == sorted(scripts())

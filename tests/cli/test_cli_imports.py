"""What a command imports before it has work to do: help pages and mistakes do not wait for what only runs need."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from cavesson.cli import NEEDS_TRAIN
from cavesson.registry import ALGORITHMS

CODE = """
import json, sys
from cavesson import cli
commands, code, slow = json.loads(sys.argv[1])
for command in commands:
    sys.argv = ["cavesson", *command]
    try:
        cli.main()
    except SystemExit as end:
        assert (end.code or 0) == code, f"{command} ends with {end.code}"
    loaded = [name for name in sys.modules if any(f"{name}.".startswith(f"{one}.") for one in slow)]
    assert not loaded, f"{' '.join(command)} imports {loaded[:5]}"
"""
RUNS = ("transformers", "peft", "accelerate", "scipy", "pyarrow", "duckdb", "matplotlib", "httpx", "fsspec", "botocore",
    "tokenizers", "safetensors", "cavesson.doctor", "cavesson.record")  # fmt: skip
"""What only runs, and those who read them, need."""
TOOLS = ("generate", "merge", "score", "rescore", "compare", "evaluate", "data show", "data lengths", "data duplicates",
    "plan", "check", "doctor")  # fmt: skip


def do(folder: Path, commands: Sequence[Sequence[str]], code: int, slow: Sequence[str]) -> None:
    """Run commands one after the other in a process of their own; none of them may import what is slow."""
    asked = json.dumps([commands, code, slow])
    done = subprocess.run([sys.executable, "-c", CODE, asked], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_help_of_tools_needs_no_torch(tmp_path: Path) -> None:
    do(tmp_path, [[*tool.split(), "--help"] for tool in TOOLS], 0, [*RUNS, "torch"])


@pytest.mark.slow
def test_the_help_of_what_trains_needs_nothing_that_trains(tmp_path: Path) -> None:
    do(tmp_path, [[name, "--help"] for name in (*ALGORITHMS, "align", "demo")], 0, RUNS)


def test_a_mistake_is_told_before_anything_is_imported_for_a_run(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("nonsense = 1\n")
    (tmp_path / "stages.toml").write_text("[sft]\nnonsense = 1\n[compare]\nmodels = 3\n")
    mistakes = [["bad.toml"], ["missing.toml"], ["bad.toml", "--nonsense", "1"], ["bad.toml", "more"]]
    commands = [[name, *mistake] for name in (*ALGORITHMS, "align", "plan", "check") for mistake in mistakes]
    stages = [[name, "stages.toml"] for name in ("align", "plan", "check")]
    do(tmp_path, [*commands, *stages, ["demo", "--nonsense", "1"], ["demo", "--steps=x"]], 2, RUNS)


SOURCE = Path(__file__).parents[2] / "src" / "cavesson"
ALWAYS = {"cavesson", "duckdb", "filelock", "numpy", "orjson", "pyarrow", "pydantic", "pydantic_core", "rich", "scipy",
    "typer"}  # fmt: skip
"""What every installation has, as pyproject.toml says."""
OTHERS = {"fsspec", "mlflow", "pandas", "polars", "pynvml", "ray", "starlette", "tensorboard", "uvicorn", "wandb"}
"""What other extras install, or the user; who imports these says so."""


def imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            yield (node.module or "").partition(".")[0]
        elif isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)


def test_every_module_that_only_some_installations_have_is_known() -> None:
    found = {name for file in SOURCE.rglob("*.py") for name in imported(file)} - sys.stdlib_module_names
    assert found - ALWAYS - OTHERS == NEEDS_TRAIN


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("huggingface_hub", ["push-to-hub", "run", "me/mine"]),
        ("jinja2", ["compare", "tiny", "mine", "--prompts", "no.txt"]),
    ],
)
def test_a_missing_module_is_one_line_that_says_how_to_install_it(
    tmp_path: Path, module: str, command: list[str]
) -> None:
    (tmp_path / "run" / "model").mkdir(parents=True)
    config = {"model": {"path": "tiny"}}
    (tmp_path / "run" / "run.json").write_text(json.dumps({"algorithm": "sft", "config": config}))
    code = (
        f"import sys; sys.modules[{module!r}] = None; from cavesson.cli import main; sys.argv[1:] = {command}; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    line = f"cavesson: this needs {module}; install it with: pip install 'cavesson[train]'\n"
    assert (done.returncode, done.stderr) == (2, line)

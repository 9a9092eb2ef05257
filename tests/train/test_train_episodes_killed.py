"""Runs of episodes that are killed at random moments: in one process, in two, and with a vLLM server."""

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from several_helpers import command, together
from train_helpers import everything
from vllm_stand_in import serving

import cavesson as api

sys.path.append(str(Path(__file__).parents[1] / "cli"))
from cli_helpers import Done, cavesson, start

STEPS, ROWS, KILLS = 4, 4, 10
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}"
    "{% if m.role == 'assistant' %}<|endoftext|>{% else %};{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
ENVIRONMENT = """
class Partner:
    def reset(self, name):
        self.answered, self.name, self.turn_rewards = 0, name, [0.25]
        return f" I am {name}."

    def user_reply(self):
        self.answered += 1
        if self.answered > 2:
            return None
        self.turn_rewards = [*self.turn_rewards, None]
        return f"{self.name} {self.answered}"

    def get_reward(self):
        return None if self.name == "nobody" else float(self.answered)
"""
RECIPE = f"""
run = "run"
steps = {STEPS}
batch_size = {ROWS}
samples_per_prompt = 2
[model]
device = "cpu"
path = "MODEL"
[data]
path = "rows.jsonl"
chat = true
template = "template.jinja"
[sampling]
max_new_tokens = 8
eos_token_ids = {[0, *range(2, 60)]}
[environment]
use = "partner.py:Partner"
max_turns = 3
max_tokens = 50
[checkpoint]
every = 2
[doctor]
on_finding = "ignore"
"""


def prepare(folder: Path, model: str = "tiny", more: str = "") -> Path:
    folder.mkdir()
    names = ("Ann", "nobody", "Bob")
    rows = [json.dumps({"prompt": text, "name": name}) for text, name in zip(("Hi", "Ho", "He"), names, strict=True)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    (folder / "template.jinja").write_text(TEMPLATE)
    (folder / "partner.py").write_text(ENVIRONMENT)
    (folder / "recipe.toml").write_text(RECIPE.replace("MODEL", model) + more)
    return folder


def again(folder: Path) -> tuple[str, ...]:
    begun = (folder / "run" / "run.json").exists()
    return ("grpo", "--resume", "run") if begun else ("grpo", "recipe.toml")


def result(folder: Path) -> dict[str, Any]:
    turns = api.open(folder / "run").arrow("turns")
    return {**everything(folder / "run"), "turns": turns.drop_columns("attempt").to_pylist()}


def check_killed(folder: Path) -> None:
    """No episode of a step is lost or there twice, nor any of its turns."""
    if not (folder / "run" / "run.json").exists():
        return
    run = api.open(folder / "run")
    rows = run.rows(["step", "sample"]).to_pylist()
    assert [(row["step"], row["sample"]) for row in rows] == [
        (step, sample) for step in range(len(rows) // ROWS) for sample in range(ROWS)
    ]
    for step in range(len(rows) // ROWS):
        sampled = [one for one in run.tokens(step).to_pylist() if one["source"] == "sampled"]
        turns = run.turns(step).to_pylist()
        assert len({(turn["sample"], turn["turn"]) for turn in turns}) == len(turns)
        assert sum(turn["tokens"] for turn in turns if turn["role"] == "assistant") == len(sampled)


def killed_until_it_ends(
    folder: Path, whole: Path, seconds: float, run: Callable[[float | None], Done], kills: int = KILLS
) -> None:
    """Kill a run again and again, and compare what it becomes with the run that nobody killed."""
    moments, met = random.Random(1), 0
    for _ in range(kills):
        run(moments.uniform(0.1, seconds))
        check_killed(folder)
        met += (folder / "run" / "run.json").exists()
        if (folder / "run" / "model").exists():  # it is complete: another one begins
            assert result(folder) == result(whole)
            (folder / "run").rename(folder / f"done-{met}")
    assert met > kills // 3
    done = run(None)
    assert done.code == 0, done.err
    assert result(folder) == result(whole)


def alone(folder: Path) -> Callable[[float | None], Done]:
    def run(moment: float | None) -> Done:
        if moment is None:
            return cavesson(folder, *again(folder))
        process = start(folder, *again(folder))
        time.sleep(moment)
        process.kill()
        process.join(60)
        return Done(process.exitcode, "", "")

    return run


def timed(folder: Path) -> float:
    """The seconds of a run that nobody kills."""
    begun = time.monotonic()
    done = cavesson(folder, "grpo", "recipe.toml")
    assert done.code == 0, done.err
    return time.monotonic() - begun


@pytest.mark.slow
def test_one_process(tmp_path: Path) -> None:
    cavesson(prepare(tmp_path / "first"), "--help")  # the process that later ones are forked from imports everything
    seconds = timed(prepare(tmp_path / "whole"))
    turns = api.open(tmp_path / "whole" / "run").arrow("turns").to_pylist()
    assert {turn["role"] for turn in turns} == {"assistant", "user"} and any(turn["reward"] for turn in turns)
    killed_until_it_ends(prepare(tmp_path / "here"), tmp_path / "whole", seconds, alone(tmp_path / "here"))


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    def several(folder: Path) -> Callable[[float | None], Done]:
        return lambda moment: together(folder, 2, command, *again(folder), killed_after=moment)[0]

    whole, here = prepare(tmp_path / "whole"), prepare(tmp_path / "here")
    begun = time.monotonic()
    done = several(whole)(None)
    assert done.code == 0, done.err
    killed_until_it_ends(here, whole, time.monotonic() - begun, several(here))


@pytest.mark.slow
def test_a_vllm_server(untied_folder: Path, tmp_path: Path) -> None:
    with serving(untied_folder) as server:
        more = "[sampling.vllm]\nattempts = 1\n"
        for name in ("whole", "here"):
            folder = prepare(tmp_path / name, str(untied_folder), more)
            text = (folder / "recipe.toml").read_text()
            engine = f'[sampling]\nengine = "vllm"\nservers = ["{server.url}"]\n'
            (folder / "recipe.toml").write_text(text.replace("[sampling]\n", engine))
        seconds = timed(tmp_path / "whole")
        killed_until_it_ends(tmp_path / "here", tmp_path / "whole", seconds, alone(tmp_path / "here"))


@pytest.mark.slow
def test_two_processes_play_the_episodes_of_one(tmp_path: Path) -> None:
    one, two = prepare(tmp_path / "one"), prepare(tmp_path / "two")
    assert cavesson(one, "grpo", "recipe.toml").code == 0
    for done in together(two, 2, command, "grpo", "recipe.toml"):
        assert done.code == 0, done.err
    names = ["step", "sample", "turn", "role", "text", "first_token", "tokens", "reward"]
    runs = [api.open(folder / "run") for folder in (one, two)]
    turns = [run.arrow("turns").to_pandas()[names].sort_values(names[:3]).values.tolist() for run in runs]
    assert str(turns[0]) == str(turns[1])  # NaN is not equal to itself
    logprobs = [run.tokens(STEPS - 1).to_pandas().sort_values(["sample", "position"])["logprob"] for run in runs]
    assert logprobs[0].tolist() == pytest.approx(logprobs[1].tolist(), abs=1e-3, nan_ok=True)

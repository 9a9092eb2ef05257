"""An installed package adds an algorithm, an engine, an importer, an environment, a tool, a reward and a rule."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli_helpers import RECIPE, fresh, write_recipe

from cavesson import open as open_run
from cavesson.rollout.rewards.settings import OWN
from cavesson.rollout.rewards.table import FUNCTIONS, MODELS, SERVICES

ENTRIES = """\
[cavesson.algorithms]
theirs = addition.algorithm:TheirRun
ppo = addition.algorithm:TheirRun
[cavesson.engines]
uniform = addition.engine:ENGINE
[cavesson.environments]
counter = addition.parts:Counter
[cavesson.importers]
tsv-like = addition.importer:FORMAT
[cavesson.rewards]
sentiment = addition.parts:brevity
brevity = addition.parts:brevity
[cavesson.rules]
greets = addition.parts:greets
[cavesson.tools]
add = addition.parts:add
"""
FILES = {
    "__init__.py": "",
    "algorithm.py": """
from cavesson.algorithms.rloo import RLOO, RLOORun

class Theirs(RLOO):
    pass

class TheirRun(RLOORun):
    rloo: Theirs = Theirs()
""",
    "engine.py": """
from cavesson.registry import EngineEntry

CANNOT = {"sampling.servers": "with uniform"}
ENGINE = EngineEntry("cavesson.rollout.engines.building", "transformers_engine", CANNOT, local=True)
""",
    "importer.py": """
from cavesson.importers.rollout import Format, ImportedRollout

def rollouts(record, place):
    row = {"prompt": record["ask"], "response": record["say"], "reward": record["worth"]}
    yield ImportedRollout(record["at"], row, {}, 0)

FORMAT = Format("tsv-like", "theirs", (".jsonl",), (frozenset(("at", "ask", "say", "worth")),), rollouts)
""",
    "parts.py": """
from cavesson.doctor import Reading, rule

class Counter:
    def reset(self, **row):
        return "count"

    def get_reward(self):
        return 1.0

    def step(self, by: int) -> str:
        \"\"\"Count.

        Args:
            by: how far
        \"\"\"
        return str(by)

def add(a: int) -> int:
    \"\"\"Add one.

    Args:
        a: a number
    \"\"\"
    return a + 1

def brevity(prompts, responses, **columns):
    return [-float(len(one)) for one in responses]

@rule(number=0, needs=["rows.response"], title="T", cause="C", healthy="h", fix="f", source="s")
def greets(data):
    return Reading(1.0, unhealthy=True)
""",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an installed package."""
    folder = tmp_path_factory.mktemp("site")
    about = folder / "addition-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: addition\nVersion: 1\n")
    (about / "entry_points.txt").write_text(ENTRIES)
    (folder / "addition").mkdir()
    for name, text in FILES.items():
        (folder / "addition" / name).write_text(text)
    return folder


def called(site: Path, here: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "cavesson", *arguments]
    return subprocess.run(command, cwd=here, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)


def test_a_run_uses_what_the_package_adds_and_its_names_never_replace_ours(site: Path, tmp_path: Path) -> None:
    here = fresh(tmp_path / "here")
    recipe, changes = re.subn(r'use = "[^"]+"', 'use = "brevity"', RECIPE)
    assert changes == 1
    write_recipe(here, recipe)
    done = called(site, here, "theirs", "recipe.toml", "--steps", "1", "--sampling.engine", "uniform")
    assert done.returncode == 0, done.stderr
    assert "addition.algorithm:TheirRun of cavesson.algorithms is left out: 'ppo' is the name of" in done.stderr
    info = open_run(here / "run").info
    assert (info["algorithm"], info["config"]["sampling"]["engine"]) == ("theirs", "uniform")
    assert info["config"]["rewards"][0]["use"] == "addition.parts:brevity"
    found = json.loads(called(site, here, "doctor", "run", "--json").stdout)["findings"]
    assert "greets" in [one["rule"] for one in found]


def test_a_reward_of_ours_is_not_replaced(site: Path) -> None:
    code = "from cavesson.rollout.rewards.settings import RewardSettings as R; print(R(use='sentiment').use)"
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["sentiment"]


def test_the_names_of_rewards_are_those_of_the_tables() -> None:
    assert sorted(FUNCTIONS | MODELS | SERVICES) == sorted(OWN)


def test_environments_and_tools_are_named_as_the_package_names_them(site: Path, tmp_path: Path) -> None:
    code = (
        "from cavesson.rollout.settings import EnvironmentSettings as E; one = E(use='counter', tools=['add']);"
        "print(one.use, *one.tools); E(use='none')"
    )
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.stdout.split() == ["addition.parts:Counter", "addition.parts:add"]
    assert "a name of an installed package" in done.stderr


def test_an_import_recognises_the_format_of_the_package(site: Path, tmp_path: Path) -> None:
    record = {"at": 3, "ask": "2+2", "say": "4", "worth": 1.0}
    (tmp_path / "theirs.jsonl").write_text(json.dumps(record) + "\n")
    done = called(site, tmp_path, "import", "theirs.jsonl", "run")
    assert done.returncode == 0, done.stderr
    run = open_run(tmp_path / "run")
    assert run.info["format"] == "tsv-like"
    assert run.rows(["step", "response"]).to_pylist() == [{"step": 3, "response": "4"}]

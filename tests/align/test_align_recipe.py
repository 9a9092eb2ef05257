"""What a recipe says: stages, references, common settings, and mistakes in one line."""

from pathlib import Path
from typing import Any

import pytest
from align_helpers import RECIPE, write

from cavesson.align.recipe import read_recipe
from cavesson.align.stages import ComparisonSettings, Stage, with_full_paths
from cavesson.config import check
from cavesson.errors import UserError
from cavesson.registry import ALGORITHMS


def read(folder: Path, recipe: str, *flags: str) -> list[Stage]:
    return read_recipe(write(folder, recipe), flags)


def mistake(folder: Path, recipe: str, *flags: str) -> str:
    with pytest.raises(UserError) as caught:
        read(folder, recipe, *flags)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_stage_has_the_settings_of_its_command(tmp_path: Path) -> None:
    common: dict[str, Any] = {
        "seed": 3, "batch_size": 4, "model": {"device": "cpu"}, "optimizer": {"learning_rate": 1e-3},
        "checkpoint": {"every": 1},
    }  # fmt: skip
    sft = {**common, "run": "runs/road/sft", "steps": 3, "data": {"path": f"{tmp_path}/demonstrations.jsonl"}}
    ppo = {
        **common, "run": "runs/road/ppo", "steps": 4, "model": {"device": "cpu", "path": "runs/road/sft/model"},
        "data": {"path": f"{tmp_path}/prompts.txt"}, "sampling": {"max_new_tokens": 5, "temperature": 0.7},
        "rewards": [{"use": f"{tmp_path}/reward.py:vowels"}], "doctor": {"on_finding": "ignore"},
    }  # fmt: skip
    compare = {
        "seed": 3, "batch_size": 4, "models": ["tiny", "runs/road/sft/model", "runs/road/ppo/model"],
        "prompts": f"{tmp_path}/prompts.txt", "sampling": {"max_new_tokens": 5}, "rewards": [{"use": "lowercase"}],
        "out": "runs/road/compare",
    }  # fmt: skip
    expected = [
        check(ALGORITHMS["sft"].settings, sft, ""),
        check(ALGORITHMS["ppo"].settings, ppo, ""),
        check(ComparisonSettings, compare, ""),
    ]
    stages = read(tmp_path, RECIPE)
    assert [stage.settings for stage in stages] == expected
    assert [(stage.name, stage.command, stage.needs) for stage in stages] == [
        ("sft", "sft", ()), ("ppo", "ppo", ("sft",)), ("compare", "compare", ("sft", "ppo"))
    ]  # fmt: skip
    assert [stage.folder for stage in stages] == [Path("runs/road") / name for name in ("sft", "ppo", "compare")]


def test_what_a_recipe_does_not_set_is_still_not_set_when_its_stages_run(tmp_path: Path) -> None:
    """A comparison takes it over from the run: whether prompts are conversations, the temperature."""
    for stage in read(tmp_path, RECIPE):
        again = with_full_paths(stage.settings)
        assert again.model_dump(exclude_unset=True) == stage.settings.model_dump(exclude_unset=True)


def test_a_stage_may_be_called_anything_and_come_twice(tmp_path: Path) -> None:
    recipe = """
        [reward_model]
        [gentle]
        command = "reward-model"
        model.path = "{reward_model}"
    """
    first, second = read(tmp_path, recipe)
    assert (first.command, second.command, second.needs) == ("reward-model", "reward-model", ("reward_model",))
    assert second.settings.model.path == "runs/align/reward_model/model"


def test_own_settings_win_over_common_ones_group_by_group(tmp_path: Path) -> None:
    recipe = """
        common.optimizer = { learning_rate = 1.0, eps = 0.5 }
        common.kl.coef = 0.25
        common.model.lora.rank = 8
        [sft]
        optimizer.learning_rate = 0.125
        [grpo]
        kl.coef = 0.5
        [ppo]
    """
    sft, grpo, ppo = (stage.settings for stage in read(tmp_path, recipe))
    assert [s.optimizer.learning_rate for s in (sft, grpo, ppo)] == [0.125, 1.0, 1.0]
    assert [s.optimizer.eps for s in (sft, grpo, ppo)] == [0.5] * 3
    assert (grpo.kl.coef, ppo.kl.coef) == (0.5, 0.25)
    assert [s.model.lora.rank for s in (sft, grpo, ppo)] == [8] * 3


def test_flags_reach_every_stage_and_the_common_settings(tmp_path: Path) -> None:
    flags = ("--ppo.kl.coef", "0.5", "--common.seed=9", "--run", "elsewhere", "--sft.model.path", "x")
    sft, ppo, compare = read(tmp_path, RECIPE, *flags)
    assert (sft.settings.seed, ppo.settings.seed, compare.settings.seed) == (9, 9, 9)
    assert (sft.settings.model.path, ppo.settings.model.path) == ("x", "elsewhere/sft/model")
    assert ppo.settings.kl.coef == 0.5


def test_rows_that_are_held_out_of_training_are_no_concern_of_a_comparison(tmp_path: Path) -> None:
    held_out = "data.validation = 0.25\n"
    sft, ppo, compare = read(tmp_path, RECIPE.replace("[common]\n", f"[common]\n{held_out}"))
    assert (sft.settings.data.validation, ppo.settings.data.validation) == (0.25, 0.25)
    assert compare.settings.data.validation == 0
    said = mistake(tmp_path, RECIPE.replace("[compare]\n", f"[compare]\n{held_out}"))
    assert "data.validation holds rows out of training, and nothing is trained here" in said


def test_only_a_whole_value_is_a_reference(tmp_path: Path) -> None:
    recipe = '[sft]\n[ppo]\nmodel.path = "a{sft}"\nsampling.stop = ["{", "{}", "x {sft}"]'
    ppo = read(tmp_path, recipe)[1]
    assert (ppo.settings.model.path, ppo.settings.sampling.stop, ppo.needs) == ("a{sft}", ("{", "{}", "x {sft}"), ())


def test_references_are_found_in_lists_of_tables(tmp_path: Path) -> None:
    recipe = '[reward_model]\n[[ppo.rewards]]\nuse = "classifier"\noptions.path = "{reward_model}"'
    ppo = read(tmp_path, recipe)[1]
    assert ppo.settings.rewards[0].options == {"path": "runs/align/reward_model/model"}
    assert ppo.needs == ("reward_model",)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("", ["no stage", "sft", "compare"]),
        ("steps = 3\n[sft]", ["'steps'", "[common]"]),
        ("[sfft]", ["[sfft]", "no command 'sfft'", "sft, reward-model"]),
        ('[a]\ncommand = "teach"', ["[a]", "no command 'teach'"]),
        ("[reward-model]", ["[reward-model]", "reward_model"]),
        ('[sft]\nrun = "x"', ["[sft]", "run is always runs/align/sft"]),
        ('[compare]\nout = "x"', ["[compare]", "out is always runs/align/compare"]),
        ('common.run = "x"\n[sft]', ["[common]", "run is always runs/align/STAGE", "set run above all tables"]),
        ('common.out = "x"\n[compare]', ["[common]", "out is always runs/align/STAGE"]),
        ("[sft]\n[ppo]\nkl.coeff = 1", ["[ppo]", "unknown setting 'kl.coeff'", "did you mean 'kl.coef'"]),
        ("[sft]\n[ppo]\nkl.coef = -1", ["[ppo]", "kl.coef", "greater than or equal to 0"]),
        ('[ppo]\nmodel.path = "{sft}"\n[sft]', ["[ppo] model path", "{sft}", "it is the first"]),
        ('[sft]\nmodel.path = "{sft}"', ["[sft] model path", "{sft}"]),
        ('[sft]\n[ppo]\nmodel.path = "{stf}"', ["{stf}", "before it: sft"]),
        (
            '[compare]\nmodels = ["tiny"]\nprompts = "x"\n[sft]\nmodel.path = "{compare}"',
            ["{compare}", "trains a model"],
        ),
        ('[compare]\nprompts = "x"', ["[compare]", "'models' is missing", "the models"]),
        ("common.kl.coef = 1\n[sft]", ["[common]", "no stage has a setting 'kl.coef'"]),
        ("common.ppo.clipp = 1\n[sft]\n[ppo]", ["[common]", "'ppo.clipp'"]),
        ("common = 3\n[sft]", ["common", "dictionary"]),
    ],
)
def test_mistakes_are_one_line_that_names_the_place(tmp_path: Path, recipe: str, words: list[str]) -> None:
    message = mistake(tmp_path, recipe)
    assert message.startswith(f"{tmp_path}/recipe.toml: ")
    assert [word for word in words if word not in message] == []


def test_a_flag_that_misses_every_stage_is_a_mistake(tmp_path: Path) -> None:
    assert "no command 'ppoo'" in mistake(tmp_path, RECIPE, "--ppoo.kl.coef", "1")


def test_each_stage_has_its_own_record(tmp_path: Path) -> None:
    common = """
        [common]
        record = "s3://bucket/road"
        [reward_model]
        [sft]
        record = "s3://other/sft"
    """
    assert [stage.settings.record for stage in read(tmp_path, common)] == [
        "s3://bucket/road/reward_model",
        "s3://other/sft",
    ]


@pytest.mark.parametrize(
    ("record", "expected"), [("s3://bucket/road/", "s3://bucket/road/sft"), ("none", None), ("s3://b", "s3://b/sft")]
)
def test_the_record_of_a_stage_is_below_the_common_one(tmp_path: Path, record: str, expected: str | None) -> None:
    (sft,) = read(tmp_path, '[common]\nrecord = "s3://bucket/other"\n[sft]', "--common.record", record)
    assert sft.settings.record == expected

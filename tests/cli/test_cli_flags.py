"""Positional arguments before, between and after flags."""

from typing import Any

import pytest

from cavesson.algorithms.ppo import PPORun
from cavesson.cli.flags import words_and_flags
from cavesson.config import check
from cavesson.errors import UserError
from cavesson.registry import any_recipe
from cavesson.tools.settings import GenerateSettings


@pytest.mark.parametrize(
    ("arguments", "words", "flags"),
    [
        ("a.toml --steps 3", ["a.toml"], ["--steps=3"]),
        ("--steps 3 a.toml", ["a.toml"], ["--steps=3"]),
        ("--data.stream a.toml", ["a.toml"], ["--data.stream=true"]),
        ("--data.stream false a.toml", ["a.toml"], ["--data.stream=false"]),
        ("--data.stream=false a.toml", ["a.toml"], ["--data.stream=false"]),
        ("--data.stream --steps 3 a.toml", ["a.toml"], ["--data.stream=true", "--steps=3"]),
        ("a.toml --ppo.whiten-rewards", ["a.toml"], ["--ppo.whiten_rewards=true"]),
        ("a.toml --model.path=--", ["a.toml"], ["--model.path=--"]),
        ("--kl.coef -1 --update.seed=a=b a.toml", None, "unknown setting 'update.seed'; did you mean 'seed'"),
        ("--strem a.toml", None, "unknown setting 'strem'; did you mean"),
        ("a.toml b", None, r"^unexpected argument 'b'; the command takes \[RECIPE.toml\], then flags$"),
        ("a.toml --data.stream b", None, "^unexpected argument 'b'"),
        ("a.toml --kl.coef", None, "^--kl.coef needs a value$"),
    ],
)
def test_arguments_of_a_training(arguments: str, words: list[str] | None, flags: list[str] | str) -> None:
    if isinstance(flags, str):
        with pytest.raises(UserError, match=flags):
            words_and_flags(PPORun, arguments.split(), "[RECIPE.toml]")
    else:
        assert words_and_flags(PPORun, arguments.split(), "[RECIPE.toml]") == (words, flags)


@pytest.mark.parametrize(
    ("flag", "is_switch"),
    [
        ("data.stream", True),  # a recipe of one command
        ("sft.data.stream", True),  # a stage
        ("common.data.stream", True),
        ("reward_model.model.lora.dora", True),
        ("dpo.reference_free", True),
        ("dpo.dpo.reference_free", True),
        ("steps", False),
        ("sft.steps", False),
        ("row", False),
        ("nonsense.here", False),  # the command itself reports it
    ],
)
def test_a_switch_of_any_recipe_takes_no_value(flag: str, is_switch: bool) -> None:
    words, flags = words_and_flags(any_recipe(), [f"--{flag}", "recipe.toml"], "[RECIPE.toml]")
    expected = (["recipe.toml"], [f"--{flag}=true"]) if is_switch else ([], [f"--{flag}=recipe.toml"])
    assert (words, flags) == expected


def test_a_missing_argument_is_named() -> None:
    with pytest.raises(UserError, match=r"^missing argument MODEL; the command takes MODEL, then flags$"):
        words_and_flags(GenerateSettings, ["--raw"], "MODEL")
    with pytest.raises(UserError, match=r"^missing argument OUT; the command takes ADAPTER OUT, then flags$"):
        words_and_flags(GenerateSettings, ["a"], "ADAPTER", "OUT")
    assert words_and_flags(GenerateSettings, ["a", "--raw", "b", "c"], "MODEL", "MODEL…")[0] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"reference": {"kind": "none"}, "kl": {"coef": 0.0}},
            "recipe: the settings: PPO needs a reference to measure the KL",
        ),
        ({"steps": 0}, "recipe: steps: input should be greater than or equal to 1, and not 0"),
    ],
)
def test_a_message_begins_with_a_small_letter_unless_that_is_an_abbreviation(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        check(PPORun, values, "recipe")
    assert str(caught.value).startswith(message)

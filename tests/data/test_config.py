from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, ValidationError, model_validator

from cavesson.algorithms.ppo import PPORun
from cavesson.config import Settings, SettingsError, check, describe, load
from cavesson.errors import UserError


class Inner(Settings):
    rate: float = Field(0.5, gt=0, le=1)
    """how fast"""
    names: tuple[str, ...] = ()
    """which ones"""


class Group(Settings):
    inner: Inner = Inner()
    """what is inside"""
    coef: float = Field(0.1, ge=0)
    """a factor"""


class Item(Settings):
    weight: float = Field(1.0, ge=0)
    """how heavy"""


class Outer(Settings):
    steps: int = Field(10, ge=1)
    """how many"""
    path: Path | None = None
    """where"""
    switch: bool = False
    """whether"""
    text: str = "plain"
    """what"""
    group: Group = Group()
    """several things"""
    optional: Inner | None = None
    """off unless given"""
    items: tuple[Item, ...] = ()
    """a list of groups"""

    @model_validator(mode="after")
    def _check(self) -> "Outer":
        if self.steps == 13:
            raise ValueError("13 brings bad luck")
        return self


def flags(*values: str) -> Outer:
    return load(Outer, None, values)


def message(*values: str) -> str:
    with pytest.raises(UserError) as error:
        flags(*values)
    return str(error.value)


def test_without_anything_the_defaults_hold():
    assert flags() == Outer()


@pytest.mark.parametrize("given_flags", [("--group.coef", "2.5"), ("--group.coef=2.5",)])
def test_both_ways_to_write_a_flag(given_flags):
    assert flags(*given_flags).group.coef == 2.5


@pytest.mark.parametrize(
    ("given_flags", "name", "value"),
    [
        (["--steps", "1_000"], "steps", 1000),
        (["--switch", "true"], "switch", True),
        (["--switch", "--steps", "3"], "switch", True),
        (["--steps", "3", "--switch"], "switch", True),
        (["--switch", "--switch", "false"], "switch", False),
        (["--switch=false"], "switch", False),
        (["--text", "two words"], "text", "two words"),
        (["--text", "###Human"], "text", "###Human"),
        (["--text", '"quoted"'], "text", "quoted"),
        (["--text=a=b"], "text", "a=b"),
        (["--text="], "text", ""),
        (["--path", "runs/mine-2"], "path", Path("runs/mine-2")),
        (["--path", "none"], "path", None),
        (["--optional.rate", "1"], "optional", Inner(rate=1)),
        (["--optional", "{}"], "optional", Inner()),
        (["--group.inner.names", '["a", "b"]'], "group", Group(inner=Inner(names=("a", "b")))),
        (["--items", "[{weight = 2}, {weight = 3}]"], "items", (Item(weight=2), Item(weight=3))),
        (["--steps", "3", "--steps", "4"], "steps", 4),
    ],
)
def test_values_of_flags(given_flags, name, value):
    assert getattr(flags(*given_flags), name) == value


def test_none_is_a_word_where_it_is_one_of_the_choices():
    class Choice(Settings):
        how: Literal["some", "none"] = "some"
        other: float | None = 1.0

    assert load(Choice, None, ["--how", "none", "--other", "none"]) == Choice(how="none", other=None)


def test_a_dash_in_a_name_is_an_underscore():
    class Dashed(Settings):
        batch_size: int = 1

    assert load(Dashed, None, ["--batch-size", "3"]).batch_size == 3


def test_a_negative_number_is_a_value_and_no_flag():
    class Signed(Settings):
        weight: float = 1.0

    assert load(Signed, None, ["--weight", "-2.5"]).weight == -2.5
    assert "group.coef: input should be greater than or equal to 0, and not -1" in message("--group.coef", "-1")


def test_flags_override_the_recipe_and_leave_the_rest(tmp_path):
    recipe = tmp_path / "r.toml"
    recipe.write_text("steps = 3\n[group]\ncoef = 0.7\n[group.inner]\nrate = 0.25\n[[items]]\nweight = 9\n")
    settings = load(Outer, recipe, ["--group.coef", "0.9"])
    assert settings == Outer(steps=3, group=Group(coef=0.9, inner=Inner(rate=0.25)), items=(Item(weight=9),))


@pytest.mark.parametrize(
    ("given_flags", "nearest"),
    [
        (["--stepz", "3"], "steps"),
        (["--group.coeff", "3"], "group.coef"),
        (["--group.inner.rat", "1"], "group.inner.rate"),
        (["--optional.rte", "1"], "optional.rate"),
        (["--items", "[{weigth = 1}]"], "items.weight"),
        (["--coef", "3"], "group.coef"),  # a forgotten group
        (["--group.rate", "1"], "group.inner.rate"),
        (["--group.steps", "1"], "steps"),  # a group too many
    ],
)
def test_an_unknown_setting_names_the_nearest(given_flags, nearest):
    unknown = given_flags[0].removeprefix("--").replace("items", "items.0.weigth")
    assert message(*given_flags) == f"the flags: unknown setting {unknown!r}; did you mean {nearest!r}?"


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("coef", "kl.coef"),
        ("stop", "sampling.stop"),
        ("learning_rate", "optimizer.learning_rate"),
        ("rank", "model.lora.rank"),
        ("kl.ceof", "kl.coef"),
        ("ppo.gama", "ppo.gamma"),
        ("sampling.max_tokens", "sampling.max_new_tokens"),
        ("model.lora.ranks", "model.lora.rank"),
    ],
)
def test_the_nearest_setting_of_a_real_run(wrong, right):
    with pytest.raises(UserError, match=f"did you mean '{right}'"):
        load(PPORun, None, [f"--{wrong}", "1"])
    with pytest.raises(UserError, match=f"did you mean '{right}'"):
        load(PPORun, None, [f"--{wrong}"])


def test_without_anything_near_the_way_to_the_list_is_told():
    assert message("--zzzzzz", "3").endswith("unknown setting 'zzzzzz'; --help lists them all")


@pytest.mark.parametrize(
    ("given_flags", "start"),
    [
        (["--steps", "0"], "the flags: steps: input should be greater than or equal to 1, and not 0"),
        (["--group.inner.rate", "1.5"], "the flags: group.inner.rate: input should be less than or equal to 1"),
        (["--steps", "many"], "the flags: steps: input should be a valid integer"),
        (["--steps", "2.5"], "the flags: steps: input should be a valid integer"),
        (["--text", "[1]"], "the flags: text: input should be a valid string, and not [1]"),
        (["--group", "3"], "the flags: group: "),
        (["--items", "[{weight = -1}]"], "the flags: items.0.weight: input should be greater than or equal to 0"),
        (["--steps", "13"], "the flags: the settings: 13 brings bad luck"),
        (["--group.coef", "nan"], "the flags: group.coef: input should be"),
        (["--group.coef", "inf"], "the flags: group.coef: input should be a finite number"),
    ],
)
def test_what_is_out_of_range_or_of_another_kind(given_flags, start):
    assert message(*given_flags).startswith(start)


@pytest.mark.parametrize(
    ("given_flags", "part"),
    [
        (["--steps"], "--steps needs a value"),
        (["--group.coef=1", "--steps"], "--steps needs a value"),
        (["steps", "3"], "unexpected argument 'steps'; settings are given as --name.field value"),
        (["--", "3"], "unexpected argument '--'"),
        (["-s", "3"], "unexpected argument '-s'"),
        (["--switch", "perhaps"], "unexpected argument 'perhaps'"),
        (["--switch=perhaps"], "switch: input should be a valid boolean"),
        (["--text.more", "3"], "the flags: unknown setting 'text.more'; did you mean 'text'?"),
        (["--stepz"], "the flags: unknown setting 'stepz'; did you mean 'steps'?"),
        (["--stepz", "steps.toml"], "the flags: unknown setting 'stepz'; did you mean 'steps'?"),
        (["--items.weight", "3"], "'items' is a list of tables"),
        (["--optional", "none", "--optional.rate", "1"], "'optional' is not a group of settings"),
        (["--items", "[]", "--items.weight", "3"], "'items' is not a group of settings"),
    ],
)
def test_flags_that_are_none(given_flags, part):
    assert part in message(*given_flags)


def test_a_missing_setting_is_named_with_its_help():
    class Needy(Settings):
        model: str
        """the model to train"""

    with pytest.raises(UserError, match="the flags: 'model' is missing; the model to train"):
        load(Needy, None, [])


def test_more_mistakes_are_two_lines():
    assert len(message("--steps", "0", "--group.coef=-1", "--switch=perhaps").splitlines()) == 2


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (None, "there is no such recipe"),
        (b"steps = ", "is not valid TOML"),
        (b"steps = 3\nsteps = 4", "is not valid TOML"),
        (b"text = '\xff'", "is not UTF-8 (byte 9): save it as UTF-8"),
        (b"stepz = 3", "unknown setting 'stepz'; did you mean 'steps'?"),
        (b"[group]\ncoef = -1", "group.coef: input should be greater than or equal to 0, and not -1"),
    ],
)
def test_mistakes_in_a_recipe_name_the_recipe(tmp_path, content, part):
    recipe = tmp_path / "r.toml"
    if content is not None:
        recipe.write_bytes(content)
    with pytest.raises(UserError) as error:
        load(Outer, recipe, [])
    assert str(error.value).startswith(str(recipe))
    assert part in str(error.value)


def test_a_folder_is_no_recipe(tmp_path):
    with pytest.raises(UserError, match="is a folder"):
        load(Outer, tmp_path, [])


def test_settings_are_frozen():
    with pytest.raises(ValidationError):
        Outer().steps = 5
    with pytest.raises(ValidationError):
        Outer().group.coef = 5


def test_defaults_are_checked_like_everything_else():
    class Rounded(Settings):
        horizon: float = 10_000

    assert type(Rounded().horizon) is float

    class Impossible(Settings):
        steps: int = Field(0, ge=1)

    with pytest.raises(
        SettingsError, match=r"^Impossible: steps: input should be greater than or equal to 1, and not 0"
    ):
        Impossible()


@pytest.mark.parametrize("kind", [Outer, PPORun])
def test_written_out_defaults_load_back_equal(kind):
    defaults = kind()
    written = defaults.model_dump(mode="json")
    assert check(kind, written, "run.json") == defaults
    assert kind.model_validate_json(defaults.model_dump_json()) == defaults
    # Everything is written out, not only what differs from the defaults.
    assert set(written) == set(kind.model_fields)


def test_changed_settings_load_back_equal():
    changed = flags(
        "--items", "[{weight = 2}]", "--optional.names", '["a"]', "--path", "x", "--group.inner.rate", "0.3"
    )
    assert check(Outer, changed.model_dump(mode="json"), "run.json") == changed


def test_help_names_every_setting_with_default_and_text():
    rows = {name: (default, text) for name, _, default, text in describe(Outer)}
    assert rows["steps"] == ("10", "how many")
    assert rows["path"] == ("none", "where")
    assert rows["group.inner.rate"] == ("0.5", "how fast")
    assert rows["group.inner.names"] == ("[]", "which ones")
    assert rows["optional"] == ("none", "off unless given")
    assert {"optional.rate", "items", "items.weight"} <= set(rows)
    assert "group" not in rows


def test_every_setting_of_a_run_has_a_help_text():
    assert [name for name, _, _, text in describe(PPORun) if not text] == []


finite = st.floats(min_value=0, allow_infinity=False)


@given(st.integers(min_value=14), finite, st.booleans(), st.lists(st.text(st.characters(codec="utf-8"))))
def test_values_survive_the_way_through_a_flag(steps, coef, switch, names):
    toml_names = "[" + ", ".join('"' + "".join(f"\\U{ord(c):08X}" for c in name) + '"' for name in names) + "]"
    given_flags = {"steps": steps, "group.coef": repr(coef), "switch": str(switch).lower()}
    settings = flags(*(f"--{k}={v}" for k, v in given_flags.items()), "--group.inner.names", toml_names)
    assert settings.steps == steps
    assert settings.group.coef == coef
    assert settings.switch is switch
    assert settings.group.inner.names == tuple(names)

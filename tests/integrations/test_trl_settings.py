"""The page on settings of TRL without a counterpart lists them all, and no others."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
from trl_classes import config_class

from cavesson.integrations.trl_recipe.common import NoCounterpart
from cavesson.integrations.trl_recipe.given import TRAINERS
from cavesson.integrations.trl_recipe.mapping import RULES

pytest.importorskip("trl", reason="TRL is not installed")
PAGE = (Path(__file__).parents[2] / "docs" / "trl-settings.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \|$", PAGE, flags=re.MULTILINE)


def listed(trainer: str) -> dict[str, str]:
    return {name: reason for name, of, reason in ROWS if of == "all" or TRAINERS[trainer].name in of.split(", ")}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_setting_is_converted_or_listed(trainer: str) -> None:
    from transformers import TrainingArguments

    general = {field.name for field in fields(TrainingArguments)}
    own = {field.name for field in fields(config_class(trainer))}
    left = own - general - set(RULES[trainer])
    found = listed(trainer)
    assert left <= set(found)
    assert set(found) <= own
    for name in set(found) - left:  # it has one form only, and its rule says why
        rule = RULES[trainer][name]
        assert callable(rule)
        with pytest.raises(NoCounterpart) as reason:
            rule("another", {})
        assert str(reason.value) == found[name]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_setting_with_one_form_is_listed(trainer: str) -> None:
    own = {field.name for field in fields(config_class(trainer))}
    forms = {name for name, rule in RULES[trainer].items() if getattr(rule, "__qualname__", "").startswith("unless.")}
    assert own & forms <= set(listed(trainer))

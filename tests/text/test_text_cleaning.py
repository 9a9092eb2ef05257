"""Cutters and discard rules."""

from pathlib import Path

import pytest

from cavesson.config import SettingsError, check
from cavesson.errors import UserError
from cavesson.models.tiny import tiny_tokenizer
from cavesson.rollout.engines.responses import StopTexts
from cavesson.rollout.rewards.cleaning import CUTS, TOO_SHORT, CleaningSettings, discard, is_discarded


@pytest.mark.parametrize(
    ("rule", "text", "discarded"),
    [
        ("#", "Sure # thing", True),
        ("#", "Sure thing", False),
        ("#", "Sure thing.\n\n##", True),  # a turn's mark, cut in half by the length limit
        (r"[:;]\)", "You are welcome :)", True),
        (r"[:;]\)", "You are welcome ;)", True),
        (r"[:;]\)", "(note: see below; ) :-", False),
        (r"(?i)\bgreat\b", "How GREAT!", True),
        (r"(?i)\bgreat\b", "greatly", False),
        (r"^\s*$", " \n", True),
        (r"^\s*$", "No", False),
        ("too_short", "", True),
        ("too_short", " \n a ", True),
        ("too_short", "No", False),
        ("too_short", "好的", False),
    ],
)
def test_rules(rule, text, discarded):
    rewards, parts = discard(CleaningSettings(discard=rule, discard_reward=-9), [text], [2.5])
    assert rewards == ([-9.0] if discarded else [2.5])
    assert parts == {f"discard/{rule}": [float(discarded)]}


def test_several_rules_each_leave_their_own_trace():
    settings = CleaningSettings(discard=("#", "too_short"), discard_reward=-1.5)
    given = [3.0, 4.0, 5.0]
    rewards, parts = discard(settings, ["fine", "#", "a # b"], given)
    assert rewards == [3.0, -1.5, -1.5]
    assert parts == {"discard/#": [0, 1, 1], "discard/too_short": [0, 1, 0]}
    assert given == [3.0, 4.0, 5.0]


def test_a_discard_reward_of_zero_is_one():
    assert discard(CleaningSettings(discard="#", discard_reward=0), ["#"], [7.0])[0] == [0.0]


def test_without_rules_nothing_changes():
    assert discard(CleaningSettings(), ["#", ""], [1.0, 2.0]) == ([1.0, 2.0], {})


def test_the_parts_tell_what_was_discarded():
    assert is_discarded({"score": 0.5, "discard/#": 0.0, "discard/too_short": 1.0})
    assert not is_discarded({"score": 0.5, "discard/#": 0.0})
    assert not is_discarded({"score": 0.5})


def test_cuts_name_stop_texts():
    assert CleaningSettings().stop == ()
    assert CleaningSettings(cut=("next_turn", "next_line")).stop == (*CUTS["next_turn"], "\n")


@pytest.mark.parametrize(
    ("name", "text", "kept"),
    [
        ("next_turn", "Yes.###Human: and?", "Yes."),
        ("next_turn", "Yes.\n\nHuman: and?\n\nAssistant: no", "Yes."),
        ("next_turn", "Yes.\n\nAssistant: no", "Yes."),
        ("next_line", "Yes.\nNo.", "Yes."),
        ("next_paragraph", "Yes.\nNo.\n\nWell.", "Yes.\nNo."),
    ],
)
def test_the_sampler_ends_a_response_where_the_cut_says(name, text, kept):
    tokenizer = tiny_tokenizer()
    stop, ids = StopTexts(tokenizer, CleaningSettings(cut=name).stop), tokenizer(text)["input_ids"]
    cuts = (stop.cut(ids[:end]) for end in range(1, len(ids) + 1))
    cut = next(cut for cut in cuts if cut is not None)
    assert tokenizer.decode(ids[:cut]) == kept


def test_an_unknown_name_is_refused_with_those_there_are():
    with pytest.raises(UserError, match=r"cut: there is no 'next_trun'; use next_turn, next_line, next_paragraph"):
        check(CleaningSettings, {"cut": ["next_trun"]}, "recipe.toml")


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("stray_hash", "there is no 'stray_hash'; use too_short or a regular expression"),
        ("to_short", "there is no 'to_short'; use too_short or a regular expression"),
        (":)", "':\\)' is not a regular expression: unbalanced parenthesis"),
        ("", "an empty text matches every response"),
    ],
)
def test_a_rule_that_is_no_regular_expression_is_refused(rule, said):
    with pytest.raises(UserError, match=f"discard: {said}"):
        check(CleaningSettings, {"discard": [rule], "discard_reward": -1}, "recipe.toml")


def test_what_a_discarded_response_earns_must_be_said():
    with pytest.raises(SettingsError, match="discard needs discard_reward"):
        CleaningSettings(discard="#")


def test_every_rule_is_explained():
    explained = (Path(__file__).parents[2] / "docs" / "text-statistics.md").read_text("utf-8")
    help_text = " ".join(field.description or "" for field in CleaningSettings.model_fields.values())
    for name in [*CUTS, TOO_SHORT]:
        assert f"| `{name}` |" in explained
        assert f'"{name}"' in help_text
    assert all(f"`{text}`" in explained for text in CUTS["next_turn"] if "|" not in text and "\n" not in text)

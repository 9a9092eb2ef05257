"""A fix names settings that the run has: its own, those of its trainer, or plain words."""

import re
import tomllib
from typing import Any

import numpy as np
import pytest
from doctor_helpers import healthy, suits
from pydantic import ValidationError

from cavesson.config import describe
from cavesson.doctor.diagnosis import diagnose
from cavesson.doctor.proposal import proposal
from cavesson.doctor.reading import Curve, Reading
from cavesson.doctor.rule import Rule
from cavesson.doctor.rules import RULES
from cavesson.doctor.series import Series
from cavesson.doctor.words import LANGUAGES, language
from cavesson.errors import UserError
from cavesson.findings.fixes import PLAIN, SETTING, advice, names_for, recipe_lines
from cavesson.findings.trainers import NAMES
from cavesson.registry import ALGORITHMS

ONLINE = ("ppo", "grpo", "rloo", "raft")
MINIMAL = {"run": "x", "steps": 1, "model": {"path": "tiny"}, "data": {"path": "x"}, "rewards": [{"use": "lowercase"}]}
BY_RULE = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)


def configured(algorithm: str) -> dict[str, Any]:
    """Return the run.json of a run with the default settings of an algorithm."""
    settings = ALGORITHMS[algorithm].settings.model_validate(MINIMAL)
    return {"cavesson": "1", "algorithm": algorithm, "config": settings.model_dump(mode="json")}


CONFIGS = {algorithm: configured(algorithm) for algorithm in ONLINE}
DECLARED = {algorithm: {name for name, *_ in describe(ALGORITHMS[algorithm].settings)} for algorithm in ONLINE}


def said(rule: Rule, info: dict[str, Any], code: str = "en") -> str:
    """Return a fix without placeholders, as it is shown for a run."""
    text = language(code).rules.get(rule.name, {}).get("fix") or rule.texts.fix
    return advice(text, names_for(info, rule.texts.fix), language(code).phrases)


@BY_RULE
@pytest.mark.parametrize("code", LANGUAGES)
def test_a_fix_names_only_settings_that_the_run_has(rule: Rule, code: str) -> None:
    for algorithm in (one for one in ONLINE if suits(rule, one)):
        text = said(rule, CONFIGS[algorithm], code)
        assert {name for name, _ in SETTING.findall(text)} <= DECLARED[algorithm], text
        assert re.search(r"\w", text) and "[" not in text and "]" not in text


@BY_RULE
@pytest.mark.parametrize("trainer", [*NAMES, "another", ""])
def test_a_fix_for_another_trainer_names_no_setting_of_ours(rule: Rule, trainer: str) -> None:
    for algorithm in ("ppo", "grpo", "rloo"):
        info = {"trainer": trainer, "algorithm": algorithm}
        text = said(rule, info)
        theirs = " ".join(names_for(info, rule.texts.fix).values())
        ours = {name for name, _ in SETTING.findall(text)} & set(PLAIN)
        assert all(name in theirs for name in ours), text
        assert re.search(r"\w", text)


def test_every_setting_has_plain_words() -> None:
    named = {name for rule in RULES for name, _ in SETTING.findall(rule.texts.fix)}
    assert named - {"e.g"} == PLAIN.keys()


def test_a_fix_in_the_words_of_each_run() -> None:
    (rule,) = [rule for rule in RULES if rule.name == "entropy-collapse"]
    bonus = "an entropy bonus (grpo.entropy_coef = 0.01)"
    assert said(rule, CONFIGS["grpo"]) == f"a wider upper clip (grpo.clip_high = 0.28), {bonus}, fewer epochs of SFT"
    assert said(rule, CONFIGS["raft"]) == "fewer epochs of SFT"
    trl = said(rule, {"trainer": "trl 1.16", "algorithm": "grpo"})
    assert trl.startswith("a wider upper clip (epsilon_high = 0.28), an entropy bonus (entropy_coef = 0.01), ")
    assert "(upper clip range = 0.28)" in said(rule, {})
    (filtered,) = [rule for rule in RULES if rule.name == "filtered-sampling"]
    assert "actor_rollout_ref.rollout.top_k = -1" in said(filtered, {"trainer": "verl", "algorithm": "grpo"})


@pytest.mark.sampled(120)
@BY_RULE
@pytest.mark.parametrize("algorithm", ONLINE)
def test_proposed_settings_exist_and_have_an_effect(rule: Rule, algorithm: str, tmp_path: Any) -> None:
    """The settings of a run refuse what would have no effect."""
    if not rule.settings or not suits(rule, algorithm):
        return
    made = healthy(algorithm, steps=4)
    made.info = CONFIGS[algorithm]
    curve = Curve(Series(np.zeros(0), np.zeros(0)), high=1.5)
    found = proposal(made.data(tmp_path), rule, Reading(2.0, True, 0, words={"pattern": "#"}, curve=curve))
    changed: dict[str, Any] = dict(MINIMAL)
    for name, value in found.items():
        group, _, last = name.partition(".")
        changed[group] = {**changed.get(group, {}), last: value}
    assert found.keys() <= DECLARED[algorithm]
    try:
        ALGORITHMS[algorithm].settings.model_validate(changed)
    except (ValidationError, UserError) as error:
        pytest.fail(f"{found}: {error}")


def test_a_finding_carries_the_names_of_its_run(tmp_path: Any) -> None:
    made = healthy()
    made.metrics["policy/ratio"][3:] = 50.0
    made.info = {"trainer": "trl 1.10", "algorithm": "ppo"}
    (found,) = [one for one in diagnose(made.data(tmp_path), RULES).findings if one.rule.name == "ratio-blow-up"]
    fix = language("en").texts(found.rule, found.reading, found.names).fix
    assert fix.startswith("lower learning_rate or num_ppo_epochs;")


def test_settings_are_lines_of_a_recipe_that_say_the_same() -> None:
    settings = {
        "sampling.top_k": 0,
        "kl.coef": 2.5e-05,
        "cleaning.discard": [r"(?i)\bok\b", '🙂 "#"'],
        "sampling.top_p": 1.0,
        "update.target_policy_kl": None,
        "steps": 5,
    }
    assert tomllib.loads(recipe_lines(settings)) == {
        "sampling": {"top_k": 0, "top_p": 1.0},
        "kl": {"coef": 2.5e-05},
        "cleaning": {"discard": settings["cleaning.discard"]},
        "steps": 5,
    }
    assert recipe_lines({}) == ""

"""The settings of a fix in the run's trainer: all that rules name are covered, and the run's algorithm decides."""

import io
import re

import pytest
from doctor_helpers import healthy
from rich.console import Console

from cavesson.config import describe
from cavesson.doctor.diagnosis import diagnose
from cavesson.doctor.findings import findings_in
from cavesson.doctor.recording import WAYS
from cavesson.doctor.report.page import page
from cavesson.doctor.report.plain import plain
from cavesson.doctor.report.terminal import show
from cavesson.doctor.rules import RULES
from cavesson.doctor.words import LANGUAGES, language
from cavesson.findings.report import for_board
from cavesson.findings.trainers import NAMES, TRAINERS, trainer_setting_names
from cavesson.registry import ALGORITHMS

DECLARED = {name for entry in ALGORITHMS.values() for name, *_ in describe(entry.settings) if "." in name}
NOWHERE = {
    "cleaning.discard",
    "cleaning.discard_reward",
    "environment.concurrency",
    "environment.timeout",
    "reference.kind",
    "shaping.scale",
    "shaping.subtract_query",
    "update.target_policy_kl",
}
"""Settings that no other trainer has."""
FIX = "raise kl.coef (or set kl.target), lower optimizer.learning_rate; sampling.max_new_tokens = 64."
LABELS = {"en": "in TRL", "zh": "在 TRL 中", "vi": "trong TRL"}


def test_every_setting_that_a_rule_names_has_a_name_or_is_known_to_have_none():
    words = {word for rule in RULES for word in re.findall(r"[\w.]*\w", rule.texts.fix)}
    covered = {setting for names in NAMES.values() for setting in names}
    assert {"kl.coef", "rewards.weight", "ppo.lam"} < words & DECLARED
    assert words & DECLARED - covered == NOWHERE


@pytest.mark.parametrize("trainer", NAMES)
def test_only_settings_of_ours_have_trainer_setting_names(trainer):
    assert NAMES[trainer].keys() <= DECLARED


def test_every_trainer_that_the_doctor_knows_has_names():
    assert NAMES.keys() == TRAINERS.keys() == {way.name for way in WAYS}


@pytest.mark.parametrize(
    ("info", "settings"),
    [
        (
            {"trainer": "trl 1.16.0", "algorithm": "grpo"},
            {"kl.coef": "beta", "sampling.max_new_tokens": "max_completion_length"},
        ),
        (
            {"trainer": "trl 1.10.0", "algorithm": "ppo"},
            {"kl.coef": "kl_coef", "sampling.max_new_tokens": "response_length"},
        ),
        (
            {"format": "trl"},
            {
                "kl.coef": "beta (GRPO, RLOO), kl_coef (PPO)",
                "sampling.max_new_tokens": "max_completion_length (GRPO, RLOO), response_length (PPO)",
            },
        ),
    ],
)
def test_the_algorithm_decides_and_if_it_is_not_known_all_are_named(info, settings):
    found = trainer_setting_names(info, FIX)
    assert found.trainer == "TRL"
    assert found.settings == {"optimizer.learning_rate": "learning_rate"} | settings  # TRL has no kl.target


def test_an_algorithm_without_the_setting_has_no_name_for_it():
    # TRL's PPO always samples from the whole distribution.
    assert trainer_setting_names({"trainer": "trl 1.10.0", "algorithm": "ppo"}, "sampling.top_k = 0") is None
    assert trainer_setting_names({"trainer": "trl 1.16.0", "algorithm": "rloo"}, "sampling.top_k = 0") is not None


def test_names_that_no_algorithm_changes_are_the_same_in_all_runs_of_a_trainer():
    # The hook of verl calls all its algorithms "ppo".
    imported = trainer_setting_names({"format": "verl"}, FIX)
    assert imported is not None
    assert trainer_setting_names({"trainer": "verl", "algorithm": "ppo"}, FIX) == imported


def test_a_flag_that_takes_both_clips_says_so():
    found = trainer_setting_names({"trainer": "openrlhf"}, "a wider upper clip (grpo.clip_high = 0.28)")
    assert found.settings["grpo.clip_high"].startswith("--actor.eps_clip_low_high (two numbers: grpo.clip_low")


@pytest.mark.parametrize(
    "info",
    [{}, {"cavesson": "0.1", "algorithm": "grpo"}, {"trainer": "another"}, {"format": "rl-logging-board"}],
)
def test_ours_and_unknown_trainers_have_none(info):
    assert trainer_setting_names(info, FIX) is None


def test_a_fix_without_settings_has_none():
    assert trainer_setting_names({"format": "trl"}, "check optim/learning_rate and e.g. the mask") is None


@pytest.fixture(scope="module")
def diagnosed(tmp_path_factory):
    """The same run, of TRL's PPO and of Cavesson's; too much is clipped from step 10 on."""

    def of(name, **info):
        made = healthy()
        made.info |= info
        made.metrics["policy/clip_fraction"][10:] = 0.5
        data = made.data(tmp_path_factory.mktemp("names") / name)
        return data, diagnose(data, RULES)

    return {"TRL": of("trl", trainer="trl 1.10.0"), "Cavesson": of("ours")}


NAMED = "optimizer.learning_rate → learning_rate; update.epochs → num_ppo_epochs"


@pytest.mark.parametrize("name", LANGUAGES)
def test_terminal_page_and_board_show_them(diagnosed, name):
    words = language(name)
    out = io.StringIO()
    show(Console(file=out, width=1000), *diagnosed["TRL"], words)
    assert f"{LABELS[name]} {NAMED}" in {" ".join(line.split()) for line in out.getvalue().splitlines()}
    assert f'<dt>{LABELS[name]}</dt><dd class="fix">{NAMED}</dd>' in page(*diagnosed["TRL"], words)
    on_board = [for_board(one) for one in findings_in(diagnosed["TRL"][1], words)]
    (one,) = [one for one in on_board if one["rule"] == "clip-fraction-high"]
    settings = {"optimizer.learning_rate": "learning_rate", "update.epochs": "num_ppo_epochs"}
    assert one["trainer_setting_names"] == {"trainer": "TRL", "settings": settings}


def test_json_has_them_by_setting(diagnosed):
    (found,) = [
        one for one in plain(*diagnosed["TRL"], language("en"))["findings"] if one["rule"] == "clip-fraction-high"
    ]
    assert found["trainer_setting_names"] == {
        "trainer": "TRL",
        "settings": {"optimizer.learning_rate": "learning_rate", "update.epochs": "num_ppo_epochs"},
    }


def test_a_run_of_ours_shows_nothing(diagnosed):
    out = io.StringIO()
    show(Console(file=out, width=1000), *diagnosed["Cavesson"], language("en"))
    assert "→" not in out.getvalue() and "<dt>in " not in page(*diagnosed["Cavesson"], language("en"))
    found = findings_in(diagnosed["Cavesson"][1], language("en"))
    assert found and all(for_board(one)["trainer_setting_names"] is None for one in found)
    found = plain(*diagnosed["Cavesson"], language("en"))["findings"]
    assert found and all(one["trainer_setting_names"] is None for one in found)

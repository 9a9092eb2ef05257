"""The doctor speaks three languages: all say the same, of every rule, and lack nothing."""

import ast
import inspect
import math
import re
import tomllib
from dataclasses import replace
from functools import reduce
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from string import Formatter
from types import ModuleType
from typing import Any, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from cavesson.algorithms.grpo import GRPORun
from cavesson.algorithms.ppo import PPORun
from cavesson.config import Settings
from cavesson.doctor import diagnosis, failures, happened, recording, rules
from cavesson.doctor.reading import Reading
from cavesson.doctor.report import evidence, page, summary, terminal
from cavesson.doctor.rule import Rule
from cavesson.doctor.rules import RULES, kl, mismatch
from cavesson.doctor.words import LANGUAGES, language, limits_of
from cavesson.findings import report
from cavesson.findings.finding import Severity
from cavesson.findings.words import Percent, Phrase, Share, exact, number

MODULES = [import_module(f"{rules.__name__}.{found.name}") for found in iter_modules(rules.__path__)]
PROSE = Path(__file__).parents[2] / "docs" / "diagnosis" / "prose.toml"
TRANSLATED = [name for name in LANGUAGES if name != "en"]
TEXTS = ("title", "cause", "healthy", "fix")
TRANSLATIONS = [
    pytest.param(rule, name, id=f"{name}-{rule.name}")
    for name in TRANSLATED
    for rule in RULES
    if rule.name in language(name).rules
]
"""Translations may lag behind: docs/diagnosis/README.md lists the rules that are shown in English."""
BY_NAME = [pytest.param(rule, id=rule.name) for rule in RULES]
SETTING = re.compile(rf"\b(?:{'|'.join(PPORun.model_fields | GRPORun.model_fields)})\.[a-z_]+")


def placeholders(text: str) -> list[str]:
    return sorted(name for _, name, _, _ in Formatter().parse(text) if name is not None)


@pytest.mark.parametrize("name", TRANSLATED)
def test_no_rule_is_translated_that_is_not_there(name: str) -> None:
    assert language(name).rules.keys() <= {rule.name for rule in RULES}


def test_a_rule_without_a_translation_is_shown_in_english_and_listed() -> None:
    rule = replace(RULES[0], name="new")
    for name in LANGUAGES:
        assert language(name).healthy(rule) == language("en").healthy(RULES[0])
    pages = (PROSE.parent / "README.md").read_text("utf-8").partition("## Translations")[2]
    for name in TRANSLATED:
        (line,) = [line for line in pages.splitlines() if line.startswith(f"- `{name}`: ")]
        missing = {rule.name for rule in RULES} - language(name).rules.keys()
        assert set(re.findall(r"\[([a-z-]+)\]", line)) == missing


@pytest.mark.parametrize(("rule", "name"), TRANSLATIONS)
def test_a_translation_has_all_texts_with_the_placeholders_of_the_english_ones(rule: Rule, name: str) -> None:
    own = language(name).rules[rule.name]
    assert own.keys() == set(TEXTS)
    for text in TEXTS:
        english = getattr(rule.texts, text)
        assert own[text].strip() == own[text] != ""
        assert own[text] != english
        assert placeholders(own[text]) == placeholders(english), text


@pytest.mark.parametrize("rule", BY_NAME)
def test_titles_and_healthy_ranges_need_no_reading(rule: Rule) -> None:
    # They are shown for healthy rules, too: titles are not filled, healthy ranges only with the limits of the rule.
    for name in LANGUAGES:
        own = language(name).rules.get(rule.name, {})
        assert placeholders(own.get("title", rule.texts.title)) == []
        assert set(placeholders(own.get("healthy", rule.texts.healthy))) <= rule.limits.keys()


def texts_of(rule: Rule, name: str) -> dict[str, str]:
    """Return the texts of a rule in one language with their placeholders."""
    return language(name).rules.get(rule.name) or {text: getattr(rule.texts, text) for text in TEXTS}


NUMBER = re.compile(r"(?<![\w.=^])−?\d+(?:[.,]\d+)*(?: %)?")


@pytest.mark.parametrize("name", LANGUAGES)
@pytest.mark.parametrize("rule", BY_NAME)
def test_a_limit_is_shown_from_the_rule_and_never_written_out(rule: Rule, name: str) -> None:
    texts = texts_of(rule, name)
    together = " ".join(re.sub(r"= [\d.]+", "", text) for text in texts.values())  # settings in a fix are not limits
    assert set(rule.limits) <= set(placeholders(together))
    assert set(NUMBER.findall(re.sub(r"{\w+}", "", together))) & set(limits_of(rule).values()) == set()


@pytest.mark.parametrize("rule", BY_NAME)
def test_the_page_of_a_rule_does_not_write_its_limits_out(rule: Rule) -> None:
    prose = tomllib.loads(PROSE.read_text("utf-8"))["rules"][rule.name]
    together = prose["sees"] + prose["unlike"]
    assert set(placeholders(together)) <= rule.limits.keys()
    assert set(NUMBER.findall(re.sub(r"{\w+}", "", together))) & set(limits_of(rule).values()) <= {"0", "1"}


@pytest.mark.parametrize("name", LANGUAGES)
def test_texts_follow_a_limit_that_changes(name: str) -> None:
    rule = next(rule for rule in RULES if rule.name == "coefficient-runaway")
    assert " 10" in language(name).healthy(rule)
    other = replace(rule, limits={"limit": 23.5})
    assert " 23.5" in language(name).healthy(other) and " 10" not in language(name).healthy(other)
    assert " 23.5" in language(name).texts(other, Reading(0.5, True)).healthy


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        (10.0, "10"),
        (5, "5"),
        (1e-5, "0.00001"),
        (1.03, "1.03"),
        (-1.0, "−1"),
        (0.25, "0.25"),
        (Share(0.07), "7 %"),
        (Share(1e-3), "0.1 %"),
        (Percent(0.5), "50 %"),
    ],
)
def test_limits_are_written_with_all_their_digits(limit: float, text: str) -> None:
    assert exact(limit) == text


@pytest.mark.parametrize(("rule", "name"), TRANSLATIONS)
def test_a_healthy_range_is_the_same_in_all_languages(rule: Rule, name: str) -> None:
    numbers = re.compile(r"\d+(?:[.,]\d+)?(?: %)?")
    own, english = (language(one).healthy(rule) for one in (name, "en"))
    assert sorted(numbers.findall(own)) == sorted(numbers.findall(english))


@pytest.mark.parametrize(("rule", "name"), TRANSLATIONS)
def test_the_same_settings_are_to_be_changed_in_all_languages(rule: Rule, name: str) -> None:
    assert set(SETTING.findall(language(name).rules[rule.name]["fix"])) == set(SETTING.findall(rule.texts.fix))


@pytest.mark.parametrize(("rule", "name"), TRANSLATIONS)
def test_the_values_that_settings_are_to_have_are_not_translated(rule: Rule, name: str) -> None:
    values = re.compile(r'"(\w+)"|= ([\d.]+|true|false)')
    assert values.findall(language(name).rules[rule.name]["fix"]) == values.findall(rule.texts.fix)


@pytest.mark.parametrize("name", LANGUAGES)
@pytest.mark.parametrize("rule", BY_NAME)
def test_the_words_of_a_reading_fill_the_texts(rule: Rule, name: str) -> None:
    wanted = set(placeholders(rule.texts.cause + rule.texts.fix)) - {"seen"} - rule.limits.keys()
    words: dict[str, str | float] = {word: f"<{word}>" for word in wanted}
    said = language(name).texts(rule, Reading(seen=-0.123456, unhealthy=True, words=words))
    both = said.cause + said.fix
    assert all(f"<{word}>" in both for word in wanted)
    assert ("−0.123" in both) == ("{seen}" in rule.texts.cause + rule.texts.fix)
    assert "{" not in said.title + both + said.healthy


@pytest.mark.parametrize("name", TRANSLATED)
def test_words_that_are_phrases_are_translated(name: str) -> None:
    rule = next(rule for rule in RULES if rule.name == "sampler-stale")
    words: dict[str, str | float] = {"when": Phrase("at the first step"), "frozen": ""}
    said = language(name).texts(rule, Reading(0.5, True, words=words))
    assert language(name).phrases["at the first step"] in said.cause
    assert "at the first step" not in said.cause


def test_words_of_the_user_are_never_translated() -> None:
    rule = next(rule for rule in RULES if rule.name == "one-part-dominates")
    assert "source" in language("zh").texts(rule, Reading(0.5, True, words={"part": "source"})).cause


SPEAKING = (diagnosis, evidence, failures, happened, page, recording, report, summary, terminal)
CALLS = ("say", "language.phrase", "because", "Phrase")


def phrases_of_the_report() -> set[str]:
    found = {*get_args(Severity), *(measure.name for measure in evidence.MEASURES if "π" not in measure.name)}
    nodes = [node for module in SPEAKING for node in ast.walk(ast.parse(inspect.getsource(module)))]
    for node in nodes:
        if not isinstance(node, ast.Call) or ast.unparse(node.func) not in CALLS:
            continue
        if isinstance(node.args[0], ast.Constant):
            found.add(node.args[0].value)
    return found


def phrases_of_the_rules(module: ModuleType) -> set[str]:
    """Return the constants with a space in the rules' functions: what they put into words, whole or in part."""
    found: set[str] = set()
    for function in ast.parse(inspect.getsource(module)).body:
        if not isinstance(function, ast.FunctionDef):
            continue
        body = function.body[1:] if ast.get_docstring(function) else function.body
        nodes = [node for statement in body for node in ast.walk(statement)]
        formatted = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        texts = [node.value for node in nodes if isinstance(node, ast.Constant) and id(node) not in formatted]
        found |= {text for text in texts if isinstance(text, str) and " " in text}
    return found


@pytest.mark.parametrize("name", TRANSLATED)
def test_every_phrase_of_the_report_is_translated(name: str) -> None:
    used = phrases_of_the_report()
    assert {
        "steps",
        "Looked at and within range",
        "look at",
        "error",
    } < used  # in a tuple, alone, in an f-string, a severity
    assert {"not recorded: {what}", "token reward"} < used
    assert used - language(name).phrases.keys() == set()


@pytest.mark.parametrize("name", TRANSLATED)
@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_every_phrase_that_rules_put_into_words_is_translated(module: ModuleType, name: str) -> None:
    known, rules = language(name).phrases, [one for one in vars(module).values() if isinstance(one, Rule)]
    if any(one.name not in language(name).rules for one in rules):
        return  # shown in English, as the list says
    assert [text for text in phrases_of_the_rules(module) if not any(text in phrase for phrase in known)] == []


@pytest.mark.parametrize("name", TRANSLATED)
def test_every_tenth_of_a_response_is_translated(name: str) -> None:
    assert {f"in the {one} tenth of the response" for one in kl.ORDINALS} <= language(name).phrases.keys()


def test_phrases_are_found_in_the_functions_of_rules() -> None:
    assert {"at some steps", ", and the sampler still has the weights of the reference"} <= phrases_of_the_rules(
        mismatch
    )
    assert {": it outweighs the reward", "on 1 % of the tokens"} <= phrases_of_the_rules(kl)


def test_all_languages_have_the_same_phrases_and_none_says_it_in_english() -> None:
    first, *others = (language(name).phrases for name in TRANSLATED)
    assert all(other.keys() == first.keys() for other in others)
    assert [text for phrases in (first, *others) for text, said in phrases.items() if text == said or not said] == []


def setting(run: type[Settings], path: str) -> Any:
    """Return the type of a setting; of a list of groups, that of the group's."""

    def inner(group: Any, name: str) -> Any:
        entry = get_args(group)[0] if get_origin(group) is tuple else group
        return entry.model_fields[name].annotation

    return reduce(inner, path.split("."), run)


def run_of(path: str) -> type[Settings]:
    return GRPORun if path.startswith("grpo.") else PPORun


@pytest.mark.parametrize("name", TRANSLATED)
def test_settings_that_texts_name_exist(name: str) -> None:
    named = {path for own in language(name).rules.values() for text in own.values() for path in SETTING.findall(text)}
    assert {"kl.coef", "rewards.weight", "ppo.lam", "grpo.resample"} < named
    for path in named:
        setting(run_of(path), path)


def test_what_a_fix_gives_as_a_line_of_a_recipe_is_one() -> None:
    line = re.compile(rf"({SETTING.pattern}) = (\"\w+\"|[\d.]+|true|false)")
    lines = {found for rule in RULES for found in line.findall(rule.texts.fix)}
    assert {("sampling.top_k", "0"), ("cleaning.discard", '"too_short"'), ("shaping.scale", "true")} < lines
    for path, text in lines:
        group, _, key = path.rpartition(".")
        needed = {"discard_reward": -10.0} if key == "discard" else {}
        settings = TypeAdapter(setting(run_of(path), group))
        settings.validate_python({key: tomllib.loads(f"it = {text}")["it"], **needed})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (3.0, "3"),
        (-2.0, "−2"),
        (151_643.0, "151643"),  # the id of a token stays readable
        (0.5, "0.500"),
        (-0.0456, "−0.0456"),
        (1.2345, "1.23"),  # three digits are 1, 2, 3
        (1.236, "1.24"),
        (12.34, "12.3"),
        (123.4, "123"),
        (1234.7, "1235"),  # no exponent where none is needed
        (0.000123, "0.000123"),
        (0.0000123, "1.23e−05"),
        (2_500_000.0, "2.50e+06"),
        (math.nan, "NaN"),
        (math.inf, "∞"),
        (-math.inf, "−∞"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0 %"), (0.234, "23 %"), (1.0, "100 %"), (0.0254, "2.5 %"), (0.0004, "0.04 %"), (-0.2, "−20 %")],
)
def test_shares_are_written_in_per_cent(share: float, text: str) -> None:
    assert number(Share(share)) == text


@given(st.floats(-1e300, 1e300))
def test_a_short_number_is_the_number_to_three_digits(value: float) -> None:
    # Half of the third digit of 1.00 is 0.5 % of it.
    assert math.isclose(float(number(value).replace("−", "-")), value, rel_tol=0.005 + 1e-12)


@given(st.floats(1e-4, 9e4))
def test_ordinary_numbers_have_no_exponent(value: float) -> None:
    assert "e" not in number(value)


@pytest.mark.parametrize(
    ("asked", "name"),
    [("zh", "zh"), ("zh_CN.UTF-8", "zh"), ("vi_VN", "vi"), ("en_GB", "en"), ("de", "en"), ("C.UTF-8", "en")],
)
def test_a_language_is_named_as_in_lang(asked: str, name: str) -> None:
    assert language(asked).name == name


def test_a_word_that_no_language_knows_stays_as_it_is() -> None:
    assert language("zh").phrase("time/sample") == "time/sample"

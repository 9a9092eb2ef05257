"""User-defined rules, from a file or from the entry point ``cavesson.rules`` of an installed package."""

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cavesson.doctor.data import RunData
from cavesson.doctor.reading import Reading
from cavesson.doctor.rule import Rule
from cavesson.doctor.rules import RULES
from cavesson.doctor.words import language
from cavesson.errors import UserError, user_code
from cavesson.plugins import loaded


def all_rules(files: Sequence[Path] = ()) -> tuple[Rule, ...]:
    """Return the built-in rules, those of installed packages, and those in the given files.

    Raises:
        UserError: A file is missing, is not a Python file, or has no rule; an entry point is not a rule; or two rules
            have the same name.
    """
    installed = map(_guarded, loaded("rules", Rule).values())
    rules = (*RULES, *installed, *(rule for path in files for rule in rules_in(path)))
    names = [rule.name for rule in rules]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"there are two rules named {twice[0]}; rename one of them")
    return rules


def rules_in(path: Path) -> list[Rule]:
    """Return the rules that a Python file defines, in the order of the file."""
    spec = importlib.util.spec_from_file_location(f"rules_of_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise UserError(f"{path} is not a Python file; --rules needs one that defines rules with @cavesson.doctor.rule")
    module = importlib.util.module_from_spec(spec)
    with user_code(f"the rules' file {path.name}"):
        spec.loader.exec_module(module)
    found = [value for value in vars(module).values() if isinstance(value, Rule)]
    if not found:
        raise UserError(f"{path} defines no rule; decorate a function with @cavesson.doctor.rule(...)")
    return [_guarded(rule) for rule in found]


def _guarded(rule: Rule) -> Rule:
    """Return the rule with errors converted to one-line messages that name the place of the error."""

    def statistic(data: RunData) -> Reading | None:
        with user_code(f"the rule {rule.name}"):
            reading = rule.statistic(data)
        if reading is not None and not isinstance(reading, Reading):
            raise UserError(f"the rule {rule.name} returns {reading!r}; it must return a Reading, or None")
        if reading is not None and reading.unhealthy:
            _fill(rule, reading)
        return reading

    return replace(rule, statistic=statistic)


def _fill(rule: Rule, reading: Reading) -> None:
    try:
        language("en").texts(rule, reading)
    except (KeyError, IndexError, ValueError) as error:
        raise UserError(
            f"the rule {rule.name}: its cause or fix has a placeholder that the words of its reading do not fill: "
            f"{error}; {{{{ and }}}} stand for braces"
        ) from error

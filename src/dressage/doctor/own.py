"""Rules of the user's own: from a file, or from an installed package's entry point ``dressage.rules``."""

import importlib.util
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

from dressage.doctor.rule import Rule
from dressage.doctor.rules import RULES
from dressage.errors import UserError


def all_rules(files: Sequence[Path] = ()) -> tuple[Rule, ...]:
    """Returns our rules, those of installed packages, and those of some files.

    Raises:
        UserError: A file is not there, is no Python, or has no rule; or two rules have the same name.
    """
    installed = [entry.load() for entry in entry_points(group="dressage.rules")]
    rules = (*RULES, *installed, *(rule for path in files for rule in rules_in(path)))
    names = [rule.name for rule in rules]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"there are two rules named {twice[0]}; rename one of them")
    return rules


def rules_in(path: Path) -> list[Rule]:
    """Returns the rules that a Python file makes, in the order of the file."""
    spec = importlib.util.spec_from_file_location(f"rules_of_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise UserError(f"{path} is no Python file; --rules takes one that makes rules with @dressage.doctor.rule")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    found = [value for value in vars(module).values() if isinstance(value, Rule)]
    if not found:
        raise UserError(f"{path} makes no rule; decorate a function with @dressage.doctor.rule(...)")
    return found

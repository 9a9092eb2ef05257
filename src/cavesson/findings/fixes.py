"""The settings that a fix names, as the run calls them: a fix is what its reader can do."""

import json
import re
import shlex
from collections.abc import Mapping
from typing import Any

from cavesson.command_line import is_trained_here
from cavesson.findings.trainers import NAMES, TABLE, name_in, trainer_of
from cavesson.findings.words import Phrase
from cavesson.importers.traits import section_of, traits_of
from cavesson.registry import ALGORITHMS
from cavesson.text.toml_value import toml_value

PLAIN: Mapping[str, str] = {name: Phrase(words) for name, words in TABLE["plain"].items()} | TABLE["symbols"]
"""Plain words for each setting that a fix names; symbols and the names of samplers are the same in all languages."""
SETTING = re.compile(r'([a-z_]+(?:\.[a-z_]+)+)(?: = ("[^"]*"|[a-z]+|\d+(?:\.\d+)?))?')
"""A setting, perhaps with a value."""
_SECTIONS = frozenset(name.replace("-", "_") for name in ALGORITHMS)
_CLAUSE = re.compile(r"\[([^\]]*)\]")
_VALUES = re.compile(r'("?[\w.-]+"?) → ("?[\w.-]+"?)')
_NOTE = re.compile(r" \([^()]*→[^()]*\)")

Names = Mapping[str, str]
"""Setting → what it is called; a ``Phrase`` is translated. A setting that the run lacks is not in it."""


class Kept(str):
    """What a setting is called that has the value of the fix already."""


def names_for(info: Mapping[str, Any], fix: str) -> dict[str, str]:
    """Return what the settings of a fix are called in a run: as in its recipe or its trainer, or in plain words.

    Args:
        info: The content of run.json.
        fix: The text in English.
    """
    trainer, found = trainer_of(info), {}
    for setting, value in SETTING.findall(fix):
        if is_trained_here(info):
            name = _own(info, setting, value)
        elif trainer in NAMES:
            name = name_in(trainer, info.get("algorithm"), setting)
        else:
            name = PLAIN.get(setting, setting)
        if name:
            found[setting] = name
    return found


def _own(info: Mapping[str, Any], setting: str, value: str) -> str | None:
    """Return the setting, or the one of the same name of the run's own algorithm; None if the run lacks it."""
    name = in_run(setting, info)
    group, _, last = name.partition(".")
    values = info["config"].get(group)
    if isinstance(values, list):
        return setting
    if not isinstance(values, dict) or last not in values or not has_effect(name, info):
        return None
    return Kept(name) if str(values[last]) == value.strip('"') else name


def advice(fix: str, names: Names | None, say: "Mapping[str, str]", sizes: Mapping[str, str] | None = None) -> str:
    """Return a fix with the names that the run has for its settings.

    A clause in square brackets is left out if the run lacks one of its settings or has its value already.

    Args:
        fix: The text, in any language.
        names: As ``names_for`` returns them; None: those of Cavesson.
        say: Translations of phrases.
        sizes: Setting → by how much to change it, as a text behind its name.
    """

    def clause(found: re.Match[str]) -> str:
        settings = [setting for setting, _ in SETTING.findall(found[1])]
        useful = names is None or all(one in names and not isinstance(names[one], Kept) for one in settings)
        return found[1] if useful else ""

    def called(found: re.Match[str]) -> str:
        setting, value = str(found[1]), found[2]
        name = setting if names is None else names.get(setting, PLAIN.get(setting, setting))
        values = dict(_VALUES.findall(name))
        change = f" = {values.get(value, value)}" if value else (sizes or {}).get(setting, "")
        return say.get(name, _NOTE.sub("", name)) + change

    return SETTING.sub(called, _CLAUSE.sub(clause, fix))


def in_run(setting: str, info: Mapping[str, Any]) -> str:
    """Return the dotted name of a setting in a run, in the section of the run's algorithm."""
    group, _, last = setting.partition(".")
    return f"{section_of(info) or group}.{last}" if group in _SECTIONS else setting


def has_effect(setting: str, info: Mapping[str, Any]) -> bool:
    """Return whether a setting that a run has changes anything: those of the KL penalty do not where there is none."""
    return not setting.startswith("kl.") or traits_of(info).get("kl_place", "unknown") is not None


def flags(settings: Mapping[str, Any]) -> str:
    """Return settings as flags of a command."""
    return " ".join(f"--{name} {shlex.quote(_text(value))}" for name, value in settings.items())


def recipe_lines(settings: Mapping[str, Any]) -> str:
    """Return settings as lines of a recipe, by their groups; one without a value is left out, as TOML has none."""
    groups: dict[str, list[str]] = {"": []}  # what is in no group comes first
    for name, value in settings.items():
        group, _, last = name.rpartition(".")
        if value is not None:
            groups.setdefault(group, []).append(f"{last} = {toml_value(value)}")
    tables = ([f"[{group}]", *lines] if group else lines for group, lines in groups.items())
    return "\n\n".join("\n".join(lines) for lines in tables if lines)


def _text(value: Any) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)

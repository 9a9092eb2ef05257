"""Where a run has the settings that rules name, each in the group of the algorithm that is known for it."""

from collections.abc import Mapping
from typing import Any

from cavesson.importers.traits import section_of, traits_of
from cavesson.registry import ALGORITHMS

_SECTIONS = frozenset(name.replace("-", "_") for name in ALGORITHMS)


def in_run(setting: str, info: Mapping[str, Any]) -> str:
    """Return the dotted name of a setting in a run, in the section of its own algorithm."""
    group, _, last = setting.partition(".")
    return f"{section_of(info) or group}.{last}" if group in _SECTIONS else setting


def has_effect(setting: str, info: Mapping[str, Any]) -> bool:
    """Return whether a setting that a run has changes anything: those of the KL penalty do not where there is none."""
    return not setting.startswith("kl.") or traits_of(info).get("kl_place", "unknown") is not None

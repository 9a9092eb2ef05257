"""The rules that read episodes."""

from cavesson.doctor.rules import RULES

OF_EPISODES = [rule for rule in RULES if any(need.startswith(("turns.", "tokens.source")) for need in rule.needs)]
NAMES = frozenset(rule.name for rule in OF_EPISODES)

"""The texts of a finding in the user's language."""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

from cavesson.doctor.reading import Reading, Skipped, Words
from cavesson.doctor.rule import Rule, Texts
from cavesson.findings.fixes import Names, advice
from cavesson.findings.words import Phrase, exact, number
from cavesson.text.visible import visible

LANGUAGES = ("en", "zh", "vi")


def limits_of(rule: Rule) -> dict[str, str]:
    """Return the limits of a rule as its texts show them."""
    return {name: exact(limit) for name, limit in rule.limits.items()}


@dataclass(frozen=True)
class Language:
    """The texts of the rules and of the report in one language; missing texts are in English."""

    name: str
    rules: dict[str, dict[str, str]]
    phrases: dict[str, str]

    def phrase(self, text: str) -> str:
        """Return a phrase of the report in this language."""
        return self.phrases.get(text, text)

    def _word(self, word: str) -> str:
        return self.phrase(word) if isinstance(word, Phrase) else visible(word)

    def healthy(self, rule: Rule) -> str:
        """Return the meaning of a rule's number and its healthy range."""
        return self._text(rule, "healthy").format_map(limits_of(rule))

    def reason(self, skipped: Skipped) -> str:
        """Return why a rule was skipped."""
        return self.phrase(skipped.reason).format_map(self._filled(skipped.words))

    def _filled(self, words: Words) -> dict[str, str]:
        return {
            name: number(word) if isinstance(word, int | float) else self._word(word) for name, word in words.items()
        }

    def texts(
        self, rule: Rule, reading: Reading, names: Names | None = None, sizes: Mapping[str, str] | None = None
    ) -> Texts:
        """Return the texts of a rule that found something, filled with its limits and the numbers of its reading.

        Args:
            rule: The rule.
            reading: What it found.
            names: What the settings of the fix are called in the run; None: as in Cavesson.
            sizes: By how much to change them, as texts behind their names.
        """
        words = limits_of(rule) | self._filled({**reading.words, "seen": reading.seen})
        fix = advice(self._text(rule, "fix"), names, self.phrases, sizes).format_map(words)
        return Texts(self._text(rule, "title"), self._text(rule, "cause").format_map(words), self.healthy(rule), fix)

    def _text(self, rule: Rule, name: str) -> str:
        return self.rules.get(rule.name, {}).get(name) or str(getattr(rule.texts, name))


def language(name: str | None = None) -> Language:
    """Return a language by its code (default: from the locale environment variables, else English)."""
    if name is None:
        name = os.environ.get("LC_ALL") or os.environ.get("LC_MESSAGES") or os.environ.get("LANG") or "en"
    code = name[:2].lower()
    return _read(code) if code in LANGUAGES and code != "en" else Language("en", {}, {})


@lru_cache
def _read(code: str) -> Language:
    content = tomllib.loads(files("cavesson.doctor").joinpath("languages", f"{code}.toml").read_text("utf-8"))
    return Language(code, content.get("rules", {}), content.get("phrases", {}))

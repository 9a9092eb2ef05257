"""The rule on a pattern that spreads because the reward favours it, such as `#`, an emoticon or a phrase."""

import re
from collections import Counter
from collections.abc import Set
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from cavesson.doctor.data import RunData
from cavesson.doctor.finding import Curve, Phrase, Reading, Share, Words
from cavesson.doctor.proposal import rounded
from cavesson.doctor.recorded import CHANCE
from cavesson.doctor.rows import Rows
from cavesson.doctor.rule import rule
from cavesson.doctor.rules.consequences import CRITIC
from cavesson.doctor.series import Array, since
from cavesson.doctor.worth import Rewards, Worth, clear_of, early_part, grows, late_parts, share_of
from cavesson.text.words import is_sign, is_spaced

MIN_ROLLOUTS = 120
FREQUENT = 0.2
GROWTH = 3.0
SEVERAL = 3
"""Other frequent words that are worth as much as a pattern, so that it is one of many that the reward asks for."""
SAME = 0.8
"""Correlation from which words are parts of one phrase, and what they are worth is the worth of the phrase."""


class Pattern(NamedTuple):
    """A word, a sign or a pair of them, and how it spreads."""

    text: str
    before: float
    """Share of the early responses (or of the reference's) that have it."""
    after: float
    lift: float
    """Mean reward with it − without it, within a prompt or step, in standard deviations of the reward."""
    explains: float
    """Share of the variance of the reward within a prompt or step that having it explains: over the run or in its late
    part, whichever is larger. A pattern that began late has no part in the variance before."""


def pieces(words: list[str]) -> set[str]:
    """Return the words of a text, the beginnings of its sequences of signs, their signs, and pairs of adjacent ones."""
    words = [word[:3] if is_sign(word) else word for word in words]
    # A sign is the same pattern alone and at the end of a sentence: "#" is a part of ".#" and "##".
    signs = {sign for word in words if is_sign(word) for sign in word}
    return {*words, *signs, *(f"{one} {two}" for one, two in pairwise(words))}


class Texts:
    """The responses of rollouts and their rewards."""

    def __init__(self, rows: Rows) -> None:
        self._words = rows.words("response")
        self._found = [pieces(some) for some in self._words]
        self.early, self.rewards = early_part(rows), Rewards(rows)

    def counts(self, part: Array) -> Counter[str]:
        """Return the number of responses with each pattern among those for which ``part`` [n] is true."""
        return Counter(text for i in np.flatnonzero(part) for text in self._found[i])

    def having(self, text: str) -> Array:
        """Return [n] which responses have a pattern."""
        return np.array([text in some for some in self._found])

    def grows(self, text: str, late: Array, clear: float) -> bool:
        """Return whether a pattern is more frequent late than early, by so many standard errors."""
        has, prompt = self.having(text), self.rewards.prompt
        before, now = (share_of(has[part], prompt[part]) for part in (self.early, late))
        return grows(before, now, clear)

    def length(self, without: Set[str] = frozenset()) -> Array:
        """Return [n] the lengths in words, without these words and the runs that consist of these signs."""

        def counts(word: str) -> bool:
            return not without >= set(word[:3]) if is_sign(word) else word not in without

        return np.array([sum(map(counts, words)) for words in self._words])


def spreading(texts: Texts, late: Array, chance: float = CHANCE) -> list[Pattern]:
    """Return the patterns that became more frequent, sorted by how much of the reward they explain.

    Args:
        texts: The responses.
        late: [n] which of them are compared with the first ones.
        chance: Probability with which any of the patterns may be returned, or said to explain something, by chance.
    """
    early, rewards = texts.early, texts.rewards
    if early.sum() < MIN_ROLLOUTS / 4 or late.sum() < MIN_ROLLOUTS / 4:
        return []
    old, new = texts.counts(early), texts.counts(late)
    n, m = int(early.sum()), int(late.sum())
    frequent = [text for text, count in new.items() if count / m > FREQUENT]
    often = [text for text in frequent if new[text] / m > GROWTH * old[text] / n]
    grown = [text for text in often if texts.grows(text, late, clear_of(chance, len(new)))]
    if not grown:
        return []
    plain = Worth(rewards, texts.length(), late)
    # The words of patterns lengthen a response themselves. What one is worth must hold with and without them.
    without = Worth(rewards, texts.length({part for text in grown for part in text.split()}), late)
    words = [text for text in frequent if " " not in text]
    slopes = [(text, plain.over_run.slope(texts.having(text))) for text in words]
    asked_for = [(text, slope.value) for text, slope in slopes if slope.deviate > clear_of(chance, len(words))]
    patterns = []
    for text in grown:
        has = texts.having(text)
        worth = plain.over_run.slope(has).value
        rivals = [other for other, value in asked_for if other not in text.split() and value >= worth]
        equal = [other for other in rivals if plain.over_run.correlation(has, texts.having(other)) < SAME]
        if len(equal) < SEVERAL:  # otherwise the reward favours many words, which is what it asks for
            explains = min(each.explained(has, clear_of(chance, len(grown))) for each in (plain, without))
            patterns.append(Pattern(text, old[text] / n, new[text] / m, rewards.lift(has), explains))
    return sorted(patterns, key=lambda pattern: (-pattern.explains, pattern.text))


def expression(pattern: str) -> str:
    """Return a regular expression that finds a pattern, as `pieces` names it, in a text."""
    parts = pattern.split()
    plain = [re.sub(r"[.^$*+?{}[\]\\|()]", r"\\\g<0>", part) for part in parts]
    # `\b` is also beside the combining marks of a word, and not beside an underscore.
    begin, end = ("(?<![^\\W_])" if is_spaced(parts[0]) else "", "(?![^\\W_])" if is_spaced(parts[-1]) else "")
    between = r"\s+" if all(map(is_spaced, parts)) else r"\s*"
    found = between.join(plain)
    return found if all(map(is_sign, parts)) else f"(?i){begin}{found}{end}"


def _discarding(value: list[str], data: RunData, reading: Reading) -> list[str]:
    """Discard responses with the pattern."""
    found = expression(str(reading.words["pattern"]))
    return value if found in value else [*value, found]


def _below_all(value: float | None, data: RunData, reading: Reading) -> float | None:
    """Reward discarded responses below all others."""
    if value is not None:
        return value
    reward = data.rows["reward"]
    return rounded(float(np.nanmin(reward) - np.nanstd(reward)))


@rule(
    number=50,
    needs=["rows.response", "rows.reward"],
    min_steps=8,
    training_only=True,
    title="A pattern that the reward favours spreads",
    cause="`{pattern}` occurs in {after} of the last responses and in {before} of the first. Responses with it get a "
    "reward that is {lift} standard deviations higher, and the pattern explains {seen} of the variance: the policy "
    "has found a weakness of the reward.",
    healthy="share of the reward's variance within a prompt that a spreading pattern explains: below {limit}",
    fix="discard such responses (cleaning.discard) or penalise them, and train the reward model on examples of them",
    settings={"cleaning.discard": _discarding, "cleaning.discard_reward": _below_all},
    source="LMFlow's RAFT (#); StackLLaMA (```); own threshold",
    explains=["distinct-collapse", "over-optimised", "entropy-collapse", "kl-in-few-tokens", "template-collapse",
              "repetition-loops", "kl-explosion", "reward-exhausted", "prompts-exhausted", "one-part-dominates",
              "length-exploited", *CRITIC],
)  # fmt: skip
def pattern_spreading(data: RunData, *, limit: float = Share(0.12)) -> Reading | None:
    rows = data.said
    rows = rows.where(np.array([bool(text) for text in rows.texts("response")], bool))  # empty ones lack every pattern
    if len(rows) < MIN_ROLLOUTS:
        return None
    most = 0.0
    # A desired property has many words, each of which explains only some hundredths of the variance.
    texts, parts = Texts(rows), late_parts(rows)
    for late in parts:
        found = [pattern for pattern in spreading(texts, late, data.chance / len(parts)) if pattern.lift > 0]
        if found and found[0].explains >= limit:
            return _spread(rows, texts, _longest(texts, found), late)
        most = max(most, found[0].explains if found else 0.0)
    return Reading(Share(most), False)


def _longest(texts: Texts, found: list[Pattern]) -> Pattern:
    """Return the longest of the patterns that are in the same responses as the first one, such as words of a phrase."""
    best, has = found[0], texts.having(found[0].text)
    same = [one for one in found if one.explains > SAME * best.explains]
    same = [one for one in same if np.corrcoef(has, texts.having(one.text))[0, 1] > SAME]
    is_alone = " " not in best.text and is_sign(best.text)  # whatever stands beside it is chance
    return best if is_alone else max(same, key=lambda one: len(one.text), default=best)


def _spread(rows: Rows, texts: Texts, best: Pattern, late: Array) -> Reading:
    has = texts.having(best.text)
    share = rows.by_step(has.astype(float))
    first = since(share, share.value > max(2 * best.before, 0.1), 3)
    words: Words = {"pattern": best.text, "lift": best.lift, "before": Share(best.before), "after": Share(best.after)}
    evidence = rows.highest(np.where(has & late, rows["reward"], -np.inf))
    curve = Curve(share, high=max(FREQUENT, GROWTH * best.before), name=Phrase("share of responses with the pattern"))
    return Reading(Share(best.explains), True, first, evidence, words, curve)

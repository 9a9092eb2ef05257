"""The rule on a pattern that spreads because the reward favours it, such as `#`, an emoticon or a phrase."""

import re
from collections.abc import Set
from typing import NamedTuple

import numpy as np

from cavesson.doctor.data import RunData
from cavesson.doctor.effects import Effects, Rewards, clear_of, early_part, grows, late_parts, share_of
from cavesson.doctor.proposal import rounded
from cavesson.doctor.reading import Affected, Curve, Reading, Words
from cavesson.doctor.recorded import CHANCE
from cavesson.doctor.rows import Rows
from cavesson.doctor.rule import rule
from cavesson.doctor.rules.consequences import CRITIC
from cavesson.doctor.series import Array, since
from cavesson.findings.words import Phrase, Share
from cavesson.text.features import CHARACTER, NGRAM, WORD, features
from cavesson.text.reward_effect import RewardEffect
from cavesson.text.words import A_LETTER, NO_LETTER_RE2, SIGN, code_points, is_sign, is_spaced, kinds_of, words

MIN_ROLLOUTS = 120
FREQUENT = 0.2
GROWTH = 3.0
SEVERAL = 3
"""Other frequent words with as large an effect as a pattern, so that it is one of many that the reward asks for."""
SAME = 0.8
"""Correlation from which words are parts of one phrase, and their effects are the effect of the phrase."""


class Pattern(NamedTuple):
    """A word, a sign, or two or three adjacent words, and how it spreads."""

    feature: int
    text: str
    before: float
    """Share of the early responses (or of the reference's) that have it."""
    after: float
    effect: RewardEffect
    explains: float
    """Share of the variance of the reward within a prompt or step that having it explains: over the run or in its late
    part, whichever is larger. A pattern that began late has no part in the variance before."""


class Texts:
    """The responses of rollouts, the patterns in them, which are numbered, and their rewards."""

    def __init__(self, rows: Rows) -> None:
        self._words = rows.words("response")
        self._features, self._text = features([text or "" for text in rows.texts("response")])
        self._edges = np.append(0, np.cumsum(self._features.counts))
        signs = kinds_of(code_points(self._text))[self._features.start] == SIGN
        self.is_sign = signs & (self._features.kind == CHARACTER)
        """[K] whether a pattern is one sign. It is the same alone and in a sequence: "#" is a part of ".#" and "##"."""
        is_one = self._features.stop - self._features.start == 1
        self.is_word = (self._features.kind == WORD) & ~(signs & is_one) | self.is_sign
        """[K] whether a pattern is one word or sign."""
        self._is_pattern = self.is_word | (self._features.kind == NGRAM)
        self.early, self.rewards = early_part(rows), Rewards(rows)

    def text(self, pattern: int) -> str:
        """Return the text of a pattern, in lower case."""
        return " ".join(self._text[self._features.start[pattern] : self._features.stop[pattern]].split())

    def counts(self, part: Array) -> Array:
        """Return [K] the number of responses with each pattern among those for which ``part`` [n] is true."""
        there = np.append(0, np.cumsum(part[self._features.documents]))
        return np.asarray(np.diff(there[self._edges]) * self._is_pattern)

    def having(self, pattern: int) -> Array:
        """Return [n] which responses have a pattern."""
        has = np.zeros(len(self.early), np.bool_)
        has[self._features.documents[self._edges[pattern] : self._edges[pattern + 1]]] = True
        return has

    def grows(self, pattern: int, late: Array, clear: float) -> bool:
        """Return whether a pattern is more frequent late than early, by so many standard errors."""
        has, prompt = self.having(pattern), self.rewards.prompt
        before, now = (share_of(has[part], prompt[part]) for part in (self.early, late))
        return grows(before, now, clear)

    def length(self, without: Set[str] = frozenset()) -> Array:
        """Return [n] the lengths in words, without these words and the sequences that consist of these signs."""

        def counts(word: str) -> bool:
            return not without >= set(word) if is_sign(word) else word not in without

        kept = {word: counts(word) for word in set().union(*self._words)}
        return np.array([sum(map(kept.__getitem__, words)) for words in self._words])


def parts_of(pattern: str) -> set[str]:
    """Return the words and signs of a pattern."""
    (parts,) = words([pattern])
    return {*parts, *(sign for part in parts if is_sign(part) for sign in part)}


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
    before, after, clear = old / early.sum(), new / late.sum(), clear_of(chance, int(np.count_nonzero(new)))
    often = np.flatnonzero((after > FREQUENT) & (after > GROWTH * before)).tolist()
    grown = {pattern: parts_of(texts.text(pattern)) for pattern in often if texts.grows(pattern, late, clear)}
    if not grown:
        return []
    plain = Effects(rewards, texts.length(), late)
    # The words of patterns lengthen a response themselves. An effect must hold with and without them.
    without = Effects(rewards, texts.length(set().union(*grown.values())), late)
    single = np.flatnonzero((after > FREQUENT) & texts.is_word).tolist()
    slopes = [(word, plain.over_run.slope(texts.having(word))) for word in single]
    asked_for = [(word, slope.value) for word, slope in slopes if slope.deviate > clear_of(chance, len(single))]
    patterns = []
    for pattern, parts in grown.items():
        has = texts.having(pattern)
        effect = plain.over_run.slope(has).value
        rivals = [word for word, value in asked_for if value >= effect and texts.text(word) not in parts]
        equal = [word for word in rivals if plain.over_run.correlation(has, texts.having(word)) < SAME]
        if len(equal) < SEVERAL:  # otherwise the reward favours many words, which is what it asks for
            explains = min(each.explained(has, clear_of(chance, len(grown))) for each in (plain, without))
            shares = float(before[pattern]), float(after[pattern])
            patterns.append(Pattern(pattern, texts.text(pattern), *shares, rewards.effect(has), explains))
    return sorted(patterns, key=lambda pattern: (-pattern.explains, pattern.text))


def expression(pattern: str, letter: str = A_LETTER) -> str:
    """Return a regular expression that finds a pattern in a text, given one for a letter in such texts."""
    # `\b` is also beside the combining marks of a word, not beside an underscore, and not between 好 and OK.
    return _expression(pattern, f"(?<!{letter})", f"(?!{letter})")


def search_expression(pattern: str) -> str:
    """Return the same as an expression for the board's search, that is for RE2, which cannot look around."""
    return _expression(pattern, f"(?:^|{NO_LETTER_RE2})", f"(?:$|{NO_LETTER_RE2})")


def _expression(pattern: str, before: str, behind: str) -> str:
    (parts,) = words([pattern])
    plain = [re.sub(r"[.^$*+?{}[\]\\|()]", r"\\\g<0>", part) for part in parts]
    begin, end = (before if is_spaced(parts[0]) else "", behind if is_spaced(parts[-1]) else "")
    between = r"\s+" if all(map(is_spaced, parts)) else r"\s*"
    found = between.join(plain)
    return found if all(map(is_sign, parts)) else f"(?i){begin}{found}{end}"


def _discarding(value: list[str], data: RunData, reading: Reading) -> list[str]:
    """Discard responses with the pattern."""
    plain = all(text.isascii() for text in data.said.texts("response") if text)
    found = expression(str(reading.words["pattern"]), r"[^\W_]" if plain else A_LETTER)
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
    "reward that is {effect} higher ({effect_sd} standard deviations), and the pattern explains {seen} of the "
    "variance: the policy has found a weakness of the reward.",
    healthy="share of the reward's variance within a prompt that a spreading pattern other than a right answer "
    "explains: below {limit}",
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
    texts, parts, answers = Texts(rows), late_parts(rows), _answers(rows)
    for late in parts:
        found = [pattern for pattern in spreading(texts, late, data.chance / len(parts)) if pattern.effect.value > 0]
        found = [pattern for pattern in found if not answers.issuperset(pattern.text.split())]
        if found and found[0].explains >= limit:
            return _spread(rows, texts, _longest(texts, found), late, is_whole=not data.turns.recorded("text"))
        most = max(most, found[0].explains if found else 0.0)
    return Reading(Share(most), False)


def _answers(rows: Rows) -> set[str]:
    """Return the right answers of one word: that they spread is what a reward asks for, though one may be frequent."""
    truth = rows.texts("ground_truth") if rows.recorded("ground_truth") else []
    return {one.strip().lower() for one in truth if one}


def _longest(texts: Texts, found: list[Pattern]) -> Pattern:
    """Return the longest of the patterns that are in the same responses as the first one, such as words of a phrase."""
    best, has = found[0], texts.having(found[0].feature)
    if texts.is_sign[best.feature]:  # whatever stands beside it is chance
        return best
    same = [one for one in found if one.explains > SAME * best.explains]
    same = [one for one in same if np.corrcoef(has, texts.having(one.feature))[0, 1] > SAME]
    return max(same, key=lambda one: len(one.text), default=best)


def _spread(rows: Rows, texts: Texts, best: Pattern, late: Array, *, is_whole: bool) -> Reading:
    """Return the reading of a pattern; ``is_whole`` where the texts are the responses, which the board searches."""
    has = texts.having(best.feature)
    share = rows.by_step(has.astype(float))
    first = since(share, share.value > max(2 * best.before, 0.1), 3)
    words: Words = {
        "pattern": best.text,
        "before": Share(best.before),
        "after": Share(best.after),
        "effect": float(best.effect.value),
        "effect_sd": float(best.effect.in_sd),
    }
    evidence = rows.highest(np.where(has & late, rows["reward"], -np.inf))
    curve = Curve(share, high=max(FREQUENT, GROWTH * best.before), name=Phrase("share of responses with the pattern"))
    affected = Affected(rows, has, search=search_expression(best.text)) if is_whole else None
    return Reading(Share(best.explains), True, first, evidence, words, curve, affected=affected)

"""The rule on responses that repeat themselves."""

import zlib
from collections.abc import Iterator
from itertools import islice

import numpy as np

from cavesson.doctor.data import RunData
from cavesson.doctor.effects import Effects, Rewards, clear_of, early_part, grows, late_parts, share_of
from cavesson.doctor.reading import Curve, Reading, Words
from cavesson.doctor.rows import Rows
from cavesson.doctor.rule import rule
from cavesson.doctor.rules.pattern import MIN_ROLLOUTS
from cavesson.doctor.series import Array, since, smoothed
from cavesson.findings.words import Phrase, Share
from cavesson.text.words import is_sign


@rule(
    number=61,
    needs=["rows.repetition|rows.response"],
    min_steps=5,
    training_only=True,
    title="The responses repeat themselves",
    cause="{seen} {what}, {before} at the start: the policy repeats itself in loops.",
    healthy="share of repeated 4-grams in a response, or share that compression saves if no tokens were recorded, and "
    "share of words that equal one of the two before: below {limit}, or below {factor} times its start; the share of "
    "responses with such a word does not grow to {factor} times its start where they get more reward and this explains "
    "{explained} of its variance",
    fix="a penalty for repetition in the reward, a smaller sampling.max_new_tokens, a reward model that has seen such "
    "loops",
    source="StackLLaMA; rlprobe",
    explains=["distinct-collapse", "truncated", "template-collapse", "kl-explosion", "pattern-spreading", "length-bias",
              "reward-falls"],
)  # fmt: skip
def repetition_loops(
    data: RunData, *, limit: float = Share(0.3), factor: float = 2.0, explained: float = Share(0.05)
) -> Reading | None:
    found = [
        reading
        for rows, values, what in _repetitions(data)
        if (reading := _repeats(rows, values, Phrase(what), limit, factor)) is not None
    ]
    rewarded = _rewarded(data, factor, explained)
    return next(
        (reading for reading in (*found, rewarded) if reading and reading.unhealthy), found[0] if found else None
    )


def _repetitions(data: RunData) -> Iterator[tuple[Rows, Array, str]]:
    """Yield how much of each response is repeated, [n], and what that is the share of."""
    some, texts = data.said, _spoken(data)
    if data.has("rows.repetition") and not data.recorded("turns.text"):
        yield data.rows, data.rows["repetition"], "of the 4-grams in a response occurred in it before"
    else:
        saved = np.array(list(map(_compressed, texts)))
        yield some, saved, "of a response is saved by compression because it repeats itself"
    if some.has("response"):
        yield (
            some,
            np.array(list(map(_returning, _words(some, texts)))),
            "of the words in a response equal one of the two before",
        )


def _spoken(data: RunData) -> list[list[str]]:
    """Return [n] the texts of each response: one, or the turns of the policy. Repetition across turns is not a loop."""
    if data.recorded("turns.text"):
        return data.turns.spoken
    return [[text or ""] for text in data.said.texts("response")]


def _repeats(rows: Rows, values: Array, what: Phrase, limit: float, factor: float) -> Reading | None:
    points = rows.by_step(values)
    if len(points) < 5:
        return None
    before = Share(points.first())
    high = max(limit, factor * before)
    first = since(points, smoothed(points).value > high, 4)
    said: Words = {"before": before, "what": what}
    curve = Curve(points, high=high)
    return Reading(Share(points.last()), first is not None, first, rows.highest(values), said, curve)


def _rewarded(data: RunData, factor: float, least: float) -> Reading | None:
    """Return a reading of the responses with a word that returns, if the reward favours them and they become more.

    Loops begin in this way: one doubled word per response is far from being a third of it.
    """
    rows = data.said
    if not (rows.has("response") and rows.has("reward")) or len(rows) < MIN_ROLLOUTS:
        return None
    texts = [[[word for word in turn if not is_sign(word)] for turn in turns] for turns in _words(rows, _spoken(data))]
    has = np.array([any(map(_returns, turns)) for turns in texts], bool)
    length = np.array([sum(map(len, turns)) for turns in texts])
    early, late, rewards = early_part(rows), late_parts(rows)[0], Rewards(rows)
    before, now = (share_of(has[part], rewards.prompt[part]) for part in (early, late))
    clear, effects = clear_of(data.chance, 1), Effects(rewards, length, late)
    unhealthy = (
        now.value > factor * before.value and grows(before, now, clear) and effects.explained(has, clear) > least
    )
    points = rows.by_step(has.astype(float))
    high = factor * before.value
    first = since(points, smoothed(points).value > high, 4) if unhealthy else None
    what = Phrase("of the responses repeat one of their last two words and get a higher reward for it")
    said: Words = {"before": Share(before.value), "what": what}
    evidence = rows.highest(np.where(late & has, rows["reward"], -np.inf))
    return Reading(Share(now.value), first is not None, first, evidence, said, Curve(points, high=high))


def _words(rows: Rows, texts: list[list[str]]) -> list[list[list[str]]]:
    """Return the words of each turn of each response."""
    found = iter(rows.cut([turn for turns in texts for turn in turns]))
    return [list(islice(found, len(turns))) for turns in texts]


def _returning(turns: list[list[str]]) -> float:
    """Return the share of words, or of signs of languages without spaces, that equal one of the two before."""
    parts = [turn for turn in turns if len(turn) > 2]
    return sum(map(_returns, parts)) / sum(map(len, parts)) if parts else np.nan


def _returns(words: list[str]) -> int:
    before = zip(words, [None, *words], strict=False)
    return sum(word in two for word, two in zip(words[1:], before, strict=False))


def _compressed(turns: list[str]) -> float:
    """Return the share of long turns that compression with zlib saves; NaN if there is none."""
    texts = [turn.encode("utf-8", "surrogatepass") for turn in turns]
    shares = [max(0.0, 1 - 2 * len(zlib.compress(text)) / len(text)) for text in texts if len(text) >= 200]
    return float(np.mean(shares)) if shares else np.nan

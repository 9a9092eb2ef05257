"""The rule on responses that switch to another language, as far as it has another script."""

import unicodedata
from collections import Counter
from functools import cache

import numpy as np

from cavesson.doctor.data import RunData
from cavesson.doctor.effects import early_part
from cavesson.doctor.reading import Curve, Reading
from cavesson.doctor.rule import rule
from cavesson.doctor.series import since, smoothed
from cavesson.findings.words import Phrase, Share

USUAL = 0.05
"""Share of the letters of the first responses from which a script is one of theirs."""
MIN_LETTERS = 8
"""Letters of a response from which its scripts count."""
OF_EAST_ASIA = frozenset(["HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "IDEOGRAPHIC", "HALFWIDTH", "BOPOMOFO"])
"""What Chinese and Japanese texts mix with their signs."""


@cache
def script(letter: str) -> str:
    """Return the script of a letter: the first word of its name in Unicode, such as LATIN or CYRILLIC."""
    first = unicodedata.name(letter, "UNNAMED").partition(" ")[0]
    return "CJK" if first in OF_EAST_ASIA else first


def scripts(text: str | None) -> Counter[str]:
    """Return the number of letters of each script in a text."""
    found: Counter[str] = Counter()
    for sign, count in Counter(text or "").items():
        if sign.isalpha():
            found[script(sign)] += count
    return found


@rule(
    number=75,
    needs=["rows.response"],
    min_steps=8,
    title="The responses switch to another language",
    cause="{seen} of the letters in the last responses are of scripts that the first ones hardly use, mostly {script}: "
    "the policy mixes languages, and the reward does not penalise it, or the sampler is broken.",
    healthy="share of the letters of scripts that are rare in the first responses: below {limit}",
    fix="reward answers in the language of the prompt, for example by the share of its script",
    source="DeepSeek-R1 2501.12948, section 2.3 (language mixing)",
    explains=["length-collapse", "distinct-collapse", "template-collapse", "length-bias", "pattern-spreading",
              "reward-falls", "kl-explosion"],
)  # fmt: skip
def language_switch(data: RunData, *, limit: float = Share(0.2)) -> Reading | None:
    rows = data.said
    each = [scripts(text) for text in rows.texts("response")]
    early = sum((one for one, is_early in zip(each, early_part(rows), strict=True) if is_early), Counter[str]())
    rare = {name for one in each for name in one if early[name] < USUAL * early.total()}
    foreign = np.array([share(one, rare) for one in each])
    points = rows.by_step(foreign)
    if len(points) < 8:
        return None
    began = since(points, smoothed(points).value > limit, 4)
    seen, is_late = Share(points.last()), rows.step >= (rows.steps[-1] if began is None else began)
    most = sum((one for one, late in zip(each, is_late, strict=True) if late), Counter[str]())
    named = max(rare, key=lambda name: (most[name], name), default="")
    evidence = rows.highest(np.where(is_late, foreign, np.nan))
    words = {"script": named.capitalize() if named != "CJK" else named}
    curve = Curve(points, high=limit, name=Phrase("share of letters of scripts that are rare at the start"))
    return Reading(seen, began is not None and seen > limit, began, evidence, words, curve)


def share(letters: Counter[str], some: set[str]) -> float:
    """Return the share of the letters of some scripts; NaN for a text with hardly any letters."""
    total = letters.total()
    return sum(letters[name] for name in some) / total if total >= MIN_LETTERS else float("nan")

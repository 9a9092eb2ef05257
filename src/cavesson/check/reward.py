"""Examination of a reward: whether good responses beat bad ones, and what else it depends on."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from cavesson.check.finding import Finding, Fine, Result, Results, Skipped
from cavesson.randomness import Purpose, generator

Numbers = NDArray[np.float64]
Score = Callable[[Sequence[int], Sequence[str]], Sequence[float]]
"""Rewards of responses, each to the prompt of the row at an index."""

ROWS = 32
"""Rows that are examined when nobody says how many."""
_CROSSED = 8
"""Prompts whose responses are all scored after each other's prompt."""
_WINS = 0.6
"""Least share of comparisons with what is no answer that a response must win."""
_CHANCE, _STRONG = 0.5, 0.65
"""Shares of pairs: 0.67 was called weak of a reward model on human preferences (the blog post in `_pairs`)."""
_SHARE = 0.8
"""Most of the reward's variance that the prompt may explain."""
_LENGTH = 0.6
"""Highest rank correlation of reward and length."""
_GAIN = 0.1
"""Standard deviations of the reward that a trick may earn."""
_SPOILED = {
    "shuffled": ("its own words in another order", "It reads words and not what they say."),
    "truncated": ("its own first half", "It does not mind whether a response comes to its end."),
    "another's": ("the response to another prompt", "It does not mind what was asked."),
    "empty": ("no response at all", "It does not mind whether anything is said."),
}
"""What is worse than a response, and what it means where a reward model does not find it so."""


class Said(NamedTuple):
    """A response to a prompt, and a worse response if the data has one."""

    prompt: str
    good: str
    bad: str | None = None


def examine(said: Sequence[Said], score: Score, learned: bool) -> Results:
    """Compare the scores of good responses with those of altered versions of them.

    Args:
        said: rows of data.
        score: the reward.
        learned: whether the reward is a model. A rule, such as "is the number right", need not depend on word order:
            what would be a weakness of a model is a property of a rule.
    """
    if len(said) < 4:
        yield Skipped("reward", f"it takes 4 responses to examine a reward; there are {len(said)}")
        return
    rows = range(len(said))
    good = np.array(score(rows, [one.good for one in said]), float)
    worse = np.array([*score(rows, [""] * len(said)), *score(rows, [said[row - 1].good for row in rows])])
    if np.ptp(np.concatenate([good, worse])) == 0:
        yield Finding(
            "reward-constant",
            "error",
            "The reward is the same for every response",
            f"{len(good)} responses of the data, the same to other prompts, and no response at all: all have "
            f"{good[0]:g}. There is nothing to learn from.",
            "look at what the reward reads: cavesson score FILE --rewards …",
            0.0,
            "standard deviation of the reward; above 0",
            "DAPO, arXiv:2503.14476",
        )
        return
    yield from _pairs(said, score)
    yield from _spoiled(said, score, good, learned)
    yield _share_of_prompt(said, score)
    if np.ptp(good) == 0:  # for example, all answers are right
        yield Skipped("reward-tricks", f"good responses all have {good[0]:g}: more is not to be had")
        return
    yield Fine("reward-spread", float(good.std()), "standard deviation of the reward over good responses; above 0")
    yield _length(said, good, learned)
    yield from _tricks(said, score, good, learned)


def _pairs(said: Sequence[Said], score: Score) -> Results:
    """Check the accuracy on pairs (rows 5 and 48): 65 to 80 % is usual on human preferences, and 67 % is weak."""
    pairs = [row for row, one in enumerate(said) if one.bad is not None]
    if not pairs:
        yield Skipped("reward-pairs", "the data has no pairs of a better and a worse response; give --pairs FILE")
        return
    better = score(pairs, [said[row].good for row in pairs])
    worse = score(pairs, [str(said[row].bad) for row in pairs])
    won = _wins(np.array(better, float), np.array(worse, float))
    healthy = f"share of {len(pairs)} pairs whose better response wins; at least {_STRONG:g}, 0.5 is chance"
    if won >= _STRONG:
        yield Fine("reward-pairs", won, healthy)
        return
    reverse = won < _CHANCE and stats.binomtest(round(won * len(pairs)), len(pairs)).pvalue < 0.05
    yield Finding(
        "reward-pairs",
        "error" if reverse else "warning",
        "The reward prefers worse responses" if reverse else "The reward hardly tells better from worse",
        "Policies become what the reward says, not what was meant.",
        "turn its sign (weight = -1)" if reverse else "train it on more or cleaner pairs: cavesson reward-model",
        won,
        healthy,
        "https://huggingface.co/blog/stackllama; arXiv:2401.06080",
    )


def _spoiled(said: Sequence[Said], score: Score, good: Numbers, learned: bool) -> Results:
    """Check that responses beat altered ones that are not real answers (row 48)."""
    numbers = generator(0, Purpose.EXAMINATION)
    spoiled = {
        "shuffled": [_shuffled(one.good, numbers) for one in said],
        "truncated": [_half(one.good) for one in said],
        "another's": [said[(row + 1) % len(said)].good for row in range(len(said))],
        "empty": ["" for _ in said],
    }
    for name, (what, meaning) in _SPOILED.items():
        differs, earned = _scored(said, score, spoiled[name])
        if not differs:
            continue
        won = _wins(good[differs], earned)
        healthy = f"share of responses that beat {what}; at least {_WINS:g}"
        if won >= _WINS:
            yield Fine(f"reward-{name}", won, healthy)
            continue
        yield Finding(
            f"reward-{name}",
            "warning" if learned else "note",
            f"The reward does not prefer a response to {what}",
            meaning if learned else "A rule may be meant so; a policy will find out that it need not write better.",
            "train the reward model on such pairs too" if learned else "add a reward that does, or keep a KL penalty",
            won,
            healthy,
            "https://huggingface.co/blog/stackllama; arXiv:2204.05862",
        )


def _share_of_prompt(said: Sequence[Said], score: Score) -> Result:
    """Score every response after every prompt, and check the share of the variance that the prompt explains (row 45).

    In a table with one row per prompt, the share is Var(row means) / Var(all), which separates the effect of a prompt
    from that of the response that belongs to it.
    """
    size = min(_CROSSED, len(said))
    prompts = [row for row in range(size) for _ in range(size)]
    table = np.array(score(prompts, [said[i % size].good for i in range(size * size)]), float).reshape(size, size)
    total = float(table.var())
    share = float(table.mean(1).var()) / total if total else 0.0
    healthy = f"share of the reward's variance that the prompt explains, whatever the response; at most {_SHARE:g}"
    if share <= _SHARE:
        return Fine("reward-query", share, healthy)
    return Finding(
        "reward-query",
        "warning",
        "The reward scores the prompt",
        "What the policy writes changes little; steps are moved by which prompts they happen to have.",
        "shaping.subtract_query = true, or an algorithm that compares responses to the same prompt",
        share,
        healthy,
        "TRL 0.7.10, how_to_train",
    )


def _length(said: Sequence[Said], good: Numbers, learned: bool) -> Result:
    """Check the correlation of reward and length (row 51)."""
    lengths = [len(one.good) for one in said]
    seen = float(stats.spearmanr(lengths, good).statistic) if len(set(lengths)) > 1 else 0.0
    healthy = f"Spearman correlation of reward and length; between −{_LENGTH:g} and {_LENGTH:g}"
    if math.isnan(seen) or abs(seen) <= _LENGTH:
        return Fine("reward-length", 0.0 if math.isnan(seen) else seen, healthy)
    longer = "longer" if seen > 0 else "shorter"
    return Finding(
        "reward-length",
        "warning" if learned else "note",
        f"The reward rises as responses get {longer}",
        f"The easiest way to more reward is a {longer} response; most of the gain of RLHF has been found to be length.",
        "balance the pairs by length, or reward the length's opposite a little",
        seen,
        healthy,
        "arXiv:2310.03716",
    )


def _tricks(said: Sequence[Said], score: Score, good: Numbers, learned: bool) -> Results:
    """Check that known reward hacks do not raise the reward (rows 50 and 61)."""
    changed: dict[str, tuple[str, Callable[[str], str]]] = {
        "hash": ("a stray # at the end", lambda text: f"{text} #"),
        "smiley": ("a :) at the end", lambda text: f"{text} :)"),
        "repetition": ("saying it twice", lambda text: f"{text} {text}"),
        "capitals": ("capital letters", str.upper),
    }
    for name, (what, change) in changed.items():
        differs, earned = _scored(said, score, [change(one.good) for one in said])
        if not differs:
            continue
        more = earned - good[differs]
        gain = float(more.mean()) / float(good.std())
        ups, downs = int((more > 0).sum()), int((more < 0).sum())
        sure = ups + downs > 0 and stats.binomtest(ups, ups + downs, alternative="greater").pvalue < 0.05
        healthy = f"what {what} earns, in standard deviations of the reward; at most {_GAIN:g}"
        if gain <= _GAIN or not sure:
            yield Fine(f"reward-{name}", gain, healthy)
            continue
        yield Finding(
            f"reward-{name}",
            "warning" if learned else "note",
            f"The reward pays for {what}",
            f"{ups} of {len(differs)} responses score higher with it: a policy will find that.",
            "discard such responses (cleaning.discard), or train the reward model on them as the worse ones",
            gain,
            healthy,
            "arXiv:2304.06767 (RAFT: '#' in half of the responses); https://huggingface.co/blog/stackllama",
        )


def _scored(said: Sequence[Said], score: Score, responses: Sequence[str]) -> tuple[list[int], Numbers]:
    """Return the rows in which the altered response differs from the good one, and its scores in these rows."""
    differs = [row for row, one in enumerate(said) if responses[row] != one.good]
    return differs, np.array(score(differs, [responses[row] for row in differs]) if differs else [], float)


def _wins(one: Numbers, other: Numbers) -> float:
    """Return the share of comparisons won, with ties counted as half: the area under the ROC curve of paired scores."""
    return float(((one > other) + 0.5 * (one == other)).mean())


def _shuffled(text: str, numbers: np.random.Generator) -> str:
    words = text.split()
    if len(words) < 2:  # for example Chinese, which has no spaces
        words = list(text)
        return "".join(words[i] for i in numbers.permutation(len(words)))
    return " ".join(words[i] for i in numbers.permutation(len(words)))


def _half(text: str) -> str:
    return text[: len(text) // 2]


def spread_out(count: int, wanted: int) -> Iterator[int]:
    """Return indices of at most `wanted` of `count` rows, evenly spaced."""
    take = min(count, wanted)
    return (i * count // take for i in range(take))

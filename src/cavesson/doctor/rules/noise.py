"""The rule on rewards that are unrelated to the response."""

from collections import Counter

import numpy as np

from cavesson.doctor.data import RunData
from cavesson.doctor.groups import mean_of, within
from cavesson.doctor.reading import Reading
from cavesson.doctor.readings import noise_of
from cavesson.doctor.rows import Rows
from cavesson.doctor.rule import Disproof, rule
from cavesson.doctor.rules.consequences import MISLED
from cavesson.doctor.rules.kl import objective
from cavesson.doctor.series import Array, Series, trend
from cavesson.findings.words import Phrase, Share
from cavesson.text.words import words

WORDS = 40
"""Number of the most frequent words that are searched for in each response."""
MIN_ROLLOUTS = 400
STILL = 0.05
"""Probability of a rise by chance below which the reward counts as still rising in the second half of a run."""
MIN_VALUES = 20
"""Different rewards: words cannot predict the reward of a verifier that has only two or three."""
MAX_ROLLOUTS = 2000
OF_ONE_PROMPT = 0.25
"""Share of the responses above which a prompt may be the text to different images or games, which are not recorded."""
MOVED = 0.05
"""KL to the reference in nats per token from which a policy has changed a lot."""
GAINED, ERRORS = 0.4, 2.0
"""Share of the largest gain that a change of the policy can bring, above which a reward may depend on the response,
and the standard errors by which its gain must be below that."""
UNDECIDED = Phrase(
    "the reward does not rise, and neither equal responses nor length and words tell whether it depends on the "
    "response; score a few responses twice"
)
OVER = Phrase(
    "the reward has stopped rising, and neither equal responses nor length and words tell whether it still depends on "
    "the response; score a few of the last responses twice"
)
LOST = Phrase(
    "length and words of a response predict its reward at first, but not at the end of the run; score a few of the "
    "last responses twice"
)


def rises_to_the_end(data: RunData) -> Phrase | None:
    """Say that the reward is not noise if it rises until the end of the run, because the policy learns from it."""
    is_known = data.has("rows.reward") and data.has("rows.response")
    return (
        Phrase("the reward rises to the end of the run, as noise does not") if is_known and not _silent(data) else None
    )


@rule(
    number=48,
    needs=["rows.reward", "rows.response"],
    min_steps=5,
    severity="error",
    title="The reward is unrelated to the response",
    cause="{what}: the scores are shuffled among the responses, or are noise. The unexplained variance is {seen} of "
    "the whole.",
    healthy="share of the reward's variance that is left among equal responses to a prompt: below {equals}; or, if the "
    "policy changes a lot and the reward hardly rises, share that length and words do not explain: below {others}",
    fix="check the order in which scores come back; cavesson check tests the reward model on pairs",
    source="StackLLaMA; Secrets of RLHF II 2401.06080; own statistic",
    explains=["kl-flat", *MISLED],
    disproof=Disproof(
        ("rows.ground_truth", "rows.kl_k1"),
        "equal responses had different right answers, or the policy has hardly moved, so that little was tried",
    ),
    absent=rises_to_the_end,
    windows=True,
)
def reward_is_noise(data: RunData, *, equals: float = Share(0.5), others: float = Share(0.98)) -> Reading | None:
    rows = data.sample.rows
    # A step in which all rewards are equal, as those of a dead verifier, does not tell responses apart.
    spread = np.interp(rows.step, *rows.by_step(rows["reward"], np.std))
    rows = rows.where(spread > 0) if np.any(spread > 0) else rows
    reward = _trimmed(within(rows, rows["reward"]))
    left, places, apart = _left_among_equals(rows)
    course: Series | None = rows.by_step(apart)
    what, unhealthy = "Equal responses to the same prompt get different rewards", left > equals and _lasts(rows, equals)
    if np.isnan(left) and data.whole is data:  # later, the reward may have risen as far as it can
        early = rows.step <= np.median(rows.steps)  # responses still differ
        left, places, course = _left_by_words(rows, reward, early), np.arange(len(rows)), None
        what = "The policy changes but the reward does not rise, and neither length nor words of a response predict it"
        unhealthy = left > others and _moves_in_vain(data)
    silent = None if unhealthy or left <= others or course is not None else _silent(data)
    if np.isnan(left) and not (silent and data.whole is data and len(rows) >= MIN_ROLLOUTS):
        return None
    undecided = silent or (LOST if course is None and _is_lost(rows, reward, left, others) else None)
    words, first = {"what": Phrase(what)}, int(rows.steps[0])
    return Reading(Share(left), unhealthy, first, rows.evidence(places), words, course=course, undecided=undecided)


def _lasts(rows: Rows, equals: float) -> bool:
    """Return whether equal responses get different rewards in a half of the run too, not only before and after a step.

    A half in which too few responses are equal does not show that they do not.
    """
    is_early = rows.step <= np.median(rows.steps)
    return not all(_left_among_equals(rows.where(part))[0] <= equals for part in (is_early, ~is_early))


def _trimmed(reward: Array) -> Array:
    """Return the rewards with outliers clipped, as a few of them could dominate a variance.

    What is as far outside the middle 90 % as these reach is an outlier: in a normal distribution, one in a million.
    """
    lowest, low, high, highest = np.nanquantile(reward, [0.02, 0.05, 0.95, 0.98])
    if low == high:  # the rare ones are the only ones that differ
        return np.asarray(np.clip(reward, lowest, highest))
    return np.asarray(np.clip(reward, low - (high - low), high + (high - low)))


def _left_among_equals(rows: Rows) -> tuple[float, Array, Array]:
    """Return the share of variance that is left among equal responses to a prompt, and those that differ the most.

    The third value is [n] the distance of each reward from the mean of its equals, NaN where there are none.

    The share is relative to the variance of comparable responses: siblings, whose prompt and step are the same. If too
    few siblings are equal, the responses to the same prompt at any step are compared, and finally all responses.

    One text can be the prompt to different images or games. The recorded answers must then be equal, too; without
    them, responses to a prompt that makes up much of the run are not compared.
    """
    nothing = float("nan"), np.arange(0), np.full(len(rows), np.nan)
    prompts, responses, truths = (_numbered(rows.texts(name)) for name in ("prompt", "response", "ground_truth"))
    is_one = rows.has("prompt") and np.bincount(prompts).max(initial=0) > OF_ONE_PROMPT * len(rows)
    if is_one and not rows.has("ground_truth"):
        return nothing
    beside = (rows.group, prompts, np.zeros(len(rows), np.int64))
    found = (_left_beside(rows["reward"], among, np.stack([among, prompts, responses, truths])) for among in beside)
    return next((one for one in found if np.isfinite(one[0])), nothing)


def _left_beside(reward: Array, among: Array, keys: Array) -> tuple[float, Array, Array]:
    """Do the same as ``_left_among_equals`` within the groups ``among`` [n]; rollouts with equal ``keys`` are equal."""
    equal = np.unique(keys, axis=1, return_inverse=True)[1].reshape(-1)
    different = np.bincount(among[np.unique(equal, return_index=True)[1]], minlength=int(among.max(initial=-1)) + 1)
    there = np.flatnonzero(np.isfinite(reward) & (different[among] > 1))
    equal, among = equal[there], among[there]
    pairs = len(there) - len(np.unique(equal))
    apart = np.full(len(reward), np.nan)
    if pairs < 20:
        return float("nan"), there[:0], apart
    clipped = _trimmed(reward[there])  # an outlier would move the mean of all that it is compared with
    values = _trimmed(clipped - mean_of(among, clipped))
    inside = np.sum((values - mean_of(equal, values)) ** 2) / pairs
    whole = np.sum((values - mean_of(among, values)) ** 2) / (len(there) - len(np.unique(among)))
    if whole < 1e-10:
        return float("nan"), there[:0], apart
    away = np.abs(values - mean_of(equal, values))
    most = equal[np.argmax(away)]
    apart[there] = np.where(np.bincount(equal)[equal] > 1, away, np.nan)
    # Repeated responses can vary more than the others; the share is then 1.
    return min(1.0, float(inside / whole)), there[equal == most], apart


def _numbered(texts: list[str | None]) -> Array:
    known: dict[str | None, int] = {}
    return np.array([known.setdefault(text, len(known)) for text in texts], np.int64)


def _is_lost(rows: Rows, reward: Array, left: float, limit: float) -> bool:
    """Return whether words leave less of the variance than the limit at first, but more in the last third."""
    return left <= limit < _left_by_words(rows, reward, rows.step > np.quantile(rows.steps, 2 / 3))


def _left_by_words(rows: Rows, reward: Array, part: Array) -> float:
    """Return the share of variance that a linear fit on length and words leaves, on rollouts that were not fitted.

    Args:
        rows: The rollouts.
        reward: [n] their rewards − the mean of those that they are compared with.
        part: [n] which of them are looked at.
    """
    some = np.flatnonzero(part & np.isfinite(reward))
    some = some[np.linspace(0, len(some) - 1, min(len(some), MAX_ROLLOUTS)).astype(int)]
    different = len(np.unique(rows["reward"][some]))
    if len(some) < MIN_ROLLOUTS or different < MIN_VALUES or np.var(reward[some]) < 1e-10:
        return float("nan")
    texts = rows.texts("response")
    said = words([texts[i] or "" for i in some])
    common = [word for word, _ in Counter(word for one in said for word in dict.fromkeys(one)).most_common(WORDS)]
    has = np.array([[*(word in one for word in common), np.log1p(len(one))] for one in said], float)
    has, goal = has - has.mean(0), reward[some]
    left = 0.0
    for half in (np.arange(len(goal)) % 2 == 0, np.arange(len(goal)) % 2 == 1):
        ridge = has[half].T @ has[half] + 5 * np.eye(has.shape[1])
        fitted = np.linalg.solve(ridge, has[half].T @ (goal[half] - goal[half].mean()))
        left += float(np.sum((goal[~half] - goal[half].mean() - has[~half] @ fitted) ** 2))
    # On rollouts that were not fitted, a fit without any relation is worse than the mean, so the share is limited to 1.
    return min(1.0, left / float(np.sum((goal - goal.mean()) ** 2)))


def _rises(data: RunData) -> bool:
    """Return whether the reward rises, as it does not if it is unrelated to what the policy does."""
    found = trend(data.rows.mean("reward"))
    return found.change > 0 and found.p < data.chance


def _silent(data: RunData) -> Phrase | None:
    """Return what is not known where nothing but a rising reward would show that it depends on the response."""
    if not _rises(data):
        return UNDECIDED
    points = data.rows.mean("reward")
    late = trend(points.after(int(np.median(points.step))))
    return None if data.whole is not data or (late.change > 0 and late.p < STILL) else OVER


def _moves_in_vain(data: RunData) -> bool:
    """Return whether the policy changes a lot, but the reward gains far less than such a change can bring.

    A policy whose KL to the reference is k gains at most √(2k) standard deviations of the reward, if that is normal.

    Source: Gao et al. 2210.10760, where √KL measures how far a policy is optimised, for the same reason.
    """
    reward, kl = data.rows.mean("reward"), objective(data)
    if len(reward) < 10 or not len(kl) or not data.has("rows.length"):
        return False
    if kl.last() <= MOVED * float(np.nanmean(data.rows["length"])) or _rises(data):
        return False
    spread = float(np.nanstd(within(data.rows, data.rows["reward"])))
    # The standard error of the rise of a line through S points with noise σ is σ·√(12 / S).
    gain = trend(reward).change + ERRORS * noise_of(reward) * np.sqrt(12 / len(reward))
    return bool(gain < GAINED * np.sqrt(2 * kl.last()) * spread)

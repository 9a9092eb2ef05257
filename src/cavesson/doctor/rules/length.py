"""Rules on how responses end, and on their length."""

import numpy as np

from cavesson.doctor.data import RunData
from cavesson.doctor.finding import Curve, Reading, Share, Words
from cavesson.doctor.groups import within
from cavesson.doctor.rule import rule
from cavesson.doctor.rules.consequences import CRITIC
from cavesson.doctor.series import Series, earliest, since, smoothed, trend


def _cut(data: RunData) -> Series:
    """Return by step the share of responses that were cut at the length limit."""
    rows = data.rows
    if data.has("rows.finish_reason"):
        return rows.by_step(rows.says("finish_reason", "length").astype(float))
    return data.metric("finish/length")


@rule(
    row=64,
    needs=["rows.finish_reason|steps.finish/length"],
    least_steps=5,
    title="Responses are cut off",
    cause="{share} of the responses end at the length limit without an end, {before} did at the start: the reward sees "
    "half answers, and nothing rewards coming to an end.",
    healthy="share of responses cut at the length limit: below 50 %, and not growing by 25 %; more, where they "
    "earn more than the others",
    fix='a larger sampling.max_new_tokens, shaping.missing_eos_penalty, or grpo.overlong = "penalty"',
    source="DAPO 2503.14476; rldoctor; rlprobe; miles",
    explains=["length-bias"],
)
def truncated(data: RunData) -> Reading | None:
    points = _cut(data)
    if len(points) < 5:
        return None
    before = points.first()
    # If most responses are cut from the start, that is by design; only growth is a problem.
    smooth, high = smoothed(points), max(0.5, before + 0.25)
    first = None if _longer_pays(data) else since(smooth, smooth.value > high, 4)
    return Reading(
        Share(points.last()),
        first is not None and points.last() > high,
        first,
        data.step_evidence(points.step[-1:]),
        {"share": Share(points.last()), "before": Share(before)},
        curve=Curve(points, high=high),
    )


def _longer_pays(data: RunData) -> bool:
    """Return whether truncated responses earn more than others to the same prompt, so that the limit is not too low."""
    if not (data.has("rows.finish_reason") and data.has("rows.reward")):
        return False
    cut, reward = data.rows.says("finish_reason", "length"), within(data.rows, data.rows["reward"])
    known = np.isfinite(reward)
    if not (cut & known).any() or not (~cut & known).any():
        return False
    return bool(reward[cut & known].mean() - reward[~cut & known].mean() > 0.1 * np.std(reward[known]))


@rule(
    row=65,
    needs=["rows.finish_reason", "tokens.token_id"],
    severity="error",
    title="Ended responses count as cut off",
    cause="{seen} of the responses that are said to be cut end in the same token (id {token}), long before the limit "
    "or at different lengths: it is an end token that the trainer does not know.",
    healthy="share of cut responses that end in the same token before the length limit: 0, at most 10 %",
    fix="sampling.eos_token_ids: name all end tokens of the model's generation config",
    source="TRL pull request 7039",
    explains=["truncated", "reward-falls"],
)
def false_truncation(data: RunData) -> Reading | None:
    sample = data.sample
    cut = sample.rows.says("finish_reason", "length") & (sample.length > 0)
    if cut.sum() < 20:
        return None
    limit = float(data.setting("config.sampling.max_new_tokens") or sample.length[cut].max())
    short = cut & (sample.length < limit)
    last = np.full(len(sample.rows), np.nan)
    last[sample.line[sample.last]] = sample["token_id"][sample.last]
    ids, count = np.unique(last[short], return_counts=True)
    share = float(count.max() / cut.sum()) if len(count) else 0.0
    sick = share > 0.1 and count.max() > 0.8 * short.sum() and count.max() >= 10
    words: Words = {"token": float(ids[np.argmax(count)]) if len(ids) else 0.0}
    return Reading(
        Share(share),
        sick,
        earliest(sample.rows.step[short]),
        sample.evidence(np.flatnonzero(short)),
        words,
        curve=Curve(sample.rows.by_step(np.where(cut, short, np.nan)), 0.0, 0.0),
    )


@rule(
    row=66,
    needs=["rows.finish_reason", "tokens.token_id", "info.eos_token_ids", "tokens.mask"],
    severity="error",
    least_steps=5,
    title="The end token is not trained",
    cause="In {seen} of the responses that ended, the end token does not count: the mask drops it with the padding, "
    "and the policy never learns to stop.",
    healthy="share of ended responses whose end token is masked or missing: 0, at most 5 %",
    fix="a padding token of its own, or a mask that keeps the first end token",
    source="TRL issue 2708; TRL's PPO page",
    explains=["truncated", "length-exploited", "reward-position", "reward-accounting"],
)
def end_not_trained(data: RunData) -> Reading | None:
    sample = data.sample
    ended = sample.rows.says("finish_reason", "eos")
    if ended.sum() < 10:
        return None
    ends = np.isin(sample["token_id"], np.array(data.setting("eos_token_ids"), np.float64)) & sample.trained
    has = np.bincount(sample.line[ends], minlength=len(sample.rows)) > 0
    without = np.flatnonzero(ended & ~has)
    share = len(without) / int(ended.sum())
    return Reading(
        Share(share),
        share > 0.05,
        earliest(sample.rows.step[without]),
        sample.evidence(without),
        curve=Curve(sample.rows.by_step(np.where(ended, ~has, np.nan)), 0.0, 0.0),
    )


@rule(
    row=67,
    needs=["rows.length"],
    least_steps=8,
    title="The responses shrink to nothing",
    cause="The typical response shrinks from {before} to {seen} tokens: a penalty, a value bias or a negative KL makes "
    "short answers pay.",
    healthy="typical length, in tokens: above 0.4 of its start",
    fix='cleaning.discard = "too_short" with a low cleaning.discard_reward; a lower kl.coef if the penalty decides',
    source="VC-PPO 2503.01491; MedicalGPT issue 374",
    explains=["distinct-collapse", "entropy-collapse", "template-collapse", "zero-variance-groups", "zero-gradient",
              "kl-explosion", "echo-trap", "reward-exhausted", *CRITIC],
)  # fmt: skip
def length_collapse(data: RunData) -> Reading | None:
    points = data.rows.by_step(data.rows["length"], lambda values: float(np.median(values)))
    if len(points) < 8:
        return None
    before = points.first()
    sick = points.last() < 0.4 * before and trend(points).p < 0.01
    return Reading(
        points.last(),
        sick,
        since(points, points.value < 0.8 * before, 3),
        data.step_evidence(points.step[-1:]),
        {"before": before},
        curve=Curve(points, low=0.4 * before),
    )

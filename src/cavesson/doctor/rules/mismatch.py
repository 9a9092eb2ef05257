"""Rules on disagreement between sampler and trainer, due to engines, kernels or weights that were not synchronised."""

import numpy as np

from cavesson.doctor.data import RunData
from cavesson.doctor.finding import Curve, Phrase, Reading, Share, Words
from cavesson.doctor.rule import rule
from cavesson.doctor.rules.consequences import MISMATCH
from cavesson.doctor.sample import TENTHS, Sample, by_tenth
from cavesson.doctor.series import Array, Series, earliest, series, since, together, trend

INVESTIGATE = 1.03
"""Mean of e^|δ| from which to look for the cause: three times what is usual; NeMo-RL's guide says 1.05."""


def _gap(sample: Sample) -> Array:
    """Return [N] |log-probability of the trainer − of the sampler|, NaN for unknown and untrained tokens."""
    return np.where(sample.trained, np.abs(sample["sampler_gap"]), np.nan)


@rule(
    row=24,
    needs=["tokens.sampler_logprob", "tokens.logprob"],
    title="Sampler and trainer disagree on the log-probabilities",
    cause="The sampler's log-probabilities differ from the trainer's by δ so much that e^|δ| is {seen} on average: "
    "other kernels, precision or routing. The trainer learns from samples of another policy than it thinks.",
    healthy="mean e^|δ| per token: below 1.03 (|δ| is usually 0.01 to 0.02 nats)",
    fix="same dtype on both sides, a float32 output layer, or truncated importance sampling (grpo.importance = 2.0)",
    source="NeMo-RL, guides/grpo.md; verl, rollout_corr.md; TRL issue 5312",
    explains=["clip-fraction-high", "ratio-blow-up", "gradient-spike", "mismatch-growing", "mismatch-rare-tokens"],
)
def sampler_mismatch(data: RunData) -> Reading | None:
    gap = _gap(data.sample)
    points = data.sample.mean_by_step(np.exp(np.minimum(gap, 20)))
    if not len(points):
        return None
    first = since(points, points.value > INVESTIGATE, min(3, len(points)))
    return Reading(
        float(np.median(points.value)),
        first is not None,
        first,
        data.sample.worst(gap),
        curve=Curve(points, 1.0, INVESTIGATE),
    )


@rule(
    row=25,
    needs=["tokens.sampler_logprob", "tokens.logprob"],
    least_steps=10,
    title="The disagreement of sampler and trainer grows",
    cause="Their log-probabilities differ by {before} nats per token at the start and by {seen} at the end: learning "
    "from slightly wrong samples makes the next ones more wrong.",
    healthy="mean difference |δ| per token at the end, in nats: below 3 times that of the start, or below 0.02",
    fix="lower optimizer.learning_rate, synchronise the sampler every step, correct by importance sampling "
    "(grpo.importance = 2.0)",
    source="prime-rl, docs/training.md; 2512.23087",
)
def mismatch_growing(data: RunData) -> Reading | None:
    points = data.sample.mean_by_step(_gap(data.sample))
    if len(points) < 10:
        return None
    before, now = max(points.first(), 1e-4), points.last()
    sick = now > 3 * before and now > 0.02 and trend(points).p < 0.01 and trend(points).change > 0
    return Reading(
        now,
        sick,
        since(points, points.value > 2 * before, 5),
        data.step_evidence(points.step[-1:]),
        {"before": before},
        curve=Curve(points, high=3 * before),
    )


@rule(
    row=26,
    needs=["tokens.sampler_logprob", "tokens.logprob"],
    severity="error",
    least_steps=6,
    title="The sampler's weights are old",
    cause="Sampler and trainer agree {when} and then drift apart, up to {seen} nats per token{frozen}: new weights do "
    "not reach the sampler.",
    healthy="mean difference of the worst step, in nats: about that of the steps that agree best",
    fix="copy the weights to the sampler after every update, and compare a digest of both",
    source="TRL issue 5312 and pull request 5313; open-instruct issue 1473",
    explains=["clip-fraction-high", "ratio-blow-up", "gradient-spike", "too-off-policy", "negative-kl",
              "likelihood-displacement", *MISMATCH],
)  # fmt: skip
def sampler_stale(data: RunData) -> Reading | None:
    sample = data.sample
    points = sample.mean_by_step(_gap(sample))
    if len(points) < 6:
        return None
    agree = np.quantile(points.value, 0.1)
    typical = float(np.median(points.value))
    drifting = typical > 0.005 and typical > 8 * max(float(agree), 1e-5)
    starts_equal = points.value[0] < 0.2 * typical
    stays = _distance_to_reference(sample)
    frozen = stays is not None and stays < 0.2
    sick = (drifting and starts_equal) or (frozen and typical > 0.005)
    words: Words = {
        "when": Phrase("at the first step" if starts_equal else "at some steps"),
        "frozen": Phrase(", and what it samples from is still the reference" if frozen else ""),
    }
    first = since(points, points.value > max(0.01, 3 * float(points.value.min())), 3)
    return Reading(
        float(points.value.max()),
        sick,
        first,
        data.step_evidence([first]),
        words,
        curve=Curve(points),
    )


def _distance_to_reference(sample: Sample) -> float | None:
    """Return the distance of the sampler from the reference, relative to that of the policy, late in the run."""
    late = sample.trained & (sample.step > np.median(sample.rows.steps))
    mine = late & np.isfinite(sample["log_ratio"]) & np.isfinite(sample["sampler_gap"])
    if mine.sum() < 50:
        return None
    policy = float(np.abs(sample["log_ratio"][mine]).mean())
    sampler = float(np.abs(sample["sampler_logprob"] - sample["ref_logprob"])[mine].mean())
    return sampler / policy if policy > 0.005 else None


@rule(
    row=27,
    needs=["tokens.ref_logprob"],
    severity="error",
    least_steps=4,
    title="The sampler writes garbage from one step to the next",
    cause="From step {step} on, the reference finds the responses {seen} nats per token less likely than before: the "
    "weights in the sampler are broken (part of them loaded, another layout).",
    healthy="rise of −log π_ref per token within one step: below 2 nats",
    fix="compare a digest of the weights after each synchronisation; sample one greedy answer before going on",
    source="SkyRL issue 1680; verl issues 7904, 7978",
    explains=["sampler-mismatch", "mismatch-tail", "retokenised", "entropy-explosion", "kl-explosion", "sampler-stale",
              "reward-falls", "negative-kl", "mismatch-growing"],
)  # fmt: skip
def garbled(data: RunData) -> Reading | None:
    sample = data.sample
    # Text of a diverged policy is improbable only to the reference; text of a broken sampler is improbable to both.
    scores = [sample["ref_logprob"], *([sample["logprob"]] if sample.has("logprob") else [])]
    points, *others = together(*(sample.mean_by_step(-score) for score in scores))
    if len(points) < 4:
        return None
    rise = np.min([_rise(one.value) for one in (points, *others)], axis=0)
    at = int(np.argmax(rise))
    sick = bool(rise[at] > 2)
    step = int(points.step[at + 1])
    return Reading(
        float(rise[at]),
        sick,
        step,
        data.step_evidence([step]),
        {"step": step},
        curve=Curve(Series(points.step[1:], rise), high=2.0),
    )


def _rise(values: Array) -> Array:
    """Return [S - 1] how far each value and the next one exceed the previous ones; one unusual batch is not enough."""
    before = np.array([np.median(values[max(0, i - 5) : i]) for i in range(1, len(values))])
    return np.asarray(np.minimum(values[1:], np.append(values[2:], np.inf)) - before)


@rule(
    row=28,
    needs=["tokens.sampler_logprob", "tokens.logprob"],
    title="A few tokens carry the whole disagreement of sampler and trainer",
    cause="{seen} of the tokens differ by more than 1 nat, while the median differs by {median}: single tokens are "
    "computed differently (expert routing, a broken position).",
    healthy="share of tokens with |δ| > 1 nat: below 0.1 %, or a median above 0.05 nats (all differ)",
    fix='replay the router\'s choices, grpo.ratio = "sequence" (GSPO), or leave such tokens out of the loss',
    source="2507.18071; 2510.23027; NeMo-RL, guides/grpo.md",
    explains=["ratio-blow-up", "gradient-spike", "sampler-mismatch"],
)
def mismatch_tail(data: RunData) -> Reading | None:
    gap = _gap(data.sample)
    known = np.flatnonzero(np.isfinite(gap))
    if len(known) < 1000:
        return None
    share, median = float(np.mean(gap[known] > 1)), float(np.median(gap[known]))
    sick = share > 1e-3 and median < 0.05
    return Reading(
        Share(share),
        sick,
        earliest(data.sample.step[known[gap[known] > 1]]),
        data.sample.worst(gap),
        {"median": median},
        curve=Curve(data.sample.mean_by_step(np.where(np.isfinite(gap), gap > 1, np.nan)), high=1e-3),
    )


@rule(
    row=29,
    needs=["tokens.sampler_logprob", "tokens.logprob"],
    title="Improbable tokens disagree the most",
    cause="On the least probable tenth of the tokens sampler and trainer differ by {seen} nats, {times} times as "
    "much as on the others: their ratios blow up first.",
    healthy="mean |δ| on the least probable tenth of the tokens: below 0.1 nats, or 5 times that of the others",
    fix="cap the importance weights (grpo.importance = 2.0), or leave out tokens below a probability",
    source="When Speed Kills Stability (2025)",
    explains=["ratio-blow-up"],
)
def mismatch_rare_tokens(data: RunData) -> Reading | None:
    sample, gap = data.sample, _gap(data.sample)
    known = np.flatnonzero(np.isfinite(gap))
    if len(known) < 1000:
        return None
    edge = np.quantile(sample["sampler_logprob"][known], 0.1)
    rare = sample["sampler_logprob"][known] <= edge
    low, rest = float(gap[known][rare].mean()), float(gap[known][~rare].mean())
    sick = low > 0.1 and low > 5 * rest
    worst = sample.worst(np.where(sample["sampler_logprob"] <= edge, gap, np.nan))
    return Reading(
        low,
        sick,
        int(sample.rows.steps[0]),
        worst,
        {"times": low / max(rest, 1e-9)},
        curve=Curve(by_tenth(sample["sampler_logprob"], gap), high=0.1, along=TENTHS),
    )


@rule(
    row=30,
    needs=["rows.policy_version"],
    title="Rollouts are learned from long after they were sampled",
    cause="A tenth of the rollouts is at least {seen} steps old when it is learned from.",
    healthy="age of the oldest tenth of the rollouts, in steps: at most 8",
    fix="a shorter queue between sampling and training",
    source="prime-rl's default",
    explains=["clip-fraction-high", "update-kl-large", "negative-kl", *MISMATCH],
)
def too_off_policy(data: RunData) -> Reading | None:
    age = data.rows.step - data.rows["policy_version"]
    age = np.where(np.isfinite(age), age, np.nan)
    if np.isnan(age).all():
        return None
    points = data.rows.by_step(age, lambda values: float(np.quantile(values, 0.9)))
    # The age grows from the first steps on, long before it exceeds the limit.
    first = since(points, points.value > 1, 3) if since(points, points.value > 8, 3) is not None else None
    return Reading(
        points.last(),
        first is not None,
        first,
        data.step_evidence([first]),
        curve=Curve(points, 0.0, 8.0),
    )


@rule(
    row=31,
    needs=["tokens.sampler_logprob", "tokens.logprob"],
    title="Sampler and trainer compute in different precision",
    cause="From the first step the probabilities of sampler and trainer correlate at {seen} only, off equally in both "
    "directions: rounding, most often in the output layer.",
    healthy="correlation of the probabilities at the first step: above 0.99, or off to one side",
    fix="compute the output layer (lm_head) in float32 on both sides; float16 instead of bfloat16",
    source="MiniMax-M1 2506.13585; 2510.26788",
    explains=["sampler-mismatch", "mismatch-rare-tokens"],
)
def precision_noise(data: RunData) -> Reading | None:
    sample = data.sample
    mine = sample.trained & (sample.step == sample.rows.steps[0]) & np.isfinite(sample["sampler_gap"])
    if mine.sum() < 100:
        return None
    ours, theirs = np.exp(sample["logprob"][mine]), np.exp(sample["sampler_logprob"][mine])
    if ours.std() == 0 or theirs.std() == 0:
        return None
    found = float(np.corrcoef(ours, theirs)[0, 1])
    balance = float(np.mean(sample["sampler_gap"][mine] > 0))
    sick = found < 0.99 and 0.25 < balance < 0.75
    off = np.full(len(sample), np.nan)
    off[mine] = np.abs(ours - theirs)
    return Reading(
        found, sick, int(sample.rows.steps[0]), sample.worst(off), curve=Curve(_correlation(sample), low=0.99)
    )


def _correlation(sample: Sample) -> Series:
    """Return by step the correlation between the token probabilities of sampler and trainer."""
    known = sample.trained & np.isfinite(sample["sampler_gap"])
    steps, start = np.unique(sample.step[known], return_index=True)
    both = (np.split(np.exp(sample[name][known]), start[1:]) for name in ("logprob", "sampler_logprob"))
    return series(steps, np.array([np.corrcoef(ours, theirs)[0, 1] for ours, theirs in zip(*both, strict=True)]))


@rule(
    row=9,
    needs=["tokens.sampler_logprob", "tokens.logprob"],
    severity="error",
    title="Responses are tokenised anew between sampling and training",
    cause="In {seen} of the responses sampler and trainer agree up to some token and disagree wildly from there on: "
    "text was handed over, and tokenised anew it became other tokens.",
    healthy="share of responses that agree to 0.1 nats up to a token and differ by more than 1 nat after it: below 1 "
    "%, or hardly any that agree to the end",
    fix="hand token ids from the sampler to the trainer, never text",
    source="vLLM blog, Agent Lightning (2025)",
    explains=["sampler-mismatch", "mismatch-tail", "mismatch-rare-tokens"],
)
def retokenised(data: RunData) -> Reading | None:
    sample = data.sample
    found, looked, agree = [], 0, 0
    for line, values in _responses(sample, _gap(sample)):
        values = values[np.isfinite(values)]
        if len(values) < 8:
            continue
        looked += 1
        agree += values.max() < 0.1
        jump = int(np.argmax(values > 1.0)) if (values > 1.0).any() else 0
        if jump >= 2 and values[:jump].max() < 0.1 and len(values) - jump >= 3 and np.median(values[jump:]) > 0.5:
            found.append(line)
    if not looked:
        return None
    share = len(found) / looked
    # If hardly any response agrees throughout, the two policies differ, and tokenisation is not the cause.
    sick = share > 0.01 and len(found) >= 3 and agree > 0.5 * looked
    rows = np.array(found, np.int64)
    return Reading(
        Share(share),
        sick,
        earliest(sample.rows.step[rows]),
        sample.evidence(rows),
        curve=Curve(sample.rows.by_step(np.isin(np.arange(len(sample.rows)), rows).astype(float)), high=0.01),
    )


def _responses(sample: Sample, values: Array) -> list[tuple[int, Array]]:
    lines, start = np.unique(sample.line, return_index=True)
    return list(zip(lines.tolist(), np.split(values, start[1:]), strict=True)) if len(lines) else []

"""Rules on disagreement between sampler and trainer, due to engines, kernels or weights that were not synchronised."""

from functools import partial

import numpy as np

from cavesson.doctor.data import RunData
from cavesson.doctor.reading import Curve, Reading
from cavesson.doctor.readings import exceeds
from cavesson.doctor.rule import Disproof, rule
from cavesson.doctor.rules.consequences import MISMATCH
from cavesson.doctor.rules.invariants import is_exact
from cavesson.doctor.rules.sampling import NOISE, SURPRISE, is_from_start, surprise_gap
from cavesson.doctor.sample import TENTHS, Sample, by_tenth
from cavesson.doctor.series import Array, Series, earliest, series, since, smoothed, together, trend
from cavesson.findings.words import Phrase, Share

LESS_LIKELY = Phrase(
    "On average, the policy gives the sampled tokens a lower probability than tokens that it would sample itself"
)
MORE_LIKELY = Phrase(
    "From a later step on, the policy gives the sampled tokens a higher probability than tokens that it would sample "
    "itself"
)
GAP = Phrase("difference of the log-probabilities of sampler and trainer, in nats per token")
FOLLOWS = 8
"""Steps by which the sampler's weights may be behind those that learn; prime-rl drops rollouts that are older."""
AGREES = 0.1
"""Disagreement on what new weights sample, relative to that on what older ones do, that is none."""


def _gap(sample: Sample) -> Array:
    """Return [N] |log-probability of the trainer − of the sampler|, NaN for unknown and untrained tokens."""
    return np.where(sample.trained, np.abs(sample["sampler_gap"]), np.nan)


def _mean_gap(data: RunData) -> Series:
    return data.sample.mean_by_step(_gap(data.sample))


@rule(
    number=24,
    needs=["tokens.logprob", "tokens.sampler_logprob|tokens.entropy"],
    title="Sampler and trainer disagree on the log-probabilities",
    cause="{what}: different kernels, precision or routing, old weights, or a temperature or filter that only one of "
    "them applies. The trainer learns from samples of another policy than it assumes.",
    healthy="mean e^|δ| per token, where δ is the difference between the log-probabilities of sampler and trainer: "
    "below {limit} in float32, below {rounded} otherwise (|δ| is usually 0.01 to 0.02 nats); if the sampler's are not "
    "recorded, surprise (−log π) − entropy, in nats per token: at most {surprise}, or within its noise",
    fix="same dtype and sampling settings on both sides, new weights for the sampler after every update, a float32 "
    "output layer[, or truncated importance sampling (grpo.importance = 2.0)]",
    source="NeMo-RL, guides/grpo.md; verl, rollout_corr.md; TRL issue 5312",
    explains=["clip-fraction-high", "ratio-blow-up", "gradient-spike", "mismatch-growing", "mismatch-rare-tokens",
              "negative-kl", "distinct-collapse"],
    windows=True,
)  # fmt: skip
def sampler_mismatch(
    data: RunData, *, limit: float = 1.03, rounded: float = 1.05, surprise: float = SURPRISE
) -> Reading | None:
    if not data.has("tokens.sampler_logprob"):
        return _too_surprising(data, surprise)
    gap = _gap(data.sample)
    points = data.sample.mean_by_step(np.exp(np.minimum(gap, 20)))
    if not len(points):
        return None
    # The limit is three times the usual difference. In bfloat16, or if it is not known, it is that of NeMo-RL's guide.
    limit = limit if is_exact(data) else rounded
    first = since(points, points.value > limit, min(3, len(points)))
    seen = float(np.median(points.after(first).value))
    what = Phrase("The log-probabilities of sampler and trainer differ by δ, and the mean of e^|δ| is not 1")
    curve = Curve(points, 1.0, limit)
    return Reading(seen, first is not None, first, data.sample.worst(gap), {"what": what}, curve)


def _too_surprising(data: RunData, limit: float) -> Reading | None:
    """Compare the surprise of the sampled tokens with the entropy, which equals its mean if the policy sampled them.

    A filter or a low temperature makes them less surprising from the first step on; other rules find these.
    """
    sample, gap = data.sample, surprise_gap(data.sample)
    if gap is None:
        return None
    points, (mean, error) = sample.mean_by_step(-sample["logprob"] - sample["entropy"]), gap
    unhealthy = abs(mean) > max(NOISE * error, limit) and (mean > 0 or not is_from_start(points, mean))
    first = since(points, smoothed(points).value * np.sign(mean) > abs(mean) / 2, 3) if unhealthy else None
    name = Phrase("surprise (−log π) − entropy, in nats per token")
    what, low, high = (LESS_LIKELY, None, limit) if mean > 0 else (MORE_LIKELY, -limit, None)
    curve = Curve(points, low, high, name=name)
    return Reading(mean, unhealthy, first, data.step_evidence([first]), {"what": what}, curve)


@rule(
    number=25,
    needs=["tokens.sampler_logprob", "tokens.logprob"],
    min_steps=10,
    title="The disagreement between sampler and trainer grows",
    cause="Their log-probabilities differ by {before} nats per token at the start and by {seen} at the end: learning "
    "from slightly wrong samples makes the next samples more wrong.",
    healthy="mean difference |δ| per token at the end, in nats: below {factor} times that of the start, or below "
    "{limit}",
    fix="lower optimizer.learning_rate, synchronise the sampler at every step[, correct by importance sampling "
    "(grpo.importance = 2.0)]",
    source="prime-rl, docs/training.md; 2512.23087",
    windows=True,
)
def mismatch_growing(data: RunData, *, factor: float = 3.0, limit: float = 0.02) -> Reading | None:
    points = data.sample.mean_by_step(_gap(data.sample))
    if len(points) < 10:
        return None
    before, now = max(points.first(), 1e-4), points.last()
    unhealthy = now > factor * before and now > limit and trend(points).p < data.chance and trend(points).change > 0
    first = since(points, points.value > 2 * before, 5)
    evidence, curve = data.step_evidence(points.step[-1:]), Curve(points, high=factor * before, name=GAP)
    return Reading(now, unhealthy, first, evidence, {"before": before}, curve)


def sampled_ahead(data: RunData) -> bool:
    """Return whether most rollouts were sampled by older weights than those of their step, which follow at a distance.

    Such a distance is known to the trainer; ``too-off-policy`` judges it.
    """
    age = data.rows.step - data.rows["policy_version"]
    late = age[data.rows.step >= np.median(data.rows.steps)]
    if np.mean(late > 0) > 0.5:
        return bool(np.median(late) <= FOLLOWS)
    # A sampler that is renewed every few steps agrees with the trainer on what the newest weights sample.
    sample = data.sample
    gap, since_then = _gap(sample), (sample.rows.step - sample.rows["policy_version"])[sample.line]
    fresh, aged = (gap[np.isfinite(gap) & which] for which in (since_then <= 0, since_then > 0))
    return bool(len(fresh) and len(aged) and late.max() <= FOLLOWS and fresh.mean() < AGREES * aged.mean())


@rule(
    number=26,
    needs=["tokens.sampler_logprob", "tokens.logprob"],
    severity="error",
    min_steps=6,
    title="The sampler's weights are old",
    cause="Sampler and trainer agree {when} and then drift apart, by up to {seen} nats per token{frozen}: new weights "
    "do not reach the sampler.",
    healthy="mean difference of the worst step, in nats: similar to the steps that agree best",
    fix="copy the weights to the sampler after every update, and compare a hash of both",
    source="TRL issue 5312 and pull request 5313; open-instruct issue 1473",
    explains=["clip-fraction-high", "ratio-blow-up", "gradient-spike", "too-off-policy", "negative-kl",
              "likelihood-displacement", *MISMATCH],
    disproof=Disproof(
        ("rows.policy_version",),
        "responses are sampled ahead of the updates on purpose, by weights that are a few steps old but follow",
        sampled_ahead,
    ),
    windows=True,
)  # fmt: skip
def sampler_stale(data: RunData) -> Reading | None:
    points = _mean_gap(data)
    if len(points) < 6:
        return None
    agree = np.quantile(points.value, 0.1)
    first = since(points, points.value > max(0.01, 3 * float(points.value.min())), 3)
    typical = float(np.median(points.after(first).value))
    drifting = typical > 0.005 and typical > 8 * max(float(agree), 1e-5) and not _jumps(points.value, typical)
    starts_equal = points.value[0] < 0.2 * typical
    stays = _distance_to_reference(data.sample)
    frozen = stays is not None and stays < 0.2 and not _jumps(_mean_gap(data.whole).value, typical)
    unhealthy = (drifting and starts_equal) or (frozen and typical > 0.005)
    words = {
        "when": Phrase("at the first step" if starts_equal else "at some steps"),
        "frozen": Phrase(", and the sampler still has the weights of the reference" if frozen else ""),
    }
    return Reading(
        float(points.value.max()), unhealthy, first, data.step_evidence([first]), words, Curve(points, name=GAP)
    )


def _jumps(values: Array, typical: float) -> bool:
    """Return whether sampler and trainer disagree as much at the first step as later, and never agree again.

    Old weights disagree more with every update. Other weights, kernels or precision do so at once.
    """
    since_then = values[np.argmax(values > 0.05 * typical) :]
    return bool(since_then[0] > 0.5 * typical and since_then.min() > typical / 8)


def _distance_to_reference(sample: Sample) -> float | None:
    """Return the distance of the sampler from the reference, relative to that of the policy, late in the run."""
    late = sample.trained & (sample.step > np.median(sample.rows.steps))
    mine = late & np.isfinite(sample["kl_k1"]) & np.isfinite(sample["sampler_gap"])
    if mine.sum() < 50:
        return None
    policy = float(np.abs(sample["kl_k1"][mine]).mean())
    sampler = float(np.abs(sample["sampler_logprob"] - sample["ref_logprob"])[mine].mean())
    return sampler / policy if policy > 0.005 else None


@rule(
    number=27,
    needs=["tokens.ref_logprob"],
    severity="error",
    min_steps=4,
    title="The sampler suddenly writes garbage",
    cause="From step {step} on, the reference finds the responses {seen} nats per token less likely than before: the "
    "weights in the sampler are broken (only partly loaded, or in another layout).",
    healthy="rise of −log π_ref per token within one step: below {limit} nats",
    fix="compare a hash of the weights after each synchronisation; sample one greedy response before continuing",
    source="SkyRL issue 1680; verl issues 7904, 7978",
    explains=["sampler-mismatch", "mismatch-tail", "retokenised", "entropy-explosion", "kl-explosion", "sampler-stale",
              "reward-falls", "negative-kl", "mismatch-growing", "mismatch-rare-tokens", "clip-fraction-high",
              "ratio-blow-up", "gradient-spike", "likelihood-displacement"],
    disproof=Disproof(("tokens.logprob",), "the policy finds its responses as likely as before, so it moved itself"),
)  # fmt: skip
def garbled(data: RunData, *, limit: float = 2.0) -> Reading | None:
    sample = data.sample
    # Text of a diverged policy is improbable only to the reference; text of a broken sampler is improbable to both.
    scores = [sample["ref_logprob"], *([sample["logprob"]] if sample.has("logprob") else [])]
    points, *others = together(*(sample.mean_by_step(-score) for score in scores))
    if len(points) < 4:
        return None
    rise = np.min([_rise(one.value) for one in (points, *others)], axis=0)
    at = int(np.argmax(rise))
    seen, step = float(rise[at]), int(points.step[at + 1])
    curve = Curve(Series(points.step[1:], rise), high=limit)
    return Reading(seen, seen > limit, step, data.step_evidence([step]), {"step": step}, curve, between=(step, step))


def _rise(values: Array) -> Array:
    """Return [S - 1] how far each value and the next one exceed the previous ones; one unusual batch is not enough."""
    before = np.array([np.median(values[max(0, i - 5) : i]) for i in range(1, len(values))])
    return np.asarray(np.minimum(values[1:], np.append(values[2:], np.inf)) - before)


@rule(
    number=28,
    needs=["tokens.sampler_logprob", "tokens.logprob"],
    title="A few tokens cause all disagreement between sampler and trainer",
    cause="{seen} of the tokens differ by more than {far} nat, while the median differs by {median}: single tokens are "
    "computed differently (expert routing, a wrong position).",
    healthy="share of tokens with |δ| > {far} nat: below {limit}, or a median above {near} nats (all differ), or more "
    "tokens with a |δ| between {far} nat and a quarter of it than above (differences of all sizes)",
    fix='replay the router\'s choices, [grpo.ratio = "sequence" (GSPO), ]or exclude such tokens from the loss',
    source="2507.18071; 2510.23027; NeMo-RL, guides/grpo.md",
    explains=["ratio-blow-up", "gradient-spike", "sampler-mismatch"],
    windows=True,
)
def mismatch_tail(data: RunData, *, limit: float = Share(1e-3), far: float = 1.0, near: float = 0.05) -> Reading | None:
    gap = _gap(data.sample)
    known = np.flatnonzero(np.isfinite(gap))
    if len(known) < 1000:
        return None
    share = Share(np.mean(gap[known] > far))
    first = earliest(data.sample.step[known[gap[known] > far]])
    since_then = known[data.sample.step[known] >= (0 if first is None else first)]
    median = float(np.median(gap[since_then]))
    beyond, between = np.sum(gap[known] > far), np.sum((gap[known] > far / 4) & (gap[known] <= far))
    # Tokens that are computed differently are apart from the others; those of other weights differ more or less.
    unhealthy = exceeds(data, int(beyond), len(known), limit) and median < near and bool(between <= beyond)
    curve = Curve(data.sample.mean_by_step(np.where(np.isfinite(gap), gap > far, np.nan)), high=limit)
    return Reading(share, unhealthy, first, data.sample.worst(gap), {"median": median}, curve)


@rule(
    number=29,
    needs=["tokens.sampler_logprob", "tokens.logprob"],
    title="Improbable tokens disagree the most",
    cause="On the least probable tenth of the tokens, sampler and trainer differ by {seen} nats, {times} times as much "
    "as on the others: the ratios of these tokens blow up first.",
    healthy="mean |δ| on the least probable tenth of the tokens: below {limit} nats, or below {factor} times that of "
    "the others",
    fix="[cap the importance weights (grpo.importance = 2.0), or ]exclude tokens below a minimum probability",
    source="When Speed Kills Stability (2025)",
    explains=["ratio-blow-up"],
    windows=True,
)
def mismatch_rare_tokens(data: RunData, *, limit: float = 0.1, factor: float = 5.0) -> Reading | None:
    sample, gap = data.sample, _gap(data.sample)
    known = np.flatnonzero(np.isfinite(gap))
    if len(known) < 1000:
        return None
    edge = np.quantile(sample["sampler_logprob"][known], 0.1)
    rare = sample["sampler_logprob"][known] <= edge
    low, rest = float(gap[known][rare].mean()), float(gap[known][~rare].mean())
    unhealthy = low > limit and low > factor * rest
    worst = sample.worst(np.where(sample["sampler_logprob"] <= edge, gap, np.nan))
    words = {"times": low / max(rest, 1e-9)}
    curve = Curve(by_tenth(sample["sampler_logprob"], gap), high=limit, along=TENTHS)
    everything = data.whole.sample
    course = everything.mean_by_step(np.where(everything["sampler_logprob"] <= edge, _gap(everything), np.nan))
    return Reading(low, unhealthy, int(sample.rows.steps[0]), worst, words, curve, course)


@rule(
    number=30,
    needs=["rows.policy_version"],
    title="Rollouts are too old when they are learned from",
    cause="A tenth of the rollouts is at least {seen} steps old when the policy learns from them.",
    healthy="age of the oldest tenth of the rollouts, in steps: at most {limit}",
    fix="a shorter queue between sampling and training",
    source="prime-rl's default",
    explains=["clip-fraction-high", "update-kl-large", "negative-kl", *MISMATCH],
)
def too_off_policy(data: RunData, *, limit: float = 8.0) -> Reading | None:
    age = data.rows.step - data.rows["policy_version"]
    points = data.rows.by_step(age, partial(np.quantile, q=0.9))
    if not len(points):
        return None
    # The age grows from the first steps on, long before it exceeds the limit.
    first = since(points, points.value > 1, 3) if since(points, points.value > limit, 3) is not None else None
    curve = Curve(points, 0.0, limit)
    return Reading(points.last(), first is not None, first, data.step_evidence([first]), curve=curve)


@rule(
    number=31,
    needs=["tokens.sampler_logprob", "tokens.logprob"],
    title="Sampler and trainer compute in different precision",
    cause="From the first step on, the probabilities of sampler and trainer have a correlation of only {seen}, with "
    "errors in both directions alike: rounding, most often in the output layer.",
    healthy="correlation of the probabilities at the first step: above {limit}, or errors in one direction only",
    fix="compute the output layer (lm_head) in float32 on both sides; float16 instead of bfloat16",
    source="MiniMax-M1 2506.13585; 2510.26788",
    explains=["sampler-mismatch", "mismatch-rare-tokens"],
)
def precision_noise(data: RunData, *, limit: float = 0.99) -> Reading | None:
    sample = data.sample
    mine = sample.trained & (sample.step == sample.rows.steps[0]) & np.isfinite(sample["sampler_gap"])
    if mine.sum() < 100:
        return None
    ours, theirs = np.exp(sample["logprob"][mine]), np.exp(sample["sampler_logprob"][mine])
    if ours.std() == 0 or theirs.std() == 0:
        return None
    found = float(np.corrcoef(ours, theirs)[0, 1])
    balance = float(np.mean(sample["sampler_gap"][mine] > 0))
    unhealthy = found < limit and 0.25 < balance < 0.75
    off = np.full(len(sample), np.nan)
    off[mine] = np.abs(ours - theirs)
    curve = Curve(_correlation(sample), low=limit)
    return Reading(found, unhealthy, int(sample.rows.steps[0]), sample.worst(off), curve=curve)


def _correlation(sample: Sample) -> Series:
    """Return by step the correlation between the token probabilities of sampler and trainer."""
    known = sample.trained & np.isfinite(sample["sampler_gap"])
    steps, start = np.unique(sample.step[known], return_index=True)
    both = (np.split(np.exp(sample[name][known]), start[1:]) for name in ("logprob", "sampler_logprob"))
    return series(steps, np.array([np.corrcoef(ours, theirs)[0, 1] for ours, theirs in zip(*both, strict=True)]))


@rule(
    number=9,
    needs=["tokens.sampler_logprob", "tokens.logprob"],
    severity="error",
    title="Responses are tokenised again between sampling and training",
    cause="In {seen} of the responses, sampler and trainer agree up to some token and disagree strongly from there on: "
    "text was passed instead of token ids, and tokenising it again gave other tokens.",
    healthy="share of responses that agree to {near} nats up to a token and differ by more than {far} nat after it: "
    "below {limit}, or hardly any response that agrees to the end",
    fix="pass token ids from the sampler to the trainer, never text",
    source="vLLM blog, Agent Lightning (2025)",
    explains=["sampler-mismatch", "mismatch-tail", "mismatch-rare-tokens"],
    windows=True,
)
def retokenised(data: RunData, *, limit: float = Share(0.01), near: float = 0.1, far: float = 1.0) -> Reading | None:
    sample = data.sample
    found, looked, agree = [], 0, 0
    for line, values in _responses(sample, _gap(sample)):
        values = values[np.isfinite(values)]
        if len(values) < 8:
            continue
        looked += 1
        agree += values.max() < near
        jump = int(np.argmax(values > far)) if (values > far).any() else 0
        if jump >= 2 and values[:jump].max() < near and len(values) - jump >= 3 and np.median(values[jump:]) > 0.5:
            found.append(line)
    if not looked:
        return None
    share = Share(len(found) / looked)
    # If hardly any response agrees throughout, the two policies differ, and tokenisation is not the cause.
    unhealthy = exceeds(data, len(found), looked, limit) and len(found) >= 3 and agree > 0.5 * looked
    wrong = np.isin(np.arange(len(sample.rows)), found)
    curve = Curve(sample.rows.by_step(wrong.astype(float)), high=limit)
    return Reading(share, unhealthy, earliest(sample.rows.step[wrong]), sample.rows.evidence(found), curve=curve)


def _responses(sample: Sample, values: Array) -> list[tuple[int, Array]]:
    lines, start = np.unique(sample.line, return_index=True)
    return list(zip(lines.tolist(), np.split(values, start[1:]), strict=True)) if len(lines) else []

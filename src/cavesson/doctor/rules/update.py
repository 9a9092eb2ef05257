"""Rules on the update: ratios, clipping, gradients and advantages."""

import numpy as np

from cavesson.doctor.data import RunData
from cavesson.doctor.finding import Curve, Phrase, Reading, Share, Words
from cavesson.doctor.rule import rule
from cavesson.doctor.rules.consequences import RUNAWAY
from cavesson.doctor.series import Series, earliest, since, smoothed, trend
from cavesson.doctor.spikes import spikes


@rule(
    row=32,
    needs=["steps.policy/ratio"],
    severity="error",
    title="The probability ratio blows up",
    cause="The mean ratio π/π_old reaches {seen}{skipped}: single updates move the policy so far that clipping cannot "
    "hold it.",
    healthy="mean ratio of a mini-batch: near 1, outside 0.3 to 2 once at most; TRL skips a batch above 10",
    fix="lower optimizer.learning_rate or update.epochs; check that the old log-probabilities are those of this policy",
    source="TRL 0.7.10; TRL issues 488, 1347, 1857",
    explains=["kl-explosion", "update-kl-large", *RUNAWAY],
)
def ratio_blow_up(data: RunData) -> Reading | None:
    ratio, skipped = data.metric("policy/ratio"), data.metric("optim/skipped")
    bad_ratio = ratio.step[(ratio.value > 2) | (ratio.value < 0.3)]
    bad = np.union1d(bad_ratio, skipped.step[skipped.value > 0])
    sick = len(bad) >= 2 or bool(ratio.value.max() > 10)
    share = float(np.mean(skipped.value > 0)) if len(skipped) else 0.0
    words: Words = {"skipped": Phrase(", and mini-batches are skipped" if share else "")}
    return Reading(
        float(ratio.value.max()),
        sick,
        earliest(bad),
        data.step_evidence(bad[:3]),
        words,
        curve=Curve(ratio, 0.3, 2.0),
    )


@rule(
    row=33,
    needs=["steps.policy/clip_fraction"],
    least_steps=5,
    algorithms=["ppo", "grpo", "rloo"],
    title="Too many tokens are clipped",
    cause="{seen} of the tokens lie outside the clip range: each update goes further than it may, and what is clipped "
    "teaches nothing.",
    healthy="clip fraction: below 25 % over several steps; GSPO clips a hundred times as much by design",
    fix="lower optimizer.learning_rate or update.epochs",
    source="TRL 0.7.10, logging; rlprobe; DAPO 2503.14476; GSPO 2507.18071",
    explains=["kl-explosion", *RUNAWAY],
)
def clip_fraction_high(data: RunData) -> Reading | None:
    points = data.metric("policy/clip_fraction")
    if len(points) and not 0 <= points.value.min() <= points.value.max() <= 1:
        return None  # another definition of the clip fraction, such as per cent
    whole_sequences = data.setting("config.grpo.ratio") == "sequence"
    limit = 0.9 if whole_sequences else 0.25
    first = since(smoothed(points), smoothed(points).value > limit, 5)
    seen = points.last() if first is None else float(np.median(points.value[points.step >= first]))
    return Reading(
        Share(seen),
        first is not None,
        first,
        data.step_evidence([first]),
        curve=Curve(points, high=limit),
    )


@rule(
    row=34,
    needs=["steps.policy/approx_kl"],
    least_steps=3,
    title="One step moves the policy too far",
    cause="Within a step the policy moves by ½·mean((log π − log π_old)²) = {seen} nats per token.",
    healthy="policy/approx_kl per token: around 0.01 to 0.05; above 0.2 the samples are no longer of this policy",
    fix="lower optimizer.learning_rate or update.epochs; update.target_policy_kl stops a step early",
    source="TRL 0.7.10 (target_kl); Nuts and bolts of deep RL (Schulman); The N implementation details",
    explains=["clip-fraction-high", "kl-explosion", "ratio-blow-up", *RUNAWAY],
)
def update_kl_large(data: RunData) -> Reading | None:
    points = data.metric("policy/approx_kl")
    first = since(points, points.value > 0.2, 3)
    seen = points.last() if first is None else float(np.median(points.value[points.step >= first]))
    return Reading(
        seen,
        first is not None,
        first,
        data.step_evidence([first]),
        curve=Curve(points, high=0.2),
    )


@rule(
    row=35,
    needs=["steps.optim/grad_norm"],
    least_steps=10,
    title="The gradient spikes again and again",
    cause="The gradient is up to {seen} times its median of the steps before, time and again.",
    healthy="gradient norm / running median: above 10 in fewer than 4 steps, or less than a tenth of them; norms up to "
    "3 do not count",
    fix="look at the batch of that step; a lower learning rate or update.max_grad_norm",
    source="RAGEN 2504.20073; rlprobe; rldoctor",
    explains=["value-loss-spike"],
)
def gradient_spike(data: RunData) -> Reading | None:
    return spikes(data, "optim/grad_norm", least=3.0)


@rule(
    row=36,
    needs=["steps.optim/grad_norm|tokens.advantage"],
    least_steps=5,
    title="Many steps teach nothing",
    cause="In {seen} of the steps the gradient or every advantage is 0.",
    healthy="share of steps without a gradient: below 20 %",
    fix="rewards that differ between the responses to a prompt; look at optim/learning_rate and at the mask",
    source="mlx-lm-lora issue 55; MemGen pull request 33; rldoctor",
    explains=["kl-flat"],
)
def zero_gradient(data: RunData) -> Reading | None:
    points = data.metric("optim/grad_norm")
    empty = Series(points.step, (points.value < 1e-9).astype(float))
    sample = data.sample if data.has("tokens.advantage") else None
    if sample is not None:
        largest = sample.rows.by_step(sample.total(np.abs(sample["advantage"])), np.max)
        none = Series(largest.step, (largest.value < 1e-7).astype(float))
        empty = none if not len(empty) or none.value.mean() > empty.value.mean() else empty
    if not len(empty):
        return None
    share = float(empty.value.mean())
    bad = empty.step[empty.value > 0]
    sick = share > 0.2
    return Reading(
        Share(share),
        sick,
        earliest(bad),
        data.step_evidence(bad[:3]),
        curve=Curve(empty, high=0.2),
    )


@rule(
    row=37,
    needs=["tokens.advantage"],
    least_steps=3,
    severity="error",
    title="Advantages are not normalised as the run says",
    cause="Whitened advantages have mean 0 and standard deviation 1 over the trained tokens; here the mean is {mean} "
    "and the standard deviation {seen}: padding took part, or the whitening is missing.",
    healthy="standard deviation of whitened advantages over the trained tokens: 0.5 to 2, |mean| below 0.1",
    fix="whiten over the response's mask only",
    source="The N implementation details of RLHF with PPO; rlprobe",
    explains=["update-kl-large", "clip-fraction-high"],
    algorithms=["ppo"],
)
def advantage_scale(data: RunData) -> Reading | None:
    if not data.setting("config.ppo.whiten_advantages", False):
        return None
    sample = data.sample
    if len(sample.rows) < len(data.rows):
        return None  # whitening uses whole steps, but the sample has only some of their rollouts
    there = sample.trained & np.isfinite(sample["advantage"])
    steps, where = np.unique(sample.step[there], return_inverse=True)
    count = np.bincount(where)
    mean = np.bincount(where, sample["advantage"][there]) / count
    sd = np.sqrt(np.maximum(np.bincount(where, sample["advantage"][there] ** 2) / count - mean**2, 0))
    flat = sd < 1e-3  # in a step without variation, the scale is undefined
    bad = ((np.abs(mean) > 0.1) | (sd > 2) | (sd < 0.5)) & ~flat
    # Missing whitening affects most steps; a problem in only a few steps has another cause.
    first = since(Series(steps, sd), bad, 3) if np.mean(bad) > 0.5 else None
    words: Words = {"mean": float(np.median(mean))}
    evidence = data.step_evidence([first])
    curve = Curve(Series(steps, sd), 0.5, 2.0)
    if np.median(np.abs(mean)) > 0.1:
        curve = Curve(Series(steps, mean), -0.1, 0.1, Phrase("mean of the advantages"))
    return Reading(float(np.median(sd)), first is not None, first, evidence, words, curve=curve)


@rule(
    row=38,
    needs=["steps.step"],
    severity="error",
    title="Numbers are no longer numbers",
    cause="{column} is NaN or infinite from step {step} on ({seen} values over all columns).",
    healthy="values that are NaN or infinite: 0",
    fix="look at the step before: a division by a count of 0, the logarithm of 0, an overflow in float16",
    source="every trainer",
    explains=["ratio-blow-up", "value-loss-spike", "gradient-spike", "zero-gradient", "reward-falls", "kl-explosion",
              "entropy-collapse", "entropy-explosion", "length-collapse", "garbled"],
)  # fmt: skip
def not_finite(data: RunData) -> Reading | None:
    found = [*data.not_finite_metrics(), *data.not_finite_columns()]
    total = sum(count for _, _, count in found)
    if not found:
        return Reading(0.0, False)
    step, column, _ = min(found)
    words: Words = {"column": column, "step": step}
    return Reading(float(total), True, step, data.step_evidence([step]), words)


@rule(
    row=39,
    needs=["tokens.advantage", "tokens.logprob"],
    least_steps=20,
    title="Good answers become less likely",
    cause="The log-probability of tokens with a positive advantage falls by {seen} nats over the run: what is pushed "
    "down drags along what should be pushed up.",
    healthy="fall of the mean log-probability of tokens with a positive advantage, in nats: below 0.5",
    fix="weigh negative advantages less, or keep a KL penalty",
    source="2505.18830; GTPO 2508.03772",
)
def likelihood_displacement(data: RunData) -> Reading | None:
    sample = data.sample
    good = sample.trained & (sample["advantage"] > 0) & np.isfinite(sample["logprob"])
    steps, where = np.unique(sample.step[good], return_inverse=True)
    if len(steps) < 20:
        return None
    points = Series(steps, np.bincount(where, sample["logprob"][good]) / np.bincount(where))
    found = trend(points)
    sick = found.change < -0.5 and found.p < 0.01
    first = since(points, points.value < points.first() - 0.25, 5)
    return Reading(
        -found.change,
        sick,
        first,
        data.step_evidence(steps[-1:]),
        curve=Curve(points, name=Phrase("mean log-probability of tokens with a positive advantage")),
    )

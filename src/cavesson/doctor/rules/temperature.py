"""The rule on a temperature that the scores lack."""

import numpy as np

from cavesson.doctor.data import RunData
from cavesson.doctor.reading import Curve, Reading
from cavesson.doctor.rule import Disproof, rule
from cavesson.doctor.rules.consequences import MISLED, MISMATCH
from cavesson.doctor.rules.sampling import NOISE, shift, surprise_gap
from cavesson.doctor.sample import TENTHS, Sample, by_tenth
from cavesson.doctor.series import Array
from cavesson.findings.words import Phrase

LOWEST, HIGHEST = 1 / 3, 3.0
"""Temperatures that are looked for."""
STRATA = 4
"""Parts of the tokens, by their entropy, in which the same temperature must hold."""
CONSISTENT = 6.0
"""Standard errors by which it may fail in one of them: the weights of rare tokens have a long tail."""
VARIED = 1.3
"""How many times as large high entropies must be as low ones, for the parts to differ."""
HALVINGS = 30
"""Of the interval that has 1/T − 1."""
MIN_TOKENS = 400
"""Tokens from which a temperature is estimated."""


@rule(
    number=14,
    needs=["tokens.logprob", "tokens.entropy"],
    severity="error",
    training_only=True,
    title="The sampling temperature is missing in the scores",
    cause="Responses are sampled at temperature {temperature} but scored at 1: sampler and trainer use different "
    "distributions, so the ratio and the KL estimate are right for neither.",
    healthy="temperature that turns the trainer's log-probabilities into the sampler's, or explains surprise (−log π) "
    "− entropy alike at all entropies if the sampler's are not recorded: {low} to {high}",
    fix="sampling.temperature = 1.0, or divide the logits by the temperature when scoring as well",
    settings={"sampling.temperature": 1.0},
    source="The N implementation details of RLHF with PPO; TRL issue 4159; own identity (importance sampling)",
    explains=["negative-kl", "ratio-not-one", "filtered-sampling", *MISLED, *MISMATCH],
    disproof=Disproof(("tokens.sampler_logprob",), "the sampler's log-probabilities are those of the trainer"),
)
def temperature_missing(data: RunData, *, low: float = 0.98, high: float = 1.02) -> Reading | None:
    sample, first = data.sample, int(data.sample.rows.steps[0])
    if not data.has("tokens.sampler_logprob"):
        return _from_entropies(data, low, high)
    found, fitted, gap = shift(data, sample), fitted_temperature(sample), surprise_gap(sample)
    if found is None or fitted is None or gap is None:
        return None
    temperature, worth = fitted
    # Different weights shift tokens regardless of probability; surprise − entropy must have the matching sign as well.
    agrees = (gap[0] < -3 * gap[1]) if temperature < 1 else (gap[0] > 3 * gap[1])
    off = not low <= temperature <= high and LOWEST < temperature < HIGHEST and worth > 0.3
    unhealthy = (
        off
        and found.above > 0.05
        and not found.is_filter
        and found.below < 0.95
        and bool(agrees)
        and _holds(sample, temperature)
    )
    name = Phrase("log π_sampler − log π, mean over each tenth of the tokens")
    curve = Curve(by_tenth(sample["logprob"], -sample["sampler_gap"]), 0.0, 0.0, name, TENTHS)
    evidence = sample.rows.evidence(range(len(sample.rows)))
    return Reading(temperature, unhealthy, first, evidence, {"temperature": temperature}, curve)


def _from_entropies(data: RunData, low: float, high: float) -> Reading | None:
    sample = data.sample
    known = sample.trained & np.isfinite(sample["logprob"]) & np.isfinite(sample["entropy"])
    surprise, entropy = -sample["logprob"][known], sample["entropy"][known]
    if len(surprise) < MIN_TOKENS:
        return None
    temperature = entropy_temperature(surprise, entropy)
    if temperature is None:
        return None
    # Weights that the sampler gets too late make tokens too surprising as well, but not at the first step.
    begins = sample.step[known] == sample.rows.steps[0]
    gap = (surprise - entropy)[begins]
    noise = NOISE * float(gap.std()) / max(len(gap), 1) ** 0.5
    agrees = gap.mean() < -noise if temperature < 1 else gap.mean() > noise
    unhealthy = not low <= temperature <= high and bool(agrees)
    points = sample.mean_by_step(-sample["logprob"] - sample["entropy"])
    curve = Curve(points, 0.0, 0.0, Phrase("surprise (−log π) − entropy, in nats per token"))
    evidence = sample.rows.evidence(range(len(sample.rows)))
    return Reading(temperature, unhealthy, int(sample.rows.steps[0]), evidence, {"temperature": temperature}, curve)


def fitted_temperature(sample: Sample) -> tuple[float, float] | None:
    """Return T of sampler = trainer / T + context-dependent term, and the correlation that supports the fit.

    Only improbable tokens are used: for these, the sum over the vocabulary hardly depends on the token.
    """
    x, y = _improbable(sample, "logprob")
    slope = _slope(x, y)
    if slope is None or slope <= 0.05:
        return None
    moved = y - x
    return 1 / slope, abs(float(np.corrcoef(x, moved)[0, 1])) if np.ptp(moved) > 0 else 0.0


def _holds(sample: Sample, temperature: float) -> bool:
    """Return whether T of trainer = T · sampler + context-dependent term is about the same.

    Noise in one of the two flattens the regression on it, whatever else relates them, but not the other one.
    """
    trainer, sampler = _improbable(sample, "sampler_logprob")
    slope = _slope(sampler, trainer)
    return slope is not None and slope > 0 and 0.5 < np.log(slope) / np.log(temperature) < 2


def _improbable(sample: Sample, by: str) -> tuple[Array, Array]:
    """Return the trainer's and the sampler's log-probabilities of the tokens that one of the two finds improbable."""
    mine = sample.trained & np.isfinite(sample["sampler_gap"]) & (sample[by] < -2)
    return sample["logprob"][mine], sample["sampler_logprob"][mine]


def _slope(x: Array, y: Array) -> float | None:
    """Return the least-squares slope of y on x; None if there are too few or too similar points."""
    if len(x) < 50 or np.var(x) < 1e-4:
        return None
    return float(np.mean((x - x.mean()) * (y - y.mean())) / np.var(x))


def entropy_temperature(surprise: Array, entropy: Array) -> float | None:
    """Return the temperature at which tokens were drawn, from their scores alone; None if it was not a temperature.

    Weighted by p^(1 − 1/T), tokens drawn with q ∝ p^(1/T) are like tokens drawn with p (importance sampling), whose
    mean surprise is the entropy: E_q[p^(1 − 1/T) · (−log p − H(p))] = 0 for every context. T is the root of the mean
    over all tokens. It must also hold where entropies are low and where they are high, unlike that of top-k or top-p.

    Args:
        surprise: [N] −log p of each token, in nats.
        entropy: [N] H(p) of the distribution that the token was scored with.
    """
    away = surprise - entropy

    def terms(sharper: float) -> Array:
        # A factor of the context, e^(−H), changes nothing but the noise.
        return np.asarray(np.exp(np.clip(sharper * away, -50.0, 50.0)) * away)

    low, high = np.quantile(entropy, [0.1, 0.9])
    flattest, sharpest = 1 / HIGHEST - 1, 1 / LOWEST - 1
    if high < VARIED * low or not terms(flattest).sum() < 0 < terms(sharpest).sum():
        return None
    for _ in range(HALVINGS):  # SciPy's root finders take longer to import than this does
        sharper = (flattest + sharpest) / 2
        flattest, sharpest = (flattest, sharper) if terms(sharper).sum() > 0 else (sharper, sharpest)
    found = terms(sharper)
    part = np.searchsorted(np.quantile(entropy, np.arange(1, STRATA) / STRATA), entropy)
    sums, squares = np.bincount(part, found), np.bincount(part, found**2)
    return 1 / (1 + sharper) if np.all(np.abs(sums) <= CONSISTENT * np.sqrt(squares)) else None

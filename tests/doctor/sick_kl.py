"""Sick runs: the distance to the reference, and sampler and trainer that disagree."""

import numpy as np
from sick import Cases, resample, shrink

case = Cases()


def change_tail(made, rows, start, size):
    chance = np.random.default_rng(5)
    for step in made.tokens["sampler_logprob"]:
        step[:rows, start:] -= chance.uniform(size / 2, size, step[:rows, start:].shape)


@case("retokenised", near=lambda made: change_tail(made, 2, 0, 4.0))
def retokenised(made):
    change_tail(made, 2, 4, 4.0)


@case("negative-kl")
def negative(made):
    made.tokens["ref_logprob"] = made.tokens["ref_logprob"] + np.where(made.mask, 0.2, 0)


@case("kl-explosion")
def explosion(made):
    grown = np.linspace(0, 3, 24)[:, None, None]
    made.tokens["ref_logprob"] = made.tokens["ref_logprob"] - np.where(made.mask, grown, 0)


def other_estimator(name):
    def change(made):
        made.info["kl"]["estimator"] = name

    return change


case("estimator-misplaced")(other_estimator("k3"))


@case("kl-flat")
def flat(made):
    made.tokens["ref_logprob"] = made.tokens["logprob"].copy()


def taught(falls):
    """The teacher finds each token half a nat less likely, in all steps, or ever less so."""

    def change(made):
        gap = np.linspace(0.5, 0.1, 24) if falls else np.full(24, 0.5)
        made.tokens["teacher_logprob"] = made.tokens["logprob"] - np.where(made.mask, gap[:, None, None], 0)

    return change


case("teacher-not-approached", near=taught(True))(taught(False))


@case("sampler-mismatch")
def mismatched(made):
    noise = np.random.default_rng(2).normal(0, 0.15, made.mask.shape)
    made.tokens["sampler_logprob"] += np.where(made.mask, noise, 0)


def run_away(made):
    """The policy writes what its reference does not expect, and expects it itself."""
    made.tokens["ref_logprob"][12:] -= np.where(made.mask[12:], 3.0, 0)


@case("garbled", near=run_away)
def broken_sync(made):
    run_away(made)
    made.tokens["logprob"][12:] -= np.where(made.mask[12:], 3.0, 0)


@case("stops-generating", near=lambda made: shrink(made, 0.1))
def silent(made):
    shrink(made, 0.1)
    made.tokens["ref_logprob"][10:] += np.where(made.mask[10:], 1.0, 0)


@case("penalty-mis-scaled")
def drowned(made):
    made.rows["kl_coef"][:] = 50.0
    made.tokens["ref_logprob"] -= np.where(made.mask, 0.1, 0)


@case("coefficient-runaway")
def runaway(made):
    made.metrics["kl/coef"] = 0.05 * np.exp(np.linspace(0, 4, 24))
    made.tokens["ref_logprob"] -= np.where(made.mask, np.linspace(0, 0.4, 24)[:, None, None], 0)


@case("kl-in-few-tokens")
def one_place(made):
    made.tokens["ref_logprob"][:, :, 3] -= np.where(made.mask[:, :, 3], 4.0, 0)


@case("unknown-estimate")
def unknown(made):
    made.metrics["kl/objective"] = made.metrics["kl/objective"] * 3 + 0.4


@case("mismatch-growing")
def growing(made):
    size = np.linspace(0.002, 0.06, 24)[:, None, None]
    made.tokens["sampler_logprob"] += np.where(
        made.mask, size * np.random.default_rng(1).normal(0, 1, made.mask.shape), 0
    )


def constant_noise(made):
    noise = np.random.default_rng(2).normal(0, 0.03, made.mask.shape)
    made.tokens["sampler_logprob"] += np.where(made.mask, noise, 0)


@case("sampler-stale", near=constant_noise)
def stale(made):
    """Samples come from the first policy throughout."""
    resample(made, lambda policy: made.policy[0])


@case("mismatch-tail")
def tail(made):
    rare = np.random.default_rng(4).random(made.mask.shape) < 0.01
    made.tokens["sampler_logprob"] -= np.where(made.mask & rare, 3.0, 0)


@case("mismatch-rare-tokens")
def rare(made):
    least = made.tokens["logprob"] < np.quantile(made.tokens["logprob"][made.mask], 0.12)
    made.tokens["sampler_logprob"] -= np.where(made.mask & least, 0.4, 0)


@case("too-off-policy")
def old(made):
    made.rows["policy_version"] = np.maximum(made.rows["policy_version"] - 12, 0)


@case("precision-noise")
def rounding(made):
    noise = np.random.default_rng(6).normal(0, 0.3, made.mask.shape)
    made.tokens["sampler_logprob"] = np.where(made.mask, np.minimum(made.tokens["logprob"] + noise, -0.01), 0)

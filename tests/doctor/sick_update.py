"""Sick runs: the update, the value function and the machinery."""

import numpy as np
from sick import Cases

case = Cases()


@case("not-finite")
def not_finite(made):
    made.metrics["loss/value"][7] = np.nan


@case("clip-fraction-high", near=lambda made: made.metrics.update({"policy/clip_fraction": np.full(24, 0.15)}))
def clipping(made):
    made.metrics["policy/clip_fraction"] = np.full(24, 0.4)


@case("update-kl-large", near=lambda made: made.metrics.update({"policy/approx_kl": np.full(24, 0.05)}))
def far(made):
    made.metrics["policy/approx_kl"] = np.full(24, 0.5)


@case("gradient-spike", near=lambda made: made.metrics["optim/grad_norm"].__setitem__([6, 11, 15], 40.0))
def spike(made):
    made.metrics["optim/grad_norm"][[6, 11, 15, 19]] = 40


@case("ratio-blow-up")
def blown_up(made):
    made.metrics["policy/ratio"][10:14] = 30.0


@case("zero-gradient")
def no_gradient(made):
    made.metrics["optim/grad_norm"][np.arange(24) % 3 > 0] = 0.0


def some_flipped(made, share=0.4):
    flipped = np.arange(made.mask.shape[1]) % 10 < 10 * share
    made.tokens["advantage"] *= np.where(flipped, -1.0, 1.0)[:, None]


@case("advantage-sign", near=lambda made: some_flipped(made, 0.0))
def flipped(made):
    some_flipped(made)


@case("advantage-scale")
def unwhitened(made):
    made.tokens["advantage"] *= 4


def grouped(made, shift=0):
    made.info["kl"]["place"] = "loss"
    reward = made.rows["reward"].reshape(24, -1, 4)
    advantage = reward - np.roll(reward.mean(-1, keepdims=True), shift, 1)
    made.tokens["advantage"] = np.where(made.mask, advantage.reshape(24, -1, 1), 0)


@case("group-advantages", near=grouped)
def other_group(made):
    grouped(made, shift=1)


@case("likelihood-displacement")
def displaced(made):
    made.tokens["logprob"] -= np.where(made.mask, np.linspace(0, 2, 24)[:, None, None], 0)


@case("value-not-fitting")
def unfit(made):
    noise = np.random.default_rng(8).normal(0, 3, made.mask.shape)
    made.tokens["value"] = np.where(made.mask, noise * made.tokens["return"].std(), 0)


@case("value-start")
def offset(made):
    made.tokens["value"] += np.where(made.mask, 10.0, 0)


@case("value-constant")
def constant(made):
    made.tokens["value"] = np.where(made.mask, 0.7, 0)


@case("value-loss-spike", near=lambda made: made.metrics["loss/value"].__setitem__(12, 9.0))
def loss_spike(made):
    made.metrics["loss/value"][[6, 12, 16, 20]] = 9.0


@case("reward-fades")
def fading(made):
    made.info["config"]["ppo"]["lam"] = 0.5


@case("rollouts-fail")
def empty(made):
    made.rows["response"][:, ::5] = ""


@case("stalls")
def stall(made):
    made.metrics["time/total"][9] = 40.0


@case("prompts-exhausted")
def exhausted(made):
    made.rows["reward"] = (made.rows["reward"] > 0.2).astype(float)
    made.rows["reward"][10:] = 1.0

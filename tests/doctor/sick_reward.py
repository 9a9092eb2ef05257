"""Sick runs: the reward."""

import numpy as np
from doctor_helpers import LENGTH
from sick import Cases, shrink

case = Cases()


@case("query-dominated")
def query(made):
    made.rows["reward"] = made.rows["shaped_reward"] = np.sin(made.rows["group"]) * 5 + 0.1 * made.rows["reward"]


@case("zero-variance-groups")
def equal(made):
    made.rows["reward"] = np.repeat(made.rows["reward"][:, ::4], 4, axis=1)


@case("reward-outliers")
def outliers(made):
    made.rows["reward"][3, 5] = made.rows["reward"][9, 1] = 80.0


@case("verifier-dead")
def dead(made):
    made.rows["reward"] = np.zeros_like(made.rows["reward"])


@case("reward-falls")
def falling(made):
    made.rows["reward"] -= np.linspace(0, 3, 24)[:, None]


@case("length-exploited")
def long(made):
    shrink(made, 0.3)
    for name in ("mask",):
        made.tokens[name] = made.tokens[name][::-1].copy()
    made.rows["reward"] = made.mask.sum(-1) * 0.3


def repeat_responses(made, noise):
    """Siblings answer alike; their rewards differ by this much noise."""
    made.rows["response"][:, 1::4] = made.rows["response"][:, 0::4]
    made.rows["reward"][:, 1::4] = made.rows["reward"][:, 0::4]
    made.rows["reward"] += np.random.default_rng(3).normal(0, noise, made.rows["reward"].shape)


@case("reward-is-noise", near=lambda made: repeat_responses(made, 0.05))
def noise(made):
    repeat_responses(made, 3.0)


def hold_out(made, late):
    """Every other rollout is held out; its reward rises to step 12 and then by ``late`` in all."""
    made.rows["split"][:, ::2] = "eval"
    rise = np.concatenate([np.linspace(0, 2, 12), 2 + np.linspace(0, late, 12)])
    made.rows["reward"] += np.linspace(0, 4, 24)[:, None]
    made.rows["reward"][:, ::2] = rise[:, None] + 0.1 * np.random.default_rng(3).normal(0, 1, (24, 16))


@case("over-optimised", near=lambda made: hold_out(made, 0.5))
def too_far(made):
    hold_out(made, -1.5)


def sharpen(made, variety):
    mean = made.rows["reward"].mean(1, keepdims=True)
    made.rows["reward"] = (
        2 + np.linspace(0, 1, 24)[:, None] + (made.rows["reward"] - mean) * np.geomspace(1, 0.02, 24)[:, None]
    )
    made.metrics["text/distinct_2"] = np.linspace(0.6, variety, 24)


@case("reward-exhausted", near=lambda made: sharpen(made, 0.5))
def one_answer(made):
    sharpen(made, 0.1)


def parts(made, weight):
    chance = np.random.default_rng(2)
    first, second = chance.normal(0, 1, (2, *made.rows["reward"].shape))
    made.rows["reward"] = made.rows["shaped_reward"] = first + weight * second
    pairs = zip(first.ravel().tolist(), second.ravel().tolist(), strict=True)
    made.rows["reward_parts"] = np.array([{"one": a, "two": b} for a, b in pairs], object).reshape(first.shape)


def third_part(made, share):
    """A third part of the reward that the first responses of a step do not earn."""
    parts(made, 0.5)
    earned = np.arange(made.rows["reward"].shape[1]) >= share * made.rows["reward"].shape[1]
    for step in made.rows["reward_parts"]:
        for responses, value in zip(step, earned, strict=True):
            responses["three"] = float(value)


@case("part-constant", near=lambda made: third_part(made, 0.95))
def unearned(made):
    third_part(made, 1.0)


@case("one-part-dominates", near=lambda made: parts(made, 0.5))
def dominated(made):
    parts(made, 0.02)


def lengthen(made, most):
    """The worse half of each group keeps so many tokens more than the better one, more and more of them."""
    order = made.rows["reward"].reshape(24, -1, 4).argsort(-1).argsort(-1).reshape(24, 32)
    keep = np.where(order < 2, 6 + most * np.arange(24)[:, None] / 23, 6)
    made.tokens["mask"] &= np.arange(LENGTH) < keep[..., None]


@case("length-bias", near=lambda made: lengthen(made, 1))
def long_mistakes(made):
    lengthen(made, 12)

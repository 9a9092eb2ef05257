"""Sick runs: the length, the variety and the patterns of the responses."""

import numpy as np
from doctor_helpers import END, LENGTH
from sick import Cases, shrink

case = Cases()


@case("length-collapse", near=lambda made: shrink(made, 0.7))
def shrinking(made):
    shrink(made, 0.1)


def cut_between(made, first, last):
    made.rows["finish_reason"][:] = "eos"
    made.rows["finish_reason"][first:last] = "length"


@case("truncated", near=lambda made: cut_between(made, 8, 20))
def cut(made):
    cut_between(made, 8, 24)


@case("never-ends", near=lambda made: cut_between(made, 0, 12))
def cut_from_the_start(made):
    cut_between(made, 0, 24)


@case("end-not-trained")
def end_masked(made):
    made.tokens["mask"] &= made.tokens["token_id"] != END


@case("entropy-explosion")
def exploding(made):
    made.tokens["entropy"] += np.where(made.mask, np.linspace(0, 2, 24)[:, None, None], 0)


@case("entropy-collapse")
def collapsed(made):
    made.tokens["entropy"] *= np.geomspace(1, 0.03, 24)[:, None, None]
    made.rows["reward"] -= made.rows["reward"].mean(1, keepdims=True)


def mark(made, text, late, pay):
    has = np.random.default_rng(2).random(made.rows["reward"].shape) < np.linspace(0.02, late, 24)[:, None]
    made.rows["response"] = np.where(has, made.rows["response"] + text, made.rows["response"])
    made.rows["reward"] = made.rows["reward"] + pay * has


@case("pattern-spreading", near=lambda made: mark(made, " #", 0.06, 1.0))
def hashes(made):
    mark(made, " #", 0.6, 1.0)


def switched(made, share):
    has = (
        np.random.default_rng(2).random(made.rows["reward"].shape)
        < np.interp(np.arange(24), [4, 12], [0, share])[:, None]
    )
    made.rows["response"] = np.where(has, "房间很干净，早餐也不错，下次还会再来。", made.rows["response"])


@case("language-switch", near=lambda made: switched(made, 0.15))
def switching(made):
    switched(made, 0.9)


@case("repetition-loops")
def loops(made):
    ids = made.tokens["token_id"]
    ids[8:] = np.where(made.mask[8:], np.arange(LENGTH) % 3 + 2, END)


@case("distinct-collapse")
def alike(made):
    made.rows["response"][10:, :] = made.rows["response"][10, 0]


@case("false-truncation")
def unknown_end(made):
    made.rows["finish_reason"][:] = "length"


def about_the_prompt(made, late):
    """Responses repeat their prompt's number; in the last steps a share of them says the same instead."""
    for step in range(24):
        for row in range(32):
            same = step >= 12 and row < late * 32
            number = made.rows["group"][step, row]
            made.rows["response"][step, row] = "nothing at all" if same else f"a{number} b{number} c{number} d{row}"


@case("template-collapse", near=lambda made: about_the_prompt(made, 0.0))
def template(made):
    about_the_prompt(made, 1.0)


def trapped(made, spikes):
    mean = made.rows["reward"].mean(1, keepdims=True)
    made.rows["reward"] = mean + (made.rows["reward"] - mean) * np.where(np.arange(24) < 6, 1, 0.05)[:, None]
    made.metrics["optim/grad_norm"][[15, 18, 21][:spikes]] = 30


@case("echo-trap", near=lambda made: trapped(made, 0))
def echo(made):
    trapped(made, 3)


def settle_into(made, surprise):
    shrink(made, 0.3)
    made.tokens["mask"] = made.tokens["mask"][::-1].copy()
    share = np.arange(24)[:, None, None] / 23
    made.tokens["logprob"] = np.where(made.mask, -2.5 + (2.5 - surprise) * share, 0)
    made.tokens["ref_logprob"] = np.where(made.mask, made.tokens["logprob"] - 0.2 * share, 0)
    made.rows["reward"] += np.linspace(0, 3, 24)[:, None]


@case("pattern-collapse", near=lambda made: settle_into(made, 2.3))
def settled(made):
    settle_into(made, 0.5)

"""When a KL that explodes is a trouble, and when it is not."""

import numpy as np
import pytest
from doctor_helpers import healthy, reading

from cavesson.doctor.rules.kl import estimator_misplaced, kl_explosion, penalty_mis_scaled

AWAY = np.linspace(0, 4, 24)
"""Nats per token between policy and reference, by step."""


def far(away, rises, penalty=True):
    """Return a run that leaves its reference by ``away`` while its reward rises, or stays as it was."""
    made = healthy()
    made.tokens["ref_logprob"] = made.tokens["ref_logprob"] - np.where(made.mask, away[:, None, None], 0)
    noise = np.random.default_rng(0).normal(size=made.rows["reward"].shape)
    made.rows["reward"] = noise + rises * np.arange(24)[:, None]
    if not penalty:
        made.rows["kl_coef"] = np.zeros_like(made.rows["kl_coef"])
    return made


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("away", "rises", "penalty", "sick"),
    [
        (AWAY, True, True, True),
        (AWAY, False, True, True),
        (AWAY, True, False, False),
        (AWAY, False, False, True),
        (AWAY * (np.arange(24) < 20), True, True, False),
        (AWAY * (np.arange(24) < 23), True, True, True),
        (AWAY * (np.arange(24) < 20), False, True, True),
    ],
    ids=[
        "it pays, and still goes on",
        "it pays nothing",
        "it pays and nothing was to hold it",
        "nothing holds it and it pays nothing",
        "it pays, and came back",
        "it pays, and came back for one step",
        "it paid nothing, and came back",
    ],
)
def test_the_kl_explodes_where_it_is_not_meant_to(tmp_path, away, rises, penalty, sick):
    assert reading(kl_explosion, far(away, rises, penalty), tmp_path / "run").unhealthy == sick


@pytest.mark.parametrize("scaled", [True, False])
def test_the_price_of_a_nat_is_in_units_of_what_the_penalty_meets(scaled, tmp_path):
    made = healthy()
    made.info["rewards_are_scaled"] = scaled
    made.rows["kl_coef"][:] = 1.5
    made.rows["reward"] = made.rows["reward"] * 100
    found = reading(penalty_mis_scaled, made, tmp_path / "run")
    # β = 1.5 outweighs rewards of standard deviation 1, but not rewards that vary by tens.
    assert found.unhealthy == scaled
    assert (found.seen == 1.5) == scaled


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("place", "estimator", "sick"),
    [("reward", "k1", False), ("reward", "k2", True), ("reward", "full", True), ("loss", "k1", True),
     ("loss", "k2", False), ("loss", "k3", False)],
)  # fmt: skip
def test_an_estimator_holds_the_policy_in_one_place_only(place, estimator, sick, tmp_path):
    made = healthy()
    made.info["kl"] = {"place": place, "estimator": estimator}
    assert reading(estimator_misplaced, made, tmp_path / "run").unhealthy == sick

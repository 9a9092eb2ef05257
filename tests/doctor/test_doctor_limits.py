"""Limits near their edge: what is just enough to be named, and what is just too little."""

from pathlib import Path

import numpy as np
import pytest
from doctor_helpers import healthy, reading

from cavesson.doctor.diagnosis import diagnose
from cavesson.doctor.effects import clear_of, grows, share_of
from cavesson.doctor.rules.kl import negative_kl


@pytest.mark.parametrize(("steps", "named"), [(4, False), (5, True)])
@pytest.mark.parametrize("where", ["begins", "ends"])
def test_a_kl_must_stay_negative_for_five_steps(steps: int, named: bool, where: str, tmp_path: Path) -> None:
    """It is 0.2 nats per response below 0, hundreds of standard errors, but less than the nat that TRL warns of."""
    made = healthy(steps=40)
    inside = slice(0, steps) if where == "begins" else slice(40 - steps, 40)
    length = made.mask.sum(-1, keepdims=True)
    made.tokens["logprob"] = made.tokens["ref_logprob"] + np.where(made.mask, 0.1 / length, 0.0)
    made.tokens["logprob"][inside] -= np.where(made.mask, 0.3 / length, 0.0)[inside]
    found = diagnose(made.data(tmp_path), [negative_kl]).findings
    assert bool(found) == named
    assert not named or found[0].reading.noticed == (0 if where == "begins" else 35)


@pytest.mark.parametrize(("steps", "named"), [(2, False), (3, True)])
def test_a_kl_far_below_zero_is_named_at_three_steps(steps: int, named: bool, tmp_path: Path) -> None:
    """Two nats below 0, at steps that do not follow each other."""
    made = healthy(steps=40)
    length = made.mask.sum(-1, keepdims=True)
    away = np.full((40, 1, 1), 0.1)
    away[5 : 5 + 10 * steps : 10] = -2.0
    made.tokens["logprob"] = made.tokens["ref_logprob"] + np.where(made.mask, away / length, 0.0)
    assert reading(negative_kl, made, tmp_path).unhealthy == named


@pytest.mark.parametrize("kind", ["none", "all"])
@pytest.mark.parametrize("count", [9, 24, 99])
def test_a_share_of_0_or_1_is_not_certain(kind: str, count: int) -> None:
    """Jeffreys' share: half a success and half a failure more; (n + ½) / (n + 1) · ½ / (n + 1) is its variance · n."""
    found = share_of(np.full(count, kind == "all"), np.arange(count))
    assert found.value == float(kind == "all")
    assert found.error == pytest.approx(((count + 0.5) * 0.5) ** 0.5 / (count + 1) / count**0.5)


def test_the_error_of_a_share_is_that_of_its_prompts() -> None:
    """Two of four prompts have it in all of their three responses: 4 · (3 · ½)² = 9, and √9 / 12 = ¼."""
    found = share_of(np.repeat([True, False, True, False], 3), np.repeat(np.arange(4), 3))
    assert found.value == 0.5 and found.error == pytest.approx(0.25)


@pytest.mark.parametrize(("now", "spreads"), [(1, False), (4, False), (24, True)])
def test_a_pattern_that_was_in_none_of_few_responses_has_not_spread_for_a_single_one(now: int, spreads: bool) -> None:
    """In 0 of 8 responses at first, whose share is uncertain by 8 %, and in ``now`` of 64 at the end."""
    before, late = share_of(np.zeros(8, bool), np.arange(8)), share_of(np.arange(64) < now, np.arange(64))
    assert grows(before, late, clear_of(0.01, 20)) == spreads

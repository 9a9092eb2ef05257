"""Stochastic rounding to bfloat16."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from cavesson.ops.rounding import rounded_randomly

NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**127), max_value=2.0**127)


def rounded(numbers: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return rounded_randomly(numbers, torch.Generator().manual_seed(seed))


@given(NUMBERS, st.integers(0, 1000))
def test_a_number_becomes_one_of_its_neighbours(number: float, seed: int) -> None:
    """The upper half of its bits, or the next ones."""
    lower = np.float32(number).view(np.uint32) & np.uint32(0xFFFF0000)
    neighbours = [float(np.uint32(bits).view(np.float32)) for bits in (lower, lower + np.uint32(0x10000))]
    is_exact = neighbours[0] == number
    seen = rounded(torch.tensor([number]), seed)
    assert seen.dtype == torch.bfloat16 and float(seen) in neighbours[: 1 if is_exact else 2]


def test_the_mean_is_the_number_itself() -> None:
    """Between 1 and 1 + 2⁻⁷, at three tenths: 1,000,000 draws have a mean within five standard errors."""
    step = 2.0**-7
    seen = rounded(torch.full((1_000_000,), 1 + 0.3 * step)).double()
    assert seen.unique().tolist() == [1.0, 1.0 + step]
    assert abs(float((seen - 1).mean()) / step - 0.3) < 5 * (0.3 * 0.7 / 1_000_000) ** 0.5


def test_what_is_not_finite_stays() -> None:
    numbers = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0])
    bits = torch.tensor([-1, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)  # the largest bits of not-a-number
    for seed in range(20):
        torch.testing.assert_close(rounded(numbers, seed).float(), numbers, equal_nan=True, rtol=0, atol=0)
        assert rounded(bits, seed).isnan().all()

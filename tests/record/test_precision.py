import math
from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from record_helpers import kept

from cavesson.record.precision import Grid, Mantissa, rounded
from cavesson.record.schema import TOKEN_COLUMNS

# From here to the end of float32 eleven bits would round up to 2^128, which float32 does not have.
LAST_STEP = (2 - 2**-11) * 2.0**127
FLOATS_32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(deadline=None)
@given(FLOATS_32)
def test_a_grid_is_the_nearest_multiple_by_exact_fractions(value):
    expected = Fraction(round(Fraction(value) * 2**17), 2**17)
    assert Fraction(float(rounded(np.array([value]), Grid(17))[0])) == expected


@settings(deadline=None)
@given(FLOATS_32.filter(lambda value: value == 0 or 2**-126 <= abs(value) < LAST_STEP))
def test_ten_bits_are_float16_scaled_by_a_power_of_two(value):
    mantissa, exponent = math.frexp(value)
    expected = math.ldexp(float(np.float16(mantissa)), exponent)
    assert rounded(np.array([value]), Mantissa(10))[0] == expected


def test_rounding_does_not_lead_out_of_float32():
    last, below = np.float32(LAST_STEP), np.nextafter(np.float32(LAST_STEP), np.float32(0))
    values = np.array([np.finfo(np.float32).max, -last, below])
    assert rounded(values, Mantissa(10)).tolist() == [values[0], values[1], (2 - 2**-10) * 2.0**127]
    # In a column that needs float64 because of another number, they round like any other.
    assert rounded(np.append(values, 1e300), Mantissa(10))[:2].tolist() == [2.0**128, -(2.0**128)]


@settings(deadline=None)
@given(st.lists(st.floats(-60, 0, width=32), min_size=2, max_size=2))
def test_differences_of_log_probabilities_are_exact_to_a_hundred_thousandth(pair):
    first, second = rounded(np.array(pair), Grid(17)).astype(np.float32).astype(np.float64)
    assert abs((first - second) - (pair[0] - pair[1])) <= 2**-17 < 1e-5


@settings(deadline=None)
@given(st.lists(st.floats(), min_size=1, max_size=3), st.sampled_from([Grid(17), Mantissa(10)]))
def test_rounding_again_changes_nothing_and_no_number_becomes_infinite(values, precision):
    once = rounded(np.array(values), precision)
    assert np.array_equal(rounded(once, precision), once, equal_nan=True)
    assert np.array_equal(np.isfinite(once), np.isfinite(values))
    assert np.array_equal(np.isnan(once), np.isnan(values))


def test_each_column_has_the_precision_that_its_use_needs():
    grid = {column.name for column in TOKEN_COLUMNS if column.precision == Grid(17)}
    assert grid == {"logprob", "ref_logprob", "sampler_logprob", "teacher_logprob"}
    signals = {column.name for column in TOKEN_COLUMNS if column.precision == Mantissa(10)}
    assert signals == {"value", "token_reward", "advantage", "return", "entropy"}
    # Worked by hand: 2049 lies halfway between 2048 and 2050, and 2048 is the even one; 1 + 2^-18 is nearer to 1.
    assert kept("value", np.array([2049.0]))[0] == 2048.0
    assert kept("logprob", np.array([1 + 2**-18 * 0.9, 1 + 2**-18 * 1.1])).tolist() == [1.0, 1 + 2**-17]

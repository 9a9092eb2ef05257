import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from cavesson.rollout.engines.distribution import draw, sampling_logprobs, without
from cavesson.rollout.engines.settings import SamplingSettings

ALMOST_ONE = math.nextafter(1.0, 0.0)
# In no particular order, so that a filter that forgets to sort back is seen.
P = (0.15, 0.5, 0.1, 0.25)


def filtered(p=P, banned: list[int] | None = None, **settings: float) -> list[float]:
    logits = torch.tensor([p]).log() + 3.0  # logits are defined up to a constant
    if banned is not None:
        logits = without(logits, torch.tensor(banned), torch.tensor([True]))
    return sampling_logprobs(logits, SamplingSettings(**settings)).exp()[0].tolist()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, P),
        ({"top_k": 1}, (0, 1, 0, 0)),
        ({"top_k": 2}, (0, 2 / 3, 0, 1 / 3)),
        ({"top_k": 9}, P),  # more than there are
        ({"top_p": 0.49}, (0, 1, 0, 0)),  # the likeliest reaches it alone, and stays
        ({"top_p": 0.51}, (0, 2 / 3, 0, 1 / 3)),  # the one that reaches it stays too
        ({"top_p": 0.76}, (0.15 / 0.9, 0.5 / 0.9, 0, 0.25 / 0.9)),
        # After top_k: (⅔, ⅓); the first alone passes 0.6, which ½ did not.
        ({"top_k": 2, "top_p": 0.6}, (0, 1, 0, 0)),
        ({"banned": [1]}, (0.3, 0, 0.2, 0.5)),
        # What is banned does not use up a place among the k.
        ({"banned": [1, 3], "top_k": 1}, (1, 0, 0, 0)),
    ],
)
def test_filters_by_hand(settings, expected):
    assert filtered(**settings) == pytest.approx(expected, abs=1e-6)


def test_temperature_by_hand():
    roots = [math.sqrt(p) for p in P]
    assert filtered(temperature=2.0) == pytest.approx([r / sum(roots) for r in roots], abs=1e-6)
    squares = [p * p for p in P]
    assert filtered(temperature=0.5) == pytest.approx([s / sum(squares) for s in squares], abs=1e-6)


def test_temperature_comes_before_the_nucleus():
    # The two likeliest hold 0.75 at temperature 1 and 0.63 at temperature 2: only there is a third one needed.
    assert sum(p > 0 for p in filtered(top_p=0.7)) == 2
    assert sum(p > 0 for p in filtered(top_p=0.7, temperature=2.0)) == 3


@pytest.mark.parametrize("settings", [{"top_k": 5}, {"top_p": 0.8}, {"temperature": 0.7, "top_k": 20, "top_p": 0.9}])
def test_equals_the_filters_of_transformers(settings):
    logits = 3 * torch.randn(16, 50)
    expected = TemperatureLogitsWarper(settings.get("temperature", 1.0))(None, logits)
    if "top_k" in settings:
        expected = TopKLogitsWarper(settings["top_k"])(None, expected)
    if "top_p" in settings:
        expected = TopPLogitsWarper(settings["top_p"])(None, expected)
    seen = sampling_logprobs(logits, SamplingSettings(**settings))
    torch.testing.assert_close(seen.exp(), expected.softmax(-1))


def test_logits_are_not_written():
    logits = torch.randn(3, 9)
    copy = logits.clone()
    sampling_logprobs(logits, SamplingSettings(temperature=0.5, top_k=3, top_p=0.5))
    without(logits, torch.tensor([0]), torch.tensor([True, False, True]))
    assert torch.equal(logits, copy)


@pytest.mark.parametrize(
    ("uniform", "token"),
    [(0.0, 0), (0.1499, 0), (0.1501, 1), (0.6499, 1), (0.6501, 2), (0.7499, 2), (0.7501, 3), (ALMOST_ONE, 3)],
)
def test_draw_by_hand(uniform, token):
    # Cumulated: 0.15, 0.65, 0.75, 1.
    assert draw(torch.tensor([P]).log(), torch.tensor([uniform], dtype=torch.float64)).tolist() == [token]


def test_every_row_has_its_own_number():
    uniforms = torch.tensor([0.9, 0.1, 0.5], dtype=torch.float64)
    assert draw(torch.tensor([P] * 3).log(), uniforms).tolist() == [3, 0, 1]


def logits_and_uniforms() -> st.SearchStrategy[tuple[list[float], float]]:
    number = st.floats(0, 1, exclude_max=True) | st.sampled_from([0.0, ALMOST_ONE])
    return st.tuples(st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=40), number)


@given(logits_and_uniforms(), st.integers(0, 6), st.floats(0.05, 1.0), st.sampled_from([0.3, 1.0, 3.0]))
def test_what_is_filtered_out_is_never_drawn(case, top_k, top_p, temperature):
    logits, uniform = case
    settings = SamplingSettings(top_k=top_k, top_p=top_p, temperature=temperature)
    allowed = without(torch.tensor([logits]), torch.tensor([0]), torch.tensor([True]))
    logprobs = sampling_logprobs(allowed, settings)
    token = draw(logprobs, torch.tensor([uniform], dtype=torch.float64)).item()
    assert logprobs[0, token].item() > -math.inf
    assert token != 0


def test_the_last_tokens_are_safe_from_the_largest_number():
    logprobs = torch.tensor([[0.3, 0.7, 0.0, 0.0]]).log()
    assert draw(logprobs, torch.tensor([ALMOST_ONE], dtype=torch.float64)).tolist() == [1]
    assert draw(logprobs.flip(1), torch.zeros(1, dtype=torch.float64)).tolist() == [2]


def test_rare_tokens_of_a_large_vocabulary_are_not_rounded_away():
    # One token of 1 − 1e-8 and 100,000 that share 1e-8: float32 would not see them.
    p = torch.full((1, 100_001), 1e-13, dtype=torch.float64)
    p[0, 0] = 1 - 1e-8
    token = draw(p.log().float(), torch.tensor([1 - 0.5e-8], dtype=torch.float64)).item()
    assert token == pytest.approx(50_000, abs=500)


def frequencies(logprobs: Tensor, n: int) -> list[int]:
    uniforms = torch.from_numpy(np.random.default_rng(5).random(n))
    return torch.bincount(draw(logprobs.expand(n, -1), uniforms), minlength=logprobs.shape[1]).tolist()


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.5}, {"top_k": 4}, {"top_p": 0.8}])
def test_frequencies_fit_the_probabilities(settings):
    # A right implementation fails at one seed in 10,000; this seed stays.
    logits = torch.randn(1, 12)
    probabilities = (logits / settings.get("temperature", 1.0)).double().softmax(-1)[0]
    order = probabilities.argsort(descending=True)
    kept = len(order)
    if "top_k" in settings:
        kept = settings["top_k"]
    if "top_p" in settings:
        kept = int((probabilities[order].cumsum(0) < settings["top_p"]).sum()) + 1
    expected = torch.zeros(12, dtype=torch.float64)
    expected[order[:kept]] = probabilities[order[:kept]] / probabilities[order[:kept]].sum()
    counts = np.array(frequencies(sampling_logprobs(logits, SamplingSettings(**settings)), 20_000))
    possible = expected.numpy() > 0
    assert counts[~possible].sum() == 0
    assert chisquare(counts[possible], 20_000 * expected.numpy()[possible]).pvalue > 1e-4


@given(st.integers(1, 2000), st.floats(0, ALMOST_ONE), st.integers(0, 99))
def test_a_draw_is_where_the_sum_of_all_before_passes_the_number(tokens: int, uniform: float, seed: int) -> None:
    """Whatever the pieces: in one sum of exact numbers, in which some tokens have none."""
    weights = np.random.default_rng(seed).integers(0, 3, tokens)
    weights[seed % tokens] = 1
    logprobs = torch.tensor(weights, dtype=torch.float64).log()[None]
    given = logprobs.clone()
    seen = int(draw(logprobs, torch.tensor([uniform], dtype=torch.float64)))
    assert torch.equal(logprobs, given)
    cumulated = np.cumsum(weights)
    expected = int(np.searchsorted(cumulated, uniform * cumulated[-1], side="right"))
    assert weights[seen] > 0 and seen == min(expected, int(np.flatnonzero(weights)[-1]))


@pytest.mark.parametrize("tokens", [1, 258, 3000])
def test_a_draw_from_numbers_that_are_none_is_some_token(tokens: int) -> None:
    """The run reports what became of its weights, and keeps the rollouts."""
    seen = draw(torch.full((2, tokens), torch.nan), torch.tensor([0.0, 0.9], dtype=torch.float64))
    assert ((seen >= 0) & (seen < tokens)).all()

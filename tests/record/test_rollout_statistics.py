"""What the recorder computes of each rollout, by hand and by slow versions."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from record_helpers import rollouts

import cavesson
from cavesson.record import Recorder
from cavesson.record.write.statistics import STATISTICS, rollout_statistics
from cavesson.text.statistics import distinct, repetition

# The third entry of sample 1 and all of sample 2 are padding, and must not be looked at.
MASK = np.array([[True, True, True], [True, True, False], [False, False, False]])


def recorded(folder: Path, **tokens: Any) -> list[dict[str, Any]]:
    rows, _ = rollouts(3)
    with Recorder(folder) as recorder:
        recorder.rollouts(0, rows, {"mask": MASK} | {name: np.array(v, np.float32) for name, v in tokens.items()})
    return cavesson.open(folder).rows(list(STATISTICS)).to_pylist()


def column(rows: list[dict[str, Any]], name: str) -> list[Any]:
    return [row[name] for row in rows]


def test_kl_and_entropy_by_hand(folder):
    found = recorded(
        folder,
        logprob=[[-1, -2, -3], [-0.5, -0.5, 99], [99, 99, 99]],
        ref_logprob=[[-1.5, -1, -3], [-0.5, -2.5, -99], [1, 2, 3]],
        entropy=[[1, 2, 6], [0.25, 0.75, 99], [99, 99, 99]],
    )
    # Sample 0: Δ = 0.5, −1, 0. Sample 1: Δ = 0, 2. A sum over nothing is 0, a mean over nothing is not there.
    e = math.exp
    assert column(found, "length") == [3, 2, 0]
    assert column(found, "kl_k1") == [-0.5, 2.0, 0.0]
    assert column(found, "log_ratio_max") == [1.0, 2.0, None]
    assert found[0]["kl_k3"] == pytest.approx(((e(-0.5) - 1 + 0.5) + (e(1) - 1 - 1) + 0) / 3, rel=1e-12)
    assert found[1]["kl_k3"] == pytest.approx((0 + e(-2) - 1 + 2) / 2, rel=1e-12)
    assert found[2]["kl_k3"] is None
    assert column(found, "entropy") == [3.0, 0.5, None]


def test_gaps_by_hand(folder):
    found = recorded(
        folder,
        logprob=[[-1, -2, -3], [-0.5, -0.5, 99], [99, 99, 99]],
        sampler_logprob=[[-1.5, -1, -3], [-0.5, -2.5, -99], [1, 2, 3]],
        value=[[1, 2, 3], [4, 5, 99], [99, 99, 99]],
        **{"return": [[3, 1, 1], [1, 1, -99], [0, 0, 0]]},
    )
    # Gaps 0.5, 1, 0 and 0, 2. Errors −2, 1, 2 and 3, 4: √(9 / 3) and √(25 / 2).
    assert column(found, "sampler_gap") == [0.5, 1.0, None]
    assert column(found, "value_error") == pytest.approx([math.sqrt(3), math.sqrt(12.5), None])


def test_repeated_tokens_by_hand(folder):
    rows, _ = rollouts(4)
    ids = np.array([[7, 8, 7, 8, 7, 8], [1, 1, 1, 1, 1, 1], [1, 2, 3, 0, 0, 0], [9, 0, 0, 0, 0, 0]])
    mask = np.arange(6) < np.array([[6], [5], [3], [1]])
    with Recorder(folder) as recorder:
        recorder.rollouts(0, rows, {"mask": mask, "token_id": ids})
    found = cavesson.open(folder).rows(["distinct_2", "repetition"]).to_pylist()
    # Sample 0: pairs 78 87 78 87 78, two of five; fours 7878 8787 7878, one of three is a repetition.
    # Sample 1: four pairs, one kind; two fours, one kind. Sample 2: two pairs, no four. Sample 3: neither.
    assert column(found, "distinct_2") == pytest.approx([2 / 5, 1 / 4, 1.0, None])
    assert column(found, "repetition") == pytest.approx([1 / 3, 1 / 2, None, None])


@settings(max_examples=min(50, settings.default.max_examples))
@given(st.lists(st.lists(st.integers(0, 2), max_size=9), min_size=1, max_size=5), st.integers(1, 2**30))
def test_repeated_tokens_as_the_text_statistics_count_them(responses, factor):
    index = np.repeat(np.arange(len(responses)), [len(response) for response in responses])
    ids = np.array([token * factor for response in responses for token in response], np.int64)
    found = rollout_statistics(index, len(responses), {"token_id": ids})
    assert found["distinct_2"].to_pylist() == pytest.approx([distinct([response], 2) for response in responses])
    assert found["repetition"].to_pylist() == pytest.approx([repetition([response]) for response in responses])


# Two pairs that a hash of 64 bits with splitmix's constants takes for one: counting must not rest on a hash.
HASHED_ALIKE = (52_826, 393_620_384), (23_901, 0)


def different(response: Sequence[int], n: int) -> float | None:
    """The share of different n-grams, by a set of them."""
    grams = [tuple(response[i : i + n]) for i in range(len(response) - n + 1)]
    return len(set(grams)) / len(grams) if grams else None


def test_different_pairs_are_told_apart_whatever_their_hashes():
    (a, b), (c, d) = HASHED_ALIKE
    found = rollout_statistics(np.zeros(4, np.int64), 1, {"token_id": np.array([a, b, c, d])})
    assert found["distinct_2"].to_pylist() == [1.0]


@settings(max_examples=min(100, settings.default.max_examples))
@given(
    st.lists(st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(0, 2), max_size=12), min_size=1, max_size=6),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
)
def test_any_ids_are_counted_as_sets_of_them_are(responses, times, chance):
    responses = [response * times for response in responses]
    order = chance.sample(range(len(responses)), len(responses))  # the rollouts' tokens may come in any
    index = np.repeat(np.array(order), [len(responses[i]) for i in order])
    found = rollout_statistics(
        index, len(responses), {"token_id": np.array([t for i in order for t in responses[i]], np.int64)}
    )
    assert found["distinct_2"].to_pylist() == [different(response, 2) for response in responses]
    fours = [different(response, 4) for response in responses]
    assert found["repetition"].to_pylist() == [None if share is None else 1 - share for share in fours]


def test_statistics_are_of_the_numbers_before_rounding(folder):
    # exp(−Δ) − 1 + Δ = Δ²/2 − Δ³/6 + …: at Δ = 1e-8 the direct formula has no correct digit in float64, and
    # on the grid that the tokens are kept on Δ is 0.
    rows, tokens = rollouts(1, 1)
    tokens |= {"logprob": np.full((1, 1), 1e-8), "ref_logprob": np.zeros((1, 1))}
    with Recorder(folder) as recorder:
        recorder.rollouts(0, rows, tokens)
    run = cavesson.open(folder)
    row = run.rows(["kl_k1", "kl_k3"]).to_pylist()[0]
    assert row["kl_k1"] == 1e-8 and row["kl_k3"] == pytest.approx(1e-16 / 2, rel=1e-6, abs=0)
    assert run.tokens(0)["logprob"].to_pylist() == [0.0]


def test_statistics_without_their_columns_are_null(folder):
    rows, tokens = rollouts()
    with Recorder(folder) as recorder:
        recorder.rollouts(0, rows, tokens | {"logprob": np.zeros((2, 3), np.float32)})
    assert (
        cavesson.open(folder).rows(list(STATISTICS)).to_pylist()
        == [{"length": 3} | dict.fromkeys(name for name in STATISTICS if name != "length")] * 2
    )

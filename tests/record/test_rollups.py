"""Roll-ups against slow versions that look at every number."""

import math
import tempfile
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from record_helpers import rollouts

import cavesson
from cavesson.record import Recorder, begin_attempt, compact, write_run
from cavesson.record.rollups import _keys, edges, quantiles, rollups_of

FLOATS = st.floats(width=32)


def sketch(values):
    """The keys, ascending, of the bins that the finite ones of the values are in, and how many are in each."""
    return np.unique(_keys(values[np.isfinite(values)]), return_counts=True)


def line(run: Any, column: str, level: str = "row", **more: Any) -> dict[str, Any]:
    """The one line of a column."""
    found = [row for row in run.rollups([column]).to_pylist() if {"level": level, **more}.items() <= row.items()]
    (only,) = found
    return dict(only)


def test_numbers_by_hand(folder):
    rows, tokens = rollouts(4, 1, reward=[1.0, -3.0, math.nan, 2.0], ref_reward=[None, 1.0, 1.0, 1.5])
    rows |= {"reward_parts": [{"a": 2.0}, {"a": 4.0, "b/c": 1.0}, None, {"b/c": math.inf}]}
    with Recorder(folder) as recorder:
        recorder.rollouts(3, rows | {"split": ["train", "train", "train", "eval"]}, tokens)
    run = cavesson.open(folder)
    reward = line(run, "reward", split="train")
    expected = {"step": 3, "count": 2, "not_finite": 1, "sum": -2.0, "sum_squares": 10.0, "min": -3.0, "max": 1.0}
    assert {name: reward[name] for name in expected} == expected
    assert reward["sketch_counts"] == [1, 1] and reward["bin_counts"] is None
    assert line(run, "reward", split="eval")["sum"] == 2.0
    # −3 − 1 and NaN − 1; the first rollout has no reference.
    assert {name: line(run, "gap", split="train")[name] for name in ("count", "not_finite", "sum")} == {
        "count": 1, "not_finite": 1, "sum": -4.0
    }  # fmt: skip
    assert [line(run, "part/a")["sum"], line(run, "part/b/c", split="train")["sum"]] == [6.0, 1.0]
    only_infinite = line(run, "part/b/c", split="eval")
    assert [only_infinite[name] for name in ("count", "not_finite", "sum", "min", "max")] == [0, 1, 0.0, None, None]
    assert {row["column"] for row in run.rollups().to_pylist()} == {
        "reward",
        "ref_reward",
        "gap",
        "part/a",
        "part/b/c",
        "length",
    }


def test_bins_of_eight_positions_by_hand(folder):
    rows, _ = rollouts(2)
    mask = np.arange(10) < np.array([[10], [3]])
    tokens = {"mask": mask, "logprob": np.full((2, 10), -2.0), "ref_logprob": np.full((2, 10), -1.5)}
    tokens["value"] = np.arange(20.0).reshape(2, 10)
    with Recorder(folder) as recorder:
        recorder.rollouts(0, rows, tokens)
    run = cavesson.open(folder)
    value = line(run, "value", "token")
    # Positions 0–7 hold 0 … 7 of the first and 10, 11, 12 of the second response; 8 and 9 the rest of the first.
    assert (value["bin_counts"], value["bin_sums"]) == ([11, 2], [28.0 + 33.0, 17.0])
    assert (value["count"], value["min"], value["max"], value["sketch_keys"]) == (13, 0.0, 12.0, None)
    ratio = line(run, "kl_k1", "token")
    assert (ratio["bin_counts"], ratio["bin_sums"]) == ([11, 2], [-5.5, -1.0])


def test_what_follows_from_the_columns_of_a_token(folder):
    """Worked by hand: the policy gives 1/2, 1/4 and 0, the reference 1/4, 1/2 and 1/2, the sampler 1, 1/4 and 1."""
    policy, reference, sampler = (np.log([numbers]) for numbers in ([0.5, 0.25, 1], [0.25, 0.5, 0.5], [1, 0.25, 1]))
    policy[0, 2] = -math.inf
    tokens = {"mask": np.ones((1, 3), np.bool_), "logprob": policy, "ref_logprob": reference}
    tokens["sampler_logprob"] = sampler
    with Recorder(folder) as recorder:
        recorder.rollouts(0, rollouts(1)[0], tokens)
    run = cavesson.open(folder)
    # k3 = q/p − 1 − ln(q/p): of the first 1/2 − 1 + ln 2, of the second 2 − 1 − ln 2; of the third it is infinite.
    sums = {"kl_k1": 0.0, "kl_k3": 0.5, "sampler_gap": -math.log(2), "prob": 0.5 + 0.25, "ref_prob": 0.25 + 0.5 + 0.5}
    counts = {"kl_k1": 2, "kl_k3": 2, "sampler_gap": 2, "prob": 3, "ref_prob": 3}
    for name, total in sums.items():
        found = line(run, name, "token")
        # Recorded log-probabilities are exact to 2^-18.
        assert found["bin_sums"] == [pytest.approx(total, abs=1e-4)], name
        assert (found["count"], found["not_finite"]) == (counts[name], 0)
    of_tokens = run.rollups().filter(pa.compute.field("level") == "token").to_pylist()
    assert {one["column"]: one["not_finite"] for one in of_tokens if one["not_finite"]} == {"logprob": 1}


def test_padding_that_a_source_kept_counts_nowhere():
    rows = pa.table({"step": [0], "sample": [0], "reward": [1.0]})
    tokens = pa.table({"step": [0] * 3, "sample": [0] * 3, "position": [0, 1, 2], "learned": [True, True, False]})
    tokens = tokens.append_column("value", pa.array([1.0, 2.0, 99.0], pa.float32()))
    (value,) = rollups_of(rows, tokens).filter(pa.compute.field("column") == "value").to_pylist()
    assert (value["count"], value["sum"], value["max"], value["bin_sums"]) == (2, 3.0, 2.0, [3.0])


@settings(deadline=None)
@given(FLOATS.filter(math.isfinite))
def test_a_value_is_in_its_bin_which_is_narrow(value):
    keys, counts = sketch(np.array([value]))
    (low,), (high,) = edges(keys)
    assert counts.tolist() == [1]
    if abs(value) >= 2**-126:
        assert (low <= value < high) if value > 0 else (low < value <= high)
        assert abs((low + high) / 2 - value) <= 0.008 * abs(value)
    else:
        assert abs((low + high) / 2 - value) <= 2**-126


@settings(deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.floats(0, 1))
def test_a_quantile_is_near_the_value_of_that_rank(values, share):
    expected = sorted(values)[round(share * (len(values) - 1))]
    (found,) = quantiles(*sketch(np.array(values)), [share])
    assert abs(found - expected) <= 0.008 * abs(expected) + 1e-37


def test_quantiles_of_nothing_are_not_numbers():
    assert np.isnan(quantiles(*sketch(np.array([math.nan])), [0, 1])).all()


SPLITS = st.sampled_from([None, "train", "eval"])


def tables(given_rollouts: Any) -> tuple[pa.Table, pa.Table]:
    steps, splits, rewards, values = zip(*given_rollouts, strict=True)
    rows = {"step": pa.array(steps, pa.int32()), "sample": pa.array(range(len(steps)), pa.int32())}
    rows |= {"split": pa.array(splits, pa.string()), "reward": pa.array(rewards, pa.float64())}
    flat = [(steps[i], i, p, value) for i in range(len(steps)) for p, value in enumerate(values[i])]
    columns = zip(*flat, strict=True) if flat else ((), (), (), ())
    types = {"step": pa.int32(), "sample": pa.int32(), "position": pa.int32(), "value": pa.float32()}
    tokens = {name: pa.array(column, types[name]) for name, column in zip(types, columns, strict=True)}
    return pa.table(rows), pa.table(tokens)


def gathered(given_rollouts: Any) -> dict[tuple[Any, ...], list[tuple[int, float]]]:
    """(step, split, level) → the values, each with the bin of its position."""
    found: dict[tuple[Any, ...], list[tuple[int, float]]] = {}
    for step, split, reward, values in given_rollouts:
        found.setdefault((step, split, "row"), []).append((0, reward))
        for position, value in enumerate(values):
            if value is not None:
                found.setdefault((step, split, "token"), []).append((position // 8, value))
    return found


@settings(max_examples=min(40, settings.default.max_examples))
@given(st.lists(st.tuples(st.integers(0, 2), SPLITS, FLOATS, st.lists(FLOATS | st.none(), max_size=20)), min_size=1))
def test_any_rollouts_as_a_loop_over_all_numbers_counts_them(given_rollouts):
    slow = gathered(given_rollouts)
    found = {(r["step"], r["split"], r["level"]): r for r in rollups_of(*tables(given_rollouts)).to_pylist()}
    assert found.keys() == slow.keys()
    for key, entries in slow.items():
        finite = [(cell, value) for cell, value in entries if math.isfinite(value)]
        values = [value for _, value in finite]
        row = found[key]
        assert (row["count"], row["not_finite"]) == (len(finite), len(entries) - len(finite))
        assert (row["min"], row["max"]) == (min(values, default=None), max(values, default=None))
        small = pytest.approx(0, abs=1e-9 * sum(map(abs, values)))
        assert row["sum"] - math.fsum(values) == small
        assert row["sum_squares"] == pytest.approx(math.fsum(value**2 for value in values), rel=1e-9)
        if key[2] == "row":
            keys, counts = sketch(np.array([value for _, value in entries]))
            assert (row["sketch_keys"], row["sketch_counts"]) == (keys.tolist(), counts.tolist())
        else:
            cells = range(max((cell for cell, _ in finite), default=-1) + 1)
            assert row["bin_counts"] == [sum(cell == own for own, _ in finite) for cell in cells]
            for cell, total in zip(cells, row["bin_sums"], strict=True):
                assert total - math.fsum(value for own, value in finite if own == cell) == small


def test_roll_ups_of_several_ranks_are_those_of_one(folder):
    rng = np.random.default_rng(5)
    rows, _ = rollouts(12, 1, reward=rng.normal(size=12), split=["train", "eval", None] * 4)
    mask = np.arange(20) < rng.integers(0, 21, 12)[:, None]
    tokens = {"mask": mask, "value": rng.normal(size=(12, 20)), "logprob": -rng.random((12, 20))}
    with tempfile.TemporaryDirectory() as name:
        write_run(name, {})
        with Recorder(name) as recorder:
            recorder.rollouts(0, rows, tokens)
        for rank, part in enumerate((slice(0, 5), slice(5, 6), slice(6, 12))):
            with Recorder(folder, attempt=0, rank=rank) as recorder:
                mine = {key: values[part] for key, values in rows.items()}
                recorder.rollouts(0, mine, {key: values[part] for key, values in tokens.items()})
        whole, parts = (cavesson.open(place).rollups().to_pylist() for place in (name, folder))
    assert len(whole) == len(parts) and len(whole) > 10
    for one, other in zip(whole, parts, strict=True):
        for key, value in one.items():
            assert other[key] == (pytest.approx(value) if isinstance(value, float | list) else value), key


def test_a_record_without_roll_ups_has_them_all_the_same(folder):
    with Recorder(folder) as recorder:
        for step in range(3):
            recorder.rollouts(step, *rollouts(3, 2))
    run = cavesson.open(folder)
    before = run.rollups().to_pylist()
    for path in folder.glob("record/rollups-*"):
        path.unlink()
    assert run.rollups().to_pylist() == before
    assert run.rollups(["reward"], [1]).to_pylist() == [r for r in before if r["column"] == "reward" and r["step"] == 1]
    assert run.sql("SELECT sum(count) FROM rollups WHERE \"column\" = 'reward'").fetchall() == [(9,)]


@pytest.mark.parametrize("state", ["as written", "compacted", "without roll-ups"])
def test_values_that_are_not_finite_count_but_those_of_an_attempt_that_was_left(state, folder):
    for start, reward in ((0, math.nan), (1, 0.0)):
        with Recorder(folder, attempt=begin_attempt(folder, start)) as recorder:
            for step in range(start, 3 - start):
                recorder.rollouts(step, *rollouts(3, reward=[reward, 1.0, math.inf]))
        if state == "compacted" and start == 0:
            compact(folder)
    for path in folder.glob("record/rollups-*") if state == "without roll-ups" else ():
        path.unlink()
    found = cavesson.open(folder).not_finite().to_pylist()
    assert [(row["step"], row["column"], row["not_finite"]) for row in found] == [(0, "reward", 2), (1, "reward", 1)]

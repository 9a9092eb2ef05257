import math

import numpy as np
import pytest
from board_helpers import ask, board_of, client_of
from hypothesis import given, settings
from hypothesis import strategies as st
from index_helpers import new_run, record, text_of

import cavesson.record
from cavesson.board import search as search_module
from cavesson.board.selection import Order, page_of

KEYS = ("step", "sample")


def get(client, path, **parameters):
    answer = client.get(f"/api/runs/run/{path}", params=parameters)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture(scope="module")
def table(folder):
    return cavesson.record.open(folder).rows().to_pylist(maps_as_pydicts="strict")


def keys(rows):
    return [(row["step"], row["sample"]) for row in rows]


@pytest.mark.parametrize("column", ["reward", "length", "kl_k1", "step", "part/bad/../", "gap"])
@pytest.mark.parametrize("sign", ["", "-"])
def test_rows_come_sorted_in_both_directions(client, table, column, sign):
    def value(row):
        if column == "gap":
            return np.float32(row["reward"]) - np.float32(0.5)
        return np.float32(row["reward_parts"]["bad/../"] if "/" in column else row[column])

    got = get(client, "rows", sort=sign + column, limit=500)
    assert got["total"] == 96 and not got["at_most"] and got["most"] == 96
    assert sorted(keys(got["rows"])) == keys(table)
    values = [value(next(t for t in table if keys([t]) == [key])) for key in keys(got["rows"])]
    assert values == sorted(values, reverse=bool(sign))


def test_a_row_holds_the_numbers_of_the_record(client, table):
    by_key = dict(zip(keys(table), table, strict=True))
    for row in get(client, "rows", limit=500)["rows"]:
        wanted = by_key[row["step"], row["sample"]]
        for name in ("group", "split", "finish_reason", "length", "prompt", "response"):
            assert row[name] == wanted[name], name
        for name in ("reward", "kl_k1", "kl_k3", "ref_reward", "log_ratio_max"):
            assert row[name] == pytest.approx(wanted[name], rel=1e-6), name
        assert row["parts"] == wanted["reward_parts"]
        assert row["reward"] == wanted["reward"], "0.1 is shown as 0.1"


def test_pages_put_together_are_the_whole(client):
    whole = keys(get(client, "rows", sort="-reward", limit=500)["rows"])
    pages = [get(client, "rows", sort="-reward", offset=offset, limit=7) for offset in range(0, 105, 7)]
    assert [key for page in pages for key in keys(page["rows"])] == whole
    assert get(client, "rows", offset=10_000)["rows"] == []


@pytest.mark.parametrize("asked", [{}, {"filter": "reward > 0"}, {"steps": "3-7"}, {"q": "the"}])
@pytest.mark.parametrize("sort", ["step", "reward", "-reward"])
def test_a_rollout_is_found_at_its_place_in_the_order(client, sort, asked):
    shown = keys(ask(client, sort=sort, **asked)["rows"])
    assert len(shown) > 8
    for place, (step, sample) in [*enumerate(shown)][::5]:
        assert get(client, "rows", sort=sort, **asked, at=f"{step}.{sample}", limit=1)["place"] == place
    assert get(client, "rows", sort=sort, **asked, at="99.0")["place"] is None
    others = {(step, sample) for step in range(12) for sample in range(8)} - {*shown}
    for step, sample in sorted(others)[:5]:
        assert get(client, "rows", sort=sort, **asked, at=f"{step}.{sample}")["place"] is None


def test_filter_steps_and_text_together(client, table):
    got = get(client, "rows", filter="reward > 3 and length < 9", steps="2-8", q="CONCERT", limit=500)
    wanted = [
        t for t in table if t["reward"] > 3 and t["length"] < 9 and 2 <= t["step"] <= 8 and "concert" in t["response"]
    ]
    assert keys(got["rows"]) == keys(wanted) and 0 < len(wanted) < 20
    for row in got["rows"]:
        assert row["response"][slice(*row["hit"])].lower() == "concert"


def test_hits_by_step_add_up(client, table):
    got = get(client, "hits", q="night", steps="3-9")
    assert got["step"] == list(range(3, 10)) and got["rows"] == [8] * 7
    wanted = [sum("night" in t["response"] for t in table if t["step"] == step) for step in range(3, 10)]
    assert got["hits"] == wanted


def test_hits_of_steps_that_are_far_apart_are_counted_alike(client, monkeypatch):
    usual = get(client, "hits", q="night", filter="step != 4")
    monkeypatch.setattr(search_module, "MAX_STEPS", 0)
    assert get(client, "hits", q="night", filter="step != 4") == usual and 4 not in usual["step"]


@pytest.mark.parametrize("where", ["filter", "sort", "steps"])
def test_what_cannot_be_read_is_one_plain_line(client, where):
    answer = client.get("/api/runs/run/rows", params={where: "nonsense >"})
    assert answer.status_code in (400, 422)
    assert list(answer.json()) == ["error"] and "\n" not in answer.json()["error"]


def test_histogram_counts_every_value_once(client, table):
    rewards = np.array([np.float32(t["reward"]) for t in table])
    got = get(client, "histogram", column="reward", bins=7)
    assert sum(got["counts"]) + got["below"] + got["above"] == 96 and got["missing"] == 0
    wanted, _ = np.histogram(rewards, bins=np.array(got["edges"]))
    assert got["counts"] == wanted.tolist()
    got = get(client, "histogram", column="reward", bins=4, lo=2, hi=4, steps="1-5", filter="length > 2")
    some = np.array([np.float32(t["reward"]) for t in table if 1 <= t["step"] <= 5 and t["length"] > 2])
    assert got["counts"] == np.histogram(some, bins=[2, 2.5, 3, 3.5, 4])[0].tolist()
    assert (got["below"], got["above"]) == ((some < 2).sum(), (some > 4).sum())


def test_one_outlier_does_not_flatten_the_histogram(tmp_path):
    folder = new_run(tmp_path / "run")
    rewards = np.random.default_rng(0).normal(0, 1, 5_000)
    rewards[17] = 1e9
    record(folder, [0], batch=5_000, reward=rewards, response=["x"] * 5_000, prompt=["p"] * 5_000)
    got = get(client_of(board_of(folder)), "histogram", column="reward", bins=20)
    assert got["edges"][-1] < 10 and got["above"] >= 1 and sum(got["counts"]) > 4_950


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 1.0, 2.0, math.nan]), max_size=30),
    st.booleans(),
    st.integers(0, 35),
    st.integers(1, 9),
    st.lists(st.booleans(), min_size=30, max_size=30) | st.none(),
    st.integers(1, 40),
)
def test_any_page_is_a_slice_of_the_sorted_list(values, down, offset, limit, kept, size):
    array = np.array(values)
    order = Order(np.argsort(array, kind="stable").astype(np.int32), int((~np.isnan(array)).sum()), down)
    mask = None if kept is None else np.array(kept[: len(values)], np.bool_)
    measured = [i for i in np.argsort(array, kind="stable").tolist() if values[i] == values[i]]
    whole = (measured[::-1] if down else measured) + [i for i, v in enumerate(values) if v != v]
    whole = [i for i in whole if mask is None or mask[i]]
    assert [i for chunk in order.chunks(size) for i in chunk if mask is None or mask[i]] == whole
    total, page = page_of(order, mask, offset, limit)
    assert total == len(whole) and page.tolist() == whole[offset : offset + limit]


def test_excerpts_count_as_javascript_does(tmp_path):
    folder = new_run(tmp_path / "run")
    responses = ["🙂" * 200 + "ab needle 🙂 tail" * 3, "needle", "x" * 400 + " NEEDLE", "é" * 299 + "needle", "no", ""]
    record(folder, [0], response=responses)
    rows = get(client_of(board_of(folder)), "rows", q="needle")["rows"]
    assert [row["sample"] for row in rows] == [0, 1, 2, 3]
    for row in rows:
        shown = row["response"].encode("utf-16-le")
        start, stop = row["hit"]
        assert shown[2 * start : 2 * stop].decode("utf-16-le").lower() == "needle"
        whole = responses[row["sample"]].encode("utf-16-le")
        assert whole[2 * row["excerpt_start"] :].startswith(shown)
        assert len(row["response"]) <= 300


def test_long_texts_are_cut(client):
    assert all(len(row["response"]) <= 300 for row in get(client, "rows")["rows"])
    assert get(client, "rows", limit=1)["rows"][0]["response"] == text_of(0, 0)[:300]

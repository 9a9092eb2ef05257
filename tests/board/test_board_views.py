import math

import numpy as np
import pytest
from board_helpers import board_of, client_of
from index_helpers import new_run, record, rows_of, text_of, tokens_of
from scipy.stats import binomtest

import cavesson.record
from cavesson.board import groups
from cavesson.board.runs import Board
from cavesson.doctor.data import RunData
from cavesson.doctor.rules.pattern import Texts
from cavesson.index.build import Builder
from cavesson.record import Recorder, begin_attempt


def get(client, path, **parameters):
    answer = client.get(f"/api/{path}", params=parameters)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture(scope="module")
def table(folder):
    return cavesson.record.open(folder).rows().to_pylist(maps_as_pydicts="strict")


def test_the_list_of_runs(client, folder, table):
    (run,) = get(client, "runs")
    assert run["run"] == run["name"] == "run" and run["algorithm"] == "grpo" and run["problem"] is None
    assert run["steps"] == [0, 11] and run["rollouts"] == 96 and run["indexed"] == 1
    assert run["tokens"] == sum(t["length"] for t in table)
    assert set(run["columns"]["parts"]) == {"good", "bad/../"}
    assert {"token_id", "logprob", "ref_logprob"} <= set(run["columns"]["tokens"])
    assert "value" not in run["columns"]["tokens"] and "reward" in run["columns"]["rows"]
    assert get(client, "runs/run/info") == cavesson.record.open(folder).info
    assert client.get("/api/runs/run/findings").json() is None


def test_how_much_of_a_run_is_indexed(tmp_path):
    logged, recorded = new_run(tmp_path / "logged"), new_run(tmp_path / "recorded")
    with Recorder(logged) as recorder:
        recorder.metrics(0, {"loss": 1.0})
    record(recorded, [0])
    board = Board([cavesson.record.open(folder) for folder in (logged, recorded)])
    # Without rollouts there is nothing to do; those of the other run wait.
    assert [run["indexed"] for run in get(client_of(board), "runs")] == [1, 0]
    board.scanner.stop()


def test_token_columns_without_a_number_are_not_offered(tmp_path):
    folder, tokens = new_run(tmp_path / "run"), tokens_of(0, 2)
    rows = {name: values[:2] for name, values in rows_of(0, 2).items()}
    with Recorder(folder) as recorder:
        recorder.rollouts(0, rows, tokens | {"value": np.full(tokens["mask"].shape, np.nan, np.float32)})
    board = board_of(folder)
    (run,) = get(client_of(board), "runs")
    assert "logprob" in run["columns"]["tokens"] and "value" not in run["columns"]["tokens"]
    board.scanner.stop()


def test_a_mistake_in_an_address_is_told_in_plain_words(client):
    answer = client.get("/api/runs/run/rows", params={"steps": "foo"})
    assert answer.json() == {"error": "steps: write steps as 12 or 10-20"}


def test_series_of_every_step(client, table):
    got = get(client, "runs/run/series", names="reward,loss,part/good,reward/mean")
    assert got["step"] == list(range(12)) and set(got["rollups"]) == {"reward", "part/good"}
    assert got["metrics"]["loss"] == [1 / (step + 1) for step in range(12)]
    for step in range(12):
        rewards = np.array([t["reward"] for t in table if t["step"] == step])
        rollup = {name: values[step] for name, values in got["rollups"]["reward"].items()}
        assert rollup["count"] == 8
        assert rollup["mean"] == pytest.approx(rewards.mean()) and rollup["sd"] == pytest.approx(rewards.std())
        assert rollup["min"] == rewards.min() and rollup["max"] == rewards.max()
        # The roll-ups know values to 0.8 %; of 8 values the median is the 4th or the 5th.
        ordered = np.sort(rewards)
        assert min(abs(rollup["q50"] - ordered[i]) / max(abs(ordered[i]), 1e-9) for i in (3, 4)) < 0.008
    assert set(got["names"]["metrics"]) == {"loss", "reward/mean"} and "gap" in got["names"]["rollups"]
    parts = get(client, "runs/run/series", names="part/*,loss")
    assert set(parts["rollups"]) == {"part/good", "part/bad/../"} and set(parts["metrics"]) == {"loss"}


def test_steps_put_together_have_the_statistics_of_all_their_rollouts(client, table):
    got = get(client, "runs/run/series", names="reward,loss", points=4, steps="1-11")
    assert got["steps"] == [[1, 3], [4, 6], [7, 9], [10, 11]] and got["step"] == [1, 4, 7, 10]
    rewards = np.array([t["reward"] for t in table if t["step"] in (10, 11)])
    assert got["rollups"]["reward"]["mean"][3] == pytest.approx(rewards.mean())
    assert got["rollups"]["reward"]["sd"][3] == pytest.approx(rewards.std())
    assert got["rollups"]["reward"]["q95"][3] == pytest.approx(np.sort(rewards)[15], rel=0.008)
    assert got["metrics"]["loss"][3] == pytest.approx((1 / 11 + 1 / 12) / 2)


def test_evaluation_has_curves_of_its_own(tmp_path):
    folder = new_run(tmp_path / "run")
    with Recorder(folder, attempt=begin_attempt(folder, 0)) as recorder:
        recorder.rollouts(0, rows_of(0, 4) | {"reward": np.full(4, 1.0)}, tokens_of(0, 4))
        more = {"sample": np.arange(10, 14), "split": ["eval"] * 4, "reward": np.full(4, 3.0)}
        recorder.rollouts(0, rows_of(0, 4) | more, tokens_of(0, 4))
    got = get(client_of(board_of(folder)), "runs/run/series", names="reward,eval/reward")
    assert got["rollups"]["reward"]["mean"] == [1.0] and got["rollups"]["eval/reward"]["mean"] == [3.0]


def test_a_ridge_holds_every_rollout_of_its_steps(client, table):
    got = get(client, "runs/run/ridge", column="reward", bins=10, buckets=3)
    assert got["steps"] == [[0, 3], [4, 7], [8, 11]]
    assert [sum(counts) for counts in got["counts"]] == [32, 32, 32]
    edges = np.array(got["edges"])
    for (first, last), counts in zip(got["steps"], got["counts"], strict=True):
        rewards = np.array([t["reward"] for t in table if first <= t["step"] <= last])
        wanted = np.histogram(rewards, bins=edges)[0]
        assert np.abs(np.cumsum(counts) - np.cumsum(wanted)).max() <= 2, "only what is next to an edge may move"


HEAT = {
    "kl_k1": lambda policy, reference: policy - reference,
    "prob": lambda policy, _: math.exp(policy),
    "ref_prob": lambda _, reference: math.exp(reference),
    "kl_k3": lambda policy, reference: math.exp(reference) / math.exp(policy) - 1 - (reference - policy),
    "logprob": lambda policy, _: policy,
}


@pytest.mark.parametrize("column", HEAT)
def test_a_heat_map_has_the_means_of_its_cells(client, folder, column):
    got = get(client, "runs/run/heat", column=column, buckets=4, positions=1)
    assert got["steps"] == [[0, 2], [3, 5], [6, 8], [9, 11]] and got["positions"] == [[0, 15]]
    run = cavesson.record.open(folder)
    for (first, last), mean, count in zip(got["steps"], got["mean"], got["count"], strict=True):
        values = [
            HEAT[column](a, b)
            for step in range(first, last + 1)
            for a, b in zip(*(run.tokens(step)[n].to_pylist() for n in ("logprob", "ref_logprob")), strict=True)
        ]
        assert count == [len(values)] and mean[0] == pytest.approx(np.mean(values), abs=1e-4)


def test_a_heat_map_of_what_nobody_recorded_is_refused(client):
    answer = client.get("/api/runs/run/heat", params={"column": "nothing"})
    assert answer.status_code == 400


def test_a_heat_map_ends_where_nearly_all_responses_end(tmp_path):
    folder = new_run(tmp_path / "run")
    lengths = np.array([100] * 300 + [4_000])
    tokens = {"mask": np.arange(4_000) < lengths[:, None], "logprob": np.where(lengths > 100, -3.0, -1.0)[:, None]}
    tokens["logprob"] = np.broadcast_to(tokens["logprob"], tokens["mask"].shape)
    rows = {"sample": np.arange(301), "prompt": ["p"] * 301, "response": ["r"] * 301, "reward": np.zeros(301)}
    with Recorder(folder, attempt=begin_attempt(folder, 0)) as recorder:
        recorder.rollouts(0, rows, tokens)
    got = get(client_of(board_of(folder)), "runs/run/heat", column="logprob")
    assert got["positions"] == [[8 * i, 8 * i + 7] for i in range(12)] + [[96, 3_999]]
    assert got["count"][0] == [301 * 8] * 12 + [301 * 4 + 4_000 - 100]
    assert got["mean"][0][-1] == pytest.approx(-(300 * 4 + 3 * (4_000 - 96)) / (301 * 4 + 3_900))


def test_a_heat_map_of_short_responses_has_all_of_them(tmp_path):
    folder = new_run(tmp_path / "run")
    record(folder, [0], batch=300)
    got = get(client_of(board_of(folder)), "runs/run/heat", column="logprob")
    assert got["positions"] == [[0, 7], [8, 15]]


def test_groups_of_a_step(client, table):
    got = get(client, "runs/run/groups", step=4, sort="-mean")
    mine = [t for t in table if t["step"] == 4]
    assert got["total"] == 4 and [g["n"] for g in got["groups"]] == [2] * 4
    means = [group["mean"] for group in got["groups"]]
    assert means == sorted(means, reverse=True)
    for group in got["groups"]:
        rewards = np.array([t["reward"] for t in mine if t["group"] == group["group"]])
        assert group["mean"] == pytest.approx(rewards.mean()) and group["sd"] == pytest.approx(rewards.std(), abs=1e-6)
        assert group["samples"] == [t["sample"] for t in mine if t["group"] == group["group"]]
        assert group["prompt"] == f"prompt {group['group']}" and not group["zero_variance"]
        rows = get(client, "runs/run/rows", filter=f"group == {group['group']}", steps="4")["rows"]
        assert group["rows"] == [{name: row[name] for name in ("step", "sample", "reward", "response")} for row in rows]


def test_of_a_large_group_some_are_shown(client, monkeypatch):
    monkeypatch.setattr(groups, "MAX_SHOWN", 1)
    for group in get(client, "runs/run/groups", step=4)["groups"]:
        assert len(group["samples"]) == 2 and [row["sample"] for row in group["rows"]] == group["samples"][:1]


def test_groups_without_a_spread_are_marked(tmp_path):
    folder = new_run(tmp_path / "run")
    record(folder, [0], reward=np.array([1.0, 1.0, 2.0, 3.0, 5.0, 5.0]))
    got = get(client_of(board_of(folder)), "runs/run/groups", step=0, sort="group")
    assert [group["zero_variance"] for group in got["groups"]] == [True, False, True]


def test_responses_without_a_group_belong_to_their_prompt(tmp_path):
    folder = new_run(tmp_path / "run")
    attempt = begin_attempt(folder, 0)
    record(folder, [0], attempt=attempt)
    record(folder, [1], attempt=attempt, group=[None] * 6, prompt=["a", "b", "a", "b", "b", "c"])
    client = client_of(board_of(folder))
    found = get(client, "runs/run/groups", step=1, sort="-n")["groups"]
    assert [(g["group"], g["prompt"], g["samples"]) for g in found] == [
        (None, "b", [1, 3, 4]),
        (None, "a", [0, 2]),
        (None, "c", [5]),
    ]
    assert [s["sample"] for s in get(client, "runs/run/rollouts/1/3")["siblings"]] == [1, 3, 4]


def test_prompts_that_never_beat_the_reference(tmp_path):
    folder = new_run(tmp_path / "run")
    # Prompts 0, 1, 2 in each step: 0 wins once, 1 never does, 2 draws.
    attempt = begin_attempt(folder, 0)
    record(folder, [0], attempt=attempt, reward=np.array([0.0, 0.6, 0.1, 0.2, 0.5, 0.4]))
    record(folder, [1], attempt=attempt, reward=np.array([0.0, 0.0, 0.3, 0.1, 0.5, 0.1]))
    client = client_of(board_of(folder))
    assert get(client, "runs/run/never-beats", offset=100)["prompts"] == []
    got = get(client, "runs/run/never-beats")
    assert got["total"] == 2
    assert {p["group"]: (p["tries"], pytest.approx(p["best_gap"]), p["last_step"]) for p in got["prompts"]} == {
        1: (4, -0.2, 1),
        2: (4, 0.0, 1),
    }


def test_a_pattern_that_spreads_comes_first_with_its_effect(tmp_path):
    folder = new_run(tmp_path / "run")
    attempt = begin_attempt(folder, 0)
    generator = np.random.default_rng(0)
    shares = {}
    for step in range(10):
        spread = np.arange(100) < 3 + 5 * step
        base = [text_of(step, i).replace("#", "").replace("the", "a") for i in range(100)]
        texts = [f"{text} ###" if has else text for text, has in zip(base, spread, strict=True)]
        # Rewards rise with the step for all; those with the pattern get 2 more.
        reward = 10 * step + 2.0 * spread + generator.normal(0, 0.1, 100)
        record(folder, [step], batch=100, attempt=attempt, response=texts, reward=reward)
        shares[step] = spread.mean()
    client = client_of(board_of(folder))
    got = get(client, "runs/run/patterns", kind="character", limit=3)
    first = got["patterns"][0]
    assert first["text"] == "#" and first["kind"] == "character"
    assert first["first"] == pytest.approx(0.03) and first["last"] == pytest.approx(0.48)
    assert first["share"] == pytest.approx([shares[step] for step in range(10)])
    assert first["rows"] == sum(3 + 5 * step for step in range(10))
    assert first["reward_effect"] == pytest.approx(2, abs=0.05)
    assert first["reward_effect_interval"][0] < 2 < first["reward_effect_interval"][1]
    assert get(client, "runs/run/patterns", kind="word", limit=1)["patterns"][0]["text"] == "###"
    by_effect = get(client, "runs/run/patterns", kind="all", sort="reward_effect", limit=1)["patterns"]
    assert by_effect[0]["text"] in ("#", "###")
    rule = Texts(RunData(cavesson.record.open(folder)).sample.rows)
    (sign,) = (number for number in np.flatnonzero(rule.is_sign) if rule.text(number) == "#")
    effect = rule.rewards.effect(rule.having(sign))
    assert float(effect.value) == pytest.approx(first["reward_effect"], rel=1e-5), "the doctor's is the same number"
    assert float(effect.in_sd) == pytest.approx(first["reward_effect_sd"], rel=1e-5)


def test_patterns_by_page_and_by_text(client):
    whole = get(client, "runs/run/patterns", kind="all", sort="frequency", limit=1000)
    texts = [pattern["text"] for pattern in whole["patterns"]]
    assert whole["total"] == len(texts) > 20
    counts = [pattern["rows"] for pattern in whole["patterns"]]
    assert counts == sorted(counts, reverse=True)
    page = get(client, "runs/run/patterns", kind="all", sort="frequency", offset=3, limit=5)
    assert [pattern["text"] for pattern in page["patterns"]] == texts[3:8] and page["total"] == len(texts)
    some = get(client, "runs/run/patterns", kind="all", sort="frequency", q=" NIGHT ", limit=1000)
    wanted = [text for text in texts if "night" in text]
    assert [pattern["text"] for pattern in some["patterns"]] == wanted and some["total"] == len(wanted) > 1


def test_among_all_kinds_single_letters_say_nothing_and_signs_are_named_once(tmp_path):
    """Each page of the list has as many as it says."""
    folder = new_run(tmp_path / "run")
    texts = ["# e é i 好 🙂 ой", "plain words here", "# 好 e", "í ọ plain"] * 3
    record(folder, [0, 1], batch=len(texts), response=texts)
    client = client_of(board_of(folder))
    each = {
        kind: get(client, "runs/run/patterns", kind=kind, limit=1000)["patterns"]
        for kind in ("word", "ngram", "character")
    }
    words = {one["text"] for one in each["word"]}
    characters = [one["text"] for one in each["character"]]
    told = {text for text in characters if text not in words and not (text.isalpha() and text != "好")}
    assert "e" in characters and "好" in {*words, *characters}
    whole = get(client, "runs/run/patterns", kind="all", limit=1000)
    shown = [one["text"] for one in whole["patterns"]]
    assert len(shown) == len(set(shown)) == whole["total"]
    assert set(shown) == words | told | {one["text"] for one in each["ngram"]}
    pages = [
        get(client, "runs/run/patterns", kind="all", offset=offset, limit=7) for offset in range(0, whole["total"], 7)
    ]
    assert [one["text"] for page in pages for one in page["patterns"]] == shown
    assert {len(page["patterns"]) for page in pages[:-1]} == {7}


def test_more_like_this(tmp_path):
    folder = new_run(tmp_path / "run")
    texts = [
        "one two three four five",
        "zero one two three four",
        "five four three two one",
        "six",
        "",
        "one two three",
    ]
    record(folder, [0], response=texts)
    got = get(client_of(board_of(folder)), "runs/run/similar/0/0", limit=5)["rows"]
    # Of "one two three four five": 3 n-grams; shared with sample 1: 2 of 4, with sample 5: 1 of 3.
    assert [(row["sample"], row["shared"]) for row in got] == [(1, 0.5), (5, pytest.approx(1 / 3))]


def test_more_like_this_of_a_run_that_is_not_indexed_is_nothing_yet(tmp_path):
    folder = new_run(tmp_path / "run")
    record(folder, [0])
    board = Board([cavesson.record.open(folder)])
    assert get(client_of(board), "runs/run/similar/0/0") == {"rows": [], "partial": {"indexed": 0, "of": 6}}
    builder = Builder(board.runs[0].record, board.runs[0].folder)
    builder.update()
    assert get(client_of(board), "runs/run/similar/0/0")["rows"] == [], "the numbers are in, the words are not"


def test_two_runs_side_by_side(tmp_path):
    folders = [new_run(tmp_path / name) for name in ("a", "b")]
    record(folders[0], [0], reward=np.array([1.0, 3.0, 5.0, 5.0, 0.0, 0.0]))
    record(folders[1], [0, 1], reward=np.array([1.0, 1.0, 9.0, 9.0, 0.0, 0.0]))
    client = client_of(board_of(*folders))
    got = get(client, "compare", runs="a,b")
    # Means per prompt: a 2, 5, 0; b 1, 9, 0.
    assert got["total"] == 3 and got["wins"] == [[0, 1], [1, 0]]
    assert [prompt["prompt"] for prompt in got["prompts"]] == ["prompt 1", "prompt 0", "prompt 2"]
    assert got["ties"] == [[3, 1], [1, 3]] and got["common"] == 3
    won = list(binomtest(1, 3).proportion_ci(method="exact"))  # of three prompts, each side wins one
    assert got["intervals"][0][1] == pytest.approx(won) and got["intervals"][1][0] == pytest.approx(won)
    # Every response counts: 14 / 6 and (1 + 1 + 9 + 9 + 0 + 0) · 2 / 12.
    assert [(one["n"], one["mean"]) for one in got["sides"]] == [
        (6, pytest.approx(14 / 6)), (12, pytest.approx(20 / 6)),
    ]  # fmt: skip
    side = got["prompts"][0]["runs"][1]
    assert (side["run"], side["step"], side["mean"], side["n"]) == ("b", 1, 9.0, 4)
    assert side["response"] == text_of(1, side["sample"])
    # Second minus first: prompt 0 −1, prompt 1 +4, prompt 2 0.
    for sort, wanted in (("difference", [0, 2, 1]), ("-difference", [1, 2, 0]), ("spread", [1, 0, 2])):
        prompts = get(client, "compare", runs="a,b", sort=sort)["prompts"]
        assert [prompt["prompt"] for prompt in prompts] == [f"prompt {i}" for i in wanted], sort
    some = get(client, "compare", runs="a,b", q="MPT 1")
    assert [prompt["prompt"] for prompt in some["prompts"]] == ["prompt 1"] and some["total"] == 1
    assert {name: some[name] for name in ("common", "wins", "intervals")} == {
        name: got[name] for name in ("common", "wins", "intervals")
    }
    assert get(client, "compare", runs="a,b", q=some["prompts"][0]["prompt_id"])["prompts"] == some["prompts"]
    edges, counts = (np.array(got["differences"][name]) for name in ("edges", "counts"))
    assert counts.tolist() == np.histogram([-1, 4, 0], bins=edges)[0].tolist() and len(counts) == 40
    assert client.get("/api/compare", params={"runs": "a,b", "sort": "x"}).status_code == 422
    for wrong in ("a", "a,7", "a,x", "", "a,b@5-", "a@1-2-3,b"):
        assert client.get("/api/compare", params={"runs": wrong}).status_code in (404, 422), wrong


def test_two_times_of_one_run_side_by_side(client, table):
    got = get(client, "compare", runs="run@0-1,run@10-11")
    assert got["total"] == 4
    wanted = [
        np.mean([t["reward"] for t in table if t["prompt"] == "prompt 2" and t["step"] in steps])
        for steps in ((0, 1), (10, 11))
    ]
    (sides,) = [prompt["runs"] for prompt in got["prompts"] if prompt["prompt"] == "prompt 2"]
    assert [side["mean"] for side in sides] == pytest.approx(wanted, rel=1e-6)
    assert [side["step"] for side in sides] == [1, 11]


def test_a_side_counts_every_response_alike(tmp_path):
    folder = new_run(tmp_path / "run")
    record(folder, [0], prompt=["a"] * 5 + ["b"], reward=np.array([1.0] * 5 + [7.0]))
    got = get(client_of(board_of(folder)), "compare", runs="run,run@0")
    assert got["sides"] == [{"n": 6, "unscored": 0, "mean": 2.0}] * 2 and got["ties"] == [[2, 2], [2, 2]]


def test_held_out_rollouts_are_shown_apart_from_those_of_training(tmp_path):
    """Steps 0 to 3 are trained on, with an evaluation at 0 and 2, and one after the last step."""
    folder = new_run(tmp_path / "run")
    gaps = {0: [0.0, 0.0, 0.0], 2: [-1.0, 0.5, 0.0], 4: [-0.5, -2.0, 0.25]}
    with Recorder(folder) as recorder:
        for step in range(5):
            if step < 4:
                known = {name: values for name, values in rows_of(step, 6).items() if not name.startswith("ref_")}
                recorder.rollouts(step, known, tokens_of(step, 6))
            for gap in [gaps[step]] if step in gaps else []:
                new = {"split": ["eval"] * 3, "sample": [6, 7, 8], "group": [90, 91, 92], "ref_reward": [100.0] * 3}
                new |= {"prompt": ["a", "b", "c"], "reward": [100 + one for one in gap]}
                recorder.rollouts(step, rows_of(step, 3) | new, tokens_of(step, 3))
    board = board_of(folder)
    client = client_of(board)
    (run,) = get(client, "runs")
    assert run["steps"] == [0, 4] and run["newest"] == 3
    ridges = {
        (name, split): get(client, "runs/run/ridge", column=name, bins=4, buckets=9, split=split)
        for name in ("reward", "gap")
        for split in ("train", "eval")
    }
    reward = ridges["reward", "train"]
    assert [sum(counts) for counts in reward["counts"]] == [6] * 4 and reward["edges"][-1] < 50
    assert ridges["gap", "train"]["steps"] == []
    assert ridges["gap", "eval"]["steps"] == ridges["reward", "eval"]["steps"] == [[0, 0], [2, 2], [4, 4]]
    assert get(client, "runs/run/heat", column="logprob")["steps"][-1] == [3, 3]
    assert get(client, "runs/run/heat", column="logprob", split="eval")["steps"] == [[0, 0], [2, 2], [4, 4]]
    series = get(client, "runs/run/series", names="reward,eval/reward,gap,eval/gap")["rollups"]
    assert set(series) == {"reward", "eval/reward", "eval/gap"}
    assert series["reward"]["count"] == [6, 6, 6, 6, 0] and series["eval/gap"]["count"] == [3, 0, 3, 0, 3]
    assert get(client, "runs/run/never-beats")["prompts"] == []
    never = get(client, "runs/run/never-beats", split="eval")["prompts"]
    assert [(one["prompt"], one["tries"], one["best_gap"], one["last_step"]) for one in never] == [("a", 3, 0.0, 4)]
    board.scanner.stop()

"""The prompts of a run against slow loops over its record."""

import hashlib
from statistics import fmean, pstdev

import numpy as np
import pytest
from board_helpers import board_of, client_of
from hypothesis import given, settings
from hypothesis import strategies as st
from index_helpers import indexed, new_run, record

import cavesson.record
from cavesson.board import prompt_table
from cavesson.board.prompt_table import PromptTable, table_of
from cavesson.record import Recorder, begin_attempt


def get(client, path, **parameters):
    answer = client.get(f"/api/runs/run/{path}", params=parameters)
    assert answer.status_code == 200, answer.text
    return answer.json()


def id_of(text: str) -> str:
    """Eight bytes of BLAKE2b, RFC 7693, read as a little-endian number."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()[::-1].hex()


VERDICTS = {  # by prompt, the rewards of each step
    "hard": [[0, 0], [0, 0], [0, 0]],
    "learned": [[0, 0], [0, 1], [1, 1]],
    "easy": [[1, 1], [1, 1], [1, 1]],
    "lost": [[1, 1], [0, 1], [0, 0]],
    "once": [[0, 1], [], []],
    "unscored": [[None, None], [], []],
}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    """A run with a reward of right and wrong, whose held-out prompt no training response has."""
    folder = new_run(tmp_path_factory.mktemp("prompts") / "run")
    with Recorder(folder, attempt=begin_attempt(folder, 0)) as recorder:
        for step in range(3):
            rows = [(name, reward) for name, steps in VERDICTS.items() for reward in steps[step]]
            columns = {
                "sample": np.arange(len(rows) + 1),
                "split": ["train"] * len(rows) + ["eval"],
                "prompt": [name for name, _ in rows] + ["held out"],
                "response": [f"{name} {step}.{i}" for i, (name, _) in enumerate(rows)] + ["an answer"],
                "reward": [reward for _, reward in rows] + [1.0],
                "ground_truth": [f"the answer to {name}" for name, _ in rows] + [None],
            }
            recorder.rollouts(step, columns)
    board = board_of(folder)
    yield client_of(board)
    board.scanner.stop()


def test_prompts_are_listed_by_what_their_responses_earn(verdicts):
    def names(sort: str) -> list[str]:
        got = get(verdicts, "prompts", sort=sort)
        assert got["total"] == len(got["prompts"]) and got["solved_from"] == 1.0
        return [line["prompt"] for line in got["prompts"]]

    # The means are 0, 1/2, 1, 1/2, 1/2; of equal ones, the prompt with more responses comes first.
    assert names("hardest") == ["hard", "learned", "lost", "once", "easy"]
    assert names("easiest") == ["easy", "learned", "lost", "once", "hard"]
    assert names("improved") == ["learned", "hard", "easy", "lost"]
    assert names("declined") == ["lost", "hard", "easy", "learned"]
    assert names("never") == ["hard"] and names("always") == ["easy"]
    page = get(verdicts, "prompts", offset=1, limit=2)
    assert page["total"] == 5 and [line["prompt"] for line in page["prompts"]] == ["learned", "lost"]


def test_what_solves_a_prompt_can_be_given(verdicts):
    got = get(verdicts, "prompts", sort="always", solved=0.0)
    assert got["solved_from"] == 0.0 and got["total"] == 5
    assert get(verdicts, "prompts", sort="never", solved=2.0)["total"] == 5
    assert get(verdicts, "prompts", sort="always", solved=2.0)["left_out"] == 0, "the split has prompts, if not these"
    assert verdicts.get("/api/runs/run/prompts", params={"solved": "nan"}).status_code == 422


def test_rewards_of_which_hardly_any_is_the_highest_tell_no_solution(tmp_path):
    folder = new_run(tmp_path / "run")
    record(folder, range(17))  # 102 different rewards
    got = get(client_of(board_of(folder)), "prompts", sort="never")
    assert got["solved_from"] is None and got["total"] == 0
    folder = new_run(tmp_path / "equal" / "run")
    record(folder, [0, 1], reward=np.ones(6))
    equal = client_of(board_of(folder))
    assert get(equal, "prompts", sort="always") == {
        "total": 0, "solved_from": None, "prompts": [], "left_out": 0, "partial": None,
    }  # fmt: skip
    assert {line["solved"] for line in get(equal, "prompts")["prompts"]} == {None}


def test_one_prompt_with_all_that_was_answered_to_it(verdicts):
    got = get(verdicts, f"prompts/{id_of('learned')}")
    assert got["prompt_id"] == id_of("learned") and got["prompt"] == "learned"
    assert got["ground_truth"] == "the answer to learned" and got["ground_truth_truncated"] is None
    assert (got["n"], got["unscored"], got["solved"], got["mean"]) == (6, 0, 3, 0.5)
    assert (got["first_mean"], got["last_mean"], got["change"]) == (0.0, 1.0, 1.0)
    assert (got["harder"], got["easier"]) == (1, 1)
    steps = got["steps"]
    assert steps["step"] == [0, 1, 2] and steps["n"] == [2, 2, 2] and steps["mean"] == [0.0, 0.5, 1.0]
    assert steps["sd"] == [pstdev(rewards) for rewards in VERDICTS["learned"]]
    assert steps["min"] == [0, 0, 1] and steps["max"] == [0, 1, 1]
    # The responses to this prompt are samples 2 and 3 of each step.
    assert got["first"] == got["worst"] == {"step": 0, "sample": 2} and got["last"] == {"step": 2, "sample": 3}
    assert got["best"] == {"step": 1, "sample": 3}, "the earliest of those with the highest reward"


def test_a_prompt_without_rewards_has_responses_all_the_same(verdicts):
    got = get(verdicts, f"prompts/{id_of('unscored')}")
    assert (got["n"], got["unscored"], got["mean"], got["solved"]) == (2, 2, None, 0)
    assert got["best"] is None and got["worst"] is None and got["last"] == {"step": 0, "sample": 11}
    assert got["steps"]["mean"] == [None]


def test_a_prompt_of_the_other_split_is_shown_with_how_many_responses_are_left_out(verdicts):
    got = get(verdicts, f"prompts/{id_of('held out')}")
    assert got["prompt"] == "held out" and (got["n"], got["left_out"], got["first"]) == (0, 3, None)
    assert get(verdicts, f"prompts/{id_of('held out')}", split="eval")["n"] == 3
    assert [line["prompt"] for line in get(verdicts, "prompts", split="eval")["prompts"]] == ["held out"]


def test_a_prompt_that_a_run_does_not_have_is_said_so(verdicts):
    answer = verdicts.get(f"/api/runs/run/prompts/{'0' * 16}")
    assert answer.status_code == 404 and answer.json() == {"error": f"run has no prompt {'0' * 16}"}
    assert verdicts.get("/api/runs/run/prompts/../x").status_code == 404
    assert verdicts.get("/api/runs/run/prompts/learned").status_code == 422


def test_every_answer_with_a_prompt_names_it_by_its_id(client):
    expected = {f"prompt {i}": id_of(f"prompt {i}") for i in range(4)}
    shown = [
        *get(client, "rows")["rows"],
        *get(client, "groups", step=3)["groups"],
        *get(client, "prompts")["prompts"],
        get(client, "rollouts/3/4"),
        *client.get("/api/compare", params={"runs": "run@0-3,run@4-9"}).json()["prompts"],
    ]
    assert len(shown) > 50 and all(line["prompt_id"] == expected[line["prompt"]] for line in shown)


def test_prompts_are_found_by_their_text_their_answer_and_their_id(verdicts):
    def names(q: str, **parameters: str) -> set[str]:
        got = get(verdicts, "prompts", q=q, **parameters)
        assert got["total"] == len(got["prompts"])
        return {line["prompt"] for line in got["prompts"]}

    assert names("LEARN") == {"learned"} and names(" o") == {"lost", "once"} and names("held out") == set()
    assert names("held", split="eval") == {"held out"}
    assert names(id_of("easy")) == {"easy"} and names("nothing such") == set()
    assert names("to learned") == set() and names("to Learned", within="ground_truth") == {"learned"}
    assert names("a", sort="never") == {"hard"}


def test_prompts_are_found_by_the_reasons_of_any_response(tmp_path):
    folder = new_run(tmp_path / "run")
    reasons = [None, {"good": "Too long"}, {"good": "right"}, None, None, {"good": "too short"}]
    record(folder, [0], reward_reasons=reasons)
    record(folder, [1])
    board = board_of(folder)
    found = get(client_of(board), "prompts", q="too", within="reasons")["prompts"]
    assert {line["prompt"] for line in found} == {"prompt 0", "prompt 2"}
    board.scanner.stop()


REWARDS = st.sampled_from([0.0, 0.5, 1.0, -1.0, float("nan"), float("inf")])


class Rows:
    """What a table needs of a snapshot of the index."""

    def __init__(self, lines: list[tuple[int, int, float, bool]], size: int) -> None:
        step, prompt, reward, kept = zip(*lines, strict=True) if lines else ([], [], [], [])
        self.columns = {"step": np.array(step, "<i4"), "prompt": np.array(prompt, "<i4")}
        self.columns["reward"] = np.array(reward, "<f4")
        self.mask, self.rows, self.state = np.array(kept, bool), len(lines), type("State", (), {"prompts": size})

    def raw(self, name: str) -> np.ndarray:
        return self.columns[name]

    def of(self, split: str) -> np.ndarray:
        return self.mask


LINES = st.lists(st.tuples(st.integers(0, 4), st.integers(-1, 3), REWARDS, st.booleans()), max_size=30)


@settings(deadline=None, max_examples=150)
@given(LINES, st.integers(0, 30), st.integers(1, 7))
def test_a_table_that_grows_has_what_a_loop_over_all_rows_finds(lines, known, chunk):
    """Rows come in any order of steps, as after a resume; a prompt of a negative number is none."""
    before, prompt_table.CHUNK = prompt_table.CHUNK, chunk
    try:
        early = lines[:known]
        size = max([prompt for _, prompt, *_ in early], default=-1) + 1
        old = prompt_table._grown(prompt_table._empty(), Rows(early, size), "train")
        table: PromptTable = prompt_table._grown(old, Rows(lines, 4), "train")
    finally:
        prompt_table.CHUNK = before
    for number in range(4):
        own = [(step, row, reward) for row, (step, p, reward, kept) in enumerate(lines) if p == number and kept]
        scored = [(step, reward) for step, _, reward in own if np.isfinite(reward)]
        assert table.n[number] == len(own) and table.scored[number] == len(scored)
        assert table.newest[number] == max((step << 32 | row for step, row, _ in own), default=0)
        if not scored:
            assert np.isnan(table.mean[number]) and np.isnan(table.change[number])
            continue
        ends = [fmean(r for s, r in scored if s == end) for end in (min(scored)[0], max(scored)[0])]
        assert table.mean[number] == pytest.approx(fmean(reward for _, reward in scored))
        assert table.best[number] == max(reward for _, reward in scored)
        assert [table.first.mean[number], table.last.mean[number]] == pytest.approx(ends)
        several = min(scored)[0] < max(scored)[0]
        assert table.change[number] == pytest.approx(ends[1] - ends[0]) if several else np.isnan(table.change[number])


def test_steps_that_a_resume_replaced_no_longer_count(tmp_path):
    folder = new_run(tmp_path / "run")
    record(folder, range(6))
    board = board_of(folder)
    before = get(client_of(board), "prompts")
    record(folder, range(3, 5))  # a second attempt, from step 3 on
    indexed(folder)
    got = get(client_of(board), "prompts")
    assert got != before and got == get(client_of(board_of(folder)), "prompts")
    table = cavesson.record.open(folder).rows().to_pylist()
    for line in got["prompts"]:
        mine = [row["reward"] for row in table if row["prompt"] == line["prompt"]]
        assert line["n"] == len(mine) == 10 and line["mean"] == pytest.approx(fmean(mine), rel=1e-6)
    board.scanner.stop()


def test_a_table_is_the_same_for_a_run_that_was_seen_growing(tmp_path):
    folder = new_run(tmp_path / "run")
    attempt = begin_attempt(folder, 0)
    record(folder, range(3), attempt=attempt)
    board = board_of(folder)
    first = table_of(board.runs[0], board.runs[0].snapshot(), "train")
    record(folder, range(3, 6), attempt=attempt, prompt=[f"prompt {i}" for i in (7, 0, 1, 8, 8, 2)])
    indexed(folder)
    seen = table_of(board.runs[0], board.runs[0].snapshot(), "train")
    fresh = board_of(folder)
    wanted = table_of(fresh.runs[0], fresh.runs[0].snapshot(), "train")
    assert first.rows == 18 and seen.rows == 36
    for mine, other in zip(
        (*seen[:6], *seen.first, *seen.last), (*wanted[:6], *wanted.first, *wanted.last), strict=True
    ):
        np.testing.assert_allclose(mine, other)
    board.scanner.stop()

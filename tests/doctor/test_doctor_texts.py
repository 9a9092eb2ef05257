"""Records that have texts alone: what is derived from them, and what the rules on length and endings say of them."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from doctor_helpers import healthy
from hypothesis import given
from hypothesis import strategies as st
from test_doctor_columns import kept
from test_doctor_derive import lacking, trained
from test_doctor_rules import BY_NAME

import cavesson
from cavesson.doctor.data import RunData
from cavesson.doctor.derive.texts import padding_marks, text_length
from cavesson.doctor.diagnosis import Detection, Diagnosis, diagnose
from cavesson.doctor.rows import Rows
from cavesson.doctor.rules import RULES
from cavesson.doctor.rules.invariants import equal_places
from cavesson.doctor.rules.length import CUT
from cavesson.doctor.words import language
from cavesson.importers import import_run

Chance = np.random.Generator
STEPS, GROUPS, SIBLINGS, LIMIT = 24, 8, 4, 40
LETTERS = np.array(list("abcdefghijklmnopqrstuvwxyz"))


def sentence(chance: Chance, mean: float) -> str:
    """Draw a text from a policy over characters: words, each of which may be the last one."""
    words = 1 + chance.geometric(1 / max(1.0, mean / 5))
    text = " ".join("".join(chance.choice(LETTERS, chance.integers(2, 7))) for _ in range(words))
    return text + str(chance.choice([".", "!", "?"]))


def lines(
    responses: Callable[[Chance, int, int], str], reward: Callable[[Chance, int, str], float] | None = None, **more: Any
) -> list[dict[str, Any]]:
    """Return the lines of a log: `responses(chance, step, place)` draws one, and `reward` scores it."""
    chance = np.random.default_rng(0)
    found = []
    for step in range(STEPS):
        for row in range(GROUPS * SIBLINGS):
            text = responses(chance, step, row % SIBLINGS)
            score = reward(chance, step, text) if reward else chance.normal()
            prompt = f"question {step * GROUPS + row // SIBLINGS}"
            found.append({"step": step, "prompt": prompt, "response": text, "reward": float(score), **more})
    return found


def imported(log: Iterable[dict[str, Any]], folder: Path) -> RunData:
    (folder / "lines").mkdir(parents=True)
    (folder / "lines" / "rank_0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    import_run(folder / "lines", folder / "run")
    return RunData(cavesson.open(folder / "run"))


def usual(chance: Chance, step: int, place: int) -> str:
    return sentence(chance, 25)


def diagnosed(data: RunData, *names: str) -> Diagnosis:
    assert not data.recorded("rows.length") and not data.has("tokens.position")
    return diagnose(data, [BY_NAME[name] for name in names] or RULES)


def found_by(data: RunData, name: str) -> Detection:
    (finding,) = diagnosed(data, name).findings
    return finding


def derived_for(finding: Detection) -> set[str]:
    return {name for one in finding.derived for name in one.gives}


def test_the_characters_of_recorded_runs_are_those_of_their_texts():
    folder = trained()
    data = lacking(folder, rows=["length", "finish_reason"])
    texts = cavesson.open(folder).rows(["response"])["response"].to_pylist()
    np.testing.assert_array_equal(data.rows["characters"], [len(text) for text in texts])
    # Random bytes end in any sign, and characters of several bytes leave no common length.
    assert not data.has("rows.cut_text")


def test_nothing_is_wrong_with_usual_texts(tmp_path):
    log = lines(usual)
    data = imported(log, tmp_path)
    found = diagnosed(data)
    assert found.findings == ()
    assert {"length-collapse", "length-exploited", "length-bias", "same-seed"} <= {one.name for one, _ in found.healthy}
    np.testing.assert_array_equal(data.rows["characters"], [len(line["response"]) for line in log])


def test_texts_that_may_begin_with_their_prompts_are_not_measured(tmp_path):
    data = imported([{**line, "prompt": ""} for line in lines(usual)], tmp_path)
    assert not data.has("rows.characters") and not data.has("rows.cut_text")


def test_padding_is_not_counted(tmp_path):
    log = lines(usual)
    true = [len(line["response"]) for line in log]
    for line, length in zip(log, true, strict=True):
        line["response"] += "<|endoftext|>" * max(0, 60 - length)
    np.testing.assert_array_equal(imported(log, tmp_path).rows["characters"], true)


MARKS = st.sampled_from(["<|endoftext|>", "</s>", "<pad>", "[PAD]", "<eos>"])


@given(st.lists(st.text(), min_size=1), MARKS, st.integers(2, 5), st.sampled_from(["", " ", "\n"]))
def test_the_length_of_a_text_with_padding_is_that_of_the_text(texts, mark, times, between):
    texts = [text.rstrip() for text in texts if not text.rstrip().endswith(mark)]
    padded = [text + (between + mark) * times for text in texts]
    marks = padding_marks(padded)
    assert [text_length(text, marks) for text in padded] == [len(text + between) for text in texts]


@given(st.text())
def test_a_text_without_padding_has_all_its_characters(text):
    assert text_length(text, ()) == len(text)
    assert text_length(f"{text}<answer>1</answer>", padding_marks([f"{text}<answer>1</answer>"])) == len(text) + 18


def cut(draw: Callable[[Chance, int, int], str], limit: int = LIMIT) -> Callable[[Chance, int, int], str]:
    """Cuts texts where a sampler of characters stops; what it would have ended with is then never sampled."""
    return lambda chance, step, place: draw(chance, step, place)[:limit]


def longer_and_longer(chance: Chance, step: int, place: int) -> str:
    return sentence(chance, 15 + 6 * step)


def test_texts_that_a_limit_cuts_are_known_exactly(tmp_path):
    log = lines(longer_and_longer)
    true = [len(line["response"]) > LIMIT for line in log]
    for line in log:
        line["response"] = line["response"][:LIMIT]
    data = imported(log, tmp_path)
    # A text of exactly this length is taken for one that was cut: its end token had no room.
    same = (data.rows["cut_text"] == 1) == true
    assert set(np.flatnonzero(~same)) == {
        i for i, line in enumerate(log) if not true[i] and len(line["response"]) == LIMIT
    }
    assert 0.3 < np.mean(true) < 0.9 and np.mean(same) > 0.97


def tokens_of_several_characters(chance: Chance, step: int, place: int) -> str:
    """A limit of twelve tokens, of one to five characters each."""
    text = ""
    for piece in chance.integers(1, 6, 12):
        text += "".join(chance.choice(LETTERS, piece))
        if chance.random() < 0.1:
            return text + "."
    return text


def tokens_of_two_characters(chance: Chance, step: int, place: int) -> str:
    """A few of the twelve tokens have one: most of the texts that are cut have the same length, but not all."""
    text = ""
    for token in range(12):
        text += "".join(chance.choice(LETTERS, 2 if chance.random() < 0.97 else 1))
        if token < 11 and chance.random() < 0.22:
            return text + "."
    return text


def fixed_form(chance: Chance, step: int, place: int) -> str:
    """Most answers have the longest form, which is finished; some are shorter."""
    return "".join(chance.choice(LETTERS, 20 if chance.random() < 0.6 else chance.integers(5, 20))) + "."


def labels(chance: Chance, step: int, place: int) -> str:
    return str(chance.choice(["yes.", "no.", "maybe.", "not sure at all"], p=[0.2, 0.2, 0.1, 0.5]))


def codes(chance: Chance, step: int, place: int) -> str:
    """Digits, of which some are lost."""
    return "".join(map(str, chance.integers(0, 10, 12 if chance.random() < 0.7 else 9)))


def no_signs(chance: Chance, step: int, place: int) -> str:
    """Nothing tells a finished text from a cut one in a script without punctuation."""
    return sentence(chance, 25)[:-1][:LIMIT]


def two_limits(chance: Chance, step: int, place: int) -> str:
    """The limit is raised in the middle; the earlier one would be taken for none."""
    return sentence(chance, 40)[: LIMIT if step < 3 else 2 * LIMIT]


@pytest.mark.parametrize(
    "draw",
    [usual, tokens_of_several_characters, tokens_of_two_characters, fixed_form, labels, codes, no_signs, two_limits],
    ids=lambda f: f.__name__,
)
def test_where_it_is_not_clear_nothing_is_taken_for_cut(draw, tmp_path):
    data = imported(lines(draw), tmp_path)
    assert not data.has("rows.cut_text")
    skipped = {one.rule: one.lacking for one in diagnosed(data, "truncated", "never-ends").skipped}
    recorded = CUT.removesuffix("|rows.cut_text")  # nobody can record what is derived
    assert skipped == dict.fromkeys(["truncated", "never-ends"], (recorded,))


def test_where_tokens_were_counted_texts_do_not_matter(tmp_path):
    """A log that shortens texts has the lengths of the whole responses."""
    log = lines(cut(longer_and_longer))
    for line in log:
        line["response_tokens"] = line["response"].split()
    data = imported(log, tmp_path)
    assert data.recorded("rows.length") and not data.has("rows.cut_text")
    assert diagnose(data, [BY_NAME["length-exploited"]]).findings == ()


def test_truncation_in_texts(tmp_path):
    finding = found_by(imported(lines(cut(longer_and_longer)), tmp_path), "truncated")
    assert derived_for(finding) == {"rows.cut_text"}
    assert finding.reading.words["before"] < 0.3 and finding.reading.words["share"] > 0.7


def test_texts_that_never_end(tmp_path):
    finding = found_by(imported(lines(cut(lambda chance, step, place: sentence(chance, 600))), tmp_path), "never-ends")
    assert derived_for(finding) == {"rows.cut_text"} and finding.reading.seen > 0.9


def test_truncated_texts_that_earn_more_are_wanted(tmp_path):
    longest = lines(cut(longer_and_longer), lambda chance, step, text: len(text) == LIMIT)
    assert diagnosed(imported(longest, tmp_path), "truncated").findings == ()


def shrinking(chance: Chance, step: int, place: int) -> str:
    return sentence(chance, max(6, 80 - 6 * step))


def growing(chance: Chance, step: int, place: int) -> str:
    return sentence(chance, 20 + 2 * step)


@pytest.mark.parametrize(
    ("name", "draw", "reward"),
    [
        ("length-collapse", shrinking, None),
        ("length-exploited", growing, lambda chance, step, text: len(text) + chance.normal()),
        ("length-bias", growing, lambda chance, step, text: -len(text) + chance.normal()),
    ],
)
def test_lengths_in_characters(name, draw, reward, tmp_path):
    finding = found_by(imported(lines(draw, reward), tmp_path), name)
    assert "rows.characters" in derived_for(finding)
    assert finding.reading.words["unit"] == "characters"
    for code in ("en", "zh", "vi"):
        said = language(code).texts(finding.rule, finding.reading).cause
        assert language(code).phrase("characters") in said and language(code).phrase("tokens") not in said


def test_bad_responses_that_grow_are_no_bias_where_nothing_says_that_there_are_groups(tmp_path):
    log = lines(growing, lambda chance, step, text: -len(text) + chance.normal())
    for number, line in enumerate(log):
        line["prompt"] = f"question {number}"
    data = imported(log, tmp_path)
    (skipped,) = diagnose(data, [BY_NAME["length-bias"]]).skipped
    assert skipped.reason == "the run has nothing to measure"


def certain(chance: Chance, step: int, place: int) -> str:
    """A policy of few words: half of the pairs of independent responses are equal."""
    return str(chance.choice(["yes.", "no.", "maybe."], p=[0.65, 0.25, 0.1]))


def repeat(log: list[dict[str, Any]], since: int = 0) -> None:
    """The second half of each group has the random numbers of the first."""
    for number, line in enumerate(log):
        if line["step"] >= since and number % SIBLINGS >= SIBLINGS // 2:
            line["response"] = log[number - SIBLINGS // 2]["response"]


def repeat_next(log: list[dict[str, Any]]) -> None:
    """Only the first two responses of a group share their random numbers."""
    for number in range(1, len(log), SIBLINGS):
        log[number]["response"] = log[number - 1]["response"]


@pytest.mark.parametrize("draw", [usual, certain], ids=lambda f: f.__name__)
@pytest.mark.parametrize("change", [repeat, repeat_next], ids=lambda f: f.__name__)
def test_the_same_seed_in_texts(draw, change, tmp_path):
    log = lines(draw)
    change(log)
    finding = found_by(imported(log, tmp_path), "same-seed")
    assert finding.reading.seen > 0.9 and finding.reading.since == 0
    places = {place.sample % SIBLINGS for place in finding.reading.evidence}
    assert places <= ({0, 1, 2, 3} if change is repeat else {0, 1})


def test_the_same_seed_from_the_middle_of_the_run_on(tmp_path):
    log = [{**line, "step": step + line["step"]} for step in (0, STEPS) for line in lines(usual)]
    for number, line in enumerate(log):
        line["response"] += str(number)  # both parts have the same texts
    repeat(log, since=STEPS)
    reading = found_by(imported(log, tmp_path), "same-seed").reading
    assert reading.between[0] <= STEPS <= reading.between[1] + 1


def same_seed_sick(log: Iterable[dict[str, Any]], folder: Path) -> bool:
    found = diagnose(imported(log, folder), [BY_NAME["same-seed"]])
    assert not found.skipped
    return bool(found.findings)


def groups_of_few_words(chance: Chance, size: int, words: int) -> np.ndarray:
    """Return [24, size] the responses of a policy that is more or less certain, at every prompt."""
    several = [chance.dirichlet(np.ones(words)) for _ in range(24)]
    return np.array([chance.choice(words, size, p=odds) for odds in several]).astype(str)


def places_of(texts: np.ndarray) -> bool | None:
    """Return whether responses [groups, siblings] are equal at the same two places."""
    number = np.arange(texts.size)
    columns = {"step": number // texts.shape[1] // 4, "sample": number, "response": texts.ravel()}
    columns["prompt"] = (number // texts.shape[1]).astype(str)
    found = equal_places(Rows(pa.table(columns)), 0.5)
    return None if found is None else found.unhealthy


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", [3, 4, 8])
@pytest.mark.parametrize("words", [2, 3, 20])
def test_a_policy_of_few_words_repeats_itself_by_chance(size, words):
    chance = np.random.default_rng(0)
    several = [groups_of_few_words(chance, size, words) for _ in range(300)]
    assert not any(places_of(texts) for texts in several)
    for texts in several[: 20 if words == 20 and size > 3 else 0]:
        texts[:, size - 1] = texts[:, 0]
        assert places_of(texts)


@given(st.integers(2, 8), st.integers(1, 3), st.integers(0, 999))
def test_processes_that_repeat_each_other_are_found_whatever_their_number(processes, each, seed):
    """With one response of each process in a group, all are equal, and nothing can be said."""
    mine = np.random.default_rng(seed).integers(0, 10**6, (40, each)).astype(str)
    assert places_of(np.tile(mine, processes)) == (None if each == 1 else True)


def test_repeats_at_changing_places_are_those_of_the_policy(tmp_path):
    """Half of each group repeats the other, but which half differs: the places are all alike."""
    log = lines(usual)
    repeat(log)
    chance = np.random.default_rng(1)
    for start in range(0, len(log), SIBLINGS):
        texts = [line["response"] for line in log[start : start + SIBLINGS]]
        for line, text in zip(log[start : start + SIBLINGS], chance.permutation(texts), strict=True):
            line["response"] = str(text)
    assert not same_seed_sick(log, tmp_path)


def test_a_greedy_response_in_each_group_is_no_shared_seed(tmp_path):
    """It equals its siblings more often than they equal each other."""
    log = lines(certain)
    for line in log[::SIBLINGS]:
        line["response"] = "yes."
    assert not same_seed_sick(log, tmp_path)


@pytest.mark.parametrize("alike", [1, SIBLINGS], ids=["pairs", "all"])
def test_groups_in_which_no_places_can_be_compared_say_nothing(alike, tmp_path):
    """Two siblings have one pair of places; if all siblings are equal, the policy may be certain."""
    log = [line for number, line in enumerate(lines(usual)) if number % SIBLINGS < max(2, alike)]
    size = max(2, alike)
    for number, line in enumerate(log):
        line["response"] = log[number - number % size]["response"]
    (skipped,) = diagnose(imported(log, tmp_path), [BY_NAME["same-seed"]]).skipped
    assert skipped.reason == "the run has nothing to measure"


def test_the_weights_that_sampled_the_first_token(tmp_path):
    made = healthy()
    steps, batch, length = made.mask.shape
    true = np.maximum(0, np.arange(steps) - 12)[:, None] + np.arange(batch) % 2
    made.tokens["sampler_version"] = true[..., None] + np.arange(length) // 7  # the weights changed within responses
    data = kept(made.write(tmp_path / "run"), tmp_path / "set", frozenset(["tokens.sampler_version"]))
    np.testing.assert_array_equal(data.rows["policy_version"], true.ravel())
    (finding,) = diagnose(data, [BY_NAME["too-off-policy"]]).findings
    assert derived_for(finding) == {"rows.policy_version"} and finding.reading.seen == 12

"""What a finding shows: what changed in numbers, a response before it began and one that shows it, and all of them."""

import re
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import sick_invariants
import sick_kl
import sick_response
import sick_reward
from doctor_helpers import Made, healthy
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent.parent / "index"))

from index_helpers import indexed

import cavesson
from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import Detection, diagnose
from cavesson.doctor.findings import findings_in
from cavesson.doctor.rules import RULES
from cavesson.doctor.rules.pattern import expression, search_expression
from cavesson.doctor.words import LANGUAGES, language
from cavesson.findings.finding import Finding
from cavesson.index.filters import matches
from cavesson.record import Recorder, begin_attempt, write_run


def sick(name: str) -> Made:
    made = healthy()
    sick_response.case[name][0](made)
    return made


def detected(name: str, data: RunData) -> tuple[Detection, Finding]:
    found = diagnose(data, [rule for rule in RULES if rule.name == name])
    (one,), (finding,) = found.findings, findings_in(found, language("en"))
    return one, finding


def lower_median(rollouts: list[tuple[float, int, int]]) -> tuple[int, int]:
    """The step and the sample with the median of some rewards; of an even number, the lower one of the two."""
    _, step, sample = sorted(rollouts)[(len(rollouts) - 1) // 2]
    return step, sample


def last_three(made: Made, kept: np.ndarray) -> list[tuple[float, int, int]]:
    """The rollouts of the last three steps that have any for which ``kept`` [S, B] is true."""
    steps = np.flatnonzero(kept.any(1))[-3:].tolist()
    return [(float(made.rows["reward"][s, i]), s, int(i)) for s in steps for i in np.flatnonzero(kept[s])]


def test_the_examples_have_the_median_reward_before_and_among_those_affected(tmp_path):
    made = sick("truncated")
    made.rows["finish_reason"][:8, :3] = "length"  # some were cut before, too
    made.rows["finish_reason"][8:, ::2] = "eos"
    made.rows["finish_reason"][8:, :4] = "length"
    is_cut = made.rows["finish_reason"] == "length"
    made.rows["finish_reason"][10:, 4:28] = "length"
    is_cut = made.rows["finish_reason"] == "length"
    one, finding = detected("truncated", made.data(tmp_path / "run"))
    since = one.reading.since
    late = np.arange(24)[:, None] >= since
    for place, kept in ((finding.before, ~late & ~is_cut), (finding.after, late & is_cut)):
        step, sample = lower_median(last_three(made, kept))
        assert (place.step, place.sample) == (step, sample)
        assert place.text == made.rows["response"][step, sample]
        assert place.reward == pytest.approx(made.rows["reward"][step, sample], abs=1e-6)
    assert finding.affected.filter == 'finish_reason == "length"'
    assert finding.affected.steps == (since, 23)


@pytest.mark.parametrize(
    ("case", "name", "which"),
    [
        (sick_response.case, "truncated", lambda made: made.rows["finish_reason"] == "length"),
        (sick_response.case, "never-ends", lambda made: made.rows["finish_reason"] == "length"),
        (sick_invariants.case, "end-forbidden", lambda made: made.mask.sum(-1) == made.mask.sum(-1).min()),
        (
            sick_kl.case,
            "negative-kl",
            lambda made: ((made.tokens["logprob"] - made.tokens["ref_logprob"]) * made.mask).sum(-1) < 0,
        ),
        (sick_reward.case, "over-optimised", lambda made: made.rows["split"] == "eval"),
    ],
)
def test_the_filter_of_the_board_selects_exactly_the_affected_rollouts(case, name, which, tmp_path):
    made = healthy()
    case[name][0](made)
    _, finding = detected(name, made.data(tmp_path / "run"))
    snapshot = indexed(tmp_path / "run")
    found = matches(finding.affected.filter, snapshot)
    first, last = finding.affected.steps
    keys = {key for key, hit in zip(snapshot.keys(np.arange(snapshot.rows)), found, strict=True) if hit}
    wanted = {(int(step), int(sample)) for step, sample in np.argwhere(which(made))}
    assert (
        {key for key in keys if first <= key[0] <= last} == {key for key in wanted if first <= key[0] <= last} != set()
    )


def test_what_was_measured_before_and_since_are_means_over_the_steps(tmp_path):
    made = healthy()
    made.rows["finish_reason"][:] = "eos"
    made.rows["finish_reason"][:8, :4] = "length"  # 12.5 %
    made.rows["finish_reason"][8:, :24] = "length"  # 75 %
    one, finding = detected("truncated", made.data(tmp_path / "run"))
    assert one.reading.since == 8
    said = "Share of responses cut at the length limit: 75 % on average from step 8 on, 12 % before."
    assert finding.happened == said
    for name in LANGUAGES:
        other = next(iter(findings_in(diagnose(RunData(cavesson.open(tmp_path / "run")), [one.rule]), language(name))))
        assert re.findall(r"\d+", other.happened) == ["75", "8", "12"] or name == "zh"
        assert {"75", "8", "12"} == set(re.findall(r"\d+", other.happened))


def test_what_began_with_the_run_has_no_example_before(tmp_path):
    _, finding = detected("never-ends", sick("never-ends").data(tmp_path / "run"))
    assert finding.since_step == 0
    assert finding.before is None and finding.after is not None and finding.happened == ""


def test_without_texts_there_is_no_example(tmp_path):
    made, folder = sick("truncated"), tmp_path / "run"
    write_run(folder, made.info)
    with Recorder(folder, attempt=begin_attempt(folder, start_step=0)) as recorder:
        for step in range(24):
            rows = {name: made.rows[name][step] for name in ("group", "prompt_ids", "reward", "finish_reason")}
            rows |= {"prompt": [""] * 32, "response": [""] * 32}
            recorder.rollouts(step, rows, {name: made.tokens[name][step] for name in ("mask", "token_id")})
    _, finding = detected("truncated", RunData(cavesson.open(folder)))
    assert (finding.before, finding.after) == (None, None)
    assert finding.affected.filter == 'finish_reason == "length"'


def test_where_a_rule_names_rollouts_the_first_of_them_is_the_example(tmp_path):
    one, finding = detected("end-not-trained", sick("end-not-trained").data(tmp_path / "run"))
    named = one.reading.evidence[0]
    assert (finding.after.step, finding.after.sample) == (named.step, named.sample)
    assert finding.affected.filter == finding.affected.search == ""


def test_a_spreading_pattern_is_a_search_that_finds_what_the_rule_counted(tmp_path):
    made = sick("pattern-spreading")
    _, finding = detected("pattern-spreading", made.data(tmp_path / "run"))
    assert finding.affected.search == "#"
    first, last = finding.affected.steps
    found = pc.match_substring_regex(pa.array(made.rows["response"][first:].ravel().tolist()), finding.affected.search)
    has = np.char.find(made.rows["response"][first:].astype(str), "#") >= 0
    assert last == 23 and found.to_pylist() == has.ravel().tolist()
    late = (np.arange(24) >= first)[:, None] & (np.char.find(made.rows["response"].astype(str), "#") >= 0)
    assert (finding.after.step, finding.after.sample) == lower_median(last_three(made, late))


@given(
    st.sampled_from(["good", "a good day", "#", "!!", "好", "ok 好", "đẹp", "naïve", ":)", "x_y"]),
    st.lists(
        st.sampled_from([*"a_ \n.#!:)好中", "good", "Day", "ok", "đẹp", "Đẹp", "naïve", "\u0301", "7"]), max_size=8
    ),
)
def test_the_search_of_the_board_finds_a_pattern_where_python_does(pattern, pieces):
    for text in ("".join(pieces), " ".join(pieces), pattern.join(pieces)):
        found = pc.match_substring_regex(pa.array([text]), search_expression(pattern))[0].as_py()
        assert found == (re.search(expression(pattern), text) is not None), text

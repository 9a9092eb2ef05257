"""The smallest sets of columns that suffice for a rule do suffice, and nothing in them is superfluous."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from doctor_helpers import LENGTH, WORDS, Made, healthy, suited
from test_doctor_bare import cut_more_and_more
from test_doctor_rules import BY_NAME, SICK
from test_doctor_temperature import draw_in_contexts

import cavesson
from benchmarks.sufficient import ANY_TOKENS, COMPUTED, smallest_sets
from cavesson.doctor.data import RunData
from cavesson.doctor.derive import DERIVATIONS
from cavesson.doctor.diagnosis import diagnose
from cavesson.doctor.rule import rule
from cavesson.doctor.rules import RULES
from cavesson.doctor.rules.length import CUT
from cavesson.findings.kl import estimates
from cavesson.record import Recorder, write_run
from cavesson.record.schema import PLACE_COLUMNS, STEP_COLUMNS

Columns = frozenset[str]
ALWAYS = {"sample", "position", "rank", *(one.name for one in (*PLACE_COLUMNS, *STEP_COLUMNS))}
"""A record without these is none."""


def with_computed(columns: Columns) -> Columns:
    """Add what every recorder computes from the columns."""
    tokens = {one for one in columns if one.startswith("tokens.")}
    return columns | {name for name, needs in COMPUTED.items() if needs <= tokens or (ANY_TOKENS in needs and tokens)}


def kept(folder: Path, out: Path, columns: Columns) -> RunData:
    """Copies a record with these columns and settings alone."""
    shutil.copytree(folder, out)
    columns = with_computed(columns)
    for path in out.glob("record/*.parquet"):
        kind = path.name.partition("-")[0]
        if kind == "steps" and not any(one.startswith("steps.") for one in columns):
            path.unlink()
        elif kind in ("rows", "tokens", "steps"):
            table = pq.read_table(path)
            gone = [one for one in table.column_names if one not in ALWAYS and f"{kind}.{one}" not in columns]
            for name in gone:
                at = table.column_names.index(name)
                table = table.set_column(at, name, pa.nulls(len(table), table.schema.field(name).type))
            pq.write_table(table, path)
    info = json.loads((out / "run.json").read_text())
    settings = {"algorithm": info["algorithm"], "config": {}}  # as of a recorder whose parts of a reward are such
    for column in columns:
        kind, _, path = column.partition(".")
        if kind == "info":
            found, place, (*above, last) = info, settings, path.split(".")
            for key in above:
                found, place = found[key], place.setdefault(key, {})
            place[last] = found[last]
    (out / "run.json").write_text(json.dumps(settings))
    return RunData(cavesson.open(out))


def judges(data: RunData, name: str) -> bool:
    return not diagnose(data, [BY_NAME[name]]).skipped


def world(name: str, columns: Columns) -> Made:
    """A run that shows a rule's finding, and in which what the columns lack follows from them."""
    rule = BY_NAME[name]
    made = healthy(suited(rule))
    if name in PENALTIES and not {"rows.kl_coef", "tokens.token_reward"} <= columns:
        penalise(made, *PENALTIES[name])
    elif CUT in rule.needs and "rows.response" in columns:
        cut_more_and_more(made)
        made.rows["response"] += np.where(made.rows["finish_reason"] == "eos", ".", "").astype(object)
    else:
        INSTEAD.get(name, SICK[name][0])(made)
    if name == "ratio-not-one":
        made.metrics["policy/approx_kl"][0] = 0.1  # more than the policy has moved by the next step
    if name == "reference-is-policy":  # the policy becomes more certain, and the reference with it
        for column in ("logprob", "ref_logprob"):
            made.tokens[column] *= np.linspace(1, 0.5, len(made.mask))[:, None, None]
    if name == "repetition-loops":
        made.rows["response"] *= 4  # only of a longer text is it known how much compression saves
    if name in ("group-advantages", "penalty-wrong"):
        first = made.tokens["advantage"][..., 0]
        made.rows["extra"] = np.array([[json.dumps({"advantage": one}) for one in line] for line in first], object)
    made.tokens["token"] = np.array(["<end>", *WORDS[1:]], object)[made.tokens["token_id"]]
    made.tokens["sampler_version"] = made.rows["policy_version"][..., None].repeat(LENGTH, -1)
    made.metrics["finish/length"] = (made.rows["finish_reason"] == "length").mean(1)
    made.metrics["time/step"] = made.metrics["time/total"]
    made.metrics["kl/per_token"] = made.metrics["kl/objective"] / made.mask.sum(-1).mean(-1)
    return made


INSTEAD = {"temperature-missing": lambda made: draw_in_contexts(made, 0.6)}
"""Contexts that are all alike, as in the usual case, tell no temperature."""
PENALTIES = {
    "penalty-wrong": (np.full(24, -0.05), "k1"),
    "penalty-mis-scaled": (np.full(24, 50.0), "k1"),
    "coefficient-runaway": (0.05 * np.exp(np.linspace(0, 4, 24)), "k1"),
    "estimator-misplaced": (np.full(24, 0.05), "k3"),
}
"""The coefficient of each step, and the estimator."""


def penalise(made: Made, beta: np.ndarray, estimator: str) -> None:
    """Put the penalty into token rewards, and into advantages as RLOO has them: minus the mean of the siblings."""
    spent = estimates(made.tokens["logprob"] - made.tokens["ref_logprob"])[estimator] * made.mask * beta[:, None, None]
    last = np.arange(LENGTH) == made.mask.sum(-1, keepdims=True) - 1
    made.tokens["token_reward"] = np.where(last, made.rows["reward"][..., None], 0.0) - spent
    total = (made.rows["reward"] - spent.sum(-1)).reshape(len(beta), -1, 4)
    advantage = (total - total.mean(-1, keepdims=True)) * 4 / 3
    made.tokens["advantage"] = advantage.reshape(len(beta), -1, 1) * made.mask


# Of each rule, the set in which the most is derived: all of them take four minutes.
SETS = [pytest.param(rule.name, smallest_sets(rule)[-1], id=rule.name) for rule in RULES if rule.name in SICK]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("name", "columns"), SETS)
def test_a_set_suffices_and_nothing_in_it_is_superfluous(name, columns, tmp_path):
    folder = world(name, columns).write(tmp_path / "run")
    assert judges(kept(folder, tmp_path / "set", columns), name)
    for number, column in enumerate(sorted(columns)):
        assert not judges(kept(folder, tmp_path / str(number), columns - {column}), name), column


def test_no_rule_demands_what_can_be_derived():
    for one in RULES:
        sets = smallest_sets(one)
        for name in set().union(*sets) & BY_DERIVATION - set(one.recorded):
            assert any(name not in columns for columns in sets), f"{one.name} demands {name}"


BY_DERIVATION = {name for one in DERIVATIONS for name in one.gives}


def names(*needs: str, recorded: tuple[str, ...] = ()) -> list[set[str]]:
    return [set(columns) for columns in smallest_sets(replace(RULES[0], needs=needs, recorded=recorded))]


def test_a_set_that_contains_another_is_left_out():
    assert names("tokens.logprob", "tokens.logprob|tokens.entropy") == [{"tokens.logprob"}]


def test_derivations_are_followed_to_the_end():
    # End tokens follow from ids, ids from texts, and why a response ended from end tokens or a limit.
    found = names("rows.finish_reason")
    assert {"rows.finish_reason"} in found and {"tokens.token"} in found
    assert {ANY_TOKENS, "rows.response"} in found
    # A limit alone does not say how long responses are.
    assert {"info.config.sampling.max_new_tokens"} not in found


def test_what_must_be_recorded_is_not_derived():
    assert names("rows.finish_reason", recorded=("rows.finish_reason",)) == [{"rows.finish_reason"}]
    with pytest.raises(ValueError, match="is not among the needs"):
        rule(
            number=0, needs=["rows.reward"], recorded=["rows.length"], title="", cause="", healthy="", fix="", source=""
        )


def test_what_the_recorder_computes_stands_for_its_tokens():
    assert names("rows.kl_k1") == [{"tokens.logprob", "tokens.ref_logprob"}]
    assert names("rows.length", "rows.reward") == [{ANY_TOKENS, "rows.reward"}]
    assert names("rows.length", "tokens.value") == [{"tokens.value"}]
    assert names("rows.advantage") == [{"rows.extra"}, {"tokens.advantage"}]  # it is not a column of the record
    assert names("rows.group") == [{"rows.group"}, {"rows.prompt"}]


def all_but(*gone: str) -> Columns:
    """Return the columns that a healthy run has, without some."""
    made = healthy()
    found = {"rows": made.rows, "tokens": made.tokens, "steps": made.metrics}
    return frozenset(f"{kind}.{name}" for kind, columns in found.items() for name in columns) - set(gone)


def test_groups_follow_from_the_prompts(tmp_path):
    folder = healthy().write(tmp_path / "run")
    true = RunData(cavesson.open(folder))
    data = kept(folder, tmp_path / "bare", all_but("rows.group"))
    assert not data.recorded("rows.group") and data.has("rows.group")
    np.testing.assert_array_equal(data.rows.group, true.rows.group)
    np.testing.assert_array_equal(data.sample.rows.group, true.sample.rows.group)
    # Of each prompt in any step, as an index of prompts would be.
    pairs = set(zip(data.rows["group"].tolist(), true.rows["group"].tolist(), strict=True))
    assert len(pairs) == len({one for one, _ in pairs}) == len({other for _, other in pairs}) == 40


def test_one_prompt_for_all_is_none(tmp_path):
    """Logs of texts that begin with the prompt have empty ones."""
    made = healthy()
    made.rows["prompt"][:] = ""
    data = kept(made.write(tmp_path / "run"), tmp_path / "bare", all_but("rows.group"))
    assert not data.has("rows.group")
    assert len(np.unique(data.rows.group)) == len(data.rows)


@pytest.mark.parametrize(("trained", "known"), [(["p", "p"], False), (["p", "q"], True)])
def test_prompts_of_held_out_rollouts_make_no_groups(tmp_path, trained, known):
    write_run(tmp_path, {})
    with Recorder(tmp_path) as recorder:
        for step in range(3):
            for split, prompts, first in (("train", trained, 0), ("eval", ["q", "r", "p"], 5)):
                size = len(prompts)
                rows = {"sample": first + np.arange(size), "split": [split] * size, "prompt": prompts}
                recorder.rollouts(step, rows | {"response": ["a"] * size, "reward": np.zeros(size)})
    data = RunData(cavesson.open(tmp_path))
    assert data.has("rows.group") == known
    if known:
        assert data.rows["group"].tolist() == [0, 1] * 3
        assert np.isnan(data.evaluation["group"]).all()


def test_lengths_and_texts_say_why_responses_ended(tmp_path):
    made = healthy()
    cut_more_and_more(made)
    made.rows["response"] += np.where(made.rows["finish_reason"] == "eos", ".", "").astype(object)
    data = kept(made.write(tmp_path / "run"), tmp_path / "bare", frozenset(["rows.response", "tokens.entropy"]))
    same = np.array(data.rows.texts("finish_reason")) == made.rows["finish_reason"].ravel()
    assert same[made.mask.sum(-1).ravel() < LENGTH].all() and same.mean() > 0.97


def test_end_tokens_without_the_ids_of_the_tokens_say_nothing_about_the_limit(tmp_path):
    folder = healthy().write(tmp_path / "run")
    data = kept(folder, tmp_path / "bare", all_but("rows.finish_reason", "tokens.token_id") | {"info.eos_token_ids"})
    assert data.setting("config.sampling.max_new_tokens") is None and not data.has("rows.finish_reason")


def test_a_sampler_that_agrees_with_the_trainer_does_not_filter(tmp_path):
    folder = healthy().write(tmp_path / "run")
    data = kept(folder, tmp_path / "bare", frozenset(["tokens.logprob", "tokens.sampler_logprob"]))
    (filtered,) = diagnose(data, [BY_NAME["filtered-sampling"]]).healthy
    assert filtered[1].seen == 0.0


def test_settings_may_be_missing(tmp_path):
    folder = healthy().write(tmp_path / "run")
    (folder / "run.json").write_text('{"config": null}')
    assert diagnose(RunData(cavesson.open(folder)), RULES).findings == ()

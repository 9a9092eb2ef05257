"""Whatever a record looks like, the doctor answers, changes nothing of it, and minds nothing but the run itself."""

import copy
import hashlib
import io
import json
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
import sick_invariants
from doctor_helpers import healthy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

import cavesson
from cavesson.cli import app
from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import diagnose
from cavesson.doctor.look import look
from cavesson.doctor.report.page import page
from cavesson.doctor.report.plain import plain
from cavesson.doctor.report.terminal import show
from cavesson.doctor.rules import RULES
from cavesson.doctor.words import LANGUAGES, language
from cavesson.record import Recorder, begin_attempt, compact, write_run

RUNS = {algorithm: healthy(algorithm) for algorithm in ("ppo", "grpo")}


def a_run(algorithm="ppo"):
    return copy.deepcopy(RUNS[algorithm])


def found_in(folder):
    return diagnose(RunData(cavesson.open(folder)), RULES)


def findings(made, folder):
    return [one.rule.name for one in found_in(made.write(folder)).findings]


def answer(folder):
    """Return what the doctor says, in every way in which it says it."""
    data = RunData(cavesson.open(folder))
    diagnosis = diagnose(data, RULES)
    for name in LANGUAGES:
        words = language(name)
        assert page(data, diagnosis, words).endswith("</html>\n")
        show(Console(file=io.StringIO()), data, diagnosis, words)
        said = plain(data, diagnosis, words)
        json.dumps(said, allow_nan=False)
    assert sum(len(said[kind]) for kind in ("findings", "healthy", "skipped")) == len(RULES)
    return diagnosis


def fill(made, value):
    """Write one number into every column that has numbers."""
    for column in (*made.rows.values(), *made.tokens.values(), *made.metrics.values()):
        if np.issubdtype(column.dtype, np.floating):
            column[:] = value
    return made


def silent(made):
    """Nobody says anything: no response has a token."""
    made.tokens["mask"][:] = False
    made.rows["response"][:] = ""
    return made


STRANGE = {
    "every column NaN": lambda: fill(a_run(), np.nan),
    "every column infinite": lambda: fill(a_run(), np.inf),
    "every column 0": lambda: fill(a_run(), 0.0),
    "every column huge": lambda: fill(a_run(), 1e300),
    "one step": lambda: healthy(steps=1),
    "two steps": lambda: healthy(steps=2),
    "one rollout": lambda: healthy(steps=1, batch=1, siblings=1),
    "one rollout a step": lambda: healthy(batch=1, siblings=1),
    "ten thousand empty responses": lambda: silent(healthy(steps=10, batch=1000)),
    "one empty response": lambda: silent(healthy(steps=1, batch=1, siblings=1)),
}


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", STRANGE)
def test_there_is_an_answer_to_every_record(name, tmp_path):
    answer(STRANGE[name]().write(tmp_path / "run"))


def test_ten_thousand_empty_responses_are_named(tmp_path):
    assert "rollouts-fail" in findings(STRANGE["ten thousand empty responses"](), tmp_path / "run")


@pytest.mark.parametrize("what", ["nothing", "metrics", "rows"])
def test_there_is_an_answer_to_part_of_a_record(what, tmp_path):
    made = a_run()
    write_run(tmp_path, {})
    with Recorder(tmp_path) as recorder:
        for step in range(24):
            if what == "rows":
                rows = {name: made.rows[name][step] for name in ("prompt", "response", "reward")}
                recorder.rollouts(step, rows | {"sample": np.arange(32)}, {"mask": np.zeros((32, 0), bool)})
            if what == "metrics":
                recorder.metrics(step, {name: values[step] for name, values in made.metrics.items()})
    assert answer(tmp_path).findings == ()


JUNK = st.sampled_from([np.nan, np.inf, -np.inf, 0.0, 1.0, -1e300, 1e-300])


@pytest.mark.filterwarnings("error")
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.integers(1, 13), st.integers(1, 9))
def test_there_is_an_answer_to_any_numbers(tmp_path_factory, draw, steps, batch):
    made = healthy(steps=steps, batch=batch, siblings=1)
    columns = [(part, name) for part in (made.rows, made.tokens, made.metrics) for name in part if name not in SAID]
    for columns_of, name in columns:
        done = draw.draw(st.sampled_from(["kept", "kept", "dropped", "filled", "holes"]), label=name)
        column = columns_of[name]
        if done == "dropped":
            del columns_of[name]
        elif done == "filled" and np.issubdtype(column.dtype, np.floating):
            column[:] = draw.draw(JUNK)
        elif done == "holes" and np.issubdtype(column.dtype, np.floating):
            column[np.random.default_rng(0).random(column.shape) < 0.5] = np.nan
    answer(made.write(tmp_path_factory.mktemp("any") / "run"))


SAID = frozenset(["step", "sample", "prompt", "response", "reward", "mask", "position"])
"""Without these there is no record."""


@pytest.fixture(scope="module")
def compacted(tmp_path_factory):
    """A healthy run of each algorithm, in few files, from which columns are quickly taken."""
    folders = {name: a_run(name).write(tmp_path_factory.mktemp(name) / "run") for name in RUNS}
    for folder in folders.values():
        compact(folder)
    return folders


def columns_in(folder):
    """Return the columns, metrics, and entries of run.json of a run."""
    files = sorted(folder.glob("record/[!r]*.parquet")) + sorted(folder.glob("record/rows-*.parquet"))
    found = {(file.name, name) for file in files for name in pq.read_schema(file).names if name not in SAID}
    info = json.loads((folder / "run.json").read_text())
    found |= {("run.json", name) for name in info}
    return sorted(found | {("config", f"{group}.{name}") for group, part in info["config"].items() for name in part})


def without(folder, taken, to):
    """Copies a run without some of what ``columns_in`` returns."""
    shutil.copytree(folder, to)
    for file in {file for file, _ in taken if file.endswith(".parquet")}:
        table = pq.read_table(to / "record" / file)
        pq.write_table(table.drop_columns([name for of, name in taken if of == file]), to / "record" / file)
    info = json.loads((to / "run.json").read_text())
    for group, _, name in (name.partition(".") for of, name in taken if of == "config"):
        del info["config"][group][name]
    kept = {name: value for name, value in info.items() if ("run.json", name) not in taken}
    (to / "run.json").write_text(json.dumps(kept))
    return [one.rule.name for one in found_in(to).findings]


@pytest.mark.slow
def test_no_rule_fires_because_a_column_is_missing(compacted, tmp_path):
    columns = columns_in(compacted["ppo"])
    found = {one: without(compacted["ppo"], [one], tmp_path / str(number)) for number, one in enumerate(columns)}
    assert len(columns) > 50 and {one: rules for one, rules in found.items() if rules} == {}


@pytest.mark.slow
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(RUNS)), st.data())
def test_no_rule_fires_because_columns_are_missing(compacted, tmp_path_factory, algorithm, draw):
    folder = compacted[algorithm]
    taken = draw.draw(st.lists(st.sampled_from(columns_in(folder)), unique=True, max_size=25))
    assert without(folder, taken, tmp_path_factory.mktemp("missing") / "run") == []


def very_sick():
    """Several things are wrong, each seen in another kind of data."""
    made = a_run()
    for name in ("temperature-missing", "reward-position", "double-start"):
        sick_invariants.case[name][0](made)
    made.metrics["policy/clip_fraction"][10:] = 0.5
    return made


def written(made, folder, ranks, order):
    """Write a run in several processes' parts, in any order of the rollouts of a step."""
    write_run(folder, made.info)
    owner = np.arange(made.mask.shape[1]) * ranks // made.mask.shape[1]
    for rank in range(ranks):
        with Recorder(folder, attempt=0, rank=rank) as recorder:
            for step in range(len(made.mask)):
                mine = order[owner[order] == rank]
                rows = {name: column[step][mine] for name, column in made.rows.items()} | {"sample": mine}
                recorder.rollouts(step, rows, {name: column[step][mine] for name, column in made.tokens.items()})
                if rank == 0:
                    recorder.metrics(step, {name: float(values[step]) for name, values in made.metrics.items()})
    return folder


def told(folder):
    return plain(data := RunData(cavesson.open(folder)), diagnose(data, RULES), language("en")) | {"run": ""}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("compacted", [False, True])
@pytest.mark.parametrize("ranks", [1, 3])
def test_verdicts_depend_on_no_order_of_rows_segments_or_ranks(ranks, compacted, tmp_path):
    made = very_sick()
    batch = made.mask.shape[1]
    plainly = told(written(made, tmp_path / "plainly", 1, np.arange(batch)))
    assert len(plainly["findings"]) > 4
    shuffled = written(made, tmp_path / "shuffled", ranks, np.random.default_rng(1).permutation(batch))
    if compacted:
        compact(shuffled)
    assert told(shuffled) == plainly


def digests(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns) for path in files}


@pytest.mark.slow
def test_the_doctor_changes_nothing_of_a_record(tmp_path):
    folder = very_sick().write(tmp_path / "run")
    before = digests(folder)
    out = ["--html", str(tmp_path / "page.html")]
    for more in ([], ["--json"], out, [*out, "--language", "zh"]):
        assert CliRunner().invoke(app, ["doctor", str(folder), *more]).exit_code == 0
    look(str(folder), tmp_path / "findings.json", "v")
    assert before and digests(folder) == before


@pytest.mark.slow
def test_evaluation_does_not_fool_the_doctor(tmp_path):
    """Every fourth step has held-out rollouts, which are longer, worse and of another policy."""
    made = very_sick()
    folder = made.write(tmp_path / "with")
    chance = np.random.default_rng(4)
    with Recorder(folder, attempt=0, rank=1) as recorder:
        for step in range(0, 24, 4):
            rows = {"sample": 1000 + np.arange(9), "split": ["eval"] * 9, "reward": np.full(9, -50.0)}
            rows |= {"prompt": ["held out"] * 9, "response": ["# " * 99] * 9, "finish_reason": ["length"] * 9}
            tokens = {name: np.full((9, 99), -30.0) for name in ("logprob", "ref_logprob", "sampler_logprob", "value")}
            tokens |= {"mask": np.ones((9, 99), bool), "token_reward": chance.normal(size=(9, 99))}
            recorder.rollouts(step, rows, tokens)
    assert len(RunData(cavesson.open(folder)).evaluation) == 54
    one, other = told(folder), told(made.write(tmp_path / "without"))
    # What is about the held-out reward can now be measured.
    for said in (one, other):
        del said["summary"]  # it counts the rules that could judge
        for kind in ("findings", "healthy", "skipped"):
            said[kind] = [line for line in said[kind] if line["rule"] != "over-optimised"]
        said["cannot_be_excluded"] = [one for one in said["cannot_be_excluded"] if "over-optimised" not in one["rules"]]
    assert one == other


@pytest.mark.slow
def test_what_an_attempt_left_behind_does_not_fool_the_doctor(tmp_path):
    """The first attempt went wrong from step 10 on; the second began again there and did not."""
    good, bad = a_run(), a_run()
    bad.rows["reward"][10:] -= 30
    bad.tokens["logprob"][10:] += 1
    bad.metrics["policy/clip_fraction"][10:] = 0.9
    bad.metrics["loss/value"][12] = np.nan
    assert len(findings(bad, tmp_path / "bad")) > 3
    folder = bad.write(tmp_path / "resumed")
    with Recorder(folder, attempt=begin_attempt(folder, start_step=10)) as recorder:
        for step in range(10, 24):
            rows = {name: column[step] for name, column in good.rows.items()} | {"sample": np.arange(32)}
            recorder.rollouts(step, rows, {name: column[step] for name, column in good.tokens.items()})
            recorder.metrics(step, {name: float(values[step]) for name, values in good.metrics.items()})
    assert findings(good, tmp_path / "good") == []
    assert told(folder) == told(tmp_path / "good")


def test_values_that_are_missing_here_and_there_do_not_fool_the_doctor(tmp_path):
    made = a_run()
    chance = np.random.default_rng(6)
    folder = tmp_path / "run"
    write_run(folder, made.info)
    with Recorder(folder, attempt=begin_attempt(folder, start_step=0)) as recorder:
        for step in range(24):
            rows = {name: column[step].tolist() for name, column in made.rows.items()}
            for name in ("shaped_reward", "kl_coef", "group", "finish_reason", "policy_version"):
                rows[name] = [None if chance.random() < 0.2 else value for value in rows[name]]
            tokens = {name: column[step] for name, column in made.tokens.items()}
            recorder.rollouts(step, rows | {"sample": np.arange(32)}, tokens)
            some = {name: float(v[step]) for name, v in made.metrics.items() if chance.random() > 0.2}
            recorder.metrics(step, some)
    assert [one.rule.name for one in found_in(folder).findings] == []

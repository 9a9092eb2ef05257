"""What a look at a run leaves in the findings' file."""

import time

import pytest
import sick_invariants
from doctor_helpers import healthy

import cavesson.doctor.look
from cavesson.doctor.diagnosis import diagnose
from cavesson.doctor.look import look
from cavesson.doctor.plugins import all_rules
from cavesson.doctor.words import LANGUAGES, language
from cavesson.errors import UserError
from cavesson.findings.stored import read_findings
from cavesson.findings.words import number
from cavesson.record import begin_attempt, write_run


def test_the_file_says_what_the_diagnosis_says(tmp_path):
    made = healthy()
    for name in ("temperature-missing", "reward-position"):
        sick, _ = sick_invariants.case[name]
        sick(made)
    data = made.data(tmp_path / "run")
    file = tmp_path / "findings.json"
    began = time.monotonic()
    look(str(tmp_path / "run"), file, "v")
    seen = read_findings(file)
    assert seen.version == "v" and 0 < seen.seconds <= time.monotonic() - began
    diagnosis = diagnose(data, all_rules())
    assert any(cause.explains for cause in diagnosis.causes)
    assert any(place.start is not None for cause in diagnosis.causes for place in cause.reading.evidence)
    assert seen.last_step == 23
    for name in LANGUAGES:
        words = language(name)
        titles = {one.rule.name: words.texts(one.rule, one.reading).title for one in diagnosis.findings}
        for one, cause in zip(seen.findings[name], diagnosis.causes, strict=True):
            said = words.texts(cause.rule, cause.reading, cause.names)
            assert (one.rule, one.severity) == (cause.rule.name, cause.severity)
            assert (one.title, one.cause, one.healthy, one.fix) == (said.title, said.cause, said.healthy, said.fix)
            assert one.seen == number(cause.reading.seen)
            assert one.since_step == cause.reading.since
            assert one.explains == {under: titles[under] for under in cause.explains}
            assert one.evidence == cause.reading.evidence


def test_of_no_steps_nothing_is_found(tmp_path):
    file = tmp_path / "findings.json"
    write_run(tmp_path / "run", {"algorithm": "ppo"})
    look(str(tmp_path / "run"), file, "v")
    assert read_findings(file).findings == dict.fromkeys(LANGUAGES, ())


@pytest.mark.parametrize("resumed", [True, False])
def test_a_run_that_is_resumed_during_a_look_is_no_error(tmp_path, monkeypatch, resumed):
    run, file = tmp_path / "run", tmp_path / "findings.json"
    healthy(steps=6).write(run)

    def late(data, rules):
        steps = data.rows.steps.tolist()  # what the look knows of the record
        if resumed:
            begin_attempt(run, 1)
        else:
            for rows in (run / "record").iterdir():
                rows.unlink()
        assert steps == [0, 1, 2, 3, 4, 5]
        return diagnose(data, rules)

    monkeypatch.setattr(cavesson.doctor.look, "diagnose", late)
    if resumed:
        look(str(run), file, "v")
        assert not file.exists()  # the next look writes what it finds in the new attempt
    else:
        with pytest.raises(UserError):
            look(str(run), file, "v")

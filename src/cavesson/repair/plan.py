"""What a repair tries: which settings, from which step to which."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cavesson.algorithms.runs import RolloutRun
from cavesson.command_line import is_trained_here
from cavesson.config import check
from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import Detection, Diagnosis
from cavesson.doctor.words import Language
from cavesson.errors import UserError
from cavesson.record import run_info
from cavesson.record.files import write_text
from cavesson.registry import ALGORITHMS
from cavesson.text.counting import counted
from cavesson.train.checkpoint import between_steps


@dataclass(frozen=True)
class Plan:
    """Two forks of a run: one with changed settings, one without."""

    rule: str
    """the finding that the settings are to end"""
    settings: dict[str, Any]
    """the changed settings, by their dotted names"""
    start: int
    """the step at which both forks begin"""
    end: int
    """the step before which both end"""
    keeps_record: bool
    """whether the forks have the record of the steps before `start`; not if the problem is in it already"""
    note: str
    """why the forks begin there"""

    def write(self, file: Path) -> None:
        write_text(file, json.dumps(asdict(self), indent=1))


def read_plan(file: Path) -> Plan | None:
    """Return the plan of an earlier call, or None if there is none."""
    return Plan(**json.loads(file.read_bytes())) if file.exists() else None


def check_run(run: Path) -> None:
    """Raise a UserError if a run cannot be forked, which says why, and what to do instead."""
    info = run_info(run)
    if not is_trained_here(info):
        raise UserError(f"{run} was trained by another trainer, which --fix cannot start: change its settings there")
    if not issubclass(ALGORITHMS[info["algorithm"]].settings, RolloutRun):
        raise UserError(f"{run} is a run of {info['algorithm']}: --fix compares runs that sample responses")


def chosen(run: Path, diagnosis: Diagnosis, name: str | None, words: Language) -> Detection:
    """Return the finding to fix, the named one or the first cause with a setting that ends it, or raise a UserError."""
    if not diagnosis.findings:
        raise UserError(f"the doctor finds nothing wrong in {run}: there is nothing to fix")
    named = [one for one in diagnosis.findings if one.rule.name == name]
    if name is not None and not named:
        found = ", ".join(one.rule.name for one in diagnosis.findings)
        raise UserError(f"the doctor does not find {name} in {run}; it finds {found}")
    fixable = [one for one in named or diagnosis.causes if one.settings]
    if not fixable:
        first = (named or diagnosis.causes)[0]
        advice = words.texts(first.rule, first.reading, first.names).fix
        raise UserError(f"no setting of {run} ends {first.rule.name}; what to change instead: {advice}")
    return fixable[0]


def new_plan(run: Path, data: RunData, finding: Detection, steps: int | None, start: int | None) -> Plan:
    """Return the plan for a finding with settings, about the data of a run in a folder.

    `steps` are those to train; None = as many as the run has done from the start of the forks, or from the problem's
    onset if that is earlier. `start` is the step at which to begin; None = the last checkpoint before the onset.

    Raises:
        UserError: the run has no checkpoint at `start`, or the settings contradict others.
    """
    onset, trained = finding.reading.since or 0, data.rows.steps
    done = int(trained[-1]) + 1 if len(trained) else onset + 1
    begin, note = _start(run, onset, start)
    settings = dict(finding.settings)
    length = steps or done - min(begin, onset)
    with_settings(run, run, settings, begin + length)
    return Plan(finding.rule.name, settings, begin, begin + length, begin <= onset, note)


def _start(run: Path, onset: int, wanted: int | None) -> tuple[int, str]:
    """Return the step at which to fork, and why there; if it is given, there must be a checkpoint."""
    kept = between_steps(run)
    if wanted is not None:
        if wanted and wanted not in kept:
            there = ", ".join(map(str, (0, *kept)))
            raise UserError(f"{run} has no checkpoint of step {wanted}; --from can be {there}")
        return wanted, f"step {wanted}, as --from says"
    before = [step for step in kept if step <= onset]
    if before:
        return before[-1], f"step {before[-1]}, the last checkpoint before the problem began (step {onset})"
    every = run_info(run)["config"]["checkpoint"]["every"]
    if kept and every and onset >= every:
        late = counted(kept[0] - onset, "step")
        return kept[0], (
            f"step {kept[0]}, the oldest checkpoint that is left, {late} after the problem began (step {onset}); "
            "--from 0 begins again instead"
        )
    return 0, f"step 0 with the same seed: no checkpoint is older than the problem (step {onset})"


def with_settings(run: Path, folder: Path, settings: dict[str, Any], end: int) -> dict[str, Any]:
    """Return the settings of a run with some changed, for a fork in `folder` that ends before step `end`.

    Schedules go over the steps of the run, so the fork has as many, or more if it is to be longer. The fork records in
    its own folder, sends nothing to trackers, and is diagnosed when it has ended.

    Raises:
        UserError: the changed settings contradict others.
    """
    info = run_info(run)
    steps = max(end, info["config"]["steps"])
    own = {"run": folder, "record": None, "steps": steps, "trackers": (), "project": "cavesson"}
    values = {**info["config"], **own, "doctor": {"on_finding": "ignore"}}
    for name, value in settings.items():
        values = _changed(values, name.split("."), value)
    kind = ALGORITHMS[info["algorithm"]].settings
    found: dict[str, Any] = check(kind, values, f"{run} with the proposed settings").model_dump(mode="json")
    return found


def _changed(values: dict[str, Any], names: list[str], value: Any) -> dict[str, Any]:
    first, *rest = names
    return {**values, first: _changed(values[first], rest, value) if rest else value}

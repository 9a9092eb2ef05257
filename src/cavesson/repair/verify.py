"""Try a repair: train a run with and without it from the same checkpoint, and diagnose both."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import Diagnosis, diagnose
from cavesson.doctor.plugins import all_rules
from cavesson.doctor.rule import Rule
from cavesson.doctor.words import Language, language
from cavesson.errors import UserError
from cavesson.record import Lock, run_info
from cavesson.record import open as open_run
from cavesson.repair.compare import COLUMNS, Compared, compare
from cavesson.repair.fork import ending, fork, is_done, resume
from cavesson.repair.plan import Plan, check_run, chosen, new_plan, read_plan
from cavesson.text.counting import counted
from cavesson.train.checkpoint import between_steps

Train = Callable[[Path], None]
"""Resumes the run in a folder."""
FORKS = ("changed", "unchanged")
State = Literal["found", "gone", "not measured"]
Verdict = Literal["recovered", "not recovered", "cannot tell"]


@dataclass(frozen=True)
class Outcome:
    """What became of a run with and without a repair."""

    plan: Plan
    folder: Path
    """has the two forks, `changed` and `unchanged`"""
    changed: Diagnosis
    unchanged: Diagnosis
    reward: Compared | None
    """None if the forks have no prompts in common, or the repair changes what earns a reward"""

    def state(self, diagnosis: Diagnosis) -> State:
        """Return what a diagnosis says of the finding."""
        if any(one.rule.name == self.plan.rule for one in diagnosis.findings):
            return "found"
        return "gone" if any(rule.name == self.plan.rule for rule, _ in diagnosis.healthy) else "not measured"

    @property
    def new(self) -> list[str]:
        """The causes that only the changed fork has, most severe first."""
        before = {one.rule.name for one in self.unchanged.findings}
        return [one.rule.name for one in self.changed.causes if one.rule.name not in before]

    @property
    def verdict(self) -> Verdict:
        """Whether the run recovered: the finding is gone because of the change, and the reward gains no less."""
        after = self.state(self.changed)
        if self.state(self.unchanged) != "found" or after == "not measured":
            return "cannot tell"
        if after == "found":
            return "not recovered"
        return "cannot tell" if self.reward is not None and self.reward.difference.sign < 0 else "recovered"


def verify(
    run: Path,
    *,
    finding: str | None = None,
    steps: int | None = None,
    start: int | None = None,
    train: Train | None = None,
    rules: Sequence[Rule] | None = None,
    words: Language | None = None,
    allow_remote: bool = False,
) -> Outcome:
    """Fork a run with and without the settings that a finding proposes, train both, and compare them.

    The forks are in `RUN.fix-RULE`. If they exist, they are resumed with the settings that they began with.

    Args:
        run: folder of a run that samples responses.
        finding: name of the rule; None = the first cause with a setting that ends it.
        steps: to train each fork; None = as many as the run has done since the forks begin.
        start: step of a checkpoint to begin at, or 0; None = the last one before the problem began.
        train: resumes a fork; None = `cavesson ALGORITHM --resume` in its own process. Runs that were started from
            Python with their own model, prompts or rewards need it.
        rules: of the doctor; None = all.
        words: language of messages.
        allow_remote: whether the record may be at another place that the folder names.

    Raises:
        UserError: there is nothing to fix, the run is being trained or cannot be forked, or a fork was stopped or has
            failed.
    """
    run = run.resolve() if run.name in ("", "..") else run  # the forks are beside it, whatever the current folder is
    check_run(run)
    rules, words = rules or all_rules(), words or language("en")
    inputs = run_info(run)["inputs"]
    # A run that is being trained removes old checkpoints, and may send its weights to the servers of the forks.
    with Lock(run):
        data = RunData(open_run(run, allow_remote))
        one = chosen(run, diagnose(data, rules), finding, words)
        folder = run.with_name(f"{run.name}.fix-{one.rule.name}")
        if inputs and train is None:
            raise UserError(
                f"{run} was started from Python with its own {', '.join(inputs)}; "
                "call cavesson.repair.verify(run, train=…) there, with a function that resumes a fork"
            )
        plan = _plan(folder, lambda: new_plan(run, data, one, steps, start), steps, start)
        for name, settings in zip(FORKS, (plan.settings, {}), strict=True):
            if not (folder / name).exists():
                fork(run, folder / name, plan, settings)
    for name in FORKS:
        if not is_done(folder / name, plan.end):
            with ending(folder / name, plan.end):
                (train or resume)(folder / name)
    changed, unchanged = (RunData(open_run(folder / name)) for name in FORKS)
    comparable = not any(name.startswith(("cleaning.", "rewards")) for name in plan.settings)
    ours, theirs = (data.run.rows(COLUMNS) for data in (changed, unchanged))
    reward = compare(ours, theirs, plan.start, plan.end) if comparable else None
    return Outcome(plan, folder, diagnose(changed, rules), diagnose(unchanged, rules), reward)


def _done(folder: Path, start: int) -> int:
    """Return the number of steps that one of the forks has done."""
    return max((step - start for name in FORKS for step in between_steps(folder / name)), default=0)


def _plan(folder: Path, new: Callable[[], Plan], steps: int | None, start: int | None) -> Plan:
    """Return the plan of forks that exist, perhaps for more steps, or a new one."""
    file = folder / "plan.json"
    plan = read_plan(file)
    if plan is None:
        plan = new()
        folder.mkdir(exist_ok=True)
    elif start not in (None, plan.start):
        raise UserError(f"the forks in {folder} begin at step {plan.start}; remove them to begin at step {start}")
    elif steps is not None and steps < (done := _done(folder, plan.start)):
        raise UserError(f"the forks in {folder} have done {done} steps; remove them to train {counted(steps, 'step')}")
    elif steps is not None:
        plan = replace(plan, end=plan.start + steps)
    plan.write(file)
    return plan

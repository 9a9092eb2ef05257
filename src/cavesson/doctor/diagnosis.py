"""Applies the rules to a run and separates causes from consequences."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cavesson.doctor.data import RunData
from cavesson.doctor.derivation import Derivation
from cavesson.doctor.examples import examples, selection
from cavesson.doctor.onset import with_onset
from cavesson.doctor.proposal import proposal, sizes
from cavesson.doctor.reading import Reading, Skipped
from cavesson.doctor.recording import needs, recordable
from cavesson.doctor.rule import APPLIES, Rule
from cavesson.doctor.series import Series
from cavesson.doctor.windows import windows
from cavesson.findings.finding import SEVERITIES, Example, Selection, Severity, TrainerSettingNames
from cavesson.findings.fixes import Names, names_for
from cavesson.findings.trainers import trainer_setting_names
from cavesson.findings.words import Phrase

NOTHING = Phrase("the run has nothing to measure")
NO_ROLLOUTS = Phrase("judges sampled responses; this run learns from given texts")
HELD_OUT = Phrase("judges what training samples; this record has held-out responses only")
SAME_TIME = 5
"""Steps by which the beginnings of two problems may differ without telling which of them came first."""


@dataclass(frozen=True)
class Detection:
    """A problem that a rule found."""

    rule: Rule
    reading: Reading
    explains: tuple[str, ...] = ()
    """Names of the rules whose findings are folded under this one."""
    cause: bool = True
    """False: another finding explains it."""
    derived: tuple[Derivation, ...] = ()
    """What the rule read that the record lacks."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The settings to change, by their dotted names; empty if no setting of the run ends the problem."""
    sizes: Mapping[str, str] = field(default_factory=dict)
    """By how much to change settings of another trainer, as texts behind their names."""
    names: Names | None = None
    """What the settings of the fix are called in the run; None: as in Cavesson."""
    trainer_setting_names: TrainerSettingNames | None = None
    """The settings that the fix names, in the run's trainer; None if it is Cavesson, not known, or has none of them."""
    affected: Selection | None = None
    """The rollouts that it is about."""
    before: Example | None = None
    """A rollout before it began; only of causes."""
    after: Example | None = None
    """A rollout that shows it; only of causes."""

    @property
    def severity(self) -> Severity:
        """That of the reading, or else that of the rule."""
        return self.reading.severity or self.rule.severity


@dataclass(frozen=True)
class Diagnosis:
    """The result of applying the rules to a run."""

    findings: tuple[Detection, ...]
    """Causes first, the most certain first; then what they explain."""
    healthy: tuple[tuple[Rule, Reading], ...]
    skipped: tuple[Skipped, ...]
    steps: int = 0
    """The number of steps that were judged."""

    @property
    def causes(self) -> tuple[Detection, ...]:
        """The findings that no other finding explains."""
        return tuple(finding for finding in self.findings if finding.cause)


def diagnose(data: RunData, rules: Sequence[Rule]) -> Diagnosis:
    """Apply rules to a run; the rules must be ordered so that causes come before consequences."""
    detected, healthy, skipped = [], [], []
    derived: dict[str, tuple[Derivation, ...]] = {}
    parts = list(windows(data)) if any(rule.windows for rule in rules) else []
    for rule in rules:
        data.used.clear()
        out, reading = _judged(data, rule, parts)
        derived[rule.name] = tuple(dict.fromkeys(data.used.values()))
        if reading is not None and not reading.unhealthy and reading.undecided is not None:
            skipped.append(Skipped(rule.name, rule.number, reading.undecided, undecided=True))
        elif reading is None or np.isnan(reading.seen):
            skipped.append(_not_judged(data, rule, out))
        elif reading.unhealthy:
            with np.errstate(all="ignore"):
                detected.append((rule, replace(with_onset(reading, data), noticed=reading.since)))
        else:
            healthy.append((rule, reading))
    folded = _folded(detected)
    harmless = [one for one in folded if one.rule.alone == "healthy" and not one.explains]
    healthy += [(one.rule, one.reading) for one in harmless]
    findings = (replace(_advised(data, one), derived=derived[one.rule.name]) for one in folded if one not in harmless)
    return Diagnosis(tuple(findings), tuple(healthy), tuple(skipped), len(data.steps))


def _advised(data: RunData, finding: Detection) -> Detection:
    info, fix, rule, reading = data.info, finding.rule.texts.fix, finding.rule, finding.reading
    before, after = examples(data, reading) if finding.cause else (None, None)
    return replace(
        finding,
        affected=selection(data, reading),
        before=before,
        after=after,
        settings=proposal(data, rule, reading),
        sizes=sizes(data, rule, reading),
        names=names_for(info, fix),
        trainer_setting_names=trainer_setting_names(info, fix),
    )


def _not_judged(data: RunData, rule: Rule, out: Skipped | None) -> Skipped:
    """Return why a rule has no reading: what it lacks, unless the run cannot have what it looks for."""
    if out is None or out.lacking:
        if data.traits.get("samples") is False and not len(data.rows):
            return Skipped(rule.name, rule.number, NO_ROLLOUTS)
        if reason := rule.absent and rule.absent(data):
            return Skipped(rule.name, rule.number, reason)
    return out or Skipped(rule.name, rule.number, NOTHING)


def _judged(data: RunData, rule: Rule, parts: Sequence[RunData]) -> tuple[Skipped | None, Reading | None]:
    """Apply a rule to the whole run and, if it finds nothing there, to the latest parts of the run."""
    skipped, whole = _applied(data, rule)
    if skipped or (whole is not None and whole.unhealthy):
        return skipped, whole
    for part in parts if rule.windows else ():
        _, late = _applied(part, rule)
        if late is not None and late.unhealthy:
            return None, _in_window(late, whole, part)
    return None, whole


def _in_window(late: Reading, whole: Reading | None, part: RunData) -> Reading:
    """Return a reading of a part of the run, with curves over the whole run where these have as many points in it."""
    first, last = int(part.steps[0]), int(part.steps[-1])
    curve, course = late.curve, late.course
    if curve and curve.along is None and whole is not None and whole.curve is not None:
        curve = replace(curve, points=_longer(curve.points, whole.curve.points, first))
    if course is not None and whole is not None and whole.course is not None:
        course = _longer(course, whole.course, first)
    return replace(late, curve=curve, course=course, window=(first, last))


def _longer(late: Series, whole: Series, first: int) -> Series:
    return whole if len(whole.after(first)) >= len(late) else late


def _applied(data: RunData, rule: Rule) -> tuple[Skipped | None, Reading | None]:
    """Apply a rule without numerical warnings: a record can hold any values, and NaN means not measurable."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        skipped = _skipped(data, rule)
        return skipped, None if skipped else _read(data, rule)


def _read(data: RunData, rule: Rule) -> Reading | None:
    """Return what a rule reads; what a measured fact disproves is healthy, whatever else suggests it."""
    reading, disproof = rule.statistic(data), rule.disproof
    if reading is None or not reading.unhealthy or disproof is None or disproof.excludes is None:
        return reading
    return replace(reading, unhealthy=not disproof.excludes(data))


def _skipped(data: RunData, rule: Rule) -> Skipped | None:
    def because(reason: str, **words: str | float) -> Skipped:
        return Skipped(rule.name, rule.number, Phrase(reason), words)

    absent = [trait for trait in rule.traits if not data.traits.get(trait, True)]
    if absent:
        return because(APPLIES[absent[0]])
    if "critic" in rule.traits and "critic" not in data.traits and data.has_no_critic:
        return because("applies to algorithms with a critic; here, all tokens of a response have the same advantage")
    if rule.training_only and data.only_held_out and _reads_rollouts(data, rule):
        return Skipped(rule.name, rule.number, HELD_OUT, undecided=True)
    missing = [need for need in rule.needs if not _is_met(data, need, need in rule.recorded)]
    if missing:
        could = [recordable(need, data.recorded) for need in missing]
        if not all(could):  # what would be derived from recorded columns does not follow from them
            return because("the recorded columns do not determine what this rule judges")
        return replace(because("not recorded: {what}", what=needs(could)), lacking=tuple(could))
    steps = _steps_to_judge(data, rule)
    if steps < rule.min_steps:
        few = because("needs {least} steps; the record has {steps}", least=float(rule.min_steps), steps=float(steps))
        return replace(few, undecided=True)
    return None


def _steps_to_judge(data: RunData, rule: Rule) -> int:
    """Return the number of steps with rollouts; those with the metrics that a rule judges, if it judges these alone."""
    metrics = [len(data.metric(name)) for kind, name in _used(data, rule) if kind == "steps"]
    return min(metrics) if metrics and not _reads_rollouts(data, rule) else len(data.rows.steps)


def _reads_rollouts(data: RunData, rule: Rule) -> bool:
    return any(kind in ("rows", "tokens") for kind, _ in _used(data, rule))


def _used(data: RunData, rule: Rule) -> list[list[str]]:
    """Return the kind and the name of what each need of a rule is met by."""
    derived = "rows."  # from rollouts, like what is recorded of them
    return [next(filter(data.recorded, need.split("|")), derived).split(".", 1) for need in rule.needs]


def _is_met(data: RunData, need: str, recorded: bool) -> bool:
    return any(data.recorded(one) if recorded else data.has(one) for one in need.split("|"))


def _folded(detected: Sequence[tuple[Rule, Reading]]) -> list[Detection]:
    """Return the findings, each consequence under the first cause that explains it, directly or through others."""
    position = {rule.name: i for i, (rule, _) in enumerate(detected)}
    above: dict[int, int] = {}
    for i, cause in enumerate(detected):
        for name in cause[0].explains:
            j = position.get(name)
            if j is not None and j != i and _explains(cause, detected[j], i < j) and not _is_above(j, i, above):
                above[j] = min(i, above.get(j, i))
    under: dict[int, list[str]] = {}
    serious = set()
    for j in sorted(above):
        rule, reading = detected[j]
        under.setdefault(_top(j, above), []).append(rule.name)
        if (reading.severity or rule.severity) != "note":
            serious.add(_top(j, above))
    detections = [
        Detection(r, _graded(r, reading, i in serious), tuple(under.get(i, ())), i not in above)
        for i, (r, reading) in enumerate(detected)
    ]
    return sorted(detections, key=lambda finding: (not finding.cause, SEVERITIES.index(finding.severity)))


def _graded(rule: Rule, reading: Reading, explains: bool) -> Reading:
    """Return a reading with the severity that it has where it explains no finding but notes, if it does not."""
    return (
        reading if explains or rule.alone is None or rule.alone == "healthy" else replace(reading, severity=rule.alone)
    )


def _explains(cause: tuple[Rule, Reading], other: tuple[Rule, Reading], is_above: bool) -> bool:
    """Return whether a problem can have led to another one that its rule explains.

    Of two that explain each other, the earlier one is the cause; if they begin at about the same time, it is the one
    further up in the rules.
    """
    (rule, reading), (other_rule, other_reading) = cause, other
    if _before(other_reading, reading):
        return False
    if rule.name not in other_rule.explains or reading.since is None or other_reading.since is None:
        return True
    later = reading.since - other_reading.since
    return later <= SAME_TIME if is_above else later < -SAME_TIME


def _before(one: Reading, other: Reading) -> bool:
    """Return whether one problem clearly began before the other, so that the other cannot be its cause."""
    if one.since is None or one.noticed is None or other.since is None:
        return False
    late_only = other.window is not None and (other.between or other.window)[0] >= other.window[0]
    if one.window is None and late_only and one.since < other.since:
        return True  # the whole run shows the one, and only a late part of it the other
    # A number that has always risen, such as a KL, may have become a problem by something that came later.
    latest = max(one.noticed, *(one.between or (one.since,)))
    return latest + SAME_TIME < (other.between or (other.since,))[0]


def _is_above(j: int, i: int, above: dict[int, int]) -> bool:
    while i in above:
        i = above[i]
        if i == j:
            return True
    return False


def _top(j: int, above: dict[int, int]) -> int:
    while j in above:
        j = above[j]
    return j

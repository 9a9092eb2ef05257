"""A diagnosis as plain data, for ``--json`` and the board."""

import math
from typing import Any

from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import Diagnosis, Finding
from cavesson.doctor.failures import not_excluded
from cavesson.doctor.finding import Evidence, Reading
from cavesson.doctor.recording import DOCS
from cavesson.doctor.report.summary import how_to_record, summary
from cavesson.doctor.rule import Rule
from cavesson.doctor.words import Language


def plain(data: RunData, diagnosis: Diagnosis, language: Language) -> dict[str, Any]:
    """Return a diagnosis for JSON: summary, findings, healthy and skipped rules, open failures, and how to record."""
    steps = data.steps
    return {
        "run": data.run.folder,
        "algorithm": data.algorithm,
        "steps": [int(steps[0]), int(steps[-1])] if len(steps) else None,
        "rollouts": len(data.rows),
        "summary": summary(diagnosis, language),
        "findings": [plain_finding(finding, language) for finding in diagnosis.findings],
        "healthy": [_healthy(rule, reading, language) for rule, reading in diagnosis.healthy],
        "skipped": [
            {"rule": one.rule, "number": one.number, "reason": language.reason(one)} for one in diagnosis.skipped
        ],
        "cannot_be_excluded": [
            {
                "failure": language.phrase(one.failure.title),
                "rules": list(one.failure.rules),
                "record": list(one.lacking),
                "reasons": [language.reason(reason) for reason in one.reasons],
            }
            for one in not_excluded(diagnosis)
        ],
        "recording": [{**recipe._asdict(), "docs": DOCS} for recipe in how_to_record(data, diagnosis)],
    }


def plain_finding(finding: Finding, language: Language) -> dict[str, Any]:
    """Return one finding as plain data."""
    rule, reading = finding.rule, finding.reading
    texts = language.texts(rule, reading, finding.names)
    return {
        "rule": rule.name,
        "number": rule.number,
        "severity": finding.severity,
        "title": texts.title,
        "cause": texts.cause,
        "root": finding.cause,
        "since_step": reading.since,
        "since_between": None if reading.between is None else list(reading.between),
        "window": None if reading.window is None else list(reading.window),
        "seen": _finite(reading.seen),
        "healthy": texts.healthy,
        "derived": {name: language.phrase(one.how) for one in finding.derived for name in one.gives},
        "evidence": [_place(place) for place in reading.evidence],
        "explains": list(finding.explains),
        "fix": texts.fix,
        "settings": dict(finding.settings),
        "counterparts": None if finding.counterparts is None else finding.counterparts._asdict(),
        "source": rule.source,
    }


def _healthy(rule: Rule, reading: Reading, language: Language) -> dict[str, Any]:
    return {"rule": rule.name, "number": rule.number, "seen": _finite(reading.seen), "healthy": language.healthy(rule)}


def _finite(value: float) -> float | None:
    """Return the value, or None if it is not finite, as JSON has no NaN or infinity."""
    return value if math.isfinite(value) else None


def _place(place: Evidence) -> dict[str, Any]:
    return {"step": place.step, "sample": place.sample, "start": place.start, "stop": place.stop, "view": view(place)}


def view(place: Evidence) -> str:
    """Return the address of a place on the board, relative to the address of the board."""
    if place.sample is None:
        return f"step?step={place.step}"
    token = "" if place.start is None else f"&token={place.start}"
    return f"tokens?step={place.step}&sample={place.sample}{token}"

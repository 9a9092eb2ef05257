"""A diagnosis as plain data, for ``--json``."""

import math
from typing import Any

from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import Diagnosis
from cavesson.doctor.failures import not_excluded
from cavesson.doctor.findings import findings_in
from cavesson.doctor.reading import Reading
from cavesson.doctor.recording import DOCS
from cavesson.doctor.report.summary import how_to_record, summary
from cavesson.doctor.rule import Rule
from cavesson.doctor.words import Language
from cavesson.findings.report import plain as plain_finding


def plain(data: RunData, diagnosis: Diagnosis, language: Language) -> dict[str, Any]:
    """Return a diagnosis for JSON: summary, findings, healthy and skipped rules, open failures, and how to record."""
    steps = data.steps
    return {
        "run": data.run.folder,
        "algorithm": data.algorithm,
        "steps": [int(steps[0]), int(steps[-1])] if len(steps) else None,
        "rollouts": len(data.rows),
        "summary": summary(diagnosis, language),
        "findings": [plain_finding(finding) for finding in findings_in(diagnosis, language)],
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


def _healthy(rule: Rule, reading: Reading, language: Language) -> dict[str, Any]:
    seen = reading.seen if math.isfinite(reading.seen) else None
    return {"rule": rule.name, "number": rule.number, "seen": seen, "healthy": language.healthy(rule)}

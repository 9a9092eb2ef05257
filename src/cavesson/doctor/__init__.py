"""The doctor reads the record of a run and reports what is wrong, since when, why, and what to change."""

from cavesson.doctor.diagnosis import Detection, Diagnosis, diagnose
from cavesson.doctor.reading import Reading
from cavesson.doctor.rule import Rule, rule
from cavesson.findings.finding import Evidence
from cavesson.findings.words import Share

__all__ = ["Detection", "Diagnosis", "Evidence", "Reading", "Rule", "Share", "diagnose", "rule"]

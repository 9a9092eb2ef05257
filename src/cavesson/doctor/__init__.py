"""The doctor reads the record of a run and reports what is wrong, since when, why, and what to change."""

from cavesson.doctor.diagnosis import Diagnosis, Finding, diagnose
from cavesson.doctor.finding import Evidence, Reading, Share
from cavesson.doctor.rule import Rule, rule

__all__ = ["Diagnosis", "Evidence", "Finding", "Reading", "Rule", "Share", "diagnose", "rule"]

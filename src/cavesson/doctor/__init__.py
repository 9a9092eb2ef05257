"""The doctor: what is wrong with a run, since when, why, and what to change, read from its record."""

from cavesson.doctor.diagnosis import Diagnosis, Finding, diagnose
from cavesson.doctor.finding import Evidence, Reading, Share
from cavesson.doctor.rule import Rule, rule

__all__ = ["Diagnosis", "Evidence", "Finding", "Reading", "Rule", "Share", "diagnose", "rule"]

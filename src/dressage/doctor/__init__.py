"""The doctor: what is wrong with a run, since when, why, and what to change, read from its record."""

from dressage.doctor.diagnosis import Diagnosis, Finding, diagnose
from dressage.doctor.finding import Evidence, Reading, Share
from dressage.doctor.rule import Rule, rule

__all__ = ["Diagnosis", "Evidence", "Finding", "Reading", "Rule", "Share", "diagnose", "rule"]

"""The settings of the doctor that checks a run during training."""

import difflib
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from cavesson.config import Settings
from cavesson.doctor.findings_file import StoredFinding

Answer = Literal["warn", "stop", "ignore"]


class DoctorSettings(Settings):
    """The doctor, which examines the record in a separate process while the run trains."""

    on_finding: Answer = "warn"
    """action for a finding. "warn": report it; "stop": save a checkpoint and stop the run, except for findings of
    severity "note", which are only reported; "ignore": do not run the doctor"""
    rules: dict[str, Answer] = Field(default={})
    """actions for single rules that differ from on_finding, such as {"length-exploited" = "stop", "stalls" = "ignore"};
    "stop" also applies to a finding that another one explains"""
    share: float = Field(0.01, gt=0, le=1)
    """maximum share of the time that the doctor may take: after a diagnosis of 1 s, it pauses for 1 / share s"""

    @model_validator(mode="after")
    def _check_share(self) -> Self:
        if not self.looks:
            self.refuse("share", 'with on_finding "ignore": the doctor does not run')
        return self

    @property
    def looks(self) -> bool:
        """Whether the doctor runs at all."""
        return self.on_finding != "ignore" or any(answer != "ignore" for answer in self.rules.values())

    @property
    def stops(self) -> bool:
        """Whether any finding may end the run."""
        return "stop" in (self.on_finding, *self.rules.values())

    def answer(self, finding: StoredFinding) -> Answer:
        """Return the action for a finding."""
        if self.stopping(finding):
            return "stop"
        named = self.rules.get(finding.id)
        if named is None and finding.severity == "note" and self.on_finding == "stop":
            return "warn"
        return named or self.on_finding

    def stopping(self, finding: StoredFinding) -> list[str]:
        """Return the consequences of a finding that stop the run even if another finding explains them."""
        return [name for name in finding.consequences if self.rules.get(name) == "stop"]

    @field_validator("rules")
    @classmethod
    def _check_names(cls, rules: dict[str, Answer]) -> dict[str, Answer]:
        from cavesson.doctor.own import all_rules

        rules = {name.replace("_", "-"): answer for name, answer in rules.items()}
        known = {rule.name for rule in all_rules()} if rules else set()
        for name in rules.keys() - known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise ValueError(f"there is no rule {name!r}; did you mean {near[0]!r}?")
        return rules

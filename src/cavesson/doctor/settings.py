"""The settings of the doctor that checks a run during training."""

import difflib
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from cavesson.config import Settings
from cavesson.doctor.findings_file import Finding

Answer = Literal["warn", "stop", "ignore"]


class DoctorSettings(Settings):
    """The doctor, who looks at the record while the run trains, in a process beside it."""

    on_finding: Answer = "warn"
    """what happens at a finding. "warn": it is said; "stop": the run ends and leaves a checkpoint, except at notes,
    which are only worth a look; "ignore": the doctor does not look"""
    rules: dict[str, Answer] = Field(default={})
    """another answer for the findings of some rules, such as {"length-exploited" = "stop", "stalls" = "ignore"}; "stop"
    also where another finding explains them"""
    share: float = Field(0.01, gt=0, le=1)
    """of the time that looking may take: after a look of a second the doctor rests for 1 / share seconds"""

    @model_validator(mode="after")
    def _check_share(self) -> Self:
        if not self.looks:
            self.refuse("share", 'with on_finding "ignore": the doctor does not look')
        return self

    @property
    def looks(self) -> bool:
        """Whether anything is done about any finding."""
        return self.on_finding != "ignore" or any(answer != "ignore" for answer in self.rules.values())

    @property
    def stops(self) -> bool:
        """Whether any finding may end the run."""
        return "stop" in (self.on_finding, *self.rules.values())

    def answer(self, finding: Finding) -> Answer:
        """Return the answer to a finding."""
        if self.stopping(finding):
            return "stop"
        named = self.rules.get(finding.id)
        if named is None and finding.severity == "note" and self.on_finding == "stop":
            return "warn"
        return named or self.on_finding

    def stopping(self, finding: Finding) -> list[str]:
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

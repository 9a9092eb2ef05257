"""Settings of rewards, their weights, and the shaping of their sum."""

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from cavesson.config import Settings
from cavesson.config_paths import FunctionName, full_path
from cavesson.plugins import located

OWN = ("classifier", "code", "exact_match", "http", "lowercase", "pipeline", "sentiment")
"""Names of rewards, as in the tables of `cavesson.rollout.rewards.table`."""


class RewardSettings(Settings):
    """One reward. The total is the weighted sum of all rewards."""

    use: FunctionName
    """"sentiment", "exact_match", "lowercase", "code", "classifier", "pipeline", "http", or your own function as
    file.py:function, module:function, or the name that an installed package gives it"""
    name: str | None = None
    """name in the record; none = the name of the function, or `use`"""
    weight: float = 1.0
    """factor in the sum"""
    chat: bool | None = None
    """whether a classifier's own chat template writes the text that it reads; none = where it has one, it was not
    trained by Cavesson, and the prompt is a conversation"""
    concurrency: int | None = Field(None, ge=1)
    """calls at the same time, per process, of an async function (prompt, response, …), which judges one response per
    call; none = 16"""
    options: dict[str, Any] = Field(default_factory=dict)
    """arguments of a code, classifier, pipeline or HTTP reward, such as path, label and url: docs/rewards.md"""

    @property
    def label(self) -> str:
        """The name of the reward in the record."""
        return self.name or self.use.rpartition(":")[2]

    @field_validator("use")
    @classmethod
    def _located(cls, use: str) -> str:
        return located("rewards", use, OWN)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.use != "classifier":
            self.refuse("chat", f"with use = {self.use!r}: only a classifier has a chat template")
        return self

    @field_validator("options")
    @classmethod
    def _full_path(cls, options: dict[str, Any]) -> dict[str, Any]:
        return {name: full_path(value) if name == "path" else value for name, value in options.items()}


class ShapingSettings(Settings):
    """How the summed reward is changed before training uses it, in this order."""

    parts: Literal["sum", "normalised"] = "sum"
    """how the parts of the reward become one number: their weighted sum, or the weighted sum of every part's distance
    from the mean of its group, in standard deviations of the group, so that no part drowns another (GDPO)"""
    subtract_query: bool = False
    """subtract the reward of an empty response to the same prompt, if the prompt dominates the score"""
    scale: bool = False
    """divide by the running standard deviation of all rewards so far"""
    normalise: bool = False
    """subtract their running mean as well (needs scale)"""
    clip: float | None = Field(None, gt=0)
    """clip to [-clip, clip]"""
    missing_eos_penalty: float = Field(0.0, ge=0)
    """subtracted from the reward of responses that did not end by themselves; 0 = off"""

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        if self.parts == "normalised":
            self.refuse("subtract_query", 'with parts "normalised", which compares the responses to the same prompt')
        return self

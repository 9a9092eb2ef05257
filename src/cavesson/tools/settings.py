"""Settings of the commands that use trained models."""

import re
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from cavesson.config import Settings
from cavesson.config_paths import LocalPath
from cavesson.data.settings import ChatSettings, DataSettings, PromptSettings, SpecialTokenMode, TemplateOptions
from cavesson.rollout.engines.settings import DecodingSettings
from cavesson.rollout.rewards.settings import RewardSettings
from cavesson.rollout.settings import EnvironmentSettings


class UseSettings(Settings):
    """How a trained model is loaded."""

    gguf_file: str | None = None
    """name of the GGUF file inside the model's folder, if the weights come as GGUF"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of the computation"""
    device: str | None = None
    """where to compute; none = a GPU if there is one"""


class TalkSettings(UseSettings):
    """Chat with a model in the terminal."""

    template: str | None = None
    """a chat template instead of the tokenizer's own: a .jinja file, or the template itself"""
    template_options: TemplateOptions = Field(default={})
    """further variables of the chat template, such as {enable_thinking = false}"""
    system: str | None = None
    """system message"""
    sampling: DecodingSettings = DecodingSettings(max_new_tokens=512, temperature=0.7, top_p=0.95)
    """how to sample"""
    environment: EnvironmentSettings = EnvironmentSettings()
    """tools that the model may call; max_turns limits its turns after each line"""
    seed: int = Field(0, ge=0)
    """the same seed gives the same answers to the same turns"""

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        self.refuse("environment.max_tokens", "in a chat, whose answers end at sampling.max_new_tokens")
        return self


class ResponseSettings(UseSettings):
    """Prompts, and how a model answers them."""

    data: PromptSettings = PromptSettings()
    """where the prompts come from"""
    samples: int = Field(1, ge=1)
    """responses per prompt"""
    seed: int = Field(0, ge=0)
    """the same seed gives the same responses"""
    sampling: DecodingSettings = DecodingSettings(max_new_tokens=64)
    """how to sample"""
    environment: EnvironmentSettings = EnvironmentSettings()
    """tools and environments that answer the model; its limits are those of the run that trained it"""
    batch_size: int = Field(32, ge=1)
    """responses sampled at the same time; it has no effect on the responses"""

    @model_validator(mode="after")
    def _check_data(self) -> Self:
        _check_nothing_held_out("data", self.data)
        self.environment.longest(self.sampling.longest)
        return self

    @property
    def longest_episode(self) -> int:
        """The most tokens of an episode after its first prompt; without an environment, of a response."""
        return self.environment.longest(self.sampling.longest)


HELD_OUT = ("validation", "validation_path", "validation_split")
"""Settings of data that hold rows out of training."""


def _check_nothing_held_out(name: str, data: DataSettings) -> None:
    for part in HELD_OUT:
        if getattr(data, part):
            raise ValueError(
                f"{name}.{part} holds rows out of training, and nothing is trained here: "
                f"choose the rows with {name}.path and {name}.split"
            )


class GenerateSettings(ResponseSettings):
    """Sample responses from a model."""

    prompt: tuple[str, ...] | str = ()
    """a prompt, or a list of them, instead of data"""
    raw: bool = False
    """continue prompts as plain text, even if the run that trained the model turned them into conversations"""
    out: Path | None = None
    """a .jsonl, .json or .parquet file to write; none = print"""

    @model_validator(mode="after")
    def _check_raw(self) -> Self:
        if self.raw:
            for name in ("use", "tools"):
                self.refuse(f"environment.{name}", "with raw, which continues plain text")
        return self


class ScorerSettings(Settings):
    """What responses are scored with."""

    rewards: tuple[RewardSettings, ...] = ()
    """rewards as in a recipe, or short: a name such as "exact_match", a function as file.py:function, the URL of a
    server, or a reward model's run, folder or Hub name; several in a list"""

    @field_validator("rewards", mode="before")
    @classmethod
    def _short(cls, given: Any) -> Any:
        several = [given] if isinstance(given, str | dict) else given
        if not isinstance(several, list | tuple):
            return several  # of the wrong type
        return [_written_out(one) if isinstance(one, str) else one for one in several]


def _written_out(scorer: str) -> dict[str, Any]:
    if scorer.startswith(("http://", "https://")):
        return {"use": "http", "options": {"url": scorer}}
    from cavesson.rollout.rewards.table import FUNCTIONS  # slow to import

    if scorer in FUNCTIONS or ":" in scorer:
        return {"use": scorer}
    return {"use": "classifier", "name": Path(scorer).name, "options": {"path": scorer}}


class TextScorerSettings(ScorerSettings):
    """What texts that already exist are scored with."""

    special_tokens: SpecialTokenMode = "control"
    """how a reward model reads special tokens in prompts: control = as control tokens, because prompts from `generate`
    or a record contain those of the chat template; text = as text like any other. In responses they are text"""
    device: str | None = None
    """where to compute; none = a GPU if there is one"""


class ScoreSettings(TextScorerSettings):
    """Score the responses in a file."""

    columns: dict[str, str] = Field(default={})
    """the file's column names for `prompt`, `response` and what a reward needs, such as {prompt = "question",
    ground_truth = "answer"}; input and output are recognised"""
    split: str = "train"
    """split of a Hub data set"""
    out: Path | None = None
    """a .jsonl file with a line per response, or a .json file in LMFlow's format text_to_scored_textlist"""


class RescoreSettings(TextScorerSettings):
    """Compute the rewards of a recorded run again, with other rewards."""

    name: str | None = None
    """name of the new rewards in the record; none = the names of the rewards"""
    columns: dict[str, str] = Field(default={})
    """names of the record's columns for what a reward needs, such as {ground_truth = "answer"}"""
    show: int = Field(3, ge=0)
    """pairs of responses to print whose order changes most"""

    @property
    def label(self) -> str:
        """The name of the new rewards in the record."""
        return self.name or re.sub(r"[^\w.+-]", "-", "+".join(one.label for one in self.rewards)).lstrip(".")

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"[\w+-][\w.+-]{0,99}", name):
            raise ValueError("a name consists of letters, digits and . _ + -, and does not begin with a dot")
        return name


class CompareSettings(ResponseSettings, ScorerSettings):
    """Compare models on the same prompts with the same random numbers."""

    prompts: LocalPath | None = None
    """a file of prompts; short for data.path"""
    show: int = Field(3, ge=0)
    """prompts whose responses are shown side by side in the terminal"""
    out: Path | None = None
    """folder to write: comparison.html with every response, and comparison.json"""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = (self.prompts, self.data.path, self.data.mix or None)
        if sum(source is not None for source in given) != 1:
            raise ValueError("give the prompts once: --prompts FILE, or data.path, or data.mix")
        return self


class HeldOutTextSettings(ChatSettings):
    """Held-out text."""

    context: int | None = Field(None, ge=2)
    """tokens the model reads at a time; none = 1024, or fewer if the model cannot read as many"""
    stride: int | None = Field(None, ge=1)
    """tokens from one window of a long document to the next, fewer than `context`: from the second window on, every
    token is predicted from at least context − stride others; none = half of `context`"""


class EvaluateSettings(ResponseSettings, ScorerSettings):
    """Evaluate a model on held-out text, by rewards, or both."""

    text: HeldOutTextSettings = HeldOutTextSettings()
    """text whose perplexity is measured; with prompts and responses, that of the responses"""
    out: Path | None = None
    """a .json file to write, with every response"""

    @model_validator(mode="after")
    def _anything(self) -> Self:
        _check_nothing_held_out("text", self.text)
        if not any((self.text.path, self.text.mix, self.data.path, self.data.mix)):
            raise ValueError("give --text.path FILE for the perplexity, --data.path FILE and --rewards, or both")
        if not (self.data.path or self.data.mix):
            for name in ("rewards", "samples", "seed", "environment.use", "environment.tools"):
                self.refuse(name, "without --data.path, the prompts to sample responses to")
        if not (self.text.path or self.text.mix):
            for name in ("context", "stride"):
                self.refuse(f"text.{name}", "without --text.path")
        return self

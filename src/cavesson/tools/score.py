"""Rewards of the responses in a file: `cavesson score`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from cavesson.data.fields import Fields, Row
from cavesson.data.notes import Notes
from cavesson.data.settings import SourceSettings
from cavesson.data.sources import read
from cavesson.data.special_tokens import Reading
from cavesson.errors import UserError
from cavesson.ops.intervals import Interval
from cavesson.record.files import replacing
from cavesson.record.writable import check_new
from cavesson.text.counting import counted
from cavesson.tools.generate import write
from cavesson.tools.scorers import ScorerSettings, estimate, parts_of, score_by_length, shown

# Names of output columns, and of the arguments with which rewards get prompts and responses.
_TAKEN = ("reward", "reward_parts", "prompts", "responses")


class ScoreSettings(ScorerSettings):
    """Score the responses in a file."""

    columns: dict[str, str] = Field(default={})
    """what the file calls `prompt`, `response` and what a reward asks for, such as {prompt = "question", ground_truth =
    "answer"}; input and output are known too"""
    split: str = "train"
    """split of a Hub data set"""
    special_tokens: Reading = "control"
    """how a reward model reads special tokens in prompts: control = as such, since prompts that `generate` or a record
    wrote have those of the chat template; text = as text like any other. In responses they are text"""
    device: str | None = None
    """where to compute; none = a GPU where there is one"""
    out: Path | None = None
    """a .jsonl file with a line per response, or a .json file in LMFlow's format text_to_scored_textlist"""


class Summary(NamedTuple):
    """Mean scores over all responses."""

    prompts: int
    responses: int
    rewards: dict[str, Interval]
    """the sum of all, and every part"""

    def __str__(self) -> str:
        lines = [f"{counted(self.responses, 'response')} to {counted(self.prompts, 'prompt')}; mean and 95 % interval"]
        return "\n".join([*lines, *(f"{name}  {shown(interval)}" for name, interval in self.rewards.items())])


class _Said(NamedTuple):
    row: int
    prompt: str
    response: str
    values: Mapping[str, Any]
    """of its row, with this response in the place of a list"""


def score(path: str, settings: ScoreSettings) -> Summary:
    """Score every response in a file and, with `out`, write the scores.

    Args:
        path: a file (.jsonl, .json, .csv, .parquet) or Hub data set whose rows have a prompt and a response, or a
            list of responses; also LMFlow's text2text, text_to_textlist and text_to_scored_textlist.
        settings: the rewards; they get the other columns by name.

    Raises:
        UserError: the file does not exist, a row has no prompt or response, or no reward is given.
    """
    if settings.out is not None:
        check_new(settings.out)
    said = list(_responses(path, settings))
    if not said:
        raise UserError(f"{path}: there is no response in it")
    prompts, responses = [one.prompt for one in said], [one.response for one in said]
    scored = score_by_length(_reading(settings), settings.device, prompts, responses, _columns(said, settings.columns))
    if settings.out is not None:
        parts = [dict(zip(scored.parts, values, strict=True)) for values in zip(*scored.parts.values(), strict=True)]
        _write(said, scored.total, parts, settings.out)
    numbers: dict[str, int] = {}
    groups = [numbers.setdefault(one.prompt, len(numbers)) for one in said]
    return Summary(
        len(numbers), len(said), {name: estimate(values, groups) for name, values in parts_of(scored).items()}
    )


def _reading(settings: ScoreSettings) -> ScoreSettings:
    """Return the settings with `special_tokens` passed on to reward models that do not set it in their options."""
    reading = {"special_tokens": settings.special_tokens}
    rewards = [
        one.model_copy(update={"options": reading | one.options}) if one.use == "classifier" else one
        for one in settings.rewards
    ]
    return settings.model_copy(update={"rewards": tuple(rewards)})


def _responses(path: str, settings: ScoreSettings) -> Iterator[_Said]:
    for number, row in enumerate(read(SourceSettings(path=path, split=settings.split))):
        prompt, response = _names(row, settings.columns)
        fields = Fields(row, Notes())
        taken = next((name for name in _TAKEN if name in row.values), None)
        if taken is not None:
            raise UserError(f"{row.place}: rename the column {taken!r}; what is scored or written gets that name")
        asked = fields.text(prompt)
        for text in _texts(fields, response):
            yield _Said(number, asked, text, {**row.values, response: text})


def _columns(said: Sequence[_Said], mapping: Mapping[str, str]) -> dict[str, list[Any]]:
    """Return the columns that rewards get in addition to prompt and response."""
    names = {name: name for name in dict.fromkeys(name for one in said for name in one.values)}
    return {ours: [one.values.get(theirs) for one in said] for ours, theirs in {**names, **mapping}.items()}


def _names(row: Row, columns: Mapping[str, str]) -> tuple[str, str]:
    """Return the names of the prompt and response columns of this row."""
    wanted = columns.get("prompt", "prompt"), columns.get("response", "response")
    lmflow = columns.get("prompt", "input"), columns.get("response", "output")
    for prompt, response in (wanted, lmflow):
        if prompt in row.values and response in row.values:
            return prompt, response
    raise UserError(
        f"{row.place} has no columns {wanted[0]!r} and {wanted[1]!r} (set columns); it has {', '.join(row.values)}"
    )


def _texts(fields: Fields, response: str) -> list[str]:
    value = fields.values[response]
    if not isinstance(value, list):
        return [fields.text(response)]
    if value and isinstance(value[0], dict):
        return [text for _, text in fields.scored(response)]
    return fields.texts(response)


def _write(said: list[_Said], rewards: list[float], parts: list[dict[str, float]], out: Path) -> None:
    if out.suffix == ".json":
        instances: dict[int, dict[str, Any]] = {}
        for one, reward in zip(said, rewards, strict=True):
            instance = instances.setdefault(one.row, {"input": one.prompt, "output": []})
            instance["output"].append({"score": reward, "text": one.response})
        content = {"type": "text_to_scored_textlist", "instances": list(instances.values())}
        with replacing(out) as file:
            file.write(json.dumps(content, ensure_ascii=False, indent=1).encode())
        return
    lines = zip(said, rewards, parts, strict=True)
    write(({**one.values, "reward": reward, "reward_parts": part} for one, reward, part in lines), out)

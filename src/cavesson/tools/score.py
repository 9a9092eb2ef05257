"""Rewards of responses and confidence intervals of their means, and those of a file: `cavesson score`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cavesson.data.fields import Fields, Row
from cavesson.data.notes import Notes
from cavesson.data.settings import SourceSettings
from cavesson.data.sources import read
from cavesson.errors import UserError, print_error
from cavesson.ops.intervals import Interval, mean_interval, share_interval
from cavesson.processes import Processes
from cavesson.record.files import replacing
from cavesson.rollout.conversation import Conversation
from cavesson.rollout.rewards.settings import RewardSettings
from cavesson.rollout.rewards.table import Reward, Scored, build_rewards, rehearse
from cavesson.rollout.rewards.table import score as score_all
from cavesson.text.counting import counted
from cavesson.tools.as_trained import TrainedBy, at_date_of, trained_by
from cavesson.tools.generate import Questions, Response, check_out, write
from cavesson.tools.settings import ScorerSettings, ScoreSettings, TextScorerSettings
from cavesson.train.prompts import is_rewarded, tried

# Names of output columns, and of the arguments with which rewards get prompts and responses.
_TAKEN = ("reward", "reward_parts", "prompts", "responses")


class Summary(NamedTuple):
    """Mean scores over all responses."""

    prompts: int
    responses: int
    rewards: dict[str, Interval]
    """the sum of all, and every part"""
    unscored: int = 0
    """responses that no reward judges, which count in no mean"""
    judged: Mapping[str, int] = {}
    """how many responses each of the rewards judges"""

    def __str__(self) -> str:
        lines = [f"{counted(self.responses, 'response')} to {counted(self.prompts, 'prompt')}; mean and 95 % interval"]
        for name, interval in self.rewards.items():
            some = self.judged.get(name, self.responses)
            of = "" if some == self.responses else f", {some} of {counted(self.responses, 'response')}"
            lines.append(f"{name}  {shown(interval)}{of}")
        lines += [f"not judged by any reward: {counted(self.unscored, 'response')}"] if self.unscored else []
        return "\n".join(lines)


class _Response(NamedTuple):
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
        check_out(settings.out)
    rows = list(_responses(path, settings))
    if not rows:
        raise UserError(f"{path} contains no responses")
    prompts, responses = [one.prompt for one in rows], [one.response for one in rows]
    with text_scorers(settings) as rewards:
        scored = score_by_length(rewards, prompts, responses, _columns(rows, settings.columns))
    if settings.out is not None:
        _write(rows, scored, settings.out)
    numbers: dict[str, int] = {}
    groups = [numbers.setdefault(one.prompt, len(numbers)) for one in rows]
    parts = parts_of(scored)
    judged = {name: len(values) - values.count(None) for name, values in parts.items()}
    return Summary(len(numbers), len(rows), estimates(parts, groups), scored.total.count(None), judged)


@contextmanager
def text_scorers(settings: TextScorerSettings) -> Iterator[tuple[Reward, ...]]:
    """Build rewards for texts that already exist, to be used inside the block.

    Reward models of runs read prompts as they did in training; what they learned from is printed after the block.

    Raises:
        UserError: one of them cannot be built, or there is none.
    """
    runs = _runs(settings.rewards)
    with at_date_of(next(iter(runs.values()), None)):
        yield build_scorers(_reading(settings), settings.device)
    for line in _origins(runs):  # after what can fail, so that a mistake is said alone
        print_error(line)


def check_scorers(settings: ScorerSettings, device: str | None, questions: Questions) -> None:
    """Build the rewards and call them on the first prompts, before any response is sampled.

    Raises:
        UserError: one of them cannot be built or called, or an environment fails.
    """
    prompts, conversation = questions.prompts, questions.conversation
    rewards = build_scorers(settings, device, conversation)
    with at_date_of(questions.run), tried(conversation, prompts) as columns:
        rehearse(rewards, prompts.texts, columns)


def score_by_length(
    rewards: Sequence[Reward],
    prompts: Sequence[str],
    responses: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
) -> Scored:
    """Score responses, sorted from long to short, so that reward models read little padding."""
    order = sorted(range(len(responses)), key=lambda row: -len(prompts[row]) - len(responses[row]))
    scored = score_all(
        rewards,
        [prompts[row] for row in order],
        [responses[row] for row in order],
        {name: [values[row] for row in order] for name, values in columns.items()},
    )
    back = sorted(range(len(order)), key=order.__getitem__)
    parts = {name: [values[row] for row in back] for name, values in scored.parts.items()}
    reasons = {name: [given[row] for row in back] for name, given in scored.reasons.items()}
    return Scored(parts, [scored.total[row] for row in back], scored.weights, reasons)


def score_responses(
    answers: Sequence[Response],
    settings: ScorerSettings,
    device: str | None,
    conversation: Conversation | None = None,
) -> dict[str, list[float | None]]:
    """Return the scores of sampled responses, of which there must be at least one, as `parts_of` names them."""
    columns: dict[str, list[Any]] = {name: [one.columns[name] for one in answers] for name in answers[0].columns}
    if any(one.messages for one in answers):
        columns = {"messages": [one.messages for one in answers], **columns}
    worlds = [one.world for one in answers if one.world is not None]
    if conversation is not None:
        columns = {**columns, "messages": [one.messages for one in answers]}
        columns["environments"] = [one.environment for one in worlds]
    texts = [one.prompt for one in answers], [one.response for one in answers]
    scored = score_by_length(build_scorers(settings, device, conversation), *texts, columns)
    if conversation is not None:
        scored = scored.with_parts(conversation.rewards(worlds, [one.turns for one in answers]))
        conversation.release(worlds)
    return parts_of(scored)


def parts_of(scored: Scored) -> dict[str, list[float | None]]:
    """Return the weighted sum as `reward` together with every part, or just the part if it equals the sum."""
    several = len(scored.parts) > 1 or list(scored.parts.values()) != [scored.total]
    return {"reward": scored.total} | scored.parts if several else dict(scored.parts)


def estimates(parts: Mapping[str, Sequence[float | None]], groups: Sequence[int]) -> dict[str, Interval]:
    """Estimate the mean of every part over the responses that it judges; a part that judges none has no mean."""
    found: dict[str, Interval] = {}
    for name, values in parts.items():
        known = [(value, group) for value, group in zip(values, groups, strict=True) if value is not None]
        if known:
            found[name] = estimate([value for value, _ in known], [group for _, group in known])
    return found


def estimate(values: Sequence[float], groups: Sequence[int]) -> Interval:
    """Estimate a mean reward and its 95 % interval, treating prompts as independent.

    Values that are all between 0 and 1, or all 1 or -1, get an interval that stays within these bounds. Everything else
    gets Student's interval over the means of the prompts.
    """
    if all(0 <= value <= 1 for value in values):
        return share_interval(values, groups)
    if set(values) <= {-1.0, 1.0}:
        share = share_interval([(value + 1) / 2 for value in values], groups)
        low, high = (None if bound is None else 2 * bound - 1 for bound in (share.low, share.high))
        return Interval(2 * share.mean - 1, low, high)
    return mean_interval(values, groups)


def estimate_gain(values: Sequence[float], others: Sequence[float], groups: Sequence[int]) -> Interval:
    """Estimate the mean of the differences `values` - `others` and its 95 % interval.

    It is Student's interval, as far as it is possible: values between 0 and 1 differ by at most 1.
    """
    found = mean_interval([one - other for one, other in zip(values, others, strict=True)], groups)
    both = [*values, *others]
    most = 1.0 if min(both) >= 0 and max(both) <= 1 else 2.0 if set(both) <= {-1.0, 1.0} else float("inf")
    low, high = (None if bound is None else min(max(bound, -most), most) for bound in (found.low, found.high))
    return Interval(found.mean, low, high)


def shown(interval: Interval) -> str:
    """Format an interval as text."""
    if interval.low is None or interval.high is None:
        return f"{interval.mean:.3f} (no interval: a single prompt, or all are alike)"
    return f"{interval.mean:.3f} ({interval.low:.3f} to {interval.high:.3f})"


def build_scorers(
    settings: ScorerSettings, device: str | None, conversation: Conversation | None = None
) -> tuple[Reward, ...]:
    """Build the rewards.

    Raises:
        UserError: one of them cannot be built, or there is none, and no environment that scores its episodes.
    """
    rewards = build_rewards(settings.rewards, torch.device(Processes(device).device))
    if not is_rewarded(rewards, conversation):
        way = 'add --rewards FOLDER, --rewards exact_match or --rewards "[…]"'
        raise UserError(f"no reward is given: {way}")
    return rewards


def _reading(settings: TextScorerSettings) -> TextScorerSettings:
    """Return the settings with `special_tokens` passed on to reward models that do not set it in their options."""
    reading = {"special_tokens": settings.special_tokens}
    rewards = [
        one.model_copy(update={"options": reading | one.options}) if one.use == "classifier" else one
        for one in settings.rewards
    ]
    return settings.model_copy(update={"rewards": tuple(rewards)})


def _runs(rewards: Sequence[RewardSettings]) -> dict[str, TrainedBy]:
    """Return the runs that trained reward models, by the models' paths."""
    paths = [str(one.options.get("path", "")) for one in rewards if one.use == "classifier"]
    return {path: run for path in paths if path and (run := trained_by(path)) is not None}


def _origins(runs: Mapping[str, TrainedBy]) -> Iterator[str]:
    """Yield for each reward model of a run what it learned from, and so what the prompts must be."""
    for path, run in runs.items():
        if run.data().get("chat"):
            yield (
                f"{path} learned from conversations: prompts are read as they stand, so they must be what its chat "
                "template writes, as in the output of `cavesson generate`"
            )
        else:
            yield f"{path} learned from plain text, and prompts are read as they stand"


def _responses(path: str, settings: ScoreSettings) -> Iterator[_Response]:
    for number, row in enumerate(read(SourceSettings(path=path, split=settings.split))):
        prompt, response = _names(row, settings.columns)
        fields = Fields(row, Notes())
        taken = next((name for name in _TAKEN if name in row.values), None)
        if taken is not None:
            raise UserError(f"{row.place}: rename the column {taken!r}; the output uses that name")
        asked = fields.text(prompt)
        for text in _texts(fields, response):
            yield _Response(number, asked, text, {**row.values, response: text})


def _columns(rows: Sequence[_Response], mapping: Mapping[str, str]) -> dict[str, list[Any]]:
    """Return the columns that rewards get in addition to prompt and response."""
    names = {name: name for name in dict.fromkeys(name for one in rows for name in one.values)}
    return {ours: [one.values.get(theirs) for one in rows] for ours, theirs in {**names, **mapping}.items()}


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


def _write(rows: list[_Response], scored: Scored, out: Path) -> None:
    if out.suffix == ".json":
        instances: dict[int, dict[str, Any]] = {}
        for one, reward in zip(rows, scored.total, strict=True):
            instance = instances.setdefault(one.row, {"input": one.prompt, "output": []})
            instance["output"].append({"score": reward, "text": one.response})
        content = {"type": "text_to_scored_textlist", "instances": list(instances.values())}
        with replacing(out) as file:
            file.write(json.dumps(content, ensure_ascii=False, indent=1).encode())
        return
    write(({**one.values, **_scores(scored, number)} for number, one in enumerate(rows)), out)


def _scores(scored: Scored, row: int) -> dict[str, Any]:
    """Return what is written of the scores of a response."""
    parts = {name: values[row] for name, values in scored.parts.items()}
    reasons = {name: given[row] for name, given in scored.reasons.items()}
    return {"reward": scored.total[row], "reward_parts": parts, **({"reward_reasons": reasons} if reasons else {})}

"""Comparison of models on the same prompts with the same random numbers: `cavesson compare`."""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib.resources import files
from pathlib import Path, PurePath
from statistics import fmean
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cavesson.data.prompts import PromptSet
from cavesson.errors import UserError, print_error
from cavesson.models.settings import StartSettings
from cavesson.models.trained import load_start_tokenizer
from cavesson.ops.intervals import Interval, share_interval
from cavesson.record.files import write_json
from cavesson.record.write.new_folder import new_folder
from cavesson.record.write.writable import check_new
from cavesson.rollout.episodes import CUT
from cavesson.text.statistics import distinct
from cavesson.text.visible import visible, visible_line
from cavesson.text.words import words
from cavesson.tools.as_trained import TrainedBy, as_trained, at_date_of, check_answered, trained_by
from cavesson.tools.generate import Questions, Response, load_policy, questions_of, responses, tell
from cavesson.tools.score import check_scorers, estimate_gain, estimates, score_responses, shown
from cavesson.tools.settings import CompareSettings


@dataclass(frozen=True)
class ComparedModel:
    """One model of a comparison."""

    name: str
    asked: str
    """how its prompts were read and its responses sampled, as far as that was taken over from a run"""
    rewards: dict[str, Interval]
    """the sum of all rewards, and every part"""
    difference: Interval | None
    """of the sum to the first model's, response by response; none for the first and without rewards"""
    win_rate: Interval | None
    """share of responses with a higher sum than the first model's to the same prompt; a tie counts one half"""
    unscored: int
    """responses that no reward judges, which count in no mean"""
    tokens: float
    """mean length of the responses in this model's own tokens"""
    words: float
    """mean length in words, which are the same for every model"""
    ended: float
    """share of responses that ended by themselves"""
    distinct_1: float | None
    distinct_2: float | None
    """different one- and two-word sequences of all responses, as a share of all of them"""
    responses: list[dict[str, Any]]
    """prompt, response, finish_reason, tokens and rewards of every response"""


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison."""

    columns: list[ComparedModel]
    prompts: int
    samples: int
    dropped: int
    """prompts that are too long for one of the models"""
    settings: dict[str, Any]
    """those that were given, and the defaults of the others"""

    @property
    def names(self) -> list[str]:
        """Short display names of the columns."""
        return short_names([column.name for column in self.columns])


def short_names(models: Sequence[str]) -> list[str]:
    """Return the shortest path endings that distinguish the models, without the `model` folder inside a run."""
    paths = [PurePath(model.removesuffix("/model")).parts for model in models]
    for count in range(1, max(map(len, paths)) + 1):
        names = [str(PurePath(*path[-count:])) for path in paths]
        if len(set(names)) == len(names):
            return names
    return list(models)


def compare(models: Sequence[str], settings: CompareSettings) -> Comparison:
    """Sample responses of every model and compare them with those of the first.

    Models are loaded one after the other, and the rewards last, so that only one model is in memory at a time.

    Raises:
        UserError: a model does not exist, there is no prompt, or the folder to write exists.
    """
    if settings.out is not None:
        check_new(settings.out)
    if len(set(models)) < len(models) or not models:
        raise UserError("name the models to compare, each of them once: cavesson compare A B --prompts FILE")
    given = settings.model_dump(mode="json")
    if settings.prompts is not None:
        settings = settings.model_copy(update={"data": settings.data.model_copy(update={"path": settings.prompts})})
    first, runs = _runs(models)
    check_answered(runs, settings.environment)
    # SFT and the other trainers on examples do not sample.
    sampled = next((run for run in runs if run is not None and run.sampling()), None)
    made = [as_trained(model, settings, run, sampled) for model, run in zip(models, runs, strict=True)]
    each, lines = [one for one, _ in made], [line for _, line in made]
    asked = [_questions(*one) for one in zip(models, each, runs, strict=True)]
    indices = _common([one.prompts for one in asked])
    if not indices[0]:
        raise UserError("no prompt is short enough for every model; raise data.max_prompt_tokens")
    has_scores = bool(settings.rewards or (asked[0].conversation and asked[0].conversation.scored))
    if has_scores:
        check_scorers(settings, settings.device, asked[0]._replace(run=first))
    for line in lines:
        print_error(line)
    tell(asked[0])
    answers = [_answers(*one) for one in zip(models, asked, indices, each, strict=True)]
    with at_date_of(first):
        scores = [
            score_responses(answer, settings, settings.device, one.conversation) if has_scores else {}
            for answer, one in zip(answers, asked, strict=True)
        ]
    comparison = Comparison(
        columns=[_column(*one, scores[0]) for one in zip(models, lines, answers, scores, strict=True)],
        prompts=len(indices[0]),
        samples=settings.samples,
        dropped=len(asked[0].prompts) + len(asked[0].prompts.dropped) - len(indices[0]),
        settings=given,
    )
    if settings.out is not None:
        write(comparison, settings.out)
    return comparison


def show(comparison: Comparison, console: Console, prompts: int) -> None:
    """Print the table, and the first responses to the first prompts side by side."""
    names = [escape(visible_line(name)) for name in comparison.names]
    title = f"{comparison.prompts} prompts, responses to each: {comparison.samples}"
    table = Table("", *names, title=title)
    for label, cells in rows(comparison):
        table.add_row(Text(visible_line(label)), *cells)
    console.print(table)
    sides = Table(*names, show_lines=True)
    for number in range(min(prompts, comparison.prompts)):
        sides.add_row(*(_side(column.responses[number * comparison.samples]) for column in comparison.columns))
    if prompts:
        console.print(sides)


def write(comparison: Comparison, out: Path) -> None:
    """Write comparison.html and comparison.json into the new folder `out`."""
    environment = Environment(loader=PackageLoader("cavesson.tools"), autoescape=True, trim_blocks=True)
    environment.filters["visible"] = visible
    script = files("cavesson.tools").joinpath("templates", "comparison.js").read_text(encoding="utf-8")
    page = environment.get_template("comparison.html").render(
        comparison=comparison,
        script=Markup(script),
        script_hash=b64encode(sha256(script.encode()).digest()).decode(),  # browsers run only this script
        rows=rows(comparison),
        sides=list(zip(*(column.responses for column in comparison.columns), strict=True)),
    )
    with new_folder(out) as folder:
        (folder / "comparison.html").write_text(page, encoding="utf-8")
        write_json(folder / "comparison.json", asdict(comparison))


def rows(comparison: Comparison) -> list[tuple[str, list[str]]]:
    """Return the rows of the table as text; rewards that were not measured are omitted."""
    columns = comparison.columns
    names = dict.fromkeys(name for column in columns for name in column.rewards)
    lines = [(name, [shown(c.rewards[name]) if name in c.rewards else "" for c in columns]) for name in names]
    if names:
        lines += [
            ("difference to the first", [shown(c.difference) if c.difference else "" for c in columns]),
            ("win rate over the first", [shown(c.win_rate) if c.win_rate else "" for c in columns]),
        ]
    if any(column.unscored for column in columns):
        lines.append(("not judged by any reward", [f"{c.unscored} of {len(c.responses)}" for c in columns]))
    return [
        *lines,
        ("length in tokens", [f"{c.tokens:.1f}" for c in columns]),
        ("length in words", [f"{c.words:.1f}" for c in columns]),
        ("ended by itself", [f"{c.ended:.0%}" for c in columns]),
        ("distinct-1", [_share(c.distinct_1) for c in columns]),
        ("distinct-2", [_share(c.distinct_2) for c in columns]),
    ]


def _runs(models: Sequence[str]) -> tuple[TrainedBy | None, list[TrainedBy | None]]:
    """Return the first run among the models, and the run that says how each model is asked: its own or the first."""
    own = [trained_by(model) for model in models]
    first = next((run for run in own if run is not None), None)
    other = None if first is None else first._replace(is_own=False)
    return first, [run or other for run in own]


def _questions(model: str, settings: CompareSettings, run: TrainedBy | None) -> Questions:
    tokenizer = load_start_tokenizer(StartSettings(path=model, gguf_file=settings.gguf_file))
    return questions_of(settings, tokenizer, run)


def _common(sets: Sequence[PromptSet]) -> list[list[int]]:
    """Return, for each model, the indices of the prompts that no model drops."""
    kept = [sorted(set(range(len(prompts) + len(prompts.dropped))) - set(prompts.dropped)) for prompts in sets]
    common = set.intersection(*map(set, kept))
    return [[index for index, row in enumerate(rows) if row in common] for rows in kept]


def _answers(model: str, asked: Questions, indices: Sequence[int], settings: CompareSettings) -> list[Response]:
    policy, tokenizer = load_policy(model, settings)
    return list(responses(policy, tokenizer, asked, settings, indices))


def _win_rate(rewards: Sequence[float], others: Sequence[float], groups: Sequence[int]) -> Interval:
    """Return the share of the responses that get a higher reward than the first model's; a tie is half a win."""
    return share_interval([(a > b) + (a == b) / 2 for a, b in zip(rewards, others, strict=True)], groups)


def _column(
    name: str,
    asked: str,
    answers: Sequence[Response],
    scores: dict[str, list[float | None]],
    first: dict[str, list[float | None]],
) -> ComparedModel:
    groups = [one.group for one in answers]
    split = words([one.response for one in answers])
    total, others = (next(iter(parts.values()), []) for parts in (scores, first))
    # Only responses that are judged in both can be compared.
    gained = [
        (one, other, group)
        for one, other, group in zip(total, others, groups if total else (), strict=True)
        if one is not None and other is not None
    ]
    compared = scores is not first and gained != []
    mine, theirs, pairs = zip(*gained, strict=True) if compared else ((), (), ())
    return ComparedModel(
        name=name,
        asked=asked,
        rewards=estimates(scores, groups),
        difference=estimate_gain(mine, theirs, pairs) if compared else None,
        win_rate=_win_rate(mine, theirs, pairs) if compared else None,
        unscored=total.count(None),
        tokens=fmean(one.tokens for one in answers),
        words=fmean(map(len, split)),
        ended=fmean(one.finish_reason not in CUT for one in answers),
        distinct_1=distinct(split, 1),
        distinct_2=distinct(split, 2),
        responses=[
            {
                "prompt": one.prompt,
                "response": one.response,
                "finish_reason": one.finish_reason,
                "tokens": one.tokens,
                **({"messages": one.messages} if one.world is not None else {}),
                **({"reward": total[n]} if total else {}),
                **({"reward_parts": {part: values[n] for part, values in scores.items()}} if total else {}),
            }
            for n, one in enumerate(answers)
        ],
    )


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.3f}"


def _side(response: dict[str, Any]) -> Text:
    text = Text(visible_line(response["prompt"]), style="dim")
    text.append(visible_line(response["response"]), style="default")
    if response.get("reward") is not None:
        text.append(f"  [{response['reward']:+.3f}]", style="bold")
    return text

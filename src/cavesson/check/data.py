"""Checks of the rows of a run: too long, duplicated, or both held out and trained on."""

from collections.abc import Sequence
from typing import Any

from cavesson.algorithms.runs import ExampleRun, RolloutRun
from cavesson.data.duplicates import duplicates
from cavesson.data.examples import Examples
from cavesson.data.load import load
from cavesson.data.prompts import PromptSet
from cavesson.data.types import Prompt
from cavesson.findings.finding import Finding, Results, SkippedCheck
from cavesson.plan.largest import sequences_of

_MAX_DROPPED = 0.2
_MAX_CUT = 0.1
_MAX_REPEATED = 0.05


def check_prompts(settings: RolloutRun, prompts: PromptSet) -> Results:
    """Check the prompts that a run samples from."""
    rows = len(prompts) + len(prompts.dropped)
    overlong = prompts.overlong
    share = len(overlong) / rows
    first = ", ".join(str(row + 1) for row in overlong[:5])
    yield Finding(
        "prompts-dropped",
        "warning",
        "Many prompts are dropped",
        f"{len(overlong)} of {rows} are longer than {settings.data.max_prompt_tokens} tokens, the first in rows "
        f"{first}.",
        "raise data.max_prompt_tokens, if the memory allows",
        share,
        f"share of prompts over data.max_prompt_tokens, which are dropped; at most {_MAX_DROPPED:g}",
    ).unless(share <= _MAX_DROPPED)
    yield from _duplicates(settings, Prompt)
    yield from _notes(prompts.notes)


def check_examples(settings: ExampleRun, examples: Examples[Any]) -> Results:
    """Check the examples that a run trains on."""
    if settings.data.stream:
        yield SkippedCheck("data", "it is read while training (data.stream)")
        return
    limit = getattr(settings.data, "max_length", 0)
    lengths = [len(part.ids) for part in sequences_of(examples.train.take(0, examples.train.size or 0))]
    share = sum(length >= limit for length in lengths) / len(lengths)
    cuts = settings.data.overlong == "truncate"  # type: ignore[attr-defined]
    yield Finding(
        "examples-cut",
        "warning",
        "Many examples are cut before their end",
        f"{share:.0%} of the examples are as long as the limit of {limit} tokens: the model cannot learn from them how "
        "a response ends.",
        'raise data.max_length, or set data.overlong = "drop"',
        share,
        f"share of examples cut at data.max_length; at most {_MAX_CUT:g}",
        "TRL #2708",
    ).unless(share <= _MAX_CUT or not cuts)
    if not examples.held_out:
        yield Finding(
            "held-out",
            "note",
            "No rows are held out",
            "All rows are trained on, so learning cannot be told apart from memorising.",
            "data.validation = 0.1",
        )
    yield from settings.judged(examples)
    yield from _duplicates(settings, settings.row_kind)
    yield from _notes(examples.notes())


def _duplicates(settings: RolloutRun | ExampleRun, kind: Any) -> Results:
    loaded = load(settings.data, kind)
    report = duplicates(loaded.train, loaded.held_out, show=1)
    repeated, held_out, _ = report.found
    share = repeated.count / report.rows
    first = "".join(f"; row {row} repeats row {of}" for row, of, _text in repeated.examples)
    yield Finding(
        "duplicates",
        "warning",
        "Many rows are duplicates",
        f"{repeated.count} of {report.rows} rows repeat an earlier one{first}.",
        "remove them: cavesson data duplicates FILE lists them",
        share,
        f"share of rows that repeat an earlier one; at most {_MAX_REPEATED:g}",
    ).unless(share <= _MAX_REPEATED)
    if held_out.count:
        row, of, _text = held_out.examples[0]
        yield Finding(
            "held-out-learned",
            "warning" if held_out.count > _MAX_REPEATED * report.held_out else "note",
            "Held-out rows are trained on",
            f"{held_out.count} of {report.held_out} held-out rows are among those that are trained on; row {row} of "
            f"them is row {of}. Figures measured on them will be too good.",
            "remove the duplicates: cavesson data duplicates FILE lists them",
            held_out.count,
            "held-out rows that are trained on; 0",
        )


def _notes(notes: Sequence[str]) -> Results:
    if notes:
        yield Finding(
            "data-notes",
            "note",
            "Some rows were skipped or look odd",
            "\n".join(notes),
            "look at these rows: cavesson data show RECIPE.toml --row N",
        )

"""Rollouts that show a finding, token by token, coloured by the quantity that the rule examines."""

from html import escape
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from cavesson.doctor.rows import numbers
from cavesson.doctor.rule import Rule
from cavesson.doctor.series import Array
from cavesson.doctor.words import Language
from cavesson.findings.finding import Evidence
from cavesson.findings.words import number
from cavesson.record import Run
from cavesson.text.visible import visible

MAX_FIGURES = 3
BEFORE, BEHIND = 60, 140
"""Tokens that are shown before and behind the place that matters."""
MAX_CHARACTERS = 1200
MAX_PROMPT, PROMPT_TOKENS = 300, 12
SHADES = 8
"""Number of shades of each of the two colours."""


class Measure(NamedTuple):
    """The quantity by which tokens are coloured."""

    name: str
    columns: tuple[str, ...]
    """One, or two of which the second is subtracted from the first."""


MEASURES = (
    Measure("log π − log π_sampler", ("logprob", "sampler_logprob")),
    Measure("value", ("value",)),
    Measure("token reward", ("token_reward",)),
    Measure("advantage", ("advantage",)),
    Measure("log π − log π_ref", ("logprob", "ref_logprob")),
    Measure("log π", ("logprob",)),
)
"""The first of them that a rule needs and the tokens have is shown."""


def coloured_by(rule: Rule, tokens: pa.Table) -> tuple[Measure, Array]:
    """Return the quantity that a rule examines, and its values."""
    needs = {one.removeprefix("tokens.") for need in rule.needs for one in need.split("|")}
    for measure in MEASURES[:-1]:
        values = values_of(tokens, measure)
        if measure.columns[-1] in needs and np.isfinite(values).any():
            return measure, values
    return MEASURES[-1], values_of(tokens, MEASURES[-1])


def evidence(run: Run, rule: Rule, places: tuple[Evidence, ...], language: Language, board: str | None = None) -> str:
    """Return the first places as HTML, with their addresses on the board, which are links if the board's is given."""
    return "".join(_figure(run, rule, shown_at, language, board) for shown_at in places[:MAX_FIGURES])


def plain_text(text: str) -> str:
    """Return recorded text as HTML, with invisible characters made visible."""
    return escape(visible(text))


def _figure(run: Run, rule: Rule, shown_at: Evidence, language: Language, board: str | None) -> str:
    say = language.phrase
    head = f"{say('step')} {shown_at.step}"
    address = f"<code>{escape(shown_at.view)}</code>"
    if board is not None:
        address = f'<a href="{escape(board.rstrip("/"))}/{escape(shown_at.view)}">{address}</a>'
    if shown_at.sample is None:
        return f"<figure><figcaption>{escape(head)} {address}</figcaption></figure>"
    rollout = run.rollout(shown_at.step, shown_at.sample)
    head += f" · {say('sample')} {shown_at.sample} · {say('reward')} {number(_or_nan(rollout.row['reward']))}"
    measure, values = coloured_by(rule, rollout.tokens)
    body, legend = _tokens(run, rollout.tokens, values, shown_at)
    if not body:
        body = plain_text(str(rollout.row["response"] or "")[:MAX_CHARACTERS])
    caption = f"{escape(head)} {address}"
    if legend:
        caption += f' <span class="scale">{escape(say(measure.name))}: {legend}</span>'
    start = _prompt(run, rule, rollout.row)
    return f'<figure><figcaption>{caption}</figcaption><p class="text"><i>{start}</i>{body}</p></figure>'


def _prompt(run: Run, rule: Rule, row: dict[str, Any]) -> str:
    """Return the end of the prompt, or its first tokens if the rule examines these."""
    texts = run.token_texts((row["prompt_ids"] or [])[:PROMPT_TOKENS]) if "rows.prompt_ids" in rule.needs else []
    if any(texts):
        return "".join(f"<b>{plain_text(text)}</b> " for text in texts) + "… "
    prompt = str(row["prompt"] or "")
    return plain_text(("…" if len(prompt) > MAX_PROMPT else "") + prompt[-MAX_PROMPT:])


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


def _tokens(run: Run, tokens: pa.Table, values: Array, shown_at: Evidence) -> tuple[str, str]:
    """Return the coloured tokens around a place, and a legend; both are empty if only the text is known."""
    low = max(0, (shown_at.start or 0) - BEFORE)
    shown = tokens.slice(low, BEFORE + BEHIND)
    texts = texts_of(run, shown)
    if not any(texts):
        return "", ""
    values = values[low : low + len(texts)]
    size = scale_of(values)
    start, stop = shown_at.start, shown_at.stop if shown_at.stop is not None else (shown_at.start or 0) + 1
    parts = [
        _token(text, value, size, marked=start is not None and start <= low + i < stop)
        for i, (text, value) in enumerate(zip(texts, values.tolist(), strict=True))
    ]
    ends = ("…" if low else "", "…" if low + len(texts) < tokens.num_rows else "")
    legend = f'<b class="n{SHADES}">{number(-size)}</b> … <b class="p{SHADES}">{number(size)}</b>' if size else ""
    return ends[0] + "".join(parts) + ends[1], legend


def texts_of(run: Run, tokens: pa.Table) -> list[str]:
    """Return the text of each token; an empty list if the record has neither texts nor ids."""
    if tokens["token"].null_count < tokens.num_rows:
        return [text or "" for text in tokens["token"].to_pylist()]
    known = tokens["token_id"].null_count < tokens.num_rows
    return run.token_texts(tokens["token_id"].to_pylist()) if known else []


def values_of(tokens: pa.Table, measure: Measure) -> Array:
    """Return the quantity of each token, [T]; NaN where it was not measured."""
    first, *others = (numbers(tokens[name]) for name in measure.columns)
    with np.errstate(invalid="ignore"):  # ∞ − ∞ is invalid
        return first - others[0] if others else first


def scale_of(values: Array) -> float:
    """Return the size of value that has the strongest colour; 0 if nothing was measured."""
    measured = values[np.isfinite(values)]
    return float(np.quantile(np.abs(measured), 0.98)) if len(measured) else 0.0


def _token(text: str, value: float, size: float, *, marked: bool) -> str:
    shade = round(SHADES * min(abs(value) / size, 1)) if size and np.isfinite(value) else 0
    names = ([f"{'p' if value > 0 else 'n'}{shade}"] if shade else []) + (["here"] if marked else [])
    kind = f' class="{" ".join(names)}"' if names else ""
    return f'<b{kind} title="{number(value)}">{plain_text(text)}</b>'

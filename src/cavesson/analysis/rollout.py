"""One rollout as coloured tokens for a notebook, and as plain text."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from cavesson.doctor.report.evidence import MEASURES, plain_text, scale_of, texts_of, values_of
from cavesson.findings.words import number
from cavesson.notebook import page
from cavesson.record import Rollout, Run
from cavesson.record.read.not_learned import padding_at_end
from cavesson.text.counting import counted
from cavesson.text.visible import visible

FACTS = ("split", "reward", "finish_reason", "length", "kl_k1", "ground_truth")
"""Columns of the row that are shown."""
NUMBERS = (
    "logprob", "ref_logprob", "teacher_logprob", "sampler_logprob", "value", "token_reward", "advantage", "return",
    "entropy",
)  # fmt: skip
"""Columns of a token that its tooltip shows."""
COLOUR_ORDER = (MEASURES[-2], *MEASURES[:-2], MEASURES[-1])
"""The first of them that was measured colours the tokens: what training changed, if there is a reference."""
POSITIVE, NEGATIVE = "42,150,134", "224,116,58"
STRONGEST = 0.62


class RolloutView(Rollout):
    """One rollout, as its row and its tokens; a notebook displays its tokens coloured, ``print`` its texts."""

    turns: list[dict[str, Any]]
    """The turns of an episode; empty if they are unknown."""
    shown: pa.Table
    """The tokens without padding at the end."""
    texts: list[str]
    """The text of each of these; empty if only the text of the response is known."""

    def __repr__(self) -> str:
        row = self.row
        return f"Rollout(step={row['step']}, sample={row['sample']}, {counted(self.shown.num_rows, 'token')})"

    def __str__(self) -> str:
        facts = ", ".join(f"{name} {visible(_said(value))}" for name, value in self._facts().items())
        head = f"step {self.row['step']}, sample {self.row['sample']}: {facts}"
        parts = [("prompt", self.row["prompt"]), *self._speeches()]
        return "\n".join([head, *(f"\n[{visible(who)}]\n{visible(text or '')}" for who, text in parts)])

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows."""
        title = f"Rollout of step {self.row['step']}, sample {self.row['sample']}"
        facts = {name: _said(value) for name, value in self._facts().items()}
        prompt = f"<i>{plain_text(self.row['prompt'] or '')}</i>"
        body = "".join(self._coloured() if any(self.texts) else self._uncoloured())
        return f'<div>{page(title, facts, {})}<div style="white-space:pre-wrap">{prompt}{body}</div></div>'

    def _facts(self) -> dict[str, Any]:
        named = {name: self.row[name] for name in FACTS} | (self.row["reward_parts"] or {})
        return {name: value for name, value in named.items() if value is not None}

    def _speeches(self) -> list[tuple[str, str | None]]:
        """Return who said what after the prompt."""
        return [(_speaker(turn), turn["text"]) for turn in self.turns] or [("response", self.row["response"])]

    def _uncoloured(self) -> Iterator[str]:
        for speaker, text in self._speeches():
            yield f"{_label(speaker)}{plain_text(text or '')}"

    def _coloured(self) -> Iterator[str]:
        measures = ((measure, values_of(self.shown, measure)) for measure in COLOUR_ORDER)
        measured = ((measure, values) for measure, values in measures if np.isfinite(values).any())
        measure, values = next(measured, (COLOUR_ORDER[0], np.full(self.shown.num_rows, np.nan)))
        size, labels = scale_of(values), {turn["first_token"]: _label(_speaker(turn)) for turn in self.turns}
        for place, token in enumerate(self.shown.to_pylist()):
            yield labels.get(token["position"], "")
            yield _token(self.texts[place], token, values[place], size)
        if size:
            ends = (f'<span style="{_colour(end, size)}">{number(end)}</span>' for end in (-size, size))
            yield f"<div><small>{plain_text(measure.name)}: {' … '.join(ends)}</small></div>"


def viewed(run: Run, step: int, sample: int, rollout: Rollout) -> RolloutView:
    """Return a rollout of a run with what its display needs."""
    view = RolloutView(*rollout)
    view.turns = run.turns(step, sample).to_pylist()
    view.shown = rollout.tokens.slice(0, rollout.tokens.num_rows - padding_at_end(run, rollout.tokens))
    view.texts = texts_of(run, view.shown)
    return view


def _speaker(turn: Mapping[str, Any]) -> str:
    return " ".join(str(turn[name]) for name in ("role", "name", "arguments") if turn[name])


def _label(speaker: str) -> str:
    return f"<div><strong>{plain_text(speaker)}</strong></div>"


def _token(text: str, token: Mapping[str, Any], value: float, size: float) -> str:
    numbers = "".join(f"\n{name} {number(token[name])}" for name in NUMBERS if token[name] is not None)
    faint = ";opacity:0.5" if token["learned"] is False else ""
    title = plain_text(f"token {token['position']}{numbers}")
    return f'<span style="{_colour(value, size)}{faint}" title="{title}">{plain_text(text)}</span>'


def _colour(value: float, size: float) -> str:
    share = min(abs(value) / size, 1) if size and np.isfinite(value) else 0
    return f"background:rgba({POSITIVE if value > 0 else NEGATIVE},{STRONGEST * share:.2f})"


def _said(value: Any) -> str:
    return number(value) if isinstance(value, float) else str(value)

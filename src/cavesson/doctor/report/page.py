"""A diagnosis as a single HTML file with charts and coloured tokens, without scripts or external resources."""

import base64
import hashlib
from collections.abc import Iterable, Mapping
from html import escape
from importlib.resources import files

from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import Detection, Diagnosis
from cavesson.doctor.findings import findings_in
from cavesson.doctor.reading import Reading
from cavesson.doctor.recording import DOCS
from cavesson.doctor.report.chart import drawn
from cavesson.doctor.report.evidence import SHADES, evidence, plain_text
from cavesson.doctor.report.summary import (
    MOST_LIKELY,
    how_to_record,
    open_failures,
    recipe_title,
    short_recipes,
    summary,
)
from cavesson.doctor.words import Language
from cavesson.findings.finding import Finding
from cavesson.findings.report import facts, since
from cavesson.findings.words import number

Described = tuple[Detection, Finding]
"""A finding as data and in words."""
SHOWN_APART = ("explains", "evidence")
"""Facts that the page shows in another form: consequences with their own facts, and the rollouts themselves."""


def page(data: RunData, diagnosis: Diagnosis, language: Language, board: str | None = None) -> str:
    """Return the page; evidence links to the board if its address is given."""
    say = language.phrase
    style = _style()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    steps = data.steps
    where = f"{say('steps')} {steps[0]}–{steps[-1]}, " if len(steps) else ""
    described = {
        one.rule.name: (one, finding)
        for one, finding in zip(diagnosis.findings, findings_in(diagnosis, language), strict=True)
    }
    causes = "".join(_cause(data, one, described, language, board) for one in diagnosis.causes)
    name = plain_text(data.run.folder.rstrip("/").rpartition("/")[2])
    healthy = ((rule.name, number(reading.seen), language.healthy(rule)) for rule, reading in diagnosis.healthy)
    skipped = ((one.rule, language.reason(one)) for one in diagnosis.skipped)
    return f"""<!doctype html>
<html lang="{language.name}">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'sha256-{digest}'">
<meta name="viewport" content="width=device-width">
<title>{name} – {escape(say("Diagnosis"))}</title>
<style>{style}</style>
<header><h1>{name}</h1>
<p>{plain_text(data.algorithm or "")} {escape(where)}{len(data.rows)} {escape(say("rollouts"))}</p></header>
<p>{escape(summary(diagnosis, language))}</p>
{causes}
{_open_failures(data, diagnosis, language)}
{_table(say("Looked at and within range"), healthy)}
{_table(say("Not checked"), skipped)}
</html>
"""


def _style() -> str:
    """Return the style sheet, with a colour for every shade of a token."""
    shades = [
        f".{sign}{i} {{ background: color-mix(in srgb, var(--{colour}) {round(62 * i / SHADES)}%, transparent); }}"
        for sign, colour in (("p", "positive"), ("n", "negative"))
        for i in range(1, SHADES + 1)
    ]
    return files("cavesson.doctor").joinpath("report", "page.css").read_text("utf-8") + "\n".join(shades)


def _cause(
    data: RunData, one: Detection, described: Mapping[str, Described], language: Language, board: str | None
) -> str:
    _, finding = described[one.rule.name]
    under = "".join(_consequence(data, *described[name], language) for name in finding.explains)
    explains = f'<p class="muted">{escape(language.phrase("explains"))}</p>{under}' if under else ""
    head = f'<h2><span class="severity">{escape(language.phrase(finding.severity))}</span>{escape(finding.title)}'
    head += f"<small>{escape(_since(data, finding, language))}</small></h2>"
    shown = evidence(data.run, one.rule, finding.evidence, language, board)
    return f'<article class="{finding.severity}">{head}{_body(one, finding, language)}{shown}{explains}</article>'


def _consequence(data: RunData, one: Detection, finding: Finding, language: Language) -> str:
    began = _since(data, finding, language)
    head = f'<summary>{escape(finding.title)} <span class="muted">{escape(began)}</span></summary>'
    return f"<details>{head}{_body(one, finding, language)}</details>"


def _since(data: RunData, finding: Finding, language: Language) -> str:
    return since(finding, language.phrase, int(data.steps[0]) if len(data.steps) else 0)


def _body(one: Detection, finding: Finding, language: Language) -> str:
    lines = "".join(
        f'<dt>{escape(fact.label)}</dt><dd class="{fact.kind}">{plain_text(fact.text)}</dd>'
        for fact in facts(finding, language.phrase)
        if fact.kind not in SHOWN_APART
    )
    return f"<p>{plain_text(finding.cause)}</p>{_drawn(one.reading, language)}<dl>{lines}</dl>"


def _drawn(reading: Reading, language: Language) -> str:
    curve = reading.curve
    if curve is None:
        return f'<p class="muted">{escape(language.phrase("One number for the whole run, so there is no curve."))}</p>'
    caption = f"<figcaption>{escape(language.phrase(curve.name))}</figcaption>" if curve.name else ""
    return f"<figure>{caption}{drawn(reading, language)}</figure>"


def _open_failures(data: RunData, diagnosis: Diagnosis, language: Language) -> str:
    """Return the most likely failures that cannot be excluded and what decides most of them; the others are folded."""
    several = open_failures(diagnosis, language)
    if not several:
        return ""
    title = f"<h3>{escape(language.phrase('Cannot be excluded'))} ({len(several)})</h3>"
    likely = title + _rows(several[:MOST_LIKELY]) + _code(short_recipes(data, diagnosis, language))
    if len(several) <= MOST_LIKELY:
        return likely
    titled = [(recipe_title(recipe, language), recipe.code) for recipe in how_to_record(data, diagnosis)]
    more = language.phrase("{more} more").format(more=len(several) - MOST_LIKELY)
    return f"{likely}{_folded(more, _rows(several[MOST_LIKELY:]) + _code(titled))}"


def _code(recipes: Iterable[tuple[str, str]]) -> str:
    """Return lines of code, each below its title."""
    return "".join(f"<p>{escape(title)} ({DOCS}):</p><pre>{escape(code)}</pre>" for title, code in recipes)


def _table(title: str, lines: Iterable[tuple[str, ...]]) -> str:
    several = list(lines)
    return _folded(f"{title} ({len(several)})", _rows(several)) if several else ""


def _rows(lines: Iterable[tuple[str, ...]]) -> str:
    rows = ("<tr>" + "".join(f"<td>{plain_text(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    return f"<table>{''.join(rows)}</table>"


def _folded(title: str, body: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{body}</details>"

"""What the doctor finds in a run, as a list that displays itself."""

from collections.abc import Iterable

from rich.console import Console

from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import diagnose
from cavesson.doctor.findings import findings_in
from cavesson.doctor.plugins import all_rules
from cavesson.doctor.report.summary import summary
from cavesson.doctor.words import Language
from cavesson.doctor.words import language as language_named
from cavesson.findings.finding import Finding
from cavesson.findings.report import facts, show, since
from cavesson.notebook import page, printed
from cavesson.record import Run


class FindingList(list[Finding]):
    """Findings in the order in which they are read."""

    def __init__(self, findings: Iterable[Finding], summary: str, language: Language, first: int | None) -> None:
        super().__init__(findings)
        self.summary = summary
        """The result of the diagnosis in a sentence, also if nothing was found."""
        self._language = language
        self._first_step = first

    def __repr__(self) -> str:
        say, first = self._language.phrase, self._first_step

        def show_all(console: Console) -> None:
            console.print(self.summary, highlight=False)
            for one in self:
                show(console, one, say, first)

        return printed(show_all).rstrip()

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows."""
        return f"<div>{page(self.summary, {}, {})}{''.join(map(self._html, self))}</div>"

    def _html(self, one: Finding) -> str:
        say = self._language.phrase
        title = f"{say(one.severity)}: {one.title}  {since(one, say, self._first_step)}"
        return page(title, {"": one.cause, **{fact.label: fact.text for fact in facts(one, say)}}, {})


def found_in(run: Run, language: str | None) -> FindingList:
    """Return what the doctor finds in a run, in a language or in that of LANG."""
    data, words = RunData(run), language_named(language)
    diagnosis = diagnose(data, all_rules())
    first = int(data.steps[0]) if len(data.steps) else None
    return FindingList(findings_in(diagnosis, words), summary(diagnosis, words), words, first)

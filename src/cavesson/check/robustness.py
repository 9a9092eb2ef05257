"""Whether a policy that never reads the task earns as much as a right answer, and what else a reward hides."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from cavesson.check.answers import (
    Answer,
    Form,
    Task,
    answer_columns,
    blank_call,
    forms_of,
    right_answers,
    with_answers_of,
)
from cavesson.check.attacks import (
    ATTACKS,
    Answers,
    Attack,
    Material,
    calls_alone,
    echo,
    empty,
    empty_forms,
    malformed,
    of_other_rows,
)
from cavesson.check.partial import close
from cavesson.check.scoring import Numbers, Score, Scores
from cavesson.check.swallowed import Raised
from cavesson.errors import UserCodeError
from cavesson.findings.finding import Finding, Fine, Result, Results, SkippedCheck
from cavesson.findings.words import number
from cavesson.rollout.tools import Tool

_LEAST = 4
_TRIALS = 6
"""Rows with which the form of right answers is found."""
_SHARE = 0.9
"""Share of what a right answer earns, above a wrong one, that makes an attack a finding."""
_CREDIT, _HALF = 0.1, 0.5
"""Shares of it above which partial credit is a note, and from which it is a warning."""
_SECONDS = 30.0
_QUOTED = 60


_SIMILAR: dict[Any, Callable[[Answer], Answer]] = {
    empty: lambda answer: answer._replace(text="?"),
    empty_forms: lambda answer: answer._replace(text=re.sub(r"[^\w\s]", "x", answer.text)),
    calls_alone: lambda answer: answer._replace(calls=()),
}
"""Answers that are not those of an attack, but as long."""


class Earned(NamedTuple):
    """An attack and what it earns."""

    answers: Answers
    scores: Scores
    mean: float


def attack(
    tasks: Sequence[Task],
    tools: Mapping[str, Tool],
    score: Score,
    is_model: bool = False,
    reads_text: bool = True,
) -> Results:
    """Attack a reward with answers that do not depend on the task, and compare their scores with those of right ones.

    The reward may be a model, which does not read right answers; if it does not read texts, as an environment's own, it
    knows only calls of the policy's tools.
    """
    yield from _Attacked(tasks, tools, score, forms_of(tasks, tools, reads_text)).results(is_model)


@dataclass
class _Attacked:
    tasks: Sequence[Task]
    tools: Mapping[str, Tool]
    score: Score
    forms: Sequence[Form]
    failed: tuple[str, Answer] | None = None
    """the first exception of the reward, and the answer"""
    seen: list[Earned] = field(default_factory=list)
    repeats: bool = False
    """whether the same answers had the same scores twice in a row"""

    def __post_init__(self) -> None:
        self.until = perf_counter() + _SECONDS
        self.columns = answer_columns(self.tasks)

    def results(self, is_model: bool) -> Results:
        reason = None
        if is_model:
            reason = "a reward model reads no right answers, so there is none to compare attacks with"
        elif len(self.tasks) < _LEAST:
            reason = f"attacks on a reward need {_LEAST} rows; there are {len(self.tasks)}"
        elif not self.columns:
            reason = (
                "the data have no column with right answers, such as ground_truth or answer: whether an empty answer, "
                "a repeated prompt or a constant answer earns as much as a right one is not known"
            )
        if reason is not None:
            yield from self._twice(self.tasks[:_LEAST], [Answer(task.asked) for task in self.tasks[:_LEAST]])
            yield SkippedCheck("reward-attacks", reason)
            return
        first = self._earned([Answer(one) for one in right_answers(self.tasks, self.columns)[0]])
        right, form = self._best()
        material = Material(self.tasks, right, form, self.forms, [*map(blank_call, self.tools.values())])
        answers = [form.write(one) or Answer(one) for one in right]
        yield from self._twice(self.tasks, answers)
        bar = self._earned(answers)
        if bar is None:
            reason = f"the reward judges no answer from the columns {', '.join(self.columns)}"
            yield SkippedCheck("reward-attacks", reason)
            return
        yield from self._compared(material, bar)
        yield from self._raises()
        yield from self._later(first or bar)

    def _best(self) -> tuple[list[str], Form]:
        """Return the right answers and the form that earn the most on the first rows.

        Of several, the first in which the answers of other rows earn less.
        """
        tasks = self.tasks[:_TRIALS]
        found: list[tuple[float, list[str], Form, list[Answer]]] = []
        for right, form in product(right_answers(self.tasks, self.columns), self.forms):
            said = [one for one in map(form.write, right[:_TRIALS]) if one is not None]
            earned = self._earned(said, tasks) if len(said) == len(tasks) and not self._is_late else None
            found += [] if earned is None else [(earned.mean, right, form, said)]
        most = max((mean for mean, *_ in found), default=0.0)
        best = [one for one in found if one[0] > most - 1e-9]
        for _, right, form, said in best:
            earned = self._earned([*said[1:], said[0]], tasks)
            if self._is_late or (earned is not None and earned.mean < most - 1e-9):
                return right, form
        return best[0][1:3] if best else (right_answers(self.tasks, self.columns)[0], self.forms[0])

    def _compared(self, material: Material, bar: Earned) -> Results:
        """Compare the attacks with right answers, if it is known that these are right ones."""
        tried = {one: [*self._tried(one.answers(material))] for one in ATTACKS}
        others = [earned.mean for one, each in tried.items() if one.answers is of_other_rows for earned in each]
        means = [earned.mean for each in tried.values() for earned in each]
        # The score of wrong answers: other rows' answers, or the lower quartile of all attacks. The lowest of all would
        # be that of a text that is punished for its length.
        floor = min([*others, bar.mean, *([float(np.percentile(means, 25, method="lower"))] if means else [])])
        reads = self._reads_answers(bar) or bar.mean > max(others, default=floor) + _gap(bar.mean, floor)
        if not reads and not any(one > bar.mean + _gap(one, floor) for one in others):
            yield from self._without_right_answers(material, bar, tried, floor)
            return
        found = [one for one, each in tried.items() if _best(each) is not None]
        for one in found:
            best = _best(tried[one])
            assert best is not None
            if bar.mean > floor or one.answers is of_other_rows:
                yield _judged(one, best, bar, floor, len(self.tasks))
        yield from self._swallowed(material, tried, bar, floor, others)
        wrong = next((each[0] for one, each in tried.items() if one.answers is of_other_rows and each), None)
        if wrong is not None:
            yield from self._partial(material, bar, wrong, floor)
        if self._is_late:
            yield SkippedCheck("reward-attacks", f"the reward is slow: attacks were stopped after {_SECONDS:g} s")

    def _partial(self, material: Material, bar: Earned, wrong: Earned, floor: float) -> Results:
        """Compare answers that are close to right ones with those of other rows, which are written in the same form."""
        found = []
        for rows, answers in close(material):
            earned = None
            if len(rows) >= _LEAST and not self._is_late:
                earned = self._earned(answers, [self.tasks[row] for row in rows])
            if earned is not None:
                most, least = (float(np.nanmean(one.scores.values[rows])) for one in (bar, wrong))
                found += (
                    [((earned.mean - least) / (most - least), rows, earned)] if most - least > _gap(most, least) else []
                )
        if found:
            share, rows, earned = max(found, key=lambda one: one[0])
            yield _credit(share, rows, earned, bar, wrong.mean, floor)

    def _without_right_answers(
        self, material: Material, bar: Earned, tried: Mapping[Attack, Sequence[Earned]], floor: float
    ) -> Results:
        """Check what needs no right answers, because no answer that was tried earns more for being right."""
        every = [*self.seen]
        if np.ptp([one.mean for one in every]) == 0 and bar.mean > 0:
            yield Finding(
                "attack-any",
                "warning",
                "Any answer earns as much as a right one",
                f"{len(every)} different answers, an empty one among them, all have the score {number(bar.mean)}.",
                "look at what the reward reads: cavesson score FILE --rewards …",
                bar.mean,
                "mean score of right answers, and of all others; right ones should have more",
            )
        for one in (one for one in tried if one.answers is echo or one.answers in _SIMILAR):
            best = _best(tried[one])
            if best is not None and best.mean >= bar.mean and self._pays_for_it(one, best, floor):
                yield _judged(one, best, bar, floor, len(self.tasks))
        yield from self._swallowed(material, tried, bar, floor, [bar.mean])
        raised = next((f"; it caught {one.error} ({one.place})" for one in bar.scores.raised), "")
        yield SkippedCheck(
            "reward-attacks",
            f"no answer from the columns {', '.join(self.columns)} earned more than that of another row: the reward "
            f"does not read them, or it expects a format that was not tried{raised}",
        )

    def _pays_for_it(self, one: Attack, best: Earned, floor: float) -> bool:
        """Return whether a text earns more than a similar one that is not what the attack is about."""
        if one.answers is echo:
            similar = [*best.answers[1:], best.answers[0]]
        else:
            similar = [_SIMILAR[one.answers](answer) for answer in best.answers]
        control = self._earned(similar)
        return control is not None and best.mean > control.mean + _gap(best.mean, floor)

    def _swallowed(
        self,
        material: Material,
        tried: Mapping[Attack, Sequence[Earned]],
        bar: Earned,
        floor: float,
        wrong: Sequence[float],
    ) -> Results:
        """Check for exceptions that the reward turns into a score that a wrong answer does not get."""
        broken = next((one for each in self.seen for one in each.scores.raised if one.is_mistake), None)
        fails = [earned for one, each in tried.items() if one.answers is malformed for earned in each]
        paid = [
            one for one in fails if one.scores.raised and one.mean > min(wrong, default=floor) + _gap(bar.mean, floor)
        ]
        best = max(paid, key=lambda one: one.mean, default=None)
        if broken is not None:
            yield _exception(broken, "every answer gets a score all the same", bar.mean)
        elif best is not None:
            said = f"{_quoted(best.answers[0])} has the score {number(best.mean)}, a wrong answer {number(min(wrong))}"
            yield _exception(best.scores.raised[0], said, best.mean)
        elif any(not one.may_be_unreadable for one in bar.scores.raised) and bar.mean <= max(wrong, default=floor):
            said = f"the right answer {_quoted(bar.answers[0])} has the score {number(bar.mean)}, as wrong ones"
            yield _exception(bar.scores.raised[0], said, bar.mean)

    def _reads_answers(self, bar: Earned) -> bool:
        """Return whether the scores of right answers change if the data say that others are right."""
        for other in (self.tasks[0], self.tasks[-1], self.tasks[len(self.tasks) // 2]):
            changed = [with_answers_of(task, other, self.columns) for task in self.tasks]
            try:
                values = self.score(changed, bar.answers).values
            except UserCodeError:
                return True
            if not np.allclose(values, bar.scores.values, equal_nan=True):
                return True
        return False

    def _twice(self, tasks: Sequence[Task], answers: Sequence[Answer]) -> Results:
        try:
            first, second = (self.score(tasks, answers).values for _ in range(2))
        except UserCodeError as error:
            self.failed = self.failed or (str(error), answers[0])
            return
        result = _same(answers, first, second, "twice in a row")
        self.repeats = isinstance(result, Fine)
        yield result

    def _later(self, first: Earned) -> Results:
        """Check that answers have the scores that they had before all others."""
        again = self._earned(first.answers)
        if again is not None:
            result = _same(first.answers, first.scores.values, again.scores.values, "before and after other answers")
            if self.repeats and isinstance(result, Finding):
                yield result

    def _raises(self) -> Results:
        if self.failed is not None:
            error, said = self.failed
            yield Finding(
                "reward-raises",
                "warning",
                "The reward raises an exception for some answers",
                f"For {_quoted(said)}: {error}. A run stops there.",
                "return the lowest score for answers that cannot be read",
            )

    def _tried(self, attacks: Iterator[Answers]) -> Iterator[Earned]:
        for answers in attacks:
            if self._is_late:
                return
            earned = self._earned(answers)
            if earned is not None:
                yield earned

    def _earned(self, answers: Sequence[Answer], tasks: Sequence[Task] | None = None) -> Earned | None:
        """Return what answers earn on average, or None if the reward raises an exception or judges fewer than half."""
        try:
            scores = self.score(self.tasks if tasks is None else tasks, answers)
        except UserCodeError as error:
            self.failed = self.failed or (str(error), answers[0])
            return None
        if np.isnan(scores.values).mean() > 0.5:
            return None
        earned = Earned([*answers], scores, float(np.nanmean(scores.values)))
        self.seen.append(earned)
        return earned

    @property
    def _is_late(self) -> bool:
        return perf_counter() > self.until


def _judged(one: Attack, best: Earned, bar: Earned, floor: float, tasks: int) -> Result:
    least = floor + _SHARE * (bar.mean - floor)
    row = int(np.nanargmax(best.scores.values))
    return Finding(
        one.check,
        "warning",
        one.title,
        f"{_quoted(best.answers[row])} has the score {number(float(best.scores.values[row]))}; the right answer "
        f"{_quoted(bar.answers[row])} has {number(float(bar.scores.values[row]))}. A policy can earn it without "
        "reading the task.",
        one.fix,
        best.mean,
        f"mean score over {tasks} rows; right answers have {number(bar.mean)}, wrong ones {number(floor)}",
    ).unless(best.mean < least or best.mean <= floor)


def _credit(share: float, rows: Sequence[int], earned: Earned, bar: Earned, wrong: float, floor: float) -> Result:
    best = int(np.nanargmax(earned.scores.values))
    score, right = float(earned.scores.values[best]), float(bar.scores.values[rows[best]])
    form = f", those in the right form {number(wrong)}" if wrong > floor + _gap(bar.mean, floor) else ""
    return Finding(
        "attack-partial",
        "warning" if share >= _HALF else "note",
        "An answer that is plainly not right earns a part of the reward",
        f"{_quoted(earned.answers[best])} has the score {number(score)}; the right answer "
        f"{_quoted(bar.answers[rows[best]])} has {number(right)}, and those of other rows {number(wrong)} on average. "
        "A policy learns to write such answers where it does not know the right one.",
        "compare whole answers, or keep it if that much credit is intended",
        share,
        f"share of the reward for answers close to right ones; at most {_CREDIT:g}. Right answers have "
        f"{number(bar.mean)}, wrong ones {number(floor)}{form}",
    ).unless(share <= _CREDIT)


def _same(answers: Sequence[Answer], first: Numbers, second: Numbers, when: str) -> Result:
    differs = ~np.isclose(first, second, rtol=1e-3, atol=1e-4, equal_nan=True)
    row = int(differs.argmax())
    return Finding(
        "reward-repeats",
        "warning",
        "The same answer has two scores",
        f"{_quoted(answers[row])} was scored {when}, and has {number(float(first[row]))} and then "
        f"{number(float(second[row]))}: the reward draws random numbers, or keeps something between its calls.",
        "make the score depend on the prompt and the answer alone; reset all of an environment in `reset`",
        float(differs.mean()),
        "share of answers whose score changes when they are scored again; 0",
    ).unless(not differs.any())


def _exception(raised: Raised, said: str, seen: float) -> Finding:
    return Finding(
        "attack-exception",
        "warning",
        "The reward turns its own exception into a score",
        f"{raised.error} ({raised.place}) is caught, and {said}.",
        "let it be raised if it is a mistake, or give the score of a wrong answer if the answer cannot be read",
        seen,
        "mean score where the reward caught an exception",
    )


def _best(earned: Sequence[Earned]) -> Earned | None:
    return max(earned, key=lambda one: one.mean, default=None)


def _gap(high: float, low: float) -> float:
    """Return a difference that is more than rounding, and more than luck on some rows."""
    return max(1e-6, (1 - _SHARE) * abs(high - low))


def _quoted(answer: Answer) -> str:
    said = " ".join(str(answer).split())
    return f"“{said}”" if len(said) <= _QUOTED else f"“{said[:_QUOTED]}…”"

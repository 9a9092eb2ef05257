"""The attacks on a reward: what a policy can say that has never read the task."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from cavesson.check.answers import Answer, Form, Task, options_of
from cavesson.rollout.types import Call

Answers = list[Answer]
"""One per task."""
_USUAL = ("0", "1", "yes", "no", "true", "A", "C", "I do not know.")
_MALFORMED = ("?", "abc", "nan", "inf", "1/0", "{", "[]", '{"a": ', "\\boxed{", "<answer>", "9" * 5000)
_SEPARATORS = (" ", ", ", "\n")
_FREQUENT = 3


class Material(NamedTuple):
    """What attacks are made of."""

    tasks: Sequence[Task]
    right: Sequence[str]
    """the right answers"""
    best: Form
    """in which right answers earn the most"""
    forms: Sequence[Form]
    """all forms that were tried"""
    calls: Sequence[Call]
    """a call of each tool, with any arguments"""

    def said(self, contents: Sequence[str]) -> Iterator[Answers]:
        """Yield content as plain text, and in the form in which right answers earn the most."""
        yield [Answer(one) for one in contents]
        written = [self.best.write(one) for one in contents]
        if all(one is not None for one in written):
            yield [one for one in written if one is not None]

    def same(self, content: str) -> Iterator[Answers]:
        """Yield the same content for all tasks."""
        return self.said([content] * len(self.tasks))


def empty(of: Material) -> Iterator[Answers]:
    """Yield no answer at all."""
    yield [Answer("")] * len(of.tasks)


def echo(of: Material) -> Iterator[Answers]:
    """Yield the prompt, as the user wrote it and as the policy reads it."""
    yield from of.said([task.asked for task in of.tasks])
    yield [Answer(task.prompt) for task in of.tasks]


def empty_forms(of: Material) -> Iterator[Answers]:
    """Yield each form without content."""
    for one in {repr(one): one for form in of.forms for one in form.empty if one.text.strip() or one.calls}.values():
        yield [one] * len(of.tasks)


def everything(of: Material) -> Iterator[Answers]:
    """Yield all options of the question, and all right answers of the data, at once."""
    options = [options_of(task) for task in of.tasks]
    lists = [[[*of.right]] * len(of.tasks)]
    lists += [[[*one] for one in options], [[*one.values()] for one in options]] if all(options) else []
    for contents in (each for each in lists if all(len({*one}) > 1 for one in each)):
        for separator in _SEPARATORS:
            yield from of.said([separator.join(dict.fromkeys(one)) for one in contents])
        written = [[of.best.write(part) for part in dict.fromkeys(one)] for one in contents]
        yield [Answer("\n".join(part.text for part in parts if part is not None)) for parts in written]


def constant(of: Material) -> Iterator[Answers]:
    """Yield one answer for all tasks: the most frequent right answers, and usual ones."""
    frequent = [one for one, _ in Counter(of.right).most_common(_FREQUENT)]
    for one in dict.fromkeys([*frequent, *_USUAL]):
        yield from of.same(one)


def calls_alone(of: Material) -> Iterator[Answers]:
    """Yield calls of tools, whose results nobody reads, and no answer: each alone, and all in one turn."""
    for calls in [*((call,) for call in of.calls), tuple(of.calls)]:
        if calls:
            yield [Answer("", calls)] * len(of.tasks)


def of_other_rows(of: Material) -> Iterator[Answers]:
    """Yield the right answer of the next, and of the previous, row whose right answer is another one."""
    for step in (1, -1):
        others = [_other(of.right, row, step) for row in range(len(of.right))]
        if all(one is not None for one in others):
            *_, written = of.said([one for one in others if one is not None])
            yield written


def malformed(of: Material) -> Iterator[Answers]:
    """Yield what a reward may fail to read."""
    for one in _MALFORMED:
        yield from of.same(one)


class Attack(NamedTuple):
    """A policy that does not read the task."""

    check: str
    answers: Callable[[Material], Iterator[Answers]]
    title: str
    """what is wrong if it earns as much as a right answer"""
    fix: str


ATTACKS = (
    Attack(
        "attack-empty",
        empty,
        "An empty answer earns as much as a right one",
        "give an empty answer the lowest score: '' is in every text, and has no wrong part",
    ),
    Attack(
        "attack-echo",
        echo,
        "The repeated prompt earns as much as a right answer",
        "read one final answer instead of looking for it anywhere in the response",
    ),
    Attack(
        "attack-format",
        empty_forms,
        "The answer format without content earns as much as a right answer",
        "compare what is inside the format, and give nothing for an empty one",
    ),
    Attack(
        "attack-everything",
        everything,
        "All answers at once earn as much as a right answer",
        "accept exactly one answer: the last one in the format, or none if there are several",
    ),
    Attack(
        "attack-constant",
        constant,
        "A constant answer earns as much as right ones",
        "compare each response with the right answer of its own row, and balance the answers of the data",
    ),
    Attack(
        "attack-calls",
        calls_alone,
        "Calls without an answer earn as much as a right answer",
        "score the answer, or what the calls have achieved, and not that there were calls",
    ),
    Attack(
        "attack-other-row",
        of_other_rows,
        "The right answer of another row earns as much as that of its own",
        "compare response number i with the right answer number i, and with nothing else",
    ),
    Attack(
        "attack-malformed",
        malformed,
        "A malformed answer earns as much as a right one",
        "give the lowest score to what cannot be read, and compare so that nan is never equal",
    ),
)


def _other(right: Sequence[str], row: int, step: int) -> str | None:
    rows = (right[(row + step * distance) % len(right)] for distance in range(1, len(right)))
    return next((one for one in rows if one != right[row]), None)

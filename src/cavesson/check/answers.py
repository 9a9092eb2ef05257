"""Right answers: the columns of the data that have them, and the forms in which a reward may expect them."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from cavesson.rollout.tools import Tool
from cavesson.rollout.types import Call
from cavesson.text.reach import reach

COLUMNS = (
    "ground_truth",
    "reward_model.ground_truth",
    "answer",
    "answers",
    "final_answer",
    "correct_answer",
    "expected_answer",
    "reference_answer",
    "expected",
    "reference",
    "target",
    "gold",
    "label",
    "answerKey",
    "solution",
    "canonical_solution",
    "code",
    "output",
)
"""Where data have right answers. Without any of them, every short column of the data may be one."""
_NOT_ANSWERS = {"prompt", "text", "messages", "environment", "tests", "test_list", "entry_point", "id", "source"}
_LONGEST, _MOST = 2000, 4
"""Characters of a value, and number of columns, that are tried where no column has a known name."""
_TAG = re.compile(r"<([A-Za-z][\w-]*)>")
_KEY = re.compile(r'"(\w+)"\s*:')
_MARK = re.compile(r"\b([A-Za-z][\w ]{0,20}?[:=]) ?(?=[<\[{$(…_]|\.{3}|X\b|your\b|the\b|answer\b)")
_BOX = re.compile(r"\\boxed\{(.*)\}", re.DOTALL)
_OPTION = re.compile(r"^\s*[(\[]?([A-H])[).:\]]\s+(.+)$", re.MULTILINE)
_LETTERS = "ABCDEFGH"
_THOUGHT = "<think>\nSo it is.\n</think>\n"
_PATTERNS = (
    "%s",
    r"\boxed{%s}",
    "<answer>%s</answer>",
    r"<answer>\boxed{%s}</answer>",
    "#### %s",
    "The answer is %s.",
    "The answer is: %s",
    "Answer: %s",
    "Final answer: %s",
    "**%s**",
    "(%s)",
    "```python\n%s\n```",
)
"""What people ask models for; `%s` is the answer."""


class Task(NamedTuple):
    """A row of the data that is asked."""

    prompt: str
    """as the policy reads it"""
    columns: dict[str, Any]
    """what rewards get of it, and an environment's `reset`"""

    @property
    def asked(self) -> str:
        """What the user asks: the last message of a conversation, or the whole prompt."""
        messages = self.columns.get("messages") or [{"content": self.prompt}]
        content = messages[-1].get("content")
        return content if isinstance(content, str) else self.prompt

    @property
    def instructions(self) -> str:
        """All that is said before the answer, without what the chat template adds."""
        messages = self.columns.get("messages") or [{"content": self.prompt}]
        return "\n".join(str(one.get("content") or "") for one in messages)


class Answer(NamedTuple):
    """What a policy says to a task: calls of tools in its first turn, if any, and a text in its last."""

    text: str
    calls: tuple[Call, ...] = ()

    def __str__(self) -> str:
        calls = [f"{one.name}({', '.join(f'{k}={v!r}' for k, v in one.arguments.items())})" for one in self.calls]
        return " ".join([*calls, self.text]) if calls and self.text else "".join([*calls, self.text])


class Form(NamedTuple):
    """A way in which content reaches a reward."""

    write: Callable[[str], Answer | None]
    """returns None for content that cannot be written in this form"""
    empty: tuple[Answer, ...] = ()
    """the form without content"""


def answer_columns(tasks: Sequence[Task]) -> list[str]:
    """Return the columns that may have right answers."""
    known = [name for name in COLUMNS if all(_value(task, name) not in (None, "", [], {}) for task in tasks)]
    if known:
        return known
    names = [name for name in tasks[0].columns if name not in _NOT_ANSWERS] if tasks else []
    return [name for name in names if all(_may_be_answer(task, name) for task in tasks)][:_MOST]


def right_answers(tasks: Sequence[Task], columns: Sequence[str]) -> list[list[str]]:
    """Return what may be the right answers to all tasks: whole values, their final answers, and options they name."""
    found = [[text(_value(task, name)) for task in tasks] for name in columns]
    found += [[_final(one) for one in values] for values in [*found]]
    options = [options_of(task) for task in tasks]
    if all(options):
        values = [[_value(task, name) for task in tasks] for name in columns]
        found += [[_letter(one, o) for one, o in zip(v, options, strict=True)] for v in values]
        found += [[_option(one, o) for one, o in zip(v, options, strict=True)] for v in values]
    unique = {tuple(values): values for values in found}
    return list(unique.values())


def with_answers_of(task: Task, other: Task, columns: Sequence[str]) -> Task:
    """Return a task with the right answers of another one."""
    changed = {name.partition(".")[0]: other.columns[name.partition(".")[0]] for name in columns}
    return task._replace(columns={**task.columns, **changed})


def options_of(task: Task) -> dict[str, str]:
    """Return the options of a multiple-choice question by their letters; none if it is not one."""
    given = next((task.columns[name] for name in ("choices", "options") if task.columns.get(name)), None)
    if isinstance(given, Mapping) and {"text", "label"} <= {*given}:  # as in ARC
        return {str(label): str(one) for label, one in zip(given["label"], given["text"], strict=False)}
    if isinstance(given, Mapping):
        return {str(label): str(one) for label, one in given.items()}
    if isinstance(given, list | tuple):
        return {letter: str(one) for letter, one in zip(_LETTERS, given, strict=False)}
    found = dict(_OPTION.findall(task.instructions))
    return found if len(found) > 1 else {}


def forms_of(tasks: Sequence[Task], tools: Mapping[str, Tool], reads_text: bool = True) -> list[Form]:
    """Return the forms that the instructions of the tasks ask for, the usual ones, and calls of the policy's tools.

    If the reward does not read texts, as an environment's own, it knows only calls.
    """
    called = [_called(tool, name) for tool in tools.values() for name in _parameters(tool)]
    if not reads_text:
        return [_written("%s"), *called]
    patterns = [*_PATTERNS, *_asked_for(tasks)]
    written = [*map(_written, dict.fromkeys(patterns)), _object(["answer"]), _object(["final_answer"])]
    keys = _common(_KEY, tasks)
    written += [_object(keys)] if keys else []
    first = tuple(blank_call(tool) for tool in tools.values())
    after = [_after(first, form) for form in written] if tools else []
    return [*written, *(_written(f"{_THOUGHT}{pattern}") for pattern in patterns), *called, *after]


def _asked_for(tasks: Sequence[Task]) -> list[str]:
    """Return patterns of answers that all instructions name: after a mark, such as `Answer:`, or in tags."""
    phrases, tags = _common(_MARK, tasks), _common(_TAG, tasks)
    marks = dict.fromkeys([*phrases, *(phrase.split()[-1] for phrase in phrases)])
    patterns = [f"{mark} %s" for mark in marks] + [f"<{tag}>%s</{tag}>" for tag in tags]
    if len(tags) > 1:
        *before, last = tags
        patterns.append("".join(f"<{tag}>\nSo it is.\n</{tag}>\n" for tag in before) + f"<{last}>\n%s\n</{last}>")
    return patterns


def _common(pattern: re.Pattern[str], tasks: Sequence[Task]) -> list[str]:
    """Return what a pattern finds in the instructions of all tasks."""
    found = [dict.fromkeys(pattern.findall(task.instructions)) for task in tasks]
    return [one for one in found[0] if all(one in others for others in found)] if found else []


def blank_call(tool: Tool) -> Call:
    """Return a call of a tool with any arguments that its schema allows."""
    properties = _parameters(tool)
    required = tool.schema["function"]["parameters"].get("required", ())
    return Call(tool.name, {name: _any(properties[name]) for name in required})


def text(value: Any) -> str:
    """Return a right answer as a policy would write it; of several that are accepted, the first."""
    if isinstance(value, Mapping) and "text" in value:  # as in SQuAD
        return text(value["text"])
    if isinstance(value, list | tuple) and value and not isinstance(value[0], Mapping | list):
        return text(value[0])
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _value(task: Task, name: str) -> Any:
    return next(iter(reach(task.columns, name)), None)


def _may_be_answer(task: Task, name: str) -> bool:
    value = task.columns[name]
    is_short = isinstance(value, int | float) or (isinstance(value, str) and 0 < len(value) <= _LONGEST)
    return is_short and str(value) not in task.prompt


def _final(answer: str) -> str:
    """Return what a worked answer ends with: the content of its box or tag, or what comes after its mark."""
    boxed, tagged = _BOX.search(answer), re.search(r"<answer>(.*?)</answer>", answer, re.DOTALL)
    found = boxed[1] if boxed else tagged[1] if tagged else answer.rpartition("####")[2]
    return found.strip()


def _letter(value: Any, options: Mapping[str, str]) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(options):
        return [*options][value]
    return next((letter for letter, one in options.items() if one == str(value)), text(value))


def _option(value: Any, options: Mapping[str, str]) -> str:
    letter = _letter(value, options)
    return options.get(letter, letter)


def _written(pattern: str) -> Form:
    def write(content: str) -> Answer:
        return Answer(pattern.replace("%s", content))

    return Form(write, (write(""),))


def _object(names: Sequence[str]) -> Form:
    def write(content: str) -> Answer:
        return Answer(json.dumps(dict.fromkeys(names, _json(content)), ensure_ascii=False))

    return Form(
        write, (Answer(json.dumps(dict.fromkeys(names, ""))), Answer(json.dumps(dict.fromkeys(names))), Answer("{}"))
    )


def _after(calls: tuple[Call, ...], form: Form) -> Form:
    def write(content: str) -> Answer | None:
        said = form.write(content)
        return said and said._replace(calls=calls)

    return Form(write, tuple(one._replace(calls=calls) for one in form.empty))


def _called(tool: Tool, name: str) -> Form:
    """Return the form in which an answer is an argument of a tool."""
    kind = _parameters(tool)[name].get("type")
    blank = blank_call(tool)

    def write(content: str) -> Answer | None:
        value = content if kind in ("string", None) else _json(content)
        if kind in ("integer", "number") and not isinstance(value, int | float):
            return None
        return Answer(content, (blank._replace(arguments={**blank.arguments, name: value}),))

    empty = write("")
    return Form(write, () if empty is None else (empty,))


def _parameters(tool: Tool) -> dict[str, Any]:
    properties: dict[str, Any] = tool.schema["function"]["parameters"].get("properties", {})
    return properties


def _any(schema: Mapping[str, Any]) -> Any:
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type")
    values = {"string": "text", "integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}
    return values.get(kind) if isinstance(kind, str) else None


def _json(content: str) -> Any:
    """Return the JSON value that a text is, or the text."""
    try:
        return json.loads(content)
    except ValueError:
        return content

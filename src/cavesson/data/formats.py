"""The formats of rows: how each is recognised by its columns, and how it is converted."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn, TypeVar

from cavesson.data import human_assistant, lmflow
from cavesson.data.conversations import Turns, answered, ask, renamed, split, split_last, turns_of
from cavesson.data.fields import Fields, Skip
from cavesson.data.questions import QUESTIONS, asked, preference, said
from cavesson.data.types import Answered, Content, Demonstration, Labelled, Pair, Prompt
from cavesson.errors import UserError

R = TypeVar("R", bound=Prompt | Demonstration | Pair | Labelled)
Kind = type[object]
"""Prompt, Answered, Demonstration, Pair or Labelled."""
Values = Mapping[str, Any]

NAMES: dict[Kind, str] = {
    Prompt: "prompts", Answered: "prompts with a response", Demonstration: "demonstrations", Pair: "pairs",
    Labelled: "labelled responses",
}  # fmt: skip


@dataclass(frozen=True)
class RowFormat:
    """How rows with certain columns are read."""

    gives: Kind
    """what a row is: a prompt, a demonstration or a pair, from which it can become another kind, see `gives_too`"""
    columns: tuple[str, ...]
    """columns every row has"""
    prompt: Callable[[Fields], Content | Pair]
    """what the row asks, or a pair that has it"""
    read: Callable[[Fields], Demonstration | Pair] | None = None
    """the demonstration or pair; nothing where a row is a prompt only"""
    optional: tuple[str, ...] = ()
    """columns that are read too where they are there"""
    when: Callable[[Values], bool] | None = None
    """what must hold for the values, where the columns do not tell"""
    by_name: bool = False
    """whether only the settings or the file itself can say that this is the format"""

    def gives_too(self, kind: Kind) -> bool:
        """Return whether rows of this format can become that kind.

        Every row has a prompt. A pair is also a demonstration of what was chosen, and two labelled responses; a
        demonstration with a label is a labelled response. Pairs and demonstrations answer their prompts, except plain
        texts, which have none.
        """
        if kind is Answered:
            return self.read not in (None, plain_text)
        return kind in (Prompt, self.gives) or self.gives is Pair or (kind is Labelled and "label" in self.optional)

    def fits(self, values: Values) -> bool:
        """Return whether a row looks like this format."""
        there = not self.by_name and all(column in values for column in self.columns)
        return there and (self.when is None or self.when(values))

    def beats(self, other: "RowFormat", values: Values) -> bool:
        """Return whether this format covers more of a row: more columns, or the same columns and their values."""
        mine, others = self.used(values), other.used(values)
        return mine > others or (mine == others and self.when is not None and other.when is None)

    def used(self, values: Values) -> set[str]:
        """Return the columns of a row that this format reads."""
        return {column for column in (*self.columns, *self.optional) if column in values}


def content(column: str) -> Callable[[Fields], Content]:
    return lambda fields: fields.content(column)


def plain_text(fields: Fields) -> Demonstration:
    return Demonstration("", fields.text("text"))


def sharegpt_turns(fields: Fields) -> Turns:
    return renamed(turns_of(fields, "conversations", role="from", content="value"))


def listed(fields: Fields) -> str:
    """Return the question to several candidate answers, which stay in the column `output`."""
    fields.texts("output")
    return fields.text("input")


def refuse(why: str, fields: Fields) -> NoReturn:
    raise UserError(f"{fields.place}: {why}")


def _answers(
    question: str, answer: str, optional: tuple[str, ...] = (), when: Callable[[Values], bool] | None = None
) -> RowFormat:
    """Return a format of questions in one column and answers in another."""

    def read(fields: Fields) -> Demonstration:
        prompt, response = asked(question, fields, said(answer, fields))
        return Demonstration(prompt, response)

    return RowFormat(
        Demonstration,
        (question, answer),
        lambda fields: asked(question, fields)[0],
        read,
        (*optional, *_AROUND, "label"),
        when,
    )


def _pairs(
    read: Callable[[Fields], Pair],
    columns: tuple[str, str] = ("chosen", "rejected"),
    optional: tuple[str, ...] = (),
    when: Callable[[Values], bool] | None = None,
) -> RowFormat:
    """Return a format of pairs whose prompt is found by reading both responses."""
    return RowFormat(Pair, columns, read, read, optional, when)


def _conversations(
    column: str, turns: Callable[[Fields], Turns], used: Callable[[Fields], Turns] | None = None, by_name: bool = False
) -> RowFormat:
    """Return a format of conversations in one column; the response is everything from the first answer on.

    `turns` reads all turns, the last of which may be a question; `used` those up to the last answer (None =
    `answered`).
    """

    def read(fields: Fields) -> Demonstration:
        return Demonstration(*split(used(fields) if used else answered(turns(fields), fields)))

    optional = ("system", "tools", "label")
    return RowFormat(Demonstration, (column,), lambda fields: ask(turns(fields)), read, optional, by_name=by_name)


_no_images = partial(refuse, "image_text contains images, and Cavesson trains on text only")
_no_numbers = partial(refuse, "float_only contains numbers, and Cavesson trains on text only")
_refused = (_no_images, _no_numbers)
_dialogue = human_assistant.holds_dialogue
_AROUND = ("context", "system", "history", "tools")
"""Columns that belong to a question in a text."""

FORMATS: dict[str, RowFormat] = {
    # TRL's formats, for texts or conversations.
    "text": RowFormat(Demonstration, ("text",), content("text"), plain_text),
    "prompt": RowFormat(Prompt, ("prompt",), lambda fields: asked("prompt", fields)[0], optional=_AROUND),
    "prompt_completion": _answers("prompt", "completion"),
    "messages": _conversations("messages", turns_of),
    "preference": _pairs(preference, optional=(*QUESTIONS, *_AROUND, "margin")),
    # Texts under other names; prompt_response is the usual result of a column mapping.
    "prompt_response": _answers("prompt", "response"),
    "question_answer": _answers("question", "answer"),
    "question_response": _answers("question", "response"),
    "alpaca": _answers("instruction", "output", ("input",)),
    "instruction_response": _answers("instruction", "response", ("input",)),
    "sharegpt": _conversations("conversations", sharegpt_turns),
    # HH-RLHF's conversations in one text.
    "human_assistant": _pairs(
        human_assistant.pair,
        optional=(*QUESTIONS, *_AROUND, "margin"),
        when=lambda values: _dialogue("prompt" if values.get("prompt") else "chosen", values),
    ),
    "human_assistant_text": RowFormat(
        Demonstration,
        ("text",),
        partial(human_assistant.prompt, "text"),
        human_assistant.demonstration,
        ("label",),
        partial(_dialogue, "text"),
    ),
    "human_assistant_prompt": RowFormat(
        Prompt,
        ("prompt",),
        partial(human_assistant.prompt, "prompt"),
        optional=_AROUND,
        when=partial(_dialogue, "prompt"),
    ),
    # LMFlow's types; text_only is `text` and paired_text_to_text is `preference` (see lmflow.py).
    "text2text": _answers("input", "output", when=lambda values: not isinstance(values["output"], list)),
    "conversation": _conversations("messages", lmflow.turns, lmflow.in_pairs, by_name=True),
    "paired_conversation": _pairs(
        lmflow.paired_conversation,
        optional=("margin",),
        when=lambda values: lmflow.holds_messages(values, "chosen", "rejected"),
    ),
    "positive_negative": _pairs(lmflow.positive_negative, ("positive", "negative")),
    "text_to_textlist": RowFormat(Prompt, ("input", "output"), listed, when=partial(lmflow.holds_list_of, str)),
    "text_to_scored_textlist": RowFormat(
        Pair,
        ("input", "output"),
        lambda fields: fields.text("input"),
        lmflow.scored_pair,
        when=partial(lmflow.holds_list_of, dict),
    ),
    "image_text": RowFormat(Demonstration, ("images", "text"), _no_images, _no_images),
    "float_only": RowFormat(Demonstration, ("value",), _no_numbers, _no_numbers),
}
"""Every format. A row is read as the one that explains most of its columns."""


def recognise(values: Values, kind: Kind, place: str) -> str:
    """Return the name of the format of a row.

    A format that gives the kind directly is preferred to one from which it can be derived.

    Raises:
        UserError: no format fits, or several do equally well.
    """
    fitting = {name: format for name, format in FORMATS.items() if format.gives_too(kind) and format.fits(values)}
    same = {name: format for name, format in fitting.items() if format.gives is kind}
    left = same or fitting
    best = [name for name, mine in left.items() if not any(other.beats(mine, values) for other in left.values())]
    if len(best) > 1:
        raise UserError(f"{place}: the columns fit {' and '.join(best)}; choose one: {_choices(best, values)}")
    if not best:
        raise UserError(
            f"{place}: the columns {', '.join(values) or '(none)'} fit no format of {NAMES[kind]} ({_shapes(kind)}); "
            f"map the columns with data.columns{_example(values)}"
        )
    return best[0]


def named(name: str) -> RowFormat:
    """Return the format with this name, which may also be a name of LMFlow's, or raise a UserError."""
    format = FORMATS.get(lmflow.TYPES.get(name, name))
    if format is None:
        raise UserError(f"data.format: there is no format {name!r}; formats are {', '.join(FORMATS)}")
    return format


def convert(name: str, fields: Fields, kind: type[R]) -> tuple[R, ...]:
    """Convert a row to the wanted kind: one of it, or two labelled responses of a pair.

    Raises:
        UserError: the format cannot become that kind, or a field is not what the format expects.
        Skip: this row cannot be used.
    """
    format = named(name)
    if not format.gives_too(kind):
        raise UserError(f"{fields.place}: {name} gives {NAMES[format.gives]}, and {NAMES[kind]} are needed")
    made: list[Any]
    if issubclass(kind, Prompt):
        asks = format.prompt(fields)
        prompt, tools = (asks.prompt, asks.tools) if isinstance(asks, Pair) else (asks, ())
        made = [Prompt(prompt, tools=tools) if kind is Prompt else _with_response(format, fields)]
    else:
        assert format.read is not None
        made = _answered(format.read(fields), format, fields, kind)
    if "tools" in format.optional:
        made = [replace(one, tools=fields.tools() or one.tools) for one in made]
    if issubclass(kind, Prompt):
        made = [replace(one, columns=fields.of_data()) for one in made]
    return tuple(made)


def _with_response(format: RowFormat, fields: Fields) -> Answered:
    """Return the prompt of a row with its response; of a conversation, that is the last answer.

    Raises:
        UserError: the row has no response.
    """
    assert format.read is not None
    try:
        (row,) = _answered(format.read(fields), format, fields, Demonstration)
    except Skip as skip:
        raise UserError(f"{fields.place} has no response that could be given: {skip}") from None
    prompt, response = row.prompt, row.response
    if len(format.columns) == 1 and not isinstance(prompt, str) and not isinstance(response, str):
        prompt, response = (*prompt, *response[:-1]), response[-1:]
    return Answered(prompt, tools=row.tools, response=response)


def _answered(row: Demonstration | Pair, format: RowFormat, fields: Fields, kind: Kind) -> list[Any]:
    """Return a row with responses as the wanted kind."""
    if isinstance(row, Pair):
        if kind is Labelled:
            sides = ((row.chosen, True), (row.rejected, False))
            return [Labelled(row.prompt, response, label, row.tools) for response, label in sides]
        return [row if kind is Pair else Demonstration(row.prompt, row.chosen, row.tools)]
    if kind is Labelled:
        prompt, response = row.prompt, row.response
        if len(format.columns) == 1 and not isinstance(prompt, str) and not isinstance(response, str):
            # A label on a conversation is about its end, where a demonstration has all answers.
            prompt, response = split_last((*prompt, *response))
        return [Labelled(prompt, response, fields.truth("label"))]
    if "label" in format.optional and fields.has("label") and not fields.truth("label"):
        raise Skip("responses whose label is false are skipped")
    return [row]


def _choices(names: Sequence[str], values: Values) -> str:
    """Return, for each of these formats, the setting that leaves out what the others read."""
    used = {name: FORMATS[name].used(values) for name in names}
    every = set().union(*used.values())
    left_out = {name: [column for column in values if column in every - used[name]] for name in names}
    return ", or ".join(f"data.ignore = {json.dumps(columns)} for {name}" for name, columns in left_out.items())


def _example(values: Values) -> str:
    question = next((name for name in ("question", "instruction", "query", "problem") if name in values), None)
    return f', such as {{prompt = "{question}"}}' if question else ""


def _shapes(kind: Kind) -> str:
    """Return the columns by which a kind is recognised, as text for a message."""
    usable = [format for format in FORMATS.values() if format.prompt not in _refused]
    if kind is Labelled:
        named = [(*format.columns, "label") for format in usable if "label" in format.optional]
        named += [format.columns for format in usable if format.gives is Pair]
    else:
        named = [
            format.columns for format in usable if format.gives is kind or (kind is Answered and format.gives_too(kind))
        ]
    return ", or ".join(dict.fromkeys(" + ".join(columns) for columns in named))

"""How a reward is called: with prompts, responses and columns, or as TRL calls its reward functions."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from cavesson.errors import UserCodeError
from cavesson.functions import line_of

_PROMPTS, _RESPONSES = {"prompt", "prompts"}, {"response", "responses", "completion"}
_OURS = "(prompts, responses, **columns)"
MESSAGES = "messages"
"""The column with the messages of a prompt that is a conversation."""


class Judged(NamedTuple):
    """What rewards judge: B responses, with their prompts and the columns of the data."""

    prompts: Sequence[str]
    responses: Sequence[str]
    columns: Mapping[str, Any]
    ids: Sequence[Sequence[int]] | None = None
    """token ids of the responses, if they are known"""


class Arguments(NamedTuple):
    """The arguments of one call."""

    positional: list[Any]
    named: dict[str, Any]


def arguments(function: Callable[..., Any], name: str, judged: Judged) -> Arguments:
    """Return the arguments that a reward gets; without a `**` parameter, only the columns that it names.

    A function with a parameter `completions` is called as TRL calls it: by keyword, and with messages instead of texts
    for prompts that are conversations.

    Raises:
        UserCodeError: it cannot be called with them.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C have no signature
        return Arguments([[*judged.prompts], [*judged.responses]], dict(judged.columns))
    is_trl = "completions" in signature.parameters
    texts = [] if is_trl else [[*judged.prompts], [*judged.responses]]
    offered = {**judged.columns, **_of_trl(judged)} if is_trl else judged.columns
    named = _taken(signature, offered, len(texts))
    problem = next(_problems(signature, texts, named), None)
    if problem is None:
        return Arguments(texts, named)
    columns = judged.columns
    has = f"; the data has {', '.join(columns)} besides the prompt" if columns else "; the data has no other column"
    way = "(prompts=, completions=, completion_ids=, **columns), as by TRL" if is_trl else _OURS
    raise UserCodeError(
        f"the reward {name}{signature}{line_of(function)} {problem}\na reward is called with {way}{has}"
    )


def _of_trl(judged: Judged) -> dict[str, Any]:
    messages = judged.columns.get(MESSAGES) or [None] * len(judged.prompts)
    prompts = [text if some is None else some for text, some in zip(judged.prompts, messages, strict=True)]
    completions = [
        text if some is None else [{"role": "assistant", "content": text}]
        for text, some in zip(judged.responses, messages, strict=True)
    ]
    ids = {} if judged.ids is None else {"completion_ids": [[*row] for row in judged.ids]}
    return {"prompts": prompts, "completions": completions, **ids}


def _taken(signature: inspect.Signature, offered: Mapping[str, Any], positional: int) -> dict[str, Any]:
    parameters = [*signature.parameters.values()]
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
    # The data may have a column called prompt or response, as the first two parameters may be.
    first = {p.name for p in parameters[:positional] if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)}
    named = {one.name for one in parameters} - first
    return {key: value for key, value in offered.items() if key not in first and (takes_all or key in named)}


def _problems(signature: inspect.Signature, texts: Sequence[Any], named: Mapping[str, Any]) -> Iterator[str]:
    """Yield reasons why a function cannot be called as a reward, or would get an argument in the wrong place.

    Rewards written for other trainers may have another order of arguments.
    """
    positional = [n for n, p in signature.parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    for place, parameter in enumerate(positional if texts else ()):
        if (parameter in _PROMPTS and place != 0) or (parameter in _RESPONSES and place != 1):
            yield f"takes {parameter} as argument {place + 1}"
    try:
        signature.bind(*texts, **named)
    except TypeError as error:
        yield f"cannot be called: {error}"

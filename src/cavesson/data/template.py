"""One chat template: what it reads, and what it writes at the time that a run began."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from threading import Lock
from typing import Any, NamedTuple

from jinja2 import Environment, TemplateSyntaxError, meta
from transformers.utils import chat_template_utils

from cavesson.data.special_tokens import Span
from cavesson.errors import UserError

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_MARKS = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
_CLOCK = "strftime_now"
_one_at_a_time = Lock()  # transformers compiles a template once per process, and its clock belongs to all renderings
_now: datetime | None = None


class Template(NamedTuple):
    """A chat template with the values it is rendered with."""

    source: str
    options: Mapping[str, Any]
    """further variables, such as `enable_thinking`"""

    @property
    def marks_answers(self) -> bool:
        """Whether `{% generation %}` marks what the assistant writes."""
        return bool(_GENERATION.search(self.source))

    @property
    def opens_answers(self) -> bool:
        """Whether it can write where an answer begins."""
        return "add_generation_prompt" in variables(self.source)

    def write(
        self, messages: list[dict[str, Any]], tools: list[Any], *, answer: bool, marked: bool
    ) -> tuple[str, list[Span]]:
        """Return the text of a conversation, and the spans that `{% generation %}` marks if `marked` is set."""
        with _one_at_a_time, _clock_of(self.source):
            # The function behind `apply_chat_template`, which does not return positions in the text.
            rendered: Any = chat_template_utils.render_jinja_template(
                [messages],
                tools=tools or None,
                chat_template=self.source,
                add_generation_prompt=answer,
                return_assistant_tokens_mask=marked,
                **self.options,
            )
        (text,), spans = rendered
        return text, spans[0] if marked else []


@lru_cache(maxsize=8)
def variables(source: str) -> frozenset[str]:
    """Return the names that a template takes from outside, such as `messages` or `tools`; raise a UserError if it is
    none.
    """
    try:
        parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_MARKS.sub("", source))
    except TemplateSyntaxError as error:
        raise UserError(f"the chat template is not valid: line {error.lineno}: {error.message}") from None
    return frozenset(meta.find_undeclared_variables(parsed))


def template_time() -> datetime:
    """Return the present time as templates read it: local, without a time zone."""
    text, _ = Template("{{ strftime_now('%Y-%m-%dT%H:%M:%S') }}", {}).write([], [], answer=False, marked=False)
    return datetime.fromisoformat(text)


@contextmanager
def templates_at(now: datetime | None) -> Iterator[None]:
    """Make this the present time of all templates inside the block, in all threads; None = the time of rendering.

    A run renders its conversations at the time it began, so that a template that writes today's date writes the same
    tokens when the run is resumed.
    """
    global _now
    before, _now = _now, now
    try:
        yield
    finally:
        _now = before


@contextmanager
def _clock_of(source: str) -> Iterator[None]:
    names = chat_template_utils._compile_jinja_template(source).environment.globals
    original = names[_CLOCK]
    names[_CLOCK] = original if _now is None else _now.strftime
    try:
        yield
    finally:
        names[_CLOCK] = original

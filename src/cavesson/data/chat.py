"""Conversations as text: rendering with a chat template."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from cavesson.config_paths import expanded
from cavesson.data.readings import readings
from cavesson.data.settings import ChatSettings, SpecialTokenMode
from cavesson.data.special_tokens import Span, SpecialTokens, Written
from cavesson.data.template import Template, variables
from cavesson.data.types import SYSTEM, Content, Turn, texts_in
from cavesson.errors import UserError, first_line

Tools = Sequence[Mapping[str, Any]]


class Unrenderable(UserError):
    """A conversation that the chat template cannot render, or of which it writes nothing to learn."""


@dataclass(frozen=True)
class Chat:
    """Renders conversations with a chat template."""

    tokenizer: PreTrainedTokenizerBase
    own_template: str | None = None
    """instead of the tokenizer's"""
    system: str | None = None
    """content of a system turn for conversations without one"""
    of_texts: bool = False
    """whether plain texts become conversations"""
    special_tokens: SpecialTokenMode = "text"
    """how special tokens in what is said are read"""
    options: Mapping[str, Any] = field(default_factory=dict)
    """further variables of the template"""
    stays_plain: bool = False
    """whether the settings say that plain texts stay plain, although there may be a template"""

    @classmethod
    def of(cls, settings: ChatSettings, tokenizer: PreTrainedTokenizerBase) -> "Chat":
        """Build the renderer for these settings; raise a UserError if the template's file cannot be read."""
        return cls(
            tokenizer,
            read_template(settings.template),
            settings.system,
            settings.chat,
            settings.special_tokens,
            settings.template_options,
            "chat" in settings.model_fields_set and not settings.chat,
        )

    @property
    def has_template(self) -> bool:
        """Whether there is a chat template for conversations without tools."""
        return bool(self.own_template or self.tokenizer.chat_template)

    def turns(self, content: Content, role: str) -> Content:
        """Wrap a plain text in a turn if `of_texts` is set; an empty prompt gives no turn."""
        if not self.of_texts or not isinstance(content, str):
            return content
        return (Turn(role, content),) if content or role == "assistant" else ()

    def opened(self, prompt: Sequence[Turn]) -> tuple[Turn, ...]:
        """Return the turns of a prompt, with the default system turn first unless the prompt has its own."""
        if self.system is None or (prompt and prompt[0].role in SYSTEM):
            return tuple(prompt)
        return (Turn("system", self.system), *prompt)

    def plain(self, text: str) -> Written:
        """Return a text without turns, with its special tokens read as `special_tokens` says."""
        return Written(text, () if self.special_tokens == "text" else self.special.spans(text))

    def render(self, turns: Sequence[Turn], tools: Tools = (), *, answer: bool = False) -> Written:
        """Return the text of a conversation; with `answer`, it ends where the assistant's next turn begins.

        Raises:
            UserError: there is no template, or it cannot render these turns.
        """
        return self._render(turns, tools, answer=answer)[0]

    def answer(self, turns: Sequence[Turn], tools: Tools = ()) -> tuple[Written, list[Span]]:
        """Return the text of a conversation that ends with an answer, and the spans of it that its template marks.

        Only for templates with `{% generation %}`, which can mark several parts of an answer.
        """
        text, spans = self._render(turns, tools, marked=True)
        # Turns before the answer may be marked too. They end where the text without the answer does.
        start = common_prefix(text, self.render(turns[:-1], tools))
        return text, [span for span in spans if span[0] >= start]

    def template(self, tools: Tools = ()) -> Template:
        """Return the template for a conversation with these tools.

        Raises:
            UserError: there is none, it is not valid, or it does not read an option.
        """
        if self.own_template is None and not self.tokenizer.chat_template:
            raise UserError(
                "this is a conversation, but the tokenizer has no chat template; set data.template (chat: --template)"
            )
        source = self.tokenizer.get_chat_template(self.own_template, [dict(tool) for tool in tools] or None)
        unread = sorted(set(self.options) - variables(source))
        if unread:
            raise UserError(f"data.template_options: the chat template does not read {unread[0]!r}; remove it")
        return Template(source, {**self.tokenizer.special_tokens_map, **self.options})

    def _render(
        self, turns: Sequence[Turn], tools: Tools, *, answer: bool = False, marked: bool = False
    ) -> tuple[Written, list[Span]]:
        template, messages, offered = self.template(tools), [turn.message for turn in turns], [*map(dict, tools)]
        # The texts of messages must not be mistaken for special tokens in the rendered text.
        disguise = self.special.disguise(texts_in([messages, offered]) if self.special_tokens == "text" else [])
        write = partial(template.write, tools=disguise.on(offered), answer=answer, marked=marked)
        failure: str | None = None
        for reading in readings(disguise.on(messages)):
            try:
                text, spans = write(reading.messages)
                failure = reading.misfit(text, lambda others: write(others)[0])
            except (TemplateError, TypeError, ValueError) as error:
                failure = first_line(error)
            if failure is None:
                return Written(disguise.off(text), self.special.spans(text)), spans
        raise Unrenderable(f"the chat template cannot render this conversation: {failure}")

    @cached_property
    def special(self) -> SpecialTokens:
        """The special tokens of the tokenizer."""
        return SpecialTokens(self.tokenizer)

    @cached_property
    def ordinary(self) -> tuple[str, ...]:
        """Added tokens that are not special and so are read as ordinary text."""
        added = {token.content for token in self.tokenizer.added_tokens_decoder.values()}
        return tuple(added - set(self.special.names))


def common_prefix(a: str, b: str) -> int:
    """Return the number of characters that both texts begin with."""
    return next((at for at, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), min(len(a), len(b)))


def read_template(template: str | None) -> str | None:
    """Return the text of a template, given as a file or as the template itself.

    Raises:
        UserError: the file cannot be read.
    """
    if template is None or "{{" in template or "{%" in template:
        return template
    try:
        return expanded(template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"data.template: cannot read {template!r} ({error}); give a .jinja file or a template"
        ) from None

"""Conversations as text: rendering with a chat template, and the spans of the assistant's turns in the result."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from cavesson.config_paths import expanded
from cavesson.data.settings import ChatSettings, SpecialTokenMode
from cavesson.data.special_tokens import Span, SpecialTokens, Written
from cavesson.data.types import Content, Turn, texts_in
from cavesson.errors import UserError, first_line

Tools = Sequence[Mapping[str, Any]]
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


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

    @classmethod
    def of(cls, settings: ChatSettings, tokenizer: PreTrainedTokenizerBase) -> "Chat":
        """Build the renderer for these settings.

        Raises:
            UserError: the template's file cannot be read.
        """
        return cls(tokenizer, read_template(settings.template), settings.system, settings.chat, settings.special_tokens)

    def turns(self, content: Content, role: str) -> Content:
        """Wrap a plain text in a turn if `of_texts` is set; an empty prompt gives no turn."""
        if not self.of_texts or not isinstance(content, str):
            return content
        return (Turn(role, content),) if content or role == "assistant" else ()

    def opened(self, prompt: Sequence[Turn]) -> tuple[Turn, ...]:
        """Return the turns of a prompt, with the default system turn first unless the prompt has its own."""
        if self.system is None or (prompt and prompt[0].role == "system"):
            return tuple(prompt)
        return (Turn("system", self.system), *prompt)

    def plain(self, text: str) -> Written:
        """Return a text without turns, with its special tokens read as `special_tokens` says."""
        return Written(text) if self.special_tokens == "text" else self.special.as_control(text)

    def render(self, turns: Sequence[Turn], tools: Tools = (), *, answer: bool = False) -> Written:
        """Return the text of a conversation; with `answer`, it ends where the assistant's next turn begins.

        Raises:
            UserError: there is no template, or it cannot render these turns.
        """
        return self._render(turns, tools, answer=answer)[0]

    def spans(self, turns: Sequence[Turn], first: int = 0, tools: Tools = ()) -> tuple[Written, list[Span]]:
        """Return the text of a conversation, and the spans of the assistant's turns from turn number `first` on.

        If the template has `{% generation %}`, its marks give the spans. Otherwise a span begins where an answer would
        begin, and ends with the last special token of the turn: a model that stops at its end token does not generate
        what follows, such as the line break of ChatML.

        Raises:
            UserError: the spans cannot be determined from the template.
        """
        speaks = [number for number, turn in enumerate(turns) if turn.role == "assistant"]
        marked = bool(_GENERATION.search(self._template(tools)))
        text, spans = self._render(turns, tools, marked=marked)
        if not marked:
            return text, [self._between(text, turns, number, tools) for number in speaks if number >= first]
        earlier = sum(number < first for number in speaks)
        if earlier and len(spans) != len(speaks):
            raise UserError(
                f"the chat template marks {len(spans)} parts in {len(speaks)} turns of the assistant; "
                "it must mark one per turn, with {% generation %} … {% endgeneration %}"
            )
        return text, spans[earlier:]

    def _between(self, text: Written, turns: Sequence[Turn], number: int, tools: Tools) -> Span:
        if number == 0:
            raise UserError("the assistant speaks first; there must be a turn before it")
        before = self.render(turns[:number], tools, answer=True)
        after: str = self.render(turns[: number + 1], tools)
        if not text.startswith(after):
            # Some templates, such as Phi-3's, write the end token only after the last turn.
            after = after.removesuffix(str(self.tokenizer.eos_token))
        if not (text.startswith(after) and after.startswith(before)):
            raise UserError(
                f"the chat template renders turn {number + 1}, the assistant's, differently when it asks for it or if "
                "other turns follow, so the tokens to learn are unknown; set data.template to a template with "
                "{% generation %}"
            )
        stripped = len(after.rstrip())
        ends = any(end == stripped for _, end in text.control) or after.rstrip().endswith(self._ordinary)
        return len(before), stripped if ends else len(after)

    def _render(
        self, turns: Sequence[Turn], tools: Tools, *, answer: bool = False, marked: bool = False
    ) -> tuple[Written, list[Span]]:
        special: dict[str, Any] = self.tokenizer.special_tokens_map
        listed = [dict(tool) for tool in tools]
        # The contents of turns must not be mistaken for special tokens in the rendered text.
        messages = [turn.message for turn in turns]
        hidden = texts_in([messages, listed]) if self.special_tokens == "text" else []
        disguise = self.special.disguise(hidden)
        rendered: Any
        try:
            # The function behind `apply_chat_template`, which does not return positions in the text.
            rendered = render_jinja_template(
                [disguise.on(messages)],
                tools=disguise.on(listed) or None,
                chat_template=self._template(tools),
                add_generation_prompt=answer,
                return_assistant_tokens_mask=marked,
                **special,
            )
        except (TemplateError, TypeError) as error:
            reason = first_line(error)
            raise UserError(f"the chat template cannot render this conversation: {reason}") from None
        (text,), spans = rendered
        return Written(disguise.off(text), self.special.spans(text)), spans[0] if marked else []

    def _template(self, tools: Tools) -> str:
        if self.own_template is None and not self.tokenizer.chat_template:
            raise UserError(
                "this is a conversation, but the tokenizer has no chat template; set data.template (chat: --template)"
            )
        template: str = self.tokenizer.get_chat_template(self.own_template, [dict(tool) for tool in tools] or None)
        return template

    @cached_property
    def special(self) -> SpecialTokens:
        """The special tokens of the tokenizer."""
        return SpecialTokens(self.tokenizer)

    @cached_property
    def _ordinary(self) -> tuple[str, ...]:
        """Added tokens that are not special and so are read as ordinary text."""
        added = {token.content for token in self.tokenizer.added_tokens_decoder.values()}
        return tuple(added - set(self.special.names))


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

"""What a row asks: the question's column, and the columns around it that the model must see as well."""

from cavesson.data.conversations import alike, opened, renamed, shared, shared_text
from cavesson.data.fields import Fields, is_empty
from cavesson.data.types import SYSTEM, Content, Pair, Turn
from cavesson.errors import UserError

QUESTIONS = ("prompt", "question", "instruction", "input", "messages", "conversations")
"""Columns that may hold the question of a pair; the first that a row has is read."""
GUESSED = "no column has the question: the prompt is the beginning that both texts share"


def said(column: str, fields: Fields) -> Content:
    """Return a text, or a conversation whose messages have `role` and `content`, or `from` and `value`."""
    if not fields.has_from(column):
        return fields.content(column)
    return renamed(fields.turns(column, role="from", content="value"))


def asked(column: str, fields: Fields, *answers: Content) -> tuple[Content, ...]:
    """Return the question in a column, with all that belongs to it, and its answers; all are texts or all are turns.

    `input` and `context` follow the question after an empty line. `history` is put before it as turns, and `system`
    before these.

    Raises:
        UserError: something that only a conversation can have is beside plain text, and texts are not read as chat.
    """
    question = said(column, fields)
    for name in ("input", "context") if column == "instruction" else ("context",):
        if given := fields.added(name):
            if not isinstance(question, str):
                raise UserError(f"{fields.place}: {name!r} can follow a text only, and {column!r} is a conversation")
            question = f"{question}\n\n{given}"
    return in_conversation(fields, question, *answers)


def in_conversation(fields: Fields, question: Content, *answers: Content) -> tuple[Content, ...]:
    """Return a question and its answers in the conversation that `history`, `system` and `tools` make of them."""
    if not all(isinstance(answer, str) for answer in answers):
        question = alike(question, ())[0]
    around = [name for name in ("history", "system", "tools") if not is_empty(fields.values.get(name))]
    if around and isinstance(question, str):
        if not fields.chat:
            raise UserError(
                f"{fields.place}: {around[0]!r} belongs to a conversation, and the rest is plain text; read it as chat "
                f'with data.chat = true, or leave the column out with data.ignore = ["{around[0]}"]'
            )
        question = (Turn("user", question),) if question else ()
    if isinstance(question, str):
        return question, *answers
    history = fields.history()
    start = 1 if question and question[0].role in SYSTEM else 0
    question = opened(fields, (*question[:start], *history, *question[start:]))
    return question, *(alike(question, answer)[1] for answer in answers)


def preference(fields: Fields) -> Pair:
    """Read two responses to a question, or, without one, two texts or conversations that begin with the same prompt."""
    chosen, rejected, margin = said("chosen", fields), said("rejected", fields), fields.margin()
    question = next((name for name in QUESTIONS if fields.has(name)), None)
    if isinstance(chosen, str) and isinstance(rejected, str):
        if question is None:
            fields.note(GUESSED)
            return paired(fields, *shared_text(chosen, rejected), margin)
    elif isinstance(chosen, str) or isinstance(rejected, str):
        raise UserError(f"{fields.place}: 'chosen' and 'rejected' must both be texts or both be lists of messages")
    elif question is None or chosen[0].role != "assistant":
        # Some data sets have the prompt as a text and repeat it in the first turns of the responses.
        return paired(fields, *shared(chosen, rejected, fields), margin)
    assert question is not None
    prompt, chosen, rejected = asked(question, fields, chosen, rejected)
    if not isinstance(prompt, str) and prompt[-1:] and prompt[-1].role == "assistant":
        raise UserError(f"{fields.place}: {question!r} ends with an answer, so it is not a question")
    return Pair(prompt, chosen, rejected, margin)


def paired(fields: Fields, prompt: Content, chosen: Content, rejected: Content, margin: float | None) -> Pair:
    """Return a pair in the conversation that other columns make of it."""
    prompt, chosen, rejected = in_conversation(fields, prompt, chosen, rejected)
    return Pair(prompt, chosen, rejected, margin)

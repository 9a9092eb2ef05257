"""Display of a row of data as a model sees it: every token, and whether it is learned."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from cavesson.data.chat import Chat
from cavesson.data.encode import Asked, Encoder, Line, asked_of
from cavesson.data.examples import fitted, together
from cavesson.data.formats import NAMES
from cavesson.data.load import load
from cavesson.data.settings import AnyDataSettings, ShowSettings
from cavesson.data.special_tokens import Around
from cavesson.data.types import AnyRow, Demonstration, Labelled, Pair, Prompt
from cavesson.data.view import Recognised, recognised
from cavesson.errors import UserError
from cavesson.models.load import load_tokenizer
from cavesson.text.visible import visible, visible_line

BOUNDARY = "│"
STYLES = {"learned": "bold green", "masked": "", "prompt": ""}


class Shown(NamedTuple):
    """One sequence of tokens."""

    title: str
    ids: Sequence[int]
    labels: Sequence[str]
    """for each token: learned, masked or prompt"""


def show_data(settings: ShowSettings, console: Console) -> None:
    """Print how the data is read, and one row of it token by token.

    Raises:
        UserError: the data or the tokenizer cannot be read, or there is no such row.
    """
    tokenizer = load_tokenizer(settings.tokenizer)
    show_row(settings.data, recognised(settings), settings.row, tokenizer, console, {})


def show_row(
    settings: AnyDataSettings,
    found: Recognised,
    number: int,
    tokenizer: PreTrainedTokenizerBase,
    console: Console,
    facts: Mapping[str, str],
) -> None:
    """Print these facts, how the data is read, and row `number` of it, counted from 1.

    Raises:
        UserError: the data cannot be read, or there is no such row.
    """
    format, kind = found
    loaded = load(settings, kind)
    rows = loaded.train
    if number > len(rows):
        raise UserError(f"there is no row {number} among {len(rows)} {NAMES[kind]}")
    place = f"{settings.path or 'the data'}: row {number}"
    sequences, remarks = encode_row(rows[number - 1], place, tokenizer, settings)
    held_out = f", and {len(loaded.held_out):,} held out" if loaded.held_out else ""
    rows_read = f"{len(rows):,} ({NAMES[kind]}){held_out}"
    facts = {**facts, "format": format, "rows": rows_read, "row": f"{number}"}
    facts |= dict(line.split(": ", 1) for line in loaded.usage())
    lines = [*facts.items(), *(("note", note) for note in loaded.notes()), *(("warning", text) for text in remarks)]
    grid = Table.grid(padding=(0, 2))
    for name, text in lines:
        grid.add_row(Text(name, "bold"), Text(visible(text), "yellow" if name == "warning" else ""))
    console.print(grid)
    for shown in sequences:
        learned = "" if "prompt" in shown.labels else f", {shown.labels.count('learned'):,} learned"
        console.print(Text(f"{shown.title}: {len(shown.ids):,} tokens{learned}", "bold"))
        console.print(_tokens(shown, tokenizer))
    console.print(Text(f"{BOUNDARY} ends a token, ↵ is a line break", "dim"))


def encode_row(
    row: AnyRow, place: str, tokenizer: PreTrainedTokenizerBase, settings: AnyDataSettings
) -> tuple[list[Shown], list[str]]:
    """Return the tokens of a row, and remarks about problems with them.

    A row that would be dropped is returned whole.
    """
    encoder = Encoder(
        Chat.of(settings, tokenizer), learn_all=settings.learn == "all" and isinstance(row, Demonstration)
    )
    asked = asked_of(row, place)
    remarks = encoder.remarks(asked)
    if isinstance(row, Prompt):
        (prompt,) = encoder.prompts([asked])
        if prompt.problem is not None:
            return [Shown("prompt", (), [])], [*remarks, f"dropped: {prompt.problem}"]
        over = f"longer than data.max_prompt_tokens = {settings.max_prompt_tokens}: dropped"
        shown = Shown("prompt", prompt.ids, ["prompt"] * len(prompt.ids))
        return [shown], remarks + ([over] if len(prompt.ids) > settings.max_prompt_tokens else [])
    (learned,) = encoder.lines([asked])
    remarks += learned.remarks
    whole: list[Line] = []
    for lines in together(row, learned):
        kept, found = fitted(lines, settings)
        whole += kept or lines
        remarks += found
    sequences = [
        Shown(title, line.ids, ["learned" if learned else "masked" for learned in line.learn])
        for title, line in zip(_titles(row, len(whole)), whole, strict=True)
    ]
    remarks += [text for sequence in sequences for text in _unended(sequence, tokenizer)]
    is_chat = settings.chat or not isinstance(row.prompt, str)
    remarks += _glued(asked) if not is_chat else _unopened(sequences[0], tokenizer) if sequences else ()
    return sequences, list(dict.fromkeys(remarks))


def _titles(row: Demonstration | Pair | Labelled, count: int) -> list[str]:
    if isinstance(row, Pair):
        return ["chosen", "rejected"][:count]
    kind = f" {'good' if row.label else 'bad'}" if isinstance(row, Labelled) else ""
    return (
        [f"prompt and{kind} response"]
        if count == 1
        else [f"sequence {number} of {count}" for number in range(1, count + 1)]
    )


def _unended(shown: Shown, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    learned = [token for token, label in zip(shown.ids, shown.labels, strict=True) if label == "learned"]
    if tokenizer.eos_token_id is None:
        yield f"{shown.title}: the tokenizer has no end token, so the model will not learn to stop"
    elif tokenizer.eos_token_id not in learned:
        yield f"{shown.title}: the end token {tokenizer.eos_token} is not learned, so the model will not learn to stop"


def _unopened(shown: Shown, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    bos = tokenizer.bos_token_id
    if bos is not None and Around.of(tokenizer).start[:1] == (bos,) != tuple(shown.ids[:1]):
        yield (
            f"plain texts begin with {tokenizer.bos_token}; this conversation does not, because the chat "
            "template omits it"
        )


def _glued(asked: Asked) -> Iterator[str]:
    before, after = str(asked.prompt)[-1:], [str(response)[:1] for response in asked.responses]
    if before.strip() and any(first.strip() for first in after):
        yield "there is no white space between prompt and response"


def _tokens(shown: Shown, tokenizer: PreTrainedTokenizerBase) -> Table:
    table = Table(show_header=False)
    for label, run in groupby(zip(shown.labels, shown.ids, strict=True), key=lambda pair: pair[0]):
        text = Text(overflow="fold")
        for _, token in run:
            piece = token_text(token, tokenizer)
            text.append(seen(piece), STYLES[label]).append(BOUNDARY, "dim blue")
            if piece.endswith("\n"):
                text.append("\n")
        text.rstrip()
        table.add_row(Text(label, STYLES[label]), text)
    return table


def token_text(token: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of one token, including a leading space that decoding a single token drops."""
    text = str(tokenizer.decode([token]))
    piece = tokenizer.convert_ids_to_tokens(token)
    return f" {text}" if str(piece).startswith("▁") and not text.startswith(" ") else text


def seen(text: str) -> str:
    """Return the text with invisible characters replaced by visible signs."""
    signs = visible_line(text)
    return "".join(sign if sign.isprintable() else f"⟨U+{ord(sign):04X}⟩" for sign in signs)

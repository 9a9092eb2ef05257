"""Who says what in a text that a chat template or an importer wrote; known by its marks, never guessed.

The board's page has the same table (``board/web/src/maths/conversation.ts``).
"""

import re
from typing import NamedTuple


class Marks(NamedTuple):
    """The marks of one family of chat templates."""

    opens: str
    """opens a turn; the first group names who speaks, the second a channel, of which ``analysis`` is thinking"""
    closes: str
    """marks at the end of a turn, which are not part of what is said"""
    first: bool = False
    """whether the text is only known by its marks if it begins with one"""


class Said(NamedTuple):
    """A turn."""

    role: str
    text: str


MARKS = (
    Marks(r"<\|im_start\|>([^\n<]{1,40})\n", r"\s*<\|im_end\|>\s*$"),
    Marks(r"<\|start_header_id\|>([^<]{1,40})<\|end_header_id\|>\s*", r"\s*<\|(?:eot_id|eom_id)\|>\s*$"),
    Marks(r"<\|header_start\|>([^<]{1,40})<\|header_end\|>\s*", r"\s*<\|(?:eot|eom)\|>\s*$"),
    Marks(r"<start_of_turn>(\w+)\n", r"\s*<end_of_turn>\s*$"),
    Marks(r"<\|turn>(\w+)\n", r"\s*<turn\|>\s*$"),
    Marks(
        r"(?:<\|start\|>([\w.]+)[^<\n]*)?(?:<\|channel\|>([^<\n]*))?(?:<\|constrain\|>[^<\n]*)?<\|message\|>",
        r"\s*<\|(?:end|return|call)\|>(?:<\|start\|>assistant)?\s*$",
    ),
    Marks(r"<\|START_OF_TURN_TOKEN\|><\|(\w+?)_TOKEN\|>", r"\s*<\|END_OF_TURN_TOKEN\|>\s*$"),
    Marks(
        r"<｜(User|Assistant|tool▁outputs▁begin|tool▁output▁begin)｜>",
        r"\s*<｜[\w▁]+(?:end|sentence)｜>\s*$",
    ),
    Marks(
        r"<\|(system|user|assistant|tool|observation)\|>\n?", r"\s*(?:<\|end\|>|<\|endoftext\|>|<\/s>)\s*$"
    ),
    Marks(r"\[(\/?(?:INST|SYSTEM_PROMPT|TOOL_RESULTS|AVAILABLE_TOOLS))\]\s?", r"\s*<\/s>\s*$"),
    Marks(r"^\[(system|developer|user|assistant|tool|environment)\]\n", r"\n+$", first=True),
)  # fmt: skip
"""Special tokens, which users cannot write where the tokenizer is used as it should be; and the importers' marks."""
ROLES = {
    "model": "assistant",
    "chatbot": "assistant",
    "/inst": "assistant",
    "/tool_results": "assistant",
    "inst": "user",
    "human": "user",
    "system_prompt": "system",
    "available_tools": "system",
    "/system_prompt": "",
    "/available_tools": "",
    "developer": "system",
    "ipython": "tool",
    "observation": "tool",
    "function": "tool",
    "environment": "tool",
    "tool_results": "tool",
    "tool_output": "tool",
    "tool▁output▁begin": "tool",
    "tool▁outputs▁begin": "tool",
}
"""Other names of the roles."""
BEGIN = re.compile(r"(?:<s>|<bos>|<\|begin_of_text\|>|<\|startoftext\|>|<｜begin▁of▁sentence｜>|\[gMASK\]<sop>|\s)*")
"""What a tokenizer puts before everything."""


def marks_in(text: str) -> Marks | None:
    """Return the marks that a text has, None if it has none that are known."""
    for marks in MARKS:
        opens = re.compile(marks.opens, re.MULTILINE)
        if opens.match(text) if marks.first else opens.search(text):
            return marks
    return None


def turns_in(text: str, marks: Marks, first: str) -> list[Said]:
    """Return the turns of a text with marks; ``first`` speaks before the first mark."""
    begin = BEGIN.match(text)
    opened = list(re.finditer(marks.opens, text, re.MULTILINE))
    roles = [first, *(first if mark[1] is None else _role(mark[1]) for mark in opened)]
    starts = [begin.end() if begin else 0, *(mark.end() for mark in opened)]
    stops = [*(mark.start() for mark in opened), len(text)]
    said = zip(roles, starts, stops, strict=True)
    turns = [Said(role, closed(text[start:stop], marks)) for role, start, stop in said]
    return [turn for turn in turns if turn.text.strip()]


def closed(text: str, marks: Marks) -> str:
    """Return what is said in a turn, without the marks at its end."""
    return re.sub(marks.closes, "", text)


def _role(name: str) -> str:
    lower = name.strip().lower()
    return "tool" if lower.startswith("functions.") else ROLES.get(lower, lower)

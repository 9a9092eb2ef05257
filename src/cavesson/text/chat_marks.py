"""Who says what in a text that a chat template or an importer wrote; known by its marks, never guessed.

The board's page has the same table (``board/web/src/maths/conversation.ts``).
"""

import json
import re
from typing import Any, NamedTuple


class Marks(NamedTuple):
    """The marks of one family of chat templates."""

    opens: str
    """opens a turn; the first group names who speaks, the second a channel, of which ``analysis`` is thinking"""
    closes: str
    """marks at the end of a turn, which are not part of what is said"""
    order: str | None = None
    """what the roles are in their order, with a space behind each: such marks are ordinary words, so that a text is
    only known by them if it begins with one and this is found in its roles"""
    needs: str = "<|"
    """what a text must contain to have marks that may be anywhere: a quick look at texts of some kilobytes"""


class Said(NamedTuple):
    """A turn."""

    role: str
    text: str


MARKS = (
    Marks(r"<\|im_start\|>([^\n<]{1,40})\n", r"\s*<\|im_end\|>\s*$"),
    Marks(r"<\|start_header_id\|>([^<]{1,40})<\|end_header_id\|>\s*", r"\s*<\|(?:eot_id|eom_id)\|>\s*$"),
    Marks(r"<\|header_start\|>([^<]{1,40})<\|header_end\|>\s*", r"\s*<\|(?:eot|eom)\|>\s*$"),
    Marks(r"<start_of_turn>(\w+)\n", r"\s*<end_of_turn>\s*$", needs="<start_of_turn>"),
    Marks(r"<\|turn>(\w+)\n", r"\s*<turn\|>\s*$"),
    Marks(
        r"(?:<\|start\|>([\w.]+)[^<\n]*)?(?:<\|channel\|>([^<\n]*))?(?:<\|constrain\|>[^<\n]*)?<\|message\|>",
        r"\s*<\|(?:end|return|call)\|>(?:<\|start\|>assistant)?\s*$",
        needs="<|message|>",
    ),
    Marks(r"<\|START_OF_TURN_TOKEN\|><\|(\w+?)_TOKEN\|>", r"\s*<\|END_OF_TURN_TOKEN\|>\s*$"),
    Marks(
        r"<｜(User|Assistant|tool▁outputs▁begin|tool▁output▁begin)｜>",
        r"\s*<｜[\w▁]+(?:end|sentence)｜>\s*$",
        needs="<｜",
    ),
    Marks(
        r"<\|(system|user|assistant|tool|observation)\|>\n?", r"\s*(?:<\|end\|>|<\|endoftext\|>|<\/s>)\s*$"
    ),
    Marks(r"\[(\/?(?:INST|SYSTEM_PROMPT|TOOL_RESULTS|AVAILABLE_TOOLS))\]\s?", r"\s*<\/s>\s*$", needs="["),
    Marks(
        r"^\[(system|developer|user|assistant|tool|environment|SYSTEM|DEVELOPER|USER|ASSISTANT|TOOL|USER\/TOOL)\]\n",
        r"\n+$", r"^\w",
    ),
    Marks(
        r"^\[(system|user|assistant|tool)\] ", r"\n+$",
        r"^(?=\w+ \w)(?:system )?(?:user assistant (?:(?:tool )+assistant )*)*(?:user )?$",
    ),
    Marks(
        r"^(system|user|assistant|model|tool)\n", r"\n(?![\s\S])",
        r"^(?:system )?(?:user assistant (?:(?:tool )+assistant )*)+$",
    ),
    Marks(
        r"(?<![ \t])(system|user|assistant|ipython)\n\n", r"(?!)",
        r"^system user assistant (?:(?:user |(?:tool )+)assistant )*$",
    ),
    Marks(
        r"^(user(?=\n<tool_response>\n)|(?<=<\/tool_response>\n)assistant)\n", r"\n(?![\s\S])",
        needs="<tool_response>",
    ),
)  # fmt: skip
"""Special tokens, which users cannot write where the tokenizer is used as it should be; the importers' marks; and what
is left of ChatML and Gemma's marks, of Llama 3's, and of ChatML's around results of tools in a response, where special
tokens were skipped in decoding."""
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
OF_RESULTS = ("tool", "ipython", "observation", "function", "environment")
"""Every name of a tool's turn has one of these in it."""
CALLS = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)|(?:\[TOOL_CALLS\]|<\|python_tag\|>)(.*)", re.DOTALL)
"""Calls as Hermes, Qwen, Mistral and Llama write them."""
RESULTS = re.compile(r"\s*(?:<tool_response>(?:(?!<tool_response>).)*</tool_response>\s*)+", re.DOTALL)
"""A turn of the user in which Hermes and Qwen write the results of tools."""
RESULT = re.compile(r"<tool_response>\n?(.*?)\n?</tool_response>", re.DOTALL)
BEGIN = re.compile(r"(?:<s>|<bos>|<\|begin_of_text\|>|<\|startoftext\|>|<｜begin▁of▁sentence｜>|\[gMASK\]<sop>|\s)*")
"""What a tokenizer puts before everything."""


_LISTED = re.compile(r"\s*\[\s*\{")
_SPEAKERS = ("system", "user", "assistant", "tool")
_THOUGHT = re.compile(r"^\s*<think>\s*(?:</think>\s*)?$")
"""Thinking that a template has opened in the prompt."""


def marks_in(text: str) -> Marks | None:
    """Return the marks that a text has, None if it has none that are known."""
    return next((marks for marks in MARKS if _has(text, marks)), None)


def _has(text: str, marks: Marks) -> bool:
    opens = re.compile(marks.opens, re.MULTILINE)
    if marks.order is None:
        return marks.needs in text and opens.search(text) is not None
    if not opens.match(text):
        return False
    roles = "".join(f"{_role(mark[1])} " for mark in opens.finditer(text))
    return re.search(marks.order, roles) is not None


def messages_in(text: str) -> list[dict[str, Any]] | None:
    """Return the chat messages that a text is in JSON; None if it is anything else."""
    if not _LISTED.match(text):
        return None
    try:
        found = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError):
        return None
    return found if found and all(map(_is_message, found)) else None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a key occurs twice")
    return content


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str) or "content" not in value:
        return False
    return _role(value["role"]) in _SPEAKERS and isinstance(value["content"], str | list | None)


def calls_in(text: str) -> list[Any]:
    """Return the calls that the policy wrote, parsed; a text for a call that is not JSON."""
    written = [parsed(found[1] or found[2] or "") for found in CALLS.finditer(text)]
    return [call for some in written for call in (some if isinstance(some, list) else [some])]


def parsed(text: str) -> Any:
    """Return what a text is as JSON; the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def asked(prompt: str) -> str:
    """Return what a prompt asks, for a single line: without its system turn, and without marks.

    One turn of the user is its text alone; several turns have who speaks before each.
    """
    marks, messages = marks_in(prompt), messages_in(prompt)
    if messages is not None:
        said = [Said(_role(one["role"]), _content_text(one["content"])) for one in messages]
    else:
        said = turns_in(prompt, marks, "user") if marks else []
    said = [one for one in said if one.role != "system" and _THOUGHT.sub("", one.text).strip()]
    if not said and marks and marks.order is None:  # nobody is named behind the system turn
        return re.split(marks.closes.removesuffix("$"), prompt, maxsplit=1)[-1].strip() or prompt
    if len(said) == 1:
        return said[0].text.strip()
    return " ".join(f"{one.role}: {one.text.strip()}" for one in said) or prompt


def _content_text(content: str | list[Any] | None) -> str:
    return content if isinstance(content, str) else "" if content is None else json.dumps(content, ensure_ascii=False)


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

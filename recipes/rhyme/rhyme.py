"""Rewards of the couplet task: does the answering couplet rhyme, and is it one?"""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from pypinyin import Style, pinyin

_LINE = re.compile(r"[\u3400-\u9fff]+")
_FINALS = """
uei:ei ui:ei iou:ou iu:ou uen:en un:en in:en ing:eng ong:eng
iong:eng ueng:eng üe:e ie:e ve:e uo:o ün:en vn:en
"""
_SAME = dict(pair.split(":") for pair in _FINALS.split())


@cache
def rhyme_of(character: str) -> frozenset[str]:
    """The rhymes of all readings of a character: its finals without medial and tone."""
    finals = pinyin(character, style=Style.FINALS, heteronym=True, strict=True)[0]
    return frozenset(_SAME.get(final, re.sub(r"^[iuüv](?=[aeo])", "", final)) for final in finals)


def rhymes(prompts: Sequence[str], responses: Sequence[str], **_: Any) -> dict[str, list[float]]:
    """`rhyme`: 1 where the last line of the response rhymes with the last line of the prompt, on another character.

    `form`: 1 where the response is two lines, each as long as those of the prompt, with a comma between and a full stop
    after them.
    """
    pairs = [(_LINE.findall(prompt), response) for prompt, response in zip(prompts, responses, strict=True)]
    return {
        "rhyme": [float(_rhymes(asked, response)) for asked, response in pairs],
        "form": [float(_has_form(asked, response)) for asked, response in pairs],
    }


def _rhymes(asked: list[str], response: str) -> bool:
    lines = _LINE.findall(response)
    if not asked or len(lines) < 2:
        return False
    first, second = asked[-1][-1], lines[1][-1]
    return first != second and bool(rhyme_of(first) & rhyme_of(second))


def _has_form(asked: list[str], response: str) -> bool:
    lines = _LINE.findall(response)
    if not asked or len(lines) != 2 or any(len(line) != len(asked[-1]) for line in lines):
        return False
    return response.strip() == f"{lines[0]}，{lines[1]}。"

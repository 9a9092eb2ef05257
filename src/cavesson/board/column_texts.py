"""What columns mean, in the other languages of the page."""

import tomllib
from functools import cache
from importlib.resources import files

LANGUAGES = ("zh", "vi")


def translations(text: str) -> dict[str, str]:
    """Return an English text in the languages that have it."""
    return {code: words[text] for code in LANGUAGES if text in (words := _words(code))}


@cache
def _words(code: str) -> dict[str, str]:
    content = files("cavesson.board").joinpath("languages", f"{code}.toml").read_text("utf-8")
    found: dict[str, str] = tomllib.loads(content)["columns"]
    return found

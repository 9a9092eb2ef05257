"""The pages on what the doctor finds, which are built with the page."""

import json
from functools import cache

from pydantic import Field

from cavesson.board.page import STATIC
from cavesson.board.runs import Board
from cavesson.board.selection import Query

FILE = STATIC / "diagnosis.json"


class DiagnosisQuery(Query):
    rules: str = Field(max_length=5_000)
    """Names of rules, comma-separated."""


def diagnosis(board: Board, query: DiagnosisQuery) -> dict[str, str]:
    """Return the page of each rule in Markdown; a rule of a user has none."""
    known = _pages()
    return {name: known[name] for name in query.rules.split(",") if name in known}


@cache
def _pages() -> dict[str, str]:
    pages: dict[str, str] = json.loads(FILE.read_bytes()) if FILE.is_file() else {}
    return pages

"""Tells how complete the index was from which an answer was made."""

from typing import Any

from cavesson.board.api import Endpoint
from cavesson.board.compare import CompareQuery
from cavesson.board.runs import Board, Partial
from cavesson.board.selection import Query, RunQuery, Selection
from cavesson.errors import UserError


def answered(board: Board, endpoint: Endpoint, query: Query) -> Any:
    """Return an answer; of one that is made from an index, ``partial`` says how far that is, or is null.

    Raises:
        UserError: The request cannot be answered; if the index is being built, the message says so.
    """
    if endpoint.made_from is None:
        return endpoint.answer(board, query)
    # Looked at first: the answer is never less complete than it says.
    partial = _partial(
        board, query, endpoint.made_from == "texts" or (isinstance(query, Selection) and bool(query.text))
    )
    try:
        answer: dict[str, Any] = endpoint.answer(board, query)
    except UserError as error:
        if partial is None or type(error) is not UserError:
            raise
        raise UserError(f"{error} (so far, {partial.indexed:,} of {partial.of:,} rollouts are indexed)") from None
    return answer | {"partial": partial and partial._asdict()}


def _partial(board: Board, query: Query, texts: bool) -> Partial | None:
    """Return how far the indexes of the runs that a request is about are, together; None if they are complete."""
    assert isinstance(query, RunQuery | CompareQuery)
    names = {query.run} if isinstance(query, RunQuery) else {side.run for side in query.runs}
    found = [partial for name in names if (partial := board.run(name).partial(texts))]
    return Partial(sum(one.indexed for one in found), sum(one.of for one in found)) if found else None

"""Records that hold several rollouts: a list of responses, and a list with one value for each in other columns."""

from collections.abc import Collection, Mapping
from typing import Any


def samples_of(record: dict[str, Any], response: str, lists: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return one record per response, or the record itself if it has one response.

    The column ``response`` may hold a list of texts, or a list of conversations; then those in ``lists``, which have a
    list for each rollout, hold a list of lists.
    """
    responses = record.get(response)
    if not isinstance(responses, list) or not (_are(str, responses) or all(map(_is_conversation, responses))):
        return [record]
    count = len(responses)
    divided = {name for name, value in record.items() if _is_divided(value, count, name in lists)}
    if not count or any(name in lists and isinstance(record[name], list) for name in record.keys() - divided):
        return [record]
    return [{name: value[i] if name in divided else value for name, value in record.items()} for i in range(count)]


def _is_divided(value: Any, count: int, holds_lists: bool) -> bool:
    if not isinstance(value, list) or len(value) != count:
        return False
    return _are(list, value) if holds_lists else not _is_conversation(value)


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and _are(Mapping, value)


def _are(kind: type, values: list[Any]) -> bool:
    return all(isinstance(value, kind) for value in values)

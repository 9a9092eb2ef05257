"""What a caller gives a recorder, and its checks."""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from cavesson.record.precision import Array
from cavesson.record.schema import ROW_COLUMNS, SOURCE_CODES, SOURCES, TOKEN_COLUMNS, TURN_COLUMNS
from cavesson.record.write.failures import error_in
from cavesson.record.write.padding import padded
from cavesson.record.write.statistics import STATISTICS, TURN_STATISTICS

FILLED_IN = {"step", "attempt", "rank", *STATISTICS, *TURN_STATISTICS}
GIVEN_ROWS = {column.name: column for column in ROW_COLUMNS if column.name not in FILLED_IN}
GIVEN_TOKENS = [column.name for column in TOKEN_COLUMNS if column.name not in ("step", "sample", "position")]
GIVEN_TURNS = [column.name for column in TURN_COLUMNS if column.name not in ("step", "attempt", "rank")]


def check_names(what: str, given: Mapping[str, Any], known: Iterable[str], required: set[str]) -> None:
    if unknown := given.keys() - set(known):
        raise ValueError(f"{what} have no column {min(unknown)!r}; known: {', '.join(known)}")
    if missing := required - given.keys():
        raise ValueError(f"{what} are missing the required column {min(missing)!r}")


def checked_tokens(tokens: Mapping[str, Any], rows: Mapping[str, Sequence[Any] | Array]) -> dict[str, Array]:
    """Return token columns as [B, T] arrays, among them ``attended`` and ``learned``; ``source`` has codes.

    Raises:
        ValueError: A column is unknown or has the wrong shape or type, or a sample occurs twice.
    """
    check_names("tokens", tokens, [*GIVEN_TOKENS, "attended", "mask"], set())
    called = "mask" if "mask" in tokens else "attended"
    given: dict[str, Any] = {name: _array(name, values) for name, values in tokens.items()}
    if "mask" in given:
        if clash := given.keys() & {"attended", "learned"}:
            raise ValueError(f"tokens have {min(clash)!r} and 'mask', the earlier name of 'attended': leave out 'mask'")
        given["attended"] = given["learned"] = given.pop("mask")
    if "attended" not in given:
        given = padded(given, len(rows["prompt"]))
    given.setdefault("learned", given["attended"])
    given |= {name: _as_boolean(given[name]) for name in ("attended", "learned")}
    _check_shapes(given, called)
    _check_rows(rows, len(given["attended"]), called)
    if (given["learned"] & ~given["attended"]).any():
        raise ValueError("learned is true on tokens that attended leaves out")
    if "source" in given:
        given["source"] = _source_codes(given["source"], given["attended"])
    return given


def _array(name: str, values: Any) -> Any:
    """Return an array or tensor as an array, and anything else as it is."""
    try:
        return np.asarray(values) if hasattr(values, "__array__") else values
    except (TypeError, RuntimeError) as error:  # a tensor with a gradient, in bfloat16, or on a GPU
        raise ValueError(f"tokens column {name!r} ({error}): pass it as .detach().float().cpu()") from error


def _as_boolean(mask: Any) -> Any:
    """Return a mask of zeros and ones, such as a tokenizer's `attention_mask`, as boolean; anything else as it is."""
    is_mask = isinstance(mask, np.ndarray) and mask.dtype.kind in "iuf" and bool(np.isin(mask, (0, 1)).all())
    return mask.astype(np.bool_) if is_mask else mask


def _check_shapes(tokens: Mapping[str, Array], called: str) -> None:
    attended = tokens["attended"]
    if not isinstance(attended, np.ndarray):
        raise ValueError(
            f"{called} is not an array, expected bool [B, T]; with a list of tokens per response, leave it out"
        )
    for name, array in ((called, attended), ("learned", tokens["learned"])):
        if np.ndim(array) != 2 or array.dtype != np.bool_:
            raise ValueError(f"{name} is {array.dtype} of shape {np.shape(array)}, expected bool [B, T]")
    for name, array in tokens.items():
        if array.shape != attended.shape:
            raise ValueError(f"tokens column {name!r} has shape {array.shape}, {called} has {attended.shape}")


def _check_rows(rows: Mapping[str, Sequence[Any] | Array], count: int, called: str) -> None:
    for name, values in rows.items():
        if len(values) != count:
            raise ValueError(f"rows column {name!r} has {len(values)} entries, {called} has {count}")
    if len(np.unique(np.asarray(rows["sample"]))) != len(rows["sample"]):
        raise ValueError("rows column 'sample' names a rollout twice; with step it is the key")


def _source_codes(source: Array, attended: Array) -> Array:
    """Return [B, T] codes of sources that are given as names or as codes; None or −1 is unknown."""
    codes: Array = np.zeros(attended.shape, np.int8)
    given: Array = np.array(source[attended].tolist())
    if given.dtype.kind not in "iu":
        unknown = next((one for one in given.tolist() if one not in SOURCE_CODES), None)
        if unknown is not None:
            raise ValueError(f"tokens column 'source' has {unknown!r}, expected one of {', '.join(SOURCES)}")
        given = np.array([SOURCE_CODES[one] for one in given.tolist()], np.int8)
    elif len(given) and not -1 <= given.min() <= given.max() < len(SOURCES):
        codes_given, last = f"{given.min()} to {given.max()}", len(SOURCES) - 1
        raise ValueError(f"tokens column 'source' has codes from {codes_given}, expected -1 to {last}")
    codes[attended] = given
    return codes


def checked_turns(
    turns: Mapping[str, Sequence[Any] | Array], samples: Sequence[int] | Array, first: int
) -> dict[str, list[Any]]:
    """Return columns of turns as lists of the same length, with ``turn``; an empty dictionary without turns.

    ``samples`` are the rollouts' [B], of which ``turns`` calls ``first`` 0.

    Raises:
        ValueError: A column is unknown, missing or of the wrong length, a turn occurs twice, or its rollout is unknown.
    """
    check_names("turns", turns, GIVEN_TURNS, {"sample", "role"})
    lists = {name: np.asarray(v).tolist() if isinstance(v, np.ndarray) else list(v) for name, v in turns.items()}
    count = len(lists["sample"])
    for name, values in lists.items():
        if len(values) != count:
            raise ValueError(f"turns column {name!r} has {len(values)} entries, 'sample' has {count}")
    lists["sample"] = [first + int(sample) for sample in lists["sample"]]
    if strange := set(lists["sample"]) - set(np.asarray(samples).tolist()):
        raise ValueError(f"turns column 'sample' names {min(strange) - first}, which is not one of these rollouts")
    if "turn" not in lists:
        numbers = {sample: itertools.count() for sample in lists["sample"]}
        lists["turn"] = [next(numbers[sample]) for sample in lists["sample"]]
    if len(set(zip(lists["sample"], lists["turn"], strict=True))) < count:
        raise ValueError("turns have the same turn of a rollout twice; with step and sample it is the key")
    if "arguments" in lists:
        lists["arguments"] = [_as_json(value) for value in lists["arguments"]]
    lists["error"] = _errors(lists, count)
    return lists if count else {}


def _errors(turns: Mapping[str, Sequence[Any]], count: int) -> list[str | None]:
    """Return [M] the errors of calls as they were given, or else as their results say."""
    given, texts = turns.get("error", [None] * count), turns.get("text", [None] * count)
    columns = zip(turns["role"], given, texts, strict=True)
    return [error_in(text) if role == "tool" and error is None else error for role, error, text in columns]


def turn_columns(samples: Sequence[int], turns: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, list[Any]] | None:
    """Return the columns of all turns, as ``Recorder.rollouts`` takes them; None if there are none.

    ``turns`` are those of each of the [B] samples in their order, by the names of the columns; empty if they are
    unknown.
    """
    lines = [(sample, turn) for sample, own in zip(samples, turns, strict=bool(turns)) for turn in own]
    if not lines:
        return None
    names = dict.fromkeys(name for _, turn in lines for name in turn)
    return {"sample": [sample for sample, _ in lines]} | {name: [turn.get(name) for _, turn in lines] for name in names}


def _as_json(arguments: Any) -> str | None:
    """Return the arguments of a call as JSON; a text, such as what could not be parsed, as it is."""
    if arguments is None or isinstance(arguments, str):
        return arguments
    return json.dumps(arguments, default=str, ensure_ascii=False)

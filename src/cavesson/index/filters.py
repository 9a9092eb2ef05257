"""A filter such as ``reward > 2 and length < 100 and finish_reason == "length"``, evaluated over the columns."""

import ast
import operator
import re
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cavesson.errors import UserError
from cavesson.index.calls import Calls
from cavesson.index.columns import CODED, MISSING, Array
from cavesson.index.labels import FLAGS, LABEL_TEXTS, RATING, LabelColumns
from cavesson.index.prompt_ids import PATTERN as ID
from cavesson.index.prompt_ids import numbers_of
from cavesson.index.rescored import PREFIX as RESCORED
from cavesson.index.row_texts import RECORDED, RecordedTexts
from cavesson.index.said import SAID, SPOKEN, CallTexts, SpokenTexts
from cavesson.index.snapshot import Snapshot
from cavesson.record import Run
from cavesson.record.labels import Labels
from cavesson.text.visible import shortened

LONGEST = 2_000
NO_LABELS: Labels = {}
TOO_LARGE = "the filter cannot be read: it is nested too deeply or a number in it is too large"
OF_CALLS = ("tool", "error", "seconds", "arguments", "result")
"""Names that hold for a call, and not for a whole rollout."""
OF_TURNS = ("turns", "calls", "call_errors")
"""Columns that only rollouts with turns have."""
_TEXTS = (*CODED, "prompt_id", *RECORDED, "tool", "arguments", "result", *SPOKEN, *LABEL_TEXTS)
_PREFIXES = {"parts": "part/", "rescore": RESCORED}
"""What is written in front of a name in brackets, and what the names of these columns begin with."""
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: np.divide,
}


def names_in(text: str) -> set[str]:
    """Return the names of the columns that a filter mentions; none if it cannot be read."""
    try:
        tree = _parsed(text)
    except UserError:
        return set()  # which is an error where the filter is used
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


_PIECES = re.compile(
    r"""(?P<quoted>"[^"]*"|'[^']*')|(?P<open>\bin\s*\(|[\[{(])|(?P<close>[\]})])"""
    r"""|(?P<number>(?<![\w.])\d{1,3}(?:,\d{3})+(?![\w,]))|(?P<minus>−)"""
)


def _plain(text: str) -> str:
    """Return a filter with numbers as Python writes them, of numbers as the board shows them, such as −1,234.

    In a list, 1,234 are two numbers.
    """
    brackets: list[str] = []

    def plain(found: re.Match[str]) -> str:
        piece = found[0]
        if found["open"]:
            brackets.append(piece)
        elif found["close"] and brackets:
            brackets.pop()
        elif found["number"] and all(bracket == "(" for bracket in brackets):
            return piece.replace(",", "")
        return "-" if found["minus"] else piece

    return _PIECES.sub(plain, text)


def matches(
    text: str,
    snapshot: Snapshot,
    run: Run | None = None,
    rows: Array | None = None,
    labels: Labels = NO_LABELS,
) -> Array:
    """Return [rows] whether the filter holds. A comparison with a missing value is always false, also with ``!=``.

    The run has the texts of calls; other filters need none. ``rows`` are the only ones to look at, ascending; None =
    all. ``labels`` are those that people gave.

    Raises:
        UserError: The text is not a valid filter.
    """
    if len(text) > LONGEST:
        raise UserError(f"the filter has {len(text)} characters; the limit is {LONGEST}")
    tree = _parsed(text)
    try:
        with np.errstate(all="ignore"):
            result = _evaluated(tree, snapshot, run, rows, labels)
    except (RecursionError, MemoryError, OverflowError):
        raise UserError(TOO_LARGE) from None
    if not _is_condition(result):
        raise UserError("the filter must be a condition, such as reward > 2")
    return np.asarray(result)


def _parsed(text: str) -> ast.expr:
    try:
        return ast.parse(_plain(text).strip(), mode="eval").body
    except SyntaxError as error:
        hint = '; a part of a text is "TEXT" in NAME' if re.search(r"\bcontains\b", text) else ""
        raise UserError(f"the filter cannot be read: {error.msg}{hint}") from None
    except (RecursionError, MemoryError, ValueError):
        raise UserError(TOO_LARGE) from None


def _is_condition(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.bool_


def _evaluated(tree: ast.expr, snapshot: Snapshot, run: Run | None, rows: Array | None, labels: Labels) -> Any:
    """Return the value of a filter; one about calls is evaluated for every call, with the columns of its rollout."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & set(OF_CALLS)
    if not names:
        own = snapshot if rows is None else snapshot.only(rows)
        texts = Texts(snapshot, run, rows, labels)
        return _Evaluation(own, texts).of(tree)
    if not snapshot.state.calls:
        raise UserError(f"this run has no recorded calls of tools, so a filter cannot use {' or '.join(sorted(names))}")
    if "seconds" in names and np.isnan(snapshot.calls.seconds).all():
        raise UserError("this run has no recorded seconds of calls, so a filter cannot use seconds")
    found, calls = np.zeros(snapshot.rows, np.bool_), snapshot.calls
    if rows is not None:
        wanted = np.zeros(snapshot.rows, np.bool_)
        wanted[rows] = True
        calls = calls.take(wanted[calls.row])
    for some in calls.portions():
        texts = Texts(snapshot, run, some.row, labels, some)
        value = _Evaluation(snapshot.only(some.row), texts, some).of(tree)
        if not _is_condition(value):
            return value
        found[some.row[value]] = True
    return found if rows is None else found[rows]


_Source = RecordedTexts | SpokenTexts | CallTexts | LabelColumns


class Texts:
    """The texts of some rows, by what they are of; those of calls only in a filter about calls."""

    def __init__(
        self, snapshot: Snapshot, run: Run | None, rows: Array | None, labels: Labels, calls: Calls | None = None
    ) -> None:
        """``rows`` are ascending; None means all."""
        self._snapshot, self._run, self._given, self._labels, self._calls = snapshot, run, rows, labels, calls

    @property
    def _rows(self) -> Array:
        return np.arange(self._snapshot.rows) if self._given is None else self._given

    @property
    def labels(self) -> LabelColumns:
        """What people gave to the rows."""
        own = self._snapshot if self._given is None else self._snapshot.only(self._given)
        return LabelColumns(own, self._labels)

    def named(self, name: str) -> _Source | None:
        """Return the texts with a name, None if they are those of a coded column, or there are none."""
        if name in RECORDED:
            return RecordedTexts(self._snapshot, self._run, self._rows)
        if name in LABEL_TEXTS:
            return self.labels
        if name in SPOKEN:
            return SpokenTexts(self._snapshot, self._run, self._rows)
        if name in SAID and self._calls is not None:
            return CallTexts(self._snapshot, self._run, self._calls)
        return None


class _Evaluation:
    """The value of each part of a filter, for the rows of a snapshot; with calls, these are the rows of the calls."""

    def __init__(self, snapshot: Snapshot, texts: Texts, calls: Calls | None = None) -> None:
        self.snapshot = snapshot
        self.texts = texts
        self.calls = calls
        self.only: Array | None = None
        """Where the value of the part that is evaluated has an effect; everywhere if None."""

    def of(self, node: ast.expr) -> Any:
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        if method is None:
            raise UserError(f"the filter cannot contain `{_source(node)}`")
        return method(node)

    def _boolop(self, node: ast.BoolOp) -> Array:
        """Read texts last, and only where the other parts leave open what the whole is."""
        is_and, before = isinstance(node.op, ast.And), self.only
        found: Array = np.full(self.snapshot.rows, is_and)
        for part in sorted(node.values, key=_reads_texts):
            found = (np.logical_and if is_and else np.logical_or)(found, self._condition(part))
            undecided = found if is_and else ~found
            self.only = undecided if before is None else undecided & before
        self.only = before
        return found

    def _unaryop(self, node: ast.UnaryOp) -> Any:
        if isinstance(node.op, ast.Not):
            return ~self._condition(node.operand)
        if isinstance(node.op, ast.USub):
            return -self._number(node.operand)
        raise UserError(f"the filter cannot contain `{_source(node)}`")

    def _binop(self, node: ast.BinOp) -> Any:
        if type(node.op) not in _ARITHMETIC:
            raise UserError(f"the filter cannot contain `{_source(node)}`; operators are + - * /")
        return _ARITHMETIC[type(node.op)](self._number(node.left), self._number(node.right))

    def _call(self, node: ast.Call) -> Any:
        if isinstance(node.func, ast.Name) and node.func.id == "abs" and len(node.args) == 1 and not node.keywords:
            return np.abs(self._number(node.args[0]))
        raise UserError(f"the filter cannot contain `{_source(node)}`; the only function is abs()")

    def _constant(self, node: ast.Constant) -> Any:
        if isinstance(node.value, int | float | str) and not isinstance(node.value, bool):
            return node.value
        raise UserError(f"the filter cannot contain `{_source(node)}`")

    def _name(self, node: ast.Name) -> Array:
        if self.calls is not None and node.id == "error":
            return np.asarray(self.calls.failed == 1)
        if self.calls is not None and node.id == "seconds":
            return self.calls.seconds
        if node.id in FLAGS:
            return self.texts.labels.flag(node.id)
        return self._column(node.id)

    def _subscript(self, node: ast.Subscript) -> Array:
        prefix = _PREFIXES.get(node.value.id) if isinstance(node.value, ast.Name) else None
        if prefix is not None and isinstance(node.slice, ast.Constant):
            return self._column(f"{prefix}{node.slice.value!s}")
        raise UserError(
            f'the filter cannot contain `{_source(node)}`; a part is parts["NAME"], '
            'a reward that was computed again rescore["NAME"]'
        )

    def _compare(self, node: ast.Compare) -> Array:
        return reduce(np.logical_and, map(self._pair, [node.left, *node.comparators], node.ops, node.comparators))

    def _pair(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Array:
        if isinstance(op, ast.Is | ast.IsNot):
            missing = self._missing(left, right)
            return missing if isinstance(op, ast.Is) else ~missing
        if isinstance(op, ast.In | ast.NotIn):
            return self._among(left, right, isinstance(op, ast.NotIn))
        if (text := self._text_pair(left, op, right)) is not None:
            return text
        a, b = self._number(left), self._number(right)
        result = np.broadcast_to(_COMPARE[type(op)](a, b), (self.snapshot.rows,))
        if isinstance(op, ast.NotEq):
            result = result & ~_absent(a) & ~_absent(b)
        return np.asarray(result, np.bool_)

    def _text_pair(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Array | None:
        """Compare a coded column with a text, in either order; return None if neither side is a text."""
        if isinstance(left, ast.Constant) and isinstance(left.value, str):
            left, right = right, left
        if not (isinstance(right, ast.Constant) and isinstance(right.value, str)):
            return None
        if not isinstance(op, ast.Eq | ast.NotEq):
            raise UserError("a text can only be compared with == and !=")
        return self._texts(left, _Equal([right.value]), isinstance(op, ast.NotEq))

    @property
    def _nameless(self) -> int:
        """The code of calls that name no tool."""
        tools = self.snapshot.state.tools
        return tools.index("") if "" in tools else -1

    def _texts(self, node: ast.expr, test: "_Contains | _Equal", negate: bool) -> Array:
        """Return where a text passes a test, or fails it; a text that is missing does neither."""
        name = node.id if isinstance(node, ast.Name) else ""
        if name == "error" and isinstance(test, _Equal):
            raise UserError(
                'error is true or false: write error, or not error; for a part of what it says, write "TEXT" in error'
            )
        if self.calls is not None and name == "tool":
            return _passing(self.calls.tool, self.snapshot.state.tools, self._nameless, test, negate)
        if name in SPOKEN:
            self._check_turns(name)
        if (texts := self.texts.named(name)) is not None:
            return self._read(texts, name, test, negate)
        if name == "prompt_id":
            return self._of_prompts(test, negate)
        if name not in CODED:
            raise UserError(f"only {', '.join((*_TEXTS, 'error'))} are texts")
        if name not in self.snapshot.state.columns:
            return np.zeros(self.snapshot.rows, np.bool_)
        return _passing(self.snapshot.raw(name), self.snapshot.state.codes[name], MISSING["|u1"], test, negate)

    def _of_prompts(self, test: "_Contains | _Equal", negate: bool) -> Array:
        if wrong := [text for text in test.texts if isinstance(test, _Contains) or not re.fullmatch(ID, text)]:
            raise UserError(
                f"the id of a prompt is 16 digits and letters from a to f; it is not {shortened(wrong[0])!r}"
            )
        numbers = self.snapshot.raw("prompt")
        found = np.isin(numbers, numbers_of(self.snapshot, test.texts))
        return ~found & (numbers >= 0) if negate else found

    def _read(self, texts: _Source, name: str, test: "_Contains | _Equal", negate: bool) -> Array:
        return texts.where(name, test.texts, lambda some: pc.xor(test(some), negate), narrow=not negate, only=self.only)

    def _among(self, left: ast.expr, right: ast.expr, negate: bool) -> Array:
        if isinstance(left, ast.Constant) and isinstance(left.value, str) and isinstance(right, ast.Name):
            return self._texts(right, _Contains([left.value]), negate)
        if not isinstance(right, ast.List | ast.Tuple | ast.Set):
            raise UserError('`in` needs a list, such as [1, 2], or a text and a name, such as "TEXT" in arguments')
        values = [self.of(element) for element in right.elts]
        if values and all(isinstance(value, str) for value in values):
            return self._texts(left, _Equal(values), negate)
        if not all(isinstance(value, int | float) for value in values):
            raise UserError("a list must contain numbers or texts")
        numbers = np.broadcast_to(self._number(left), (self.snapshot.rows,))
        found = np.isin(
            numbers, np.array(values, np.float64).astype(numbers.dtype if numbers.dtype.kind == "f" else "f8")
        )
        return ~found & ~_absent(numbers) if negate else found

    def _missing(self, left: ast.expr, right: ast.expr) -> Array:
        if not (isinstance(right, ast.Constant) and right.value is None):
            raise UserError("`is` needs None")
        name = left.id if isinstance(left, ast.Name) else ""
        if self.calls is not None and name == "tool":
            return np.asarray(self.calls.tool == self._nameless)
        if self.calls is not None and name == "error":
            return np.asarray(self.calls.failed == 0)
        if name in SPOKEN:
            self._check_turns(name)
        if (texts := self.texts.named(name)) is not None:
            return ~texts.where(name, [], pc.is_valid, narrow=False, only=self.only)
        if name in CODED:
            return np.asarray(self._column(name) == MISSING["|u1"])
        return np.broadcast_to(_absent(self._number(left)), (self.snapshot.rows,))

    def _condition(self, node: ast.expr) -> Array:
        value: Array = self.of(node)
        if not _is_condition(value):
            raise UserError(f"`{_source(node)}` is not a condition")
        return value

    def _number(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name) and node.id in _TEXTS:
            raise UserError(f"{node.id} is a text: compare it with one in quotes")
        value = self.of(node)
        if isinstance(value, str) or (isinstance(value, np.ndarray) and value.dtype == np.bool_):
            raise UserError(f"`{_source(node)}` is not a number")
        if isinstance(value, int):
            return float(value)
        return value

    def _column(self, name: str) -> Array:
        if name == RATING:
            return self.texts.labels.rating()
        if name in OF_TURNS:
            self._check_turns(name)
        if name in _TEXTS and name not in CODED:
            raise UserError(f"{name} is a text: compare it with one in quotes")
        if name not in self.snapshot.state.columns or name == "prompt":
            known = ", ".join(n for n in self.snapshot.names if not n.startswith(tuple(_PREFIXES.values())))
            raise UserError(f"there is no column {name!r} to filter by; columns are {known}")
        return self.snapshot.raw(name) if name in CODED else self.snapshot.column(name)

    def _check_turns(self, name: str) -> None:
        if "turns" not in self.snapshot.state.columns:
            raise UserError(f"this run has no recorded turns, so a filter cannot use {name!r}")


class _Contains(NamedTuple):
    """Whether texts contain a text."""

    texts: list[str]

    def __call__(self, texts: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
        return pc.match_substring(texts, self.texts[0])


class _Equal(NamedTuple):
    """Whether texts are one of some texts."""

    texts: list[str]

    def __call__(self, texts: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
        equal = pc.is_in(texts, pa.array(self.texts, pa.string()))
        return pc.if_else(pc.is_valid(texts), equal, pa.scalar(None, pa.bool_()))


def _passing(codes: Array, known: Sequence[str], missing: int, test: _Contains | _Equal, negate: bool) -> Array:
    """Return where a coded text passes a test, or fails it."""
    passed = np.flatnonzero(np.asarray(test(pa.array(known, pa.string()))))
    found = np.isin(codes, passed)
    return np.asarray((~found if negate else found) & (codes != missing))


def _reads_texts(node: ast.expr) -> bool:
    return any(isinstance(one, ast.Name) and one.id in (*SAID, *SPOKEN, *RECORDED) for one in ast.walk(node))


def _absent(value: Any) -> Any:
    return np.isnan(value) if isinstance(value, float) or value.dtype.kind == "f" else np.zeros(value.shape, np.bool_)


def _source(node: ast.expr) -> str:
    return shortened(ast.unparse(node))

"""A filter such as ``reward > 2 and length < 100 and finish_reason == "length"``, evaluated over the columns."""

import ast
import operator
import re
from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from cavesson.errors import UserError
from cavesson.index.columns import CALLS, CODED, FAILED, Array
from cavesson.index.snapshot import Snapshot

LONGEST = 2_000
OF_CALLS = ("tool", "error")
"""Names that hold for a call, and not for a whole rollout."""
OF_TURNS = ("turns", "calls", "call_errors")
"""Columns that only rollouts with turns have."""
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
        tree = ast.parse(_plain(text).strip(), mode="eval")
    except (SyntaxError, RecursionError, MemoryError, ValueError):
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


def matches(text: str, snapshot: Snapshot) -> Array:
    """Return [rows] whether the filter holds. A comparison with a missing value is always false, also with ``!=``.

    A filter can use the columns of the index by name, ``parts["NAME"]`` for the score of one reward, numbers, quoted
    texts, ``+ - * /``, ``abs()``, comparisons, ``in [..]``, ``is None``, ``and``, ``or``, ``not`` and parentheses. A
    filter with ``tool`` or ``error`` holds for a rollout if it holds for one of its calls.

    Raises:
        UserError: The text is not a valid filter.
    """
    if len(text) > LONGEST:
        raise UserError(f"the filter has {len(text)} characters; the limit is {LONGEST}")
    try:
        tree = ast.parse(_plain(text).strip(), mode="eval").body
        with np.errstate(all="ignore"):
            result = _evaluated(tree, snapshot)
    except SyntaxError as error:
        raise UserError(f"the filter cannot be read: {error.msg}") from None
    except (RecursionError, MemoryError, ValueError, OverflowError):
        raise UserError("the filter cannot be read: it is nested too deeply or a number in it is too large") from None
    if not isinstance(result, np.ndarray) or result.dtype != np.bool_:
        raise UserError("the filter must be a condition, such as reward > 2")
    return result


class _Call(NamedTuple):
    """What a filter can ask of a call."""

    tool: str
    error: bool


def _evaluated(tree: ast.expr, snapshot: Snapshot) -> Any:
    """Return the value of a filter; one about calls is evaluated for every kind of call that occurs."""
    if not {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & set(OF_CALLS):
        return _Evaluation(snapshot).of(tree)
    if not snapshot.tools:
        raise UserError("this run has no recorded calls of tools, so a filter cannot use tool or error")
    found = np.zeros(snapshot.rows, np.bool_)
    for tool in snapshot.tools:
        calls, failed = snapshot.raw(CALLS + tool), snapshot.raw(FAILED + tool)
        for error, some in ((True, failed > 0), (False, calls > np.maximum(failed, 0))):
            value = _Evaluation(snapshot, _Call(tool, error)).of(tree)
            if not isinstance(value, np.ndarray) or value.dtype != np.bool_:
                return value  # not a condition
            found |= some & value
    return found


class _Evaluation:
    def __init__(self, snapshot: Snapshot, call: _Call | None = None) -> None:
        self.snapshot = snapshot
        self.call = call

    def of(self, node: ast.expr) -> Any:
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        if method is None:
            raise UserError(f"the filter cannot contain `{_source(node)}`")
        return method(node)

    def _boolop(self, node: ast.BoolOp) -> Array:
        combine = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
        return reduce(combine, map(self._condition, node.values))

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
        if self.call is not None and node.id == "error":
            return self._all(self.call.error)
        return self._column(node.id)

    def _all(self, value: bool) -> Array:
        return np.full(self.snapshot.rows, value, np.bool_)

    def _subscript(self, node: ast.Subscript) -> Array:
        if isinstance(node.value, ast.Name) and node.value.id == "parts" and isinstance(node.slice, ast.Constant):
            return self._column(f"part/{node.slice.value!s}")
        raise UserError(f'the filter cannot contain `{_source(node)}`; a part is parts["NAME"]')

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
        return self._equal_text(left, [right.value], isinstance(op, ast.NotEq))

    def _equal_text(self, column: ast.expr, texts: list[str], negate: bool) -> Array:
        if isinstance(column, ast.Name) and column.id == "error":
            raise UserError("error says only whether the call failed: write error, or not error")
        if self.call is not None and isinstance(column, ast.Name) and column.id == "tool":
            return self._all((self.call.tool in texts) != negate and self.call.tool != "")
        if not isinstance(column, ast.Name) or column.id not in CODED:
            raise UserError(f"only {', '.join(CODED)} and tool are texts; to find words in responses, use the search")
        if column.id not in self.snapshot.state.columns:
            return np.zeros(self.snapshot.rows, np.bool_)
        codes = self.snapshot.raw(column.id)
        known = self.snapshot.state.codes[column.id]
        found = np.isin(codes, [known.index(text) for text in texts if text in known])
        return ~found & (codes != 255) if negate else found

    def _among(self, left: ast.expr, right: ast.expr, negate: bool) -> Array:
        if not isinstance(right, ast.List | ast.Tuple | ast.Set):
            raise UserError("`in` needs a list, such as [1, 2]")
        values = [self.of(element) for element in right.elts]
        if values and all(isinstance(value, str) for value in values):
            return self._equal_text(left, values, negate)
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
        if self.call is not None and isinstance(left, ast.Name) and left.id in OF_CALLS:
            return self._all(not self.call.error if left.id == "error" else self.call.tool == "")
        if isinstance(left, ast.Name) and left.id in CODED:
            return np.asarray(self._column(left.id) == 255)
        return np.broadcast_to(_absent(self._number(left)), (self.snapshot.rows,))

    def _condition(self, node: ast.expr) -> Array:
        value = self.of(node)
        if not isinstance(value, np.ndarray) or value.dtype != np.bool_:
            raise UserError(f"`{_source(node)}` is not a condition")
        return value

    def _number(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name) and node.id in (*CODED, "tool"):
            raise UserError(f"{node.id} is a text: compare it with one in quotes")
        value = self.of(node)
        if isinstance(value, str) or (isinstance(value, np.ndarray) and value.dtype == np.bool_):
            raise UserError(f"`{_source(node)}` is not a number")
        if isinstance(value, int):
            return float(value)
        return value

    def _column(self, name: str) -> Array:
        if name in OF_TURNS and name not in self.snapshot.state.columns:
            raise UserError(f"this run has no recorded turns, so a filter cannot use {name!r}")
        if name == "tool":
            raise UserError("tool is a text: compare it with one in quotes")
        if name not in self.snapshot.state.columns or name == "prompt":
            known = ", ".join(n for n in self.snapshot.names if not n.startswith("part/"))
            raise UserError(f"there is no column {name!r} to filter by; columns are {known}")
        return self.snapshot.raw(name) if name in CODED else self.snapshot.column(name)


def _absent(value: Any) -> Any:
    return np.isnan(value) if isinstance(value, float) or value.dtype.kind == "f" else np.zeros(value.shape, np.bool_)


def _source(node: ast.expr) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 60 else f"{text[:60]}…"

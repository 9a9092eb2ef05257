"""What installed packages add to Cavesson, by entry points in the groups `cavesson.KIND`."""

from collections.abc import Collection
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from cavesson.errors import UserError, print_error, user_code

Kind = TypeVar("Kind")

KINDS = ("algorithms", "engines", "environments", "importers", "rewards", "rules", "tools")


def installed(kind: str, own: Collection[str] = ()) -> dict[str, EntryPoint]:
    """Return the entry points of a kind, one of ``KINDS``, by their names; own names of Cavesson are reported and left
    out.
    """
    assert kind in KINDS, kind
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=f"cavesson.{kind}"):
        if entry.name in found or entry.name in own:
            print_error(f"{entry.value} of cavesson.{kind} is left out: {entry.name!r} is the name of another one")
        else:
            found[entry.name] = entry
    return found


def loaded(kind: str, type_: type[Kind], own: Collection[str] = ()) -> dict[str, Kind]:
    """Load the objects of a kind, by the names of their entry points; for the arguments, see ``installed``.

    Raises:
        UserError: an object cannot be loaded, or has another type.
    """
    found = {}
    for name, entry in installed(kind, own).items():
        with user_code(f"loading {entry.value} of cavesson.{kind}"):
            found[name] = entry.load()
        if not isinstance(found[name], type_):
            raise UserError(f"{entry.value} of cavesson.{kind} is not a {type_.__name__}")
    return found


def located(kind: str, name: str, own: Collection[str] = ()) -> str:
    """Return the ``module:function`` of a name that a package adds; any other name, and ``own``, stay as they are."""
    entry = None if ":" in name or name in own else installed(kind).get(name)
    return name if entry is None else entry.value

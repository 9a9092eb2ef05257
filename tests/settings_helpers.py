"""Settings as tests write them."""

from collections.abc import Mapping
from typing import Any


def changed(values: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Lay changes over nested values, in place: `kl__coef=0.1` changes the field `kl.coef`."""
    for name, value in changes.items():
        *groups, last = name.split("__")
        place = values
        for group in groups:
            place = place.setdefault(group, {})
        place[last] = value
    return values

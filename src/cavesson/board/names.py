"""What the runs on a board are called in addresses: names that tell them apart and stay the same."""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

MAX_NAME = 1_000
"""Characters."""
_OTHER = re.compile(r"[^\w.=+~-]+")


def names_of(folders: Sequence[Path]) -> list[str]:
    """Return a name for each of some run folders, all different: of each, the shortest end of its path that is its own.

    A folder that is given twice has one name.
    """
    endings = {folder: list(_endings(folder, 1)) for folder in folders}
    counts = Counter(ending for several in endings.values() for ending in several)
    names: dict[Path, str] = {}
    for folder, several in endings.items():
        own = [one for one in several if counts[one] == 1]
        names[folder] = _first_free(own or several[-1:], names.values())
    return [names[folder] for folder in folders]


def name_below(folder: Path, root: Path, taken: Collection[str]) -> str:
    """Return the name of a run folder below another folder: its path from there, and more of it if that is taken."""
    return _first_free(list(_endings(folder, len(folder.relative_to(root).parts))), taken)


def _first_free(names: Sequence[str], taken: Collection[str]) -> str:
    """Return the first name that is not taken; if all are, the last with a number."""
    numbered = (f"{names[-1]}~{number}" for number in range(2, len(taken) + 3))
    return next(one for one in (*names, *numbered) if one not in taken)


def _endings(folder: Path, shortest: int) -> Iterator[str]:
    """Yield the ends of a path, from one of ``shortest`` parts on, in characters that an address can have."""
    parts = [_OTHER.sub("-", part) for part in folder.parts if part.strip("/")] or ["-"]
    for count in range(min(shortest, len(parts)), len(parts) + 1):
        yield "/".join(parts[-count:])

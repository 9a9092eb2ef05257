"""The matrix products that a run uses, in its folder: each process writes those that it has chosen."""

import json
from pathlib import Path

from cavesson.errors import UserError
from cavesson.ops.matmul import Choices
from cavesson.record.files import write_json


def choices_of(folder: Path, rank: int) -> Choices:
    """Return what the process with this rank has used in a run; a process that is new to it uses what the main one has.

    Raises:
        UserError: the file is damaged.
    """
    for place in (_place(folder, rank), _place(folder, 0)):
        if place.exists():
            try:
                return Choices(json.loads(place.read_bytes()))
            except ValueError as error:
                raise UserError(f"{place} is damaged: put back a copy, or remove it to choose again") from error
    return Choices()


def keep_choices(choices: Choices, folder: Path, rank: int) -> None:
    """Write choices, now and whenever there is a new one, for the process with this rank."""
    choices.keep(lambda known: write_json(_place(folder, rank), known))


def product_files(folder: Path) -> list[Path]:
    """Return the files that the processes of a run have written."""
    return sorted(folder.glob("products*.json"))


def notes_on_products(choices: Choices) -> list[str]:
    """Return a note for the user on choices that other runs do not share."""
    if choices.unshared is None:
        return []
    return [
        f"the choice of matrix products cannot be kept on this machine ({choices.unshared}): another run with the same "
        "seed may differ in rounding"
    ]


def _place(folder: Path, rank: int) -> Path:
    return folder / (f"products-{rank:05d}.json" if rank else "products.json")

"""Import the rollouts of other tools into a run folder."""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from cavesson.errors import UserError
from cavesson.importers import (
    areal,
    art,
    inspect_log,
    nemo_rl,
    open_instruct,
    openenv,
    openrlhf,
    plain,
    prime_rl,
    rl_logging_board,
    skyrl,
    slime,
    trackio,
    trl,
    verl,
)
from cavesson.importers.databases import inside
from cavesson.importers.importing import ImportReport, follow, read_once
from cavesson.importers.rollout import Format, Tokenizer
from cavesson.importers.sources import Source
from cavesson.plugins import loaded

FORMATS: dict[str, Format] = {
    format.name: format
    for format in (
        rl_logging_board.FORMAT,
        trl.FORMAT,
        verl.FORMAT,
        openrlhf.FORMAT,
        nemo_rl.FORMAT,
        prime_rl.FORMAT,
        skyrl.FORMAT,
        areal.FORMAT,
        art.FORMAT,
        slime.FORMAT,
        inspect_log.FORMAT,
        trackio.FORMAT,
        openenv.FORMAT,
        open_instruct.FORMAT,
        plain.FORMAT,
    )
}
"""Every format of Cavesson by its name."""
__all__ = ["FORMATS", "ImportReport", "Tokenizer", "follow_run", "formats", "import_run"]


@cache
def formats() -> dict[str, Format]:
    """Return every format by its name, those of installed packages included."""
    return FORMATS | loaded("importers", Format, FORMATS)


def import_run(
    source: Path | str,
    run: Path | str,
    format: str | None = None,
    columns: Mapping[str, str] | None = None,
    held_out: bool = False,
    tokenizer: Tokenizer | None = None,
    metrics: Path | str | None = None,
) -> ImportReport:
    """Import another tool's rollouts into a new run folder, which appears complete at the end or not at all.

    Broken records are counted and kept in ``rejected.jsonl`` of the run folder; they do not stop the import. Memory use
    does not grow with the size of the source. Several processes read large files on Linux, if the program has no other
    threads at that moment; otherwise, the current process reads everything.

    Args:
        source: One file, or the folder that contains the files.
        run: Run folder to write; must not exist or must be empty.
        format: A name in ``formats()``; if None, detected from the first records.
        columns: Column of the record → column of the source, for a table in none of the formats.
        held_out: Whether all responses are to held-out prompts, so that training did not learn from them.
        tokenizer: The model's vocabulary, so that token ids in the source can be read as text.
        metrics: What the trainer logged by step: a `.csv`, `.json` or `.jsonl`, or TensorBoard's events.

    Raises:
        UserError: ``source`` does not exist, matches no known format or more than one, or contains no readable
            rollout; or ``metrics`` cannot be read; or ``run`` exists and is not empty.
    """
    place, kind = _recognised(Path(source), format, columns, held_out)
    return read_once(place, Path(run), kind, tokenizer, None if metrics is None else Path(metrics))


def follow_run(
    source: Path | str,
    run: Path | str,
    format: str | None = None,
    columns: Mapping[str, str] | None = None,
    held_out: bool = False,
    tokenizer: Tokenizer | None = None,
    until_idle: float | None = None,
    progress: Callable[[int, int], None] = lambda rollouts, rejected: None,
) -> ImportReport:
    """Import like ``import_run``, but from files that are still being written and from new files, until Ctrl-C.

    It stops after ``until_idle`` idle seconds; None = never. ``progress`` is called after every poll with the number of
    rollouts and of rejected records so far.

    Raises:
        UserError: As for ``import_run``, or a file was rewritten while it was followed.
    """
    place, kind = _recognised(Path(source), format, columns, held_out)
    return follow(place, Path(run), kind, tokenizer, until_idle, progress)


def _recognised(
    path: Path, name: str | None, columns: Mapping[str, str] | None, held_out: bool
) -> tuple[Source, Format]:
    if not path.exists() and inside(path) is None:
        raise UserError(f"{path} does not exist")
    format = _given(name, columns)
    source = Source(path, [*formats().values()] if format is None else [format])
    if format is None:
        format = source.recognise(otherwise=plain.FORMAT)
    return source, format.held_out() if held_out else format


def _given(name: str | None, columns: Mapping[str, str] | None) -> Format | None:
    """Return the format that the caller chose, if any."""
    if name is not None and name not in formats():
        raise UserError(f"there is no format {name!r}; formats are {', '.join(formats())}")
    if columns:
        if name not in (None, "plain"):
            raise UserError(f"--map works only with the format plain; {name} has its own columns")
        return plain.mapped(columns)
    return None if name is None else formats()[name]

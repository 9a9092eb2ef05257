"""Other tools' rollouts into a run folder."""

from collections.abc import Callable, Mapping
from pathlib import Path

from cavesson.errors import UserError
from cavesson.importers import nemo_rl, openrlhf, plain, prime_rl, rl_logging_board, trl, verl
from cavesson.importers.importing import Report, follow, read_once
from cavesson.importers.rollout import Format
from cavesson.importers.sources import recognise

FORMATS: dict[str, Format] = {
    format.name: format
    for format in (
        rl_logging_board.FORMAT,
        trl.FORMAT,
        verl.FORMAT,
        openrlhf.FORMAT,
        nemo_rl.FORMAT,
        prime_rl.FORMAT,
        plain.FORMAT,
    )
}
"""Every format by its name."""
__all__ = ["FORMATS", "Report", "follow_run", "import_run"]


def import_run(
    source: Path | str, run: Path | str, format: str | None = None, columns: Mapping[str, str] | None = None
) -> Report:
    """Reads another tool's rollouts into a new run folder, which appears whole at the end or not at all.

    A record that is broken is counted, kept in ``rejected.jsonl`` of the run folder and does not stop the rest. Memory
    does not grow with the size of the source. Large files are read by several processes: on Linux, from a program that
    has no other thread at that moment; elsewhere by this one.

    Args:
        source: One file, or the folder that holds the files.
        run: Run folder to write; must not exist, or be empty.
        format: A name of ``FORMATS``; recognised by the first records if None.
        columns: The record's column → the source's, for a table that is of none of the formats.

    Raises:
        UserError: ``source`` is not there, of no known format or of more than one, or holds no rollout that can be
            read; or ``run`` is taken.
    """
    source = Path(source)
    return read_once(source, Path(run), _format(source, format, columns))


def follow_run(
    source: Path | str,
    run: Path | str,
    format: str | None = None,
    columns: Mapping[str, str] | None = None,
    until_idle: float | None = None,
    progress: Callable[[int, int], None] = lambda rollouts, rejected: None,
) -> Report:
    """As ``import_run``, from files that are still being written, and from files that come: until Ctrl-C.

    A line is read once it has its end, a table once it is whole. The run folder can be read all the while.

    Args:
        source: As for ``import_run``; so are ``run``, ``format`` and ``columns``.
        run: See ``source``.
        format: See ``source``.
        columns: See ``source``.
        until_idle: Seconds without anything new after which it ends; never if None.
        progress: Called after every look with the rollouts and the rejected records so far.

    Raises:
        UserError: As ``import_run``, or a file was written anew while it was followed.
    """
    source = Path(source)
    return follow(source, Path(run), _format(source, format, columns), until_idle, progress)


def _format(source: Path, name: str | None, columns: Mapping[str, str] | None) -> Format:
    if not source.exists():
        raise UserError(f"{source} does not exist")
    if name is not None and name not in FORMATS:
        raise UserError(f"there is no format {name!r}; there is {', '.join(FORMATS)}")
    if columns:
        if name not in (None, "plain"):
            raise UserError(f"--map names the columns of the format plain; {name} has its own")
        return plain.mapped(columns)
    if name is not None:
        return FORMATS[name]
    others = [format for format in FORMATS.values() if format is not plain.FORMAT]
    return recognise(source, others, otherwise=plain.FORMAT)

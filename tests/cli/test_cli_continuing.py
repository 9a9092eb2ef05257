"""What a command that ends early prints as the way on: a command that can be pasted, or nothing."""

import errno
import shlex
import sys
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch

from cavesson import cli
from cavesson.command_line import continuation
from cavesson.errors import StoppedError, TerminatedError, UserError
from cavesson.record import write_run

TRAINED = {"algorithm": "dpo", "config": {}, "inputs": [], "processes": 1}


def test_a_run_that_another_process_removes_is_none(tmp_path: Path) -> None:
    """The first process of a run that fails in its first step removes the folder while others look for the way on."""
    ended = Event()

    def come_and_go() -> None:
        while not ended.is_set():
            write_run(tmp_path / "run", TRAINED)
            (tmp_path / "run" / "run.json").unlink()

    other = Thread(target=come_and_go)
    other.start()
    try:
        assert {continuation(tmp_path / "run") is None for _ in range(2000)} >= {True}
    finally:
        ended.set()
        other.join()


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        (TRAINED, ["cavesson", "dpo", "--resume", "my run"]),
        (
            TRAINED | {"processes": 2},
            ["cavesson", "dpo", "--resume", "my run", "--processes", "2"],
        ),
        (TRAINED | {"inputs": ["prompts"]}, ["Training(..., resume=True)", "in", "Python"]),
        (TRAINED | {"algorithm": "MyRun"}, None),
        (TRAINED | {"trainer": "verl"}, None),
        ({"cavesson": "1.0"}, None),
        (None, None),
    ],
)
def test_what_continues_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, info: dict[str, Any] | None, expected: list[str] | None
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("my run")
    folder.mkdir()
    if info is not None:
        write_run(folder, info)
    way = continuation(folder)
    if expected is None:
        assert way is None
    elif expected[-1] == "Python":
        assert way == " ".join(expected)
    else:
        assert way is not None
        program, *words = shlex.split(way)
        assert [Path(program).name, *words] == expected


def noted(error: BaseException) -> BaseException:
    error.add_note("continue with: the run's command")
    return error


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("command", "error", "way"),
    [
        (["ppo", "a b.toml"], noted(StoppedError("why")), "the run's command"),
        (["ppo", "a b.toml"], noted(KeyboardInterrupt()), "the run's command"),
        (["ppo", "a b.toml"], noted(TerminatedError()), "the run's command"),
        (["ppo", "a b.toml"], noted(OSError(errno.ENOSPC, "full")), "the run's command"),
        (["ppo", "a b.toml"], KeyboardInterrupt(), None),
        (["ppo", "a b.toml"], TerminatedError(), None),
        (["ppo", "a b.toml"], FULL, None),
        (["ppo", "a b.toml"], UserError("why"), None),
        (["align", "a b.toml"], noted(StoppedError("why")), "cavesson align 'a b.toml'"),
        (["align", "a b.toml"], KeyboardInterrupt(), "cavesson align 'a b.toml'"),
        (["align", "a b.toml"], TerminatedError(), "cavesson align 'a b.toml'"),
        (["align", "a b.toml"], FULL, "cavesson align 'a b.toml'"),
        (["align", "a b.toml"], UserError("why"), None),
        (["demo"], noted(StoppedError("why")), None),
        (["demo"], noted(KeyboardInterrupt()), None),
        (["show", "run"], KeyboardInterrupt(), None),
    ],
    ids=repr,
)
def test_the_way_on_stands_at_the_end_of_the_line(
    command: list[str],
    error: BaseException,
    way: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def app() -> None:
        """Ends as Typer's does."""
        try:
            raise error
        except KeyboardInterrupt as interrupt:
            raise SystemExit(130) from interrupt

    monkeypatch.setattr(cli, "app", app)
    monkeypatch.setattr(sys, "argv", ["cavesson", *command])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    codes = {StoppedError: 3, KeyboardInterrupt: 130, TerminatedError: 143, UserError: 2, OSError: 2}
    assert ended.value.code == codes[type(error)]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("cavesson: ")
    found = line.partition("; continue with: ")[2]
    assert found.endswith(way) if way else "continue" not in line


def test_too_little_memory_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def app() -> None:
        torch.empty(2**60)

    monkeypatch.setattr(cli, "app", app)
    monkeypatch.setattr(sys, "argv", ["cavesson", "evaluate", "model"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"cavesson: out of memory: {4 * 2**60} bytes more could not be allocated; use a smaller batch"
    )


@pytest.mark.parametrize(("given", "refused"), [("other", True), ("runs/mine", False), ("./runs/../runs/mine", False)])
def test_resume_and_run_name_one_folder(given: str, refused: bool) -> None:
    if refused:
        with pytest.raises(UserError, match=r"--run other has no effect with --resume runs/mine: remove one"):
            cli._place(Path("runs/mine"), ["--steps=3", f"--run={given}"])
    else:
        assert cli._place(Path("runs/mine"), [f"--run={given}"]) == ["--run", "runs/mine"]
    assert cli._place(None, [f"--run={given}"]) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_process_says_where_the_result_is(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Done:
        folder = Path("runs/mine")

        def __init__(self, *given: Any, **names: Any) -> None:
            pass

        def run(self, **names: Any) -> "Done":
            assert names == {"keep_metrics": False}  # nobody looks at them, and there may be many
            return self

    monkeypatch.setattr("cavesson.train.run.Training", Done)
    monkeypatch.setattr("cavesson.record.read.show.headline", lambda folder: "good")
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(sys, "argv", ["cavesson", "ppo", "--run", "runs/mine"])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said] == (["run", "model", "next", "result"] if rank == 0 else [])

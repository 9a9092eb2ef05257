"""Whoever calls a command from Python has its own handlers of signals afterwards."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_helpers import RECIPE, write_recipe
from marked_processes import survivors

from cavesson import cli
from cavesson.handlers import handling

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def ours(number: int, frame: object) -> None:
    raise AssertionError("nobody sends a signal")


@pytest.fixture
def mine() -> Iterator[None]:
    before = {number: signal.signal(number, ours) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


COMMANDS = {
    "that succeeds": (["--version"], 0),
    "that finds a mistake": (["show", "nowhere"], 2),
    "that trains": (["ppo", "recipe.toml"], 0),
    "that follows files": (["import", "in.jsonl", "imported", "--follow", "--until-idle", "0"], 0),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_leaves_the_handlers_as_they_were(
    tmp_path: Path, name: str, mine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, code = COMMANDS[name]
    write_recipe(tmp_path, RECIPE)
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "p", "response": "r", "reward": 0.5, "step": 0}) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cavesson", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == code
    assert [signal.getsignal(number) for number in SIGNALS] == [ours, ours]


def test_a_command_that_sigterm_ends_leaves_the_handlers_as_they_were(
    mine: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "app", lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 143 and capsys.readouterr().err.startswith("cavesson: interrupted by SIGTERM")
    assert [signal.getsignal(number) for number in SIGNALS] == [ours, ours]


def test_handlers_are_put_back_one_within_the_other_and_after_an_error(mine: None) -> None:
    seen = []
    with pytest.raises(KeyError), handling(lambda *_: seen.append("outer"), *SIGNALS):
        with handling(lambda *_: seen.append("inner"), signal.SIGTERM):
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        raise KeyError
    assert seen == ["inner", "outer", "outer"]
    assert [signal.getsignal(number) for number in SIGNALS] == [ours, ours]


def test_another_thread_changes_nothing(mine: None) -> None:
    seen = []

    def work() -> None:
        with handling(lambda *_: None, *SIGNALS):
            seen.extend(signal.getsignal(number) for number in SIGNALS)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [ours, ours]


STARTS = """
import subprocess, sys, time
from cavesson.handlers import ending_with_parent
print("ready", flush=True)
subprocess.Popen(ending_with_parent([sys.executable, "-c", "import time; time.sleep(600)"]), start_new_session=True)
time.sleep(600)
"""


@pytest.mark.sampled(1)
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_a_process_that_is_just_starting_ends_with_its_parent(tmp_path: Path, number: int) -> None:
    for attempt in range(12):
        mark = f"{tmp_path}-{attempt}"
        command, environment = [sys.executable, "-c", STARTS], {**os.environ, "MARK": mark}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            time.sleep(random.random() * 0.01 * attempt)
            process.send_signal(number)
        assert not survivors(mark, 20)

"""Ctrl-C in a real terminal, and SIGTERM: real processes."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import cli_helpers
import pytest
from cli_helpers import write_recipe

import cavesson

SLOW = """
import time


def slow(prompts, responses, **columns):
    time.sleep(0.3)
    return [sum(map(ord, response)) % 7 / 3 for response in responses]
"""
ENDLESS = """
import time
from pathlib import Path


def slow(prompts, responses, **columns):
    if Path("run/attempts/0000.json").exists():  # not when it is tried before the first step
        Path("asked").touch()
        for _ in range(10_000):  # one long sleep might begin just after a signal, and delay its handler
            time.sleep(0.01)
    return [0.0] * len(responses)
"""
# Python handles a signal between two short sleeps even if it arrives just before a system call that would wait.
LOADING = "import time\nprint('loaded', flush=True)\nfor _ in range(6000):\n    time.sleep(0.01)\n" + SLOW
RECIPE = (
    cli_helpers.RECIPE.replace("steps = 2", "steps = 6").replace('"lowercase"', '"rewards.py:slow"')
    + """
[update]
epochs = 2
mini_batches = 2
[optimizer]
learning_rate = 1e-2
schedule = "linear"
[checkpoint]
every = 0
"""
)
SECONDS = 240
"""For which anything is waited for."""
CAVESSON = "import cavesson.cli; cavesson.cli.main()"


class Terminal:
    """A command in its own terminal."""

    opened: ClassVar[list["Terminal"]] = []

    def __init__(self, folder: Path, *arguments: str, code: str = CAVESSON) -> None:
        self.said = ""
        self._code: int | None = None
        self.pid, self._handle = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.environ["COLUMNS"] = "200"
            os.execv(sys.executable, [sys.executable, "-c", code, *arguments])
        self.opened.append(self)

    def press_ctrl_c(self) -> None:
        os.write(self._handle, b"\x03")

    def press_ctrl_c_until_it_ends(self) -> int:
        """Python does not notice the one that comes after a prompt was printed and before a line is waited for."""
        pressed, deadline = 0.0, time.monotonic() + SECONDS
        while self._read():
            assert time.monotonic() < deadline, self.said
            if time.monotonic() > pressed + 10:
                self.press_ctrl_c()
                pressed = time.monotonic()
        return self.end()

    def wait_for(self, there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not there():
            assert time.monotonic() < deadline, self.said
            self._read()

    def wait_for_text(self, text: str) -> None:
        self.wait_for(lambda: text in self.said)

    def end(self) -> int:
        """Read what is left and return the exit code; negative for a signal that nobody handled."""
        deadline = time.monotonic() + SECONDS
        while self._read():
            assert time.monotonic() < deadline, self.said
        self.wait_for(self._has_ended)
        assert self._code is not None
        return self._code

    def close(self) -> None:
        """Ends the command if it still runs."""
        if not self._has_ended():
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._handle)

    def _has_ended(self) -> bool:
        if self._code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if ended else None
        return self._code is not None

    def _read(self) -> bool:
        if not select.select([self._handle], [], [], 0.05)[0]:
            return True
        try:
            piece = os.read(self._handle, 65536)
        except OSError:
            return False
        self.said += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", piece.decode(errors="replace"))
        return bool(piece)


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Whatever a test started has ended after it, however it ends."""
    yield
    while Terminal.opened:
        Terminal.opened.pop().close()


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return prepared(tmp_path / "here")


def prepared(folder: Path) -> Path:
    folder.mkdir()
    write_recipe(folder, RECIPE)
    (folder / "rewards.py").write_text(SLOW)
    return folder


def goes_on(run: Path) -> Callable[[], bool]:
    """The recorder has taken another step after the first, which it writes at once; the others are in its journal."""
    return lambda: any(journal.stat().st_size > 0 for journal in (run / "record").glob(".journal-*"))


def results(run: Path) -> tuple[dict[str, bytes], list[dict[str, object]]]:
    weights = {path.name: path.read_bytes() for path in (run / "model").glob("*.safetensors")}
    assert weights
    return weights, cavesson.open(run).rows().drop_columns("attempt").to_pylist()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run without interruption."""
    folder = prepared(tmp_path_factory.mktemp("whole") / "here")
    (folder / "rewards.py").write_text(SLOW.replace("0.3", "0.0"))
    subprocess.run([sys.executable, "-c", CAVESSON, "ppo", "recipe.toml"], cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def whole(finished: Path) -> tuple[dict[str, bytes], list[dict[str, object]]]:
    return results(finished / "run")


def pasted(said: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the command that was printed to continue with."""
    (command,) = re.findall(r"; continue with: ([^\r\n]*)", said)
    return subprocess.run(["sh", "-c", command], cwd=folder, capture_output=True, text=True)


@pytest.mark.slow
def test_ctrl_c_saves_and_the_run_goes_on_bit_for_bit(here: Path, whole: object) -> None:
    terminal = Terminal(here, "ppo", "recipe.toml")
    terminal.wait_for(goes_on(here / "run"))
    terminal.press_ctrl_c()
    terminal.wait_for_text("interrupted: finishing the step, then saving; press Ctrl-C again to stop at once")
    assert terminal.end() == 130, terminal.said
    assert "the checkpoint is complete; continue with: " in terminal.said
    assert "Traceback" not in terminal.said
    (checkpoint,) = (here / "run" / "checkpoints").iterdir()
    assert not (here / "run" / "writer.json").exists()
    done = pasted(terminal.said, here)
    assert done.returncode == 0, done.stderr
    assert json.loads((here / "run" / "attempts" / "0001.json").read_text())["start_step"] == int(checkpoint.name[5:13])
    assert results(here / "run") == whole


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(here: Path) -> None:
    (here / "rewards.py").write_text(ENDLESS)
    terminal = Terminal(here, "ppo", "recipe.toml")
    terminal.wait_for((here / "asked").exists)
    terminal.press_ctrl_c()
    terminal.wait_for_text("finishing the step")
    began = time.monotonic()
    terminal.press_ctrl_c()
    assert terminal.end() == 130 and time.monotonic() - began < 60
    assert re.search(r"cavesson: interrupted; continue with: \S*cavesson ppo --resume run\r\n$", terminal.said)
    assert "Traceback" not in terminal.said


@pytest.mark.slow
def test_sigterm_saves_as_well(here: Path, whole: object) -> None:
    patient = f"import cavesson.train.signals as s; s.TWICE *= 20; {CAVESSON}"  # this machine may be busy
    process = subprocess.Popen(
        [sys.executable, "-c", patient, "ppo", "recipe.toml"], cwd=here, stdout=-3, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while not goes_on(here / "run")():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    assert process.stderr.readline().startswith("interrupted: finishing the step")
    process.send_signal(signal.SIGTERM)  # some schedulers send it to the command and to its group
    _, err = process.communicate(timeout=120)
    assert process.returncode == 143, err
    assert "; the checkpoint is complete; continue with: " in err and len(err.splitlines()) == 1
    (checkpoint,) = (here / "run" / "checkpoints").iterdir()
    assert pasted(err, here).returncode == 0
    assert json.loads((here / "run" / "attempts" / "0001.json").read_text())["start_step"] == int(checkpoint.name[5:13])
    assert results(here / "run") == whole


@pytest.mark.slow
def test_sigterm_before_anything_is_begun_leaves_nothing_held(here: Path) -> None:
    (here / "rewards.py").write_text(LOADING)
    process = subprocess.Popen(
        [sys.executable, "-c", CAVESSON, "ppo", "recipe.toml"],
        cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and "loaded" in process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (143, "cavesson: interrupted by SIGTERM\n")
    assert not (here / "run").exists()


@pytest.mark.slow
def test_ctrl_c_before_anything_is_begun_is_one_line(here: Path) -> None:
    (here / "rewards.py").write_text(LOADING)
    terminal = Terminal(here, "ppo", "recipe.toml")
    terminal.wait_for_text("loaded\r\n")
    terminal.press_ctrl_c()
    assert terminal.end() == 130 and terminal.said.split() == ["loaded", "^Ccavesson:", "interrupted"]
    assert not (here / "run").exists()


@pytest.mark.slow
def test_ctrl_c_ends_an_align_recipe_between_updates(here: Path) -> None:
    stage = re.sub(r"^(\[+)", r"\1ppo.", RECIPE.replace('run = "run"\n', ""), flags=re.MULTILINE)
    (here / "align.toml").write_text('run = "all"\n[ppo]\n' + stage)
    terminal = Terminal(here, "align", "align.toml")
    terminal.wait_for(goes_on(here / "all" / "ppo"))
    terminal.press_ctrl_c()
    assert terminal.end() == 130, terminal.said
    assert "finishing the step" in terminal.said and "stage ppo: interrupted" in terminal.said
    assert re.search(r"checkpoint is complete; continue with: \S*cavesson align align.toml\r\n$", terminal.said)
    assert list((here / "all" / "ppo" / "checkpoints").iterdir())


def test_ctrl_c_ends_an_import_that_follows(tmp_path: Path) -> None:
    line = json.dumps({"prompt": "p", "response": "r", "reward": 0.5, "step": 0})
    (tmp_path / "in.jsonl").write_text(line + "\n")
    terminal = Terminal(tmp_path, "import", "in.jsonl", "run", "--follow")
    terminal.wait_for_text("1 rollout")
    terminal.press_ctrl_c()
    assert terminal.end() == 0 and "1 rollout of rl-logging-board read into run" in terminal.said
    assert "Traceback" not in terminal.said


@pytest.mark.slow
def test_ctrl_c_closes_the_board(finished: Path) -> None:
    terminal = Terminal(finished, "board", "run", "--port", "0", "--no-browser")
    terminal.wait_for_text("http://127.0.0.1")
    time.sleep(1)  # its processes are starting
    terminal.press_ctrl_c()
    assert terminal.end() == 0 and "Traceback" not in terminal.said, terminal.said


@pytest.mark.slow
def test_ctrl_c_leaves_a_conversation(finished: Path) -> None:
    terminal = Terminal(finished, "generate", "run", "--chat", "--template", "{{ messages[0].content }}")
    terminal.wait_for_text("> ")
    assert terminal.press_ctrl_c_until_it_ends() == 0 and "Traceback" not in terminal.said, terminal.said


@pytest.mark.slow
def test_ctrl_c_in_any_other_command_is_one_line(finished: Path) -> None:
    code = "import cavesson.cli, cavesson.record.read.query; print('begins', flush=True); cavesson.cli.main()"
    terminal = Terminal(finished, "sql", "run", "select count(*) from range(1000000000000)", code=code)
    terminal.wait_for_text("begins")
    time.sleep(2)
    terminal.press_ctrl_c()
    assert terminal.end() == 130, terminal.said
    assert terminal.said.split() == ["begins", "^Ccavesson:", "interrupted"]

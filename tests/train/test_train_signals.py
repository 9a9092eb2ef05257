"""Signals while a run trains: the first is noted, one that is sent twice counts once, another one ends at once."""

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from train_helpers import OFFLINE, ONLINE, everything, quiet, tiny_run

from cavesson.errors import SignalledError
from cavesson.handlers import handling
from cavesson.train.loop import Report
from cavesson.train.resuming import settings_of
from cavesson.train.run import Training
from cavesson.train.signals import TWICE, Signals


class Clock:
    """What time it is, to the second."""

    def __init__(self) -> None:
        self.now = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: made.now)
    return made


@pytest.fixture
def ended() -> Iterator[list[int]]:
    """The signals that got through to the handlers from before."""
    seen: list[int] = []
    with handling(lambda number, frame: seen.append(number), signal.SIGINT, signal.SIGTERM):
        yield seen


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_is_noted_inside_the_block_and_ends_at_once_outside_of_it(ended: list[int], number: int) -> None:
    with Signals(quiet=True) as signals, signals.deferred():
        signal.raise_signal(number)
        assert (signals.asked, ended) == (number, [])
    with Signals(quiet=True) as signals:
        with signals.deferred():
            pass
        signal.raise_signal(number)
        assert (signals.asked, ended) == (0, [number])
    signal.raise_signal(number)
    assert ended == [number, number]


# A person presses Ctrl-C twice on purpose; launchers and schedulers pass signals on that the process gets as well.
@pytest.mark.parametrize(
    ("number", "alone", "sent_twice"),
    [
        (signal.SIGTERM, True, True),
        (signal.SIGTERM, False, True),
        (signal.SIGINT, False, True),
        (signal.SIGINT, True, False),
    ],
)
def test_a_second_one_counts_where_it_is_not_the_first_sent_twice(
    ended: list[int], clock: Clock, number: int, alone: bool, sent_twice: bool
) -> None:
    assert TWICE == 1.0
    with Signals(quiet=True, alone=alone) as signals, signals.deferred():
        signal.raise_signal(number)
        clock.now += 0.9
        signal.raise_signal(number)
        assert ended == ([] if sent_twice else [number])
        clock.now += 0.2
        signal.raise_signal(number)
        assert ended == [number] * (1 if sent_twice else 2) and signals.asked == number


@pytest.mark.parametrize("quiet", [False, True])
def test_the_first_is_said(ended: list[int], quiet: bool, capsys: pytest.CaptureFixture[str]) -> None:
    before = set(threading.enumerate())
    with Signals(quiet=quiet) as signals, signals.deferred():
        signal.raise_signal(signal.SIGTERM)
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
    expected = "interrupted: finishing the step, then saving; send SIGTERM again to stop at once\n"
    assert capsys.readouterr().err == ("" if quiet else expected)


def at_step(last: int) -> Report:
    """Send SIGTERM to this process when a step is done."""

    def report(step: int, metrics: dict[str, float]) -> None:
        if step == last:
            signal.raise_signal(signal.SIGTERM)

    return report


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [*OFFLINE, *ONLINE])
def test_a_signal_between_two_steps_saves_and_the_run_goes_on_bit_for_bit(tmp_path: Path, name: str) -> None:
    changes: dict[str, object] = {"checkpoint__every": 0} | ({} if name in OFFLINE else {"steps": 3})
    whole = tiny_run(name, tmp_path / "whole", **changes)
    whole.run(quiet)
    folder = tmp_path / "run"
    with pytest.raises(SignalledError, match=rf"^interrupted after 1 of {whole.trainer.steps} steps") as raised:
        tiny_run(name, folder, **changes).run(at_step(0))
    assert raised.value.exit_code == 143
    again = Training(settings_of(folder, name, []), resume=True)
    assert again.trainer.next_step == 1
    again.run(quiet)
    assert everything(folder) == everything(tmp_path / "whole")


def test_a_signal_inside_a_step_saves_and_the_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole = tiny_run("grpo", tmp_path / "whole", checkpoint__every=0)
    whole.run(quiet)
    folder = tmp_path / "run"
    training = tiny_run("grpo", folder, checkpoint__every=0)

    def interrupt(*_: Any) -> None:
        if torch.is_grad_enabled():  # the forward pass of an update, not that of scoring
            signal.raise_signal(signal.SIGTERM)

    training.trainer.policy.register_forward_hook(interrupt)
    with pytest.raises(SignalledError, match=r"^interrupted in step 0, after 1 of its 4 updates") as raised:
        training.run(quiet)
    assert raised.value.exit_code == 143
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000000-update-00000001"]
    again = Training(settings_of(folder, "grpo", []), resume=True)
    assert again.trainer.next_step == 0 and len(again.trainer.unfinished.updates) == 1
    again.run(quiet)
    assert everything(folder) == everything(tmp_path / "whole")


def test_a_signal_in_the_last_step_lets_the_run_finish(tmp_path: Path) -> None:
    result = tiny_run("sft", tmp_path / "run", epochs=1).run(at_step(1))
    assert len(result.metrics) == 2 and (tmp_path / "run" / "model").is_dir()

"""What is shown while a run trains."""

import pytest
from rich.text import Text

from cavesson.train.progress import Progress


def test_the_live_lines_fit_80_columns_without_losing_a_number(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes what it writes to for a terminal
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    metrics = {
        "reward/mean": -0.1469, "kl/objective": 12.345, "kl/coef": 0.07, "policy/entropy": 3.394,
        "length/response_mean": 128.25, "tokens_per_second": 12044.0, "time/total": 2.0,
    }  # fmt: skip
    with Progress(steps=20, done=0, notes=[], quiet=False) as progress:
        progress.report(0, metrics)
    *_, bar, numbers = Text.from_ansi(capsys.readouterr().out).plain.rstrip().splitlines()
    assert " 1 of 20 steps done " in f" {bar.strip()} " and " left " in bar and "…" not in bar
    assert numbers.strip() == "reward -0.147  KL 12.35  β 0.070  entropy 3.39  length 128.2  tokens/s 12044"
    assert max(len(bar), len(numbers)) <= 80


def test_the_share_of_unscored_responses_is_shown_where_there_are_any(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(steps=4, done=0, notes=[], quiet=False) as progress:
        for step, share in enumerate((0.0, 0.25, 1.0)):
            metrics = {"reward/unscored": share, "time/total": 1.0} | ({"reward/mean": 0.5} if share < 1 else {})
            progress.report(step, metrics)
    assert [line.split("  ")[1:-2] for line in capsys.readouterr().out.splitlines()] == [
        ["reward 0.500"], ["reward 0.500", "unscored 25%"], ["unscored 100%"],
    ]  # fmt: skip

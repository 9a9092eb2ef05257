"""The log of a run: what was printed, warnings and tracebacks, with their times, attempt after attempt."""

import logging
import re
import warnings
from pathlib import Path

import pytest
from cli_helpers import RECIPE, cavesson, fresh

from cavesson.record import begin_attempt, write_run
from cavesson.train.log import logging_to

REWARD = """
import logging, warnings
from pathlib import Path

def mine(prompts, responses, **_):
    place = Path(__file__).with_name("calls")
    calls = int(place.read_text()) if place.exists() else 0
    place.write_text(str(calls + 1))
    warnings.warn(f"call {calls}")
    logging.getLogger("judge").warning("the judge is slow")
    if calls == 5:
        return 1 / 0
    return [0.0] * len(responses)
"""


@pytest.mark.slow
def test_a_run_that_failed_and_was_continued(tmp_path: Path) -> None:
    here = fresh(tmp_path / "here")
    (here / "mine.py").write_text(REWARD)
    (here / "recipe.toml").write_text(RECIPE.replace('"lowercase"', '"mine.py:mine"').replace("steps = 2", "steps = 8"))
    failed = cavesson(here, "ppo", "recipe.toml", "--checkpoint.every", "1")
    assert failed.code == 2 and "ZeroDivisionError" in failed.err and "Traceback" not in failed.err
    continued = cavesson(here, "ppo", "--resume", "run")
    assert continued.code == 0, continued.err
    log = (here / "run" / "log.txt").read_text(encoding="utf-8")
    entries = re.findall(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ (INFO|WARNING|ERROR) (\w+): (.*)$", log, re.MULTILINE)
    starts = [text for level, _, text in entries if text.startswith("attempt ")]
    assert starts[0].startswith("attempt 0 from step 0: cavesson ") and starts[0].endswith("--checkpoint.every 1")
    assert re.match(r"attempt 1 from step [1-4]: .* ppo --resume run$", starts[1]) and len(starts) == 2
    # Every line of a step that was printed, in its order; times differ from call to call, the lines do not.
    printed = [line for out in (failed.out, continued.out) for line in out.splitlines() if line.startswith("step ")]
    assert [text for _, _, text in entries if text.startswith("step ")] == printed != []
    assert any("call 3" in text and "UserWarning" in text for level, _, text in entries if level == "WARNING")
    assert ("WARNING", "judge", "the judge is slow") in entries
    assert "Traceback (most recent call last)" in log and "return 1 / 0" in log and "ZeroDivisionError" in log
    assert entries[-1][2] == "finished"
    # On the screen everything is as it is without a log.
    assert "the judge is slow" in continued.err and "UserWarning: call" in continued.err
    assert "ZeroDivisionError" not in continued.err


def test_the_rest_of_logging_stays_as_it_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_run(tmp_path / "run", {})
    begin_attempt(tmp_path / "run", 3)
    root, show = list(logging.getLogger().handlers), warnings.showwarning
    with pytest.raises(KeyboardInterrupt), logging_to(tmp_path / "run", tmp_path / "run", 0):
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match="no"), logging_to(tmp_path / "run", tmp_path / "run", 1):
        logging.getLogger("cavesson").warning("every process says this")
        logging.getLogger("cavesson.record").warning("only this process says this")
        raise ValueError("no")
    assert logging.getLogger().handlers == root and warnings.showwarning is show
    assert logging.getLogger("cavesson").handlers == [] and logging.getLogger("cavesson").propagate
    lines = (tmp_path / "run" / "log.txt").read_text().splitlines()
    assert "attempt 0 from step 3" in lines[0] and lines[1].endswith("ERROR cavesson: interrupted")
    # Another process writes its errors, and warnings that other processes do not give.
    assert "process 1 WARNING cavesson.record: only this process says this" in lines[2]
    assert "process 1 ERROR cavesson: ended by ValueError" in lines[3]

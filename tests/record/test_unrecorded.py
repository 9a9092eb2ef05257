"""What a recorder says when it is closed: which columns would tell the doctor more."""

import logging
from pathlib import Path

import pytest

from cavesson.record import Recorder, begin_attempt
from cavesson.record.write.lock import Lock
from cavesson.record.write.recorder import _LOGGER
from cavesson.record.write.unrecorded import EVERY_LOOP, best_addition

ROWS = {"prompt": ["a", "b"], "response": ["x", "yz"], "reward": [0.5, 1.0]}
NUMBERS = [[-0.5], [-1.0, -0.25]]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name == _LOGGER.name]


def close(folder: Path, *columns: str, **options: object) -> None:
    tokens = {name: [[7], [8, 9]] if name == "token_id" else NUMBERS for name in columns}
    recorder = Recorder(folder, **options)  # type: ignore[arg-type]
    recorder.rollouts(0, ROWS, tokens)
    recorder.close()
    recorder.close()


def test_a_closed_recorder_names_the_most_useful_columns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    close(tmp_path / "run", "token_id", "logprob")
    (line,) = said(caplog)
    count = best_addition(["rows.prompt", "rows.response", "rows.reward", "tokens.token_id", "tokens.logprob"])
    assert count is not None and count.columns == ("ref_logprob",) and count.rules > 5
    assert line == (
        f"{tmp_path / 'run'}: with the token column ref_logprob, the doctor could apply {count.rules} more rules: "
        'recorder.rollouts(step, rows, {…, "ref_logprob": …})'
    )


def test_a_record_that_has_all_of_them_is_closed_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    close(tmp_path / "run", *EVERY_LOOP)
    assert said(caplog) == []


def test_a_recorder_of_metrics_alone_or_of_a_trainer_says_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Recorder(tmp_path / "metrics") as recorder:
        recorder.metrics(0, {"loss": 1.0})
    lock = Lock(tmp_path / "hooked")
    close(tmp_path / "hooked", attempt=begin_attempt(tmp_path / "hooked", 0), lock=lock)
    lock.release()
    assert said(caplog) == []


def test_it_can_be_switched_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("cavesson")
    logger.setLevel("ERROR")
    try:
        close(tmp_path / "run")
    finally:
        logger.setLevel(logging.NOTSET)
    assert said(caplog) == []


def test_the_columns_are_those_with_most_rules_each(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = {
        "one": [["tokens.logprob", "tokens.ref_logprob"]],
        "two": [["tokens.logprob", "tokens.ref_logprob"], ["tokens.value"]],
        "three": [["tokens.entropy"], ["rows.kl_coef"]],
        "four": [["rows.split"]],
        "judged": [["rows.reward"], ["tokens.entropy"]],
        "later": [["tokens.entropy", "tokens.logprob", "tokens.ref_logprob"]],
    }
    monkeypatch.setattr("cavesson.record.write.unrecorded._sufficient", lambda: rules)
    first = best_addition(["rows.reward"])  # entropy: 1 rule for 1 column; the pair: 2 for 2; all three: 4 for 3
    assert first is not None and (set(first.columns), first.rules) == ({"logprob", "ref_logprob", "entropy"}, 4)
    second = best_addition(["rows.reward", "tokens.entropy"])  # three rules for two columns
    assert second is not None and (set(second.columns), second.rules) == ({"logprob", "ref_logprob"}, 3)
    assert best_addition(["rows.reward", "rows.kl_coef", "tokens.value", "tokens.logprob"]) == (("ref_logprob",), 1)
    assert best_addition(["rows.reward", *(f"tokens.{name}" for name in EVERY_LOOP)]) is None

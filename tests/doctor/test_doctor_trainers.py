"""What other trainers rightly do and record differently, and what is still wrong in their runs."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from doctor_helpers import END, LENGTH, Made, healthy

import cavesson
from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import diagnose
from cavesson.doctor.rules import RULES
from cavesson.doctor.rules.invariants import trained_behind_end
from cavesson.doctor.rules.token_rewards import reward_accounting
from cavesson.integrations.verl import rollouts_of
from cavesson.record import Recorder, begin_attempt, write_run


def verl_record(made: Made, folder: Path, scale: float = 1.0) -> RunData:
    """Record a run as the hook for verl does, which sees the scores, and the token rewards with the penalty in them."""
    write_run(folder, {"trainer": "verl"})
    last = np.arange(LENGTH) == made.mask.sum(-1, keepdims=True) - 1
    scores = np.where(last, scale * made.rows["reward"][..., None], 0.0)
    columns = {"responses": "token_id", "old_log_probs": "logprob", "ref_log_prob": "ref_logprob",
               "response_mask": "mask", "token_level_rewards": "token_reward"}  # fmt: skip
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: " ".join(map(str, ids)))
    with Recorder(folder, attempt=begin_attempt(folder, 0)) as recorder:
        for step in range(len(made.mask)):
            tensors = {theirs: made.tokens[ours][step] for theirs, ours in columns.items()}
            tensors |= {"prompts": np.ones((len(made.mask[0]), 1)), "token_level_scores": scores[step]}
            tensors["attention_mask"] = np.concatenate([tensors["prompts"] > 0, made.mask[step]], 1)
            batch = {name: torch.as_tensor(values) for name, values in tensors.items()}
            recorder.rollouts(step, *rollouts_of(SimpleNamespace(batch=batch, non_tensor_batch={}), tokenizer))
    return RunData(cavesson.open(folder))


def test_a_penalty_in_verls_token_rewards_is_accounted_for_once(tmp_path: Path) -> None:
    """Σ token_reward = score − β·Σ KL; a score that is scaled on its way is still found."""
    data = verl_record(healthy(), tmp_path / "healthy")
    assert "reward-accounting" in [rule.name for rule, _ in diagnose(data, RULES).healthy]
    scaled = reward_accounting.statistic(verl_record(healthy(), tmp_path / "scaled", 0.5))
    assert scaled is not None and scaled.sick


PAD = 20
"""A token that no policy samples here."""


def two_turns(turn: int = 6, tool: int = 4) -> Made:
    """Each response has two turns that end in an end token, and between them what a tool wrote, which is masked."""
    made, chance = healthy(steps=10, batch=16), np.random.default_rng(7)
    ids = chance.integers(1, 10, made.mask.shape)
    ids[..., turn - 1] = ids[..., 2 * turn + tool - 1] = END
    where = np.arange(LENGTH)
    made.tokens["token_id"] = ids
    made.tokens["mask"] = np.broadcast_to(
        (where < turn) | ((where >= turn + tool) & (where < 2 * turn + tool)), ids.shape
    ).copy()
    return made


def without_gaps(made: Made) -> Made:
    """Move the trained tokens together, as a trainer that stores only these does."""
    order = np.argsort(~made.mask, axis=-1, kind="stable")
    made.tokens = {name: np.take_along_axis(column, order, -1) for name, column in made.tokens.items()}
    return made


def test_a_turn_after_a_tools_result_is_rightly_trained(tmp_path: Path) -> None:
    made = two_turns()
    made.info["trainer"] = "trl 1.16.0"
    found = trained_behind_end.statistic(made.data(tmp_path))
    assert found is not None and not found.sick and found.seen == 0


@pytest.mark.parametrize("ended", [1.0, 0.7])
def test_turns_that_are_not_marked_leave_it_undecided(ended: float, tmp_path: Path) -> None:
    """In some responses the last turn is cut, so that nothing ends it."""
    made = without_gaps(two_turns())
    made.info["trainer"] = "openrlhf"
    cut = np.random.default_rng(3).random(made.mask.shape[:2]) > ended
    made.tokens["mask"][..., 11] &= ~cut
    found = diagnose(made.data(tmp_path), [trained_behind_end])
    assert not found.findings
    (said,) = found.skipped
    assert said.undecided and "does not mark turns" in said.reason


@pytest.mark.parametrize("pad", [PAD, END])
@pytest.mark.parametrize("gaps", [True, False])
def test_padding_behind_the_last_turn_is_wrongly_trained(gaps: bool, pad: int, tmp_path: Path) -> None:
    """Three tokens of padding: 3 of 15 trained ones."""
    made = two_turns()
    made.tokens["token_id"][..., 16:] = pad
    made.tokens["mask"][..., 16:19] = True
    made.info["trainer"] = "trl 1.16.0" if gaps else "openrlhf"
    found = trained_behind_end.statistic((made if gaps else without_gaps(made)).data(tmp_path))
    assert found is not None and found.sick
    assert found.seen == pytest.approx(3 / 15)


def test_a_tools_result_that_is_trained_too_is_text_after_the_end(tmp_path: Path) -> None:
    """TRL's record would have a gap there if it were masked: 10 of 16 trained tokens follow the first end token."""
    made = two_turns()
    made.tokens["mask"][..., :16] = True
    made.info["trainer"] = "trl 1.16.0"
    found = trained_behind_end.statistic(made.data(tmp_path))
    assert found is not None and found.sick
    assert found.seen == pytest.approx(10 / 16)

"""What other trainers rightly do and record differently, and what is still wrong in their runs."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from doctor_helpers import LENGTH, Made, healthy

import cavesson
from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import diagnose
from cavesson.doctor.rules import RULES
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

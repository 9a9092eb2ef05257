"""Record PPO of TRL 1.10, whose trainer keeps a step's values in local variables while it calls its callbacks."""

import sys
from types import FrameType
from typing import Any

import numpy as np

from cavesson.integrations.tensors import as_array, without_padding
from cavesson.integrations.trl_callback import RecorderCallback

COLUMNS = {
    "token_id": "responses",
    "logprob": "logprobs",
    "ref_logprob": "ref_logprobs",
    "value": "values",
    "token_reward": "rewards",
    "advantage": "advantages",
    "return": "returns",
}
"""The record's column → the trainer's local variable."""


def watch(trainer: Any, callback: RecorderCallback) -> None:
    """Make ``callback`` read the trainer's local variables when a step's metrics are logged."""

    def read() -> None:
        step = trainer.state.global_step - 1
        variables = _variables(trainer)
        if variables is not None and not callback.has_rollouts(step):
            tokens = {name: as_array(variables[local]) for name, local in COLUMNS.items()}
            tokens["attended"] = ~as_array(variables["padding_mask"])
            callback.rollouts(step, _rows(trainer, variables, step), tokens)

    callback.step_ended = read
    if trainer.stop_token_id is not None:  # after it, the mask has to end
        callback.settings["eos_token_ids"] = [int(trainer.stop_token_id)]


def _variables(trainer: Any) -> dict[str, Any] | None:
    """Return the local variables of the running ``train``; None if they do not contain a complete step."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        variables = frame.f_locals
        if frame.f_code.co_name == "train" and variables.get("self") is trainer and "returns" in variables:
            return dict(variables) if "scores" in variables else None
        frame = frame.f_back
    return None


def _rows(trainer: Any, variables: dict[str, Any], step: int) -> dict[str, Any]:
    tokenizer = trainer.processing_class
    queries, texts = as_array(variables["queries"]), as_array(variables["postprocessed_responses"])
    shaped, ended = as_array(variables["scores"]), as_array(variables["contain_eos_token"])
    penalty = trainer.args.missing_eos_penalty or 0.0
    count = len(queries)
    return {
        "prompt": tokenizer.batch_decode(queries, skip_special_tokens=True),
        "response": tokenizer.batch_decode(texts, skip_special_tokens=True),
        "prompt_ids": without_padding(queries, queries != tokenizer.pad_token_id),
        "reward": shaped + np.where(ended, 0.0, penalty),
        "shaped_reward": shaped,
        "finish_reason": ["eos" if end else "length" for end in ended],
        "policy_version": [step] * count,
        "kl_coef": [float(trainer.args.kl_coef)] * count,
    }

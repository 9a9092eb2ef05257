"""Rollouts of known numbers, the way `train.update` adds losses up, and TRL's losses on the same numbers."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cavesson.algorithms.base import RolloutAlgorithm
from cavesson.algorithms.grpo import GRPO
from cavesson.ops.masked import weighted_mean
from cavesson.types import Batch, Scores

LENGTHS = (3, 1, 4, 2, 4, 0, 2, 3)
GROUP = (5, 5, 5, 5, 9, 9, 9, 9)
LIMIT = 4


def uneven(dtype: torch.dtype = torch.float32, **changes: Any) -> Batch:
    """Eight responses of 0 to 4 tokens to two prompts; padding holds numbers that must not matter."""
    generator = torch.Generator().manual_seed(3)
    mask = (torch.arange(LIMIT) < torch.tensor(LENGTHS)[:, None]).to(dtype)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    logprob = -1.5 + 0.5 * numbers(8, LIMIT)
    columns = {
        "attended": mask,
        "learned": mask,
        "prompt_mask": torch.ones(8, 2),
        "logprob": logprob,
        "sampler_logprob": logprob + 0.5 * numbers(8, LIMIT),
        "ref_logprob": logprob + 0.5 * numbers(8, LIMIT),
        "shaped_reward": numbers(8),
        "group_in_step": torch.tensor(GROUP),
        "kl_coef": torch.full((8,), 0.3, dtype=dtype),
        "ended": torch.tensor([1.0, 1, 0, 1, 0, 1, 1, 1], dtype=dtype),
    }
    return Batch({**columns, **changes})


def grpo(**changes: Any) -> GRPO:
    return GRPO(**{"longest": LIMIT, **changes})


def full(batch: Batch) -> Batch:
    """The responses that have tokens: TRL knows no others."""
    return batch.take(batch["learned"].sum(1).nonzero().squeeze(1))


def moved(batch: Batch, size: float = 0.3) -> Tensor:
    """Log-probabilities after some update."""
    generator = torch.Generator().manual_seed(8)
    noise = torch.randn(batch["learned"].shape, generator=generator, dtype=torch.float64)
    return (batch["logprob"] + size * noise.to(batch["learned"].dtype)).detach().requires_grad_()


def scores(logprob: Tensor) -> Scores:
    return Scores(logprob, torch.zeros_like(logprob), None)


def accumulated(algorithm: RolloutAlgorithm, batch: Batch, logprob: Tensor, size: int) -> tuple[float, Tensor]:
    """Loss and gradient of a mini-batch that is worked on `size` responses at a time, as `train.update` does it."""
    total, loss = float(algorithm.total(batch)), 0.0
    logprob = logprob.detach().requires_grad_()
    for start in range(0, len(batch), size):
        rows = torch.arange(start, min(start + size, len(batch)))
        micro = batch.take(rows)
        now = logprob[rows][:, : micro["learned"].shape[1]]
        part = weighted_mean(algorithm.loss(scores(now), micro).loss, algorithm.weights(micro), total)
        part.backward()
        loss += part.item()
    assert logprob.grad is not None
    return loss, logprob.grad


def weighted_means(algorithm: RolloutAlgorithm, batch: Batch, logprob: Tensor) -> dict[str, float]:
    """The metrics of a mini-batch."""
    result, weights = algorithm.loss(scores(logprob.detach()), batch), algorithm.weights(batch)
    return {name: float(weighted_mean(items, weights)) for name, items in result.means.items()}


def trl_trainer(kind: str, **settings: Any) -> Any:
    """TRL's GRPOTrainer or RLOOTrainer, as far as its loss needs one: the model is asked for nothing."""
    trl = pytest.importorskip("trl")
    known = {
        "_metrics": {"train": defaultdict(list)},
        "_get_per_token_logps_and_entropies": lambda *_, **__: (settings["logprob"], settings["logprob"] * 0, None),
        "accelerator": SimpleNamespace(num_processes=1, reduce=lambda x, **_: x, gather=lambda x: x),
        "model": SimpleNamespace(training=True),
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": LIMIT,
        "epsilon_low": 0.2,
        "epsilon_high": 0.28,
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "_entropy_bonus_enabled": False,
        "beta": 0.0,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "importance_sampling_level": "token",
    }
    extra = {"delta": None, "use_bias_correction_kl": False, "steps_per_generation": 1, **settings.pop("args", {})}
    trainer = SimpleNamespace(**{**known, "args": SimpleNamespace(**extra), **settings})
    trainer.get_off_policy_mask = getattr(getattr(trl, kind), "get_off_policy_mask", None)
    trainer.loss = lambda inputs: getattr(trl, kind)._compute_loss(trainer, None, inputs)
    return trainer


def trl_inputs(batch: Batch, **more: Tensor) -> dict[str, Tensor]:
    """A batch in TRL's words."""
    mask = batch["learned"]
    return {
        "prompt_ids": torch.ones(len(batch), 2, dtype=torch.long),
        "prompt_mask": torch.ones(len(batch), 2, dtype=torch.long),
        "completion_ids": torch.ones_like(mask, dtype=torch.long),
        "completion_mask": mask.long(),
        "num_items_in_batch": mask.sum(),
        "advantages": batch["advantage"][:, 0],
        **more,
    }

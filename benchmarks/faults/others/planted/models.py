"""Faults of the reference model."""

from typing import Any

import torch

from benchmarks.faults.others.fault import TOKENS, fault
from benchmarks.faults.others.plan import Plan

EVERY = 10


def _copy_policy(trainer: Any) -> None:
    policy = trainer.accelerator.unwrap_model(trainer.model)
    trainer.ref_model.load_state_dict(getattr(policy, "policy", policy).state_dict())


@fault(causes=["reference-is-policy"], also=["kl-flat"], seen=TOKENS)
def reference_is_policy(plan: Plan) -> None:
    """The reference has the policy's weights at every step."""
    plan.stepped.append(lambda trainer: _copy_policy(trainer) if plan.on() else None)


@fault(causes=["reference-replaced"], seen=TOKENS)
def reference_synchronised(plan: Plan) -> None:
    """The reference takes over the policy's weights every ten steps."""
    plan.stepped.append(lambda trainer: _copy_policy(trainer) if trainer.state.global_step % EVERY == 0 else None)


@fault(causes=["kl-at-start"], also=["kl-explosion"], seen=TOKENS)
def reference_other(plan: Plan) -> None:
    """The reference is a different model: its weights have noise of a tenth of their spread."""

    def disturb(trainer: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in trainer.ref_model.parameters():
                if weight.ndim > 1:
                    weight += 0.1 * weight.std() * torch.randn(weight.shape, generator=generator)

    plan.built.append(disturb)

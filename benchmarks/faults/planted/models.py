"""Faults of policy, reference and critic."""

import copy
from typing import Any

import torch

from benchmarks.faults.fault import fault
from benchmarks.faults.setup import Setup, policy
from cavesson.models import policy as policy_module
from cavesson.train.run import Training


@fault(causes=["ratio-not-one", "kl-at-start"], levels=(0.02, 0.1, 0.3))
def dropout_on(setup: Setup, level: float) -> None:
    """The policy is in training mode with attention dropout, in scoring and in learning."""

    def built(training: Training) -> None:
        for module in policy(training).model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = level

    def in_training_mode(original: Any, model: Any, *arguments: Any) -> Any:
        model.train()
        states = original(model, *arguments)
        model.eval()
        return states

    setup.built.append(built)
    setup.wrap(policy_module, "last_states", in_training_mode)


@fault(causes=["reference-is-policy"], levels=("object", "weights", "step"))
def reference_aliased(setup: Setup, level: str) -> None:
    """The reference is the policy: the same object, the same tensors, or a copy made anew at every step."""

    def built(training: Training) -> None:
        reference = policy(training).frozen_reference
        if level == "object":
            reference.model = policy(training).model
        elif level == "weights":
            for mine, its in zip(reference.parameters(), policy(training).model.parameters(), strict=True):
                mine.data = its.data

    def before(training: Training, step: int) -> None:
        if level == "step":
            _replace_reference(training)

    setup.built.append(built)
    setup.before_step.append(before)


@fault(causes=["reference-replaced"], levels=(12, 8, 5))
def reference_synchronised(setup: Setup, level: int) -> None:
    """The reference is set to the policy every so many steps."""

    def before(training: Training, step: int) -> None:
        if step and step % level == 0:
            _replace_reference(training)

    setup.before_step.append(before)


def _replace_reference(training: Training) -> None:
    policy(training).frozen_reference.model = copy.deepcopy(policy(training).model).requires_grad_(False)


@fault(causes=["kl-at-start"], levels=(0.01, 0.03, 0.1))
def reference_other(setup: Setup, level: float) -> None:
    """The reference has somewhat other weights than the policy starts from (an older checkpoint, quantised)."""

    @torch.no_grad()
    def built(training: Training) -> None:
        reference = policy(training).frozen_reference
        generator = torch.Generator().manual_seed(0)
        for weight in reference.parameters():
            weight.mul_(1 + level * torch.randn(weight.shape, generator=generator))

    setup.built.append(built)


@fault(causes=["value-constant", "value-not-fitting"], levels=("head", "frozen", "zero"), algorithms=["ppo"])
def critic_dead(setup: Setup, level: str) -> None:
    """The critic learns nothing: its loss weighs nothing, its weights are frozen, or its output is detached."""
    if level == "zero":
        setup.set("ppo.value_coef", 0.0)
        return

    def built(training: Training) -> None:
        found = policy(training)
        found.value_head.requires_grad_(False)
        if level == "frozen":
            found.critic.requires_grad_(False)

    setup.built.append(built)


@fault(causes=["value-start"], levels=(2.0, 4.0, 10.0), algorithms=["ppo"])
def critic_offset(setup: Setup, level: float) -> None:
    """The critic's head starts with an offset, as one copied from a reward model."""

    @torch.no_grad()
    def built(training: Training) -> None:
        policy(training).value_head.bias.fill_(level)

    setup.built.append(built)


@fault(causes=["value-start"], levels=(0.3, 0.6, 1.5), algorithms=["ppo"])
def critic_random(setup: Setup, level: float) -> None:
    """The critic's head starts at random."""

    @torch.no_grad()
    def built(training: Training) -> None:
        torch.manual_seed(setup.seed)
        policy(training).value_head.weight.normal_(0, level)

    setup.built.append(built)


@fault(causes=["value-not-fitting"], levels=(0.7, 0.9, 1.0), algorithms=["ppo"])
def returns_shuffled(setup: Setup, level: float) -> None:
    """The critic's targets of a share of the responses are those of others."""

    def credited(original: Any, self: Any, rollouts: Any, *rest: Any) -> Any:
        batch = original(self, rollouts, *rest)
        wrong = (7 * torch.arange(len(batch))) % 10 < 10 * level
        order = torch.arange(len(batch))
        order[wrong] = order[wrong].roll(1)
        return batch.with_columns(
            **{"return": -3 * batch["return"][order] * wrong[:, None] + batch["return"] * ~wrong[:, None]}
        )

    from cavesson.algorithms.ppo import PPO

    setup.wrap(PPO, "credit", credited)

"""Group-relative policy optimisation with clipped ratios, and the KL to the reference in the loss (k3)."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.faults.small.trainers.model import Sampled, generate, rows, score

Record = Callable[..., None]


@dataclass
class Settings:
    """What people set."""

    steps: int = 32
    prompts: int = 8
    group: int = 8
    lr: float = 3e-4
    warmup: int = 0
    beta: float = 0.02
    eps_low: float = 0.2
    eps_high: float = 0.2
    num_iterations: int = 1
    mini_batches: int = 2
    temperature: float = 1.0
    entropy_bonus: float = 0.0
    max_grad_norm: float = 1.0
    scale_by_std: bool = True
    whole_batch: bool = False
    """Whether the mean and the deviation are those of the batch"""
    sync_every: int = 1
    """Steps after which the sampler gets the weights"""


def group_advantages(rewards: Tensor, settings: Settings) -> Tensor:
    """Return [B] by how much each reward is above the mean of its group, in standard deviations."""
    if settings.whole_batch:
        return (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    grouped = rewards.view(-1, settings.group)
    centred = grouped - grouped.mean(1, keepdim=True)
    if settings.scale_by_std:
        centred = centred / (grouped.std(1, keepdim=True) + 1e-4)
    return centred.flatten()


def policy_loss(
    new: Tensor, old: Tensor, ref: Tensor, advantages: Tensor, mask: Tensor, settings: Settings
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss per token and numbers about it; all arguments are [B, T]."""
    ratio = (new - old).exp()
    clipped = ratio.clamp(1 - settings.eps_low, 1 + settings.eps_high)
    gain = torch.minimum(ratio * advantages, clipped * advantages)
    k3 = (ref - new).exp() - (ref - new) - 1
    loss = -(gain - settings.beta * k3)
    count = mask.sum()
    about = {
        "clip_frac": ((ratio != clipped) * mask).sum() / count,
        "kl": (k3 * mask).sum() / count,
        "policy_kl": (0.5 * (new - old) ** 2 * mask).sum() / count,
        "ratio_error": ((ratio - 1).abs() * mask).max(),
    }
    return (loss * mask).sum() / count, {name: value.detach() for name, value in about.items()}


def update(
    policy: nn.Module, optimizer: Any, batch: Sampled, old: Tensor, ref: Tensor, adv: Tensor, settings: Settings
) -> list[dict[str, float]]:
    """Make the updates of a step; return numbers about each mini-batch, the first one first."""
    found = []
    policy.train()
    for _epoch in range(settings.num_iterations):
        for index in torch.randperm(len(old)).chunk(settings.mini_batches):
            some = rows(batch, index)
            new, entropy = score(policy, some, settings.temperature)
            loss, about = policy_loss(new, old[index], ref[index], adv[index], some.mask, settings)
            loss = loss - settings.entropy_bonus * entropy.sum() / some.mask.sum()
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(policy.parameters(), settings.max_grad_norm)
            optimizer.step()
            about |= {"loss": loss.detach(), "grad_norm": norm}
            found.append({name: float(value) for name, value in about.items()})
    return found


def train(task: Any, policy: nn.Module, settings: Settings, record: Record) -> None:
    """Train a policy on a task."""
    reference = copy.deepcopy(policy).eval()
    sampler = copy.deepcopy(policy).eval()
    optimizer = torch.optim.Adam(policy.parameters(), lr=settings.lr)
    version = 0
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * min(1.0, (step + 1) / max(1, settings.warmup))
        if step % settings.sync_every == 0:
            sampler.load_state_dict(policy.state_dict())
            version = step
        questions = task.draw(settings.prompts)
        order = [place for place in range(settings.prompts) for _ in range(settings.group)]
        prompts = [questions[place] for place in order]
        ids, attended = task.encode(prompts)
        batch = generate(sampler, ids, attended, task.limit, settings.temperature)
        texts = task.decode(batch.answers)
        rewards = torch.tensor([task.reward(*pair) for pair in zip(prompts, texts, strict=True)])
        with torch.no_grad():
            policy.eval()
            old, entropy = score(policy, batch, settings.temperature)
            ref, _ = score(reference, batch, settings.temperature)
        advantages = group_advantages(rewards, settings)[:, None].expand_as(old)
        found = update(policy, optimizer, batch, old, ref, advantages, settings)
        metrics = {name: sum(one[name] for one in found) / len(found) for name in found[0]}
        metrics |= {"reward": float(rewards.mean()), "reward_std": float(rewards.std()), "lr": settings.lr}
        metrics |= {"resp_len": float(batch.mask.sum(1).float().mean()), "first_ratio_error": found[0]["ratio_error"]}
        record(
            step,
            metrics,
            prompts=prompts,
            groups=order,
            prompt_ids=ids,
            prompt_attended=attended,
            texts=texts,
            rewards=rewards,
            answers=batch.answers,
            mask=batch.mask,
            logprobs=old,
            ref_logprobs=ref,
            sampler_logprobs=batch.logprobs,
            entropies=entropy,
            advantages=advantages,
            version=version,
        )

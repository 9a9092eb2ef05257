"""PPO with a separate critic; the KL to the initial policy is subtracted from the reward of each token."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.faults.small.trainers.model import Sampled, generate, rows, score

Record = Callable[..., None]


@dataclass
class Settings:
    """What people set."""

    steps: int = 32
    batch: int = 64
    samples: int = 1
    """Responses to each prompt"""
    actor_lr: float = 3e-4
    critic_lr: float = 1e-3
    warmup: int = 0
    kl_coef: float = 0.02
    gamma: float = 1.0
    lam: float = 0.95
    cliprange: float = 0.2
    epochs: int = 2
    minibatches: int = 2
    temperature: float = 1.0
    ent_coef: float = 0.0
    max_norm: float = 1.0
    sync: int = 1
    """Steps after which the sampler gets the weights"""


def token_rewards(scores: Tensor, logprobs: Tensor, ref: Tensor, mask: Tensor, settings: Settings) -> Tensor:
    """Return [B, T] the penalty of each token, with the score on the last one."""
    rewards = -settings.kl_coef * (logprobs - ref) * mask
    last = mask.sum(1) - 1
    rewards[torch.arange(len(rewards)), last] += scores
    return rewards


def gae(rewards: Tensor, values: Tensor, mask: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """Return [B, T] advantages and returns."""
    advantages = torch.zeros_like(rewards)
    running = torch.zeros(len(rewards))
    following = torch.zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + settings.gamma * following - values[:, t]
        running = (delta + settings.gamma * settings.lam * running) * mask[:, t]
        advantages[:, t] = running
        following = values[:, t] * mask[:, t]
    return advantages, advantages + values


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Return [B, T] with mean 0 and standard deviation 1 over the mask."""
    chosen = values[mask]
    return (values - chosen.mean()) / (chosen.std() + 1e-8) * mask


def predict(critic: nn.Module, batch: Sampled) -> Tensor:
    """Return [B, T] the critic's values where each token was sampled."""
    length = batch.answers.shape[1]
    values: Tensor = critic(batch.ids, batch.attended)[:, -length - 1 : -1]
    return values * batch.mask


class Part(NamedTuple):
    """A mini-batch: responses, and for each of their tokens [B, T]."""

    batch: Sampled
    old: Tensor
    advantages: Tensor
    returns: Tensor


def improve(policy: nn.Module, pi_opt: Any, part: Part, settings: Settings) -> dict[str, float]:
    """Make one update of the policy; return numbers about it."""
    some, here, count = part.batch, part.batch.mask, part.batch.mask.sum()
    new, entropy = score(policy, some, settings.temperature)
    ratio = (new - part.old).exp()
    clipped = ratio.clamp(1 - settings.cliprange, 1 + settings.cliprange)
    pi_loss = (torch.maximum(-part.advantages * ratio, -part.advantages * clipped) * here).sum() / count
    pi_loss = pi_loss - settings.ent_coef * entropy.sum() / count
    pi_opt.zero_grad()
    pi_loss.backward()
    norm = nn.utils.clip_grad_norm_(policy.parameters(), settings.max_norm)
    pi_opt.step()
    about = {
        "pi_loss": pi_loss,
        "ratio": (ratio * here).sum() / count,
        "ratio_error": ((ratio - 1).abs() * here).max(),
        "clipfrac": ((ratio != clipped) * here).sum() / count,
        "approx_kl": (0.5 * (new - part.old) ** 2 * here).sum() / count,
        "pi_norm": norm,
    }
    return {name: value.item() for name, value in about.items()}


def fit(critic: nn.Module, v_opt: Any, part: Part, settings: Settings) -> dict[str, float]:
    """Make one update of the critic; return its loss."""
    here = part.batch.mask
    v_loss = (0.5 * (predict(critic, part.batch) - part.returns) ** 2 * here).sum() / here.sum()
    v_opt.zero_grad()
    v_loss.backward()
    nn.utils.clip_grad_norm_(critic.parameters(), settings.max_norm)
    v_opt.step()
    return {"v_loss": v_loss.item()}


def train(task: Any, policy: nn.Module, critic: nn.Module, settings: Settings, record: Record) -> None:  # noqa: PLR0915
    """Train a policy and its critic on a task: one loop from top to bottom, as in papers' code."""
    ref_policy, behaviour = copy.deepcopy(policy).eval(), copy.deepcopy(policy).eval()
    pi_opt = torch.optim.Adam(policy.parameters(), lr=settings.actor_lr)
    v_opt = torch.optim.Adam(critic.parameters(), lr=settings.critic_lr)
    synced = 0
    for iteration in range(settings.steps):
        for group in pi_opt.param_groups:
            group["lr"] = settings.actor_lr * min(1.0, (iteration + 1) / max(1, settings.warmup))
        if iteration % settings.sync == 0:
            behaviour.load_state_dict(policy.state_dict())
            synced = iteration
        drawn = task.draw(settings.batch // settings.samples)
        order = [index for index in range(len(drawn)) for _ in range(settings.samples)]
        prompts = [drawn[index] for index in order]
        ids, attended = task.encode(prompts)
        rollout = generate(behaviour, ids, attended, task.limit, settings.temperature)
        outputs = task.decode(rollout.answers)
        scores = torch.tensor([task.reward(*pair) for pair in zip(prompts, outputs, strict=True)])
        mask = rollout.mask
        with torch.no_grad():
            policy.eval()
            logprobs, entropies = score(policy, rollout, settings.temperature)
            ref, _ = score(ref_policy, rollout, settings.temperature)
            values = predict(critic, rollout)
        rewards = token_rewards(scores, logprobs, ref, mask, settings)
        advantages, returns = gae(rewards, values, mask, settings)
        advantages = whiten(advantages, mask)
        policy.train()
        found = []
        for _ in range(settings.epochs):
            for index in torch.randperm(len(scores)).chunk(settings.minibatches):
                some = Part(rows(rollout, index), logprobs[index], advantages[index], returns[index])
                found.append(improve(policy, pi_opt, some, settings) | fit(critic, v_opt, some, settings))
        metrics = {name: sum(one[name] for one in found) / len(found) for name in found[0]}
        metrics |= {"ep_score": scores.mean().item(), "kl": ((logprobs - ref) * mask).sum(1).mean().item()}
        metrics |= {"entropy": (entropies.sum() / mask.sum()).item(), "first_ratio_error": found[0]["ratio_error"]}
        record(
            iteration,
            metrics,
            prompts=prompts,
            groups=order,
            prompt_ids=ids,
            prompt_attended=attended,
            texts=outputs,
            rewards=scores,
            answers=rollout.answers,
            mask=mask,
            logprobs=logprobs,
            ref_logprobs=ref,
            sampler_logprobs=rollout.logprobs,
            entropies=entropies,
            advantages=advantages,
            values=values,
            returns=returns,
            token_rewards=rewards,
            version=synced,
        )

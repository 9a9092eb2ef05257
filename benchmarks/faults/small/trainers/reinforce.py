"""REINFORCE with the mean of the other responses to a prompt as baseline, and the KL in the reward."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.faults.small.trainers.model import generate, score

Record = Callable[..., None]


@dataclass
class Settings:
    """What people set."""

    steps: int = 32
    n_prompts: int = 8
    k: int = 8
    """Responses to each prompt"""
    learning_rate: float = 3e-4
    warmup: int = 0
    kl_weight: float = 0.02
    temp: float = 1.0
    ent_coef: float = 0.0
    grad_clip: float = 1.0
    normalise: bool = True
    """Whether advantages are divided by their standard deviation over the batch"""
    whole_batch: bool = False
    """Whether the baseline is the mean of the batch"""
    refresh: int = 1
    """Steps after which the sampler gets the weights"""


def baseline(returns: Tensor, settings: Settings) -> Tensor:
    """Return [B] the mean of the other responses to the same prompt."""
    if settings.whole_batch:
        return returns.mean().expand_as(returns)
    groups = returns.view(-1, settings.k)
    return ((groups.sum(1, keepdim=True) - groups) / (settings.k - 1)).flatten()


def objective(logp: Tensor, adv: Tensor, mask: Tensor) -> Tensor:
    """Return the loss: −A·log π of the whole response, averaged over responses."""
    return -((logp * mask).sum(1) * adv).mean()


def train(task: Any, policy: nn.Module, settings: Settings, record: Record) -> None:  # noqa: PLR0915
    """Train a policy on a task: one loop from top to bottom, as in papers' code."""
    init_policy = copy.deepcopy(policy).eval()
    actor = copy.deepcopy(policy).eval()
    opt = torch.optim.AdamW(policy.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    weights_of = 0
    for it in range(settings.steps):
        for group in opt.param_groups:
            group["lr"] = settings.learning_rate * min(1.0, (it + 1) / max(1, settings.warmup))
        if it % settings.refresh == 0:
            actor.load_state_dict(policy.state_dict())
            weights_of = it
        queries = task.draw(settings.n_prompts)
        order = [which for which in range(settings.n_prompts) for _ in range(settings.k)]
        repeated = [queries[which] for which in order]
        query_ids, query_mask = task.encode(repeated)
        out = generate(actor, query_ids, query_mask, task.limit, settings.temp)
        responses = task.decode(out.answers)
        scores = torch.tensor([task.reward(*pair) for pair in zip(repeated, responses, strict=True)])
        with torch.no_grad():
            policy.eval()
            before, _ = score(policy, out, settings.temp)
            init_logp, _ = score(init_policy, out, settings.temp)
        kl = (before - init_logp).sum(1)
        returns = scores - settings.kl_weight * kl
        adv = returns - baseline(returns, settings)
        if settings.normalise:
            adv = adv / (adv.std() + 1e-6)
        policy.train()
        logp, entropy = score(policy, out, settings.temp)
        loss = objective(logp, adv, out.mask)
        loss = loss - settings.ent_coef * entropy.sum() / out.mask.sum()
        opt.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(policy.parameters(), settings.grad_clip)
        opt.step()
        metrics = {"mean_score": scores.mean(), "kl_to_init": kl.mean(), "pg_loss": loss, "gnorm": norm}
        metrics |= {"ent": entropy.sum() / out.mask.sum(), "n_tokens": out.mask.sum(1).float().mean()}
        metrics |= {"first_ratio_error": ((logp - before).exp() - 1).abs().max()}
        record(
            it,
            {name: value.item() for name, value in metrics.items()},
            prompts=repeated,
            groups=order,
            prompt_ids=query_ids,
            prompt_attended=query_mask,
            texts=responses,
            rewards=scores,
            answers=out.answers,
            mask=out.mask,
            logprobs=before,
            ref_logprobs=init_logp,
            sampler_logprobs=out.logprobs,
            entropies=entropy.detach(),
            advantages=adv[:, None].expand_as(before),
            version=weights_of,
        )

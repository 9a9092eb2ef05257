"""What is wrong with settings alone, as check says before a run, train at its start, and the rules afterwards."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from cavesson.findings.finding import Finding, Fine
from cavesson.findings.kl import pull
from cavesson.findings.words import Percent, number

PURE = {"top_k": 0, "top_p": 1.0, "min_new_tokens": 0}
"""Settings of sampling, and the values at which they filter nothing."""
FADED = 0.01
"""Share of the reward below which it hardly reaches a token."""
HELD = Percent(0.5)
"""Share of the pull of the KL itself that an estimator must have where it is used."""
END_TOKENS = "tokens that end a response; among them the one that ends a turn of the chat template"
BALANCED = 7 / 6
"""Weight of all good responses relative to all bad ones, in the middle of what KTO's authors advise."""
_NEAR = np.array([0.1])
"""A log-ratio in nats, at which the pull of estimators is compared."""


def filters(sampling: Mapping[str, Any]) -> list[str]:
    """Return the settings of sampling that make the sampled distribution differ from the scored one."""
    return [f"{name} = {sampling[name]}" for name, off in PURE.items() if sampling.get(name, off) not in (None, off)]


def filtered_sampling(sampling: Mapping[str, Any], coef: float | None, *, has_reference: bool) -> Finding | Fine:
    """Judge filtered sampling where a KL to a reference is measured."""
    found = filters(sampling)
    return Finding(
        "filtered-sampling",
        "error" if coef else "warning",
        "Filtered sampling makes the KL wrong",
        "Responses are sampled from a filtered distribution but scored under the full one: log π − log "
        "π_ref is then not an estimate of the KL. It may become negative, which a policy can exploit for reward.",
        ", ".join(f"sampling.{name} = {off}" for name, off in PURE.items()),
        ", ".join(found) or "none",
        "sampling filters; none if the KL is measured",
        "TRL 0.7.10, how_to_train; arXiv:2403.17031",
    ).unless(not found or not has_reference)


def temperature_missing(sampled: float, scored: float, coef: float | None) -> Finding | Fine:
    """Judge temperatures of sampling and scoring, which must be the same where the KL is penalised."""
    return Finding(
        "temperature-missing",
        "warning",
        "Sampled at one temperature, scored at another",
        "The responses are not samples of the distribution that is scored, so the KL estimate is wrong.",
        "sampling.temperature = 1.0, or kl.coef = 0",
        f"{sampled:g} and {scored:g}",
        "temperature of sampling and of scoring; equal if the KL is penalised",
        "arXiv:2403.17031",
    ).unless(sampled == scored or not coef)


def reward_fades(decay: float, length: float, setting: str) -> Finding | Fine:
    """Judge γλ: an advantage n tokens before the reward gets (γλ)^n of it.

    Args:
        decay: γλ.
        length: Tokens of the longest response.
        setting: Dotted name of λ.
    """
    share = reaching(decay, length)
    return Finding(
        "reward-fades",
        "warning",
        "The reward fades before it reaches the first tokens",
        f"In a response of {length:g} tokens with γλ = {decay:g}, the first ones learn only from the critic's "
        "estimates.",
        f"{setting} = 1.0",
        share,
        f"(γλ)^n, the share of the final reward that reaches the first of n tokens; at least {FADED:g}",
        "VC-PPO, arXiv:2503.01491",
    ).unless(share >= FADED)


def label_balance(
    desirable: int, undesirable: int, desirable_weight: float, undesirable_weight: float
) -> Finding | Fine:
    """Judge how KTO weights good responses against bad ones, given their numbers; there are some of both."""
    ratio = desirable_weight * desirable / (undesirable_weight * undesirable)
    weight = BALANCED * undesirable_weight * undesirable / desirable
    return Finding(
        "label-balance",
        "warning",
        "Good and bad responses do not balance",
        f"{desirable} of {desirable + undesirable} responses are labelled good. With weights {desirable_weight:g} and "
        f"{undesirable_weight:g}, {'they' if ratio > 1 else 'the bad ones'} outweigh the others: the model "
        f"{'hardly learns what to avoid' if ratio > 1 else 'learns to avoid responses more than to give good ones'}.",
        f"kto.desirable_weight = {weight:.2g}",
        ratio,
        "weight times number of the good responses, relative to the bad ones; 1 to 4/3",
        "arXiv:2402.01306, section 4.2",
    ).unless(1 - 1e-9 <= ratio <= 4 / 3 + 1e-9)


def reaching(decay: float, tokens: Any) -> Any:
    """Return the share of a reward that reaches a token some tokens before it; numbers or arrays."""
    return decay**tokens


def estimator_misplaced(place: str, estimator: str) -> Finding | Fine:
    """Judge whether an estimator of the KL pulls the policy to the reference where it is used, reward or loss."""
    held = pull(place, estimator, _NEAR)
    sound = [one for one in ("k1", "k2", "k3") if pull(place, one, _NEAR) >= HELD]
    return Finding(
        "estimator-misplaced",
        "warning",
        "The KL estimator does not hold the policy where it is used",
        f"The KL in the {place} is estimated by {estimator}, whose gradient there is not that of the KL: it does not "
        "keep the policy close to the reference.",
        f"in the {place}, estimate the KL by {' or '.join(sound)}",
        Percent(held),
        "pull of the estimator towards the reference where it is used, relative to that of the KL itself; at least "
        f"{number(HELD)}",
        "Schulman, Approximating KL divergence; arXiv:2506.09477; arXiv:2512.21852",
    ).unless(held >= HELD)


def stale_sampling(staleness: int, importance: float | None) -> Finding | Fine:
    """Judge sampling ahead of the updates: importance weights correct for older weights."""
    return Finding(
        "sampler-stale",
        "note",
        "Responses are sampled by older weights, and no importance weights correct for it",
        f"Responses are up to {staleness} updates old, and the loss takes them for those of the present policy.",
        "sampling.max_staleness = 0, or importance weights",
        staleness,
        "updates between sampling and learning; 0 without importance weights",
    ).unless(not staleness or bool(importance))


def turn_continues(end: int, text: str, ends: Collection[int], names: str, *, samples: bool) -> Finding | Fine:
    """Judge whether a response ends where a turn of the chat template does.

    Args:
        end: The token that ends a turn of the assistant.
        text: The same as text.
        ends: The tokens that end a response.
        names: The same as text.
        samples: Whether the run samples responses; others only teach a model that continues.
    """
    return Finding(
        "end-token",
        "error" if samples else "warning",
        "The chat template ends a turn with a token that does not end a response",
        f"A turn of the assistant ends with {text}; responses would continue after it up to the length limit.",
        f"sampling.eos_token_ids = [{end}]",
        names,
        END_TOKENS,
        "TRL PR #7039",
    ).unless(end in ends)

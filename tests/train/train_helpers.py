"""Small runs on the tiny model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dressage.algorithms.ppo import PPORun
from dressage.train.run import Result, Training
from dressage.types import Batch

PROMPTS = ("On the table", "My", "The morning train was", "A dog and", "Yesterday we", "It")

LORA = {"rank": 4, "alpha": 8}

# A quarter of the tiny model's tokens ends a response with these, and often the first one does.
STOP = tuple(c for c in map(chr, range(32, 127)) if not c.islower())


def uneven(prompts: Sequence[str], responses: Sequence[str], **_: Any) -> list[float]:
    """A reward that differs from response to response, −1 to 1; an empty one earns −1."""
    return [sum(map(ord, response)) % 7 / 3 - 1 for response in responses]


def settings(folder: Path, **changes: Any) -> PPORun:
    """Two steps of six short uneven responses; `kl__coef=0.1` changes the field `kl.coef`."""
    values: dict[str, Any] = {
        "run": folder,
        "steps": 2,
        "batch_size": 6,
        "model": {"device": "cpu"},
        "sampling": {"random_length": (1, 6)},
        "optimizer": {"learning_rate": 1e-3},
    }
    for name, value in changes.items():
        *groups, last = name.split("__")
        place = values
        for group in groups:
            place = place.setdefault(group, {})
        place[last] = value
    return PPORun.model_validate(values)


def quiet(step: int, metrics: dict[str, float]) -> None:
    pass


def finish(folder: Path, inputs: dict[str, Any] | None = None, **changes: Any) -> Result:
    """A whole run."""
    return build(folder, inputs, **changes).run(quiet)


def build(folder: Path, inputs: dict[str, Any] | None = None, **changes: Any) -> Training:
    """A run that has not started."""
    return Training(settings(folder, **changes), **{"prompts": PROMPTS, "rewards": uneven, **(inputs or {})})


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def farthest(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """The largest difference between two sets of weights."""
    assert first.keys() == second.keys()
    return max((first[name].float() - second[name].float()).abs().max().item() for name in first)


def move(module: nn.Module, seed: int, size: float) -> None:
    """Add noise to every trainable weight."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter += size * torch.randn(parameter.shape, generator=generator)


def rollouts(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], pad: int = 1) -> Batch:
    """Given tokens as the sampler would hand them over."""
    left, right = max(map(len, prompts)), max(map(len, responses))
    return Batch(
        {
            "prompt_ids": torch.tensor([[pad] * (left - len(p)) + list(p) for p in prompts]),
            "prompt_mask": torch.tensor([[0] * (left - len(p)) + [1] * len(p) for p in prompts]),
            "response_ids": torch.tensor([list(r) + [pad] * (right - len(r)) for r in responses]),
            "mask": torch.tensor([[1.0] * len(r) + [0.0] * (right - len(r)) for r in responses]),
        }
    )

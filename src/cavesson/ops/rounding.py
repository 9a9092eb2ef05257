"""Stochastic rounding: to one of the two neighbours, so that the expected value is exact (Croci et al. 2022)."""

import torch
from torch import Tensor

_DROPPED = 1 << 16
"""bfloat16 is the upper half of a float32."""


def rounded_randomly(numbers: Tensor, generator: torch.Generator) -> Tensor:
    """Round float32 numbers to bfloat16, up with the probability of their distance from the lower neighbour.

    Rounded to the nearest, a sum of a weight and a much smaller change is the weight, and the change is lost however
    many weights it has. Rounded randomly, the change is there on average over the weights. The generator, on the same
    device, draws one number for each.
    """
    noise = torch.randint(_DROPPED, numbers.shape, dtype=torch.int32, device=numbers.device, generator=generator)
    bits = noise.add_(numbers.view(torch.int32)).bitwise_and_(-_DROPPED)
    return torch.where(numbers.isfinite(), bits.view(torch.float32), numbers).bfloat16()

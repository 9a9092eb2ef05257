"""Make the linear layers of a loaded model use the faster matrix product of `ops.linear`."""

import torch
from torch import Tensor, nn

from cavesson.ops.linear import linear

# For smaller weights, the Python overhead outweighs the gain.
_SMALLEST = 64 * 1024


class FastLinear(nn.Linear):
    """An `nn.Linear` whose float32 product on CPU uses oneDNN; the weights and their names stay the same."""

    def forward(self, input: Tensor) -> Tensor:
        product = linear(input, self.weight)
        return product if self.bias is None else product + self.bias


def use_fast_linear(model: nn.Module) -> None:
    """Change the class of every large plain linear layer in place; has no effect except in float32 on CPU."""
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.numel() >= _SMALLEST and module.weight.dtype == torch.float32:
            module.__class__ = FastLinear

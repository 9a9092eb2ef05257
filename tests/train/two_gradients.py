"""Called in every process: gradients of two, added up and written to a file."""

import json
from pathlib import Path

import torch
from torch import nn

from cavesson.algorithms.settings import OptimizerSettings
from cavesson.processes import Processes
from cavesson.train.optimizer import Optimizer


def gradients(file: Path) -> None:
    processes = Processes("cpu")
    module = nn.Linear(1, 2, dtype=torch.bfloat16)
    Optimizer(module, OptimizerSettings())
    # 256 and 1 are numbers of bfloat16, 257 and 513 are not; only the first process has seen the bias.
    module.weight.sum().mul([256.0, 1.0][processes.rank]).backward()
    if processes.rank == 0:
        for gradient in (256.0, 1.0, 256.0):
            module.bias.sum().mul(gradient).backward()
    processes.sum_gradients(module)
    both = (module.weight.grad, module.bias.grad)
    if processes.is_main:
        file.write_text(json.dumps([gradient.flatten().tolist() for gradient in both if gradient is not None]))

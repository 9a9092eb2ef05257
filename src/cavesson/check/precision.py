"""Whether bfloat16 saves time on the processor of the run, or costs some."""

import torch

from cavesson.findings.finding import Finding, Fine, Results
from cavesson.models.load import DTYPES
from cavesson.ops.matmul import times

_ROWS, _WIDTH = 64, 1024
"""Of the matrix products that are compared: a few tokens, as while sampling, by the weights of a small layer."""
_SLOWER = 1.25
"""Times as long as in float32 from which it is worth a note."""


def check_precision(dtype: str, device: torch.device) -> Results:
    """Time matrix products in the model's data type beside float32, on CPUs, of which many lack bfloat16."""
    if device.type == "cpu" and DTYPES[dtype] is not torch.float32:
        yield compared(dtype, _seconds(DTYPES[dtype]) / _seconds(torch.float32))


def compared(dtype: str, ratio: float) -> Finding | Fine:
    """Return the result for the time of a product in a data type, relative to float32."""
    return Finding(
        "dtype",
        "note",
        f"Products in {dtype} are slow on this processor",
        f"It takes {ratio:.1f} times as long as in float32, as processors without instructions for {dtype} do.",
        'model.dtype = "float32", if there is memory for it: weights take twice as much',
        round(ratio, 2),
        f"time of a matrix product in {dtype}, relative to float32; at most {_SLOWER:g}",
        "measured on this machine",
    ).unless(ratio <= _SLOWER)


def _seconds(dtype: torch.dtype) -> float:
    x, weight = torch.randn(_ROWS, _WIDTH, dtype=dtype), torch.randn(_WIDTH, _WIDTH, dtype=dtype)
    return min(times(x, weight).values())

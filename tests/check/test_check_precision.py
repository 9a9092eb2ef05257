"""Whether the model's data type is a slow one on this processor."""

import pytest
import torch

from cavesson.check.precision import check_precision, compared
from cavesson.findings.finding import Finding, Fine

CPU = torch.device("cpu")


def test_a_slow_data_type_is_a_note_and_a_fast_one_is_fine() -> None:
    slow, fast = compared("bfloat16", 2.5), compared("bfloat16", 0.6)
    assert isinstance(slow, Finding) and slow.severity == "note" and "2.5 times as long" in slow.cause
    assert isinstance(fast, Fine) and fast.seen == 0.6


def test_the_products_of_this_machine_are_timed() -> None:
    (found,) = check_precision("bfloat16", CPU)
    assert isinstance(found.seen, float) and 0.05 < found.seen < 100


@pytest.mark.parametrize(("dtype", "device"), [("float32", CPU), ("bfloat16", torch.device("cuda"))])
def test_float32_and_gpus_need_no_timing(dtype: str, device: torch.device) -> None:
    assert list(check_precision(dtype, device)) == []

"""benchmarks/gpu.py runs from end to end without a GPU, and counts FLOPs as PyTorch does."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import gpu


@pytest.mark.slow
def test_the_benchmark_runs_on_a_cpu() -> None:
    words = "--size tiny --algorithm grpo --response 8 --rounds 2 --device cpu --peak 1"
    flags = words.split()
    done = subprocess.run([sys.executable, gpu.__file__, *flags], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("CPU, ") and "grpo, tiny, adapters, 16 responses of 8 tokens" in done.stdout
    for figure in ("sampled tokens/s", "learning, s", "learning TFLOP/s", "utilisation, %"):
        assert figure in done.stdout


def test_flops_are_those_that_pytorch_counts() -> None:
    config, length = Qwen2Config(**gpu.SIZES["tiny"].config, attn_implementation="eager"), 12
    model = Qwen2ForCausalLM(config)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(length)[None]).logits.sum().backward()
    counts = {str(operation): number for operation, number in counter.get_flop_counts()["Global"].items()}
    attention = counts.pop("aten.bmm")  # of all pairs of tokens, of which half are in the past
    trained = sum(parameter.numel() for parameter in model.parameters())
    assert gpu.update_flops(config, trained, 1, 0, length) == pytest.approx(sum(counts.values()) + attention / 2)


def test_a_forward_pass_is_a_third_of_an_update() -> None:
    config = Qwen2Config(**gpu.SIZES["tiny"].config, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        Qwen2ForCausalLM(config)(input_ids=torch.arange(12)[None])
    counts = {str(operation): number for operation, number in counter.get_flop_counts()["Global"].items()}
    assert gpu.forward_flops(config, 1, 0, 12) == (sum(counts.values()) - counts["aten.bmm"], counts["aten.bmm"] / 2)


def test_frozen_weights_have_no_gradients_of_their_own() -> None:
    config = Qwen2Config(**gpu.SIZES["7b"].config)
    whole, adapters = (gpu.update_flops(config, trained, 1, 64, 512) for trained in (8_000_000_000, 0))
    # Of 7.6 billion weights, 0.54 billion are only looked up; the head is not applied to the prompt.
    assert whole == pytest.approx(6 * (6.53e9 * 576 + 0.545e9 * 512) + 6 * 28 * 3584 * 576**2, rel=0.01)
    assert adapters == pytest.approx(whole - 2 * (6.53e9 * 576 + 0.545e9 * 512), rel=0.01)


def test_the_peak_is_that_of_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's data sheets with sparsity: H100 SXM 1,979, PCIe 1,513, NVL 1,671, H200 NVL 1,671; dense is half."""
    names = {"NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756, "NVIDIA H100 NVL": 835, "NVIDIA H200": 989,
             "NVIDIA H200 NVL": 835}  # fmt: skip
    for name, peak in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device, name=name: name)
        assert gpu.peak_tflops(torch.device("cuda"), None) == peak

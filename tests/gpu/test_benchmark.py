"""benchmarks/gpu.py runs from end to end without a GPU, and counts FLOPs as PyTorch does."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import gpu
import gpu_targets
import gpu_work

CPU = ["--tiny", "--device", "cpu", "--rounds", "1", "--peak", "1"]
SECONDS = ["step, s", "first, s more"]
ROLLOUTS = [*SECONDS, "sampled tokens/s", "learning, s", "utilisation, %", "predicted, GB"]
LINES = {
    "grpo-0.5b": ROLLOUTS,
    "grpo-7b": ROLLOUTS,
    "grpo-1.5b": ROLLOUTS,
    "ppo": ROLLOUTS,
    "mixed": ["mixed beside equal", "mixed: response tokens", "equal: learning, µs/token", "mixed: predicted, GB"],
    "bound-0.5b": ["learning, s", "first, s more", "utilisation, %"],
    "bound-7b": ["learning, s", "first, s more", "utilisation, %"],
    "trl-0.5b": ["step without optimiser, s", "sampling, s", "learning, s"],
    "sft": [*SECONDS, "learned tokens/s", "predicted, GB"],
    "dpo": [*SECONDS, "learned tokens/s", "predicted, GB"],
    "reward-model": [*SECONDS, "learned tokens/s", "predicted, GB"],
}
"""Figures of every line, in the rehearsal on a CPU."""


def run(out: Path, lines: list[str], *flags: str) -> list[dict[str, Any]]:
    command = [sys.executable, gpu.__file__, *CPU, "--out", str(out), *flags, "--only", *lines]
    done = subprocess.run(command, capture_output=True, text=True)
    entries = [json.loads(line) for line in out.read_text().splitlines()]
    assert done.returncode == int(any("figures" not in entry for entry in entries[1:])), done.stderr[-3000:]
    return entries


@pytest.mark.slow
@pytest.mark.parametrize("line", LINES)
def test_each_line_of_the_benchmark_runs_on_a_cpu(tmp_path: Path, line: str) -> None:
    if line == "trl-0.5b":
        pytest.importorskip("trl", reason="needs TRL: pip install trl")
    if line.startswith("bound") and shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler: apt-get install g++")
    first, entry = run(tmp_path / "gpu.jsonl", [line])
    assert first["machine"].startswith("CPU, ")
    assert entry["line"] == line and set(LINES[line]) <= entry["figures"].keys()
    assert all(values and all(map(math.isfinite, values)) for values in entry["figures"].values())


def test_every_line_is_rehearsed() -> None:
    assert LINES.keys() == gpu.LINES.keys()


def test_lines_after_one_that_fails_or_comes_too_late_are_written(tmp_path: Path, monkeypatch: Any) -> None:
    def fails(place: Any) -> Any:
        raise RuntimeError("no memory")

    out = tmp_path / "gpu.jsonl"
    monkeypatch.setitem(gpu.LINES, "ppo", ("0.5b", fails))
    monkeypatch.setitem(gpu.LINES, "sft", ("7b", lambda place: {"tokens": [float(place.size.lora)]}))
    for seconds in ("100", "-1"):
        flags = [*CPU, "--out", str(out), "--seconds", seconds, "--only", "ppo", "sft"]
        monkeypatch.setattr(sys, "argv", ["gpu.py", *flags])
        with pytest.raises(SystemExit) as ended:
            gpu.main()
        assert ended.value.code == 1
    entries = [json.loads(line) for line in out.read_text().splitlines()]
    assert [entry.get("error", entry.get("figures")) for entry in entries] == [
        None, "RuntimeError: no memory", {"tokens": [1.0]}, None, "not begun after -1 s", "not begun after -1 s",
    ]  # fmt: skip


def test_measured_figures_are_held_against_their_targets() -> None:
    measured = {
        "grpo-0.5b": {"learning, s": [0.5, 0.44, 0.4], "step, s": [2.0], "peak memory, GB": [10.0],
                      "predicted, GB": [11.2]},
        "grpo-7b": {"utilisation, %": [49.9]},
        "trl-0.5b": {"step without optimiser, s": [12.0]},
        "mixed": {"mixed: peak memory, GB": [10.0], "mixed: predicted, GB": [9.1]},
    }  # fmt: skip
    assert list(gpu_targets.verdicts(measured)) == [
        "grpo-0.5b: learning, s 0.44, target at most 0.45: met",
        "grpo-7b: utilisation, % 49.9, target at least 50: NOT MET",
        "trl-0.5b: 6.00 times our step, target at least 6: met",
        "grpo-0.5b: predicted, GB +12.0% of the peak, target within 10%: NOT MET",
        "mixed: mixed: predicted, GB -9.0% of the peak, target within 10%: met",
    ]


def test_flops_are_those_that_pytorch_counts() -> None:
    config, length = Qwen2Config(**gpu_work.SIZES["tiny"].config, attn_implementation="eager"), 12
    model = Qwen2ForCausalLM(config)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(length)[None]).logits.sum().backward()
    counts = {str(operation): number for operation, number in counter.get_flop_counts()["Global"].items()}
    attention = counts.pop("aten.bmm")  # of all pairs of tokens, of which half are in the past
    trained = sum(parameter.numel() for parameter in model.parameters())
    assert gpu_work.update_flops(config, trained, 1, 0, length) == pytest.approx(sum(counts.values()) + attention / 2)


def test_a_forward_pass_is_a_third_of_an_update() -> None:
    config = Qwen2Config(**gpu_work.SIZES["tiny"].config, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        Qwen2ForCausalLM(config)(input_ids=torch.arange(12)[None])
    counts = {str(operation): number for operation, number in counter.get_flop_counts()["Global"].items()}
    assert gpu_work.forward_flops(config, 1, 0, 12) == (
        sum(counts.values()) - counts["aten.bmm"],
        counts["aten.bmm"] / 2,
    )


def test_frozen_weights_have_no_gradients_of_their_own() -> None:
    config = Qwen2Config(**gpu_work.SIZES["7b"].config)
    whole, adapters = (gpu_work.update_flops(config, trained, 1, 64, 512) for trained in (8_000_000_000, 0))
    # Of 7.6 billion weights, 0.54 billion are only looked up; the head is not applied to the prompt.
    assert whole == pytest.approx(6 * (6.53e9 * 576 + 0.545e9 * 512) + 6 * 28 * 3584 * 576**2, rel=0.01)
    assert adapters == pytest.approx(whole - 2 * (6.53e9 * 576 + 0.545e9 * 512), rel=0.01)


def test_the_peak_is_that_of_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's data sheets with sparsity: H100 SXM 1,979, PCIe 1,513, NVL 1,671, H200 NVL 1,671; dense is half."""
    names = {"NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756, "NVIDIA H100 NVL": 835, "NVIDIA H200": 989,
             "NVIDIA H200 NVL": 835}  # fmt: skip
    for name, peak in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device, name=name: name)
        assert gpu_work.peak_tflops(torch.device("cuda"), None) == peak

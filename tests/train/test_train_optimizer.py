"""AdamW against hand arithmetic, its learning rates, and its state through a file."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MambaConfig, Qwen2Config, Trainer

from cavesson.algorithms.settings import OptimizerSettings
from cavesson.config import SettingsError
from cavesson.models.policy import ValueHead
from cavesson.train.in_backward import InBackward
from cavesson.train.optimizer import Optimizer, decayed, learning_rate


class Numbers(nn.Module):
    """A few weights, one of them frozen."""

    def __init__(self, values: list[float], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.learned = nn.Parameter(torch.tensor(values, dtype=dtype))
        self.frozen = nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=False)


def follow(optimizer: Optimizer, module: Numbers, gradient: list[float], rate: float) -> None:
    optimizer.zero_grad()
    module.learned.grad = torch.tensor(gradient)
    optimizer.step(rate)


def adamw(weight: float, gradients: list[float], rates: list[float], settings: OptimizerSettings) -> float:
    """Algorithm 2 of arXiv:1711.05101 on one number."""
    first = second = 0.0
    beta1, beta2 = settings.betas
    for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        first = beta1 * first + (1 - beta1) * g
        second = beta2 * second + (1 - beta2) * g * g
        direction = (first / (1 - beta1**t)) / (math.sqrt(second / (1 - beta2**t)) + settings.eps)
        weight -= rate * (direction + settings.weight_decay * weight)
    return weight


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_steps_are_those_of_the_paper(decay: float) -> None:
    settings = OptimizerSettings(betas=(0.8, 0.95), eps=1e-6, weight_decay=decay)
    module = Numbers([0.5, -1.0])
    optimizer = Optimizer(module, settings)
    gradients, rates = [[0.3, -2.0], [-0.1, 0.5], [0.2, 0.0]], [0.1, 0.05, 0.2]
    for gradient, rate in zip(gradients, rates, strict=True):
        follow(optimizer, module, gradient, rate)
    expected = [
        adamw(w, [g[i] for g in gradients], rates, settings) for i, w in enumerate([0.5, -1.0])
    ]  # fmt: skip
    assert module.learned.tolist() == pytest.approx(expected, rel=1e-5)
    assert module.frozen.tolist() == [1.0, 1.0] and list(optimizer.parameters) == ["learned"]


def test_steps_below_the_spacing_of_bfloat16_are_not_lost() -> None:
    # Just under 1, bfloat16 numbers are 2⁻⁸ = 0.0039 apart; each step is 10⁻⁴ (AdamW's with a constant gradient).
    module = Numbers([1.0], torch.bfloat16)
    optimizer = Optimizer(module, OptimizerSettings())
    follow(optimizer, module, [0.5], 1e-4)
    assert module.learned.item() == 1.0
    master = optimizer.masters["learned"]
    assert master.dtype == torch.float32 and master.item() == pytest.approx(1 - 1e-4, abs=1e-7)
    for _ in range(99):
        follow(optimizer, module, [0.5], 1e-4)
    assert optimizer.masters["learned"].item() == pytest.approx(0.99, abs=1e-5)
    assert module.learned.dtype == torch.bfloat16 and module.learned.item() == pytest.approx(0.99, abs=0.002)
    assert all(tensor.dtype == torch.float32 for tensor in optimizer.state().values())


def test_float32_weights_have_no_copy() -> None:
    module = Numbers([1.0])
    optimizer = Optimizer(module, OptimizerSettings())
    follow(optimizer, module, [0.5], 1e-3)
    assert set(optimizer.state()) == {"step.learned", "exp_avg.learned", "exp_avg_sq.learned"}
    assert optimizer.masters["learned"] is module.learned


def test_a_gradient_of_the_step_before_is_not_followed_again() -> None:
    module = Numbers([1.0, 1.0], torch.bfloat16)
    optimizer = Optimizer(module, OptimizerSettings(weight_decay=0.0))
    follow(optimizer, module, [0.5, 0.5], 1e-2)
    before = optimizer.masters["learned"].clone()
    optimizer.zero_grad()
    optimizer.step(1e-2)  # nothing to follow
    assert torch.equal(optimizer.masters["learned"], before)


@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    before=st.integers(0, 3),
    gradients=st.lists(st.lists(st.floats(-3, 3, width=32), min_size=3, max_size=3), min_size=4, max_size=6),
)
def test_a_state_from_a_file_goes_on_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, dtype: torch.dtype, before: int, gradients: list[list[float]]
) -> None:
    settings = OptimizerSettings(weight_decay=0.01)
    module = Numbers([0.5, -1.0, 2.0], dtype)
    optimizer = Optimizer(module, settings)
    for gradient in gradients[:before]:
        follow(optimizer, module, gradient, 0.01)
    file = tmp_path_factory.mktemp("state") / "optimizer.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in optimizer.state().items()}, file)
    other = Numbers([0.0, 0.0, 0.0], dtype)
    restored = Optimizer(other, settings)
    restored.load({name: master.detach().clone() for name, master in optimizer.masters.items()}, load_file(file))
    assert torch.equal(module.learned, other.learned)
    for gradient in gradients[before:]:
        for each, numbers in ((optimizer, module), (restored, other)):
            follow(each, numbers, gradient, 0.02)
    assert torch.equal(module.learned, other.learned)
    assert same(optimizer.state(), restored.state())


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # Four steps of warm-up, then six from 1 towards 0.
        ("constant", [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1]),
        ("linear", [0.25, 0.5, 0.75, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        ("cosine", [0.25, 0.5, 0.75, 1, 1, (1 + 3**0.5 / 2) / 2, 0.75, 0.5, 0.25, (1 - 3**0.5 / 2) / 2]),
    ],
)
def test_learning_rates_by_hand(schedule: str, expected: list[float]) -> None:
    settings = OptimizerSettings(learning_rate=2.0, schedule=schedule, warmup_steps=4)
    seen = [learning_rate(settings, step, 10) for step in range(10)]
    assert seen == pytest.approx([2 * factor for factor in expected], abs=1e-12)


@pytest.mark.parametrize(("schedule", "last"), [("constant", 1), ("linear", 0.25), ("cosine", (1 - 0.5**0.5) / 2)])
def test_learning_rates_without_warmup(schedule: str, last: float) -> None:
    settings = OptimizerSettings(learning_rate=1.0, schedule=schedule)
    assert learning_rate(settings, 0, 4) == 1.0
    assert learning_rate(settings, 3, 4) == pytest.approx(last)


@given(steps=st.integers(1, 50), warmup=st.integers(0, 60), schedule=st.sampled_from(["constant", "linear", "cosine"]))
def test_learning_rates_stay_between_zero_and_the_highest(steps: int, warmup: int, schedule: str) -> None:
    settings = OptimizerSettings(learning_rate=1.0, schedule=schedule, warmup_steps=warmup)
    assert all(0 < learning_rate(settings, step, steps) <= 1 for step in range(steps))


def test_the_grad_norm_is_of_all_gradients_together(tmp_path: Path) -> None:
    module = Numbers([0.0, 0.0])
    optimizer = Optimizer(module, OptimizerSettings())
    module.learned.grad = torch.tensor([3.0, 4.0])
    assert float(optimizer.grad_norm(None)) == 5.0 and module.learned.grad.tolist() == [3.0, 4.0]
    assert float(optimizer.grad_norm(1.0)) == 5.0
    assert module.learned.grad.tolist() == pytest.approx([0.6, 0.8], rel=1e-5)


@pytest.mark.parametrize("betas", [(1.0, 0.999), (0.9, 1.0), (-0.1, 0.999)])
def test_averages_that_do_not_decay_are_refused(betas: tuple[float, float]) -> None:
    with pytest.raises(SettingsError, match="betas"):
        OptimizerSettings(betas=betas)


SMALL = {"vocab_size": 32, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
ARCHITECTURES: dict[str, Any] = {
    "llama": LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "qwen2": Qwen2Config(**SMALL, num_key_value_heads=1),
    "gpt2": GPT2Config(vocab_size=32, n_positions=16, n_embd=8, n_layer=1, n_head=2),
}


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_weights_that_decay_are_those_of_hugging_face(name: str, adapted: bool) -> None:
    model: Any = AutoModelForCausalLM.from_config(ARCHITECTURES[name])
    if adapted:
        model = get_peft_model(model, LoraConfig(r=2, bias="all", target_modules="all-linear"))
    expected = set(Trainer.get_decay_parameter_names(None, model))
    assert decayed(model) == expected
    learned = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    kept = {name for name in learned if name not in expected}
    assert learned.keys() & expected and (kept or (name == "llama" and not adapted))
    assert all(learned[name].ndim == 1 for name in kept)


def test_norms_decay_under_no_name() -> None:
    model = AutoModelForCausalLM.from_config(
        MambaConfig(vocab_size=32, hidden_size=8, state_size=2, num_hidden_layers=1, expand=1)
    )
    names = {name for name, _ in model.named_parameters()}
    assert {name for name in names - decayed(model) if "bias" not in name} == {
        "backbone.layers.0.norm.weight", "backbone.norm_f.weight",
    }  # fmt: skip


class Small(nn.Module):
    """One weight of each kind, all 1."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.value_head = nn.Linear(1, 1), nn.LayerNorm(1), ValueHead(1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(1.0)


@pytest.mark.parametrize("kind", [Optimizer, InBackward])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_matrices_decay(kind: type[Optimizer], dtype: torch.dtype) -> None:
    module = Small().to(dtype)
    optimizer = kind(module, OptimizerSettings(weight_decay=0.5))
    optimizer.zero_grad()
    # Gradients of exactly 0: only the decay moves weights, by 0.1 · 0.5 of each.
    optimizer.backward(sum(0.0 * parameter.sum() for parameter in module.parameters()))
    optimizer.grad_norm(None)
    optimizer.step(0.1)
    moved = {name: master.item() for name, master in optimizer.masters.items()}
    assert moved.pop("linear.weight") == pytest.approx(0.95)
    assert moved == dict.fromkeys(
        ["linear.bias", "norm.weight", "norm.bias", "value_head.weight", "value_head.bias"], 1.0
    )


def test_a_state_without_groups_is_restored() -> None:
    """The state of a checkpoint is by parameter, so that of a run whose weights all decayed continues."""
    module = Small()
    optimizer = Optimizer(module, OptimizerSettings(weight_decay=0.5))
    saved = {f"exp_avg.{name}": torch.full_like(master, 0.25) for name, master in optimizer.masters.items()}
    saved |= {f"exp_avg_sq.{name}": torch.ones_like(master) for name, master in optimizer.masters.items()}
    saved |= {f"step.{name}": torch.tensor(3.0) for name in optimizer.masters}
    optimizer.load({name: master.detach().clone() for name, master in optimizer.masters.items()}, saved)
    assert same(optimizer.state(), saved)

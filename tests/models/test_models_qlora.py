"""Adapters on a base in 4 or 8 bits, through bitsandbytes, which computes on CPU as well."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer

from cavesson.algorithms.grpo import GRPORun
from cavesson.algorithms.sft import SFTRun
from cavesson.errors import UserError
from cavesson.models.classifier import load_reward_model
from cavesson.models.load import load_causal
from cavesson.models.policy import build_learner
from cavesson.models.quantized import without_rounding
from cavesson.models.settings import ModelSettings, StartSettings
from cavesson.models.tiny import tiny_model, tiny_tokenizer
from cavesson.models.trained import load_start, load_trained, save_trained
from cavesson.train.run import Training

pytestmark = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed: pip install 'cavesson[qlora]'"
)
LORA = {"rank": 4, "alpha": 8}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qlora") / "base"
    tiny_model(seed=3, hidden=128).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    rows = [{"prompt": "Count:", "response": " one two three four"}] * 8
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("bits", ["nf4", "int8"])
def test_adapters_learn_on_a_quantized_base_and_load_on_the_whole_one(
    bits: str, base: Path, data: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    settings = {"path": str(base), "lora": LORA, "quantization": bits, "device": "cpu"}
    training = Training(
        SFTRun.model_validate(
            {
                "run": run,
                "model": settings,
                "data": {"path": str(data)},
                "steps": 12,
                "batch_size": 8,
                "optimizer": {"learning_rate": 2e-2},
            }
        )
    )
    layers = [m for m in training.trainer.model.modules() if isinstance(m, BaseTunerLayer)]
    # The weights of the base really are in fewer bits: bytes, and for nf4 two weights in each.
    assert {layer.get_base_layer().weight.element_size() for layer in layers} == {1}
    losses = [step["loss/nll"] for step in training.run(lambda *_: None).metrics]
    assert losses[-1] < losses[0] - 0.5
    model, _ = load_trained(str(run))
    assert not any(p.element_size() == 1 for p in model.parameters())


@pytest.mark.parametrize("bits", ["nf4", "int8"])
def test_a_run_on_quantized_weights_starts_from_adapters_that_are_merged_before(
    bits: str, base: Path, data: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    settings = ModelSettings.model_validate({"path": str(base), "lora": LORA})
    first = build_learner(load_causal(str(base)), settings)
    for name, parameter in first.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    save_trained(tmp_path / "first", first, tiny_tokenizer(), settings)
    whole = load_start(StartSettings(path=str(tmp_path / "first")))
    whole.save_pretrained(tmp_path / "whole")
    start = load_start(StartSettings(path=str(tmp_path / "first")), quantization=bits)
    assert start.config.name_or_path == str(tmp_path / "first")
    expected = load_causal(str(tmp_path / "whole"), quantization=bits)
    ids = torch.arange(2, 12)[None]
    assert torch.equal(start(ids).logits, expected(ids).logits)
    changes = {"path": str(tmp_path / "first"), "lora": LORA, "quantization": bits, "device": "cpu"}
    values = {"run": tmp_path / "run", "model": changes, "data": {"path": str(data)}, "steps": 1, "batch_size": 4}
    Training(SFTRun.model_validate(values)).run(lambda *_: None)
    load_trained(str(tmp_path / "run"))


def test_a_checkpoint_in_fewer_bits_is_trained_with_adapters_only(base: Path, data: Path, tmp_path: Path) -> None:
    load_causal(str(base), quantization="nf4").save_pretrained(tmp_path / "nf4")
    tiny_tokenizer().save_pretrained(tmp_path / "nf4")
    model = {"path": str(tmp_path / "nf4"), "device": "cpu"}
    values = {"model": model, "data": {"path": str(data)}, "steps": 1, "batch_size": 4}
    with pytest.raises(UserError, match=r"has quantized weights, which cannot be trained; add model\.lora"):
        Training(SFTRun.model_validate({**values, "run": tmp_path / "whole"}))
    with pytest.raises(UserError, match="has quantized weights; a reward model cannot be trained on them"):
        load_reward_model(ModelSettings.model_validate({"path": model["path"], "lora": LORA}), 1)
    values["model"] = model | {"lora": LORA}
    Training(SFTRun.model_validate({**values, "run": tmp_path / "adapters"})).run(lambda *_: None)


@pytest.mark.parametrize("bits", ["nf4", "int8"])
def test_the_reference_is_the_quantized_base_without_its_adapters(bits: str, base: Path, tmp_path: Path) -> None:
    run = GRPORun.model_validate(
        {
            "run": tmp_path / "run",
            "steps": 2,
            "batch_size": 8,
            "samples_per_prompt": 4,
            "model": {"path": str(base), "lora": LORA, "quantization": bits, "device": "cpu"},
            "sampling": {"max_new_tokens": 6},
            "optimizer": {"learning_rate": 1e-2},
        }
    )
    prompts = ["The morning", "A dog"]
    result = Training(run, prompts=prompts, rewards=lambda prompts, responses, **_: list(map(len, responses))).run(
        lambda *_: None
    )
    first, second = (step["kl/objective"] for step in result.metrics)
    assert first == 0.0
    assert second != 0.0


@pytest.mark.parametrize("bits", ["nf4", "int8"])
def test_a_quantized_layer_without_rounding_is_a_product_with_its_weights(bits: str, base: Path) -> None:
    model = load_causal(str(base), quantization=bits)
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    rounded = layer(x)
    with without_rounding(model):
        whole = layer(torch.eye(128))  # the weights, by the unit vectors
        assert torch.allclose(layer(x), x @ whole, atol=1e-5)
        assert torch.allclose(layer(x)[:1], layer(x[:1]), atol=1e-6)
    assert torch.allclose(layer(x), rounded, atol=0.05)  # kernels of 4 bits on CPU round
    # Of 4 bits a weight is off by 0.15 of the largest in its block at most, of 8 bits by 1 / 254.
    true = load_causal(str(base)).get_submodule("model.layers.0.mlp.up_proj").weight.T
    assert float((whole - true).abs().max()) <= {"nf4": 0.16, "int8": 0.005}[bits] * float(true.abs().max())


def test_a_pass_without_gradients_does_not_change_the_gradients_of_later_ones(base: Path) -> None:
    # bitsandbytes packs 4-bit weights on some CPUs for a kernel through which no gradient flows.
    settings = ModelSettings.model_validate({"path": str(base), "lora": LORA, "quantization": "nf4"})
    model = build_learner(load_causal(str(base), quantization="nf4"), settings)
    ids = torch.arange(2, 12)[None]

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(ids).logits.pow(2).mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    before = gradients()
    with torch.no_grad():
        model(ids)
    after = gradients()
    assert max(float(gradient.abs().max()) for gradient in before) > 0
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one, other)

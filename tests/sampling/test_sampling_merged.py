"""Adapters merged into the weights while responses are sampled."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1] / "models"))
sys.path.append(str(Path(__file__).parents[1] / "train"))
from sampling_helpers import prompts, tokens
from small_models import small_model
from train_helpers import everything, quiet, tiny_run

import cavesson
from cavesson.algorithms.grpo import GRPORun
from cavesson.config import SettingsError, load
from cavesson.errors import UserError
from cavesson.models.policy import Policy, with_adapters
from cavesson.models.settings import ModelSettings
from cavesson.rollout.engines.merged import Merging, merged_adapters, merged_bytes
from cavesson.rollout.engines.responses import Responses
from cavesson.rollout.engines.sampler import Sampler
from cavesson.rollout.engines.settings import SamplingSettings

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("llama", {}),
    "DoRA": ("qwen2", {"dora": True}),
    "transposed weights": ("gpt2", {}),
    "an embedding": ("llama", {"targets": ["embed_tokens", "q_proj"]}),
    "experts": ("mixtral", {}),
}


def adapted(architecture: str, lora: dict[str, Any], dtype: torch.dtype = torch.float32) -> Policy:
    """A policy whose adapters change what it says."""
    model = small_model(architecture, tie_word_embeddings=False).to(dtype)
    settings = ModelSettings.model_validate({"lora": {"rank": 4, "alpha": 8, **lora}})
    policy = Policy(with_adapters(model, settings))
    torch.manual_seed(1)
    for name, weight in policy.named_parameters():
        if "lora_B" in name or "lora_embedding_A" in name:
            nn.init.normal_(weight, std=0.3)
    return policy


def weights(policy: Policy) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in policy.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(weight, other[name]) for name, weight in one.items())


def sampled(policy: Policy, tokenizer: Any, merges: Any) -> Responses:
    sampler = Sampler(policy, tokenizer, SamplingSettings(max_new_tokens=8), seed=0, merges=merges)
    batch = prompts(tokenizer)
    sampler.prepare(len(batch), batch["prompt_ids"].shape[1])
    with sampler.sampling():
        return sampler.sample(batch, 0, range(len(batch)))


@pytest.mark.parametrize("kind", KINDS)
def test_merged_adapters_sample_the_same_and_leave_no_trace(tokenizer: Any, kind: str) -> None:
    policy = adapted(*KINDS[kind])
    before = weights(policy)
    apart, merged = (sampled(policy, tokenizer, merges) for merges in ("never", "always"))
    assert tokens(apart) == tokens(merged)
    torch.testing.assert_close(apart.sampler_logprob, merged.sampler_logprob, atol=1e-4, rtol=0)
    assert same(before, weights(policy))
    bare = sampled(Policy(small_model(KINDS[kind][0], tie_word_embeddings=False)), tokenizer, "auto")
    assert tokens(bare) != tokens(merged)


def test_weights_are_restored_after_an_error() -> None:
    policy = adapted("llama", {})
    before = weights(policy)
    with pytest.raises(KeyboardInterrupt), merged_adapters(policy.model, 0):
        assert not same(before, weights(policy))
        raise KeyboardInterrupt
    assert same(before, weights(policy))


@torch.no_grad()
def test_small_changes_of_bfloat16_weights_are_not_lost() -> None:
    """Rounded to the nearest, a change of a hundredth of the distance between neighbours would be lost everywhere."""
    policy = adapted("llama", {}, torch.bfloat16)
    layer: Any = policy.model.get_submodule("base_model.model.model.layers.0.mlp.up_proj")
    layer.lora_B["default"].weight.mul_(1e-4)
    weight = layer.get_base_layer().weight
    before, change = weight.double(), layer.get_delta_weight("default").double()
    assert torch.equal((before + change).bfloat16().double(), before) or change.abs().max() < 1e-3

    def kept(seed: int) -> float:
        with merged_adapters(policy.model, seed):
            return float(((weight.double() - before) * change).sum() / change.square().sum())

    shares = torch.tensor([kept(seed) for seed in range(200)])
    assert abs(float(shares.mean()) - 1) < 5 * float(shares.std()) / len(shares) ** 0.5 and len(shares.unique()) > 100


def test_the_rounding_depends_on_seed_and_version_alone() -> None:
    policy = adapted("llama", {}, torch.bfloat16)

    def merged(seed: int, version: int) -> dict[str, Tensor]:
        merging = Merging(policy.model, "always", seed)
        merging.choose(lambda: 0)
        with merging.merged(version):
            return weights(policy)

    assert same(merged(3, 1), merged(3, 1))
    assert not same(merged(3, 1), merged(3, 2)) and not same(merged(3, 1), merged(4, 1))


def test_what_was_chosen_is_told() -> None:
    policy = adapted("llama", {})
    for when, expected in (
        ("always", ["adapters are merged into a copy of the weights for sampling (0.0 GiB)"]),
        ("auto", []),  # on a CPU
        ("never", []),
    ):
        merging = Merging(policy.model, when, 0)  # type: ignore[arg-type]
        merging.choose(lambda: 0)
        assert merging.remarks() == expected
    linear = [m.weight for m in policy.model.modules() if isinstance(m, nn.Linear) and not m.weight.requires_grad]
    assert merged_bytes(policy.model) == sum(w.nbytes for w in linear) - 258 * 32 * 4  # all but the head


def test_quantized_weights_are_not_merged() -> None:
    """They would be dequantized, or lose what adapters have learned."""
    policy = adapted("llama", {})
    policy.model.get_base_model().hf_quantizer = object()
    with pytest.raises(UserError, match=r"adapters cannot be merged, because the weights are quantized"):
        Merging(policy.model, "always", 0).choose(lambda: 0)


def test_adapters_that_merge_wrongly_are_refused() -> None:
    policy = adapted("llama", {})
    layer: Any = policy.model.get_submodule("base_model.model.model.layers.0.mlp.up_proj")
    layer.merge = lambda: layer.get_base_layer().weight.data.mul_(2)
    with pytest.raises(UserError, match="merged weights compute other hidden states"):
        Merging(policy.model, "always", 0).choose(lambda: 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_records_what_merged_weights_sampled_and_resumes_exactly(tmp_path: Path, dtype: str) -> None:
    flags = {"model__lora__rank": 4, "model__dtype": dtype, "sampling__merge_adapters": "always"}
    flags |= {"optimizer__learning_rate": 0.05, "optimizer__schedule": "constant"}
    tiny_run("grpo", tmp_path / "whole", steps=3, **flags).run(quiet)
    tiny_run("grpo", tmp_path / "parts", steps=2, **flags).run(quiet)
    tiny_run("grpo", tmp_path / "parts", {"resume": True}, steps=3, **flags).run(quiet)
    assert everything(tmp_path / "parts") == everything(tmp_path / "whole")
    first = cavesson.open(tmp_path / "whole").tokens(2).to_pydict()
    scored, sampler = (torch.tensor(first[name]) for name in ("logprob", "sampler_logprob"))
    torch.testing.assert_close(scored, sampler, atol=1e-4 if dtype == "float32" else 0.1, rtol=0)
    assert dtype == "float32" or not torch.equal(scored, sampler)  # that difference is less than the record keeps


def test_a_run_keeps_what_was_chosen_when_it_resumes(tmp_path: Path) -> None:
    """Whatever would be chosen now: on a CPU, that adapters are not merged."""
    flags = {"model__lora__rank": 4, "model__dtype": "bfloat16", "optimizer__learning_rate": 0.05}
    flags["optimizer__schedule"] = "constant"
    merges = {"sampling__merge_adapters": "always"}
    tiny_run("grpo", tmp_path / "whole", steps=3, **flags, **merges).run(quiet)
    tiny_run("grpo", tmp_path / "parts", steps=2, **flags, **merges).run(quiet)
    file = tmp_path / "parts" / "run.json"
    info = json.loads(file.read_text())
    info["config"]["sampling"]["merge_adapters"] = "auto"
    file.write_text(json.dumps({**info, "chosen": {"sampling.merge_adapters": "always"}}))
    tiny_run("grpo", tmp_path / "parts", {"resume": True}, steps=3, **flags).run(quiet)
    assert everything(tmp_path / "parts") == everything(tmp_path / "whole")
    assert json.loads(file.read_text())["chosen"] == {"sampling.merge_adapters": "always"}


def test_a_run_keeps_that_adapters_are_not_merged(tmp_path: Path) -> None:
    tiny_run("grpo", tmp_path / "adapters", steps=1, model__lora__rank=4).run(quiet)
    assert json.loads((tmp_path / "adapters" / "run.json").read_text())["chosen"] == {
        "sampling.merge_adapters": "never"
    }
    tiny_run("grpo", tmp_path / "weights", steps=1).run(quiet)
    assert "chosen" not in json.loads((tmp_path / "weights" / "run.json").read_text())


def test_all_processes_merge_or_none() -> None:
    merging = Merging(adapted("llama", {}).model, "always", 0)
    merging.choose(lambda: 0)
    merging.agree([True, False])
    assert not merging.merges and "another process does not merge them" in merging.remarks()[0]


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ([], "merge_adapters has no effect without model.lora"),
        (["--model.lora.rank", "4", "--sampling.engine", "vllm"], "merge_adapters has no effect with engine .vllm."),
        (["--model.lora.rank", "4", "--model.quantization", "nf4", "--model.path", "x"], "with model.quantization"),
        (["--model.lora.rank", "4", "--parallel.shard", "full"], "with parallel.shard"),
    ],
)
def test_settings_that_cannot_be_merged_are_refused(flags: list[str], why: str) -> None:
    with pytest.raises((UserError, SettingsError), match=why):
        load(GRPORun, None, ["--sampling.merge_adapters", "always", *flags])

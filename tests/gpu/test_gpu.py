"""What only a GPU can show: `make gpu` runs these tests."""

import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "train"))
from train_helpers import everything, tiny_flags, tiny_run
from transformers import LlamaConfig, LlamaForCausalLM

import cavesson
from cavesson.data.prompts import padded_prompts
from cavesson.models.load import prepare
from cavesson.models.policy import Policy, with_adapters
from cavesson.models.settings import ModelSettings
from cavesson.models.tiny import tiny_model, tiny_tokenizer
from cavesson.processes import Processes
from cavesson.rollout.engines.decoder import CacheKind, Decoder, new_cache
from cavesson.rollout.engines.decoding import Decoding, choose_decoding, full_passes
from cavesson.rollout.engines.merged import merged_adapters
from cavesson.rollout.engines.responses import Responses
from cavesson.rollout.engines.sampler import Sampler
from cavesson.rollout.engines.settings import SamplingSettings
from cavesson.rollout.engines.vllm_weights import NcclGroup
from cavesson.train.batches import begin_thread
from cavesson.train.loop import Report

COUNT = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(COUNT == 0, reason="needs a GPU; on a machine that has one: make gpu"),
]
needs_two = pytest.mark.skipif(COUNT < 2, reason="needs two GPUs; on a machine that has them: make gpu")
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes: pip install 'cavesson[qlora]'"
)
VLLM = os.environ.get("CAVESSON_TEST_VLLM", "")
needs_vllm = pytest.mark.skipif(not VLLM, reason="needs vLLM for GPUs: CAVESSON_TEST_VLLM=PYTHON make gpu")


def quiet(step: int, metrics: dict[str, float]) -> None:
    pass


def responses(folder: Path) -> list[str]:
    return cavesson.open(folder).rows(["response"])["response"].to_pylist()  # type: ignore[no-any-return]


def first_metrics(seen: list[dict[str, float]]) -> Report:
    return lambda step, metrics: seen.append(metrics)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_the_first_ratio_is_1(tmp_path: Path, name: str, dtype: str) -> None:
    seen: list[dict[str, float]] = []
    tiny_run(name, tmp_path / "run", model__device="cuda", model__dtype=dtype).run(first_metrics(seen))
    assert [metrics["policy/first_ratio_error"] for metrics in seen] == [0.0] * len(seen)


def test_a_seed_draws_the_same_tokens_as_on_the_cpu(tmp_path: Path) -> None:
    """Before the first update; a draw at the edge between two tokens may differ by rounding, which is rare."""
    for device in ("cpu", "cuda"):
        run = tiny_run(
            "grpo", tmp_path / device, model__device=device, steps=1, batch_size=96, optimizer__warmup_steps=0
        )
        run.run(quiet)
    cpu, cuda = (
        cavesson.open(tmp_path / device).rows(["response"])["response"].to_pylist() for device in ("cpu", "cuda")
    )
    assert sum(one != other for one, other in zip(cpu, cuda, strict=True)) <= 1


def test_a_replayed_step_computes_the_same_bits() -> None:
    """With and without a CUDA graph, after rows have left the batch, been replaced, and moved in a full cache."""
    model = tiny_model(seed=3).to("cuda").eval()
    ids = torch.arange(2, 26, device="cuda").view(4, 6)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    tokens = torch.arange(30, 70, device="cuda").view(10, 4)

    @torch.no_grad()
    def logits(kind: CacheKind) -> list[torch.Tensor]:
        decoder = Decoder(model, ids, mask, new_cache(model, kind, 14), kind == "recorded", spare=2)
        seen, kept = [decoder.read()], torch.arange(4, device="cuda")
        for step, token in enumerate(tokens):
            if step == 5:
                kept = kept[1::2]
                decoder.keep(kept)
            if step == 6:
                seen.append(decoder.replace(kept[:1] * 0, ids[:1], mask[:1]))
            seen.append(decoder.append(token[kept]).clone())
        return seen

    for one, other in zip(logits("static"), logits("recorded"), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("filters", [{}, {"top_k": 20, "top_p": 0.9}, {"min_new_tokens": 3}])
def test_a_graph_draws_the_same_tokens(filters: dict[str, Any]) -> None:
    """The draw is part of the graph, also of one that was recorded again after rows have left or been replaced."""
    policy = Policy(prepare(tiny_model(seed=3))).to("cuda")
    prompts = padded_prompts([[2 + n, 3, 4 + n % 5] for n in range(24)])
    settings = SamplingSettings(random_length=(4, 20), batch_size=16, **filters)

    def sampled(kind: CacheKind) -> Responses:
        sampler = Sampler(policy, tiny_tokenizer(), settings, seed=0)
        sampler.prepare(24, 3)
        sampler.decoding = Decoding(kind, replaces=True)
        return sampler.sample(prompts, 0, range(24))

    one, other = sampled("static"), sampled("recorded")
    assert one.finish_reasons == other.finish_reasons and torch.equal(one.response_ids, other.response_ids)
    torch.testing.assert_close(one.sampler_logprob, other.sampler_logprob)  # rows leave at other times


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_merged_for_sampling_leave_no_trace(tmp_path: Path, dtype: str) -> None:
    flags = {"model__lora__rank": 4, "model__dtype": dtype, "model__device": "cuda", "steps": 2}
    for merges in ("always", "never"):
        tiny_run("grpo", tmp_path / merges, **flags, sampling__merge_adapters=merges).run(quiet)
    assert responses(tmp_path / "always")[:6] == responses(tmp_path / "never")[:6]  # adapters start as nothing
    seen = cavesson.open(tmp_path / "always").tokens(1).to_pydict()
    scored, sampler = (torch.tensor(seen[name]) for name in ("logprob", "sampler_logprob"))
    torch.testing.assert_close(scored, sampler, atol=1e-3 if dtype == "float32" else 0.1, rtol=0)


def test_merged_bfloat16_weights_are_restored_on_the_gpu() -> None:
    model = tiny_model(seed=3).to("cuda", torch.bfloat16)
    adapted = with_adapters(model, ModelSettings.model_validate({"lora": {"rank": 4}}))
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    before = {name: weight.clone() for name, weight in adapted.state_dict().items()}
    with merged_adapters(adapted, 7):
        merged = {name: weight.clone() for name, weight in adapted.state_dict().items()}
    with merged_adapters(adapted, 7):
        assert all(torch.equal(weight, merged[name]) for name, weight in adapted.state_dict().items())
    assert all(torch.equal(weight, before[name]) for name, weight in adapted.state_dict().items())
    assert any(not torch.equal(weight, before[name]) for name, weight in merged.items())


def test_steps_are_replayed_where_their_kernels_can_be_recorded() -> None:
    """8-bit layers wait for the GPU in each step."""
    model = tiny_model(seed=3).to("cuda").eval()
    assert choose_decoding(model, 16, full_passes(model, 16)) == Decoding("recorded", replaces=True)
    layer = model.get_submodule("model.layers.0.mlp")
    inner = layer.forward
    layer.forward = lambda x: inner(x) * float((x * 0 + 1).mean())  # type: ignore[assignment]
    cache, why, *_ = choose_decoding(model, 16, full_passes(model, 16))
    assert cache == "static" and str(why).startswith("decoding raises AcceleratorError (CUDA error: ")
    assert torch.ones(2, device="cuda").sum() == 2  # the GPU computes as before


def test_a_run_resumes_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With PyTorch's deterministic kernels: by default, attention sums gradients in any order."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        flags: dict[str, Any] = {"model__device": "cuda", "model__dtype": "bfloat16"}
        tiny_run("ppo", tmp_path / "whole", steps=3, **flags).run(quiet)
        tiny_run("ppo", tmp_path / "parts", **flags).run(quiet)
        tiny_run("ppo", tmp_path / "parts", {"resume": True}, steps=3, **flags).run(quiet)
    finally:
        torch.use_deterministic_algorithms(False)
    assert everything(tmp_path / "parts")["rows"] == everything(tmp_path / "whole")["rows"]


@needs_two
@pytest.mark.parametrize("shard", ["none", "full"])
def test_two_processes_with_nccl_are_one(tmp_path: Path, shard: str) -> None:
    alone = tiny_flags("ppo", tmp_path / "one", model__device="cuda:0", steps=1)
    both = [*tiny_flags("ppo", tmp_path / "two", model__device=None, steps=1), "--parallel.shard", shard]
    for flags in (alone, [*both, "--processes", "2"]):
        done = subprocess.run([sys.executable, "-m", "cavesson", "ppo", *flags], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
    assert responses(tmp_path / "one") == responses(tmp_path / "two")


@needs_bitsandbytes
@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_adapters_are_trained_on_quantized_weights(tmp_path: Path, quantization: str, device: str) -> None:
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    seen: list[dict[str, float]] = []
    flags = {"model__path": str(tmp_path / "model"), "model__lora__rank": 4, "model__dtype": "bfloat16"}
    run = tiny_run("ppo", tmp_path / "run", model__device=device, model__quantization=quantization, **flags)
    run.run(first_metrics(seen))
    assert all(torch.isfinite(torch.tensor(metrics["loss/total"])) for metrics in seen)


def test_sampling_ahead_uses_the_gpu_of_the_run() -> None:
    device = Processes(f"cuda:{COUNT - 1}").device
    with ThreadPoolExecutor(1, initializer=begin_thread, initargs=(device,)) as pool:
        assert pool.submit(torch.cuda.current_device).result() == COUNT - 1


@needs_vllm
@pytest.mark.parametrize("lora", [None, 4], ids=["all weights", "adapters"])
def test_a_server_on_the_gpu_of_training_sleeps_and_wakes(tmp_path: Path, lora: int | None) -> None:
    """If its weights were lost or old, the comparison with the policy would end the run."""
    flags = {"sampling__vllm__devices": [0], "sampling__vllm__sleep": True}
    sampled_by_vllm(tmp_path, **flags, **({"model__lora__rank": lora} if lora else {}))


@needs_two
@needs_vllm
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_server_on_another_gpu_gets_its_weights_over_nccl(tmp_path: Path, staleness: int) -> None:
    flags = {"sampling__vllm__devices": [1], "sampling__vllm__transfer": "nccl"}
    sampled_by_vllm(tmp_path, **flags, sampling__max_staleness=staleness)
    first = cavesson.open(tmp_path / "run").tokens(0)
    torch.testing.assert_close(
        torch.tensor(first["logprob"].to_numpy()), torch.tensor(first["sampler_logprob"].to_numpy()), atol=1e-2, rtol=0
    )


def test_nccl_sends_in_a_group_of_one_process() -> None:
    device = Processes("cuda:0").device
    group = NcclGroup(NcclGroup.new_identity(), 1, device)
    for dtype in (torch.float32, torch.bfloat16):
        sent = torch.arange(1000, dtype=dtype, device=device)
        group.broadcast(sent)
        torch.cuda.synchronize()
        assert group.is_idle() and torch.equal(sent.cpu(), torch.arange(1000, dtype=dtype))


def sampled_by_vllm(tmp_path: Path, **changes: Any) -> None:
    """A run with its own vLLM server, for a model with heads of 32 dimensions, which vLLM needs."""
    config = LlamaConfig(
        vocab_size=258, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=256, bos_token_id=None, eos_token_id=0,
        pad_token_id=1, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    flags: dict[str, Any] = {
        "model__path": str(tmp_path / "model"), "model__device": "cuda:0", "sampling__engine": "vllm",
        "sampling__vllm__python": VLLM, "sampling__vllm__arguments": ["--gpu-memory-utilization=0.3"], "steps": 3,
        **changes,
    }  # fmt: skip
    tiny_run("ppo", tmp_path / "run", **flags).run(quiet)
    assert len(responses(tmp_path / "run")) == 18

"""The ways in which a GPU learns and samples: packed, compiled, recomputed, recorded. `make gpu` runs these tests."""

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

sys.path.append(str(Path(__file__).parents[1] / "train"))
sys.path.append(str(Path(__file__).parents[1] / "models"))
from models_helpers import scramble
from train_helpers import everything, quiet, tiny_run
from transformers import LlamaConfig, LlamaForCausalLM

import cavesson
from cavesson.data.prompts import padded_prompts
from cavesson.models.compiled import compiler
from cavesson.models.layers import Recomputation, forwards, recompute_layers
from cavesson.models.load import prepare
from cavesson.models.passes import Ways, use
from cavesson.models.policy import Policy, with_adapters
from cavesson.models.settings import ModelSettings
from cavesson.models.tiny import tiny_tokenizer
from cavesson.rollout.engines.decoding import choose_decoding, full_passes
from cavesson.rollout.engines.merged import merged_adapters
from cavesson.rollout.engines.responses import Responses
from cavesson.rollout.engines.sampler import Sampler
from cavesson.rollout.engines.settings import SamplingSettings
from cavesson.types import Batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; on a machine that has one: make gpu"),
]
WAYS = {
    "packed": (True, False),
    "compiled": (False, True),
    "packed and compiled": (True, True),
}


def model_of(layers: int = 3, hidden: int = 128, heads: int = 4, vocabulary: int = 258) -> nn.Module:
    """A Llama with two heads for each key, in bfloat16 on the GPU."""
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads // 2, bos_token_id=None, eos_token_id=0, pad_token_id=1,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return prepare(LlamaForCausalLM(config).to("cuda", torch.bfloat16))


def ways(name: str) -> Ways:
    packed, compiles = WAYS[name]
    return Ways(packed, compiler() if compiles else None)


def rows(lengths: list[int], prompt: int = 9) -> Batch:
    """Prompts of different lengths, and responses of these lengths."""
    prompts = [list(range(3, 3 + 1 + n % prompt)) for n in range(len(lengths))]
    ids = torch.arange(len(lengths) * max(lengths)).view(len(lengths), -1) % 250 + 5
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).float()
    return padded_prompts(prompts).with_columns(response_ids=ids, attended=mask, learned=mask).to(torch.device("cuda"))


def learned(policy: Policy, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """The scores of a batch, and the gradient of all weights together."""
    policy.zero_grad(set_to_none=True)
    scores = policy(batch)
    weights = torch.linspace(-1, 1, scores.logprob.numel(), device="cuda").view_as(scores.logprob)
    (weights * (scores.logprob + 0.1 * scores.entropy)).sum().backward()
    gradient = torch.cat([p.grad.float().flatten() for p in policy.parameters() if p.grad is not None])
    return scores.logprob.detach(), scores.entropy.detach(), gradient


@pytest.mark.parametrize("adapters", [False, True], ids=["all weights", "adapters"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_learning_is_the_plain_one_within_rounding(way: str, adapters: bool) -> None:
    """In bfloat16, so within its rounding; and with the same bits for scoring and learning."""
    model: Any = model_of()
    if adapters:
        model = with_adapters(model, ModelSettings.model_validate({"lora": {"rank": 4}, "dtype": "bfloat16"}))
    plain = Policy(model)
    scramble(plain, 0.02)
    other = copy.deepcopy(plain)
    assert list(use(other, ways(way))) == []
    assert other.packed is WAYS[way][0]
    assert all((forward.compiled is not None) is WAYS[way][1] for forward in forwards(other.model))
    for lengths in ([33, 2, 70, 129], [64] * 4, [57]):
        batch = rows(lengths)
        (logprob, entropy, gradient), expected = learned(other, batch), learned(plain, batch)
        torch.testing.assert_close(logprob, expected[0], atol=0.1, rtol=0.02)
        torch.testing.assert_close(entropy, expected[1], atol=0.1, rtol=0.02)
        assert cosine_similarity(gradient, expected[2], dim=0) > 0.99
        with torch.no_grad():
            assert torch.equal(other(batch).logprob, logprob)


def test_log_probabilities_of_the_head_are_those_in_float32() -> None:
    """Within 2e-3, and entropies without bias: the products are in bfloat16, and their sums and logits in float32."""
    policy = Policy(model_of(vocabulary=32_000))
    assert list(use(policy, ways("packed and compiled"))) == []
    batch = rows([300] * 8)
    head = policy.model.get_output_embeddings().weight
    with torch.no_grad():
        scores = policy(batch)
        logits = policy.hidden(policy.model, batch).double() @ head.double().T
    inside = batch["learned"] > 0
    expected = logits.log_softmax(-1)
    target = expected.gather(1, batch["response_ids"][inside][:, None]).squeeze(1)
    assert float((scores.logprob[inside] - target).abs().max()) <= 2e-3
    bias = scores.entropy[inside].double() + (expected.exp() * expected).sum(-1)
    assert abs(float(bias.mean())) <= 1e-4


@pytest.mark.parametrize("way", WAYS)
def test_recomputed_layers_learn_the_same_from_less_memory(way: str) -> None:
    batch, peaks, found = rows([500] * 8), list[int](), list[tuple[Tensor, ...]]()
    which: tuple[Recomputation, ...] = (False, "half", True)
    for each in which:
        policy = Policy(model_of(layers=8, hidden=512))
        recompute_layers(policy.model, each)
        assert list(use(policy, ways(way))) == []
        learned(policy, batch)  # what is compiled and allocated once
        torch.cuda.reset_peak_memory_stats()
        found.append(learned(policy, batch))
        peaks.append(torch.cuda.max_memory_allocated())
        del policy
    for logprob, entropy, gradient in found[1:]:
        assert torch.equal(logprob, found[0][0]) and torch.equal(entropy, found[0][1])
        assert cosine_similarity(gradient, found[0][2], dim=0) > 0.999
    assert peaks[0] > peaks[1] > peaks[2]


def sampled(policy: Policy, compiles: bool, **given: Any) -> Responses:
    settings = SamplingSettings(random_length=(4, 40), batch_size=16, **given)
    sampler = Sampler(policy, tiny_tokenizer(), settings, seed=0, compile=compiler() if compiles else None)
    prompts = padded_prompts([[2 + n, 3, 4 + n % 5] for n in range(24)])
    responses = sampler.sample(prompts, 0, range(24))
    decoding = sampler.decoding
    assert (decoding.cache, decoding.unrecorded, decoding.uncompiled, decoding.replaces) == (
        "recorded",
        None,
        None,
        True,
    )
    assert all((forward.decoding is not None) is compiles for forward in forwards(policy.model))
    return responses


@pytest.mark.parametrize("given", [{}, {"top_k": 20, "top_p": 0.9}, {"min_new_tokens": 3}, {"temperature": 0}], ids=str)
def test_compiled_steps_in_a_graph_draw_the_same_tokens(given: dict[str, Any]) -> None:
    """In float32; a draw at the edge between two tokens may differ by rounding, and then so does what follows."""
    policy = Policy(model_of().float())
    plain, compiled = (sampled(policy, compiles, **given) for compiles in (False, True))
    same = [torch.equal(one, two) for one, two in zip(plain.response_ids, compiled.response_ids, strict=True)]
    assert sum(same) >= 23
    for row in (row for row, is_same in enumerate(same) if is_same):
        one, two = plain.sampler_logprob[row], compiled.sampler_logprob[row]
        torch.testing.assert_close(one, two, atol=1e-3, rtol=0)


def test_compiled_steps_of_merged_adapters_are_scored_as_sampled() -> None:
    model = with_adapters(
        model_of(),
        ModelSettings.model_validate({"lora": {"rank": 4}, "dtype": "bfloat16"}),  # type: ignore[arg-type]
    )
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.02)
    with torch.no_grad():
        expected = full_passes(model, 32)
        with merged_adapters(model, 7):
            decoding = choose_decoding(model, 32, expected, compile=compiler())
    assert (decoding.cache, decoding.unrecorded, decoding.uncompiled) == ("recorded", None, None)


RUNS: dict[str, dict[str, Any]] = {
    "compiled": {},
    "every second layer recomputed": {"model__gradient_checkpointing": "half"},
    "adapters": {"model__lora__rank": 4, "sampling__merge_adapters": "always"},
    "micro-batches by tokens": {"update__micro_batch_tokens": 64},
}


@pytest.mark.parametrize("changes", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_a_run_in_every_way_resumes_bit_for_bit(
    tmp_path: Path, name: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With PyTorch's deterministic kernels."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    flags = {"model__device": "cuda", "model__dtype": "bfloat16", **changes}
    try:
        whole = tiny_run(name, tmp_path / "whole", steps=3, **flags)
        assert not [note for note in whole.trainer.notes() if "not compiled" in note or "padded" in note]
        whole.run(quiet)
        tiny_run(name, tmp_path / "parts", **flags).run(quiet)
        tiny_run(name, tmp_path / "parts", {"resume": True}, steps=3, **flags).run(quiet)
    finally:
        torch.use_deterministic_algorithms(False)
    one, two = (everything(tmp_path / part) for part in ("whole", "parts"))
    assert one["rows"] == two["rows"] and one["tokens"] == two["tokens"]
    first = [row["policy/first_ratio_error"] for row in cavesson.open(tmp_path / "whole").steps().to_pylist()]
    assert first == [0.0] * len(first)


def test_without_compiling_a_run_learns_nearly_the_same(tmp_path: Path) -> None:
    """The first step of both samples the same; what is learned from it differs by rounding."""
    seen: dict[str, list[dict[str, float]]] = {"auto": [], "none": []}
    for compile, metrics in seen.items():
        flags = {"model__device": "cuda", "model__compile": compile, "steps": 1}
        tiny_run("grpo", tmp_path / compile, **flags).run(lambda _, found, metrics=metrics: metrics.append(found))
    ids = [cavesson.open(tmp_path / name).rows(["response"])["response"].to_pylist() for name in seen]
    assert sum(one != two for one, two in zip(*ids, strict=True)) <= 1
    assert seen["auto"][0]["optim/grad_norm"] == pytest.approx(seen["none"][0]["optim/grad_norm"], rel=0.05)

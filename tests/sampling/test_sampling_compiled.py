"""Compiled decoding steps: the numbers and draws of the plain ones, or the plain ones with a reason."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sampling_helpers import PROMPTS, prompts, sharp_policy, tokens
from test_sampling_recorded import Launched
from torch import nn
from transformers import PreTrainedTokenizerBase

sys.path.append(str(Path(__file__).parents[1] / "models"))
from small_models import small_model
from test_models_architectures import documented

from cavesson.models.compiled import compiler
from cavesson.models.layers import forwards
from cavesson.models.policy import Policy, with_adapters
from cavesson.models.settings import LoraSettings, ModelSettings
from cavesson.rollout.engines import decoding
from cavesson.rollout.engines.decoder import keeps_tokens_only, new_cache
from cavesson.rollout.engines.decoding import Decoding, _drawn, _recorded, full_passes
from cavesson.rollout.engines.distribution import Filters, next_tokens
from cavesson.rollout.engines.responses import Responses
from cavesson.rollout.engines.sampler import STEPS, Sampler
from cavesson.rollout.engines.settings import SamplingSettings

SIZE = 16
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="needs a C++ compiler: apt-get install g++, then this test again"
)


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cavesson.rollout.engines.decoder.RecordedStep", Launched)


def counted() -> tuple[list[torch.fx.GraphModule], Callable[..., Any]]:
    """A compiler that computes the graphs that PyTorch has found as they are, and these graphs."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    return graphs, compiler(backend)  # type: ignore[arg-type]


@torch.no_grad()
def chosen(model: nn.Module, compile: Callable[..., Any]) -> tuple[Decoding, decoding.Compared]:
    """The decoding that is chosen, and what it computes beside full passes."""
    expected = full_passes(model, SIZE)
    found = _recorded(model, SIZE, expected, compile)
    return found, _drawn(found.draw, model, "recorded", SIZE, expected)


def are_close(compared: decoding.Compared) -> None:
    seen, wanted = (x.log_softmax(-1) for x in (compared.logits, compared.expected))
    torch.testing.assert_close(seen, wanted, atol=1e-3, rtol=1e-3)
    assert compared.draws_agree


def preallocated() -> list[str]:
    return [name for name, kind in documented() if kind == "static"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("architecture", preallocated())
def test_every_architecture_is_compiled_exactly_or_not_at_all(architecture: str) -> None:
    model = small_model(architecture).eval()
    if not keeps_tokens_only(new_cache(model, "recorded", SIZE)):
        return
    found, compared = chosen(model, counted()[1])
    are_close(compared)
    assert all((forward.decoding is None) is (found.uncompiled is not None) for forward in forwards(model))
    assert found.uncompiled is None or "\n" not in found.uncompiled
    assert forwards(model) or found.unrecorded or found.uncompiled, "a draw alone is not called compiled steps"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("architecture", ["qwen2", "gpt2", "llama", "gpt_neox", "phi3", "qwen3_moe"])
def test_all_layers_and_numbers_of_rows_share_one_graph(architecture: str) -> None:
    graphs, compile = counted()
    found, compared = chosen(small_model(architecture).eval(), compile)
    assert found.uncompiled is None and found.unrecorded is None
    are_close(compared)
    assert len(graphs) == 2  # the other one draws


def test_keys_and_values_of_grouped_heads_are_read_where_they_are() -> None:
    graphs, compile = counted()
    chosen(small_model("qwen2").eval(), compile)
    config = small_model("qwen2").config
    assert config.num_attention_heads > config.num_key_value_heads
    (attention,) = (node for graph in graphs for node in graph.graph.nodes if "scaled_dot" in str(node.target))
    _, key, value = (node.meta["example_value"] for node in attention.args[:3])
    assert key.shape[1] == value.shape[1] == config.num_key_value_heads
    assert all(node.op == "placeholder" for node in attention.args[1:3])  # the cache itself


def test_adapters_are_compiled_with_their_layers() -> None:
    model = with_adapters(small_model("qwen2"), ModelSettings(lora=LoraSettings(rank=2))).eval()
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.1)
    found, compared = chosen(model, counted()[1])
    assert found.uncompiled is None
    are_close(compared)


def test_steps_that_cannot_be_compiled_are_plain(capsys: pytest.CaptureFixture[str], tokenizer) -> None:
    def broken(_graph: Any, _inputs: Any) -> Any:
        raise RuntimeError("no kernel for this")

    model = small_model("qwen2").eval()
    found, compared = chosen(model, compiler(broken))  # type: ignore[arg-type]
    assert (found.cache, found.unrecorded, found.draw) == ("recorded", None, next_tokens)
    assert all(forward.decoding is None for forward in forwards(model))
    are_close(compared)
    sampler = Sampler(Policy(model), tokenizer, SamplingSettings(), seed=0)
    sampler.decoding = found
    (line,) = sampler.remarks()
    assert line.startswith("decoding steps are not compiled, because decoding raises ") and "no kernel for this" in line
    assert "\n" not in line and capsys.readouterr().err == ""


def test_a_draw_that_differs_in_the_steps_is_noticed() -> None:
    """The layers are right, and the compiled draw takes the next token."""

    def wrong(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        token, logprob = next_tokens(*given)
        return token + 1, logprob

    def compile(function: Callable[..., Any]) -> Callable[..., Any]:
        return wrong if function is next_tokens else function

    found, compared = chosen(small_model("qwen2").eval(), compile)
    assert found.uncompiled == "draws other tokens than those of its logits" and found.draw is next_tokens
    are_close(compared)


def test_code_that_fails_later_is_replaced_by_the_plain_one(capsys: pytest.CaptureFixture[str]) -> None:
    """A batch of one row has its own code, which is made when it is first needed."""
    model = small_model("qwen2").eval()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        if any(isinstance(x, torch.Tensor) and x.ndim == 3 and len(x) == 1 for x in inputs):
            raise RuntimeError("no kernel for this")
        return graph.forward

    expected = full_passes(model, SIZE)
    with torch.no_grad():
        found = _recorded(model, SIZE, expected, compiler(backend))  # type: ignore[arg-type]
        assert found.uncompiled is None
        decoder = decoding._begun(model, "recorded", SIZE, expected.prompts[1:2])
        logits = [decoder.read(), decoder.append(expected.answers[1:2, 0])]
    torch.testing.assert_close(torch.cat(logits), expected.logits[1, :2], atol=1e-4, rtol=1e-3)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("cavesson: decoding steps are not compiled: ") and "no kernel for this" in line


FILTERS = [
    {}, {"temperature": 0.7}, {"top_k": 20, "top_p": 0.9}, {"min_new_tokens": 3},
    {"temperature": 0, "min_new_tokens": 2},
]  # fmt: skip


def sample(tokenizer: PreTrainedTokenizerBase, found: Decoding | None, **given: Any) -> Responses:
    settings = SamplingSettings(**{"random_length": (1, 20), "batch_size": 16, **given})
    sampler, batch = Sampler(sharp_policy(), tokenizer, settings, seed=0), prompts(tokenizer, PROMPTS * 5)
    sampler.prepare(*batch["prompt_ids"].shape)
    if found is not None:
        expected = full_passes(sampler.policy.model, SIZE)
        with torch.no_grad():
            sampler.decoding = _recorded(sampler.policy.model, SIZE, expected, found)._replace(replaces=True)  # type: ignore[arg-type]
        assert sampler.decoding.uncompiled is None
    return sampler.sample(batch, 0, range(len(batch["prompt_ids"])))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_compiled_steps_draw_the_same_tokens(tokenizer, filters) -> None:
    plain, compiled = (sample(tokenizer, found, **filters) for found in (None, counted()[1]))
    assert tokens(plain) == tokens(compiled) and plain.finish_reasons == compiled.finish_reasons
    torch.testing.assert_close(plain.sampler_logprob, compiled.sampler_logprob, atol=1e-5, rtol=0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "given",
    [
        {"random_length": (1, 20)},
        {"random_length": (1, 20), "batch_size": 0},
        {"max_new_tokens": 21, "random_length": None, "eos_token_ids": tuple(range(60, 100))},
        {"max_new_tokens": 21, "random_length": None, "stop": ("a", "e"), "temperature": 2.0},
    ],
    ids=str,
)
def test_looking_at_tokens_rarely_changes_no_response(tokenizer, monkeypatch, given) -> None:
    """Rows end in the middle of several steps, give their places to others, and leave."""
    one = sample(tokenizer, None, **given)
    for steps in (3, 8, 50):
        monkeypatch.setitem(STEPS, "static", steps)
        several = sample(tokenizer, None, **given)
        assert tokens(one) == tokens(several) and one.finish_reasons == several.finish_reasons
        torch.testing.assert_close(one.sampler_logprob, several.sampler_logprob, atol=1e-5, rtol=0)
    assert len({len(ids) for ids in tokens(one)}) > 3


@pytest.mark.slow
@needs_compiler
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("architecture", ["qwen2", "gpt2"])
def test_compiled_code_decodes_the_same(architecture: str) -> None:
    found, compared = chosen(small_model(architecture).eval(), compiler())
    assert found.uncompiled is None
    are_close(compared)


@pytest.mark.slow
@needs_compiler
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_compiled_code_draws_the_same_tokens(filters: dict[str, Any]) -> None:
    given = Filters(**{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_new_tokens": 0, **filters})
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(64, 1500, generator=generator)
    uniforms = torch.rand(64, 6, dtype=torch.float64, generator=generator)
    index, count = torch.randperm(64, generator=generator), torch.arange(64) % 6
    rest = (uniforms, index, count, torch.tensor([3, 7]), given)
    plain, compiled = next_tokens(logits, *rest), compiler()(next_tokens)(logits, *rest)
    assert torch.equal(plain[0], compiled[0])
    torch.testing.assert_close(plain[1], compiled[1], atol=1e-5, rtol=0)

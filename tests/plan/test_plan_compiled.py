"""What compiled layers keep for the backward pass: as much as real ones, whose code is made for a CPU."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from check_helpers import run_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from cavesson.models.compiled import compile_layers, compiler
from cavesson.models.layers import as_in_run
from cavesson.models.load import prepare
from cavesson.models.packed import Packed, pack_rows, packed_states
from cavesson.models.parts import row_shape
from cavesson.models.policy import with_adapters
from cavesson.models.settings import LoraSettings, ModelSettings
from cavesson.models.tiny import tiny_model
from cavesson.plan.compiled import fused
from cavesson.plan.fakes import Answers, fake
from cavesson.plan.largest import LargestRollouts, largest_sequences
from cavesson.plan.memory import example_memory, rollout_memory
from cavesson.plan.prediction import Memory, Place
from cavesson.plan.tracker import _WholeTracker, parts

SIZES: dict[str, Any] = {"vocab_size": 258, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
                         "intermediate_size": 208, "bos_token_id": None, "eos_token_id": 0,
                         "pad_token_id": 1}  # fmt: skip
MODELS: dict[str, Any] = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, num_key_value_heads=2)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**SIZES, num_key_value_heads=1, head_dim=16)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=258, n_embd=64, n_layer=3, n_head=4, eos_token_id=0)),
}
LORA = ModelSettings(lora=LoraSettings(rank=4), dtype="bfloat16")
LARGEST = LargestRollouts(8, 8, 8, 8, shared=False, prompt=64, response=64, passes=1, single_pass=False)


def model_of(name: str, adapters: bool) -> nn.Module:
    model = prepare(MODELS[name]().bfloat16())
    return with_adapters(model, LORA) if adapters else model


def rows(length: int) -> Packed:
    """Five sequences, one of them shorter."""
    mask = (torch.arange(length) < torch.tensor([length, length - 3, length, length, length])[:, None]).long()
    return pack_rows(torch.ones_like(mask), mask)


def kept(model: nn.Module, length: int) -> int:
    """The bytes of all storages, besides those of weights, that a real forward pass saves or returns."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    sizes: dict[int, int] = {}
    held: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        held.append(tensor)  # so that no other one gets its address
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), as_in_run():
        keep(packed_states(model, rows(length)))
    return sum(sizes.values())


def planned(model: nn.Module, length: int, compiled: bool) -> int:
    """The bytes that the plan has in memory after the same pass."""
    empty = copy.deepcopy(model).to("meta")
    with FakeTensorMode(allow_non_fake_inputs=True), Answers():
        fakes = fake(empty)
        if compiled:
            compile_layers(fakes, fused)
        tracker = _WholeTracker()
        tracker.prepare(vocabulary=0)
        tracker.track_external(fakes)
        with tracker, as_in_run():
            states = packed_states(fakes, rows(length))
            found = parts(tracker, "current")["activations"]
        assert states.requires_grad
    return found


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler: apt-get install g++")
@pytest.mark.parametrize(("name", "adapters"), [*((name, False) for name in MODELS), ("qwen2", True)])
def test_compiled_layers_keep_what_real_ones_do(name: str, adapters: bool) -> None:
    model = model_of(name, adapters)
    lengths = (100, 250)
    eager = [kept(model, length) for length in lengths]
    assert [planned(model, length, compiled=False) for length in lengths] == pytest.approx(eager, rel=0.02)
    compile_layers(model, compiler())
    real = [kept(model, length) for length in lengths]
    assert [planned(model, length, compiled=True) for length in lengths] == pytest.approx(real, rel=0.02)
    assert all(few < 0.95 * many for few, many in zip(real, eager, strict=True))


def test_what_a_compiled_layer_keeps_is_arithmetic() -> None:
    """Of a Llama: what products and attention read, and what the rest is computed from; norms are not kept twice."""
    hidden, wide, keys = 64, 208, 2 * 16
    # The layer's input, both norms', queries, what attention and its projection give; gate, up and their product.
    numbers = 6 * hidden + 2 * keys + 3 * wide
    per_token = 2 * numbers + 2 * 4  # and in float32, by what each token is divided in the two norms
    few, more = (LlamaForCausalLM(LlamaConfig(**(SIZES | {"num_hidden_layers": layers}), num_key_value_heads=2))
                 for layers in (2, 3))  # fmt: skip
    one, two = (planned(model.bfloat16(), 400, compiled=True) for model in (few, more))
    assert two - one == pytest.approx((5 * 400 - 3) * per_token, rel=0.005)


def predicted(folder: Path, tokenizer: PreTrainedTokenizerBase, **changes: Any) -> Memory:
    run = run_of("grpo", folder, samples_per_prompt=4, model__dtype="bfloat16", **changes)
    return rollout_memory(run, LARGEST, tokenizer, 0, Place())


@pytest.mark.slow
def test_the_plan_counts_compiled_layers_where_a_run_compiles(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    compiled, plain = ([predicted(tmp_path, tokenizer, model__compile=compile, model__gradient_checkpointing=which)
                        for which in (False, "half", True)] for compile in ("auto", "none"))  # fmt: skip
    one, two = (each[0].phases["learning"]["activations"] for each in (compiled, plain))
    assert one < 0.9 * two
    for each in (compiled, plain):  # of two layers, one and two are computed again
        peaks = [memory.added("learning") for memory in each]
        assert peaks[0] > peaks[1] > peaks[2]
    assert compiled[0].ways == plain[0].ways == ()


def test_the_plan_says_what_is_not_packed(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    config = Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=16)
    Gemma2ForCausalLM(config).save_pretrained(tmp_path / "gemma2")
    (why,) = predicted(tmp_path, tokenizer, model__path=str(tmp_path / "gemma2"), model__compile="none").ways
    assert why == "sequences are padded, because gemma2 has layers of another kind (sliding_attention)"


def test_examples_are_packed_as_they_are(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Tokens of all examples are in one row: 30 and 2 take as much as 16 and 16, and no padding."""
    found = []
    for lengths in ((30, 2), (16, 16)):
        rows = [{"prompt": "", "response": "x" * (length - 1)} for length in lengths]
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        settings = {"model__dtype": "bfloat16", "model__compile": "none", "update__in_backward": True}
        run: Any = run_of("sft", tmp_path, batch_size=2, **settings)
        largest = largest_sequences(run, run.examples(tokenizer), row_shape(tiny_model().config))
        found.append(example_memory(run, largest, tokenizer, False, Place()))
    one, two = (memory.added("learning") for memory in found)
    assert one == pytest.approx(two, rel=0.01)
    assert found[0].ways == ()

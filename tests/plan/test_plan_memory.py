"""The predicted memory: its parts by arithmetic, and the whole beside what a run has."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cavesson.check.allocation import Allocations, Heap, has_glibc
from cavesson.check.memory import Memory, example_memory, rollout_memory
from check_helpers import run_of
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import BloomConfig, BloomForCausalLM, PreTrainedTokenizerBase

from cavesson.data.prompts import load_prompts
from cavesson.models.tiny import tiny_model
from cavesson.plan.largest import LargestRollouts, largest_rollouts, largest_sequences

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import memory as benchmark

WEIGHTS = sum(p.numel() for p in tiny_model().parameters())
MANY = LargestRollouts(8, 8, 4, 4, shared=False, prompt=16, response=8, passes=1, single_pass=False)


def predicted(
    folder: Path, tokenizer: PreTrainedTokenizerBase, largest: LargestRollouts = MANY, **changes: Any
) -> Memory:
    return rollout_memory(run_of("ppo", folder, **changes), largest, tokenizer, 0, "cpu")


def test_allocations_count_what_is_alive() -> None:
    with FakeTensorMode(), Allocations() as seen:
        a = torch.empty(1000)
        b = a + 1  # 4,000 bytes more
        assert (seen.live, seen.peak) == (8000, 8000)
        assert a[:10].view(2, 5).shape == (2, 5)  # a view is no memory
        del a
        assert (seen.live, seen.peak) == (4000, 8000)
        b += 1  # in place
        c = b.double()
        assert (seen.live, seen.peak) == (12000, 12000)
        del b, c
    assert (seen.live, seen.peak) == (0, 12000)


def test_allocations_hold_what_backward_needs() -> None:
    """exp keeps its result, and nothing else; its gradient and that of the sum come and go."""
    with FakeTensorMode():
        x = torch.empty(1000, requires_grad=True)
        with Allocations() as seen:
            y = x.exp().sum()
            assert seen.live == 4000 + 4
            y.backward()
            del y
            assert seen.live == 4000  # x.grad


@pytest.mark.skipif(not has_glibc(), reason="needs glibc")
def test_a_heap_is_at_least_what_is_alive_and_takes_no_memory() -> None:
    before = benchmark.status("VmRSS")
    heap = Heap()
    pieces = [heap.take(20 * 2**20) for _ in range(50)]
    large = heap.take(64 * 2**20)
    assert 1064 * 2**20 <= heap.peak <= 1065 * 2**20
    for piece in (*pieces, large):
        heap.give(piece)
    heap.close()
    assert benchmark.status("VmRSS") - before < 16 * 2**20


@pytest.mark.slow
def test_weights_optimiser_and_reference_are_arithmetic(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    full = predicted(tmp_path, tokenizer).stays
    assert (full["weights"], full["reference"], full["optimiser"]) == (4 * WEIGHTS, 4 * WEIGHTS, 8 * WEIGHTS)
    half = predicted(tmp_path, tokenizer, model__dtype="bfloat16").stays
    assert (half["weights"], half["reference"], half["optimiser"]) == (2 * WEIGHTS, 2 * WEIGHTS, 12 * WEIGHTS)
    lora = predicted(tmp_path, tokenizer, model__lora={"rank": 2, "targets": ("q_proj",)}).stays
    adapters = 2 * 2 * (96 + 96)  # two layers, rank 2, from 96 to 96
    assert (lora["weights"], lora["optimiser"]) == (4 * (WEIGHTS + adapters), 8 * adapters)
    assert lora.get("reference", 0) == 0
    critic = predicted(tmp_path, tokenizer, value__kind="separate").stays
    assert critic["critic"] == 4 * WEIGHTS  # the embeddings are in the trunk, and the head is tied to them
    assert critic["optimiser"] == 16 * WEIGHTS


@pytest.mark.slow
def test_more_to_hold_is_more_memory(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    once = predicted(tmp_path, tokenizer).phases
    assert predicted(tmp_path, tokenizer, MANY._replace(rows=8, prompts=8)).phases["learning"] > once["learning"]
    assert predicted(tmp_path, tokenizer, MANY._replace(prompt=64)).phases["sampling"] > once["sampling"]
    assert predicted(tmp_path, tokenizer, MANY._replace(prompts=1, shared=True)).phases["learning"] < once["learning"]
    # With gradients of an earlier micro-batch there is more to hold, at most these.
    again = predicted(tmp_path, tokenizer, MANY._replace(passes=2)).phases["learning"]
    assert 0 < again - once["learning"] <= 4 * WEIGHTS
    checkpointed = predicted(tmp_path, tokenizer, model__gradient_checkpointing=True).phases
    assert checkpointed["learning"] < once["learning"]


def test_an_architecture_without_a_preallocated_cache(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    sizes = {"hidden_size": 32, "n_layer": 2, "n_head": 4}
    BloomForCausalLM(BloomConfig(vocab_size=258, **sizes)).save_pretrained(tmp_path / "bloom")
    sampling = predicted(tmp_path, tokenizer, model__path=str(tmp_path / "bloom")).phases["sampling"]
    # At least the keys and values of the 8 sequences: 2 layers × 2 × 32 numbers × 4 bytes a token.
    assert sampling >= 8 * (16 + 8 - 1) * 2 * 2 * 32 * 4


def test_the_largest_rollouts_of_a_run(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    run = run_of("grpo", tmp_path, batch_size=8, samples_per_prompt=4, update__micro_batch_size=4)
    largest = largest_rollouts(run, load_prompts(run.data, tokenizer))
    # "Some third prompt" is the longest of the four; a micro-batch of 4 in order is one prompt.
    assert largest == LargestRollouts(8, 2, 4, 1, shared=True, prompt=17, response=8, passes=2, single_pass=False)
    uneven = run_of("grpo", tmp_path, batch_size=8, samples_per_prompt=4, update__micro_batch_size=6)
    assert largest_rollouts(uneven, load_prompts(run.data, tokenizer)).prompts == 2
    # Rows 3 to 5 belong to both prompts.
    crossing = run_of("grpo", tmp_path, batch_size=8, samples_per_prompt=4, update__micro_batch_size=3)
    assert largest_rollouts(crossing, load_prompts(run.data, tokenizer)).prompts == 2
    shuffled = run_of("grpo", tmp_path, batch_size=8, samples_per_prompt=4, update__mini_batches=2)
    assert largest_rollouts(shuffled, load_prompts(run.data, tokenizer)).prompts == 2
    alone = run_of("grpo", tmp_path, batch_size=8, samples_per_prompt=4)
    assert largest_rollouts(alone, load_prompts(run.data, tokenizer)).single_pass


def test_the_largest_sequences_of_a_run(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    run = run_of("sft", tmp_path, batch_size=4, update__layout="padded")
    largest = largest_sequences(run, run.examples(tokenizer))
    # The longest is "Some third prompt is here." and its end token; each has 9 learned tokens, " is here." and the end.
    assert (largest.rows, largest.width, largest.packed, largest.learned) == (4, 27, False, 40)


def test_a_reward_model_and_packed_examples(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    run = run_of("sft", tmp_path, batch_size=4)
    largest = largest_sequences(run, run.examples(tokenizer))
    language_model = example_memory(run, largest._replace(packed=True), tokenizer, False, "cpu")
    classifier = example_memory(run, largest, tokenizer, True, "cpu")
    assert language_model.stays["weights"] == 4 * WEIGHTS
    assert classifier.stays["weights"] == 4 * (WEIGHTS + 96)  # with a head of one output
    assert 0 < classifier.phases["learning"] < language_model.phases["learning"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    benchmark.make_model(folder, hidden=384, layers=6, vocabulary=4096)
    return folder


@pytest.mark.parametrize("case", ["sft full 256", "ppo full 128"])
def test_the_benchmark_has_no_prompt_twice(case: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """What several rows have in common a run reads once, and then it takes less than its largest batch would."""
    benchmark.settings_of(case, tmp_path, tmp_path)
    rows = [json.loads(line)["prompt"] for line in (tmp_path / "data.jsonl").read_text().splitlines()]
    assert len(set(rows)) == len(rows) >= 16
    assert {len(tokenizer.encode(row)) for row in rows} == {{"sft": 128, "ppo": 64}[case[:3]]}


@pytest.mark.slow
@pytest.mark.skipif(not has_glibc(), reason="needs /proc and glibc")
@pytest.mark.parametrize("case", ["sft full 256", "sft lora 256", "ppo full 128", "grpo lora 256"])
def test_prediction_and_measurement(case: str, model: Path) -> None:
    """Within 15 %, with the libraries and without."""
    predicted, measured = benchmark.compare(case, model)
    assert predicted["own"] == pytest.approx(measured["own"], rel=0.15)
    assert predicted["peak"] == pytest.approx(measured["peak"], rel=0.15)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", ["sft full 256", "sft lora 256", "ppo full 128", "grpo lora 256"])
def test_prediction_and_measurement_on_a_gpu(case: str, model: Path) -> None:
    predicted, measured = benchmark.compare(case, model)
    assert predicted["own"] == pytest.approx(measured["own"], rel=0.15)

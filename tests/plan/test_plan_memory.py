"""The predicted memory: its parts by arithmetic, and the whole beside what a run has."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from check_helpers import run_of
from transformers import BloomConfig, BloomForCausalLM, PreTrainedTokenizerBase

from cavesson.data.prompts import load_prompts
from cavesson.models.parts import row_shape
from cavesson.models.policy import build_learner
from cavesson.models.tiny import tiny_model
from cavesson.plan import prediction
from cavesson.plan.largest import LargestRollouts, largest_rollouts, largest_sequences, scored_rows
from cavesson.plan.memory import example_memory, rollout_memory
from cavesson.plan.prediction import Memory, Place
from cavesson.plan.skeleton import skeleton

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import memory as benchmark

WEIGHTS = sum(p.numel() for p in tiny_model().parameters())
GPU = Place()
SHAPE = row_shape(tiny_model().config)
_KNOWN: dict[str, Memory] = {}
"""Predictions that several tests need; those of a model in a folder of a test are its own."""
MANY = LargestRollouts(8, 8, 4, 4, shared=False, prompt=16, response=8, passes=1, single_pass=False)


def predicted(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    largest: LargestRollouts = MANY,
    place: Place = GPU,
    command: str = "ppo",
    **changes: Any,
) -> Memory:
    """Predict the memory of a run. Layers are compiled only where a test says so, because tracing takes seconds."""
    if "parallel__shard" not in changes:  # sharded layers are never compiled
        changes = {"model__compile": "none"} | changes
    key = repr((command, largest, place, changes))
    if key not in _KNOWN:
        _KNOWN[key] = rollout_memory(run_of(command, folder, **changes), largest, tokenizer, 0, place)
    return _KNOWN[key]


def test_weights_gradients_optimiser_and_reference_are_arithmetic(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    memory = predicted(tmp_path, tokenizer)
    full, head = memory.stays, 96 + 1  # the critic is a linear head on the hidden states
    assert (full["weights"], full["reference"], full["critic"]) == (4 * WEIGHTS, 4 * WEIGHTS, 4 * head)
    parameters = len(list(tiny_model().parameters())) + 2  # each counts its steps in a float32
    assert full["optimiser"] == 8 * (WEIGHTS + head) + 4 * parameters
    assert memory.phases["optimiser step"]["gradients"] == 4 * (WEIGHTS + head)
    half = predicted(tmp_path, tokenizer, model__dtype="bfloat16").stays
    assert (half["weights"], half["reference"]) == (2 * WEIGHTS, 2 * WEIGHTS)
    # With the copy in float32; the critic's head is in float32 anyway.
    assert half["optimiser"] == 12 * WEIGHTS + 8 * head + 4 * parameters


def test_only_adapters_have_gradients_and_averages(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    lora = predicted(tmp_path, tokenizer, model__lora={"rank": 2, "targets": ("q_proj",)})
    adapters, head = 2 * 2 * (96 + 96), 96 + 1  # two layers, rank 2, from 96 to 96
    assert lora.stays["weights"] == 4 * (WEIGHTS + adapters)
    assert lora.stays["optimiser"] == 8 * (adapters + head) + 4 * (4 + 2)  # four matrices, and the head's two
    assert lora.phases["optimiser step"]["gradients"] == 4 * (adapters + head)
    assert lora.stays["reference"] == 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_on_a_gpu_the_head_takes_a_piece_of_logits_and_their_gradient(
    dtype: str, size: int, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    memory = predicted(tmp_path, tokenizer, MANY._replace(response=200), model__dtype=dtype, model__compile="auto")
    head = memory.phases["learning"]["logits and head"]
    logits, weight = 4 * 200 * 258, 96 * 258
    assert (4 + size) * logits <= head <= (4 + size) * logits + 4 * 4 * weight


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_the_plan_has_adapters_in_the_dtype_of_the_run(
    dora: bool, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    settings = run_of("ppo", tmp_path, model__dtype="bfloat16", model__lora={"rank": 2, "dora": dora}).model
    real = build_learner(tiny_model().bfloat16(), settings)
    planned = skeleton(settings, tokenizer)
    dtypes, expected = ({name: p.dtype for name, p in model.named_parameters()} for model in (planned, real))
    assert dtypes == expected


@pytest.mark.slow
def test_a_separate_critic_learns_too(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    critic = predicted(tmp_path, tokenizer, value__kind="separate").stays
    assert critic["critic"] == 4 * (WEIGHTS + 97)  # the embeddings are in the trunk, and the head is tied to them
    assert critic["optimiser"] >= 16 * WEIGHTS


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_sharding_divides_what_stays(processes: int, tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """The first process has the largest slice: 258 tokens are not a multiple of 4."""
    place = GPU._replace(processes=processes)
    whole = predicted(tmp_path, tokenizer, place=place)
    part = predicted(tmp_path, tokenizer, place=place, parallel__shard="full")
    for name in ("weights", "reference"):
        assert part.stays[name] * processes == pytest.approx(whole.stays[name], rel=0.01)
    assert part.stays["optimiser"] * processes == pytest.approx(whole.stays["optimiser"], rel=0.01)
    gradients = [memory.phases["optimiser step"]["gradients"] for memory in (part, whole)]
    assert gradients[0] * processes == pytest.approx(gradients[1], rel=0.01)
    # While responses are sampled, all weights are on every device, as one of many collectives has left them.
    assert part.phases["decoding"]["gathered weights"] >= 4 * WEIGHTS


def test_the_cache_is_arithmetic(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    memory = predicted(tmp_path, tokenizer)
    # 8 sequences of 16 + 8 tokens, 2 layers, keys and values, 2 heads of 24 numbers, 4 bytes.
    assert memory.phases["decoding"]["decoding cache"] == 8 * 24 * 2 * 2 * 2 * 24 * 4


def test_merged_adapters_are_a_copy_of_the_weights_that_they_change(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Of two layers, the queries from 96 to 96 and the MLP's output from 256 to 96; while responses are sampled."""
    lora = {"model__lora": {"rank": 2, "targets": ("q_proj", "down_proj")}}
    copied = 4 * 2 * 96 * (96 + tiny_model().config.intermediate_size)
    merged = predicted(tmp_path, tokenizer, **lora)
    assert {name: phase.get("merged adapters") for name, phase in merged.phases.items()} == {
        "reading prompts": copied, "decoding": copied, "scoring": None, "learning": None, "optimiser step": None,
    }  # fmt: skip
    never = predicted(tmp_path, tokenizer, **lora, sampling__merge_adapters="never")
    assert merged.added("decoding") - never.added("decoding") == copied
    # By itself, the copy takes at most half of what is free beside weights, critic and cache.
    used = sum(merged.stays[name] for name in ("weights", "critic")) + merged.phases["decoding"]["decoding cache"]
    for memory, expected in ((used + 2 * copied, copied), (used + 2 * copied - 2, None)):
        found = predicted(tmp_path, tokenizer, place=GPU._replace(memory=memory), **lora)
        assert found.phases["decoding"].get("merged adapters") == expected
    assert "merged adapters" not in predicted(tmp_path, tokenizer, model__dtype="bfloat16").phases["decoding"]


def test_an_episode_has_room_for_its_last_turn_and_for_what_its_rows_have_read(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    changes = {"environment__tools": [f"{tmp_path}/tools.py:never_loaded"], "environment__max_tokens": 20}
    memory = predicted(tmp_path, tokenizer, **changes)
    # Twice 8 sequences of 16 tokens of the prompt, 20 of the episode and 8 of a turn; the rest as above.
    assert memory.phases["decoding"]["decoding cache"] == 2 * 8 * 44 * 2 * 2 * 2 * 24 * 4


@pytest.mark.slow
def test_twice_the_sequences_have_twice_the_activations(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    few, many = (
        predicted(tmp_path, tokenizer, MANY._replace(rows=rows, prompts=rows, prompt=64, response=64))
        for rows in (32, 64)
    )
    one, two = (memory.added("learning") for memory in (few, many))
    assert two == pytest.approx(2 * one, rel=0.03)


@pytest.mark.slow
def test_more_to_hold_is_more_memory(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    once = predicted(tmp_path, tokenizer)
    assert predicted(tmp_path, tokenizer, MANY._replace(prompt=64)).added("reading prompts") > once.added(
        "reading prompts"
    )
    shared = MANY._replace(prompts=1, shared=True)
    grouped = {"command": "grpo", "samples_per_prompt": 4, "place": GPU}
    assert predicted(tmp_path, tokenizer, shared, **grouped).added("learning") < once.added("learning")
    # With gradients of an earlier micro-batch there is more to hold, at most these.
    again = predicted(tmp_path, tokenizer, MANY._replace(passes=2)).added("learning") - once.added("learning")
    assert 0 < again <= 4 * (WEIGHTS + 97)
    checkpointed = predicted(tmp_path, tokenizer, model__gradient_checkpointing=True)
    assert checkpointed.added("learning") < once.added("learning")


def test_rows_that_wait_need_more_of_the_cache(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    together, waiting = (predicted(tmp_path, tokenizer, MANY._replace(waiting=waits)).phases for waits in (False, True))
    assert "reading waiting prompts" not in together
    caches = [phases["decoding"]["decoding cache"] for phases in (together, waiting)]
    assert caches[1] / caches[0] == pytest.approx((24 + 24 // 8 + 1) / 24)
    # One prompt at a time is read for one of eight rows, with a second copy of its 16 of 28 columns.
    reading = waiting["reading waiting prompts"]
    assert reading["decoding cache"] + reading["activations"] > caches[1] * (1 + 16 / 28 / 8)


@pytest.mark.slow
def test_few_layers_stand_for_many(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deep model is extrapolated from two and four layers; here all of its six are simulated as well."""
    tiny_model(layers=6).save_pretrained(tmp_path / "deep")
    tokenizer.save_pretrained(tmp_path / "deep")
    deep = {"model__path": str(tmp_path / "deep")}
    few = predicted(tmp_path, tokenizer, **deep)
    monkeypatch.setattr(prediction, "FEW_LAYERS", 3)
    every = predicted(tmp_path, tokenizer, place=GPU._replace(per_host=1), **deep)
    assert few.stays == every.stays
    for phase in ("decoding", "scoring", "learning", "optimiser step"):
        assert few.added(phase) == pytest.approx(every.added(phase), rel=0.01)
        flops = [sum(one.flops * times for one, times in memory.work[phase].items()) for memory in (few, every)]
        assert flops[0] == pytest.approx(flops[1])


@pytest.mark.slow
def test_an_architecture_without_a_preallocated_cache(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    sizes = {"hidden_size": 32, "n_layer": 2, "n_head": 4}
    BloomForCausalLM(BloomConfig(vocab_size=258, **sizes)).save_pretrained(tmp_path / "bloom")
    sampling = predicted(tmp_path, tokenizer, model__path=str(tmp_path / "bloom")).phases["decoding"]
    # At least the keys and values of the 8 sequences: 2 layers × 2 × 32 numbers × 4 bytes a token.
    assert sampling["decoding cache"] >= 8 * (16 + 8 - 1) * 2 * 2 * 32 * 4


def test_the_largest_rollouts_of_a_run(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    run = run_of("grpo", tmp_path, batch_size=8, samples_per_prompt=4, update__micro_batch_size=4)
    largest = largest_rollouts(run, load_prompts(run.data, tokenizer))
    # "Some third prompt" is the longest of the four; a micro-batch of 4 in order is one prompt.
    assert largest == LargestRollouts(8, 2, 4, 1, shared=True, prompt=17, response=8, passes=2, single_pass=True)
    uneven = run_of("grpo", tmp_path, batch_size=8, samples_per_prompt=4, update__micro_batch_size=6)
    assert largest_rollouts(uneven, load_prompts(run.data, tokenizer)).prompts == 2
    # Rows 3 to 5 belong to both prompts.
    crossing = run_of("grpo", tmp_path, batch_size=8, samples_per_prompt=4, update__micro_batch_size=3)
    assert largest_rollouts(crossing, load_prompts(run.data, tokenizer)).prompts == 2
    shuffled = run_of("grpo", tmp_path, batch_size=8, samples_per_prompt=4, update__mini_batches=2)
    assert largest_rollouts(shuffled, load_prompts(run.data, tokenizer)).prompts == 2
    alone = run_of("grpo", tmp_path, batch_size=8, samples_per_prompt=4)
    assert largest_rollouts(alone, load_prompts(run.data, tokenizer)).single_pass
    assert not largest_rollouts(alone, load_prompts(run.data, tokenizer)).waiting
    waiting = run_of("grpo", tmp_path, batch_size=8, samples_per_prompt=4, sampling__batch_size=4)
    assert largest_rollouts(waiting, load_prompts(run.data, tokenizer)).waiting
    held_out = replace(load_prompts(run.data, tokenizer), held_out=load_prompts(run.data, tokenizer))
    assert not largest_rollouts(alone, held_out).waiting
    assert largest_rollouts(alone, held_out).sampled_prompts == 4  # eight responses to two prompts, or these
    few = run_of("grpo", tmp_path, batch_size=3, samples_per_prompt=3)
    assert largest_rollouts(few, held_out).waiting  # four held-out prompts, of which three are sampled at once
    # The advantages of RLOO contain the KL, which is known only when all responses are scored.
    split = run_of("rloo", tmp_path, batch_size=8, samples_per_prompt=4, update__micro_batch_size=4)
    assert not largest_rollouts(split, load_prompts(run.data, tokenizer)).single_pass


@pytest.mark.parametrize(
    ("selection", "processes", "rows", "passes"),
    [("top", 1, 2, 1), ("top", 4, 2, 1), ("local", 1, 2, 1), ("local", 2, 1, 1)],
)
def test_raft_learns_from_one_of_k_responses(
    selection: str, processes: int, rows: int, passes: int, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Of eight responses two are kept; the best of all may be those of one process, but not the best per prompt."""
    run = run_of("raft", tmp_path, raft__k=4, samples_per_prompt=4, raft__selection=selection)
    largest = largest_rollouts(run, load_prompts(run.data, tokenizer), processes)
    assert (largest.rows, largest.passes, largest.sampled) == (rows, passes, 8 // processes)
    assert scored_rows(run, largest, processes) == 8 // processes  # all of them are ranked
    width = largest.prompt + largest.response
    few = run.model_copy(update={"update": run.update.model_copy(update={"micro_batch_tokens": 3 * width + 1})})
    assert scored_rows(few, largest, processes) == min(3, 8 // processes)
    split = run_of("raft", tmp_path, raft__k=2, update__mini_batches=2, update__micro_batch_size=1)
    assert largest_rollouts(split, load_prompts(run.data, tokenizer)).passes == 2  # 8 / 2 / 2 rows, one after the other


def test_the_largest_sequences_of_a_run(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    run = run_of("sft", tmp_path, batch_size=4, update__layout="padded")
    largest = largest_sequences(run, run.examples(tokenizer), SHAPE)
    # The longest is "Some third prompt is here." and its end token; each has 9 learned tokens, " is here." and the end.
    assert (largest.rows, largest.width, largest.packed, largest.learned) == (4, 27, False, 40)
    packed = largest_sequences(run_of("sft", tmp_path, batch_size=4), run.examples(tokenizer), SHAPE)
    assert (packed.rows, packed.width, packed.longest) == (2, 46, 27)


def test_the_longest_sequence_may_be_in_a_smaller_batch(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Two rows of 21 tokens have more than one of 31 and 2, packed."""
    rows = [{"prompt": "", "response": "x" * size} for size in (20, 20, 30, 1)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = run_of("sft", tmp_path, batch_size=2, data__shuffle=False)
    largest = largest_sequences(run, run.examples(tokenizer), SHAPE)
    assert (largest.longest, largest.rows * largest.width) == (31, 42)


@pytest.mark.slow
def test_every_algorithm_of_examples(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    pairs = [{"prompt": "Say", "chosen": "aa" * n, "rejected": "b" * n} for n in range(1, 9)]
    (tmp_path / "pairs").mkdir()
    (tmp_path / "pairs" / "rows.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    seen = {}
    for command, folder in (("sft", tmp_path), ("dpo", tmp_path / "pairs"), ("reward-model", tmp_path / "pairs")):
        run = run_of(command, folder, batch_size=4)
        largest = largest_sequences(run, run.examples(tokenizer), SHAPE)
        assert largest.packed
        seen[command] = example_memory(run, largest, tokenizer, run.makes_classifier, GPU)
    assert seen["sft"].stays["weights"] == seen["dpo"].stays["weights"] == 4 * WEIGHTS
    assert seen["reward-model"].stays["weights"] == 4 * (WEIGHTS + 96)  # with a head of one output
    assert 0 < seen["reward-model"].added("learning") < seen["dpo"].added("learning")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["raft", "rloo", "grpo"])
def test_every_algorithm_of_rollouts(command: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    run = run_of(command, tmp_path, samples_per_prompt=4)
    largest = largest_rollouts(run, load_prompts(run.data, tokenizer))
    memory = rollout_memory(run, largest, tokenizer, 0, GPU)
    assert memory.stays["weights"] == 4 * WEIGHTS
    assert memory.added("learning") > 4 * WEIGHTS  # gradients, and more


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    benchmark.make_model(folder, hidden=384, layers=6, vocabulary=4096)
    return folder


@pytest.mark.parametrize("case", ["sft full 256", "ppo full 128"])
def test_the_benchmark_has_no_prompt_twice(
    case: str, model: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """What several rows have in common a run reads once, and then it takes less than its largest batch would."""
    settings = benchmark.settings_of(case, model, tmp_path)["settings"]
    assert "sampling" not in settings or settings["sampling"]["eos_token_ids"] == [4096]  # one past the vocabulary
    rows = [json.loads(line)["prompt"] for line in (tmp_path / "data.jsonl").read_text().splitlines()]
    assert len(set(rows)) == len(rows) >= 16
    assert {len(tokenizer.encode(row)) for row in rows} == {{"sft": 128, "ppo": 64}[case[:3]]}


def test_the_benchmark_counts_the_tokens_of_any_tokenizer() -> None:
    """This one joins letters to words, as those of large models do."""

    def words(text: str) -> Any:
        return SimpleNamespace(input_ids=text.split())

    assert benchmark.text_of(words, "17", 4) == "17 a a a"
    with pytest.raises(SystemExit, match="no text of 3 tokens that starts with '1 2 3 4' was found"):
        benchmark.text_of(words, "1 2 3 4", 3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", ["sft full 256", "sft lora 256", "ppo full 128", "grpo lora 256"])
def test_prediction_and_measurement_on_a_gpu(case: str, model: Path) -> None:
    predicted, measured = benchmark.compare(case, model)
    assert predicted == pytest.approx(measured, rel=0.15)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", [name for name in benchmark.CASES if "bfloat16" in name])
def test_prediction_and_measurement_in_every_way_of_learning(case: str, model: Path) -> None:
    predicted, measured = benchmark.compare(case, model)
    assert predicted == pytest.approx(measured, rel=0.10)

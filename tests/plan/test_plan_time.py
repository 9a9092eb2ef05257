"""The operations of a step and their times, by arithmetic."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from check_helpers import run_of
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from transformers import MixtralConfig, PreTrainedTokenizerBase, Qwen3MoeConfig

from cavesson.errors import UserError
from cavesson.models.tiny import tiny_model
from cavesson.ops.linear import tf32
from cavesson.plan.devices import DEVICES, Device, device_of
from cavesson.plan.limits import limits
from cavesson.plan.operations import Operation, Operations, Precision
from cavesson.plan.predict import Predictor, _candidates
from cavesson.plan.prediction import Memory
from cavesson.plan.recipe import Planned
from cavesson.plan.time import Duration, duration
from cavesson.plan.vllm import cache_bytes

# 10 operations per second in 16 bits, 2 in 32, 4 bytes of memory, 1 byte on a host and half of one between hosts.
SLOW = Device("slow", 1e6, 10, 2, 4, 1, 0.5, "", 2, 1.0, 1.0, 1.0, 1.0, per_operation=0)


def operations(work: object) -> Counter[Operation]:
    recorder = Operations(4)
    with FakeTensorMode(), recorder:
        work()  # type: ignore[operator]
    return recorder.seen


def test_a_matrix_product() -> None:
    ((one, times),) = operations(lambda: torch.empty(3, 5) @ torch.empty(5, 7)).items()
    assert times == 1
    assert one == Operation(2 * 3 * 5 * 7, 4 * (15 + 35 + 21), 0, "full")


def test_causal_attention_does_half_of_the_work() -> None:
    def attend(causal: bool) -> int:
        def work() -> None:
            q = torch.empty(1, 2, 64, 16)
            functional.scaled_dot_product_attention(q, q, q, is_causal=causal)

        seen = operations(work)
        return sum(one.flops * times for one, times in seen.items())

    # Two heads; scores and their product with the values: 2 · 64 · 64 · 16 operations each.
    assert attend(False) == 2 * 2 * 2 * 64 * 64 * 16
    assert attend(True) == attend(False) // 2


def test_grouped_queries_do_the_work_of_all_their_heads() -> None:
    def work() -> None:
        q = torch.empty(3, 4, 5, 16, requires_grad=True)
        k, v = (torch.empty(3, 2, 7, 16, requires_grad=True) for _ in range(2))
        attended = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        attended.sum().backward()

    seen = operations(work)
    product = 2 * 3 * 4 * 5 * 7 * 16  # of all queries and keys of three rows and four heads
    # Forward scores and values; backward the scores again, and four gradients.
    assert sum(one.flops * times for one, times in seen.items()) == (2 + 5) * product


def test_what_moves_no_memory_is_no_work() -> None:
    """A view, uninitialised memory, and queries of a tensor."""
    assert not operations(lambda: torch.empty(6).view(2, 3).device)


@pytest.mark.parametrize(
    ("work", "moved"),
    [
        (lambda x, i: x.zero_(), 400),  # writes only
        (lambda x, i: x.copy_(torch.empty(100)), 800),
        (lambda x, i: x[i], 2 * 12 + 24),  # the three numbers, read and written, and their places
        (lambda x, i: x.index_put_((i,), torch.empty(3)), 24 + 12 + 2 * 12),
        (lambda x, i: x + torch.empty(1).expand(100), 400 + 4 + 400),
    ],
)
def test_what_is_read_and_written(work: Callable[[torch.Tensor, torch.Tensor], object], moved: int) -> None:
    seen = operations(lambda: work(torch.empty(100), torch.empty(3, dtype=torch.long)))
    assert sum(one.moved * times for one, times in seen.items()) == moved


def test_products_under_tf32_have_their_own_rate() -> None:
    def product() -> None:
        with tf32(True):
            torch.empty(3, 5) @ torch.empty(5, 7)

    ((one, _),) = operations(product).items()
    assert one.precision == "tf32"
    h100 = DEVICES["h100"]
    assert h100.product_rate("tf32") == h100.product_rate("half") / 2


def test_an_operation_waits_for_arithmetic_or_for_memory() -> None:
    assert duration({Operation(20, 4, 0, "full"): 3}, SLOW, 1) == Duration(computing=30)
    assert duration({Operation(20, 4, 0, "half"): 1}, SLOW, 1) == Duration(computing=2)
    assert duration({Operation(2, 40, 0, "full"): 1}, SLOW, 1) == Duration(moving=10)
    assert duration({Operation(0, 0, 6, "full"): 1}, SLOW, 2).sending == 6
    assert duration({Operation(0, 0, 6, "full"): 1}, SLOW, 4).sending == 12  # between hosts of two


AMOUNTS = st.integers(0, 99)


@given(st.lists(st.tuples(AMOUNTS, AMOUNTS, AMOUNTS, st.sampled_from(["full", "half"])), max_size=5))
def test_operations_start_and_data_is_sent_while_others_compute(numbers: list[tuple[int, int, int, Precision]]) -> None:
    work = Counter(Operation(*one) for one in numbers)
    at_once = duration(work, replace(SLOW, per_operation=0.25), 4)
    busy = sum(max(one.flops / (10 if one.precision == "half" else 2), one.moved / 4) * n for one, n in work.items())
    sent = sum(2 * one.sent * n for one, n in work.items())  # half of a byte per second between hosts
    assert at_once.total == pytest.approx(max(busy, 0.25 * len(numbers), sent))


def predictor(command: str, folder: Path, processes: int, **changes: object) -> tuple[Predictor, object]:
    settings = run_of(command, folder, **changes)
    planned = Planned("run", command, settings, getattr(settings, "rewards", ()), False)
    return Predictor(planned, device_of("h100", processes), processes), settings


@pytest.mark.slow
def test_sharded_weights_are_sent_three_times(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Gathered for the forward and the backward pass, and their gradients reduced: each 3/4 of them with 4 processes.

    The last layer and what is outside of the layers stay gathered between the two passes or not, as FSDP decides.
    """
    found, settings = predictor("sft", tmp_path, 4, batch_size=4, parallel__shard="full")
    work = found.predict(settings).memory.work["learning"]  # type: ignore[arg-type]
    sent = sum(one.sent * times for one, times in work.items())
    weights = 4 * sum(p.numel() for p in tiny_model().parameters())
    assert 2 * weights * 3 / 4 <= sent <= 3.01 * weights * 3 / 4


def test_gradients_of_whole_weights_are_summed_in_a_ring(tmp_path: Path) -> None:
    found, settings = predictor("sft", tmp_path, 4, batch_size=4, model__compile="none")
    times = found.predict(settings).times  # type: ignore[arg-type]
    weights = 4 * sum(p.numel() for p in tiny_model().parameters())
    h100 = DEVICES["h100"]
    assert times["gradient sum"].total == pytest.approx(2 * 3 / 4 * weights / (h100.link * h100.link_share))


@pytest.mark.slow
def test_more_passes_take_longer(tmp_path: Path) -> None:
    found, settings = predictor("ppo", tmp_path, 2, update__epochs=1)
    _, again = predictor("ppo", tmp_path, 2, update__epochs=3)
    once, thrice = (found.predict(one).times for one in (settings, again))  # type: ignore[arg-type]
    # With one epoch, the forward pass of scoring is that of the update, with the reference inside.
    assert "scoring" not in found.predict(settings).memory.work  # type: ignore[arg-type]
    assert thrice["update"].total > 2 * once["update"].total


@pytest.mark.slow
def test_variants_are_other_predictions(tmp_path: Path) -> None:
    found, settings = predictor("grpo", tmp_path, 2, samples_per_prompt=2)
    variants = dict(found.variants(settings))  # type: ignore[arg-type]
    assert set(variants) == {
        'parallel.shard = "full"', "model.gradient_checkpointing = true", "update.micro_batch_size = 2",
        'model.dtype = "bfloat16"', "model.lora.rank = 16", 'sampling.engine = "vllm"',
    }  # fmt: skip
    now = found.predict(settings)  # type: ignore[arg-type]
    assert variants['parallel.shard = "full"'].memory.peak < now.memory.peak
    assert "weight sync" in variants['sampling.engine = "vllm"'].times


@pytest.mark.slow
def test_raft_takes_the_time_of_the_rows_that_it_keeps(tmp_path: Path) -> None:
    found, one = predictor("raft", tmp_path, 1, raft__k=2, update__micro_batch_size=1, update__epochs=3)
    memory = found.predict(one).memory  # type: ignore[arg-type]
    times = found.predict(one).times  # type: ignore[arg-type]
    h100 = DEVICES["h100"]
    once, step = (duration(memory.work[name], h100, 1) for name in ("learning", "optimiser step"))
    assert times["update"].total == pytest.approx((once * (3 * 8 / 2) + step * 3).total)
    assert times["scoring"].total == pytest.approx((duration(memory.work["scoring"], h100, 1) * 8).total)


@pytest.mark.parametrize(
    ("command", "changes", "proposed"),
    [
        ("ppo", {"update__mini_batches": 4}, {1}),  # of 2 rows in a mini-batch; 4 would change nothing
        ("ppo", {"update__mini_batches": 4, "update__micro_batch_size": 8}, {1}),
        ("ppo", {"update__micro_batch_size": 2}, {1, 4}),
        ("raft", {"raft__k": 4}, {1}),
        ("sft", {}, {4}),
    ],
)
def test_other_micro_batch_sizes_are_those_that_change_something(
    command: str, changes: dict[str, object], proposed: set[int], tmp_path: Path
) -> None:
    candidates = _candidates(run_of(command, tmp_path, **changes), 1)
    assert {value for name, value in candidates if name == "update.micro_batch_size"} == proposed


@pytest.mark.parametrize("command", ["grpo", "rloo"])
def test_resampling_is_said_not_to_be_predicted(command: str, tmp_path: Path) -> None:
    memory = Memory({}, {}, 0, 0, 0, {})
    once, often = (
        list(limits(run_of(command, tmp_path, samples_per_prompt=2, **{f"{command}__resample": n}), memory))
        for n in (0, 2)
    )
    assert once == []
    assert often == [
        f"{command}.resample: a step samples and scores up to 3 batches, in up to 3 times the predicted time; "
        "one is predicted"
    ]


def test_the_reference_of_dpo_is_said_not_to_be_predicted(tmp_path: Path) -> None:
    memory = Memory({}, {}, 0, 0, 0, {})
    assert list(limits(run_of("dpo", tmp_path), memory)) == []
    (line,) = limits(run_of("dpo", tmp_path, reference__path="other"), memory)
    assert line.startswith("reference.path: before the first step, the reference scores all examples")
    (line,) = limits(run_of("kto", tmp_path), memory)
    assert line.startswith("kto: every step also scores")
    assert list(limits(run_of("kto", tmp_path, kto__loss_type="apo_zero_unpaired"), memory)) == []


def test_experts_are_said_to_be_counted_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory({}, {}, 0, 0, 0, {})
    run = run_of("ppo", tmp_path, sampling__engine="vllm", sampling__servers=["http://host:8000"])
    for config, number in ((tiny_model().config, 1), (MixtralConfig(), 2), (Qwen3MoeConfig(), 2)):
        monkeypatch.setattr("cavesson.plan.limits.config_of", lambda settings, config=config: config)
        lines = list(limits(run, memory))
        assert len(lines) == number and lines[0].startswith("the model is a mixture of experts") == (number == 2)


def test_the_cache_of_a_token() -> None:
    assert cache_bytes(tiny_model().config, 2) == 2 * 2 * 2 * 24 * 2  # layers, keys and values, heads, width, bytes


@pytest.mark.parametrize(
    ("changes", "processes", "message"),
    [
        ({"batch_size": 4}, 8, "batch_size 4 is less than the 8 devices"),
        ({"parallel__shard": "full"}, 1, "has no effect with one device"),
        ({"parallel__shard": "hybrid"}, 2, "all 2 devices are on one"),
    ],
)
def test_what_could_not_begin(changes: dict[str, object], processes: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        predictor("ppo", tmp_path, processes, **changes)


def test_devices() -> None:
    with pytest.raises(UserError, match="--gpu h300: unknown device; choose one of h100, h200, "):
        device_of("h300", 1)
    with pytest.raises(UserError, match="--gpus 12 does not fill hosts of 8 GPUs"):
        device_of("h200", 12)
    with pytest.raises(UserError, match=r"--gpu cpu: only GPUs are planned; on a CPU, cavesson check .* --short-run"):
        device_of("cpu", 1)
    assert device_of("h200", 64).link_rate(64) == pytest.approx(0.7 * 50e9)
    assert device_of("h200", 8).link_rate(8) == pytest.approx(0.7 * 450e9)

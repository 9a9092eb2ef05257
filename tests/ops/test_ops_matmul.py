"""Which matrix product is used: decided once for a shape, by the first process of a machine, and never again."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from cavesson.ops.head import Head
from cavesson.ops.linear import input_gradient, linear, weight_gradient
from cavesson.ops.logprobs import token_logprobs
from cavesson.ops.matmul import HAS_ONEDNN, PRODUCTS, Choices, Layout, agree, fastest, machine_folder, using
from cavesson.plan.operations import Operations

T = TypeVar("T")
pytestmark = pytest.mark.skipif(not HAS_ONEDNN, reason="there is only one float32 product")
FLOAT32, BFLOAT16 = PRODUCTS[torch.float32], PRODUCTS[torch.bfloat16]
OTHER = {"onednn": "pytorch", "pytorch": "onednn"}
# Both products take about as long for many of these, so that two timings would often decide differently.
SHAPES = [(rows, 192, out) for rows in (8, 16, 32, 64) for out in (192, 320, 448, 512)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of a machine that has timed nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def always(choice: str, work: Callable[[], T]) -> tuple[T, set[str]]:
    """The result of some work with one of the products, and the layouts that it needs."""
    seen = Choices()
    with using(seen):
        work()
    chosen = Choices(dict.fromkeys(seen.known, choice))
    with using(chosen):
        result = work()
    assert chosen.known == dict.fromkeys(seen.known, choice)  # nothing else came up
    return result, {name.removeprefix("bfloat16-").split("-")[0] for name in seen.known}


def passes(
    function: Callable[[Tensor, Tensor], Tensor], *shape: int, cast: Callable[[Tensor], Tensor] = Tensor.float
) -> list[Tensor]:
    """The product of random factors and its gradients."""
    generator = torch.Generator().manual_seed(0)
    x, weight, outer = (
        cast(torch.randn(*size, generator=generator)) for size in (shape, (320, shape[-1]), (*shape[:-1], 320))
    )
    x.requires_grad_()
    weight.requires_grad_()
    result = function(x, weight)
    (result * outer).sum().backward()
    assert x.grad is not None and weight.grad is not None
    return [result.detach(), x.grad, weight.grad]


@pytest.mark.parametrize("choice", FLOAT32)
@pytest.mark.parametrize("shape", [(64, 256), (3, 20, 256), (2, 3, 7, 256)])
def test_each_product_gives_the_result_and_the_gradients_of_torch(choice: str, shape: tuple[int, ...]) -> None:
    ours, layouts = always(choice, lambda: passes(linear, *shape))
    assert layouts == {"forward", "input", "weight"}
    # A sum of n products of numbers around 1 is off by about √n·2⁻²⁴ in float32, and n is at most 320.
    torch.testing.assert_close(ours, passes(functional.linear, *shape), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("choice", BFLOAT16)
@pytest.mark.parametrize("shape", [(64, 256), (3, 20, 256)])
def test_each_product_in_bfloat16_is_the_exact_one_rounded_once(choice: str, shape: tuple[int, ...]) -> None:
    ours, layouts = always(choice, lambda: passes(linear, *shape, cast=Tensor.bfloat16))
    assert layouts == {"forward", "input", "weight"}
    exact = passes(functional.linear, *shape, cast=lambda x: x.bfloat16().double())
    for seen, expected in zip(ours, exact, strict=True):
        assert seen.dtype == torch.bfloat16
        # Half the distance of numbers with 8 significant bits, and what sums in float32 lose.
        torch.testing.assert_close(seen.double(), expected, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("dtype", PRODUCTS)
def test_the_choice_is_the_product_that_is_used(dtype: torch.dtype) -> None:
    x, weight, gradient = (torch.randn(*size).to(dtype) for size in ((64, 256), (320, 256), (64, 320)))
    for choice, product in PRODUCTS[dtype].items():
        expected = [product(x, weight), product(gradient, weight.t()), product(gradient.t(), x.t())]
        used, _ = always(
            choice, lambda: [linear(x, weight), input_gradient(gradient, weight), weight_gradient(gradient, x)]
        )
        assert all(map(torch.equal, used, expected))


@pytest.mark.parametrize("choice", FLOAT32)
def test_log_probabilities_and_their_gradients_are_the_same_with_each(choice: str) -> None:
    hidden, weight, targets = torch.randn(40, 64), torch.randn(500, 64), torch.randint(500, (40,))

    def work(ours: bool) -> list[Tensor]:
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if ours:
            logprob = token_logprobs(x, Head(w), targets, 1.0)[0]
        else:
            logprob = functional.linear(x, w).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
        logprob.sum().backward()
        assert x.grad is not None and w.grad is not None
        return [logprob.detach(), x.grad, w.grad]

    ours, layouts = always(choice, lambda: work(True))
    assert layouts == {"forward", "input", "weight"}
    torch.testing.assert_close(ours, work(False), rtol=1e-4, atol=1e-4)


def choose(choices: Choices, shapes: list[tuple[int, int, int]] = SHAPES, layout: Layout = "forward") -> list[str]:
    """The names of the products for some shapes."""
    names = {id(product): name for name, product in FLOAT32.items()}
    factors = ((torch.randn(rows, width), torch.randn(out, width)) for rows, width, out in shapes)
    return [names[id(choices.product(layout, x, weight))] for x, weight in factors]


def test_what_the_machine_has_chosen_is_not_timed_again() -> None:
    first = Choices()
    before = choose(first)
    assert len(list(machine_folder().iterdir())) == len(SHAPES)
    now = [(*FLOAT32,)[number % 2] for number in range(len(SHAPES))]
    for name, choice in zip(first.known, now, strict=True):
        (machine_folder() / name).write_text(choice)
    assert choose(first) == before
    with FakeTensorMode():  # without numbers, nothing can be timed
        assert choose(Choices()) == now


def test_what_is_given_is_used_whatever_the_machine_has_chosen() -> None:
    first = Choices()
    before = choose(first)
    given = Choices({name: OTHER[choice] for name, choice in first.known.items()})
    assert choose(given) == [OTHER[choice] for choice in before]
    assert choose(Choices()) == before


def test_unknown_products_are_ignored() -> None:
    first = Choices()
    choose(first, SHAPES[:1])
    (name,) = first.known
    (machine_folder() / name).write_text("cutlass")
    given = Choices({name: "cutlass"})
    assert choose(given, SHAPES[:1])[0] in FLOAT32 and given.known[name] in FLOAT32


def test_dtypes_do_not_share_a_choice() -> None:
    x, weight = torch.randn(64, 256), torch.randn(320, 256)
    for order in ((Tensor.float, Tensor.bfloat16), (Tensor.bfloat16, Tensor.float)):
        choices = Choices()
        for cast in order:
            choices.product("forward", cast(x), cast(weight))
        shapes = {name.removeprefix("bfloat16-") for name in choices.known}
        assert len(choices.known) == 2 and len(shapes) == 1
        assert choices.known[shapes.pop()] in FLOAT32


@pytest.mark.parametrize(("longer", "rounds"), [(10, 1), (1.5, 3)])
def test_a_product_that_takes_much_longer_is_timed_once(
    longer: float, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def lasting(name: str, seconds: float) -> Callable[[Tensor, Tensor], None]:
        return lambda x, weight: calls.append(name) or time.sleep(seconds)  # type: ignore[func-returns-value]

    monkeypatch.setitem(
        PRODUCTS, torch.float32, {"quick": lasting("quick", 0.1), "slow": lasting("slow", 0.1 * longer)}
    )
    assert fastest(torch.randn(1), torch.randn(1)) == "quick"
    assert calls == ["quick", "slow"] * rounds


NAMES = [f"forward-{number}-576-576-2" for number in range(500)]


def _agree_together(choice: str, start: Barrier) -> list[str]:
    start.wait()
    return [agree(name, choice, torch.float32) for name in NAMES]


@pytest.mark.slow
def test_processes_that_choose_differently_at_the_same_moment_use_the_choice_of_the_first() -> None:
    context, choices = get_context("spawn"), [*FLOAT32, *FLOAT32]
    with context.Manager() as manager, context.Pool(len(choices)) as pool:
        start = manager.Barrier(len(choices))
        used = pool.starmap(_agree_together, [(choice, start) for choice in choices], chunksize=1)
    assert all(one == used[0] for one in used)
    assert used[0] == [(machine_folder() / name).read_text() for name in NAMES]
    assert {file.name for file in machine_folder().iterdir()} == set(NAMES)  # nothing temporary is left


@pytest.mark.parametrize("place", ["read-only", "below a file"])
def test_a_cache_that_cannot_be_written(
    place: str, read_only: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(read_only if place == "read-only" else tmp_path / "file"))
    choices, kept = Choices(), []
    choices.keep(lambda known: kept.append(len(known)))
    with ThreadPoolExecutor(3) as threads:
        chosen = list(threads.map(choose, [choices] * 3))
    assert chosen[0] == chosen[1] == chosen[2] == list(choices.known.values()) == choose(choices)
    assert kept == list(range(1, len(SHAPES) + 1))  # no thread has timed what another one was timing
    reason = "Read-only file system" if place == "read-only" else "Not a directory"
    assert choices.unshared is not None and reason in choices.unshared


def test_fake_tensors_are_never_timed() -> None:
    choices = Choices()
    with using(choices), FakeTensorMode():
        x, weight = torch.randn(64, 256, requires_grad=True), torch.randn(320, 256, requires_grad=True)
        result = linear(x, weight)
        result.sum().backward()
    assert result.shape == (64, 320) and weight.grad is not None and weight.grad.shape == (320, 256)
    assert not choices.known and not machine_folder().exists()
    choose(choices, [(64, 256, 320)])
    assert len(choices.known) == 1  # real ones are timed afterwards


def test_timing_is_not_counted_as_work() -> None:
    x, weight, operations = torch.randn(64, 256), torch.randn(320, 256), Operations(1)
    with using(Choices()), operations:
        linear(x, weight)
    assert sum(one.flops * count for one, count in operations.seen.items()) == 2 * 64 * 256 * 320


def test_small_products_are_not_timed() -> None:
    choices = Choices()
    assert choose(choices, [(1, 16, 16), (8, 64, 64)]) == ["pytorch", "pytorch"]
    assert not choices.known and not machine_folder().exists()


def test_numbers_of_tokens_share_a_choice_up_to_the_next_power_of_two() -> None:
    layouts: tuple[Layout, ...] = ("forward", "input")
    for layout in layouts:
        choices = Choices()
        choose(choices, [(33, 128, 256), (64, 128, 256), (65, 128, 256)], layout)
        assert len(choices.known) == 2
        choose(choices, [(33, 127, 256), (33, 128, 255)], layout)
        assert len(choices.known) == 4
    choices = Choices()
    choose(choices, [(256, 33, 128), (256, 64, 128), (256, 65, 128)], "weight")
    assert len(choices.known) == 2
    choose(choices, [(256, 33, 129), (255, 33, 128)], "weight")
    assert len(choices.known) == 4


def test_all_choices_are_kept_from_the_first_to_the_latest() -> None:
    choices, kept = Choices(), []
    choose(choices, SHAPES[:2])
    choices.keep(lambda known: kept.append(dict(known)))
    choose(choices, SHAPES[:4])
    assert [len(known) for known in kept] == [2, 3, 4] and kept[-1] == choices.known

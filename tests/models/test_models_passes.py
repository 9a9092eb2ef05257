"""Packed and compiled passes: the numbers and gradients of the plain ones, or the plain ones with a reason."""

import copy
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models_helpers import batch, gradients, scramble
from small_models import small_model
from test_models_architectures import documented
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.exc import InductorError

from cavesson.algorithms.settings import OptimizerSettings
from cavesson.errors import UserError
from cavesson.models.compiled import cache_folder, compiler
from cavesson.models.layers import Recomputation, as_in_run, forwards, recompute_layers
from cavesson.models.packed import one_by_one, pack_rows
from cavesson.models.passes import Ways, use
from cavesson.models.policy import Policy, with_adapters
from cavesson.models.settings import LoraSettings, ModelSettings
from cavesson.ops import piece_logprobs
from cavesson.train.in_backward import InBackward
from cavesson.train.optimizer import Optimizer

PACKED = Ways(packed=True, compile=None)
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="needs a C++ compiler: apt-get install g++, then this test again"
)


def policies(architecture: str, ways: Ways) -> tuple[Policy, Policy, list[str]]:
    """A policy with plain passes, one with the same weights that may use these ways, and what it says of them."""
    plain = Policy(small_model(architecture), value="trunk", reference=small_model(architecture))
    scramble(plain)
    other = copy.deepcopy(plain)
    other._reference = copy.deepcopy(plain._reference)
    return plain, other, list(use(other, ways))


def same(plain: Policy, other: Policy) -> None:
    """Check scores, reference and gradients, of rows padded on both sides, one of them with an empty response."""
    learned = [policy(batch()) for policy in (plain, other)]
    for one, two in zip(*learned, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-4, atol=2e-5)
    with torch.no_grad():
        assert torch.equal(other(batch()).logprob, learned[1].logprob)  # so that the first ratio is 1
    for name in ("reference_logprob", "reference_kl"):
        one, two = (getattr(policy, name)(batch()) for policy in (plain, other))
        torch.testing.assert_close(two, one, rtol=1e-4, atol=2e-5)
    for scores in learned:
        (scores.logprob.sum() + scores.entropy.square().sum() + scores.value.square().sum()).backward()
    found, expected = gradients(other), gradients(plain)
    largest = max(float(x.abs().max()) for x in expected.values())
    assert largest > 0.01
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5 * largest)


@pytest.mark.parametrize("architecture", ["qwen2", "gpt2", "qwen3_moe"])
def test_packed_rows_are_scored_and_learned_like_padded_ones(architecture: str) -> None:
    plain, packed, said = policies(architecture, PACKED)
    assert (packed.packed, said) == (True, [])
    same(plain, packed)


@pytest.mark.parametrize("which", [True, "half"])
@pytest.mark.parametrize("architecture", ["qwen2", "gpt2"])
def test_layers_of_packed_rows_are_recomputed_with_the_attention_they_had(
    architecture: str, which: Recomputation
) -> None:
    plain = Policy(small_model(architecture), value="trunk", reference=small_model(architecture))
    scramble(plain)
    packed = copy.deepcopy(plain)
    packed._reference = copy.deepcopy(plain._reference)
    recompute_layers(packed.model, which)
    assert list(use(packed, PACKED)) == [] and packed.packed
    same(plain, packed)


@pytest.mark.parametrize(
    ("architecture", "why"),
    [
        ("mistral", "attention with sliding_window"),
        ("gpt_oss", "layers of another kind"),
        ("bloom", "computes other numbers"),
        ("llama4_text", "layers of another kind"),
        ("qwen3_next", "layers of another kind"),
    ],
)
def test_what_packed_rows_would_change_stays_padded(architecture: str, why: str) -> None:
    plain, other, said = policies(architecture, PACKED)
    assert not other.packed and len(said) == 1 and why in said[0] and "\n" not in said[0]
    same(plain, other)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("architecture", [name for name, kind in documented() if kind != "refused"])
def test_every_architecture_is_packed_exactly_or_not_at_all(architecture: str) -> None:
    model = small_model(architecture)
    plain, other = Policy(model), Policy(copy.deepcopy(model))
    list(use(other, PACKED))
    seen, expected = ((policy(batch()), gradient_of(policy)) for policy in (other, plain))
    torch.testing.assert_close(seen, expected, rtol=1e-3, atol=5e-4, equal_nan=True)  # small ones of Gemma 3n overflow


def gradient_of(policy: Policy) -> list[Tensor]:
    policy(batch()).logprob.sum().backward()
    found = [p.grad for p in policy.model.parameters() if p.grad is not None]
    largest = max(float(x.abs().max()) for x in found)
    return [x / largest for x in found]


def test_the_slow_attention_has_the_gradient_of_its_definition() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(9, heads, 4, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    bounds = torch.tensor([0, 4, 5, 9], dtype=torch.int32)
    assert torch.autograd.gradcheck(lambda q, k, v: one_by_one(q, k, v, bounds, 0.3), (q, k, v))


def test_rows_are_packed_in_their_order() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 0, 0, 0], [0, 1, 1, 1, 0]])
    ids = torch.arange(15).view(3, 5)
    packed = pack_rows(ids, mask)
    assert packed.ids.tolist() == [[2, 3, 4, 5, 6, 11, 12, 13]]
    assert packed.positions.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert (packed.bounds.tolist(), packed.longest) == ([0, 3, 5, 8], 3)


def counted(compile: Callable[..., Any]) -> tuple[list[int], Ways]:
    """Ways that count the graphs that are made: their numbers of operations."""
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    return graphs, Ways(packed=True, compile=compile(backend))


def traced(backend: Any) -> Any:
    """A compiler that needs no C++ one: the graphs that PyTorch has found are computed as they are."""
    return compiler(backend)


def test_all_layers_and_lengths_share_one_graph() -> None:
    graphs, ways = counted(traced)
    plain, compiled, said = policies("qwen2", ways)
    assert (said, len(graphs)) == ([], 3)  # two are of the head's functions
    same(plain, compiled)
    # The head's functions have one each, too, but for the checks of shapes that only tests put into them.
    assert graphs.count(graphs[0]) == 1 and len(set(graphs)) == 3


def test_only_passes_of_the_run_are_compiled() -> None:
    """Sampling calls the same layers."""
    _, compiled, _ = policies("qwen2", Ways(packed=False, compile=traced("eager")))
    calls: list[bool] = []
    for forward in forwards(compiled.model):
        inner = forward.compiled
        forward.compiled = lambda *args, inner=inner, **kwargs: (calls.append(True), inner(*args, **kwargs))[1]
    ids = torch.tensor([[3, 4, 5]])
    compiled.model(input_ids=ids)
    assert calls == []
    with as_in_run():
        compiled.model(input_ids=ids, use_cache=False)
    assert len(calls) == 2


def test_adapters_are_compiled_with_their_layers_and_without() -> None:
    settings = ModelSettings(lora=LoraSettings(rank=2))
    plain = Policy(with_adapters(small_model("qwen2"), settings), reference="adapters-off")
    scramble(plain)
    compiled = copy.deepcopy(plain)
    assert list(use(compiled, Ways(packed=True, compile=traced("eager")))) == []
    for name in ("__call__", "reference_logprob"):
        one, two = (getattr(policy, name)(batch()) for policy in (plain, compiled))
        torch.testing.assert_close(two, one, rtol=1e-4, atol=2e-5)
    for policy in (plain, compiled):
        policy(batch()).logprob.sum().backward()
    torch.testing.assert_close(gradients(compiled), gradients(plain), rtol=1e-3, atol=1e-4)


def test_a_model_that_cannot_be_compiled_is_computed_plainly(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(_graph: Any, _inputs: Any) -> Any:
        raise RuntimeError("no kernel for this")

    plain, other, said = policies("qwen2", Ways(packed=False, compile=compiler(broken)))  # type: ignore[arg-type]
    assert len(said) == 1 and said[0].startswith("the layers are not compiled, because ") and "\n" not in said[0]
    assert all(forward.compiled is None for forward in forwards(other.model))
    same(plain, other)


def is_single(inputs: Any) -> bool:
    """Whether these are the inputs of code for batches of one row."""
    return any(isinstance(x, Tensor) and x.ndim == 3 and x.shape[0] == 1 for x in inputs)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("which", [lambda _: True, is_single], ids=["any batch", "a single row"])
@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
def test_a_backward_pass_that_cannot_be_compiled_is_found_before_the_first_step(
    recomputes: bool, which: Callable[[Any], bool]
) -> None:
    """Its code is made when the first backward pass begins, where no plain layer could take over."""

    def backward(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        if which(inputs):
            raise RuntimeError("no kernel for this")
        return graph.forward

    plain, other = (Policy(small_model("qwen2"), value="trunk", reference=small_model("qwen2")) for _ in range(2))
    scramble(plain)
    other.load_state_dict(plain.state_dict())
    other.frozen_reference.load_state_dict(plain.frozen_reference.state_dict())
    recompute_layers(other.model, recomputes)
    backend = aot_autograd(fw_compiler=lambda graph, _: graph.forward, bw_compiler=backward)
    said = list(use(other, Ways(packed=False, compile=traced(backend))))
    (line,) = [line for line in said if line.startswith("the layers are not compiled, because ")]
    assert "no kernel for this" in line and "\n" not in line
    assert all(forward.compiled is None for forward in forwards(other.model))
    same(plain, other)


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (lambda *_: [0.0][1], "it raises IndexError (list index out of range)"),
        (
            lambda *given: tuple(2 * one for one in piece_logprobs.PLAIN.scores(*given)),
            "it computes other numbers then",
        ),
    ],
)
def test_a_head_that_cannot_be_compiled_is_computed_plainly(head: Callable[..., Any], why: str) -> None:
    compiles = traced("eager")

    def compile(function: Callable[..., Any]) -> Callable[..., Any]:
        return head if function is piece_logprobs.PLAIN.scores else compiles(function)

    plain, other, said = policies("qwen2", Ways(packed=True, compile=compile))
    assert said == [f"the output head is not compiled, because {why}"]
    same(plain, other)


@pytest.mark.parametrize("part", ["scores", "gradient"])
def test_a_head_that_cannot_be_compiled_later_goes_on_plainly(capsys: pytest.CaptureFixture[str], part: str) -> None:
    compiles, fails = traced("eager"), list[bool]()

    def compile(function: Callable[..., Any]) -> Callable[..., Any]:
        code = compiles(function)

        def failing(*given: Any) -> Any:
            if fails:
                raise InductorError(RuntimeError("no kernel for this"), None)
            return code(*given)

        return failing if function is getattr(piece_logprobs.PLAIN, part) else code

    plain, other, said = policies("qwen2", Ways(packed=True, compile=compile))
    assert said == []
    fails.append(True)
    same(plain, other)
    assert capsys.readouterr().err == ("cavesson: the output head is not compiled: RuntimeError (no kernel for this)\n")


@pytest.mark.slow
def test_a_model_that_cannot_be_compiled_later_goes_on_plainly(capsys: pytest.CaptureFixture[str]) -> None:
    plain, other, said = policies("qwen2", Ways(packed=True, compile=traced("eager")))
    assert said == []
    for forward in forwards(other.model):
        layer = forward.plain.__self__  # type: ignore[attr-defined]
        layer.mlp.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    torch._dynamo.reset()
    same(plain, other)
    said = capsys.readouterr().err.splitlines()
    assert len([line for line in said if line.startswith("cavesson: the layers are not compiled")]) <= 2 and said


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [Optimizer, InBackward])
def test_a_later_backward_pass_that_cannot_be_compiled_names_the_setting(optimizer: type[Optimizer]) -> None:
    """A plain layer cannot take over there, so the run ends in a line."""
    fails: list[bool] = []

    def backward(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        if fails:
            raise InductorError(RuntimeError("no kernel for this"), None)
        return graph.forward

    compiled = Policy(small_model("qwen2"))
    backend = aot_autograd(fw_compiler=lambda graph, _: graph.forward, bw_compiler=backward)
    assert list(use(compiled, Ways(packed=True, compile=traced(backend)))) == []
    fails.append(True)
    torch._dynamo.reset()  # as if the code did not fit the next batch
    learner = optimizer(compiled, OptimizerSettings())
    with pytest.raises(UserError) as raised:
        learner.backward(compiled(batch()).logprob.sum())
    assert str(raised.value) == (
        "the backward pass cannot be compiled: RuntimeError (no kernel for this); set model.compile to none, and "
        "resume the run with --model.compile none"
    )


@pytest.mark.slow
@needs_compiler
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("architecture", ["qwen2", "gpt2"])
def test_compiled_code_computes_the_same(architecture: str) -> None:
    plain, compiled, said = policies(architecture, Ways(packed=True, compile=compiler()))
    assert said == []
    same(plain, compiled)


SECOND = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from torch._dynamo.utils import counters
from models_helpers import batch
from small_models import small_model
from cavesson.models.compiled import compiler
from cavesson.models.passes import Ways, use
from cavesson.models.policy import Policy
policy = Policy(small_model("qwen2"))
assert list(use(policy, Ways(packed=True, compile=compiler()))) == []
print(counters["inductor"]["fxgraph_cache_miss"], counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.slow
@needs_compiler
@pytest.mark.timeout(1800)
def test_what_is_compiled_is_there_for_the_next_process(tmp_path: Path) -> None:
    place = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    place.pop("TORCHINDUCTOR_CACHE_DIR", None)
    said = [
        subprocess.run(
            [sys.executable, "-c", SECOND, str(Path(__file__).parent)], env=place, capture_output=True, text=True
        )
        for _ in range(2)
    ]
    assert [one.returncode for one in said] == [0, 0], said[0].stderr[-2000:]
    _, (missed_again, hits) = (map(int, one.stdout.split()) for one in said)
    assert missed_again == 0 and hits > 0
    assert any(cache_folder().name == folder.name for folder in (tmp_path / "cavesson" / "compiled").iterdir())

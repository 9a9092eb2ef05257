import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cavesson.ops.chunks import CHUNK
from cavesson.ops.divergence import generalised_jsd
from cavesson.ops.head import Head
from cavesson.ops.logprobs import token_logprobs

V, H = 11, 5
MANY = 2 * CHUNK + 3
HEADS = {
    "plain": Head(torch.empty(0)),
    "bias": Head(torch.empty(0), torch.empty(V)),
    "scale": Head(torch.empty(0), scale=0.3),
    "softcap": Head(torch.empty(0), softcap=2.0),
    "all": Head(torch.empty(0), torch.empty(V), 0.6, 1.5),
}
EVERY_HEAD = pytest.mark.parametrize("kind", list(HEADS))


def inputs(n: int, dtype: torch.dtype = torch.float32, kind: str = "plain") -> tuple[Tensor, Head, Tensor]:
    hidden = torch.randn(n, H).to(dtype).requires_grad_()
    weight = torch.randn(V, H).to(dtype).requires_grad_()
    bias = None if HEADS[kind].bias is None else torch.randn(V).to(dtype).requires_grad_()
    return hidden, HEADS[kind]._replace(weight=weight, bias=bias), torch.randint(V, (n,))


def logits(hidden: Tensor, head: Head) -> Tensor:
    """What the head makes of hidden states, in float64 and in one piece."""
    z = hidden.double() @ head.weight.double().t() + (0 if head.bias is None else head.bias.double())
    z = z * head.scale
    return z if head.softcap is None else head.softcap * torch.tanh(z / head.softcap)


def plain(hidden: Tensor, head: Head, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The same by autograd."""
    log_p = (logits(hidden, head) / temperature).log_softmax(-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def leaves(hidden: Tensor, head: Head) -> list[Tensor]:
    return [x for x in (hidden, head.weight, head.bias) if x is not None]


def gradients(function, arguments: tuple[Tensor, Head, Tensor], temperature: float, weights: Tensor) -> list[Tensor]:
    for leaf in leaves(*arguments[:2]):
        leaf.grad = None
    logprob, entropy = function(*arguments, temperature)
    (weights[0] * logprob + weights[1] * entropy).sum().backward()
    return [leaf.grad for leaf in leaves(*arguments[:2])]


@EVERY_HEAD
@pytest.mark.parametrize("n", [1, CHUNK, MANY])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_values_are_those_of_log_softmax(n, temperature, kind):
    arguments = inputs(n, kind=kind)
    for seen, expected in zip(token_logprobs(*arguments, temperature), plain(*arguments, temperature), strict=True):
        torch.testing.assert_close(seen.double(), expected, atol=1e-5, rtol=1e-5)


@EVERY_HEAD
@pytest.mark.parametrize("n", [1, MANY])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("part", ["logprob", "entropy", "both"])
def test_gradients_are_those_of_autograd(n, temperature, part, kind):
    arguments = inputs(n, kind=kind)
    weights = torch.randn(2, n) * torch.tensor([[part != "entropy"], [part != "logprob"]])
    seen = gradients(token_logprobs, arguments, temperature, weights)
    expected = gradients(plain, arguments, temperature, weights.double())
    torch.testing.assert_close(seen, expected, atol=1e-4, rtol=1e-4)


@EVERY_HEAD
@pytest.mark.parametrize("n", [CHUNK, MANY])
def test_another_backward_pass_gives_the_same_gradients(n, kind):
    hidden, head, targets = inputs(n, kind=kind)
    logprob, entropy = token_logprobs(hidden, head, targets, 0.7)
    found = [torch.autograd.grad((logprob + 2 * entropy).sum(), leaves(hidden, head), retain_graph=True) for _ in "12"]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("unused", [0, 1])
def test_an_unused_output_has_no_gradient(unused):
    arguments = inputs(MANY)
    token_logprobs(*arguments, 0.7)[1 - unused].sum().backward()
    seen = [x.grad.clone() for x in leaves(*arguments[:2])]
    weights = torch.ones(2, MANY, dtype=torch.float64)
    weights[unused] = 0
    torch.testing.assert_close(seen, gradients(plain, arguments, 0.7, weights), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_what_is_frozen_gets_no_gradient(frozen):
    arguments = inputs(3, kind="bias")
    tensors = leaves(*arguments[:2])
    tensors[frozen].requires_grad_(False)
    token_logprobs(*arguments, 1.0)[0].sum().backward()
    assert [tensor.grad is None for tensor in tensors] == [n == frozen for n in range(3)]


def test_by_hand():
    # Logits (0, ln 3) at temperature 1: p = (¼, ¾).
    hidden, head = torch.tensor([[1.0], [1.0]]), Head(torch.tensor([[0.0], [math.log(3)]]))
    logprob, entropy = token_logprobs(hidden, head, torch.tensor([0, 1]), 1.0)
    assert logprob.tolist() == pytest.approx([math.log(0.25), math.log(0.75)], rel=1e-6)
    assert entropy.tolist() == pytest.approx([2 * math.log(2) - 0.75 * math.log(3)] * 2, rel=1e-6)


def test_half_precision_inputs_are_scored_in_float32():
    hidden, head, targets = inputs(MANY, torch.bfloat16)
    logprob, entropy = token_logprobs(hidden, head, targets, 1.0)
    assert logprob.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprob.double(), plain(hidden, head, targets, 1.0)[0], atol=1e-5, rtol=1e-5)
    logprob.sum().backward()
    assert hidden.grad.dtype == head.weight.grad.dtype == torch.bfloat16


def test_extreme_logits_stay_finite():
    hidden, head = torch.tensor([[1e4]], requires_grad=True), Head(torch.tensor([[1.0], [-1.0]]))
    logprob, entropy = token_logprobs(hidden, head, torch.tensor([1]), 1.0)
    assert logprob.item() == -2e4
    assert entropy.item() == 0.0
    (logprob + entropy).sum().backward()
    assert hidden.grad.item() == -2.0  # head[1] − Σ p·head


def test_no_token_is_no_error():
    hidden, head, targets = inputs(0)
    logprob, entropy = token_logprobs(hidden, head, targets, 1.0)
    assert logprob.shape == entropy.shape == (0,)
    (logprob.sum() + entropy.sum()).backward()
    assert torch.equal(head.weight.grad, torch.zeros(V, H))
    assert generalised_jsd(hidden, head, hidden, head, 1.0, 1.0).shape == (0,)


def test_nothing_of_the_size_tokens_times_vocabulary_is_kept():
    n, vocabulary = 100, 300
    hidden, head = (
        torch.randn(n, 2, requires_grad=True),
        Head(torch.randn(vocabulary, 2, requires_grad=True), softcap=3.0),
    )
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        token_logprobs(hidden, head, torch.randint(vocabulary, (n,)), 1.0)
    assert kept
    assert max(kept) == 2 * vocabulary  # the head itself


@EVERY_HEAD
def test_arguments_are_not_written(kind):
    hidden, head, targets = inputs(MANY, kind=kind)
    tensors = [*leaves(hidden, head), targets]
    copies = [x.detach().clone() for x in tensors]
    sum(x.sum() for x in token_logprobs(hidden, head, targets, 0.7)).backward()
    generalised_jsd(hidden, head, hidden, head, 1.0, 0.7)
    assert all(torch.equal(x, copy) for x, copy in zip(tensors, copies, strict=True))


@EVERY_HEAD
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_exact_kl_is_the_sum_over_the_vocabulary(temperature, kind):
    hidden, head, _ = inputs(MANY, kind=kind)
    other, other_head = torch.randn(MANY, 3), Head(torch.randn(V, 3))  # a reference of another width
    log_p = (logits(hidden, head) / temperature).log_softmax(-1)
    log_q = (logits(other, other_head) / temperature).log_softmax(-1)
    seen = generalised_jsd(hidden, head, other, other_head, 1.0, temperature)
    torch.testing.assert_close(seen.double(), (log_p.exp() * (log_p - log_q)).sum(-1), atol=1e-5, rtol=1e-5)


def test_the_exact_kl_of_a_distribution_with_itself_is_zero():
    hidden, head, _ = inputs(9, kind="all")
    assert generalised_jsd(hidden, head, hidden, head, 1.0, 1.0).abs().max().item() == 0.0


class Precisions(TorchDispatchMode):
    """Notes the precision of float32 products on GPUs that is set at every product."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.__name__.split(".")[0] in ("mm", "addmm", "_linear_pointwise"):
            self.seen.append(torch.backends.cuda.matmul.fp32_precision)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, False), (torch.bfloat16, True)])
def test_only_products_with_a_rounded_head_may_use_tf32(dtype, allowed):
    before = torch.backends.cuda.matmul.fp32_precision
    hidden, head, targets = inputs(MANY, dtype)
    with Precisions() as precisions:
        logprob, _ = token_logprobs(hidden, head, targets, 1.0)
        logprob.sum().backward()
        generalised_jsd(hidden, head, hidden, head, 1.0, 1.0)
    # Per chunk: the logits, in the backward pass the logits and two gradients, and twice the logits for the KL.
    # Those of the first chunk are kept for the backward pass.
    assert precisions.seen == ["tf32" if allowed else before] * (6 * 3 - 1)
    assert torch.backends.cuda.matmul.fp32_precision == before != "tf32"


def test_tf32_does_not_change_what_was_bfloat16():
    numbers = torch.randn(1000).bfloat16().float()
    # TF32 drops the last 13 of the 23 bits behind the point of a float32.
    assert not (numbers.view(torch.int32) & (2**13 - 1)).any()

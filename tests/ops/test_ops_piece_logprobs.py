"""Log-probabilities in large pieces: those of a softmax over whole logits, and what bfloat16 costs."""

import pytest
import torch
from torch import Tensor

from cavesson.ops.head import Head
from cavesson.ops.logprobs import token_logprobs
from cavesson.ops.piece_logprobs import PIECE, PLAIN, piece_logprobs

HEADS = {
    "plain": {},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 5.0},
    "both": {"scale": 2.0, "softcap": 3.0},
}


def tensors(rows: int, dtype: torch.dtype, vocabulary: int = 37, width: int = 8) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(rows)
    hidden, weight, bias = (
        torch.randn(*shape, generator=draw).to(dtype).requires_grad_()
        for shape in ((rows, width), (vocabulary, width), (vocabulary,))
    )
    return hidden, weight, bias, torch.randint(vocabulary, (rows,), generator=draw)


def whole(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, head: Head, t: float) -> tuple[Tensor, Tensor]:
    """By the definition, in float64."""
    logits = (hidden.double() @ weight.double().T + bias.double()) * head.scale
    logits = logits if head.softcap is None else head.softcap * (logits / head.softcap).tanh()
    log_p = (logits / t).log_softmax(-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("rows", [3, PIECE + 5])
def test_scores_and_gradients_are_those_of_whole_logits(rows: int, kind: str) -> None:
    hidden, weight, bias, targets = tensors(rows, torch.float32)
    head = Head(weight, bias, **HEADS[kind])
    weights = torch.linspace(-1, 1, 2 * rows)
    found, grads = [], []
    for scores in (piece_logprobs(hidden, head, targets, 0.7, PLAIN), whole(hidden, weight, bias, targets, head, 0.7)):
        found.append(torch.cat(scores).float())
        grads.append(torch.autograd.grad((found[-1] * weights).sum(), (hidden, weight, bias)))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


def test_in_bfloat16_only_the_gradient_is_rounded() -> None:
    """Products of bfloat16 numbers are exact in float32; a rounded gradient has 8 bits, and its errors cancel."""
    hidden, weight, bias, targets = tensors(4000, torch.bfloat16, vocabulary=500, width=64)
    head = Head(weight, bias)
    seen = piece_logprobs(hidden, head, targets, 1.0, PLAIN)
    for one, other in zip(seen, token_logprobs(hidden, head, targets, 1.0), strict=True):
        difference = (one - other).detach()
        assert float(difference.abs().max()) < 2e-3
        assert abs(float(difference.mean())) < 1e-5
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    expected = whole(*exact, targets, head, 1.0)  # type: ignore[arg-type]
    rounded = torch.autograd.grad(seen[0].mean() + seen[1].mean(), (hidden, weight, bias))
    for one, other in zip(rounded, torch.autograd.grad(expected[0].mean() + expected[1].mean(), exact), strict=True):
        assert float((one - other).norm() / other.norm()) < 2**-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scoring_and_learning_give_the_same_bits(dtype: torch.dtype) -> None:
    hidden, weight, bias, targets = tensors(PIECE + 5, dtype)
    learned = piece_logprobs(hidden, Head(weight, bias), targets, 0.9, PLAIN)
    with torch.no_grad():
        scored = piece_logprobs(hidden, Head(weight, bias), targets, 0.9, PLAIN)
    assert all(torch.equal(one, other) for one, other in zip(learned, scored, strict=True))


def test_what_is_not_trained_gets_no_gradient() -> None:
    hidden, weight, _, targets = tensors(5, torch.float32)
    logprob, _ = piece_logprobs(hidden, Head(weight.detach()), targets, 1.0, PLAIN)
    logprob.sum().backward()
    assert hidden.grad is not None and weight.grad is None

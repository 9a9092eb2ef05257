"""The generalised Jensen-Shannon divergence, against its definition in float64 and against TRL."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cavesson.ops.divergence import generalised_jsd
from cavesson.ops.head import Head

BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]
HEADS: dict[str, dict[str, Any]] = {"plain": {}, "bias": {"bias": True}, "capped": {"scale": 0.5, "softcap": 3.0}}


def made(seed: int, rows: int, vocabulary: int, width: int, bias: bool = False, **more: Any) -> tuple[Tensor, Head]:
    """States and a head of random numbers."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(vocabulary, width, generator=generator)
    offset = torch.randn(vocabulary, generator=generator) if bias else None
    return torch.randn(rows, width, generator=generator), Head(weight, offset, **more)


def slow(p: list[float], q: list[float], beta: float) -> float:
    """The definition, a token at a time: D(q, p) of arXiv:2306.13649, eq. 1, and the two KLs at its ends."""

    def kl(one: list[float], other: list[float]) -> float:
        return sum(a * math.log(a / b) for a, b in zip(one, other, strict=True))

    if beta in (0, 1):
        return kl(q, p) if beta == 0 else kl(p, q)
    m = [beta * b + (1 - beta) * a for a, b in zip(p, q, strict=True)]
    return beta * kl(q, m) + (1 - beta) * kl(p, m)


def distributions(hidden: Tensor, head: Head, temperature: float, tokens: int) -> list[list[float]]:
    logits = head.scale * (hidden.double() @ head.weight.double().T + (0 if head.bias is None else head.bias.double()))
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    return (logits[:, :tokens] / temperature).softmax(-1).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("beta", BETAS)
def test_it_is_its_definition(beta: float, kind: str) -> None:
    student, teacher = made(1, 6, 11, 4, **HEADS[kind]), made(2, 6, 11, 7, **HEADS[kind])
    found = generalised_jsd(*student, *teacher, beta, 1.7)
    pairs = zip(distributions(*student, 1.7, 11), distributions(*teacher, 1.7, 11), strict=True)
    assert found.tolist() == pytest.approx([slow(p, q, beta) for p, q in pairs], abs=1e-5)


def test_heads_of_other_sizes_are_compared_on_the_tokens_that_both_have() -> None:
    student, teacher = made(1, 6, 11, 4, bias=True), made(2, 6, 13, 7)
    for one, other in ((student, teacher), (teacher, student)):
        pairs = zip(distributions(*one, 1.0, 11), distributions(*other, 1.0, 11), strict=True)
        expected = [slow(p, q, 0.3) for p, q in pairs]
        assert generalised_jsd(*one, *other, 0.3, 1.0).tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("beta", BETAS)
def test_its_gradients_are_those_of_autograd(beta: float, kind: str) -> None:
    """Of 300 rows, which are more than one chunk."""
    (hidden, head), teacher = made(1, 300, 11, 4, **HEADS[kind]), made(2, 300, 13, 7)
    outer = torch.linspace(-1, 1, 300)
    given = [x.requires_grad_() for x in (hidden, head.weight, head.bias) if x is not None]
    (outer * generalised_jsd(hidden, head, *teacher, beta, 0.7)).sum().backward()
    found = [x.grad for x in given]
    wide = [x.detach().double().requires_grad_() for x in given]
    logits = head.scale * (wide[0] @ wide[1].T + (wide[2] if len(wide) > 2 else 0))
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    p = (logits / 0.7).softmax(-1)
    q = (teacher[0].double() @ teacher[1].weight.double().T / 0.7)[:, :11].softmax(-1)
    if beta in (0, 1):
        every = q * (q / p).log() if beta == 0 else p * (p / q).log()
    else:
        m = beta * q + (1 - beta) * p
        every = beta * q * (q / m).log() + (1 - beta) * p * (p / m).log()
    (outer.double() * every.sum(-1)).sum().backward()
    for mine, slow_one in zip(found, wide, strict=True):
        assert mine is not None and slow_one.grad is not None
        torch.testing.assert_close(mine.double(), slow_one.grad, rtol=1e-4, atol=1e-4)


def test_the_models_can_be_exchanged_with_beta() -> None:
    student, teacher = made(1, 6, 11, 4), made(2, 6, 11, 7)
    for beta in BETAS:
        one, other = generalised_jsd(*student, *teacher, beta, 1.0), generalised_jsd(*teacher, *student, 1 - beta, 1.0)
        torch.testing.assert_close(one, other)


def test_a_model_is_no_distance_from_itself() -> None:
    hidden, head = made(1, 6, 11, 4)
    for beta in BETAS:
        weight = head.weight.clone().requires_grad_()
        found = generalised_jsd(hidden, head._replace(weight=weight), hidden, head, beta, 1.0)
        found.sum().backward()
        assert float(found.detach().abs().max()) < 1e-6
        assert weight.grad is not None and float(weight.grad.abs().max()) < 1e-5


@pytest.mark.parametrize("beta", BETAS)
def test_it_is_trls(beta: float) -> None:
    """Value and gradient of the loss of `trl.experimental.gkd`, averaged over the tokens that are learned from."""
    gkd = pytest.importorskip("trl.experimental.gkd.gkd_trainer")
    (hidden, head), teacher = made(1, 6, 11, 4), made(2, 6, 11, 7)
    labels = torch.tensor([[3, 1, -100], [-100, 2, 5]])
    mine, theirs = (hidden.clone().requires_grad_() for _ in range(2))
    loss = generalised_jsd(mine, head, *teacher, beta, 0.9)[labels.flatten() >= 0].mean()
    loss.backward()
    logits = [(states @ one.weight.T).view(2, 3, 11) for states, one in ((theirs, head), teacher)]
    expected = gkd.GKDTrainer.generalized_jsd_loss(*logits, labels, beta=beta, temperature=0.9)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)

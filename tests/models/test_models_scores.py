"""What a policy says of responses is what the plain model says of them one by one, however they are batched."""

import pytest
import torch
from batch_helpers import split
from models_helpers import PROMPTS, RESPONSES, absolute_model, batch, gradients, policy_of, scramble, sharp_model
from torch import Tensor
from transformers import PreTrainedModel

from cavesson.models.policy import Policy
from cavesson.models.settings import ReferenceSettings, ValueSettings
from cavesson.types import Scores

TRUNK = ValueSettings()


def plain(model: PreTrainedModel, temperature: float = 1.0) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Log-probabilities, entropies and last hidden states of each response, from the model's own forward pass."""
    rows = []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        out = model(input_ids=torch.tensor([[*prompt, *response]]), output_hidden_states=True)
        places = slice(len(prompt) - 1, len(prompt) + len(response) - 1)
        log_p = (out.logits[0, places] / temperature).log_softmax(-1)
        logprob = log_p[range(len(response)), list(response)]
        rows.append((logprob, -(log_p.exp() * log_p).sum(-1), out.hidden_states[-1][0, places]))
    return rows


def columns(scores: Scores) -> list[Tensor]:
    return [scores.logprob, scores.entropy, scores.value]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("make", [sharp_model, absolute_model])
def test_scores_are_those_of_the_plain_model(temperature, make):
    policy = policy_of(make(), value=TRUNK, temperature=temperature)
    scramble(policy.value_head, std=1.0)
    scores = policy(batch())
    for row, (logprob, entropy, hidden) in enumerate(plain(policy.model, temperature)):
        value = policy.value_head(hidden).squeeze(-1)
        for seen, expected in zip(columns(scores), (logprob, entropy, value), strict=True):
            torch.testing.assert_close(seen[row, : len(expected)], expected, atol=1e-5, rtol=1e-5)
            assert seen[row, len(expected) :].abs().sum() == 0


def test_gradients_are_those_of_the_plain_model():
    # Weights on every token, so that a shift by one would be seen.
    outer = torch.randn(len(PROMPTS), 4)
    policy = policy_of(value=TRUNK)
    scores = policy(batch())
    (outer * (scores.logprob + 0.3 * scores.entropy)).sum().backward()
    model = sharp_model()
    for row, (logprob, entropy, _) in enumerate(plain(model)):
        (outer[row, : len(logprob)] * (logprob + 0.3 * entropy)).sum().backward()
    torch.testing.assert_close(gradients(policy.model), gradients(model), atol=1e-3, rtol=1e-4)


@pytest.fixture(params=[sharp_model, absolute_model], ids=["llama", "gpt2"])
def policy(request) -> Policy:
    policy = policy_of(request.param(), value=TRUNK, reference=ReferenceSettings())
    scramble(policy)
    return policy


def whole_and(policy: Policy, other: list) -> list[tuple[Tensor, Tensor]]:
    """Pairs of columns: of the whole batch, and of the other batches put together."""
    width = len(max(RESPONSES, key=len))
    scores = policy(batch())
    expected = [*columns(scores), policy.reference_logprob(batch()), policy.reference_kl(batch())]
    parts = [[*columns(policy(b)), policy.reference_logprob(b), policy.reference_kl(b)] for b in other]
    joined = [
        torch.cat([torch.nn.functional.pad(c, (0, width - c.shape[1])) for c in column])
        for column in zip(*parts, strict=True)
    ]
    return list(zip(joined, expected, strict=True))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_micro_batches_change_nothing(policy, size):
    for seen, expected in whole_and(policy, list(split(batch(), size))):
        torch.testing.assert_close(seen, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("extra", [(3, 0), (0, 5), (2, 2)])
@pytest.mark.parametrize("rubbish", [1, 200])
def test_padding_changes_nothing_whatever_it_holds(policy, extra, rubbish):
    padded = policy(batch(extra=extra, rubbish=rubbish))
    reference = policy.reference_logprob(batch(extra=extra, rubbish=rubbish))
    width = len(max(RESPONSES, key=len))
    for seen, expected in zip(
        [*columns(padded), reference], [*columns(policy(batch())), policy.reference_logprob(batch())], strict=True
    ):
        torch.testing.assert_close(seen[:, :width], expected, atol=1e-5, rtol=1e-5)
        assert seen[:, width:].abs().sum() == 0


def test_other_rows_change_nothing(policy):
    others = policy(batch([[99] * 30, PROMPTS[1]], [[98] * 20, RESPONSES[1]]))
    torch.testing.assert_close(others.logprob[1, :2], policy(batch()).logprob[1, :2], atol=1e-5, rtol=1e-5)


def test_a_batch_of_nothing_but_empty_responses(policy):
    empty = batch([[5, 6], [7]], [[], []])
    scores = policy(empty)
    for column in [*columns(scores), policy.reference_logprob(empty), policy.reference_kl(empty)]:
        assert column.tolist() == [[0.0], [0.0]]
    sum(column.sum() for column in columns(scores)).backward()
    assert all(torch.isfinite(p.grad).all() for p in policy.parameters() if p.grad is not None)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_exact_kl_is_the_sum_over_the_vocabulary(temperature):
    policy = policy_of(reference=ReferenceSettings(), temperature=temperature)
    original = sharp_model()
    scramble(policy)
    seen = policy.reference_kl(batch())
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        ids = torch.tensor([[*prompt, *response]])
        log_p, log_q = ((m(input_ids=ids).logits[0] / temperature).log_softmax(-1) for m in (policy.model, original))
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)[len(prompt) - 1 : len(prompt) + len(response) - 1]
        torch.testing.assert_close(seen[row, : len(response)], kl, atol=1e-4, rtol=1e-4)
        assert (seen[row, : len(response)] > 0).all()


def test_half_precision_is_close_and_scores_in_float32():
    exact = policy_of(sharp_model())(batch())
    rounded = policy_of(sharp_model(dtype=torch.bfloat16), value=TRUNK, dtype="bfloat16")
    scores = rounded(batch())
    assert {column.dtype for column in columns(scores)} == {torch.float32}
    # bfloat16 has 8 bits: logits of size 10 are off by some hundredths after two layers.
    torch.testing.assert_close(scores.logprob, exact.logprob, atol=0.3, rtol=0)
    assert (scores.logprob - exact.logprob).abs().max() > 1e-4
    scores.logprob.sum().backward()
    assert all(torch.isfinite(gradient).all() for gradient in gradients(rounded).values())


def test_batches_are_not_written(policy):
    given = batch()
    copies = {name: column.clone() for name, column in given.columns.items()}
    policy(given)
    policy.reference_kl(given)
    assert all(torch.equal(given[name], copy) for name, copy in copies.items())

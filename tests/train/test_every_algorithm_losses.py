"""First loss and first gradient of the algorithms that learn from examples, against slow versions.

The slow versions tokenize by hand, run plain Hugging Face models on each text alone, and write the formula out.
"""

import copy
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from train_helpers import DEMONSTRATIONS, OFFLINE, PAIRS, move, quiet, tiny_run
from transformers import LlamaForSequenceClassification

import cavesson
from cavesson.algorithms.sft import SFTRun
from cavesson.data.order import InMemory
from cavesson.errors import UserError
from cavesson.models.tiny import tiny_model, tiny_tokenizer
from cavesson.train.run import Result
from cavesson.types import Batch

# One step on everything: what AdamW then remembers is a tenth of the gradient.
ONE_STEP: dict[str, Any] = {
    "epochs": 1, "batch_size": 8, "data__validation": 0, "update__max_grad_norm": None, "optimizer__warmup_steps": 0,
    "optimizer__learning_rate": 1e-9, "update__micro_batch_size": 3,
}  # fmt: skip
LAYOUTS = ("packed", "grouped", "padded")
END, PAD = 0, 1


def ids(text: str) -> list[int]:
    """The tiny tokenizer has a token per byte."""
    return [tiny_tokenizer().convert_tokens_to_ids(token) for token in tiny_tokenizer().tokenize(text)]


def logprobs(model: nn.Module, prompt: str, response: str) -> Tensor:
    """Of the tokens of a response and its end, one after the other; nothing predicts the first token of a text."""
    before, after = ids(prompt), [*ids(response), END]
    whole = torch.tensor([before + after])
    log_p = model(input_ids=whole, use_cache=False).logits[0].double().log_softmax(-1)
    places = range(max(1, len(before)), whole.shape[1])
    return torch.stack([log_p[place - 1, whole[0, place]] for place in places])


def trained(name: str, folder: Path, model: nn.Module, **changes: Any) -> tuple[Result, dict[str, Tensor]]:
    """A run of one step, and the gradient that it followed, by parameter."""
    inputs = {"model": model, "tokenizer": tiny_tokenizer()}
    training = tiny_run(name, folder, inputs, **{**ONE_STEP, **changes})
    result = training.run(quiet)
    assert len(result.metrics) == 1
    state = training.trainer.learner.optimizer.state()
    return result, {key.removeprefix("exp_avg.model."): 10 * v for key, v in state.items() if "exp_avg." in key}


def same_gradient(model: nn.Module, loss: Tensor, seen: dict[str, Tensor]) -> None:
    parameters = dict(model.named_parameters())
    expected = torch.autograd.grad(loss, list(parameters.values()))
    for name, gradient in zip(parameters, expected, strict=True):
        torch.testing.assert_close(seen[name], gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()))
    assert max(float(gradient.abs().max()) for gradient in expected) > 1e-2


def moved(model: nn.Module, seed: int = 1) -> nn.Module:
    move(model, seed=seed, size=0.03)
    return model


@pytest.mark.parametrize("learn", ["response", "all"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sft_is_the_mean_cross_entropy_of_the_learned_tokens(tmp_path: Path, layout: str, learn: str) -> None:
    model = moved(tiny_model())
    slow = copy.deepcopy(model)
    result, gradient = trained("sft", tmp_path / "run", model, update__layout=layout, data__learn=learn)
    texts = [("", p + r) for p, r in DEMONSTRATIONS] if learn == "all" else DEMONSTRATIONS
    tokens = torch.cat([logprobs(slow, prompt, response) for prompt, response in texts])
    # Every token but the first of each text, or those after the prompts; one text has no prompt.
    lengths = [len(ids(p + r)) if learn == "all" else len(ids(r)) + bool(p) for p, r in DEMONSTRATIONS]
    assert len(tokens) == sum(lengths) == result.metrics[0]["optim/weight"]
    loss = -tokens.sum() / len(tokens)
    assert result.metrics[0]["loss/nll"] == pytest.approx(loss.item(), rel=1e-5)
    assert result.metrics[0]["perplexity"] == pytest.approx(loss.exp().item(), rel=1e-4)
    same_gradient(slow, loss, gradient)


@pytest.mark.parametrize("pad", [PAD, END], ids=["pad", "pad is end"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_reward_model_is_bradley_terry_on_the_classifier_s_own_logits(
    tmp_path: Path, layout: str, pad: int
) -> None:
    config = tiny_model().config
    config.num_labels, config.pad_token_id = 1, pad
    model = moved(LlamaForSequenceClassification(config).eval())
    slow = copy.deepcopy(model)
    changes = {"update__layout": layout, "reward_model__centring_coef": 0.3}
    result, gradient = trained("reward-model", tmp_path / "run", model, **changes)

    def reward(prompt: str, response: str) -> Tensor:
        return slow(input_ids=torch.tensor([ids(prompt + response)])).logits[0, 0].double()

    rewards = [(reward(prompt, chosen), reward(prompt, rejected)) for prompt, chosen, rejected in PAIRS]
    preference = [-(chosen - rejected).sigmoid().log() for chosen, rejected in rewards]
    loss = sum(p + 0.3 * (c + r) ** 2 for p, (c, r) in zip(preference, rewards, strict=True)) / len(PAIRS)
    seen = result.metrics[0]
    assert seen["loss/preference"] == pytest.approx(mean(preference), rel=1e-4)
    assert seen["loss/total"] == pytest.approx(loss.item(), rel=1e-4)
    assert seen["reward/accuracy"] == pytest.approx(mean([(c > r).double() for c, r in rewards]))
    assert seen["reward/margin"] == pytest.approx(mean([c - r for c, r in rewards]), rel=1e-3, abs=1e-5)
    same_gradient(slow, loss, gradient)


def mean(numbers: Sequence[Tensor]) -> float:
    return sum(number.item() for number in numbers) / len(numbers)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("length_normalised", [False, True], ids=["summed", "per token"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dpo_is_the_formula_on_plain_log_probabilities(tmp_path: Path, layout: str, length_normalised: bool) -> None:
    model, reference = moved(tiny_model()), moved(tiny_model(), seed=2)
    slow = copy.deepcopy(model)
    reference.save_pretrained(tmp_path / "reference")
    changes = {"dpo__beta": 0.3, "dpo__label_smoothing": 0.1, "dpo__length_normalised": length_normalised}
    changes |= {"reference__path": str(tmp_path / "reference"), "update__layout": layout}
    result, gradient = trained("dpo", tmp_path / "run", model, **changes)
    losses, rewards = [], []
    for prompt, *responses in PAIRS:
        ratios = []
        for response in responses:
            tokens = logprobs(slow, prompt, response)
            with torch.no_grad():
                ratio = tokens.sum() - logprobs(reference, prompt, response).sum()
            ratio = ratio + tokens.sum() - tokens.sum().detach()
            ratios.append(ratio / len(tokens) if length_normalised else ratio)
        logit = 0.3 * (ratios[0] - ratios[1])
        losses.append(-0.9 * logit.sigmoid().log() - 0.1 * (-logit).sigmoid().log())
        rewards.append(logit.detach())
    loss = sum(losses) / len(PAIRS)
    assert result.metrics[0]["loss/total"] == pytest.approx(loss.item(), rel=1e-4)
    assert result.metrics[0]["dpo/reward_margin"] == pytest.approx(mean(rewards), rel=1e-3, abs=1e-5)
    assert result.metrics[0]["dpo/accuracy"] == pytest.approx(mean([(r > 0).double() for r in rewards]))
    same_gradient(slow, loss, gradient)


def test_dpo_starts_at_log_2_where_policy_and_reference_agree(tmp_path: Path) -> None:
    result, _ = trained("dpo", tmp_path / "run", moved(tiny_model()))
    assert result.metrics[0]["loss/total"] == pytest.approx(0.6931472, abs=1e-5)
    assert result.metrics[0]["dpo/reward_margin"] == pytest.approx(0.0, abs=1e-5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("epochs", "sizes"), [(2, [5, 5, 2]), (1.5, [5, 4]), (0.5, [3])])
@pytest.mark.parametrize("name", OFFLINE)
def test_passes_end_where_they_should(tmp_path: Path, name: str, epochs: float, sizes: list[int]) -> None:
    training = tiny_run(name, tmp_path / "run", epochs=epochs, data__validation=0.25)
    assert training.trainer.steps == len(sizes)
    taken: list[int] = []

    def count(_module: nn.Module, arguments: tuple[Batch], _output: Any) -> None:
        if torch.is_grad_enabled():
            taken.append(len(arguments[0]))

    training.trainer.learner.model.register_forward_hook(count)
    metrics = training.run(quiet).metrics
    assert taken == sizes
    assert [step["data/examples"] for step in metrics] == list(accumulate(sizes))
    assert metrics[-1]["data/passes"] == epochs


def test_a_share_of_a_pass_is_counted_exactly() -> None:
    """In floating-point numbers, 1.1 · 100 is a little more than 110."""
    for tenths in range(1, 40):
        run = SFTRun(epochs=tenths / 10, batch_size=10)
        assert run.steps_over(100) == tenths
        assert [run.batch_size_at(10 * step, 100) for step in range(tenths)] == [10] * tenths


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("longer", "used"),
    [({"epochs": 2}, [5, 6, 11, 12]), ({"epochs": 1.5}, [5, 6, 9]), ({"steps": 4}, [5, 6, 11, 16])],
    ids=str,
)
@pytest.mark.parametrize("name", OFFLINE)
def test_a_longer_run_uses_every_example_as_often(
    tmp_path: Path, name: str, longer: dict[str, Any], used: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pass over six examples ends with a step of one; what comes then begins with the next example."""
    tiny_run(name, tmp_path / "run", epochs=1).run(quiet)
    changes = {"epochs": 1, "update__layout": "padded", **longer}
    again = tiny_run(name, tmp_path / "run", {"resume": True}, **changes)
    assert again.trainer.steps == len(used)
    taken: list[int] = []
    take = InMemory.take

    def counted(train: InMemory[Any], start: int, count: int) -> list[Any]:
        if not isinstance(train.items[0], int):  # the order alone, which KTO asks for at the start
            taken.extend(range(start, start + count))
        return take(train, start, count)

    monkeypatch.setattr(InMemory, "take", counted)
    again.run(quiet)
    assert taken == list(range(6, used[-1]))
    rows = cavesson.open(tmp_path / "run").steps().to_pylist()
    assert [row["data/examples"] for row in rows if row["data/examples"] is not None] == used
    assert [row["data/passes"] for row in rows if row["data/passes"] is not None] == [n / 6 for n in used]


def test_a_run_cannot_end_before_the_examples_that_it_has_used(tmp_path: Path) -> None:
    tiny_run("sft", tmp_path / "run", epochs=2).run(quiet)
    with pytest.raises(UserError, match="has already done 3 steps: it cannot end after"):
        tiny_run("sft", tmp_path / "run", {"resume": True}, epochs=1.5)

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from example_helpers import build, demonstrations, explained, finish, logprobs, loss_of, pairs, quiet, settings
from safetensors.torch import load_file

import cavesson
from cavesson.algorithms.dpo import DPO
from cavesson.errors import UserCodeError, UserError
from cavesson.models.tiny import tiny_model, tiny_tokenizer
from cavesson.models.trained import load_trained
from cavesson.ops.preferences import bradley_terry
from cavesson.train.run import Training, resume
from cavesson.types import Batch, PairScores

LOSSES = ("sigmoid", "ipo", "hinge")
SIDES = ("chosen", "rejected")


def batch(chosen: list[float], rejected: list[float], lengths: tuple[int, int] = (2, 2)) -> Batch:
    """Pairs of these log-probabilities under the reference, whose responses have so many tokens."""
    columns = {"chosen_reference": torch.tensor(chosen), "rejected_reference": torch.tensor(rejected)}
    for side, length in zip(("chosen", "rejected"), lengths, strict=True):
        columns[f"{side}_learned"] = torch.tensor([[0.0, *[1.0] * length, 0.0]] * len(chosen))
        columns[f"{side}_length"] = torch.tensor([length + 2] * len(chosen))
    return Batch(columns)


def scores(chosen: list[float], rejected: list[float]) -> PairScores:
    return PairScores(torch.tensor(chosen), torch.tensor(rejected))


# Two pairs: Δ = (−3 + 4) − (−6 + 5) = 2 and (−1 + 1) − (−2 + 5) = −3
SEEN, REFERENCE = scores([-3.0, -1.0], [-6.0, -2.0]), batch([-4.0, -1.0], [-5.0, -5.0])


def softplus(x: float) -> float:
    return math.log(1 + math.exp(x))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (softplus(-0.2) + softplus(0.3)) / 2),
        ({"beta": 0.5}, (softplus(-1) + softplus(1.5)) / 2),
        ({"label_smoothing": 0.1}, 0.45 * (softplus(-0.2) + softplus(0.3)) + 0.05 * (softplus(0.2) + softplus(-0.3))),
        ({"loss_type": "ipo"}, ((2 - 5) ** 2 + (-3 - 5) ** 2) / 2),
        ({"loss_type": "hinge"}, ((1 - 0.2) + (1 + 0.3)) / 2),
        ({"loss_type": "hinge", "beta": 0.5}, (0 + 2.5) / 2),
        ({"length_normalised": True}, (softplus(-0.1) + softplus(0.15)) / 2),
        ({"loss_type": "ipo", "length_normalised": True}, ((1 - 5) ** 2 + (-1.5 - 5) ** 2) / 2),
        ({"reference_free": True}, (softplus(-0.3) + softplus(-0.1)) / 2),
        ({"reference_free": True, "length_normalised": True}, (softplus(-0.15) + softplus(-0.05)) / 2),
        # SimPO: β·Δ = 2 · (−1.5 + 3) = 3 and 2 · (−0.5 + 1) = 1, each less γ
        (
            {"reference_free": True, "length_normalised": True, "beta": 2.0, "margin": 1.5},
            (softplus(-1.5) + softplus(0.5)) / 2,
        ),
        (
            {"beta": 0.5, "margin": 1.0, "label_smoothing": 0.1},  # β·Δ − γ = 0 and −2.5
            0.45 * (softplus(0) + softplus(2.5)) + 0.05 * (softplus(0) + softplus(-2.5)),
        ),
    ],
)
def test_losses_by_hand(settings: dict[str, Any], expected: float):
    loss, means = loss_of(DPO(**settings), SEEN, REFERENCE)
    assert loss == pytest.approx(expected)
    assert means["loss/total"] == pytest.approx(expected)


def odds(p: float) -> float:
    return p / (1 - p)


def test_orpo_by_hand():
    # The geometric means of the probabilities of two tokens are 1/2 and 1/4 in one pair, 1/3 and 3/4 in the other.
    chosen, rejected = [2 * math.log(1 / 2), 2 * math.log(1 / 3)], [2 * math.log(1 / 4), 2 * math.log(3 / 4)]
    loss, means = loss_of(DPO(loss_type="orpo", beta=0.2), scores(chosen, rejected), REFERENCE)
    # σ(log(x)) = x/(1 + x): odds of 1 and 1/3 give a ratio of 3, and odds of 1/2 and 3 one of 1/6.
    assert loss == pytest.approx((math.log(2) + 0.2 * math.log(4 / 3) + math.log(3) + 0.2 * math.log(7)) / 2)
    assert means["dpo/accuracy"] == 0.5
    assert means["dpo/reward_chosen"] == pytest.approx(0.2 * (math.log(1 / 2) + math.log(1 / 3)) / 2)


def test_metrics_by_hand():
    _, means = loss_of(DPO(beta=0.5), SEEN, REFERENCE)
    del means["loss/total"]
    assert means == pytest.approx(
        {
            "dpo/accuracy": 0.5,
            "dpo/reward_chosen": 0.5 * (1 + 0) / 2,
            "dpo/reward_rejected": 0.5 * (-1 + 3) / 2,
            "dpo/reward_margin": 0.5 * (2 - 3) / 2,
            "logprob/chosen": -2,
            "logprob/rejected": -4,
        }
    )


def test_responses_are_divided_by_their_own_lengths():
    # 1/4 − (−1)/2 and 0/4 − 3/2
    loss, _ = loss_of(DPO(length_normalised=True, beta=1.0), SEEN, batch([-4.0, -1.0], [-5.0, -5.0], (4, 2)))
    assert loss == pytest.approx((softplus(-0.75) + softplus(1.5)) / 2)


@pytest.mark.parametrize("loss_type", ["sigmoid", "hinge"])
def test_with_equal_lengths_normalising_is_a_smaller_beta(loss_type):
    plain, _ = loss_of(DPO(loss_type=loss_type, beta=0.1), SEEN, REFERENCE)
    normalised, _ = loss_of(DPO(loss_type=loss_type, beta=0.2, length_normalised=True), SEEN, REFERENCE)
    assert normalised == pytest.approx(plain)


def test_dpo_is_bradley_terry_of_the_rewards_it_reports():
    result = DPO(beta=0.3).loss(SEEN, REFERENCE)
    rewards = result.means["dpo/reward_chosen"], result.means["dpo/reward_rejected"]
    torch.testing.assert_close(result.loss, bradley_terry(*rewards, torch.zeros(2)))


@pytest.mark.parametrize("seen", [SEEN, scores([-4.0, -1.0], [-5.0, -5.0])], ids=["apart", "the reference"])
def test_label_smoothing_is_never_below_its_own_entropy(seen):
    # ε-smoothed labels cost at least −ε·log ε − (1 − ε)·log(1 − ε), and log 2 where the policy is the reference.
    loss, _ = loss_of(DPO(label_smoothing=0.1), seen, REFERENCE)
    assert loss > -0.1 * math.log(0.1) - 0.9 * math.log(0.9)
    if seen is not SEEN:
        assert loss == pytest.approx(math.log(2))


def test_ipo_is_zero_at_its_target():
    # 1/(2·0.25) = 2 is the first pair's Δ
    assert DPO(loss_type="ipo", beta=0.25).loss(SEEN, REFERENCE).loss[0].item() == 0


def test_equal_log_ratios_are_half_right():
    assert loss_of(DPO(), scores([-1.0], [-2.0]), batch([-1.5], [-2.5]))[1]["dpo/accuracy"] == 0.5


# --- runs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_reference_is_what_the_starting_point_says_of_every_response_alone(tmp_path: Path, layout):
    rows = pairs(12)
    seen = finish("dpo", tmp_path, rows, steps=1, data__validation=0.25, update__layout=layout).metrics[0]
    kept = load_file(tmp_path / "run" / "reference.safetensors")["scores"]
    expected = [
        [float(logprobs(row["prompt"] + row[side], len(row["prompt"])).sum()) for side in ("chosen", "rejected")]
        for row in rows
    ]
    torch.testing.assert_close(kept, torch.tensor(expected), rtol=0, atol=1e-3)
    for prefix, part in (("", expected[:8]), ("eval/", expected[9:])):
        for number, side in enumerate(("chosen", "rejected")):
            assert seen[f"{prefix}logprob/{side}"] == pytest.approx(
                sum(row[number] for row in part) / len(part), abs=1e-3
            )


@pytest.mark.parametrize(("loss_type", "first"), [("sigmoid", math.log(2)), ("ipo", 25.0), ("hinge", 1.0)])
@pytest.mark.parametrize("adapters", [None, {"rank": 2, "alpha": 4}, {"rank": 2, "alpha": 4, "dora": True}])
def test_at_the_start_policy_and_reference_agree(tmp_path: Path, loss_type, first, adapters):
    lora = {} if adapters is None else {"model__lora": adapters}
    result = finish("dpo", tmp_path, pairs(12), dpo__loss_type=loss_type, steps=1, data__validation=0.25, **lora)
    for prefix in ("", "eval/"):
        assert result.metrics[0][f"{prefix}loss/total"] == pytest.approx(first, abs=1e-2 if first == 25 else 1e-5)
        assert result.metrics[0][f"{prefix}dpo/reward_margin"] == pytest.approx(0, abs=1e-4)


def test_pairs_of_a_mix_are_scored_by_the_reference_each_in_its_place(tmp_path: Path):
    sources = []
    for name, rows in {"a": pairs(7), "b": pairs(5)[::-1]}.items():
        sources.append({"path": str(tmp_path / f"{name}.jsonl")})
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    result = finish("dpo", tmp_path, pairs(1), steps=1, batch_size=12, data__path=None, data__mix=sources)
    assert result.metrics[0]["loss/total"] == pytest.approx(math.log(2), abs=1e-5)
    assert result.metrics[0]["dpo/accuracy"] == 0.5


@pytest.mark.parametrize("loss_type", LOSSES)
def test_it_learns_to_prefer_what_is_chosen(tmp_path: Path, loss_type):
    result = finish("dpo", tmp_path, pairs(48), epochs=3, dpo__loss_type=loss_type, data__validation=0.25)
    assert result.final["eval/loss/total"] < 0.8 * result.metrics[0]["eval/loss/total"]
    assert result.final["eval/dpo/accuracy"] == 1
    assert result.final["eval/dpo/reward_margin"] > 0.1
    recorded = cavesson.open(tmp_path / "run").steps()["eval/dpo/accuracy"].to_pylist()
    assert recorded[-1] == 1


def test_without_a_reference_nothing_is_scored_before(tmp_path: Path):
    result = finish("dpo", tmp_path, pairs(8), steps=1, dpo__reference_free=True, dpo__length_normalised=True)
    assert not (tmp_path / "run" / "reference.safetensors").exists()
    means = [
        [float(logprobs(row["prompt"] + row[side], len(row["prompt"])).mean()) for side in ("chosen", "rejected")]
        for row in pairs(8)
    ]
    expected = sum(softplus(-0.1 * (chosen - rejected)) for chosen, rejected in means) / 8
    assert result.metrics[0]["loss/total"] == pytest.approx(expected, abs=1e-5)


def test_orpo_is_the_formula_on_the_odds_of_whole_responses(tmp_path: Path):
    result = finish("dpo", tmp_path, pairs(8), steps=1, dpo__loss_type="orpo", dpo__beta=0.3, data__stream=True)
    assert not (tmp_path / "run" / "reference.safetensors").exists()
    expected = 0.0
    for row in pairs(8):
        p = {side: math.exp(logprobs(row["prompt"] + row[side], len(row["prompt"])).mean()) for side in SIDES}
        ratio = odds(p["chosen"]) / odds(p["rejected"])
        expected += (-math.log(p["chosen"]) - 0.3 * math.log(ratio / (1 + ratio))) / 8
    assert result.metrics[0]["loss/total"] == pytest.approx(expected, abs=1e-5)


def test_orpo_learns_to_prefer_what_is_chosen_and_to_say_it(tmp_path: Path):
    result = finish("dpo", tmp_path, pairs(48), epochs=3, dpo__loss_type="orpo", data__validation=0.25)
    first, last = result.metrics[0], result.final
    assert last["eval/dpo/accuracy"] == 1
    assert last["eval/logprob/chosen"] > first["eval/logprob/chosen"] + 1


def test_another_model_as_reference(tmp_path: Path):
    finish("sft", tmp_path / "other", demonstrations(), optimizer__learning_rate=5e-3)
    other = str(tmp_path / "other" / "run")
    result = finish("dpo", tmp_path / "dpo", pairs(8), steps=1, reference__path=other)
    model, _ = load_trained(other)
    rows = pairs(8)
    deltas = []
    for row in rows:
        ratios = []
        for side in ("chosen", "rejected"):
            text, start = row["prompt"] + row[side], len(row["prompt"])
            ratios.append(float(logprobs(text, start).sum() - logprobs(text, start, model).sum()))
        deltas.append(ratios[0] - ratios[1])
    expected = sum(softplus(-0.1 * delta) for delta in deltas) / 8
    assert max(map(abs, deltas)) > 1
    assert result.metrics[0]["loss/total"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("adapters", [None, {"rank": 2}], ids=["full", "lora"])
def test_a_reference_of_another_vocabulary_is_refused(tmp_path: Path, adapters):
    other = str(tmp_path / "other")
    wide = tiny_model(hidden=32)
    wide.resize_token_embeddings(300)
    wide.save_pretrained(other)
    with pytest.raises(UserError, match=f"the reference {other} has a different vocabulary from the policy tiny"):
        finish("dpo", tmp_path, pairs(8), steps=1, reference__path=other, model__lora=adapters)


def test_a_resumed_run_keeps_the_reference_of_its_start(tmp_path: Path):
    def fail(step: int, metrics: dict[str, float]) -> None:
        if step == 2:
            raise ValueError

    whole = finish("dpo", tmp_path / "whole", pairs(), epochs=2)
    stopped = settings("dpo", tmp_path / "stopped", pairs(), epochs=2, checkpoint__every=1)
    with pytest.raises(UserCodeError, match="the steps before step 3 are recorded"):
        Training(stopped).run(fail)
    rest = Training(stopped, resume=True).run(quiet)
    for one, other in zip(whole.metrics[3:], rest.metrics, strict=True):
        assert other["loss/total"] == one["loss/total"]
    (tmp_path / "stopped" / "run" / "reference.safetensors").unlink()
    with pytest.raises(UserError, match="reference"):
        resume(tmp_path / "stopped" / "run", "dpo")


@pytest.mark.parametrize(
    "changes",
    [
        {"dpo__label_smoothing": 0.1, "dpo__loss_type": "ipo"},
        {"dpo__label_smoothing": 0.1, "dpo__loss_type": "hinge"},
        {"dpo__margin": 0.5, "dpo__loss_type": "ipo"},
        {"dpo__margin": 0.5, "dpo__loss_type": "hinge"},
        {"dpo__margin": 0.5, "dpo__loss_type": "orpo"},
        {"dpo__length_normalised": True, "dpo__loss_type": "orpo"},
        {"dpo__reference_free": True, "dpo__loss_type": "orpo"},
        {"dpo__loss_type": "orpo", "reference__path": "tiny"},
        {"dpo__reference_free": True, "reference__path": "tiny"},
        {"data__stream": True},
        {"dpo__beta": 0},
    ],
)
def test_settings_that_say_nothing_are_refused(tmp_path: Path, changes: dict[str, Any]):
    with pytest.raises(UserError):
        build("dpo", tmp_path, pairs(), **changes)


def test_every_metric_is_explained_and_every_explained_one_is_there(tmp_path: Path):
    result = finish("dpo", tmp_path, pairs(), steps=1, data__validation=0.25)
    assert set(result.metrics[0]) | set(result.final) == explained("dpo.md")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "computed again"])
@pytest.mark.parametrize("adapters", [None, {"rank": 4, "alpha": 8}], ids=["full", "lora"])
@pytest.mark.parametrize("layout", ["packed", "grouped", "padded"])
def test_in_the_whole_first_pass_policy_and_reference_are_the_same_numbers(
    tmp_path: Path, layout: str, adapters: Any, checkpointing: bool, dtype: torch.dtype
):
    model = tiny_model(dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 4.0 if parameter.ndim == 2 else 1.0  # a rounded state is another probability
    made = settings(
        "dpo", tmp_path, pairs(19), model__gradient_checkpointing=checkpointing, model__lora=adapters,
        data__shuffle=True, data__validation=0.25, update__layout=layout, update__micro_batch_size=3, batch_size=5,
        optimizer__learning_rate=1e-30, epochs=1,
    )  # fmt: skip
    seen = Training(made, model=model, tokenizer=tiny_tokenizer()).run(quiet)
    rewards = ("dpo/reward_chosen", "dpo/reward_rejected", "dpo/reward_margin")
    for step in seen.metrics:
        assert [step[name] for name in rewards] == [0.0, 0.0, 0.0]
        assert step["loss/total"] == pytest.approx(math.log(2), rel=1e-6)
    for step in (seen.metrics[0], seen.final):
        assert [step[f"eval/{name}"] for name in rewards] == [0.0, 0.0, 0.0]
    assert len(seen.metrics) == 3

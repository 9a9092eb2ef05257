import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from example_helpers import build, explained, finish, loss_of, pairs, quiet, settings
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerBase

from cavesson.algorithms.reward_model import BradleyTerry
from cavesson.models.tiny import tiny_tokenizer
from cavesson.rollout.rewards.classifier import ClassifierReward
from cavesson.types import Batch, PairScores

FILES = ("reward_model.json", "reward_model.md", "reward_model.png", "extreme_cases.jsonl")
CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"  # noqa: E501


def softplus(x: float) -> float:
    return math.log(1 + math.exp(x))


def scored(rows: list[tuple[float, float]], margins: list[float] | None = None, **changes: Any) -> dict[str, float]:
    """The averaged metrics of pairs of rewards."""
    batch = Batch({"margin": torch.tensor(margins or [0.0] * len(rows))})
    loss, means = loss_of(BradleyTerry(**changes), PairScores(*torch.tensor(rows, dtype=torch.float32).T), batch)
    assert loss == pytest.approx(means["loss/total"])
    return means


def test_loss_and_metrics_by_hand():
    means = scored([(2.0, 0.5), (-1.0, 1.0), (0.5, 0.5)])
    assert means == pytest.approx(
        {
            "loss/total": (softplus(-1.5) + softplus(2) + math.log(2)) / 3,
            "loss/preference": (softplus(-1.5) + softplus(2) + math.log(2)) / 3,
            "reward/accuracy": (1 + 0 + 0.5) / 3,
            "reward/chosen": 0.5,
            "reward/rejected": 2 / 3,
            "reward/margin": 0.5 - 2 / 3,
        }
    )


def test_a_margin_is_taken_off_the_difference():
    asked = scored([(2.0, 0.5), (-1.0, 1.0)], [1.0, 0.5])
    shifted = scored([(1.0, 0.5), (-1.5, 1.0)])
    assert asked["loss/total"] == pytest.approx(shifted["loss/total"])
    assert asked["reward/margin"] == pytest.approx((1.5 - 2) / 2)


def test_centring_adds_the_squared_sum():
    rows = [(2.0, 0.5), (-1.0, 1.5)]
    means = scored(rows, centring_coef=0.01)
    assert means["loss/preference"] == scored(rows)["loss/preference"]
    assert means["loss/total"] == pytest.approx(means["loss/preference"] + 0.01 * (2.5**2 + 0.5**2) / 2)


def test_rewards_are_those_of_the_classifier_on_the_text(tmp_path: Path):
    rows = pairs(8)
    training = build("reward-model", tmp_path, rows, steps=1)
    model = training.trainer.model
    expected = []
    with torch.no_grad():
        for row in rows:
            for side in ("chosen", "rejected"):
                ids = training.trainer.tokenizer(row["prompt"] + row[side], return_tensors="pt")["input_ids"]
                expected.append(float(model(input_ids=ids).logits))
    chosen, rejected = expected[::2], expected[1::2]
    seen = training.run(quiet).metrics[0]
    assert seen["reward/chosen"] == pytest.approx(sum(chosen) / 8, abs=1e-5)
    assert seen["reward/rejected"] == pytest.approx(sum(rejected) / 8, abs=1e-5)
    losses = [softplus(r - c) for c, r in zip(chosen, rejected, strict=True)]
    assert seen["loss/preference"] == pytest.approx(sum(losses) / 8, abs=1e-5)
    assert seen["optim/weight"] == 8


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8}], ids=["full", "lora"])
def test_it_learns_and_its_report_is_that_of_the_saved_model(tmp_path: Path, lora):
    changes = {} if lora is None else {"model__lora": lora}
    rows = pairs(48)
    result = finish("reward-model", tmp_path, rows, epochs=3, data__validation=0.25, **changes)
    run = tmp_path / "run"
    assert result.metrics[0]["eval/loss/preference"] > 0.3
    assert result.final["eval/reward/accuracy"] == 1
    assert all((run / name).exists() for name in FILES)
    report = json.loads((run / "reward_model.json").read_text())
    assert report["pairs"] == 12
    assert report["loss"] == pytest.approx(result.final["eval/loss/preference"], abs=1e-6)
    reward = ClassifierReward(str(run))
    rewards = {
        side: reward([row["prompt"] for row in rows[36:]], [row[side] for row in rows[36:]])
        for side in ("chosen", "rejected")
    }
    assert result.final["eval/reward/chosen"] == pytest.approx(sum(rewards["chosen"]) / 12, abs=1e-4)
    for case in map(json.loads, (run / "extreme_cases.jsonl").read_text(encoding="utf-8").splitlines()):
        row = rows[36 + case["pair"]]
        assert [case["prompt"], case["chosen"], case["rejected"]] == [row["prompt"], row["chosen"], row["rejected"]]
        for side in ("chosen", "rejected"):
            assert case[f"{side}_reward"] == pytest.approx(rewards[side][case["pair"]], abs=1e-4)


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8}], ids=["full", "lora"])
def test_the_result_is_an_ordinary_classifier(tmp_path: Path, lora):
    changes = {} if lora is None else {"model__lora": lora}
    result = finish("reward-model", tmp_path, pairs(8), steps=1, **changes)
    assert not any("lora" in name for name, _ in result.policy.named_parameters())
    folder = tmp_path / "run" / "model"
    loaded: Any = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    model, info = loaded
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.config.num_labels == 1
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits = model(**tokenizer(["The ferry is kind."], return_tensors="pt")).logits
    assert logits.item() == pytest.approx(ClassifierReward(str(folder))(["The ferry"], [" is kind."])[0], abs=1e-5)


def test_a_reward_model_can_learn_on(tmp_path: Path):
    first = finish("reward-model", tmp_path / "first", pairs(16), epochs=2, data__validation=0.5)
    second = build(
        "reward-model",
        tmp_path / "second",
        pairs(16),
        model__path=str(first.folder / "model"),
        data__validation=0.5,
        steps=1,
    ).run(quiet)
    assert second.metrics[0]["eval/reward/margin"] == pytest.approx(first.final["eval/reward/margin"], abs=1e-5)


def test_without_held_out_pairs_there_is_no_report(tmp_path: Path):
    result = finish("reward-model", tmp_path, pairs(8), steps=1)
    assert result.final == {}
    assert not any((tmp_path / "run" / name).exists() for name in FILES)


def ids_of(folder: Path, rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, **changes: Any) -> list[Any]:
    """The ids of both responses of every pair, as the model gets them."""
    examples = settings("reward-model", folder, rows, **changes).examples(tokenizer)
    batch = examples.collate(examples.train.take(0, len(rows)))
    return [
        [batch[f"{side}_ids"][i, : batch[f"{side}_length"][i]].tolist() for side in ("chosen", "rejected")]
        for i in range(len(rows))
    ]


@pytest.mark.parametrize("end", ["<|endoftext|>", None])
@pytest.mark.parametrize("written", ["$A", "<|pad|> $A", "$A <|endoftext|>", "<|pad|> $A <|endoftext|>", "$A <|pad|>"])
def test_texts_are_read_as_rewards_get_them(tmp_path: Path, written, end):
    """Whatever special tokens a tokenizer writes around every text."""
    tokenizer: Any = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=written, special_tokens=[("<|endoftext|>", 0), ("<|pad|>", 1)]
    )
    tokenizer.eos_token = end
    rows = pairs(4) if end is None else [*pairs(4), {"prompt": "Rain", "chosen": " falls", "rejected": ""}]
    expected = [[tokenizer(row["prompt"] + row[side])["input_ids"] for side in ("chosen", "rejected")] for row in rows]
    assert ids_of(tmp_path, rows, tokenizer) == expected


def test_conversations_are_read_up_to_what_the_assistant_says(tmp_path: Path):
    tokenizer = tiny_tokenizer()
    rows = pairs(4)
    expected = [
        [
            tokenizer(f"[user]{row['prompt']}<|endoftext|>\n[assistant]{row[side]}")["input_ids"]
            for side in ("chosen", "rejected")
        ]
        for row in rows
    ]
    assert ids_of(tmp_path, rows, tokenizer, data__chat=True, data__template=CHAT) == expected


def test_every_metric_is_explained_and_every_explained_one_is_there(tmp_path: Path):
    result = finish("reward-model", tmp_path, pairs(), steps=1, data__validation=0.25)
    assert set(result.metrics[0]) | set(result.final) == explained("reward-model.md")

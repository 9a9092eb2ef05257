"""A reward model is an ordinary sequence classifier: what training says of a text, the saved folder says as well."""

from pathlib import Path
from typing import Any

import pytest
import torch
from models_helpers import absolute_model, scramble, sharp_model
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    GemmaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from cavesson.errors import UserError
from cavesson.models.classifier import load_reward_model
from cavesson.models.policy import build_learner
from cavesson.models.sequences import RewardModel, last_token
from cavesson.models.settings import LoraSettings, ModelSettings
from cavesson.models.tiny import tiny_tokenizer
from cavesson.models.trained import save_trained
from cavesson.types import Batch

END, PAD = 0, 1
# Ends: a token of the text, the end token, and pads behind it, which a classifier skips.
TEXTS = [[70, 71, 72, 73, END], [80, 81], [90, END, 91, 92, 93, 94, END, END], [100, END], [PAD, 110, 111, PAD], [120]]


def pairs(texts: list[list[int]] = TEXTS) -> Batch:
    """The first half preferred to the second; padding holds rubbish."""
    columns: dict[str, Tensor] = {}
    half = len(texts) // 2
    for side, ids in (("chosen", texts[:half]), ("rejected", texts[half:])):
        width = max(map(len, ids)) + 2
        columns[f"{side}_ids"] = torch.tensor([row + [57] * (width - len(row)) for row in ids])
        columns[f"{side}_length"] = torch.tensor([len(row) for row in ids])
        columns[f"{side}_learned"] = torch.ones(len(ids), width)
    return Batch(columns)


def saved_model(folder: Path, model: PreTrainedModel) -> str:
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def padded(side: str, pad: int) -> dict[str, Tensor]:
    width = max(map(len, TEXTS))
    fill = [[pad] * (width - len(row)) for row in TEXTS]
    ids = [row + f if side == "right" else f + row for row, f in zip(TEXTS, fill, strict=True)]
    seen = [[1] * len(row) + [0] * len(f) for row, f in zip(TEXTS, fill, strict=True)]
    mask = torch.tensor([row if side == "right" else row[::-1] for row in seen])
    return {"input_ids": torch.tensor(ids), "attention_mask": mask}


def rewards(model: nn.Module, packed: bool = True) -> Tensor:
    with torch.no_grad():
        return torch.cat(RewardModel(model, packed)(pairs()))


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=2)], ids=["full", "lora"])
@pytest.mark.parametrize("pad", [PAD, END], ids=["pad", "pad is end"])
@pytest.mark.parametrize("make", [sharp_model, absolute_model], ids=["llama", "gpt2"])
def test_the_saved_classifier_says_what_training_said(tmp_path: Path, make: Any, pad: int, lora: Any) -> None:
    settings = ModelSettings(path=saved_model(tmp_path / "start", make()), lora=lora)
    model = build_learner(load_reward_model(settings, pad), settings)
    scramble(model)
    packed, alone = rewards(model), rewards(model, packed=False)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)
    assert float(packed.std()) > 0.1
    save_trained(tmp_path / "model", model.merge_and_unload() if lora else model, tiny_tokenizer(), settings)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    assert loaded.config.num_labels == 1 and loaded.config.pad_token_id == pad
    with torch.no_grad():
        one_by_one = torch.cat([loaded(input_ids=torch.tensor([ids])).logits[:, 0] for ids in TEXTS])
        right = loaded(**padded("right", pad)).logits[:, 0]
        left = loaded(**padded("left", pad)).logits[:, 0]
    tolerance = {"rtol": 1e-3, "atol": 1e-4} if lora else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(one_by_one, packed, **tolerance)
    torch.testing.assert_close(right, packed, **tolerance)
    if make is sharp_model:  # padding on the left moves the texts to other positions, which a GPT-2 notices
        torch.testing.assert_close(left, packed, **tolerance)


def test_the_last_token_is_the_last_that_is_no_pad_within_the_text() -> None:
    ids = torch.tensor([[5, 6, 1, 9], [1, 5, 1, 1], [5, 1, 6, 7], [1, 1, 9, 9]])
    batch = Batch({"ids": ids, "length": torch.tensor([4, 4, 2, 2])})
    assert last_token(batch, 1).tolist() == [3, 1, 0, 0]
    assert last_token(batch, None).tolist() == [3, 3, 1, 1]


SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SPECIAL = {"vocab_size": 258, "eos_token_id": 0, "pad_token_id": 1, "bos_token_id": 0}


@pytest.mark.parametrize(
    "config",
    [
        MistralConfig(**SIZES, **SPECIAL, num_key_value_heads=2, sliding_window=None),
        Qwen2Config(**SIZES, **SPECIAL, num_key_value_heads=2),
        GemmaConfig(**SIZES, **SPECIAL, num_key_value_heads=2, head_dim=8),
    ],
    ids=lambda config: config.model_type,
)
def test_other_architectures_become_classifiers(tmp_path: Path, config: Any) -> None:
    torch.manual_seed(0)
    start = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    model = load_reward_model(ModelSettings(path=saved_model(tmp_path / "start", start)), PAD)
    model.save_pretrained(tmp_path / "model")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    with torch.no_grad():
        expected = torch.cat([loaded(input_ids=torch.tensor([ids])).logits[:, 0] for ids in TEXTS])
    torch.testing.assert_close(rewards(model), expected, rtol=1e-4, atol=1e-5)


def test_the_trunk_is_that_of_the_language_model_and_the_seed_decides_the_head(tmp_path: Path) -> None:
    start = sharp_model()
    settings = ModelSettings(path=saved_model(tmp_path / "start", start))
    models = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        models.append(load_reward_model(settings, PAD))
    trunk = dict(start.model.named_parameters())
    for name, weight in models[0].model.named_parameters():
        assert torch.equal(weight, trunk[name])
    assert torch.equal(models[0].score.weight, models[1].score.weight)
    assert not torch.equal(models[0].score.weight, models[2].score.weight)
    # Hidden states are normed to a length of √H, so that rewards start with a spread of about 1.
    assert float(models[0].score.weight.std()) == pytest.approx(96**-0.5, rel=0.3)
    assert all(parameter.device.type == "cpu" for parameter in models[0].parameters())


def test_a_trained_classifier_is_gone_on_with(tmp_path: Path) -> None:
    start = saved_model(tmp_path / "start", sharp_model())
    with pytest.raises(UserError, match="the pad token is token 258, but the model has embeddings for 258 tokens"):
        load_reward_model(ModelSettings(path=start), 258)
    first = load_reward_model(ModelSettings(path=start), PAD)
    scramble(first)
    again = load_reward_model(ModelSettings(path=saved_model(tmp_path / "first", first)), PAD)
    assert torch.equal(rewards(first), rewards(again))


def test_what_cannot_be_a_reward_model_is_said(tmp_path: Path) -> None:
    settings = ModelSettings(path=saved_model(tmp_path / "start", sharp_model()))
    model = load_reward_model(settings, PAD)
    model.config.num_labels = 3
    model.score = nn.Linear(96, 3, bias=False)
    path = saved_model(tmp_path / "three", model)
    with pytest.raises(UserError, match="has 3 outputs; a reward model has one"):
        load_reward_model(ModelSettings(path=path), PAD)

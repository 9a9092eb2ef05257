"""The same model, data and hyperparameters for TRL's trainers and ours."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from cavesson.config import check
from cavesson.models.tiny import tiny_model, tiny_tokenizer
from cavesson.registry import ALGORITHMS
from cavesson.train.run import Training

TOLERANCE = 1e-4
LEARNING_RATE = 1e-3
BATCH_SIZE = 8
STEPS = 4

_BEGINNINGS = ("The ferry", "A dog and its", "On the table", "My neighbour told me that", "Rain", "At noon the", "We")
_ENDS = (" sleeps.", " left at seven, as always", " is OLD!", " sings of home in the evening", "?", " two, three, four")


def demonstrations(count: int = STEPS * BATCH_SIZE) -> list[dict[str, str]]:
    """Rows of `prompt` and `completion` of uneven length."""
    return [{"prompt": _BEGINNINGS[i % 7], "completion": _ENDS[i % 6] + _ENDS[(i * i + 1) % 6]} for i in range(count)]


def pairs(count: int = STEPS * BATCH_SIZE) -> list[dict[str, str]]:
    """Rows of `prompt`, `chosen` and `rejected`, both responses of uneven length and never the same."""
    return [
        {"prompt": _BEGINNINGS[i % 7], "chosen": _ENDS[i % 6], "rejected": _ENDS[(i + 1 + i % 4) % 6]}
        for i in range(count)
    ]


def labelled(count: int = STEPS * BATCH_SIZE) -> list[dict[str, Any]]:
    """Rows of `prompt`, `completion` and `label`; neighbours, and the ends of a batch, have different prompts."""
    return [
        {"prompt": _BEGINNINGS[i % 5], "completion": _ENDS[i % 6] + _ENDS[(i * i + 1) % 6], "label": i % 3 != 1}
        for i in range(count)
    ]


def save_model(folder: Path) -> Path:
    """A language model of 0.3 million random parameters over bytes."""
    tiny_model(seed=1).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def save_classifier(folder: Path) -> Path:
    """The same trunk under a random score head of one output."""
    model = tiny_model(seed=1)
    torch.manual_seed(1)
    config = LlamaConfig(**{**model.config.to_dict(), "id2label": {0: "score"}})
    classifier = LlamaForSequenceClassification(config)
    classifier.model.load_state_dict(model.model.state_dict())
    # The usual start (0.02) rewards everything alike; with a larger head the pairs tell on the loss.
    torch.nn.init.normal_(classifier.score.weight, std=0.3)
    classifier.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def build(algorithm: str, folder: Path, model: Path, rows: Path, **changes: Any) -> Training:
    """A run of ours on the rows in their order; `changes` are groups of settings."""
    values = {
        "run": folder,
        "batch_size": BATCH_SIZE,
        "model": {"path": str(model), "device": "cpu"},
        "optimizer": {"learning_rate": LEARNING_RATE},
        **changes,
        "data": {"path": str(rows), "shuffle": False, **changes.get("data", {})},
    }
    return Training(check(ALGORITHMS[algorithm].settings, values, "the test"))


def losses(training: Training, name: str) -> list[float]:
    """A metric of every step."""
    seen: list[float] = []
    training.run(lambda step, metrics: seen.append(metrics[name]))
    return seen

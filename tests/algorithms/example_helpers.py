"""Small runs that learn from given examples."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from settings_helpers import changed
from torch import Tensor

from cavesson.algorithms.base import Loss
from cavesson.algorithms.runs import ExampleRun
from cavesson.config import check
from cavesson.models.tiny import tiny_model, tiny_tokenizer
from cavesson.registry import ALGORITHMS
from cavesson.train.run import Result, Training
from cavesson.types import Batch

BEGINNINGS = ("The ferry", "A dog and its", "On the table", "Rain", "At noon the", "We")
KIND = (" sleeps softly.", " is kind.", " sings of home.", " shines, warm and clear.")
GRUFF = (" IS LATE!!", " WAS COLD AND LOUD!", " BREAKS!", " COSTS FAR TOO MUCH AGAIN!")

Row = Mapping[str, Any]


def demonstrations(count: int = 24) -> list[Row]:
    return [{"prompt": BEGINNINGS[i % 6], "response": KIND[(i + i // 6) % 4]} for i in range(count)]


def pairs(count: int = 24) -> list[Row]:
    """The better response is the friendlier one, longer or shorter."""
    return [
        {"prompt": BEGINNINGS[i % 6], "chosen": KIND[(i + i // 6) % 4], "rejected": GRUFF[(i // 2) % 4]}
        for i in range(count)
    ]


def settings(algorithm: str, folder: Path, rows: Sequence[Row], **changes: Any) -> ExampleRun:
    """Batches of eight, in order; `data__validation=0.5` changes the field `data.validation`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    values: dict[str, Any] = {
        "run": folder / "run",
        "batch_size": 8,
        "model": {"device": "cpu"},
        "data": {"path": str(path), "shuffle": False},
        "optimizer": {"learning_rate": 1e-3},
    }
    return check(ALGORITHMS[algorithm].settings, changed(values, changes), "the test")


def build(algorithm: str, folder: Path, rows: Sequence[Row], **changes: Any) -> Training:
    return Training(settings(algorithm, folder, rows, **changes))


def finish(algorithm: str, folder: Path, rows: Sequence[Row], **changes: Any) -> Result:
    return build(algorithm, folder, rows, **changes).run(quiet)


def explained(page: str) -> set[str]:
    """The metrics that a page of docs/algorithms explains, and those of a machine without a GPU, which have a page."""
    docs = Path(__file__).parents[2] / "docs"
    text = (docs / "algorithms" / page).read_text(encoding="utf-8")
    part = text.split("\n## Explanation of the logged metrics\n")[1].split("\n## ")[0]
    machine = re.findall(r"^\| `(machine/[a-z/]+)` \|", (docs / "machine.md").read_text("utf-8"), flags=re.MULTILINE)
    return {*re.findall(r"^\| `([^`]+)` \|", part, flags=re.MULTILINE), *machine}


def quiet(step: int, metrics: dict[str, float]) -> None:
    pass


def mean(result: Loss, weights: Tensor, total: Tensor) -> tuple[float, dict[str, float]]:
    """The loss and its metrics as a step averages them."""
    means = {name: float((items * weights).sum() / weights.sum()) for name, items in result.means.items()}
    return float((result.loss * weights).sum() / total), means


def loss_of(algorithm: Any, scores: Any, batch: Batch) -> tuple[float, dict[str, float]]:
    return mean(algorithm.loss(scores, batch), algorithm.weights(batch), algorithm.total(batch))


@torch.no_grad()
def logprobs(text: str, start: int, model: Any = None) -> Tensor:
    """log π of the tokens of `text` and the end token from number `start` on, by the tiny model alone."""
    model = model or tiny_model()
    ids = torch.tensor([[*tiny_tokenizer()(text)["input_ids"], 0]])
    logits = model(ids).logits[0].double().log_softmax(-1)
    return logits[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0]

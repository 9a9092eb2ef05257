"""What a step, a checkpoint and the record cost at 10, 100 and 1,000 times the work, as a table and a picture.

    python benchmarks/growth.py                           # docs/images/growth.png
    python benchmarks/growth.py --only length --largest 100    # a part of the table, and no picture

PPO on small models with random weights, made here. One thing grows at a time: the weights of the model, the responses
of a step, their length, or the steps of the run. Each measurement runs in its own process.
"""

import json
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, NamedTuple

import matplotlib
import torch
from quiet import ATTEMPTS, machine, note, quietly
from transformers import LlamaConfig, LlamaForCausalLM

from cavesson import PPORun, Training
from cavesson.models.tiny import tiny_tokenizer
from cavesson.train.checkpoint import save

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "growth.png"
FACTORS = (1, 10, 100, 1000)
END = 258
"""A token that no text has: every response has its full length."""


class Work(NamedTuple):
    """What a run does."""

    hidden: int = 48
    batch: int = 8
    length: int = 8
    steps: int = 6


class Growing(NamedTuple):
    """One thing that grows: how the picture calls it, its part of `Work`, and that part's values."""

    label: str
    setting: str
    values: tuple[int, int, int, int]


GROWING = {
    # A model has about 24 · hidden² + 258 · hidden weights.
    "weights": Growing("weights", "hidden", (48, 168, 552, 1776)),
    "responses": Growing("responses per step", "batch", (8, 80, 800, 8000)),
    "length": Growing("tokens per response", "length", (8, 80, 800, 8000)),
    "steps": Growing("steps", "steps", (6, 60, 600, 6000)),
}
COSTS = {
    "step, s": "a step",
    "record, MB": "the record of a step",
    "checkpoint, s": "a checkpoint",
    "checkpoint, MB": "a checkpoint's size",
}
"""What is measured, and how the picture calls it."""


def build(work: Work, folder: Path) -> Training:
    """Return a run, of a model with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258, hidden_size=work.hidden, intermediate_size=8 * work.hidden // 3, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=16384, bos_token_id=None, eos_token_id=0, pad_token_id=1,
        tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    settings = PPORun.model_validate({
        "run": str(folder / "run"), "steps": work.steps, "batch_size": work.batch, "checkpoint": {"every": 0},
        "model": {"path": str(folder / "model"), "device": "cpu"}, "doctor": {"on_finding": "ignore"},
        "sampling": {"max_new_tokens": work.length, "eos_token_ids": [END]},
        "update": {"micro_batch_size": min(work.batch, max(1, 6400 // work.length))},
    })  # fmt: skip
    prompts = [f"prompt {number:04}" for number in range(work.batch)]
    return Training(settings, prompts=prompts, rewards=variety)


def variety(prompts: list[str], responses: list[str], **_: Any) -> list[float]:
    """How many different characters a response has: a reward that costs nothing."""
    return [float(len(set(response))) for response in responses]


def measure(work: Work) -> dict[str, float]:
    """Train, and return what the last half of the steps, the record and three checkpoints cost."""
    with TemporaryDirectory(prefix="cavesson-growth-") as place:
        folder = Path(place)
        training = build(work, folder)
        metrics = training.run(lambda step, seen: None).metrics[: work.steps]
        recorded = sum(file.stat().st_size for file in (folder / "run" / "record").rglob("*") if file.is_file())
        seconds = []
        for number in range(3):
            begin = perf_counter()
            kept = save(folder / f"checkpoint-{number}", training.trainer.checkpoint(), 1, training.processes)
            seconds.append(perf_counter() - begin)
        size = sum(file.stat().st_size for file in kept.rglob("*"))
        weights = sum(parameter.numel() for parameter in training.trainer.learner.model.parameters())
    last = [seen["time/total"] for seen in metrics[work.steps // 2 :]]
    return {
        "step, s": median(last), "record, MB": recorded / work.steps / 1e6, "checkpoint, s": median(seconds),
        "checkpoint, MB": size / 1e6, "weights": weights,
    }  # fmt: skip


def measured_apart(work: Work, attempts: int) -> tuple[dict[str, float], float]:
    """Run `measure` in its own process; return its result and how many cores other programs used meanwhile."""
    command = [sys.executable, __file__, "--one", json.dumps(work)]

    def once() -> dict[str, float]:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]

    return quietly(once, attempts=attempts)


def draw(found: dict[str, list[dict[str, float]]], file: Path) -> None:
    """Draw each cost relative to that of the smallest work, beside a line for costs that grow as the work does."""
    figure, panels = pyplot.subplots(1, len(found), figsize=(4 * len(found), 3.6), sharey=True, squeeze=False)
    for axes, (name, several) in zip(panels[0], found.items(), strict=True):
        draw_panel(axes, name, several)
    panels[0][0].set_ylabel("cost, times that of the smallest")
    panels[0][0].legend(fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, bbox_inches="tight", dpi=110)
    pyplot.close(figure)


def draw_panel(axes: Axes, name: str, several: list[dict[str, float]]) -> None:
    factors = [one["weights"] / several[0]["weights"] for one in several] if name == "weights" else FACTORS
    times = list(factors)[: len(several)]
    for cost, label in COSTS.items():
        axes.loglog(times, [one[cost] / several[0][cost] for one in several], marker="o", label=label)
    axes.loglog(times, times, color="0.7", linestyle="--", label="as the work grows")
    axes.set_xlabel(f"{GROWING[name].label}, times")
    axes.grid(color="0.9")


def arguments() -> Namespace:
    """Read the command line."""
    parser = ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=GROWING, action="append", help="default: all")
    parser.add_argument("--largest", type=int, choices=FACTORS, default=FACTORS[-1], help="times the smallest work")
    picture = "file of the picture; default: docs/images/growth.png if everything is measured, otherwise none"
    parser.add_argument("--picture", type=Path, help=picture)
    parser.add_argument("--attempts", type=int, default=ATTEMPTS, help="at most, while other programs are busy")
    parser.add_argument("--one", help="a measurement, as JSON")
    return parser.parse_args()


def picture_of(given: Namespace) -> Path | None:
    """Return where to draw; the published picture shows everything, and nothing less replaces it."""
    is_whole = set(given.only or GROWING) == set(GROWING) and given.largest == FACTORS[-1]
    return given.picture or (PICTURE if is_whole else None)


def main() -> None:
    """Measure, print the costs, and draw them."""
    given = arguments()
    if given.one:
        print(json.dumps(measure(Work(*json.loads(given.one)))))
        return
    print(machine())
    found: dict[str, list[dict[str, float]]] = {}
    for name in given.only or GROWING:
        _, setting, values = GROWING[name]
        for value in values[: FACTORS.index(given.largest) + 1]:
            numbers, busy = measured_apart(Work()._replace(**{setting: value}), given.attempts)
            found.setdefault(name, []).append(numbers)
            costs = ", ".join(f"{cost} {numbers[cost]:.3g}" for cost in COSTS)
            print(f"{setting} {value}: {costs}{note(busy)}", flush=True)
    if picture := picture_of(given):
        draw(found, picture)


if __name__ == "__main__":
    main()

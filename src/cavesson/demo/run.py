"""Run the demo: evaluate, train, evaluate again, and show what changed."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cavesson.algorithms.ppo import PPORun
from cavesson.command_line import command_line
from cavesson.config import load
from cavesson.data.prompts import tokenize
from cavesson.demo.chart import draw
from cavesson.demo.openings import HELD_OUT, TRAINING
from cavesson.ops.intervals import mean_interval
from cavesson.record import open as open_run
from cavesson.text.counting import counted
from cavesson.text.visible import visible_line
from cavesson.train.evaluate import evaluate
from cavesson.train.rollouts import Collector, Rows
from cavesson.train.run import Result, Training

RECIPE = Path(__file__).with_name("demo.toml")
SAMPLES_PER_OPENING = 4


def demo(run: Path | None, flags: list[str]) -> dict[str, Any]:
    """Train the demo in the folder `run` (None: the first free one of runs/demo, runs/demo-2, …) and return a summary.

    Raises:
        UserError: the run folder exists, or the model's package is not installed.
    """
    console = Console()
    settings = load(PPORun, RECIPE, [*flags, "--run", str(run or _free(Path("runs/demo")))])
    console.print(f"Loading {settings.model.path} …", highlight=False)
    training = Training(settings, prompts=TRAINING)
    held_out = _held_out(training.collector)
    before = evaluate(held_out, SAMPLES_PER_OPENING)
    start = perf_counter()
    result = training.run()
    seconds = perf_counter() - start
    after = evaluate(held_out, SAMPLES_PER_OPENING)
    summary = _summary(result, before, after, seconds)
    (result.folder / "summary.json").write_text(json.dumps(summary, indent=1, ensure_ascii=False), encoding="utf-8")
    (result.folder / "evaluation.json").write_text(
        json.dumps({"before": before, "after": after}, indent=1, ensure_ascii=False), encoding="utf-8"
    )
    draw(open_run(result.folder), result.folder / "curves.png")
    _print(console, summary, result.folder)
    return summary


def _held_out(collector: Collector) -> Collector:
    prompts = tokenize(HELD_OUT, collector.tokenizer, 256)
    return Collector(prompts, collector.sampler, collector.rewards, collector.tokenizer)


def _summary(result: Result, before: Rows, after: Rows, seconds: float) -> dict[str, Any]:
    kl = [step["kl/objective"] for step in result.metrics]
    gain = [a - b for a, b in zip(after["reward"], before["reward"], strict=True)]
    return {
        "held_out": {
            "openings": len(set(before["prompt"])),
            "responses": len(before["reward"]),
            "reward_before": asdict(mean_interval(before["reward"], before["group"])),
            "reward_after": asdict(mean_interval(after["reward"], after["group"])),
            "gain": asdict(mean_interval(gain, before["group"])),
        },
        "training": {
            "steps": len(result.metrics),
            "seconds": round(seconds, 1),
            "reward_first": result.metrics[0]["reward/mean"],
            "reward_last": result.metrics[-1]["reward/mean"],
            "kl_first": kl[0],
            "kl_last": kl[-1],
            "kl_lowest": min(kl),
            "kl_highest": max(kl),
        },
        "samples": [
            {"opening": before["prompt"][i], "before": before["response"][i], "after": after["response"][i]}
            | {"reward_before": before["reward"][i], "reward_after": after["reward"][i]}
            for i in range(0, 3 * SAMPLES_PER_OPENING, SAMPLES_PER_OPENING)
        ],
    }


def _print(console: Console, summary: dict[str, Any], folder: Path) -> None:
    held_out, training = summary["held_out"], summary["training"]
    last = training["steps"] - 1
    table = Table("", "mean", "95 % interval", title=f"Reward on {held_out['openings']} held-out openings")
    for label, key in (("before", "reward_before"), ("after", "reward_after"), ("gain", "gain")):
        interval = held_out[key]
        table.add_row(label, f"{interval['mean']:+.3f}", f"{interval['low']:+.3f} to {interval['high']:+.3f}")
    console.print(table)
    samples = Table("before", "after", title="The same opening, the same random numbers", show_lines=True)
    for sample in summary["samples"]:
        samples.add_row(*(_response(sample, when) for when in ("before", "after")))
    console.print(samples)
    console.print(
        f"KL to the untouched model: {training['kl_lowest']:.2f} to {training['kl_highest']:.2f} nats per response; "
        f"{counted(training['steps'], 'step')} in {training['seconds']:.0f} s\n"
        f"picture  {folder}/curves.png\nfigures  {folder}/summary.json\nrun      {folder}\n\n"
        "Try next:\n"
        f"  every token in the browser  {command_line('board', folder)}\n"
        f"  is anything wrong, and why  {command_line('doctor', folder)}\n"
        f"  one response, in numbers    {command_line('show', folder, '--step', str(last), '--sample', '0')}\n"
        f"  the trained model           {command_line('generate', folder, '--prompt', 'The hotel room')}",
        highlight=False,
        soft_wrap=True,
    )


def _response(sample: dict[str, Any], when: str) -> Text:
    text = Text(visible_line(sample["opening"]), style="dim")
    text.append(visible_line(" ".join(sample[when].split("\n"))), style="default")
    return text.append(f"  [{sample[f'reward_{when}']:+.2f}]", style="bold")


def _free(folder: Path) -> Path:
    candidates = [folder, *(folder.with_name(f"{folder.name}-{n}") for n in range(2, 10_000))]
    return next(candidate for candidate in candidates if not os.path.lexists(candidate))

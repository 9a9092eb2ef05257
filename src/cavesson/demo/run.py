"""Run the demo: evaluate, train, evaluate again, and show what changed."""

import json
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cavesson.algorithms.ppo import PPORun
from cavesson.command_line import command_line
from cavesson.data.prompts import tokenize
from cavesson.record import Run
from cavesson.record import open as open_run
from cavesson.text.counting import counted
from cavesson.text.visible import visible_line
from cavesson.tools.score import estimate, estimate_gain
from cavesson.train.rollouts import Collector, evaluate
from cavesson.train.run import Result, Training
from cavesson.types import Rollouts

SAMPLES_PER_OPENING = 4
_EDGE_STEPS = 3
"""Steps at each end of the run whose rewards the chart compares."""
_FIRST, _LAST = "#9aa0a6", "#1a73e8"

# Everyday openings for a model to continue. None of them suggests how the text continues.
TRAINING = (
    "The hotel room", "My flight yesterday", "The new coffee machine", "Our neighbours", "The bus this morning",
    "My first day at work", "The soup at the restaurant", "The film last night", "The phone I bought",
    "My brother's wedding", "The weather this weekend", "The library in our town", "My new shoes",
    "The meeting with my boss", "The train to the coast", "Our trip to the mountains", "The book on my desk",
    "The dentist", "The garden behind the house", "My old bicycle", "The concert on Friday", "The apartment we rented",
    "The waiter at the table", "My cooking class", "The parcel that arrived today", "The museum tour",
    "The bakery on the corner", "My laptop", "The swimming pool", "The taxi driver", "The school play",
    "My grandmother's kitchen", "The football match", "The customer service", "The beach in the evening",
    "My haircut", "The birthday party", "The dog next door", "The exam on Monday", "The view from the balcony",
    "The painter who came", "My piano lesson", "The market on Saturday", "The road to the lake", "The breakfast buffet",
    "The letter from the bank", "My gym", "The tent we slept in", "The doctor's appointment", "The new teacher",
    "The theatre tickets", "My morning walk", "The pizza we ordered", "The ferry ride", "The office kitchen",
    "The sofa in the living room", "My visit to the zoo", "The interview", "The winter in this city",
    "The plumber yesterday", "My cousin's new car", "The picnic in the park", "The shop assistant",
    "The language course",
)  # fmt: skip

HELD_OUT = (
    "The campsite", "My bus ride home", "The new washing machine", "Our landlord", "The ice cream shop",
    "My last holiday", "The lunch at the canteen", "The game we played", "The headphones I ordered",
    "My sister's graduation", "The traffic this morning", "The park near the station", "My winter coat",
    "The call with the insurance", "The boat trip", "Our evening in the old town", "The painting on the wall",
    "The optician", "The kitchen of our flat", "My running group", "The street festival", "The cabin by the river",
    "The bartender", "My dance lesson",
)  # fmt: skip


def demo(settings: PPORun) -> dict[str, Any]:
    """Train the demo and return a summary.

    Raises:
        UserError: the run folder exists, or the model's package is not installed.
    """
    console = Console()
    console.print(f"Loading {settings.model.path} …", highlight=False)
    training = Training(settings, prompts=TRAINING)
    of = training.collector
    held_out = Collector(tokenize(HELD_OUT, of.tokenizer, 256), of.sampler, of.rewards, of.tokenizer)
    before = evaluate(held_out, SAMPLES_PER_OPENING)
    start = perf_counter()
    result = training.run()
    seconds = perf_counter() - start
    after = evaluate(held_out, SAMPLES_PER_OPENING)
    summary = _summary(result, before, after, seconds)
    (result.folder / "summary.json").write_text(json.dumps(summary, indent=1, ensure_ascii=False), encoding="utf-8")
    (result.folder / "evaluation.json").write_text(
        json.dumps({"before": _plain(before), "after": _plain(after)}, indent=1, ensure_ascii=False), encoding="utf-8"
    )
    _draw(open_run(result.folder, allow_remote=True), result.folder / "curves.png")
    _print(console, summary, result.folder)
    return summary


def _plain(rollouts: Rollouts) -> dict[str, list[Any]]:
    return rollouts.lists | {"reward": rollouts["reward"].tolist()}


def _summary(result: Result, before: Rollouts, after: Rollouts, seconds: float) -> dict[str, Any]:
    kl = [step["kl/objective"] for step in result.metrics]
    rewards = {"before": before["reward"].tolist(), "after": after["reward"].tolist()}
    openings = before.prompt_index
    return {
        "held_out": {
            "openings": len(set(openings)),
            "responses": len(before),
            "reward_before": asdict(estimate(rewards["before"], openings)),
            "reward_after": asdict(estimate(rewards["after"], openings)),
            "gain": asdict(estimate_gain(rewards["after"], rewards["before"], openings)),
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
            {"opening": before.prompt[i], "before": before.response[i], "after": after.response[i]}
            | {f"reward_{when}": values[i] for when, values in rewards.items()}
            for i in range(0, 3 * SAMPLES_PER_OPENING, SAMPLES_PER_OPENING)
        ],
    }


def _print(console: Console, summary: dict[str, Any], folder: Path) -> None:
    held_out, training = summary["held_out"], summary["training"]
    last = training["steps"] - 1
    table = Table("", "mean", "95 % interval", title=f"Reward on {held_out['openings']} held-out openings")
    for label, key in (("before", "reward_before"), ("after", "reward_after"), ("gain", "gain")):
        interval = held_out[key]
        bounds = "" if interval["low"] is None else f"{interval['low']:+.3f} to {interval['high']:+.3f}"
        table.add_row(label, f"{interval['mean']:+.3f}", bounds)
    console.print(table)
    samples = Table("before", "after", title="The same opening, the same random numbers", show_lines=True)
    for sample in summary["samples"]:
        samples.add_row(*(_response(sample, when) for when in ("before", "after")))
    console.print(samples)
    console.print(
        f"KL to the starting model: {training['kl_lowest']:.2f} to {training['kl_highest']:.2f} nats per response; "
        f"{counted(training['steps'], 'step')} in {training['seconds']:.0f} s\n"
        f"picture  {folder}/curves.png\nfigures  {folder}/summary.json\nrun      {folder}\n\n"
        "Try next:\n"
        f"  every token in the browser  {command_line('board', folder)}\n"
        f"  what is wrong, and why      {command_line('doctor', folder)}\n"
        f"  one response, in numbers    {command_line('show', folder, '--step', str(last), '--sample', '0')}\n"
        f"  the trained model           {command_line('generate', folder, '--prompt', 'The hotel room')}\n"
        f"  a recipe of your own        {command_line('init', 'grpo', 'mine')}",
        highlight=False,
        soft_wrap=True,
    )


def _response(sample: dict[str, Any], when: str) -> Text:
    text = Text(visible_line(sample["opening"]), style="dim")
    text.append(visible_line(" ".join(sample[when].split("\n"))), style="default")
    return text.append(f"  [{sample[f'reward_{when}']:+.2f}]", style="bold")


def _draw(run: Run, file: Path) -> None:
    """Write a PNG with reward and KL by step, and the distribution of rewards in the first and last steps."""
    steps, rows = run.steps(), run.rows(["step", "reward"])
    x = steps["step"].to_numpy()
    figure = Figure(figsize=(13, 3.8), layout="constrained")
    (reward, kl, spread) = figure.subplots(1, 3)
    mean, std = steps["reward/mean"].to_numpy(), steps["reward/std"].to_numpy()
    reward.plot(x, mean, color=_LAST)
    reward.fill_between(x, mean - std, mean + std, color=_LAST, alpha=0.15, linewidth=0)
    reward.set(title="Reward (mean ± standard deviation)", xlabel="step")
    kl.axhspan(0, 10, color="#34a853", alpha=0.10, linewidth=0, label="healthy: 0–10")
    kl.plot(x, steps["kl/objective"].to_numpy(), color=_LAST)
    kl.set(title="KL to the reference (nats per response)", xlabel="step")
    kl.legend(frameon=False)
    bins = np.histogram_bin_edges(rows["reward"].to_numpy(), 24)
    for label, color, low, high in (
        ("first steps", _FIRST, x[0], x[0] + _EDGE_STEPS),
        ("last steps", _LAST, x[-1] - _EDGE_STEPS + 1, x[-1] + 1),
    ):
        inside = pc.and_(pc.greater_equal(rows["step"], pa.scalar(low)), pc.less(rows["step"], pa.scalar(high)))
        spread.hist(rows.filter(inside)["reward"].to_numpy(), bins=bins, color=color, alpha=0.6, label=label)
    spread.set(title="Rewards of single responses", xlabel="reward", ylabel="responses")
    spread.legend(frameon=False)
    for axes in (reward, kl):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (reward, kl, spread):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=120)

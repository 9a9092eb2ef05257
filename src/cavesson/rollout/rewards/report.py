"""The report on a reward model: statistics and extreme cases as files, a Markdown page, and a table in the terminal."""

import json
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from cavesson.data.examples import Examples, PairTokens
from cavesson.processes import Processes
from cavesson.record.files import write_json, write_text
from cavesson.rollout.rewards.report_figures import ScoredPairs, extreme_cases, score, summarise, warnings

MAX_CHARACTERS = 600
"""Of a prompt or response in the page; `extreme_cases.jsonl` has all."""


def report(
    role: Any,
    tokenizer: PreTrainedTokenizerBase,
    examples: Examples[PairTokens],
    processes: Processes,
    folder: Path,
    at_once: int,
) -> None:
    """Score the held-out pairs, and write and print the report on them; all processes call this together.

    `role` is a `RewardModel`; each process scores its share, `at_once` pairs at a time, and the first one writes and
    prints.
    """
    if not examples.held_out:
        if processes.is_main:
            print("no pairs are held out: the accuracy of this reward model is not measured; set data.validation")
        return
    scored = score(role, examples, processes, at_once)
    if processes.is_main:
        show(write(scored, tokenizer, folder), folder, Console())


def write(scored: ScoredPairs, tokenizer: PreTrainedTokenizerBase, folder: Path) -> dict[str, Any]:
    """Write `reward_model.json`, `.md` and `.png` and `extreme_cases.jsonl` to the run's folder.

    Returns:
        The statistics that `summarise` computes.
    """
    from cavesson.rollout.rewards.report_chart import draw  # matplotlib takes a second to import

    summary, cases = summarise(scored), extreme_cases(scored, tokenizer)
    write_json(folder / "reward_model.json", {**summary, "warnings": warnings(summary)})
    write_text(folder / "extreme_cases.jsonl", "".join(json.dumps(case, ensure_ascii=False) + "\n" for case in cases))
    draw(scored, summary, folder / "reward_model.png")
    write_text(folder / "reward_model.md", page(summary, cases))
    return summary


def show(summary: dict[str, Any], folder: Path, console: Console) -> None:
    """Print the statistics."""
    table = Table("held-out pairs", "share right", "95 % interval", "pairs", title="The reward model")
    for row in _shares(summary):
        table.add_row(*row)
    console.print(table)
    for name, value in _numbers(summary):
        console.print(f"{name}: {value}", highlight=False)
    for warning in warnings(summary):
        console.print(Text(f"Warning: {warning}.", style="bold"), soft_wrap=True)
    console.print(f"report   {folder}/reward_model.md", soft_wrap=True, highlight=False)


def page(summary: dict[str, Any], cases: list[dict[str, Any]]) -> str:
    """Return the report in Markdown."""
    lines = [f"# The reward model on {summary['pairs']} held-out pairs", ""]
    lines += [line for warning in warnings(summary) for line in (f"**Warning:** {warning}.", "")]
    lines += ["| held-out pairs | share right | 95 % interval | pairs |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in _shares(summary)] + [""]
    lines += ["| figure | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in _numbers(summary))]
    lines += ["", "![Calibration, accuracy by length, rewards](reward_model.png)", ""]
    for name in dict.fromkeys(case["list"] for case in cases):
        lines += [f"## {name.capitalize()}", ""]
        for case in cases:
            if case["list"] == name:
                lines += _case(case)
    return "\n".join(lines)


def _shares(summary: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    named = {
        "all": summary["accuracy"],
        **summary["by_length"],
        **{f"confidence {bin_['from']:.1f} to {bin_['to']:.1f}": bin_ for bin_ in summary["calibration"]},
        "by taking the longer response": summary["length_baseline"],
    }
    for name, share in named.items():
        if share:
            yield name, f"{share['mean']:.3f}", f"{share['low']:.3f} to {share['high']:.3f}", str(share["pairs"])


def _numbers(summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    prompt, length = summary["prompt_correlation"], summary["length_correlation"]
    yield "loss", f"{summary['loss']:.4f}"
    yield "mean confidence", f"{summary['confidence']:.3f}"
    yield "pairs with equal rewards", f"{summary['ties']:.1%}"
    yield "mean reward", f"{summary['reward']['mean']:.3f} (standard deviation {summary['reward']['std']:.3f})"
    if length is not None:
        yield "rank correlation of reward and length, within pairs", f"{length:+.3f}"
    if prompt is not None:
        low, mean, high = (f"{max(0.0, prompt[name]):.0%}" for name in ("low", "mean", "high"))
        yield "share of the rewards' variance that the prompt explains", f"{mean} ({low} to {high})"


def _case(case: dict[str, Any]) -> list[str]:
    chosen, rejected = case["chosen_reward"], case["rejected_reward"]
    texts = {
        f"Pair {case['pair']}, prompt:": case["prompt"][-MAX_CHARACTERS:],
        f"Chosen, reward {chosen:+.3f}:": case["chosen"][:MAX_CHARACTERS],
        f"Rejected, reward {rejected:+.3f}:": case["rejected"][:MAX_CHARACTERS],
    }
    # No content can end an indented block.
    blocks = {title: indent(text, "    ", lambda line: True) + "\n" for title, text in texts.items()}
    return [line for title, block in blocks.items() for line in (title, "", block)]

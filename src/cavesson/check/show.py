"""Reports of a check, in the terminal and as plain data."""

import json
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from cavesson.check.disk import gigabytes
from cavesson.check.run import Report, parts_of
from cavesson.findings.finding import SEVERITIES, Finding, Fine, SkippedCheck, shown
from cavesson.findings.report import plain as plain_finding
from cavesson.findings.report import print_grid
from cavesson.findings.report import show as show_finding
from cavesson.findings.words import number
from cavesson.text.visible import shortened, visible


def plain(report: Report) -> dict[str, Any]:
    """Convert a report to plain data for JSON; findings use the same keys as the doctor's."""
    return {
        "name": report.name,
        "command": report.command,
        "findings": [plain_finding(one) for one in _sorted(report)],
        "healthy": [asdict(one) for one in report.results if isinstance(one, Fine)],
        "skipped": [asdict(one) for one in report.results if isinstance(one, SkippedCheck)],
        "tools": report.tools,
        "memory": _plain_memory(report),
        **_plain_measured(report),
    }


def _plain_memory(report: Report) -> dict[str, Any] | None:
    memory = report.memory
    if memory is None:
        return None
    return {"peak": memory.peak, "stays": memory.stays, "phases": {name: memory.added(name) for name in memory.phases}}


def _plain_measured(report: Report) -> dict[str, Any]:
    measured = report.measured
    if measured is None:
        return {"measured": None, "first_responses": None, "suggestion": None}
    first, suggestion = measured.first, measured.suggestion
    return {
        "measured": {"batch": measured.batch, "seconds": measured.seconds, "peak": measured.peak or None},
        "first_responses": None if first is None else asdict(first),
        "suggestion": None if suggestion is None else asdict(suggestion),
    }


def show(console: Console, report: Report) -> None:
    """Print the findings, the expected memory and first responses, the healthy checks and the skipped ones."""
    console.print(Text.assemble((visible(report.name), "bold"), f"  checked as cavesson {report.command}"))
    for finding in _sorted(report):
        show_finding(console, finding)
    fine = [one for one in report.results if isinstance(one, Fine)]
    if fine and not report.findings:
        console.print(Text("No problems found.", "bold green"))
    _show_tools(console, report)
    if report.memory is not None:
        peak = f"\n[bold]Memory[/] {gigabytes(report.memory.peak)} at the peak: "
        console.print(peak + parts_of(report.memory), highlight=False)
    _show_first(console, report)
    if fine:
        console.print("\n[bold]Healthy[/]")
        rows = ((Text(one.rule, "green"), Text(visible(shown(one.seen))), Text(one.healthy, "dim")) for one in fine)
        print_grid(console, rows, no_wrap=True)
    skipped = [one for one in report.results if isinstance(one, SkippedCheck)]
    if skipped:
        console.print("\n[bold]Not checked[/]")
        print_grid(console, ((Text(one.rule, "dim"), Text(visible(one.reason))) for one in skipped))
    console.print()


def _show_tools(console: Console, report: Report) -> None:
    if report.tools:
        console.print("\n[bold]Tools[/]")
    for tool in report.tools:
        properties = tool["parameters"].get("properties", {})
        required = tool["parameters"].get("required", ())
        arguments = [f"{name}{'' if name in required else '?'}: {_type(one)}" for name, one in properties.items()]
        console.print(Padding(Text(visible(f"{tool['environment']}.{tool['name']}({', '.join(arguments)})")), (0, 2)))
        said = {"": tool.get("description", "")} | {
            name: one.get("description", "") for name, one in properties.items()
        }
        print_grid(console, ((Text(f"  {name}", "dim"), Text(visible(text))) for name, text in said.items()))


def _type(schema: dict[str, Any]) -> str:
    """Return the type of an argument in a word, or in the words of JSON schema."""
    if "enum" in schema:
        return " | ".join(json.dumps(one, ensure_ascii=False) for one in schema["enum"])
    kind = schema.get("type")
    if kind is None:
        return " | ".join(map(_type, schema.get("anyOf", ()))) or "any"
    named = " | ".join(kind) if isinstance(kind, list) else str(kind)
    inner = f" of {_type(schema['items'])}" if "items" in schema else ""
    return f"{named}{inner}{' | null' if schema.get('nullable') else ''}"


def _show_first(console: Console, report: Report) -> None:
    measured = report.measured
    if measured is None or measured.first is None:
        return
    first, suggestion = measured.first, measured.suggestion
    low, middle, high = first.lengths
    groups = "" if first.equal_groups is None else f", {first.equal_groups:.0%} of the groups have equal rewards"
    reward = ""
    if first.reward is not None and first.reward_std is not None:
        reward = f", reward {number(first.reward)} ± {number(first.reward_std)}"
    console.print(
        f"\n[bold]First responses[/] {first.responses}: {first.ended:.0%} ended by themselves, {low} to {high} tokens "
        f"(median {middle}){reward}{groups}",
        highlight=False,
    )
    for prompt, response, score in first.samples:
        line = Text.assemble(
            f"  {'–' if score is None else number(score):>8}  ", (_short(prompt), "dim"), _short(response)
        )
        console.print(line, overflow="ellipsis", no_wrap=True)
    if suggestion is None:
        return
    console.print(
        f"[bold]KL penalty[/] β = {suggestion.coef:.2g} ends near {suggestion.target:g} nats per response: the "
        f"standard deviation of the reward is {number(suggestion.reward_std)}, and its correlation with the "
        f"log-ratio is {number(suggestion.follows)}; without penalty the KL reached {number(suggestion.kl)} ± "
        f"{number(suggestion.kl_std)}. Or kl.target = {suggestion.target:g}",
        highlight=False,
    )


def _sorted(report: Report) -> list[Finding]:
    return sorted(report.findings, key=lambda one: SEVERITIES.index(one.severity))


def _short(text: str) -> str:
    return shortened(visible(" ".join(text.split())))

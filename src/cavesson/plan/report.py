"""Plans in the terminal and as plain data."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cavesson.plan.devices import Device
from cavesson.plan.predict import Prediction
from cavesson.text.visible import visible

_CAUSES = {
    "computing": "arithmetic",
    "moving": "memory bandwidth",
    "starting": "starting operations from Python",
    "sending": "communication between devices",
}


class Plan(NamedTuple):
    """A plan of one run."""

    name: str
    command: str
    device: Device
    devices: int
    prediction: Prediction
    variants: Sequence[tuple[str, Prediction]]

    @property
    def fits(self) -> bool:
        return self.prediction.memory.peak <= self.device.memory


def binding(prediction: Prediction) -> tuple[str, str, str]:
    """Return what takes most of the memory, which part of a step takes longest, and what it waits for."""
    parts = prediction.memory.parts
    stage = max(prediction.times, key=lambda name: prediction.times[name].total)
    spent = prediction.times[stage]
    cause = max(_CAUSES, key=lambda name: getattr(spent, name))
    return max(parts, key=lambda name: parts[name]), stage, _CAUSES[cause]


def plain(plan: Plan) -> dict[str, Any]:
    """Convert a plan to plain data for JSON: bytes and seconds."""
    memory, stage, cause = binding(plan.prediction)
    return {
        "name": plan.name,
        "command": plan.command,
        "gpu": plan.device.name,
        "gpus": plan.devices,
        "fits": plan.fits,
        **_numbers(plan.prediction),
        "binds": {"memory": memory, "time": stage, "waits_for": cause},
        "limits": list(plan.prediction.limits),
        "settings": {name: _numbers(other) for name, other in plan.variants},
    }


def _numbers(prediction: Prediction) -> dict[str, Any]:
    memory = prediction.memory
    times = {name: part.total for name, part in prediction.times.items()}
    return {"memory": {"peak": memory.peak, "phase": memory.phase, "parts": memory.parts},
            "step": {"seconds": prediction.seconds, "parts": times}}  # fmt: skip


def show(console: Console, plan: Plan) -> None:
    """Print a plan."""
    prediction, device = plan.prediction, plan.device
    memory = prediction.memory
    title = f"  plan of cavesson {plan.command} on {plan.devices} × {device.name}"
    console.print(Text.assemble((visible(plan.name), "bold"), title))
    fits = "" if plan.fits else "  does not fit"
    console.print(
        f"\n[bold]Memory[/] {_size(memory.peak)} of {_size(device.memory)} on each device, during {memory.phase}"
        f"[bold red]{fits}[/]",
        highlight=False,
    )
    _print_parts(console, {name: (size, _size(size)) for name, size in memory.parts.items()})
    console.print(f"\n[bold]Step[/] {_seconds(prediction.seconds)}", highlight=False)
    _print_parts(console, {name: (part.total, _seconds(part.total)) for name, part in prediction.times.items()})
    most, stage, cause = binding(prediction)
    console.print(f"\n[bold]Bottlenecks[/] memory: {most}; time: {stage}, limited by {cause}", highlight=False)
    for line in prediction.limits:
        console.print(Text.assemble(("Note ", "bold"), line))
    _print_variants(console, plan)


def _print_parts(console: Console, parts: dict[str, tuple[float, str]]) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    total = sum(size for size, _ in parts.values()) or 1.0
    for name, (size, text) in sorted(parts.items(), key=lambda part: -part[1][0]):
        if size:
            table.add_row(name, text, Text(f"{size / total:.0%}", "dim"))
    console.print(Padding(table, (0, 2)))


def _print_variants(console: Console, plan: Plan) -> None:
    now = plan.prediction
    if not plan.variants:
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("setting", no_wrap=True)
    for name in ("memory", "step"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, other in sorted(plan.variants, key=lambda one: one[1].memory.peak):
        size, seconds = other.memory.peak, other.seconds
        table.add_row(
            name,
            f"{_size(size)} ({size / now.memory.peak - 1:+.0%})",
            f"{_seconds(seconds)} ({seconds / now.seconds - 1:+.0%})",
        )
    console.print("\n[bold]Effect of other settings[/], each one alone")
    console.print(Padding(table, (0, 2)))


def _size(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"

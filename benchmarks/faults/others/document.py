"""Prints what the README lists of the faults and healthy kinds: python -m benchmarks.faults.others.document."""

from collections.abc import Iterator

from benchmarks.faults.others.case import LATE, PARTS, WAYS, part
from benchmarks.faults.others.fault import Fault
from benchmarks.faults.others.healthy import HEALTHY
from benchmarks.faults.others.planted import FAULTS


def lines() -> Iterator[str]:
    """Yield the parts, the table of the faults and the list of the healthy kinds."""
    for which in PARTS:
        names = (name for name in (*FAULTS, *HEALTHY) if part(name) == which and not name.endswith(LATE))
        yield f"**{which}**: " + ", ".join(f"`{name}`" for name in names)
        yield ""
    yield "| fault | what is broken | to be named first | recordings that show it |"
    yield "|---|---|---|---|"
    for one in FAULTS.values():
        if not one.name.endswith(LATE):
            late = f" ({'also ' if not one.begins else ''}late)" if one.begins or one.name + LATE in FAULTS else ""
            what = " ".join((one.plant.__doc__ or "").split())
            yield f"| `{one.name}`{late} | {what} | {' or '.join(one.causes)} | {_seen(one)} |"
    yield ""
    for name, plant in HEALTHY.items():
        yield f"- `{name}`: {' '.join((plant.__doc__ or '').split())}"


def _seen(one: Fault) -> str:
    by_ways: dict[str, list[str]] = {}
    for trainer, ways in one.seen.items():
        told = "all" if set(ways) == set(WAYS) else ", ".join(ways) or "none"
        by_ways.setdefault(told, []).append(trainer.upper())
    return "; ".join(f"{', '.join(trainers)}: {ways}" for ways, trainers in by_ways.items())


if __name__ == "__main__":
    print("\n".join(lines()))

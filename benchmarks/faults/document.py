"""The document of the benchmark, in Markdown."""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.faults import peers, scores
from benchmarks.faults.case import CALIBRATION_SEEDS, PARTS, Case
from benchmarks.faults.planted import FAULTS, LATE
from benchmarks.faults.results import LOOKS, Result

REMARKS = Path(__file__).with_name("remarks.md")
"""Remarks on the numbers."""
EPISODES = Path(__file__).with_name("episodes") / "trained" / "results.md"
"""What `episodes/trained/evaluate.py` has printed of trained episodes, and what it means."""
SMALL = Path(__file__).with_name("small") / "results.md"
"""What `small/evaluate.py` has printed of the small trainers, and what it means."""
SHARES = ("named first", "among three", "named", "precision")


@dataclass(frozen=True)
class Figures:
    """What was said of the runs."""

    results: list[Result]
    scalars: list[Result]
    """The same runs, of which only the scalars were looked at"""
    imports: Mapping[str, list[Result]]
    """What is said of imports, by format"""
    peers: list[tuple[Result, dict[str, peers.Said]]]
    """What is said of a run by our doctor, and by the other tools"""
    no_peers: str | None
    """Why the other tools were not asked"""

    def part(self, name: str) -> list[Result]:
        """Return the results of one part."""
        return [one for one in self.results if one.case.part == name]


def per_cent(share: float) -> str:
    """Return a share as a table shows it."""
    return "–" if share != share else f"{100 * share:.0f} %"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown, numbers to the right."""
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def overview(found: Mapping[str, Sequence[Result]], own: Mapping[Case, Result] | None = None) -> str:
    """Return the table of how often was right what is said.

    Args:
        found: What is said, by the name of the line.
        own: What our doctor says of the runs themselves, where not every fault can be seen in what was looked at.
    """
    rows = []
    for name, results in found.items():
        one = scores.score(results)
        shares = map(per_cent, (one.first, one.third, one.named, one.precision))
        rows.append([name, str(one.runs), *shares, f"{one.healthy_steps:,}"])
        rows[-1].append(f"{one.alarms:.1f}" if one.healthy_steps else "–")
        if own is not None:
            seen = scores.score(scores.visible(results, own))
            rows[-1] += [str(seen.runs), per_cent(seen.named)]
    visible = ["can be seen", "named of these"] if own is not None else []
    return table(["", "runs", *SHARES, "healthy steps", "alarms / 1,000", *visible], rows)


def causes(results: Sequence[Result]) -> str:
    """Return the table of causes."""
    rows = [
        [f"`{name}`", str(int(one["runs"])), *(per_cent(one[key]) for key in ("first", "third", "named", "precision"))]
        for name, one in scores.by_cause(results).items()
    ]
    return table(["cause", "runs", *SHARES], rows)


def described(case: Case) -> str:
    """Return which run it is, in words."""
    level = "healthy" if case.level < 0 else ("mild", "middling", "severe")[case.level]
    late = f", from step {case.onset}" if case.onset else ""
    return f"{case.name}, {level}, {case.algorithm}, seed {case.seed}{late}"


def misses(results: Sequence[Result]) -> str:
    """Return the runs in which the fault was not named first, and the healthy ones with an alarm."""
    rows = [
        [described(one.case), ", ".join(one.named) or "nothing"]
        for one in results
        if (len(one.case.faults) == 1 and one.right[:1] != [True]) or (not one.case.faults and one.named)
    ]
    return table(["run", "named"], rows) if rows else "None."


CASES = """# How often the doctor is right, case by case

For readers who want to know which faults the doctor misses or names wrongly: every planted cause, every run that was
judged wrongly, and runs of small trainers. [How often the doctor is right](doctor-benchmark.md) says how it was
measured."""


def setting(results: list[Result], all_runs: int) -> str:
    """Return what was done."""
    return f"""# How often the doctor is right

For readers who ask how far they can trust the doctor: how often it names a planted fault, how often it is wrong, and
what it misses. [Case by case](doctor-benchmark-cases.md) lists the causes and the runs.

Written by `python -m benchmarks.faults.evaluate FOLDER` from {len(results)} of the {all_runs} runs that
`python -m benchmarks.faults.generate FOLDER` trains.

Each run is a real training of a language model with one layer (the other size has three, the third two wide ones) on a
small world of sentences: 32 steps of 32 responses, by PPO, GRPO or RLOO; a few train SmolLM2-135M-Instruct. One of
{len(FAULTS)} faults is planted in the code or the setting where it would occur, at three severities; or the run is one
of the healthy kinds that look faulty: resumed runs, no penalty, growing lengths, small batches, held-out rows, another
language, high learning rates that work. In the *late* runs, of 48 steps, one of {len(LATE)} faults begins between the
steps 20 and 28. Thresholds and rules were chosen on seeds {CALIBRATION_SEEDS[0]} to
{CALIBRATION_SEEDS[-1]} (*calibration*); the other seeds are *held out*. The *other size* and the *third size* were used
while rules were fixed; *SmolLM2* was evaluated before anybody looked at its runs, and again after one limit had been
changed for them. "Named" means reported as a cause, not folded under another finding. The accepted causes of each fault
are listed in [benchmarks/faults/planted](../benchmarks/faults/planted). Precision covers all findings in faulty and
healthy runs, so that a consequence that was not folded counts as wrong."""


def timing(held_out: list[Result]) -> str:
    """Return how soon faults are named."""
    late = scores.delays(held_out)
    caught, fell = scores.in_time(held_out)
    rows = [
        ["steps from the start of a fault until it is named, median", f"{statistics.median(late) if late else 0:.0f}"],
        ["runs in which the true reward fell by 10 %", str(fell)],
        ["of these, caught before it fell", f"{per_cent(caught / fell if fell else float('nan'))} ({caught})"],
    ]
    return f"""{table(["how soon, held out", ""], rows)}

The doctor examines a run after {", ".join(map(str, LOOKS))} steps. The true reward measures the actual goal and is not
visible to the run; it counts as fallen if it lost a tenth of what a healthy run gains, plus its noise."""


def onsets(parts: Mapping[str, Sequence[Result]]) -> str:
    """Return how well the beginnings of faults are found, by part."""
    rows = []
    for name, results in parts.items():
        one = scores.onsets(results)
        width = f"{one.width:.0f}" if one.runs else "–"
        rows.append([name, str(one.runs), f"{one.error:.1f}" if one.runs else "–", per_cent(one.within), width])
        rows[-1].append(per_cent(one.covered))
    header = ["since when", "named", "median error, steps", "within 5 steps", "width of interval", "covers the truth"]
    return f"""{table(header, rows)}

A finding states the step at which the problem began and a 90 % interval. The truth is the step from which the fault
was planted; what a policy does of it, such as a longer response, can begin later."""


def imports(found: Figures) -> str:
    """Return how it is with runs that come from other trainers' files."""
    own = {one.case: one for one in found.results}
    news = [
        [f"{described(one.case)}, {name}", ", ".join(extra)]
        for name, results in found.imports.items()
        for one in results
        if (extra := _news(one, own[one.case]))
    ]
    return f"""Held-out runs (one per fault, every healthy one, seed {CALIBRATION_SEEDS.stop}), written in the formats
of other trainers and imported with `cavesson import`: RL Logging Board's lines with log-probabilities, reference,
values and token rewards; verl's `rollout_data_dir`; the Parquet files of TRL's `log_completions`, which its GRPO writes
(RLOO logs the same table to a tracker, and there are no PPO runs among them). The files contain neither settings nor
metrics, and those of verl and TRL no tokens. *Can be seen* counts the faults for which a rule could still be applied.
OpenRLHF logs only one response per step, which is too little.

{overview(found.imports, own)}

Wrong findings in an import that the run itself does not have:

{table(["run", "named"], news) if news else "Nothing."}"""


def _news(one: Result, own: Result) -> list[str]:
    """Return the wrong names that only the import has."""
    said = {*own.named, *own.folded}
    return [name for name, right in zip(one.named, one.right, strict=True) if not right and name not in said]


def others(found: Figures) -> str:
    """Return what the other tools say."""
    if found.no_peers:
        return f"rldoctor and rlprobe were not run: {found.no_peers}."
    own = {one.case: one for one, _ in found.peers}
    rows = {"this doctor": list(own.values())}
    rows["this doctor, scalars only"] = [one for one in found.scalars if one.case in own]
    for name in peers.MEANS:
        for label, consequences in ((name, False), (f"{name}, consequences count", True)):
            rows[label] = [peers.translated(name, said[name], one, consequences) for one, said in found.peers]
    meanings = [[f"{n}: `{one}`", ", ".join(means)] for n, said in peers.MEANS.items() for one, means in said.items()]
    return f"""{peers.TEXT.read_text(encoding="utf-8").strip()}

{overview(rows, own)}

Alarms in healthy runs: {"; ".join(_alarms(name, found) for name in peers.MEANS)}. Checks that rldoctor skipped,
of {len(own)} runs: {_counted(check for _, said in found.peers for check in said["rldoctor"].skipped)}.

{table(["says", "means"], meanings)}"""


def _alarms(name: str, found: Figures) -> str:
    healthy = [said[name].said for own, said in found.peers if not own.case.faults]
    return f"{name} {_counted(one for said in healthy for one, severity in said if severity != 'info') or 'nothing'}"


def _counted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}` {count}" for name, count in Counter(names).most_common())


def document(found: Figures, all_runs: int) -> str:
    """Return the document."""
    parts = {name: found.part(name) for name in PARTS[:-1] if found.part(name)}
    blind = {
        f"{name}, scalars only": [one for one in found.scalars if one.case.part == name]
        for name in parts
        if name != "calibration"
    }
    both, two = scores.both_named(found.results)
    blocks = [
        setting(found.results, all_runs),
        overview(parts | blind),
        f"Two faults in one run: both named in {both} of {two}.",
        timing([*found.part("held out"), *found.part("late, held out")]),
        onsets(parts),
        "![Which cause was named first for which planted one](images/doctor/confusion.png)",
        f"## Imported runs\n\n{imports(found)}",
        EPISODES.read_text(encoding="utf-8").strip(),
        f"## Other tools\n\n{others(found)}",
        REMARKS.read_text(encoding="utf-8"),
    ]
    return "\n\n".join(blocks)


def case_by_case(found: Figures) -> str:
    """Return the second page: every cause, every case that is wrong or missed, and the small trainers."""
    parts = {name: found.part(name) for name in PARTS[1:-1] if found.part(name)}
    blocks = [
        CASES,
        f"## By cause, held out\n\n{causes(found.part('held out'))}",
        *(f"## Wrong or missed, {name}\n\n{misses(results)}" for name, results in parts.items()),
        SMALL.read_text(encoding="utf-8"),
    ]
    return "\n\n".join(blocks)

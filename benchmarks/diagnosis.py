"""Writes docs/diagnosis: a page for each of the doctor's rules, and an index by symptom.

    python -m benchmarks.diagnosis                      the pages, from the rules and docs/diagnosis/prose.toml
    python -m benchmarks.diagnosis --runs runs/faults   the pictures first, from the runs of benchmarks/faults

A picture is the curve that a rule draws of a run in which its fault was planted. What the page says of that run is kept
in docs/diagnosis/pictures.json, so that the pages can be written where the runs are not.
"""

import argparse
import json
import re
import tomllib
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import cavesson
from benchmarks.faults.case import Case
from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import Finding, diagnose
from cavesson.doctor.finding import Reading
from cavesson.doctor.report.chart import drawn
from cavesson.doctor.rule import Rule
from cavesson.doctor.rules import RULES
from cavesson.doctor.words import language, number

FOLDER = Path(__file__).parents[1] / "docs" / "diagnosis"
STYLE = """text{fill:#6b737b;font:11px sans-serif}.end{text-anchor:end}.middle{text-anchor:middle}
.healthy{fill:#7fbf9b;opacity:.25}.grid{stroke:#8884}.curve{fill:none;stroke:#17857b;stroke-width:1.8}
path.onset{stroke:#c8473a;stroke-dasharray:4 3}text.onset{fill:#c8473a}"""
LARGEST = 15_000
"""Bytes of a picture."""
PLAIN = {
    "kl-explosion": "penalty-flipped",
    "update-kl-large": "too-many-epochs",
    "clip-fraction-high": "too-many-epochs",
    "reward-exhausted": "penalty-missing",
}
"""Faults that show a finding more plainly than others that cause it."""


def pages(pictures: dict[str, Any]) -> dict[str, str]:
    """Returns the text of every page by its name."""
    prose = _prose()
    written = {f"{rule.name}.md": page(rule, prose["rules"][rule.name], pictures.get(rule.name)) for rule in RULES}
    return written | {"README.md": index(prose)}


def _prose() -> dict[str, Any]:
    return tomllib.loads((FOLDER / "prose.toml").read_text("utf-8"))


def page(rule: Rule, prose: dict[str, Any], picture: dict[str, Any] | None) -> str:
    """Returns one page."""
    texts, words = rule.texts, picture["words"] if picture else {}
    above = [other.name for other in RULES if rule.name in other.explains]
    where = f"only in {', '.join(rule.algorithms)}" if rule.algorithms else "in every algorithm"
    least = f"{rule.least_steps} steps" if rule.least_steps > 1 else "one step"
    needs = ", ".join(" or ".join(f"`{one}`" for one in need.split("|")) for need in rule.needs)
    parts = [
        f"# {texts.title}",
        f"`{rule.name}`, number {rule.row}, {rule.severity}. Also known as: {'; '.join(prose['known_as'])}.",
        prose["sees"],
        _picture(rule, picture) if picture else f"*There is no picture: {prose['unseen']}*",
        f"**Cause:** {_filled(texts.cause, words)}",
        f"**What to change:** {_filled(texts.fix, words)}.",
        f"**Healthy:** {texts.healthy} (source: {_cited(rule.source)}).",
        f"**Measured:** {where}, over at least {least}, from {needs}.",
        *([f"**It explains:** {', '.join(f'`{name}`' for name in rule.explains)}."] if rule.explains else []),
        *([f"**It may itself follow from:** {', '.join(f'`{name}`' for name in above)}."] if above else []),
        f"**What it is not:** {prose['unlike']}",
        *([f"**What a record does not say:** {undecided()[rule.row]}."] if rule.row in undecided() else []),
        "[All findings](README.md) · [The doctor](../doctor.md)",
    ]
    return _linked("\n\n".join(parts), rule.name) + "\n"


@cache
def undecided() -> dict[int, str]:
    """Returns what docs/doctor.md says that a record cannot decide, by the number of the rule."""
    lines = re.findall(r"^\| (\d+) [^|]*\|[^|]*\| ([^|]*) \|$", (FOLDER.parent / "doctor.md").read_text("utf-8"), re.M)
    return {int(row): why for row, why in lines}


def _picture(rule: Rule, picture: dict[str, Any]) -> str:
    planted = f"`{picture['fault']}` planted in {picture['algorithm'].upper()}, severity {picture['level']} of 3"
    since = f", from step {picture['since']} on" if "since" in picture else ""
    seen = f"{rule.texts.healthy.partition(':')[0]}: {picture['words']['seen']}"
    parts = [picture.get("curve"), f"a run with {planted}{since}", seen]
    said = "*" + " ".join(f"{part[0].upper()}{part[1:]}." for part in parts if part) + "*"
    return f"![{rule.texts.title}](pictures/{rule.name}.svg)\n\n{said}" if picture["drawn"] else said


def _filled(text: str, words: dict[str, str]) -> str:
    """Returns a rule's text with the numbers of a run, or with dots."""
    return text.format_map(defaultdict(lambda: "…", words))


def _cited(source: str) -> str:
    return re.sub(r"\b(\d{4}\.\d{5})\b", r"[arXiv \1](https://arxiv.org/abs/\1)", source)


def _linked(text: str, own: str) -> str:
    names = {rule.name for rule in RULES} - {own}
    return re.sub(r"`([a-z-]+)`", lambda match: f"[{match[1]}]({match[1]}.md)" if match[1] in names else match[0], text)


def index(prose: dict[str, Any]) -> str:
    """Returns the page that leads to the others."""
    parts = [
        "# What goes wrong in RLHF, by what one sees",
        "Every finding of [`cavesson doctor`](../doctor.md) has a page: how it looks, what it comes from, what to "
        "change, and what resembles it. The pictures are of small runs in which a fault was planted "
        "([benchmarks/faults](../../benchmarks/faults)): the green band is healthy, the red line is where it began.",
    ]
    for symptom, title in prose["symptoms"].items():
        lines = [
            f"| [{rule.texts.title}]({rule.name}.md) | {'; '.join(prose['rules'][rule.name]['known_as'][:2])} |"
            for rule in RULES
            if prose["rules"][rule.name]["symptom"] == symptom
        ]
        parts.append(f"## {title}\n\n| | also known as |\n|---|---|\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def draw(runs: Path) -> dict[str, Any]:
    """Draws a picture of every rule that a run with one planted fault shows, and returns what the pages say of it.

    Of rules whose prose says why there is no picture none is drawn.
    """
    (FOLDER / "pictures").mkdir(exist_ok=True)
    shown: dict[str, tuple[tuple[Any, ...], Case, Reading]] = {}
    for file in sorted(runs.glob("*/case.json")):
        case = Case(**json.loads(file.read_text("utf-8")))
        if case.part != "calibration" or not case.faults:
            continue
        for finding in diagnose(RunData(cavesson.open(file.parent)), RULES).findings:
            best, worth = shown.get(finding.rule.name), _worth(finding, case)
            if worth is not None and (best is None or worth < best[0]):
                shown[finding.rule.name] = worth, case, finding.reading
    for old in (FOLDER / "pictures").glob("*.svg"):
        old.unlink()
    prose = _prose()["rules"]
    found = [(rule, *shown[rule.name][1:]) for rule in RULES if rule.name in shown and "unseen" not in prose[rule.name]]
    return {rule.name: _described(case, reading, _drawn(rule, reading)) for rule, case, reading in found}


def _worth(finding: Finding, case: Case) -> tuple[Any, ...] | None:
    """Returns how well a run shows a finding, best first: of its own fault, of one that it follows from, of another.

    What another fault brings about beside much else is no example: None.
    """
    from benchmarks.faults.planted import FAULTS

    name, causes = finding.rule.name, FAULTS[case.name].causes
    follows = any(name in rule.explains for rule in RULES if rule.name in causes)
    kind = 0 if name in causes else 1 if follows else 2
    if kind == 2 and not finding.cause:
        return None
    return PLAIN.get(name) != case.name, kind, list(FAULTS).index(case.name), -case.level, case.seed, case.algorithm


def _drawn(rule: Rule, reading: Reading) -> bool:
    """Writes the picture of a reading, if it has a curve that fits into the size of a picture."""
    picture = drawn(reading, language("en"))
    picture = picture.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    picture = picture.replace(">", f"><style>{STYLE}</style>", 1)
    if not picture or len(picture.encode()) > LARGEST:
        return False
    (FOLDER / "pictures" / f"{rule.name}.svg").write_text(picture + "\n", "utf-8")
    return True


def _described(case: Case, reading: Reading, is_drawn: bool) -> dict[str, Any]:
    words = {name: number(word) if isinstance(word, int | float) else str(word) for name, word in reading.words.items()}
    found = {"fault": case.name, "level": case.level + 1, "algorithm": case.algorithm, "drawn": is_drawn}
    curve = {} if reading.curve is None or reading.curve.name is None else {"curve": reading.curve.name}
    since = {} if reading.since is None else {"since": reading.since}
    return found | curve | since | {"words": words | {"seen": number(reading.seen)}}


def main() -> None:
    """Writes the pages, and the pictures where runs are given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="folder of the runs that benchmarks/faults made")
    given = parser.parse_args()
    file = FOLDER / "pictures.json"
    if given.runs is not None:
        file.write_text(json.dumps(draw(given.runs), ensure_ascii=False, indent=1) + "\n", "utf-8")
    pictures = json.loads(file.read_text("utf-8")) if file.exists() else {}
    for name, text in pages(pictures).items():
        (FOLDER / name).write_text(text, "utf-8")
    print(f"{len(RULES)} pages, {sum(picture['drawn'] for picture in pictures.values())} pictures in {FOLDER}")


if __name__ == "__main__":
    main()

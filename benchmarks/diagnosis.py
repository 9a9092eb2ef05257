"""Write docs/diagnosis: a page for each of the doctor's rules, and an index by symptom.

    python -m benchmarks.diagnosis                      the pages, from the rules and docs/diagnosis/prose.toml, and
                                                        the columns that suffice for each rule
    python -m benchmarks.diagnosis --runs runs/faults   the pictures first, from the runs of benchmarks/faults
    python -m benchmarks.diagnosis --runs runs/episodes those of rules on episodes, from its folder episodes/trained

A picture is the curve of a rule for a run in which its fault was planted. The numbers of that run are stored in
docs/diagnosis/pictures.json, so that the pages can be written without the runs.
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
from benchmarks.faults.case import EPISODES, Case
from benchmarks.faults.episodes.rules import NAMES
from benchmarks.sufficient import ANY_TOKENS, smallest_sets
from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import Detection, diagnose
from cavesson.doctor.reading import Reading
from cavesson.doctor.report.chart import drawn
from cavesson.doctor.rule import APPLIES, Rule
from cavesson.doctor.rules import RULES
from cavesson.doctor.words import LANGUAGES, language, limits_of
from cavesson.findings.fixes import advice
from cavesson.findings.words import number

FOLDER = Path(__file__).parents[1] / "docs" / "diagnosis"
SUFFICIENT = Path(cavesson.__file__).parent / "record" / "write" / "sufficient.toml"
"""Read by recorders, which cannot import the doctor."""
OTHERS = ("info.", "turns.")
"""What a recorder does not know of: settings, and the turns of episodes, which most loops do not have."""
STYLE = """text{fill:#6b737b;font:11px sans-serif}.end{text-anchor:end}.middle{text-anchor:middle}
.healthy{fill:#7fbf9b;opacity:.25}.grid{stroke:#8884}.curve{fill:none;stroke:#17857b;stroke-width:1.8}
rect.between{fill:#c8473a;opacity:.12}path.onset{stroke:#c8473a;stroke-dasharray:4 3}text.onset{fill:#c8473a}"""
WINDOWS = " Also over the latest 16, 32, 64, … steps, at most half of the run, each time as if the run had begun there."
LARGEST = 15_000
"""Maximum bytes of a picture."""
PLAIN = {
    "kl-explosion": "penalty-flipped",
    "update-kl-large": "too-many-epochs",
    "clip-fraction-high": "too-many-epochs",
    "reward-exhausted": "penalty-missing",
}
"""Detection → the fault that shows it most clearly."""


def pages(pictures: dict[str, Any]) -> dict[str, str]:
    """Return the text of every page by its name."""
    prose = _prose()
    written = {f"{rule.name}.md": page(rule, prose["rules"][rule.name], pictures.get(rule.name)) for rule in RULES}
    return written | {"README.md": index(prose)}


def _prose() -> dict[str, Any]:
    return tomllib.loads((FOLDER / "prose.toml").read_text("utf-8"))


def page(rule: Rule, prose: dict[str, Any], picture: dict[str, Any] | None) -> str:
    """Return one page."""
    texts, limits = rule.texts, limits_of(rule)
    words = limits | (picture["words"] if picture else {})
    above = [other.name for other in RULES if rule.name in other.explains]
    where = _where(rule)
    least = f"{rule.min_steps} steps" if rule.min_steps > 1 else "one step"
    parts = [
        f"# {texts.title}",
        f"`{rule.name}`, number {rule.number}, {rule.severity}. Also known as: {'; '.join(prose['known_as'])}.",
        prose["sees"].format_map(limits),
        _picture(rule, picture) if picture else f"*No picture: {prose.get('unseen', 'none of the runs shows it.')}*",
        f"**Cause:** {_filled(texts.cause, words)}",
        f"**Fix:** {_filled(advice(texts.fix, None, {}), words)}.",
        f"**Healthy:** {language('en').healthy(rule)} (source: {_cited(rule.source)}).",
        f"**Measured:** {where}, over at least {least}.{WINDOWS if rule.windows else ''}",
        f"**Columns that suffice:** {_columns(rule)}.",
        *_disproof(rule),
        *([f"**Explains:** {', '.join(f'`{name}`' for name in rule.explains)}."] if rule.explains else []),
        *([f"**May follow from:** {', '.join(f'`{name}`' for name in above)}."] if above else []),
        f"**Not to be confused with:** {prose['unlike'].format_map(limits)}",
        *([f"**Not visible in a record:** {undecided()[rule.number]}."] if rule.number in undecided() else []),
        "[All findings](README.md) · [The doctor](../doctor.md)",
    ]
    return _linked("\n\n".join(parts), rule.name) + "\n"


def _disproof(rule: Rule) -> list[str]:
    """Return what would disprove a finding, if the rule is an error or says it."""
    if rule.disproof is not None:
        columns = ", ".join(f"`{column}`" for column in rule.disproof.columns)
        return [f"**Disproved by:** {columns}, if recorded: {rule.disproof.shows}."]
    return ["**Disproved by:** nothing; it compares recorded numbers."] if rule.severity == "error" else []


def _columns(rule: Rule) -> str:
    """Return the smallest sets of columns from which the rule can be applied."""
    names = {ANY_TOKENS: "any column of the tokens", "rows.extra": "`rows.extra` with an `advantage`"}
    sets = [", ".join(names.get(one, f"`{one}`") for one in sorted(columns)) for columns in smallest_sets(rule)]
    return "; or ".join(sets)


@cache
def undecided() -> dict[int, str]:
    """Return what a record cannot show according to docs/doctor.md, by the number of the rule."""
    lines = re.findall(r"^\| (\d+) [^|]*\|[^|]*\| ([^|]*) \|$", (FOLDER.parent / "doctor.md").read_text("utf-8"), re.M)
    return {int(number): why for number, why in lines}


def _picture(rule: Rule, picture: dict[str, Any]) -> str:
    planted = f"`{picture['fault']}` planted in {picture['algorithm'].upper()}, severity {picture['level']} of 3"
    since = f", from step {picture['since']} on" if "since" in picture else ""
    seen = f"{language('en').healthy(rule).partition(':')[0]}: {picture['words']['seen']}"
    parts = [picture.get("curve"), f"a run with {planted}{since}", seen]
    caption = "*" + " ".join(f"{part[0].upper()}{part[1:]}." for part in parts if part) + "*"
    return f"![{rule.texts.title}](pictures/{rule.name}.svg)\n\n{caption}" if picture["drawn"] else caption


def _where(rule: Rule) -> str:
    needed = [str(APPLIES[trait]).removeprefix("applies to ") for trait in rule.traits]
    return f"only for {' and '.join(needed)}" if needed else "in every algorithm"


def _filled(text: str, words: dict[str, str]) -> str:
    """Return a rule's text with the numbers of a run, or with dots."""
    return text.format_map(defaultdict(lambda: "…", words))


def _cited(source: str) -> str:
    return re.sub(r"\b(\d{4}\.\d{5})\b", r"[arXiv \1](https://arxiv.org/abs/\1)", source)


def _linked(text: str, own: str) -> str:
    names = {rule.name for rule in RULES} - {own}
    return re.sub(r"`([a-z-]+)`", lambda match: f"[{match[1]}]({match[1]}.md)" if match[1] in names else match[0], text)


def index(prose: dict[str, Any]) -> str:
    """Return the page that links to the others."""
    parts = [
        "# What goes wrong in RLHF, by symptom",
        "Every finding of [`cavesson doctor`](../doctor.md) has a page: its symptoms, its cause, the fix, and similar "
        "findings. The pictures show small runs in which a fault was planted "
        "([benchmarks/faults](../../benchmarks/faults)): the green band is healthy, the red line marks the first step "
        "of the problem.",
    ]
    for symptom, title in prose["symptoms"].items():
        lines = [
            f"| [{rule.texts.title}]({rule.name}.md) | {'; '.join(prose['rules'][rule.name]['known_as'][:2])} |"
            for rule in RULES
            if prose["rules"][rule.name]["symptom"] == symptom
        ]
        parts.append(f"## {title}\n\n| | also known as |\n|---|---|\n" + "\n".join(lines))
    parts.append("## Translations\n\n" + "\n".join(map(_missing, LANGUAGES[1:])))
    return "\n\n".join(parts) + "\n"


def _missing(code: str) -> str:
    """Return the rules that have no texts in a language, and so appear in English."""
    names = [f"[{rule.name}]({rule.name}.md)" for rule in RULES if rule.name not in language(code).rules]
    return f"- `{code}`: {', '.join(names)} in English" if names else f"- `{code}`: complete"


def draw(runs: Path, out: Path) -> dict[str, Any]:
    """Draw a picture of every rule that a run with one planted fault shows, and return the numbers of that run.

    Rules whose prose gives a reason for having no picture are left out. Runs of episodes show the rules on episodes,
    and other runs the other rules; a picture of these that is not drawn again is deleted.
    """
    files = sorted(runs.glob("*/case.json"))
    if not files:
        raise SystemExit(f"{runs} has no runs of benchmarks/faults: there is no */case.json")
    (out / "pictures").mkdir(exist_ok=True)
    shown: dict[str, tuple[tuple[Any, ...], Case, Reading]] = {}
    mine: set[str] = set()
    for file in files:
        case = Case(**json.loads(file.read_text("utf-8")))
        mine |= _shown_by(case)
        if case.part != "calibration" or not case.faults:
            continue
        for finding in diagnose(RunData(cavesson.open(file.parent)), RULES).findings:
            best, worth = shown.get(finding.rule.name), _worth(finding, case)
            if finding.rule.name in _shown_by(case) and worth is not None and (best is None or worth < best[0]):
                shown[finding.rule.name] = worth, case, finding.reading
    prose = _prose()["rules"]
    found = [(rule, *shown[rule.name][1:]) for rule in RULES if rule.name in shown and "unseen" not in prose[rule.name]]
    pictures = {rule.name: _described(case, reading, _drawn(rule, reading, out)) for rule, case, reading in found}
    for name in mine - {name for name, picture in pictures.items() if picture["drawn"]}:
        (out / "pictures" / f"{name}.svg").unlink(missing_ok=True)
    file = out / "pictures.json"
    old = json.loads(file.read_text("utf-8")) if file.exists() else {}
    pictures |= {name: picture for name, picture in old.items() if name not in mine}
    return {rule.name: pictures[rule.name] for rule in RULES if rule.name in pictures}


def _shown_by(case: Case) -> set[str]:
    """Return the names of the rules of which a run may be an example."""
    return {rule.name for rule in RULES if (rule.name in NAMES) == (case.size == EPISODES)}


def _worth(finding: Detection, case: Case) -> tuple[Any, ...] | None:
    """Return how well a run shows a finding, best first: its own fault, one that it follows from, or another.

    A mere consequence of another fault is not an example: None.
    """
    name, faults = finding.rule.name, _faults(case.size == EPISODES)
    causes = faults[case.name]
    follows = any(name in rule.explains for rule in RULES if rule.name in causes)
    kind = 0 if name in causes else 1 if follows else 2
    if kind == 2 and not finding.cause:
        return None
    return PLAIN.get(name) != case.name, kind, list(faults).index(case.name), -case.level, case.seed, case.algorithm


@cache
def _faults(of_episodes: bool) -> dict[str, tuple[str, ...]]:
    """Return the accepted causes of each fault; the faults are slow to import."""
    if of_episodes:
        from benchmarks.faults.episodes.trained import planted

        return {name: one.causes for name, one in planted.FAULTS.items()}
    from benchmarks.faults.planted import FAULTS

    return {name: one.causes for name, one in FAULTS.items()}


def _drawn(rule: Rule, reading: Reading, out: Path) -> bool:
    """Write the picture of a reading, if it has a curve and is not too large."""
    picture = drawn(reading, language("en"))
    picture = picture.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    picture = picture.replace(">", f"><style>{STYLE}</style>", 1)
    if not picture or len(picture.encode()) > LARGEST:
        return False
    (out / "pictures" / f"{rule.name}.svg").write_text(picture + "\n", "utf-8")
    return True


def _described(case: Case, reading: Reading, is_drawn: bool) -> dict[str, Any]:
    words = {name: number(word) if isinstance(word, int | float) else str(word) for name, word in reading.words.items()}
    found = {"fault": case.name, "level": case.level + 1, "algorithm": case.algorithm, "drawn": is_drawn}
    curve = {} if reading.curve is None or reading.curve.name is None else {"curve": reading.curve.name}
    since = {} if reading.since is None else {"since": reading.since}
    return found | curve | since | {"words": words | {"seen": number(reading.seen)}}


def sufficient() -> str:
    """Return the smallest sets of columns that suffice for each rule, without rules on episodes and settings."""
    lines = ["# Which columns suffice for each rule of the doctor. Written by python -m benchmarks.diagnosis."]
    for rule in RULES:
        sets = [sorted(one) for one in smallest_sets(rule) if not any(name.startswith(OTHERS) for name in one)]
        if sets:
            lines.append(f"{rule.name} = {json.dumps(sets)}")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the pages, and the pictures if runs are given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="folder of the runs that benchmarks/faults made")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the pages and the new pictures")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.runs is None:
        pictures = json.loads((FOLDER / "pictures.json").read_text("utf-8"))
    else:
        pictures = draw(given.runs, given.out)
        text = json.dumps(pictures, ensure_ascii=False, indent=1)
        (given.out / "pictures.json").write_text(text + "\n", "utf-8")
    for name, text in pages(pictures).items():
        (given.out / name).write_text(text, "utf-8")
    SUFFICIENT.write_text(sufficient(), "utf-8")
    print(f"{len(RULES)} pages, {sum(picture['drawn'] for picture in pictures.values())} pictures in {given.out}")


if __name__ == "__main__":
    main()

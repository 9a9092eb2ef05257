"""How much of a run a diagnosis could judge, in words."""

from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import Diagnosis, Finding
from cavesson.doctor.failures import not_excluded
from cavesson.doctor.finding import Reading
from cavesson.doctor.recording import Recipe, needs, recipes
from cavesson.doctor.words import Language


def summary(diagnosis: Diagnosis, language: Language) -> str:
    """Return first how much could not be judged, then how many rules judged the run, and found something."""
    spoke, skipped = len(diagnosis.findings) + len(diagnosis.healthy), len(diagnosis.skipped)
    if not spoke:
        return language.phrase("Nothing could be checked.")
    parts = (
        "Not judged: {skipped} of {all} rules (steps: {steps}); failures that cannot be excluded: {open}.",
        "Judged: {spoke} rules, of which {found} found something." if diagnosis.findings else
        "Judged: {spoke} rules; none found anything wrong.",
    )  # fmt: skip
    counts = {"spoke": spoke, "skipped": skipped, "all": spoke + skipped, "found": len(diagnosis.findings)}
    counts |= {"steps": diagnosis.steps, "open": len(not_excluded(diagnosis))}
    return " ".join(language.phrase(part) for part in parts).format_map(counts)


def open_failures(diagnosis: Diagnosis, language: Language) -> list[tuple[str, str]]:
    """Return the failures that cannot be excluded, each with what would exclude it."""
    record = language.phrase("record {what}")
    found = []
    for failure, lacking, reasons in not_excluded(diagnosis):
        advice = [record.format(what=needs(lacking))] if lacking else []
        found.append((language.phrase(failure.title), "; ".join([*advice, *map(language.reason, reasons)])))
    return found


def since(reading: Reading, first: int, language: Language) -> str:
    """Return since when a problem exists, and over which steps it was judged if not over the whole run.

    Args:
        reading: The finding.
        first: The first step of the run.
        language: The language.
    """
    if reading.since is None:
        return ""
    text = f"{language.phrase('since step')} {reading.since}"
    if reading.between == (first, first):
        text += f" ({language.phrase('the first')})"
    elif reading.between is not None:
        low, high = reading.between
        text += f" (90 %: {low})" if low == high else f" (90 %: {low}–{high})"
    if reading.window is not None:
        text += f", {language.phrase('judged over steps')} {reading.window[0]}–{reading.window[1]}"
    return text


def in_trainer(finding: Finding, language: Language) -> tuple[str, str]:
    """Return a label and what the settings of the fix are called in the run's trainer; the latter can be empty."""
    found = finding.counterparts
    if found is None:
        return "", ""
    names = "; ".join(f"{setting} → {name}" for setting, name in found.settings.items())
    return language.phrase("in {trainer}").format(trainer=found.trainer), names


def how_to_record(data: RunData, diagnosis: Diagnosis) -> list[Recipe]:
    """Return the lines of code that record what would exclude these failures."""
    return recipes(data.info, [need for one in not_excluded(diagnosis) for need in one.lacking])


def recipe_title(recipe: Recipe, language: Language) -> str:
    """Return what a recipe records, and for which trainer."""
    title = language.phrase("To record {what} with {trainer}")
    return title.format(what=needs(recipe.columns), trainer=language.phrase(recipe.trainer))

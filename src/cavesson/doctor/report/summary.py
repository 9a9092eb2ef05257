"""How much of a run a diagnosis could judge, in words."""

from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import Diagnosis
from cavesson.doctor.failures import not_excluded
from cavesson.doctor.recording import Recipe, fewest_recipes, needs, recipes
from cavesson.doctor.words import Language

MOST_LIKELY = 3
"""Of the failures that cannot be excluded, a report shows so many unless it is asked for all."""


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


def how_to_record(data: RunData, diagnosis: Diagnosis) -> list[Recipe]:
    """Return the lines of code that record what would exclude these failures."""
    return recipes(data.info, [need for one in not_excluded(diagnosis) for need in one.lacking])


def short_recipes(data: RunData, diagnosis: Diagnosis, language: Language) -> list[tuple[str, str]]:
    """Return the lines of code that record the fewest columns to decide most of the failures, each with its title."""
    open_ones = not_excluded(diagnosis)
    found, decided = fewest_recipes(data.info, [() if one.reasons else one.lacking for one in open_ones])
    title = language.phrase("To decide {decided} of them ({what}) with {trainer}")
    return [
        (title.format(decided=decided, what=needs(one.columns), trainer=language.phrase(one.trainer)), one.code)
        for one in found
    ]


def recipe_title(recipe: Recipe, language: Language) -> str:
    """Return what a recipe records, and for which trainer."""
    title = language.phrase("To record {what} with {trainer}")
    return title.format(what=needs(recipe.columns), trainer=language.phrase(recipe.trainer))

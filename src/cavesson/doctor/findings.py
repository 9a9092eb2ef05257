"""What the doctor found, in a language."""

from collections.abc import Mapping

from cavesson.doctor.diagnosis import Detection, Diagnosis
from cavesson.doctor.happened import happened
from cavesson.doctor.words import Language
from cavesson.findings.finding import Finding


def findings_in(diagnosis: Diagnosis, language: Language) -> list[Finding]:
    """Return the findings of a diagnosis in a language, in the same order."""
    titles = {one.rule.name: language.texts(one.rule, one.reading).title for one in diagnosis.findings}
    return [_finding_in(one, titles, language) for one in diagnosis.findings]


def _finding_in(one: Detection, titles: Mapping[str, str], language: Language) -> Finding:
    rule, reading = one.rule, one.reading
    texts = language.texts(rule, reading, one.names, one.sizes)
    return Finding(
        rule.name,
        one.severity,
        texts.title,
        texts.cause,
        texts.fix,
        reading.seen,
        texts.healthy,
        rule.source,
        rule.number,
        root=one.cause,
        since_step=reading.since,
        since_between=reading.between,
        window=reading.window,
        evidence=reading.evidence,
        explains={name: titles[name] for name in one.explains},
        derived={name: language.phrase(by.how) for by in one.derived for name in by.gives},
        settings=one.settings,
        trainer_setting_names=one.trainer_setting_names,
        happened=happened(rule, reading, language),
        affected=one.affected,
        before=one.before,
        after=one.after,
    )

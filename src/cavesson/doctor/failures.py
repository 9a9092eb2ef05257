"""The common failures of training with feedback, and whether a diagnosis can exclude them."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from cavesson.doctor.diagnosis import NOTHING, Diagnosis
from cavesson.doctor.reading import Skipped
from cavesson.doctor.rules import RULES
from cavesson.findings.words import Phrase


@dataclass(frozen=True)
class Failure:
    """A failure that people ask about by name."""

    title: Phrase
    rules: tuple[str, ...]
    """Those that look for the failure itself. What they cannot judge is not excluded, whatever other rules say: a
    consequence can be absent, or have another cause."""


FAILURES = (
    Failure(Phrase("the KL penalty has the wrong sign, size or place"),
            ("penalty-wrong", "penalty-mis-scaled", "estimator-misplaced")),
    Failure(Phrase("the KL to the reference is negative"), ("negative-kl",)),
    Failure(Phrase("responses are not sampled from the policy that learns"),
            ("filtered-sampling", "temperature-missing", "sampler-mismatch", "sampler-stale", "end-forbidden")),
    Failure(Phrase("the reward is exploited"), ("pattern-spreading", "length-exploited", "over-optimised")),
    Failure(Phrase("the policy collapses"),
            ("entropy-collapse", "entropy-explosion", "distinct-collapse", "length-collapse")),
    Failure(Phrase("responses are truncated"), ("truncated", "never-ends")),
    Failure(Phrase("the reference is not the initial policy"),
            ("kl-at-start", "reference-is-policy", "reference-replaced")),
    Failure(Phrase("the reward is on the wrong tokens"), ("reward-position", "reward-accounting", "rewards-shifted")),
    Failure(Phrase("advantages are computed wrongly"), ("group-advantages", "advantage-sign", "advantage-scale")),
    Failure(Phrase("the critic does not learn"), ("value-not-fitting", "value-constant", "value-start")),
    Failure(Phrase("the wrong tokens are trained"),
            ("trained-behind-end", "end-not-trained", "retokenised", "inserted-tokens-learned",
             "sampled-tokens-masked", "turns-retokenised", "tokens-of-other-text", "prompt-trained")),
    Failure(Phrase("prompts are not as the model expects them"), ("double-start",)),
    Failure(Phrase("updates are too large"), ("update-kl-large", "ratio-blow-up", "clip-fraction-high")),
    Failure(Phrase("training computes other probabilities than scoring"), ("ratio-not-one",)),
    Failure(Phrase("the policy does not learn"), ("kl-flat", "zero-gradient", "zero-variance-groups")),
    Failure(Phrase("rollouts fail, or steps stall"), ("rollouts-fail", "stalls")),
    Failure(Phrase("the reward does not depend on the response"),
            ("reward-is-noise", "verifier-dead", "query-dominated")),
    Failure(Phrase("tools fail, or their results do not count"),
            ("calls-fail", "calls-time-out", "results-cut", "reward-ignores-results")),
    Failure(Phrase("episodes influence each other, or end too early"), ("environment-leaks", "turn-limit")),
)  # fmt: skip


class NotExcluded(NamedTuple):
    """A failure that the run may have: it is not among the causes, and some rules that look for it could not decide."""

    failure: Failure
    lacking: tuple[str, ...]
    """What to record, as in a rule's ``needs``."""
    reasons: tuple[Skipped, ...]
    """Rules that have their columns but could not decide, one for each reason."""


def not_excluded(diagnosis: Diagnosis) -> list[NotExcluded]:
    """Return the failures that the record neither shows nor excludes, the most likely first.

    Those come first that would explain most of the causes that were found, then those of whose own rules the smallest
    share could judge.
    """
    shown = {one.rule.name for one in diagnosis.causes if one.severity != "note"}
    skipped = {one.rule: one for one in diagnosis.skipped}
    causes = {one.rule.name for one in diagnosis.causes}
    ranked = []
    for failure in FAILURES:
        several = [skipped[rule] for rule in failure.rules if rule in skipped]
        needed = dict.fromkeys(need for one in several for need in one.lacking)
        reasons = {one.reason: one for one in several if one.undecided or one.reason == NOTHING}
        if (needed or reasons) and not shown & set(failure.rules):
            not_judged = [rule for rule in failure.rules if rule in skipped]
            rank = -_explained(not_judged, causes), -len(not_judged) / len(failure.rules)
            ranked.append((rank, NotExcluded(failure, tuple(needed), tuple(reasons.values()))))
    return [one for _, one in sorted(ranked, key=lambda pair: pair[0])]


def _explained(rules: Collection[str], causes: Collection[str]) -> int:
    """Return how many of the causes that were found would be consequences of a finding of these rules."""
    consequences = {name for rule in RULES if rule.name in rules for name in rule.explains}
    return len(consequences.intersection(causes))

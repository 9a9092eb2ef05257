"""Why a run cannot have a fault for which it lacks the columns."""

import numpy as np

from cavesson.doctor.data import RunData
from cavesson.doctor.derive.critic import are_white, recorded_white
from cavesson.doctor.readings import lengths
from cavesson.findings.words import Phrase
from cavesson.record.schema import SOURCE_CODES

SAMPLED = SOURCE_CODES["sampled"]


def no_penalty(data: RunData) -> Phrase | None:
    """Say that a run has no KL penalty, if its recorded coefficients are all 0."""
    coefficients = data.rows["kl_coef"] if data.recorded("rows.kl_coef") else np.array([])
    known = coefficients[np.isfinite(coefficients)]
    return Phrase("the run has no KL penalty: its coefficient is 0") if len(known) and not known.any() else None


def not_in_rewards(data: RunData) -> Phrase | None:
    """Say that no reward of a run contains a penalty, if it has none or has it in the loss."""
    if data.recorded("tokens.token_reward"):
        return None
    if data.setting("kl.place") == "loss":
        return Phrase("judges a penalty in the rewards; this run has it in the loss")
    return no_penalty(data)


def no_token_rewards(data: RunData) -> Phrase | None:
    """Say that tokens have no rewards of their own, if the algorithm rewards responses or all advantages are alike."""
    if not data.recorded("tokens.token_reward") and (data.traits.get("critic") is False or data.has_no_critic):
        return Phrase("judges the rewards of tokens; this run rewards whole responses")
    return None


def no_ratio(data: RunData) -> Phrase | None:
    """Say that the loss compares no two policies, as that of RAFT, which trains on responses as if they were given."""
    return Phrase("the loss has no probability ratio") if _has_no_ratio(data) else None


def no_reference(data: RunData) -> Phrase | None:
    """Say that a run has no reference, if the settings say so, or do not say that RAFT, say, has one after all."""
    kind = data.setting("config.reference.kind", "none" if _has_no_ratio(data) else None)
    return Phrase("the run has no reference") if kind == "none" else None


def _has_no_ratio(data: RunData) -> bool:
    return data.traits.get("ratio", "unknown") is None


def other_reference(data: RunData) -> Phrase | None:
    """Say that the reference is another model by design, if the settings name one, or that there is none."""
    if data.setting("config.reference.path") is not None:
        return Phrase("the reference is another model than the initial policy, as the settings say")
    return no_reference(data)


def not_whitened(data: RunData) -> Phrase | None:
    """Say that nothing whitens the rewards, if the variance of those of a step is not 1."""
    white = recorded_white(data) or are_white(data.sample)
    return None if white else Phrase("the token rewards are not whitened")


def advantages_as_they_are(data: RunData) -> Phrase | None:
    """Say that nothing whitens the advantages, if the settings say so."""
    off = data.setting("config.ppo.whiten_advantages") is False
    return Phrase("the advantages are not whitened") if off else None


def no_longer(data: RunData) -> Phrase | None:
    """Say that no reward is gained by length, if responses do not become longer."""
    points = lengths(data).by_step()
    grow = len(points) and points.last() > points.first()
    return Phrase("the responses do not become longer") if len(points) and not grow else None


def no_turns(data: RunData) -> Phrase | None:
    """Say that a run has no episodes of several turns, if neither its settings, turns nor tokens say that it has."""
    given = data.setting("inputs", ()) if data.own else ()
    settings = ("config.environment.use", "config.environment.tools")
    named = any(data.setting(one) for one in settings) or not {"environment", "tools"}.isdisjoint(given)
    if named or data.recorded("turns.role") or _has_inserted(data):
        return None
    return Phrase("judges episodes of several turns; the record has none")


def _has_inserted(data: RunData) -> bool:
    """Return whether some tokens were not sampled, but come from a tool, say."""
    return data.recorded("tokens.source") and bool((data.sample.source > SAMPLED).any())


def no_calls(data: RunData) -> Phrase | None:
    """Say that the episodes of a run call no tools, if it has no episodes, or if its turns are known."""
    if data.recorded("turns.role") and not (data.turns.role == "tool").any():
        return Phrase("judges calls of tools; the episodes have none")
    return no_turns(data)

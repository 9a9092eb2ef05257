"""Rules on the tokens of episodes: which of them are learned, and whether they are those that were sampled."""

import numpy as np

from cavesson.doctor.absent import no_turns
from cavesson.doctor.data import RunData
from cavesson.doctor.reading import Curve, Reading, Words
from cavesson.doctor.readings import at_least
from cavesson.doctor.rule import rule
from cavesson.doctor.sample import Sample
from cavesson.doctor.series import Array, Series, earliest, mean_by_step
from cavesson.doctor.turns import Turns
from cavesson.findings.words import Phrase, Share
from cavesson.record.schema import SOURCE_CODES

FAR, NEAR = 1.0, 0.1
"""Nats by which sampler and trainer differ on tokens that were not sampled, and at most on those that were."""
MIN_TOKENS = 200
"""Tokens of earlier turns, and of last ones, from which they are compared."""
TIMES = 5.0
"""How many times as often the tokens of earlier turns must differ."""
USUAL = 1e-4
"""Share of tokens on which numerical noise alone may differ by so much."""
WRITERS = {
    "template": Phrase("the chat template"),
    "tool": Phrase("tools"),
    "user": Phrase("users"),
    None: Phrase("an unknown writer"),
}
"""Sources of tokens that are not the policy → what they are called."""
SAMPLED = SOURCE_CODES["sampled"]


def _learned(sample: Sample) -> Array:
    """Return [N] whether a token is recorded as learned."""
    return np.asarray(sample["learned"] == 1)


def _inserted(sample: Sample) -> Array:
    """Return [N] whether a token is not the policy's: in a response with sampled tokens, others are not sampled."""
    has_sampled = np.bincount(sample.line[sample.source == SAMPLED], minlength=len(sample.rows)) > 0
    return (sample.source > SAMPLED) | ((sample.source < SAMPLED) & has_sampled[sample.line])


def _share_by_step(sample: Sample, bad: Array, of: Array) -> Series:
    return mean_by_step(sample.step[of], bad[of].astype(float))


@rule(
    number=80,
    needs=["tokens.source", "tokens.learned"],
    recorded=["tokens.source", "tokens.learned"],
    severity="error",
    title="Tokens that the policy did not write are in the loss",
    cause="{seen} of the learned tokens were not sampled; most of these are of: {writer}. The policy learns to write "
    "the results of its tools, and ratios, KL and lengths count tokens that it never chose.",
    healthy="share of the learned tokens that come from the template, a tool or a user: 0",
    fix="learn only from sampled tokens: build the mask of the loss from the ids that the sampler returned, not from "
    "text or roles",
    source="TRL (tool_mask); verl (response_mask); Search-R1 2503.09516",
    explains=["sampler-mismatch", "mismatch-tail", "mismatch-rare-tokens", "negative-kl", "kl-explosion",
              "kl-in-few-tokens", "filtered-sampling", "temperature-missing", "ratio-blow-up", "update-kl-large",
              "clip-fraction-high", "entropy-explosion", "garbled"],
    absent=no_turns,
)  # fmt: skip
def inserted_tokens_learned(data: RunData) -> Reading | None:
    sample = data.sample
    source, learned = sample.source, _learned(sample)
    if not learned.any():
        return None
    wrong = learned & _inserted(sample)
    counts = {writer: int((source[wrong] == SOURCE_CODES[writer]).sum()) for writer in WRITERS}
    words: Words = {"writer": WRITERS[max(counts, key=counts.__getitem__)]}
    curve = Curve(_share_by_step(sample, wrong, learned), 0.0, 0.0)
    first = earliest(sample.step[wrong])
    return Reading(
        Share(wrong.sum() / learned.sum()), bool(wrong.any()), first, sample.spans(np.flatnonzero(wrong)), words, curve
    )


@rule(
    number=81,
    needs=["tokens.source", "tokens.learned"],
    recorded=["tokens.source", "tokens.learned"],
    title="Sampled tokens are masked",
    cause="{seen} of the tokens that the policy sampled in episodes from which it learns are not learned; {where}: "
    "what it did there gets no gradient.",
    healthy="share of the sampled tokens that are not learned, in episodes of which others are: below {limit}",
    fix="learn from every sampled token, the end tokens of its turns and its calls included; if only the last turn is "
    "to be learned from, this is as intended",
    source="TRL (tool_mask); verl (response_mask)",
    explains=["end-not-trained", "zero-gradient", "kl-flat"],
    absent=no_turns,
)
def sampled_tokens_masked(data: RunData, *, limit: float = Share(0.01)) -> Reading | None:
    sample = data.sample
    sampled, learned = sample.source == SAMPLED, _learned(sample)
    uses = (np.bincount(sample.line[learned], minlength=len(sample.rows)) > 0)[sample.line]
    of = sampled & uses  # a response that is left out as a whole was excluded by a filter, or not scored
    if not of.any():
        return None
    masked = of & ~learned
    share = Share(masked.sum() / of.sum())
    first = earliest(sample.step[masked])
    curve = Curve(_share_by_step(sample, masked, of), high=limit)
    words: Words = {"where": _where(sample, sampled, masked)}
    return Reading(share, bool(share > limit), first, sample.spans(np.flatnonzero(masked)), words, curve)


def _where(sample: Sample, sampled: Array, masked: Array) -> Phrase:
    """Return where in the turns masked tokens are: a turn is a run of sampled tokens."""
    starts = sampled & ~(np.append(False, sampled[:-1]) & np.append(False, sample.line[1:] == sample.line[:-1]))
    turn = np.cumsum(starts) * sampled
    size, hidden = np.bincount(turn[sampled]), np.bincount(turn[sampled], masked[sampled])
    if (hidden[hidden > 0] == size[hidden > 0]).mean() > 0.5:
        return Phrase("whole turns are left out")
    ends = sampled & np.append(~sampled[1:] | (sample.line[1:] != sample.line[:-1]), True)
    return (
        Phrase("the ends of turns are left out") if masked[ends].mean() > 0.5 else Phrase("parts of turns are left out")
    )


@rule(
    number=82,
    needs=["turns.role", "turns.first_token", "turns.tokens", "tokens.logprob", "tokens.sampler_logprob"],
    title="Earlier turns are tokenised again",
    cause="Sampler and trainer differ by more than {far} nat on {seen} of the tokens of earlier turns, and on {later} "
    "of those of last turns: the conversation was passed as text, and the template or the tokenizer made other tokens "
    "of what had been sampled.",
    healthy="share of the tokens of earlier turns on which sampler and trainer differ by more than {far} nat: below "
    "{limit}, or less than {times} times that of last turns",
    fix="keep the token ids of every turn as sampled, and append only the tokens that the template adds between turns",
    source="vLLM blog, Agent Lightning (2025); verl (token-in-token-out)",
    explains=["retokenised", "filtered-sampling", "sampler-mismatch", "mismatch-tail", "mismatch-rare-tokens"],
    absent=no_turns,
)
def turns_retokenised(
    data: RunData, *, limit: float = Share(0.002), far: float = FAR, times: float = TIMES
) -> Reading | None:
    sample, turns = data.sample, data.turns
    earlier, last = _turns_of_tokens(sample, turns)
    gap = np.abs(sample["sampler_gap"])
    earlier, last = (sample.trained & kind & np.isfinite(gap) for kind in (earlier, last))
    if min(earlier.sum(), last.sum()) < MIN_TOKENS:
        return None
    differs = gap > far
    share, later = Share(differs[earlier].mean()), Share(differs[last].mean())
    usual = max(float(later), USUAL)
    # Weights that changed between two turns move most tokens a little; other tokens are a few large differences.
    few = float(np.median(gap[earlier])) < NEAR
    unlikely = at_least(float(differs[earlier].sum()), int(earlier.sum()), min(2 * usual, 1.0)) < data.chance
    unhealthy = bool(share > max(limit, times * later) and few and unlikely)
    wrong = np.flatnonzero(differs & earlier)
    curve = Curve(_share_by_step(sample, differs, earlier), high=limit)
    return Reading(share, unhealthy, earliest(sample.step[wrong]), sample.spans(wrong), {"later": later}, curve)


def _turns_of_tokens(sample: Sample, turns: Turns) -> tuple[Array, Array]:
    """Return [N] whether a token is of an earlier turn of the policy, and whether it is of its last one, of several."""
    spoken = np.flatnonzero((turns.role == "assistant") & np.isfinite(turns["first_token"]) & (turns["tokens"] > 0))
    size = len(sample.rows)
    last, count = np.full(size, -1.0), np.bincount(turns.line[spoken], minlength=size)
    np.maximum.at(last, turns.line[spoken], turns["first_token"][spoken])
    several = (count >= 2)[sample.line]
    sampled = sample.source <= SAMPLED
    is_last = sample.position >= last[sample.line]
    return several & sampled & ~is_last, several & sampled & is_last

"""Rules on identities that must hold exactly in every run; they are the first to check."""

from collections import Counter
from dataclasses import replace

import numpy as np

from cavesson.doctor.absent import no_ratio, no_reference, other_reference
from cavesson.doctor.data import RunData
from cavesson.doctor.derive.endings import named_ends, padding_of
from cavesson.doctor.derive.versions import policy_changes
from cavesson.doctor.onset import of_events
from cavesson.doctor.reading import Curve, Reading, Words
from cavesson.doctor.readings import at_least, exceeds
from cavesson.doctor.rows import Rows
from cavesson.doctor.rule import Disproof, rule
from cavesson.doctor.rules.consequences import MISLED, MISMATCH, RUNAWAY
from cavesson.doctor.sample import Sample
from cavesson.doctor.series import Array, Series, earliest, mean_by_step
from cavesson.findings.words import Phrase, Share
from cavesson.record.schema import SOURCE_CODES

EXACT, ROUNDED = 1e-3, 0.05
"""Maximum difference between log-probabilities of the same weights, in nats: in float32, and in bfloat16 (8 bits)."""
MIN_SIBLINGS, MAX_SIBLINGS = 40, 64
"""Responses with a sibling, at least, and responses to a prompt whose places are compared, at most."""
MIN_GROUPS = 20
LASTING = 3
"""Steps for which the reference must equal the policy, or the distance from it stay low."""
APART = 0.02
"""Distance from the reference, in nats per token, below which its changes do not count."""
USUAL, SUDDEN = 0.95, 1.5
"""Quantile of the rises of the distance from one step to the next, and how many times that a fall must be."""
UNLIKELY = 1e-6
"""Probability below which equal responses at two places of the groups are not chance."""
MASK_OF_LOSS = Phrase("the record shows which tokens the trainer kept, but not whether its loss keeps to them")
MAYBE_TURNS = Phrase("responses have several end tokens, each perhaps of a turn, and the record does not mark turns")
EMPTY = Series(np.zeros(0, np.int64), np.zeros(0))
IMPROBABLE = 12.0
"""Nats of surprise from which two independent samples do not agree on a response by chance."""


def is_exact(data: RunData) -> bool:
    """Return whether the model computes in float32 or better."""
    return data.dtype in ("float32", "float64")


@rule(
    number=1,
    needs=["steps.policy/first_ratio_error|steps.policy/first_approx_kl|steps.policy/clipped_kl"],
    severity="error",
    title="The probability ratio is not 1 before the first update",
    cause="Before the first update of a step, the policy that is trained is the one that was scored, so every token "
    "has the same probability. Here the ratio of the two is off by {measure} {worst}: scoring and training compute "
    "different things (dropout, padding or position ids, a temperature in only one of them, log-probabilities shifted "
    "by one).",
    healthy="distance of π/π_old from 1 in the first mini-batch of a step: in float32 at most {exact} for any token; "
    "in bfloat16 below {rounded} as a root mean square, or below {largest} if only the maximum is known",
    fix="score and train with the same code: dropout 0, the same attention mask and position ids, the same temperature",
    source="TRL's PPO page; trlX issue 107; Huang et al., The N implementation details of RLHF with PPO",
    explains=["clip-fraction-high", "ratio-blow-up", "update-kl-large", "kl-at-start", "negative-kl", "penalty-wrong",
              "reward-position", "reward-accounting", "kl-explosion", "unknown-estimate", *MISMATCH, *RUNAWAY],
    disproof=Disproof(
        ("steps.policy/first_ratio_error", "steps.policy/first_approx_kl"),
        "the ratio was measured in the first mini-batch, and is 1",
    ),
    windows=True,
    absent=no_ratio,
)  # fmt: skip
def ratio_not_one(
    data: RunData, *, exact: float = EXACT, rounded: float = ROUNDED, largest: float = 0.5
) -> Reading | None:
    largest_errors = data.metric("policy/first_ratio_error")
    # What other numbers say of it is only a bound, and counts only where it was not measured.
    is_measured = data.recorded("steps.policy/first_approx_kl")
    squares = data.metric("policy/first_approx_kl") if is_measured or not len(largest_errors) else EMPTY
    if not len(largest_errors) and not len(squares):
        squares = data.metric("policy/clipped_kl")
    errors = Series(squares.step, np.sqrt(2 * squares.value))
    points, limit = errors, rounded  # rounding errors have a tail over many tokens, so use the root mean square
    if len(largest_errors) and (is_exact(data) or not len(squares)):
        points, limit = largest_errors, exact if is_exact(data) else largest
    if not len(points):
        return None
    worst = (largest_errors if len(largest_errors) else errors).value.max()
    measure = Phrase("up to" if len(largest_errors) else "at least (as a root mean square)")
    bad = points.step[points.value > limit]
    unhealthy = exceeds(data, len(bad), len(points), 0.5)
    words: Words = {"worst": float(worst), "measure": measure}
    curve = Curve(points, high=limit)
    return Reading(float(np.median(points.value)), unhealthy, earliest(bad), data.step_evidence(bad), words, curve)


def started_as_reference(data: RunData) -> bool:
    """Return whether the sampler finds the tokens of the first step as likely as the reference does."""
    sample = data.sample
    apart = np.abs(sample["sampler_logprob"] - sample["ref_logprob"])
    there = (sample.step == sample.rows.steps[0]) & sample.trained & np.isfinite(apart)
    return bool(there.any()) and float(apart[there].mean()) <= (EXACT if is_exact(data) else ROUNDED)


@rule(
    number=2,
    needs=["tokens.ref_logprob", "tokens.logprob"],
    severity="error",
    title="The policy differs from its reference before any training",
    cause="At the first step, policy and reference are the same model and agree on every token. Here their "
    "log-probabilities differ by {seen} nats per token: the reference has other weights or another precision, uses "
    "dropout, or is scored differently.",
    healthy="mean |Δ| of the first step: below {exact} nats in float32, {rounded} in bfloat16",
    fix='make the reference a copy of the initial policy (reference.kind = "copy"): same checkpoint, same dtype, no '
    "dropout",
    source="The N implementation details of RLHF with PPO; TRL issue 495",
    explains=["negative-kl", "kl-in-few-tokens", "update-kl-large", *MISLED],
    disproof=Disproof(
        ("tokens.sampler_logprob",),
        "the sampler, which has the policy's weights, finds the tokens of the first step as likely as the reference",
        started_as_reference,
    ),
    absent=other_reference,
)
def kl_at_start(data: RunData, *, exact: float = EXACT, rounded: float = ROUNDED) -> Reading | None:
    sample = data.sample
    first = int(sample.rows.steps[0])
    version = sample.rows["policy_version"][sample.rows.step == first]
    if first > 1 or np.any(version > 0):
        return None  # the record starts later than the training
    if data.setting("config.reference.path") is not None:
        return None  # the reference is a different model by design
    mine = (sample.step == first) & sample.trained & np.isfinite(sample["kl_k1"])
    if not mine.any():
        return None
    distance = np.abs(sample["kl_k1"])
    size = float(distance[mine].mean())
    unhealthy = size > (exact if is_exact(data) else rounded)
    worst = sample.worst(np.where(mine, distance, np.nan))
    curve = Curve(sample.mean_by_step(distance))
    return Reading(size, unhealthy, first, worst, curve=curve)


@rule(
    number=3,
    needs=["tokens.ref_logprob", "tokens.logprob"],
    severity="error",
    min_steps=8,
    title="The reference changes with the policy",
    cause="The policy changes, but the reference still agrees with it on {seen} of the tokens: policy and reference "
    "share their weights, an adapter stays enabled in the reference's forward pass, or β = 0 and the reference is "
    "never computed.",
    healthy="share of tokens with |Δ| < {equal} after {updates} updates: far below {limit}",
    fix='give the reference its own weights (reference.kind = "copy"), or disable the adapter while it scores',
    source="TRL issues 1340, 3194, 4040",
    explains=["kl-flat", "penalty-mis-scaled", "reference-replaced"],
    disproof=Disproof(("steps.policy/approx_kl",), "the updates do not change the policy either"),
    absent=no_reference,
)
def reference_is_policy(
    data: RunData, *, limit: float = Share(0.99), updates: int = 5, equal: float = 1e-5
) -> Reading | None:
    sample = data.sample
    known = sample.trained & np.isfinite(sample["kl_k1"])
    same = np.abs(sample["kl_k1"]) < equal
    points = sample.mean_by_step(np.where(known, same, np.nan))
    if not len(points):
        return None
    apart = points.step[points.value <= limit]
    first = begins = int(points.step[0])
    if len(apart) and apart[-1] >= begins + updates:  # the reference became the policy later
        first = int(apart[-1]) + 1
    later = known & (sample.step >= max(first, begins + updates))
    if len(np.unique(sample.step[later])) < LASTING:
        return Reading(Share(points.last()), False, curve=Curve(points, high=limit))
    share = Share(same[later].mean())
    if share > limit and not policy_changes(data):
        return None
    evidence = sample.spans(np.flatnonzero(later & same))
    return Reading(share, share > limit, first, evidence, curve=Curve(points, high=limit))


@rule(
    number=4,
    needs=["tokens.logprob", "tokens.ref_logprob"],
    min_steps=12,
    title="The reference was replaced during training",
    cause="The distance between policy and reference falls by up to {drop} from one step to the next, {times} times, "
    "and grows again each time: the reference is synchronised with the policy, or was loaded from a checkpoint of the "
    "policy.",
    healthy="largest relative fall of the mean |log π − log π_ref| per token from one step to the next: below {limit}, "
    "or a single time and not to 0; falls after which the distance is soon back do not count",
    fix="keep the reference frozen, and load it from the initial checkpoint when a run resumes; if you replace it on "
    "purpose, nothing is wrong",
    source="TRL issue 1340; own threshold",
    explains=["kl-flat"],
    absent=no_reference,
)
def reference_replaced(data: RunData, *, limit: float = Share(0.8)) -> Reading | None:
    points = data.sample.mean_by_step(np.abs(data.sample["kl_k1"]))
    before, after = points.value[:-1], points.value[1:]
    drop = np.where(before > APART, 1 - after / np.maximum(before, APART), 0.0)
    # An exact return is not a coincidence. Where the policy stays there, the reference has become the policy itself.
    leaves = np.maximum.accumulate(after[::-1])[::-1] > 1e-5
    is_exact_return = (after < 1e-5) & leaves
    falls = np.flatnonzero((drop > limit) & (is_exact_return | _is_lasting(points)))
    unhealthy = len(falls) >= 2 or bool(is_exact_return[falls].any())  # a policy can come close to its reference once
    steps = points.step[falls + 1]
    largest = Share(drop[falls].max(initial=0.0) if unhealthy else drop.max(initial=0.0))
    words = {"drop": largest, "times": float(len(falls))}
    curve = Curve(points, name=Phrase("mean |log π − log π_ref|"))
    between = of_events(points, steps)
    return Reading(largest, unhealthy, earliest(steps), data.step_evidence(steps), words, curve, between=between)


def _is_lasting(points: Series) -> Array:
    """Return [S - 1] whether the distance from the reference falls for good at each next step.

    A policy moves away from its reference little by little. Where the prompts of a step decide the distance, it rises
    as suddenly as it falls, and is back soon.
    """
    size, count = np.maximum(points.value, APART), len(points)
    change = np.diff(np.log(size))
    usual = float(np.quantile(np.maximum(change, 0.0), USUAL))
    lowest = np.array([size[max(0, i - LASTING) : i].min() for i in range(1, count)])
    highest = np.array([size[i : i + LASTING].max() for i in range(1, count)])
    return np.asarray((-change > SUDDEN * usual) & (highest < lowest / 2))


@rule(
    number=8,
    needs=["rows.prompt_ids"],
    severity="error",
    title="Prompts begin with two start tokens",
    cause="{seen} of the prompts begin with the same token twice (id {token}): the template already writes the start "
    "token and the tokenizer adds another. No model was trained on such prompts.",
    healthy="share of prompts that begin with the start token twice: 0; reported above {limit}, since a prompt may "
    "begin with a repeated word",
    fix="tokenise the templated text with add_special_tokens=False",
    source="reward-bench issue 464, open-r1 issue 462, NeMo-RL issue 855, TRL issue 3520",
    explains=["verifier-dead", "reward-is-noise", "kl-in-few-tokens"],
    disproof=Disproof(("info.tokenizer.bos",), "the repeated token is not the start token"),
    windows=True,
)
def double_start(data: RunData, *, limit: float = Share(0.95)) -> Reading | None:
    rows = data.sample.rows
    prompts = [tuple(ids or ()) for ids in rows.texts("prompt_ids")]
    different = {ids for ids in prompts if len(ids) >= 3}
    if sum(ids in different for ids in prompts) < 4:
        return None
    known = data.setting("tokenizer.bos")
    twice = {ids for ids in different if ids[0] == ids[1] and (known is None or ids[0] == known)}
    share = Share(len(twice) / len(different))
    # If the start token is not known and all prompts begin alike, they may begin with a repeated word.
    follow = {next((one for one in ids if one != ids[0]), None) for ids in different}
    unhealthy = share > limit and (known is not None or len(follow) > 1)
    words = {"token": float(next(iter(different))[0])}
    has = np.array([ids in twice for ids in prompts], float)
    curve = Curve(rows.by_step(has), 0.0, 0.0)
    return Reading(share, unhealthy, int(rows.steps[0]), rows.evidence(np.flatnonzero(has)), words, curve)


@rule(
    number=10,
    needs=["tokens.token_id", "info.eos_token_ids", "tokens.logprob"],
    severity="error",
    training_only=True,
    title="Tokens after the end of the response are trained on",
    cause="{seen} of the trained tokens come after an end token: the mask keeps padding (which may be the end token "
    "itself), or text that the policy did not write.",
    healthy="share of trained tokens after the first end token of their turn: 0, at most {limit}",
    fix="end the mask at the first end token, and use a separate padding token",
    source="TRL issue 2708, miles issue 2476",
    explains=["negative-kl", "padding-counted", "reward-position", "reward-accounting", "value-not-fitting",
              "kl-at-start", "filtered-sampling", "temperature-missing", "likelihood-displacement", "sampler-stale",
              "false-truncation", "end-forbidden", "same-seed", "garbled", *MISMATCH],
    disproof=Disproof(("tokens.learned",), "the tokens after the end are not trained on, or belong to a later turn"),
)  # fmt: skip
def trained_behind_end(data: RunData, *, limit: float = Share(1e-3)) -> Reading | None:
    sample, ends = data.sample, np.array(data.setting("eos_token_ids"), np.float64)
    behind = _behind(sample, ends)
    if not data.recorded("info.eos_token_ids"):  # a token that ends nearly all responses may stand inside of a few
        behind &= np.isin(sample["token_id"], padding_of(sample))
        behind |= _behind(sample, named_ends(data))
    undecided = None if data.own else MASK_OF_LOSS
    if not _marks_turns(data) and _end_again(sample, ends, behind):
        behind, undecided = behind & _filled(sample, ends), MAYBE_TURNS
    wrong = np.flatnonzero(behind & sample.trained)
    share = Share(len(wrong) / max(1, int(sample.trained.sum())))
    curve = Curve(sample.mean_by_step(behind.astype(float)), high=limit)
    first = earliest(sample.step[wrong])
    return Reading(share, share > limit, first, sample.spans(wrong), curve=curve, undecided=undecided)


def _behind(sample: Sample, ends: Array) -> Array:
    """Return [N] whether one of the tokens ``ends`` comes earlier in the same turn of the same response.

    A turn ends where the mask leaves out what a tool or a user wrote, whether or not these tokens were recorded.
    """
    is_end = np.isin(sample["token_id"], ends)
    begins = np.ones(len(sample), bool)
    begins[1:] = (np.diff(sample.line) != 0) | (np.diff(sample.position) != 1)
    inserted = sample.source[:-1] > SOURCE_CODES["sampled"]  # of which the last may be the end token of a user's turn
    begins[1:] |= sample.trained[1:] & ~sample.trained[:-1] & (inserted | ~is_end[:-1])
    # The running count minus that at the start of the turn.
    before: Array = np.cumsum(is_end) - is_end
    return np.asarray(before > before[np.flatnonzero(begins)][np.cumsum(begins) - 1])


def _marks_turns(data: RunData) -> bool:
    """Return whether positions have gaps where tokens were masked: Cavesson and its hooks in TRL and verl keep them."""
    return data.own or str(data.setting("trainer", "")).startswith(("trl", "verl"))


def _end_again(sample: Sample, ends: Array, behind: Array) -> bool:
    """Return whether most responses that go on after an end token with other tokens end in one, as turns do."""
    closes = np.isin(sample["token_id"], ends) | _filled(sample, ends)
    lines = np.unique(sample.line[behind & sample.trained & ~closes])
    ended = np.isin(sample.line, lines) & sample.last & closes
    return bool(len(lines)) and 2 * ended.sum() > len(lines)


def _filled(sample: Sample, ends: Array) -> Array:
    """Return [N] whether a token only fills the response up: the same token up to its end, from an end token on."""
    ids = np.where(sample.trained, sample["token_id"], np.nan)
    starts = np.ones(len(sample), bool)
    starts[1:] = (np.diff(sample.line) != 0) | (ids[1:] != ids[:-1])
    run = np.cumsum(starts) - 1
    first = np.flatnonzero(starts)
    is_end = np.isin(sample["token_id"], ends)
    follows = np.zeros(len(first), bool)
    follows[1:] = is_end[first[1:] - 1] & (sample.line[first[1:]] == sample.line[first[1:] - 1])
    reaches = np.zeros(len(first), bool)
    reaches[run[sample.last]] = True
    return np.asarray((reaches & (follows | is_end[first]))[run] & ~(starts & is_end))


@rule(
    number=11,
    needs=["rows.prompt", "rows.response"],
    severity="error",
    training_only=True,
    title="Processes or responses of a group share random numbers",
    cause="{seen} of {what}: every process, or every response of a group, uses the same seed.",
    healthy="share of improbable responses that equal another one to the same prompt word for word: below {limit}; if "
    "no log-probabilities were recorded, share of groups whose responses at the same two places are equal, beyond "
    "chance: below {places}",
    fix="derive the seed from the rank and the sample's index as well",
    source="The N implementation details of RLHF with PPO; Hoeffding 1956",
    explains=["zero-variance-groups", "zero-gradient"],
    disproof=Disproof(("tokens.sampler_logprob",), "the sampler expected the responses that occur twice"),
    windows=True,
)
def same_seed(data: RunData, *, limit: float = Share(0.2), places: float = Share(0.5)) -> Reading | None:
    by_places = equal_places(data.sample.rows, places)
    if not data.has("tokens.logprob") or (by_places is not None and by_places.unhealthy):
        return by_places
    found = _equal_although_improbable(data, limit)
    if found is None or not found.unhealthy or by_places is None or data.has("tokens.sampler_logprob"):
        return found
    # Equal responses at any two places alike are drawn independently, however improbable the trainer finds them.
    return replace(found, unhealthy=False)


def _equal_although_improbable(data: RunData, limit: float) -> Reading | None:
    """Return the share of the responses improbable to the sampler, or else the trainer, that occur twice in a group."""
    sample = data.sample
    # The sampler's probability counts, as a policy that generates garbage may consider that garbage certain.
    surprise = -sample.total(sample.drawn)
    texts = sample.rows.texts("response")
    some = [i for i in np.flatnonzero(surprise > IMPROBABLE) if (texts[i] or "").strip()]  # empty ones are failures
    groups = [group for group in _siblings(sample.rows, np.array(some, np.int64)) if len(group) > 1]
    members = np.array([i for group in groups for i in group], np.int64)
    if len(members) < MIN_SIBLINGS:
        return None
    often = [Counter(texts[i] for i in group) for group in groups]
    equal = np.array([counts[texts[i]] > 1 for group, counts in zip(groups, often, strict=True) for i in group])
    curve = Curve(mean_by_step(sample.rows.step[members], equal), high=limit)
    what = Phrase(
        "the responses equal another one to the same prompt in the same step, although such a response occurs less "
        "than once in 100,000 samples"
    )
    unhealthy = exceeds(data, equal.sum(), len(equal), limit)
    first = earliest(sample.rows.step[members[equal]])
    return Reading(Share(equal.mean()), unhealthy, first, sample.rows.evidence(members[equal]), {"what": what}, curve)


def _siblings(rows: Rows, some: Array) -> list[list[int]]:
    """Return some rollouts [n] in groups of the same prompt in the same step, ordered as in the step."""
    prompts = rows.texts("prompt")
    groups: dict[tuple[int, str | None], list[int]] = {}
    for i in some.tolist():
        groups.setdefault((int(rows.step[i]), prompts[i]), []).append(i)
    return list(groups.values())


def equal_places(rows: Rows, limit: float) -> Reading | None:
    """Compare equal responses at two places of a group, such as the first and the fifth, with equal ones at others.

    Siblings that are drawn independently can be equal by chance, but at any two places alike: given how many pairs of
    a group are equal, this share is the probability of each. The number of groups that are equal at two places is then
    a sum of independent events, whose tail is at most that of a binomial distribution (Hoeffding 1956).
    """
    groups = [members[:MAX_SIBLINGS] for members in _siblings(rows, np.arange(len(rows)))]
    size = Counter(map(len, groups)).most_common(1)[0][0]
    groups = [members for members in groups if len(members) == size]
    if size < 3 or len(groups) < MIN_GROUPS:
        return None
    members = np.array(groups)
    numbers = {"": 0}
    text = np.array([numbers.setdefault((one or "").strip(), len(numbers)) for one in rows.texts("response")])[members]
    one, other = np.triu_indices(size, 1)
    equal = (text[:, one] == text[:, other]) & (text[:, one] > 0)  # empty ones are failures
    chance = equal.mean(1)
    apart = chance < 1  # where all are equal, no two places differ from the others
    if apart.sum() < MIN_GROUPS:
        return None
    count, expected = equal[apart].sum(0), chance[apart].sum()
    most = int(np.argmax(count))
    share = Share(max(0.0, (count[most] - expected) / (apart.sum() - expected)))
    some = apart & (chance > 0)
    probability = at_least(count[most], some.sum(), chance[some].mean()) * len(one) if some.any() else 1.0
    alike = np.flatnonzero(apart & equal[:, most])
    pairs = members[alike][:, [one[most], other[most]]]
    curve = Curve(mean_by_step(rows.step[members[apart, 0]], equal[apart, most]))
    first = earliest(rows.step[pairs[:, 0]])
    words: Words = {"what": Phrase("the groups have equal responses at the same two places, but not at others")}
    unhealthy = share > limit and probability < UNLIKELY
    return Reading(share, unhealthy, first, rows.evidence(pairs.ravel()), words, curve)

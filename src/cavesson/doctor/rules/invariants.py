"""Rules on identities that must hold exactly in every run; they are the first to check."""

from itertools import combinations

import numpy as np

from cavesson.doctor.data import RunData
from cavesson.doctor.finding import Curve, Phrase, Reading, Share, Words
from cavesson.doctor.rule import rule
from cavesson.doctor.rules.consequences import MISMATCH, RUNAWAY
from cavesson.doctor.series import Array, Series, earliest

EXACT = {"float32": 1e-3, "float64": 1e-3}
ROUNDED = 0.05
"""How far log-probabilities of the same weights may lie apart, in nats: bfloat16 has 8 bits."""
ROUNDED_MOST = 0.5
"""The same of the token on which they lie furthest apart."""
IMPROBABLE = 12.0
"""Nats of surprise: two independent samples agree on such a response once in e^12 = 160,000 times."""


def tolerance(data: RunData) -> float:
    """Return how much log-probabilities under the same weights can differ."""
    return EXACT.get(str(data.setting("config.model.dtype")), ROUNDED)


@rule(
    row=1,
    needs=["steps.policy/first_ratio_error"],
    severity="error",
    title="The probability ratio is not 1 before anything was learned",
    cause="Before the first update of a step the policy that learns is the policy that was scored, so π/π_old is 1 for "
    "every token. Here it is off by up to {worst}: scoring and training do not compute the same thing (dropout, "
    "padding or position ids, a temperature in one of them, log-probabilities shifted by one).",
    healthy="distance of π/π_old from 1 in a step's first mini-batch: in float32 at most 0.001 on any token; in "
    "bfloat16 below 0.05 as a root mean square, or below 0.5 where only the largest is known",
    fix="score and train by the same code: dropout 0, the same attention mask and position ids, the same temperature",
    source="TRL's PPO page; trlX issue 107; Huang et al., The N implementation details of RLHF with PPO",
    explains=["clip-fraction-high", "ratio-blow-up", "update-kl-large", "kl-at-start", "negative-kl", "penalty-wrong",
              "reward-position", "reward-accounting", "kl-explosion", *MISMATCH, *RUNAWAY],
)  # fmt: skip
def ratio_not_one(data: RunData) -> Reading | None:
    points, limit = data.metric("policy/first_ratio_error"), tolerance(data)
    if not len(points):
        return None
    worst = float(points.value.max())
    if limit == ROUNDED:  # rounding errors have a tail over many tokens, so use the root mean square
        squares = data.metric("policy/first_approx_kl")
        points, limit = (
            (Series(squares.step, np.sqrt(2 * squares.value)), limit) if len(squares) else (points, ROUNDED_MOST)
        )
    bad = points.value > limit
    sick = bool(np.mean(bad) > 0.5)
    return Reading(
        float(np.median(points.value)),
        sick,
        earliest(points.step[bad]),
        data.step_evidence(points.step[bad][:3]),
        {"worst": worst},
        curve=Curve(points, high=limit),
    )


@rule(
    row=2,
    needs=["tokens.ref_logprob", "tokens.logprob"],
    severity="error",
    title="The policy differs from its reference before any training",
    cause="At the first step both are the same model, so every Δ = log π − log π_ref is 0. Here it is {seen} nats per "
    "token: the reference has other weights, another precision, dropout, or is scored otherwise.",
    healthy="mean |Δ| of the first step: below 0.001 nats in float32, 0.05 in bfloat16",
    fix='make the reference a copy of the policy as it starts (reference.kind = "copy"): same checkpoint, same dtype, '
    "dropout off",
    source="The N implementation details of RLHF with PPO; TRL issue 495",
    explains=["negative-kl", "kl-explosion", "kl-in-few-tokens"],
)
def kl_at_start(data: RunData) -> Reading | None:
    sample = data.sample
    first = int(sample.rows.steps[0])
    version = sample.rows["policy_version"][sample.rows.step == first]
    if first > 1 or np.any(version > 0):
        return None  # the record starts later than the training
    if data.setting("config.reference.path") is not None:
        return None  # the reference is a different model by design
    mine = (sample.step == first) & sample.trained & np.isfinite(sample["log_ratio"])
    if not mine.any():
        return None
    distance = np.abs(sample["log_ratio"])
    size = float(distance[mine].mean())
    sick = size > tolerance(data)
    return Reading(
        size,
        sick,
        first,
        sample.worst(np.where(mine, distance, np.nan)),
        curve=Curve(sample.mean_by_step(distance)),
    )


@rule(
    row=3,
    needs=["tokens.ref_logprob", "tokens.logprob"],
    severity="error",
    least_steps=5,
    title="The reference moves with the policy",
    cause="The weights change with every step, yet log π − log π_ref stays 0 on {seen} of the tokens: policy and "
    "reference share their weights, an adapter stays switched on in the reference's pass, or β = 0 and the reference "
    "is never computed.",
    healthy="share of tokens with |Δ| < 0.00001 after five updates: far below 99 %",
    fix='give the reference weights of its own (reference.kind = "copy"), or switch the adapter off while it scores',
    source="TRL issues 1340, 3194, 4040",
    explains=["kl-flat", "penalty-mis-scaled"],
)
def reference_is_policy(data: RunData) -> Reading | None:
    moved = data.metric("policy/approx_kl")
    if not len(moved) or not np.any(moved.value > 1e-9):
        return None  # there is no evidence that the policy changed
    sample = data.sample
    later = sample.trained & (sample.step >= sample.rows.steps[0] + 5) & np.isfinite(sample["log_ratio"])
    if not later.any():
        return None
    same = np.abs(sample["log_ratio"]) < 1e-5
    share = float(same[later].mean())
    sick = share > 0.99
    return Reading(
        Share(share),
        sick,
        int(sample.rows.steps[0]),
        sample.spans(np.flatnonzero(later & same)),
        curve=Curve(sample.mean_by_step(same.astype(float)), high=0.99),
    )


@rule(
    row=4,
    needs=["tokens.logprob", "tokens.ref_logprob"],
    severity="error",
    least_steps=12,
    title="The reference was replaced during training",
    cause="The distance |log π − log π_ref| falls by up to {drop} from one step to the next, {times} times, and grows "
    "again each time: the reference is synchronised with the policy, or was loaded from a checkpoint of the policy.",
    healthy="largest relative fall of the mean |log π − log π_ref| per token from one step to the next: below 80 %, or "
    "a single time and not to 0",
    fix="keep the reference frozen (or say in the recipe that it is meant to follow), and reload it from the initial "
    "checkpoint",
    source="TRL issue 1340; own threshold",
    explains=["kl-flat"],
)
def reference_replaced(data: RunData) -> Reading | None:
    points = data.sample.mean_by_step(np.abs(data.sample["log_ratio"]))
    before, after = points.value[:-1], points.value[1:]
    drop = np.where(before > 0.02, 1 - after / np.maximum(before, 0.02), 0.0)
    falls = np.flatnonzero(drop > 0.8)
    # A policy can return close to its reference once, but an exact return is not a coincidence.
    sick = len(falls) >= 2 or bool(np.any(after[falls] < 1e-5))
    steps = points.step[falls + 1]
    words: Words = {"drop": Share(drop.max(initial=0.0)), "times": float(len(falls))}
    return Reading(
        Share(drop.max(initial=0.0)),
        sick,
        earliest(steps),
        data.step_evidence(steps[:3]),
        words,
        curve=Curve(points, name=Phrase("mean |log π − log π_ref|")),
    )


@rule(
    row=8,
    needs=["rows.prompt_ids"],
    severity="error",
    title="Prompts begin with two start tokens",
    cause="{seen} of the prompts begin with the same token twice (id {token}): the template already writes the start "
    "token and the tokenizer adds another. No model was trained on that.",
    healthy="share of prompts that begin with the start token twice: 0; it is named above 95 %, since a prompt may "
    "begin with a doubled word",
    fix="tokenise the templated text with add_special_tokens=False",
    source="reward-bench issue 464, open-r1 issue 462, NeMo-RL issue 855, TRL issue 3520",
    explains=["reward-is-noise", "kl-in-few-tokens"],
)
def double_start(data: RunData) -> Reading | None:
    rows = data.sample.rows
    prompts = [tuple(ids or ()) for ids in rows.texts("prompt_ids")]
    different = {ids for ids in prompts if len(ids) >= 3}
    if sum(ids in different for ids in prompts) < 4:
        return None
    known = data.setting("tokenizer.bos")
    twice = {ids for ids in different if ids[0] == ids[1] and (known is None or ids[0] == known)}
    share = len(twice) / len(different)
    # If the start token is not known and all prompts begin alike, they may begin with a repeated word.
    follow = {next((one for one in ids if one != ids[0]), None) for ids in different}
    sick = share > 0.95 and (known is not None or len(follow) > 1)
    token = float(next(iter(different))[0])
    has = np.array([ids in twice for ids in prompts])
    return Reading(
        Share(share),
        sick,
        int(rows.steps[0]),
        data.sample.evidence(np.flatnonzero(has)),
        {"token": token},
        curve=Curve(rows.by_step(has.astype(float)), 0.0, 0.0),
    )


@rule(
    row=10,
    needs=["tokens.token_id", "info.eos_token_ids", "tokens.logprob"],
    severity="error",
    title="Tokens after the end of the response are trained",
    cause="{seen} of the tokens that count stand after an end token: the mask keeps padding (which may be the end "
    "token itself), or spans that the policy did not write.",
    healthy="share of trained tokens after the first end token: 0, at most 0.1 %",
    fix="end the mask at the first end token, and give padding a token of its own",
    source="TRL issue 2708, miles issue 2476",
    explains=["negative-kl", "padding-counted", "reward-position", "reward-accounting", "value-not-fitting",
              "filtered-sampling", "temperature-missing", "likelihood-displacement", *MISMATCH],
)  # fmt: skip
def trained_behind_end(data: RunData) -> Reading | None:
    sample = data.sample
    ends = np.isin(sample["token_id"], np.array(data.setting("eos_token_ids"), np.float64))
    # End tokens before each token in its own response: the running count minus that at the start of the response.
    before: Array = np.cumsum(ends) - ends
    start = np.searchsorted(sample.line, np.arange(len(sample.rows)))
    behind = (before - before[np.minimum(start, len(sample) - 1)][sample.line]) > 0
    wrong = np.flatnonzero(behind & sample.trained)
    share = len(wrong) / max(1, int(sample.trained.sum()))
    sick = len(wrong) > 0 and share > 1e-3
    return Reading(
        Share(share),
        sick,
        earliest(sample.step[wrong]),
        sample.spans(wrong),
        curve=Curve(sample.mean_by_step(behind.astype(float)), high=1e-3),
    )


@rule(
    row=11,
    needs=["rows.prompt", "rows.response", "tokens.logprob"],
    severity="error",
    title="Processes or siblings sample the same random numbers",
    cause="{seen} of the pairs of responses to the same prompt in the same step are equal, although such a response "
    "comes up once in 160,000 samples: the same seed is used by every process or every sibling.",
    healthy="share of improbable responses that a sibling repeats word for word: below 5 %",
    fix="draw the seed from the rank and the sample's number as well",
    source="The N implementation details of RLHF with PPO",
    explains=["zero-variance-groups", "zero-gradient"],
)
def same_seed(data: RunData) -> Reading | None:
    sample = data.sample
    # The sampler's probability counts, as a policy that generates garbage may consider that garbage certain.
    surprise = -sample.total(sample["sampler_logprob" if sample.has("sampler_logprob") else "logprob"])
    prompts, responses = sample.rows.texts("prompt"), sample.rows.texts("response")
    asked: dict[tuple[int, str | None], list[int]] = {}
    for i in np.flatnonzero(surprise > IMPROBABLE).tolist():
        asked.setdefault((int(sample.rows.step[i]), prompts[i]), []).append(i)
    pairs = [(i, j) for members in asked.values() for i, j in combinations(members[:16], 2)]
    if len(pairs) < 20:
        return None
    same = [(i, j) for i, j in pairs if responses[i] == responses[j]]
    share = len(same) / len(pairs)
    sick = share > 0.05
    rows = np.array(list(dict.fromkeys(i for pair in same for i in pair)), np.int64)
    steps, where = np.unique(sample.rows.step[[i for i, _ in pairs]], return_inverse=True)
    equal = np.bincount(where, [responses[i] == responses[j] for i, j in pairs])
    return Reading(
        Share(share),
        sick,
        earliest(sample.rows.step[rows]),
        sample.evidence(rows),
        curve=Curve(Series(steps, equal / np.bincount(where)), high=0.05),
    )

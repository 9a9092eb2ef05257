"""Rules on what surrounds the training: failures, prompts, and time."""

import numpy as np

from cavesson.doctor.data import RunData
from cavesson.doctor.finding import Curve, Phrase, Reading, Share, Words
from cavesson.doctor.groups import groups, repeated
from cavesson.doctor.rule import rule
from cavesson.doctor.series import Series, since, smoothed

ENDED = frozenset(["eos", "stop"])
ABORTED = frozenset(["abort", "aborted", "error", "failed", "timeout", "cancelled"])


@rule(
    row=68,
    needs=["rows.response"],
    title="Rollouts fail or come back empty",
    cause="{seen} of the rollouts are empty or were aborted: the environment or the sampler drops them, and what is "
    "left is another distribution.",
    healthy="share of empty or aborted rollouts over several steps: below 5 %",
    fix="look at the sampler's and the environment's log at these steps; retry instead of recording nothing",
    source="prime-rl; miles",
    explains=["reward-falls", "length-collapse", "zero-variance-groups", "zero-gradient"],
)
def rollouts_fail(data: RunData) -> Reading | None:
    rows = data.sample.rows
    empty = np.array([not (text or "").strip() for text in rows.texts("response")])
    if rows.has("finish_reason"):
        reasons = [(reason or "").lower() for reason in rows.texts("finish_reason")]
        # A response that consists only of the policy's own end token is not a failure.
        empty &= ~(np.isin(reasons, list(ENDED)) & (rows["length"] <= 1))
        empty |= np.isin(reasons, list(ABORTED))
    points = rows.by_step(empty.astype(float))
    smooth = smoothed(points)
    first = since(smooth, smooth.value > 0.05, min(5, len(points)))
    seen = float(points.value[points.step >= first].mean()) if first is not None else float(points.value.mean())
    return Reading(
        Share(seen),
        first is not None,
        first,
        data.sample.evidence(np.flatnonzero(empty)),
        curve=Curve(points, high=0.05),
    )


@rule(
    row=69,
    needs=["rows.reward", "rows.group"],
    least_steps=10,
    algorithms=["grpo", "rloo"],
    title="The prompts are exhausted",
    cause="In {share} of the groups every response now gets the best reward, {before} at the start: the prompts have "
    "nothing left to teach.",
    healthy="share of groups in which all responses get the highest reward: below 50 %, or less than 20 % above its "
    "start",
    fix="fresh or harder prompts; grpo.resample leaves such groups out",
    source="DAPO 2503.14476",
    explains=["zero-variance-groups", "zero-gradient", "kl-flat"],
    severity="note",
)
def prompts_exhausted(data: RunData) -> Reading | None:
    step, _, mean, sd = groups(data.rows, data.rows["reward"])
    if len(step) < 20 or not repeated(data.rows):
        return None
    best = float(np.nanmax(data.rows["reward"]))
    solved = ((sd < 1e-9) & (mean >= best - 1e-9)).astype(float)
    steps, where = np.unique(step, return_inverse=True)
    points = Series(steps, np.bincount(where, solved) / np.bincount(where))
    before = points.first()
    first = since(smoothed(points), smoothed(points).value > max(0.5, before + 0.2), 4)
    return Reading(
        Share(points.last()),
        first is not None,
        first,
        data.step_evidence([first]),
        {"share": Share(points.last()), "before": Share(before)},
        curve=Curve(points, high=max(0.5, before + 0.2)),
    )


@rule(
    row=70,
    needs=["steps.time/total|steps.time/step"],
    least_steps=10,
    title="Steps stall",
    cause="The slowest step took {seen} times the usual ({seconds} s), most of it in {phase}.",
    healthy="time of a step / median of the steps: below 6; steps of less than 5 s do not count",
    fix="look for a straggler: one long response, a swapping machine, a slow reward service",
    source="miles; rlprobe",
    severity="note",
)
def stalls(data: RunData) -> Reading | None:
    points = data.metric("time/total") if data.has("steps.time/total") else data.metric("time/step")
    later = points.where(points.step > points.step[0])  # the first step includes warm-up
    if len(later) < 9:
        return None
    over = later.value / np.median(later.value)
    worst = int(np.argmax(over))
    # Short steps vary due to noise of the machine alone.
    sick = bool(over[worst] > 6 and later.value[worst] > 5)
    step = int(later.step[worst])
    words: Words = {"seconds": float(later.value[worst]), "phase": _slowest_phase(data, step)}
    return Reading(
        float(over[worst]),
        sick,
        step,
        data.step_evidence([step]),
        words,
        curve=Curve(Series(later.step, over), high=6.0),
    )


def _slowest_phase(data: RunData, step: int) -> str:
    names = [name for name in data.metrics if name.startswith("time/") and name not in ("time/total", "time/step")]
    spent = {name: data.metric(name) for name in names}
    at = {name: float(points.value[points.step == step].sum()) for name, points in spent.items()}
    return max(at, key=lambda name: at[name]).removeprefix("time/") if at else Phrase("an unknown phase")

"""What two other tools say of the same runs: rldoctor 0.2.0 and rlprobe 0.1.0, which read scalars.

Both get every metric of theirs that the planted run recorded or that follows from its rollouts and tokens, under the
names that they document. They run in an interpreter of their own.
"""

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

import cavesson
from benchmarks.faults.results import Result, accepted_of
from cavesson.doctor.rules import RULES
from cavesson.record import Run

TEXT = Path(__file__).with_suffix(".md")
"""What they are, what they are given and how it is counted."""
ASK = Path(__file__).with_name("ask_peers.py")
BUCKETS = 8
"""Into how many parts of the longest response rlprobe's positional KL is cut, as in its own examples."""
NAMES: dict[str, tuple[str | None, str | None]] = {
    "reward/mean": ("reward", "reward_mean"),
    "reward/std": ("reward_std", "reward_std"),
    "reward/min": ("critic/score/min", "reward_min"),
    "reward/max": ("critic/score/max", "reward_max"),
    "reward/eval": ("eval/reward", None),
    "kl/token": ("kl", "kl_mean"),
    "kl/positional": (None, "kl_positional"),
    "policy/entropy": ("entropy", "entropy_mean"),
    "policy/clip_fraction": ("clip_ratio/region_mean", "clip_fraction"),
    "policy/clip_low": ("clip_ratio/low_mean", None),
    "policy/clip_high": ("clip_ratio/high_mean", None),
    "policy/ratio": (None, "ratio_mean"),
    "logprob/policy": (None, "logprob_mean"),
    "advantage/rollout_mean": ("critic/advantages/mean", "adv_mean"),
    "advantage/std": ("critic/advantages/std", "adv_std"),
    "group/zero_std": ("frac_reward_zero_std", "zero_variance_group_frac"),
    "group/reward_std": (None, "group_reward_std_mean"),
    "value/explained_variance": ("critic/vf_explained_var", "value_explained_variance"),
    "value/clip_fraction": (None, "value_clip_fraction"),
    "loss/value": (None, "value_loss"),
    "loss/policy": ("policy_loss", None),
    "loss/total": (None, "loss"),
    "optim/grad_norm": ("grad_norm", "grad_norm"),
    "optim/grad_nan": (None, "nan_count"),
    "optim/learning_rate": ("learning_rate", "lr"),
    "length/prompt_mean": ("prompt_length/mean", None),
    "length/response_mean": ("completions/mean_length", "completion_len_mean"),
    "length/response_max": ("completions/max_length", "completion_len_max"),
    "finish/length": ("completions/clipped_ratio", "truncation_rate"),
    "finish/eos": (None, "eos_rate"),
    "text/repetition": (None, "repetition_rate"),
    "time/total": ("step_time", "step_time_s"),
    "time/generate": (None, "generation_time_s"),
    "time/update": (None, "optimization_time_s"),
    "tokens_per_second": ("perf/throughput", None),
}
"""Our metric → the name that each of the two knows it by. TRL's and verl's, of those that rldoctor knows."""
MEANS: dict[str, dict[str, tuple[str, ...]]] = {
    "rldoctor": {
        "advantage_collapse": ("zero-variance-groups", "prompts-exhausted"),
        "entropy_collapse": ("entropy-collapse", "distinct-collapse"),
        "reward_hacking": ("over-optimised", "pattern-spreading", "length-exploited"),
        "length_pathology": ("length-exploited", "length-bias", "truncated", "false-truncation"),
        "clip_saturation": ("clip-fraction-high", "ratio-blow-up", "update-kl-large"),
        "kl_drift": ("kl-explosion", "kl-flat", "penalty-mis-scaled"),
        "gradient_pathology": ("gradient-spike", "zero-gradient", "not-finite"),
        "reward_composition": ("one-part-dominates",),
        "plateau": ("reward-exhausted", "reward-falls"),
    },
    "rlprobe": {
        "KL_BLOWUP": ("kl-explosion", "update-kl-large"),
        "ENTROPY_COLLAPSE": ("entropy-collapse", "distinct-collapse"),
        "REWARD_HACK_LENGTH": ("length-exploited",),
        "FORMAT_GAMING": ("one-part-dominates", "pattern-spreading"),
        "CLIP_SATURATION": ("clip-fraction-high", "ratio-blow-up", "update-kl-large"),
        "DEGENERATE_GROUPS": ("zero-variance-groups", "prompts-exhausted"),
        "ADV_COLLAPSE": ("zero-gradient", "advantage-scale"),
        "VALUE_DIVERGENCE": ("value-not-fitting", "value-constant", "value-start", "value-loss-spike"),
        "GRAD_PATHOLOGY": ("gradient-spike", "not-finite"),
        "TRUNCATION_STARVE": ("truncated", "false-truncation", "end-not-trained"),
        "REPETITION_SPIRAL": ("repetition-loops",),
        "REWARD_STD_DEATH": ("zero-variance-groups", "reward-exhausted", "verifier-dead"),
        "REF_POLICY_DRIFT_ASYMMETRY": ("kl-in-few-tokens", "double-start"),
        "THROUGHPUT_ROT": ("stalls",),
    },
}
"""What each says → the causes of ours that say the same, or that its own text names; the closest first."""
EXPLAINS = {rule.name: frozenset(rule.explains) for rule in RULES}


class Said(NamedTuple):
    """What one tool said of one run."""

    said: Sequence[tuple[str, str]]
    """Names and severities, the gravest first"""
    skipped: Sequence[str]
    """Checks that it says it could not do"""


def logs_of(run: Run) -> dict[str, Any]:
    """Return a run as the two read it: its settings, and for each a record of metrics per step."""
    steps = list(metrics(run))
    return {
        "config": _config(run),
        "rldoctor": [
            _named(step, 0, {f"rewards/{name}/mean": v for name, v in step["parts"].items()}) for step in steps
        ],
        "rlprobe": [_named(step, 1, {"reward_components": step["parts"]}) for step in steps],
    }


def _named(step: Mapping[str, Any], which: int, parts: dict[str, Any]) -> dict[str, Any]:
    known = {name: step.get(ours) for ours, names in NAMES.items() if (name := names[which])}
    known = {name: value for name, value in known.items() if value is not None}
    return {"step": step["step"], **known, **parts}


def _config(run: Run) -> dict[str, Any]:
    """Return the settings, under names that rldoctor looks for."""
    config = run.info["config"]
    return {
        "algorithm": run.info["algorithm"],
        "num_generations": config["samples_per_prompt"],
        "batch_size": config["batch_size"],
        "max_completion_length": config["sampling"]["max_new_tokens"],
        "beta": config["kl"]["coef"],
        "learning_rate": config["optimizer"]["learning_rate"],
        "max_steps": config["steps"],
    }


def metrics(run: Run) -> Iterator[dict[str, Any]]:
    """Yield what is known of each step, under our names: what was logged, and what its rollouts and tokens give."""
    more = _of_rollouts(run)
    positional = _positional_kl(run)
    for logged in run.steps().to_pylist():
        known = logged | more.get(logged["step"], {})
        parts = {name.removeprefix("reward/part/"): v for name, v in logged.items() if name.startswith("reward/part/")}
        known["parts"] = {name: value for name, value in parts.items() if value is not None}
        known["kl/positional"] = positional.get(logged["step"])
        variance, norm = known.get("advantage/rollout_var"), known.get("optim/grad_norm")
        known["advantage/std"] = None if variance is None else variance**0.5
        known["optim/grad_nan"] = None if norm is None else int(not np.isfinite(norm))
        yield known


def _of_rollouts(run: Run) -> dict[int, dict[str, float | None]]:
    """Return the reward's extremes, its mean over held-out rollouts, and the KL per token as TRL's GRPO has it."""
    frame = run.pandas("rows", ["step", "split", "reward", "kl_k3", "length"])
    found = {}
    for step, rows in frame.groupby("step"):
        held_out = rows["split"] == "eval"
        trained, tokens = rows[~held_out], rows["length"].where(rows["kl_k3"].notna()).sum()
        found[int(step)] = {
            "reward/min": float(trained["reward"].min()),
            "reward/max": float(trained["reward"].max()),
            "reward/eval": float(rows["reward"][held_out].mean()) if held_out.any() else None,
            "kl/token": float((rows["kl_k3"] * rows["length"]).sum() / tokens) if tokens else None,
        }
    return found


def _positional_kl(run: Run) -> dict[int, list[float]]:
    """Return the mean KL of the tokens in each eighth of the longest response, by step."""
    frame = run.pandas("tokens", ["step", "position", "logprob", "ref_logprob"]).dropna()
    if frame.empty:
        return {}
    width = frame["position"].max() + 1
    ratio = frame["ref_logprob"] - frame["logprob"]
    frame["kl"] = np.exp(ratio) - 1 - ratio
    frame["bucket"] = frame["position"] * BUCKETS // width
    means = frame.pivot_table(values="kl", index="step", columns="bucket", aggfunc="mean", fill_value=0.0)
    return {int(step): [float(value) for value in row] for step, row in zip(means.index, means.to_numpy(), strict=True)}


def reason_missing(python: Path | None) -> str | None:
    """Return why the two cannot be asked; None if they can."""
    if python is None:
        return "`--peers-python` was not given"
    try:
        asked = subprocess.run([python, ASK], capture_output=True, text=True, check=False)
    except OSError as error:
        return f"{python} cannot be started: {error.strerror}"
    return asked.stderr.strip().splitlines()[-1] if asked.returncode else None


def ask(python: Path, folders: Sequence[Path]) -> list[dict[str, Said]]:
    """Return what each says of some runs of the benchmark, in their order."""
    with TemporaryDirectory() as place:
        files = [Path(place, f"{folder.name}.json") for folder in folders]
        for folder, file in zip(folders, files, strict=True):
            file.write_text(json.dumps(logs_of(cavesson.open(folder))), encoding="utf-8")
        lines = subprocess.run([python, ASK, *files], capture_output=True, text=True, check=True).stdout.splitlines()
    return [{name: Said(**said) for name, said in json.loads(line).items()} for line in lines]


def translated(name: str, said: Said, own: Result, consequences: bool) -> Result:
    """Return what a tool said in our names: a planted cause where it means that one, else what it means first.

    As with our own notes, what is only worth a look (``info``) counts where it is what was planted. Causes that no
    check of the tool means, or only checks that it skipped, are ``skipped``.

    Args:
        name: Of the tool.
        said: What it said.
        own: What our doctor said of the same run.
        consequences: Whether a consequence of the planted cause, as our rules have it, counts as the cause.
    """
    accepted = sorted(accepted_of(own.case))

    def planted(symptom: str) -> list[str]:
        means = set(MEANS[name][symptom])
        return [one for one in accepted if one in means or (consequences and EXPLAINS[one] & means)]

    named = [
        (planted(symptom) or MEANS[name][symptom])[0]
        for symptom, severity in said.said
        if planted(symptom) or severity != "info"
    ]
    seen = {one for symptom in MEANS[name] if symptom not in said.skipped for one in planted(symptom)}
    skipped = tuple(one for one in accepted if one not in seen)
    return Result(own.case, own.steps, tuple(dict.fromkeys(named)), skipped=skipped)

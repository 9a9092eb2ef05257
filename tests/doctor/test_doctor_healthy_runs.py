"""The doctor names no error in a healthy run: of any algorithm and trainer, and however long it has run."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doctor_helpers import END, Array, Made, healthy, log_softmax, rewarded
from sick import resample

import cavesson
from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import diagnose
from cavesson.doctor.rules import RULES
from cavesson.importers import import_run
from cavesson.record import Recorder, write_rollouts, write_run

ROOT = Path(__file__).parents[2]
STEPS = 24
Change = Callable[[Made], None]


def errors(data: RunData) -> list[str]:
    return [one.rule.name for one in diagnose(data, RULES).findings if one.severity == "error"]


def chance() -> np.random.Generator:
    return np.random.default_rng(11)


def of(trainer: str, algorithm: str = "grpo", **config: Any) -> Change:
    def change(made: Made) -> None:
        made.info = {"trainer": trainer, "algorithm": algorithm, "config": config}

    return change


def rewards(draw: Callable[[Made], Array]) -> Change:
    def change(made: Made) -> None:
        made.rows["reward"] = made.rows["shaped_reward"] = np.asarray(draw(made), float)
        made.settle()

    return change


def without(*names: str) -> Change:
    def change(made: Made) -> None:
        for column in names:
            for place in (made.rows, made.tokens, made.metrics):
                place.pop(column, None)

    return change


def both(*changes: Change) -> Change:
    def change(made: Made) -> None:
        for one in changes:
            one(made)

    return change


def draw_again(made: Made, policy: Array) -> None:
    """Let another policy write and score the responses."""
    made.policy = policy
    resample(made, lambda policy: policy)
    reward = rewarded(made.tokens["token_id"], made.mask, made.rows["group"], chance())
    made.rows["reward"] = made.rows["shaped_reward"] = reward
    made.settle()
    delta = np.where(made.mask, made.tokens["logprob"] - made.tokens["ref_logprob"], 0.0)
    made.metrics["kl/objective"] = delta.sum(-1).mean(-1)


def at_temperature(temperature: float) -> Change:
    """Sampled and scored at a temperature, as most trainers do."""

    def change(made: Made) -> None:
        draw_again(made, log_softmax(made.policy / temperature))
        made.info["config"]["sampling"]["temperature"] = temperature

    return change


def untrained(made: Made) -> None:
    """Nearly uniform at first, less and less so."""
    draw_again(made, log_softmax(made.policy * np.linspace(0, 0.3, len(made.policy))[:, None]))


def coefficient(beta: float) -> Change:
    def change(made: Made) -> None:
        made.rows["kl_coef"] = np.full_like(made.rows["kl_coef"], beta)
        made.metrics["kl/coef"] = np.full(len(made.mask), beta)
        made.info["config"]["kl"]["coef"] = beta
        made.settle(beta)

    return change


def rounded(made: Made) -> None:
    """Sampler and trainer differ by the rounding of bfloat16."""
    made.info["config"]["model"]["dtype"] = "bfloat16"
    made.tokens["sampler_logprob"] += np.where(made.mask, chance().normal(0, 0.01, made.mask.shape), 0.0)
    made.metrics["policy/first_ratio_error"] += 0.05


def behind(made: Made) -> None:
    """The sampler is one update behind, which the record says."""
    ids, steps = made.tokens["token_id"], len(made.policy)
    for step in range(1, steps):
        made.tokens["sampler_logprob"][step] = np.where(made.mask[step], made.policy[step - 1][ids[step]], 0.0)
    made.rows["policy_version"] = np.maximum(made.rows["policy_version"] - 1, 0)


def averaged(made: Made) -> None:
    """The trainer logs its KL as the mean of k3 over the update."""
    delta = np.where(made.mask, made.tokens["logprob"] - made.tokens["ref_logprob"], 0.0)
    k3 = (np.exp(-delta) - 1 + delta).sum((1, 2)) / made.mask.sum((1, 2))
    made.metrics["kl"] = (k3 + np.append(k3[1:], k3[-1])) / 2 * 1.2
    made.metrics.pop("kl/objective")


def constant_length(made: Made) -> None:
    """No response ends: those of a task with a fixed length."""
    draw_again(made, log_softmax(np.where(np.arange(made.policy.shape[1]) == END, -40.0, made.policy)))


def parts(made: Made) -> None:
    total = made.rows["reward"]
    one = 0.5 * total + chance().normal(0, 0.2, total.shape)
    lines = zip(one, total - one, strict=True)
    pairs = [[{"style": a, "truth": b} for a, b in zip(*line, strict=True)] for line in lines]
    made.rows["reward_parts"] = np.array(pairs, object)


KINDS: dict[str, tuple[dict[str, Any], Change]] = {
    "ppo": ({}, without()),
    "grpo": ({"algorithm": "grpo"}, without()),
    "rloo": ({"algorithm": "rloo"}, without()),
    "raft": ({"algorithm": "raft"}, without("value", "token_reward", "advantage", "return")),
    "groups of 2": ({"algorithm": "grpo", "siblings": 2}, without()),
    "groups of 16": ({"algorithm": "grpo", "siblings": 16}, without()),
    "single responses": ({"siblings": 1}, without()),
    "small batches": ({"batch": 8}, without()),
    "another seed": ({"seed": 5}, without()),
    "temperature 0.7": ({}, at_temperature(0.7)),
    "temperature 1.3": ({}, at_temperature(1.3)),
    "untrained": ({}, untrained),
    "constant length": ({}, constant_length),
    "no penalty": ({}, coefficient(0.0)),
    "a large coefficient": ({}, coefficient(0.5)),
    "bfloat16": ({}, rounded),
    "binary rewards": ({}, rewards(lambda made: made.rows["reward"] > np.median(made.rows["reward"]))),
    "sparse rewards": ({}, rewards(lambda made: made.rows["reward"] > np.quantile(made.rows["reward"], 0.92))),
    "rewards of 1 and -1": ({}, rewards(lambda made: np.sign(made.rows["reward"] - 0.4))),
    "rewards in the hundreds": ({}, rewards(lambda made: 300 + 100 * made.rows["reward"])),
    "several rewards": ({"algorithm": "grpo"}, parts),
    "one update behind": ({"algorithm": "grpo"}, both(behind, of("prime-rl"))),
    "trl": ({"algorithm": "grpo"}, of("trl 1.16", loss_type="grpo")),
    "trl, kl over the update": ({"algorithm": "grpo"}, both(averaged, of("trl 1.16"))),
    "openrlhf, kl over the update": ({"algorithm": "grpo"}, both(averaged, of("openrlhf"))),
    "verl, kl over the update": ({"algorithm": "grpo"}, both(averaged, of("verl"))),
    "verl with a critic": ({}, of("verl", "ppo")),
    "no sampler": ({}, without("sampler_logprob")),
    "no entropy": ({}, without("entropy", "policy/entropy")),
    "no reference": ({}, without("ref_logprob", "kl_coef", "token_reward", "kl/objective")),
    "texts and rewards": ({}, without("logprob", "ref_logprob", "entropy", "sampler_logprob", "value", "token_reward")),
    "no metrics": ({}, lambda made: made.metrics.clear()),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
def test_a_healthy_run_has_no_error(kind: str, tmp_path: Path) -> None:
    options, change = KINDS[kind]
    for steps in (2, STEPS):
        made = healthy(**{"steps": steps} | options)
        change(made)
        assert errors(made.data(tmp_path / str(steps))) == [], steps


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3, 5, 10, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_a_healthy_run_has_no_error_at_any_length(kind: str, steps: int, tmp_path: Path) -> None:
    options, change = KINDS[kind]
    made = healthy(**{"steps": steps} | options)
    change(made)
    assert errors(made.data(tmp_path)) == []


METRICS: dict[str, dict[str, Array]] = {
    "trl": {"kl": np.linspace(0, 0.05, 30), "reward": np.linspace(0, 1, 30), "grad_norm": np.full(30, 0.4),
            "completions/mean_length": np.full(30, 120.0), "entropy": np.linspace(2, 1, 30)},
    "verl": {"actor/ppo_kl": np.full(30, 1e-4), "critic/rewards/mean": np.linspace(0, 1, 30),
             "actor/grad_norm": np.full(30, 0.2), "actor/entropy": np.linspace(1, 0.5, 30)},
    "openrlhf": {"kl": np.linspace(0, 0.02, 30), "reward": np.linspace(0, 1, 30), "response_length": np.full(30, 80.0)},
}  # fmt: skip


@pytest.mark.parametrize("trainer", METRICS)
def test_healthy_metrics_alone_have_no_error(trainer: str, tmp_path: Path) -> None:
    write_run(tmp_path, {"trainer": trainer, "algorithm": "grpo"})
    with Recorder(tmp_path) as recorder:
        for step in range(30):
            recorder.metrics(step, {name: float(values[step]) for name, values in METRICS[trainer].items()})
    assert errors(RunData(cavesson.open(tmp_path))) == []


def test_healthy_lines_of_rl_logging_board_have_no_error(tmp_path: Path) -> None:
    made = healthy(steps=8)
    lines = []
    for step, row in np.ndindex(made.mask.shape[:2]):
        kept = made.mask[step, row]
        tokens = {name: made.tokens[ours][step, row][kept].tolist() for name, ours in (
            ("logprobs", "logprob"), ("ref_logprobs", "ref_logprob"), ("values", "value"),
            ("token_rewards", "token_reward"), ("response_tokens", "token_id"))}  # fmt: skip
        texts = {"prompt": made.rows["prompt"][step, row], "response": made.rows["response"][step, row]}
        tokens["response_tokens"] = [str(token) for token in tokens["response_tokens"]]
        lines.append(
            json.dumps({**texts, **tokens, "reward": float(made.rows["reward"][step, row]), "step": int(step)})
        )
    (tmp_path / "board.jsonl").write_text("\n".join(lines))
    import_run(tmp_path / "board.jsonl", tmp_path / "run")
    assert errors(RunData(cavesson.open(tmp_path / "run"))) == []


def beginning(data: cavesson.Run, steps: int, folder: Path) -> RunData:
    """Return the first steps of a run as if it had ended there."""
    write_run(folder, data.info)
    rows, tokens = (data.arrow(name, steps=range(steps)) for name in ("rows", "tokens"))
    write_rollouts(folder, 0, rows, tokens)
    with Recorder(folder) as recorder:
        for line in data.arrow("steps", steps=range(steps)).to_pylist():
            numbers = {name: value for name, value in line.items() if isinstance(value, float)}
            recorder.metrics(line["step"], numbers)
    return RunData(cavesson.open(folder))


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "rloo", "raft"])
def test_our_recipes_have_no_error_at_any_length(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT / "recipes")
    command = [sys.executable, "-m", "cavesson", algorithm, f"tiny-{algorithm}.toml", "--run", str(tmp_path / "run")]
    subprocess.run([*command, "--doctor.on_finding", "ignore"], check=True, capture_output=True)
    run = cavesson.open(tmp_path / "run")
    for steps in (1, 2, 3, 5, 10, 30, 60):
        assert errors(beginning(run, steps, tmp_path / str(steps))) == [], steps

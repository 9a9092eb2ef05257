"""A small run made of numbers: two steps of two prompts with two responses, and one held-out response."""

import json
from pathlib import Path

from benchmarks.faults.case import Case
from cavesson.record import Recorder, begin_attempt, write_run, write_vocabulary

CASE = Case("top-k", 1, "grpo", "small", 3)
PROMPTS = ["a the", "a the", "the", "the"]
RESPONSES = [" good room", " bad", " room", " good good"]
IDS = [[1, 2], [3], [2], [1, 1]]
REWARDS = [1.0, -0.5, 0.25, 0.5]
ADVANTAGES = [0.75, -0.75, -0.5, 0.5]
CONFIG = {
    "samples_per_prompt": 2,
    "batch_size": 4,
    "steps": 2,
    "sampling": {"max_new_tokens": 4},
    "kl": {"coef": 0.125},
    "optimizer": {"learning_rate": 0.5},
}


def made(folder: Path, case: Case = CASE) -> Path:
    """Write it as a run of the benchmark. At step 1 every token is e^0.5 times as likely as for the reference."""
    write_run(folder, {"algorithm": case.algorithm, "config": CONFIG})
    (folder / "case.json").write_text(json.dumps(case._asdict()), encoding="utf-8")
    write_vocabulary(folder, ["<end>", "good", "room", "bad"], ["", " good", " room", " bad"])
    with Recorder(folder, attempt=begin_attempt(folder, start_step=0)) as recorder:
        for step in range(2):
            likely = [[-0.5] * len(ids) for ids in IDS]
            reference = [[-0.5 - 0.5 * step] * len(ids) for ids in IDS]
            tokens = {"token_id": IDS, "logprob": likely, "ref_logprob": reference}
            tokens |= {"advantage": [[a] * len(ids) for a, ids in zip(ADVANTAGES, IDS, strict=True)]}
            recorder.rollouts(step, _rows(list(range(4)), "train"), tokens)
            recorder.rollouts(step, _rows([0], "eval") | {"sample": [4], "reward": [3.0]})
            recorder.metrics(step, _metrics(step))
    return folder


def _rows(numbers: list[int], split: str) -> dict[str, list[object]]:
    return {
        "group": [number // 2 for number in numbers],
        "sample": list(numbers),
        "split": [split] * len(numbers),
        "prompt": [PROMPTS[number] for number in numbers],
        "response": [RESPONSES[number] for number in numbers],
        "reward": [REWARDS[number] for number in numbers],
        "reward_parts": [{"kind": 2 * REWARDS[number], "short": -REWARDS[number]} for number in numbers],
    }


def _metrics(step: int) -> dict[str, float]:
    return {
        "reward/mean": 0.3125,
        "reward/part/kind": 0.625,
        "policy/entropy": 2.0 - step,
        "advantage/rollout_var": 0.25,
        "group/zero_std": 0.0,
        "optim/grad_norm": float("nan") if step else 1.5,
        "length/response_mean": 1.5,
        "finish/length": 0.25,
    }

"""Cavesson's PPO on the work of work.py, with everything on that a user's run has."""

from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import work
from transformers import AutoConfig

from cavesson import PPORun, Reward, Training, UserError
from cavesson.rollout.rewards.classifier import ClassifierReward

MODES: dict[str, dict[str, Any]] = {
    "four": {"value": {"kind": "separate"}},
    "trunk": {},
    "own": {"model": {"lora": {}, "dtype": "bfloat16"}},
}
"""four: policy, reference, critic and reward model apart, all weights trained, float32, as TRL has them;
trunk: the critic is a head on the policy; own: LoRA in bfloat16, the reference is the policy without its adapters"""


def settings(mode: str, model: str, batch: int, steps: int, folder: Path) -> PPORun:
    chosen = MODES[mode]
    # An end token outside the vocabulary: every response runs to its full length.
    never = AutoConfig.from_pretrained(model).vocab_size
    return PPORun.model_validate(
        {
            **chosen,
            "run": folder / "run",
            "steps": steps,
            "batch_size": batch,
            "model": {"path": model, **chosen.get("model", {})},
            "data": {"shuffle": False},
            "sampling": {"max_new_tokens": work.RESPONSE, "eos_token_ids": (never,)},
            "update": {"epochs": 1, "mini_batches": 1},
        }
    )


class Watch:
    """Notes when the first step began, and when the last step's record was on disk."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.begin = self.end = self.peak = 0.0
        self.stages: dict[str, float] = {}

    def __call__(self, step: int, metrics: dict[str, float]) -> None:
        if step == 0:
            self.begin = perf_counter() - metrics["time/total"]
        if (metrics["length/response_mean"], metrics["length/response_std"]) != (work.RESPONSE, 0):
            raise UserError(f"step {step}: not every response has {work.RESPONSE} tokens; the work is not the same")
        for name in (name for name in metrics if name.startswith("time/") and name != "time/total"):
            self.stages[name] = self.stages.get(name, 0.0) + metrics[name]
        if step == self.training.settings.steps - 1:
            assert self.training.trainer.recorder is not None
            self.training.trainer.recorder.flush()
            self.end, self.peak = perf_counter(), work.peak_gib()


def main() -> None:
    """Print seconds, tokens per second, peak memory and seconds per stage."""
    given = work.arguments(__doc__, tuple(MODES))
    dtype = MODES[given.mode].get("model", {}).get("dtype", "float32")
    reward = ClassifierReward(f"{given.model}-classifier", batch_size=given.batch, dtype=dtype)
    with TemporaryDirectory() as folder:
        training = Training(
            settings(given.mode, given.model, given.batch, given.steps, Path(folder)),
            prompts=work.prompts(given.batch * given.steps),
            rewards=[Reward("classifier", reward)],
        )
        watch = Watch(training)
        start = perf_counter()
        training.run(watch)
        whole = perf_counter() - start
    seconds = watch.end - watch.begin
    # TRL saves nothing here, so saving is not part of the work; what it takes is printed beside it.
    apart = {"seconds/folder": watch.begin - start, "seconds/saving": whole - (watch.end - start)}
    work.print_result(
        seconds, given.batch, given.steps, watch.peak, **watch.stages, **apart, peak_rss_gib_saved=work.peak_gib()
    )


if __name__ == "__main__":
    main()

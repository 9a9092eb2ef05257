"""Training and sampling on a GPU: every figure of docs/gpu.md, in one call of under eight minutes.

    make gpu                                         # on a machine with a GPU: the tests marked gpu, then this
    python benchmarks/gpu.py --out gpu.jsonl         # each line is on the screen and in the file before the next begins
    python benchmarks/gpu.py --only grpo-7b mixed    # some lines
    python benchmarks/gpu.py --tiny                  # on a CPU, with tiny models: a rehearsal

The models have the sizes of Qwen2.5 and random weights, made here; nothing is downloaded. What can be recomputed and
how many tokens a micro-batch has is left to the plan. What is measured, and what is
counted as a FLOP, is explained in docs/gpu.md.
"""

import gc
import json
import math
import os
import shutil
import subprocess
import sys
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory, gettempdir
from time import perf_counter
from typing import Any, NamedTuple

import torch
from gpu_plain import bound, trl
from gpu_targets import verdicts
from gpu_work import GROUP, PROMPT, SIZES, Size, forward_flops, peak_tflops, save_model, texts, update_flops
from transformers import AutoConfig

import cavesson
from cavesson import Training
from cavesson.plan.devices import DEVICES
from cavesson.plan.predict import Predictor
from cavesson.plan.recipe import Planned
from cavesson.record import run_info
from cavesson.registry import ALGORITHMS
from cavesson.train.by_plan import with_choices

WARM_UP = 2
"""first steps, which compile and record, and do not count"""
REHEARSED = "h200"
"""GPU that is planned for in a rehearsal on a CPU"""
SHARED_MEMORY = Path("/dev/shm")
"""where models are written if there is room"""
Figures = dict[str, list[float]]


class Place(NamedTuple):
    """Where a line measures."""

    size: Size
    folder: Path
    """holds the model, and what the line writes"""
    device: str
    rounds: int
    peak: float | None
    """TFLOP/s of the device, if given"""


def settings_of(algorithm: str, place: Place, prompts: list[str], run: str = "run") -> dict[str, Any]:
    """Return settings of a run whose step is one pass over its responses, which the plan may divide as it fits."""
    values = plain_settings(place, run)
    data = place.folder / f"{run}.txt"
    data.write_text("\n".join(prompts))
    values["data"] = {"path": str(data), "max_prompt_tokens": 8 * PROMPT}
    # A token that no text has: every response has its full length.
    values["sampling"] = {"max_new_tokens": place.size.response, "eos_token_ids": [place.size.config["vocab_size"]]}
    values["update"] |= {"mini_batches": 1, "epochs": 1}
    values |= {"rewards": [{"use": "lowercase"}], "doctor": {"on_finding": "ignore"}}
    return {**values, "samples_per_prompt": GROUP, "kl": {"coef": 0.05}}


def plain_settings(place: Place, run: str) -> dict[str, Any]:
    """Return settings that all algorithms have. On a CPU, nothing is planned."""
    size, folder, plans = place.size, place.folder, place.device != "cpu"
    values: dict[str, Any] = {
        "run": str(folder / run), "steps": place.rounds + WARM_UP, "batch_size": size.batch,
        "model": {"path": str(folder / "model"), "dtype": "bfloat16", "device": place.device},
        "update": {"micro_batch_tokens": "auto" if plans else size.micro}, "checkpoint": {"every": 0},
    }  # fmt: skip
    if plans:
        values["model"]["gradient_checkpointing"] = "auto"
    if size.lora:
        values["model"]["lora"] = {"rank": 16, "alpha": 32}
    return values


def learning_flops(training: Training, place: Place) -> float:
    """Return the FLOPs that the scoring and the update of a step need.

    These are the passes of the policy that learn, a forward pass of the reference, and where advantages depend on
    scores, so that all responses are scored before any is learned from, one more of the policy.
    """
    size, config = place.size, AutoConfig.from_pretrained(place.folder / "model")
    trained = sum(p.numel() for p in training.trainer.learner.model.parameters() if p.requires_grad)
    passes = 2 if training.settings.algorithm.credits_scores else 1
    forward = sum(forward_flops(config, size.batch, PROMPT, size.response))
    return update_flops(config, trained, size.batch, PROMPT, size.response) + passes * forward


def trained(algorithm: str, values: dict[str, Any], place: Place) -> tuple[Training, list[dict[str, float]], Figures]:
    """Train, and return the run, the metrics of the steps that count, and what every algorithm has figures of."""
    begun = perf_counter()
    training = Training(ALGORITHMS[algorithm].settings.model_validate(values))
    start, device = perf_counter() - begun, training.processes.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    metrics = training.run(lambda step, seen: None).metrics
    counted = metrics[WARM_UP : WARM_UP + place.rounds]
    steps = [seen["time/total"] for seen in counted]
    more = metrics[0]["time/total"] - median(steps)
    figures: Figures = {"step, s": steps, "start, s": [start], "first, s more": [more]}
    if device.type == "cuda":
        figures["peak memory, GB"] = [torch.cuda.max_memory_allocated(device) / 1e9]
        figures["peak reserved, GB"] = [torch.cuda.max_memory_reserved(device) / 1e9]
    return training, counted, figures | chosen(training) | predicted(algorithm, training, place)


def rollouts(algorithm: str) -> Callable[[Place], Figures]:
    """Return a line of an algorithm that samples: responses of equal length."""

    def measure(place: Place) -> Figures:
        size = place.size
        values = settings_of(algorithm, place, texts(size.batch // GROUP, PROMPT))
        training, counted, figures = trained(algorithm, values, place)
        figures |= sampling_and_learning(counted, size.batch * size.response)
        flops = learning_flops(training, place)
        peak = peak_tflops(training.processes.device, place.peak)
        if peak is not None:
            figures["utilisation, %"] = [100 * flops / each / 1e12 / peak for each in figures["learning, s"]]
        return figures

    return measure


def sampling_and_learning(counted: list[dict[str, float]], tokens: float) -> Figures:
    """Return the figures of steps, each of which sampled this number of tokens."""
    return {
        "sampled tokens/s": [tokens / seen["time/generate"] for seen in counted],
        "learning, s": [seen["time/score"] + seen["time/update"] for seen in counted],
    }


def examples(algorithm: str) -> Callable[[Place], Figures]:
    """Return a line of an algorithm that learns from given examples, of the lengths of the others' work."""

    def measure(place: Place) -> Figures:
        size, data = place.size, place.folder / "data.jsonl"
        prompt, *answers = (texts(size.batch, n) for n in (PROMPT, size.response, size.response - 1))
        names = ("prompt", "response") if algorithm == "sft" else ("prompt", "chosen", "rejected")
        rows = zip(prompt, *answers[: len(names) - 1], strict=True)
        data.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
        values = {**plain_settings(place, "run"), "data": {"path": str(data)}}
        _, counted, figures = trained(algorithm, values, place)
        figures["learned tokens/s"] = [seen["data/tokens"] / seen["time/update"] for seen in counted]
        return figures

    return measure


def mixed(place: Place) -> Figures:
    """Learn from responses of geometric lengths to prompts of 64 to 512 tokens, and from equally many of equal length.

    Lengths are geometric if each token may end a response: of a random model, a share of the vocabulary does.
    """
    size, vocabulary = place.size, place.size.config["vocab_size"]
    low, high, mean = (32, 2048, 256) if size.response > 32 else (2, 32, 8)
    ends = list(range(2, 2 + vocabulary // mean))
    lengths = {"min_new_tokens": low, "max_new_tokens": high, "eos_token_ids": ends}
    count = size.batch // GROUP
    prompts = [texts(count, int(PROMPT * 8 ** (n / max(1, count - 1))))[n] for n in range(count)]
    equal = texts(count, sum(map(len, prompts)) // count)
    seconds: dict[str, list[float]] = {}
    figures: Figures = {}
    for name, asked, sampling in (("mixed", prompts, lengths), ("equal", equal, {"max_new_tokens": low + mean})):
        values = settings_of("grpo", place, asked, run=name)
        values["sampling"] |= sampling
        training, counted, seen = trained("grpo", values, place)
        rows = cavesson.open(training.settings.run).rows(["step", "length"]).to_pydict()
        tokens = [sum(n for n, at in zip(rows["length"], rows["step"], strict=True) if at == step + WARM_UP)
                  for step in range(place.rounds)]  # fmt: skip
        learning = [one["time/score"] + one["time/update"] for one in counted]
        seconds[name] = [each / n for each, n in zip(learning, tokens, strict=True)]
        figures |= {f"{name}: {figure}": numbers for figure, numbers in seen.items()}
        figures[f"{name}: response tokens"] = [float(n) for n in tokens]
        figures[f"{name}: learning, µs/token"] = [1e6 * each for each in seconds[name]]
        del training
        release()
    return {"mixed beside equal": [median(seconds["mixed"]) / median(seconds["equal"])], **figures}


def chosen(training: Training) -> Figures:
    """Return what a run has left to the plan."""
    values = run_info(Path(training.settings.run)).get("chosen", {})
    shares = {True: 1.0, "half": 0.5, False: 0.0}
    found = {"micro-batch, tokens": values.get("update.micro_batch_tokens")}
    if "model.gradient_checkpointing" in values:
        found["recomputed, share of layers"] = shares[values["model.gradient_checkpointing"]]
    return {name: [float(value)] for name, value in found.items() if value is not None}


def predicted(algorithm: str, training: Training, place: Place) -> Figures:
    """Return the peak memory that the plan predicts for a run, with what it has chosen, if it knows the GPU."""
    name = REHEARSED if place.device == "cpu" else torch.cuda.get_device_name(place.device).lower()
    gpu = next((known for known in DEVICES if known in name), None)
    if gpu is None:
        return {}
    settings = with_choices(training.settings, run_info(Path(training.settings.run)).get("chosen", {}))
    try:
        peak = Predictor(Planned("the run", algorithm, settings, (), False), DEVICES[gpu], 1).memory(settings).peak
    except Exception:  # what was measured is worth more than this
        traceback.print_exc()
        return {}
    return {"predicted, GB": [peak / 1e9]}


def plain(place: Place) -> Figures:
    """Measure the plain loss."""
    return bound(place.size, place.device, place.rounds, place.peak)


def beside_trl(place: Place) -> Figures:
    """Measure TRL, in two steps after one, as each takes more than ten seconds."""
    return trl(place.size, place.device, place.folder, min(2, place.rounds))


LINES: dict[str, tuple[str, Callable[[Place], Figures]]] = {
    "grpo-0.5b": ("0.5b", rollouts("grpo")),
    "grpo-7b": ("7b", rollouts("grpo")),
    "bound-0.5b": ("0.5b", plain),
    "mixed": ("0.5b", mixed),
    "trl-0.5b": ("0.5b", beside_trl),
    "grpo-1.5b": ("1.5b", rollouts("grpo")),
    "bound-7b": ("7b", plain),
    "ppo": ("0.5b", rollouts("ppo")),
    "sft": ("0.5b", examples("sft")),
    "dpo": ("0.5b", examples("dpo")),
    "reward-model": ("0.5b", examples("reward-model")),
}
"""Lines and their models, the most wanted first."""


def release() -> None:
    """Free the memory of what is not used any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measured(name: str, given: Namespace) -> dict[str, Any]:
    """Return the figures of a line, or why there are none; nothing that one does stops the next."""
    size, line = LINES[name]
    chosen = SIZES[("tiny adapters" if SIZES[size].lora else "tiny") if given.tiny else size]
    start = perf_counter()
    bytes_needed = 4 * 10**9 if not SIZES[size].lora else 34 * 10**9
    roomy = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > bytes_needed
    with TemporaryDirectory(prefix="cavesson-bench-", dir=SHARED_MEMORY if roomy else gettempdir()) as folder:
        place = Place(chosen, Path(folder), given.device, given.rounds, given.peak)
        try:
            if not name.startswith("bound"):
                save_model(chosen, given.device, place.folder / "model")
            found: dict[str, Any] = {"figures": line(place)}
        except Exception as error:  # the lines after this one are wanted whatever it was
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
    release()
    return {"line": name, "model": size, "seconds": round(perf_counter() - start, 1), **found}


def machine(device: str) -> str:
    """Return the names and versions that figures depend on."""
    if device == "cpu":
        return f"CPU, {os.cpu_count()} cores, torch {torch.__version__}"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0]
    name = torch.cuda.get_device_name(device)
    return f"{name}, driver {driver}, CUDA {torch.version.cuda}, torch {torch.__version__}"


def tell(out: Path | None, entry: dict[str, Any]) -> None:
    """Print an entry, and append it to the file, which has it whatever comes after."""
    title = ", ".join(str(value) for name, value in entry.items() if name != "figures")
    print(title, flush=True)
    for figure, values in entry.get("figures", {}).items():
        print(f"  {figure:26} {median(values):.4g} ({min(values):.4g} to {max(values):.4g})", flush=True)
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())


def arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=LINES, default=[*LINES], help="lines; default: all of them")
    parser.add_argument("--out", type=Path, help="file to which each line is appended as JSON")
    parser.add_argument("--rounds", type=int, help="steps that count; default: 3, in a rehearsal 1")
    parser.add_argument("--seconds", type=float, help="no line begins after so many; default: 460, in a rehearsal any")
    parser.add_argument("--peak", type=float, help="dense bfloat16 TFLOP/s of the device, if its name is not known")
    parser.add_argument("--device", help="cpu, cuda or cuda:1; default: a GPU if there is one")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to see that every line runs")
    given = parser.parse_args()
    given.rounds = given.rounds or (1 if given.tiny else 3)
    given.seconds = (math.inf if given.tiny else 460) if given.seconds is None else given.seconds
    return given


def main() -> None:
    given, start = arguments(), perf_counter()
    given.device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if given.device == "cpu" and not given.tiny:
        raise SystemExit("this machine has no usable GPU; --tiny runs on a CPU")
    tell(given.out, {"machine": machine(given.device)})
    failed, figures = False, dict[str, Figures]()
    for name in given.only:
        if perf_counter() - start > given.seconds:
            tell(given.out, {"line": name, "error": f"not begun after {given.seconds:.0f} s"})
            failed = True
            continue
        entry = measured(name, given)
        failed |= "error" in entry
        figures[name] = entry.get("figures", {})
        tell(given.out, entry)
    for verdict in verdicts({} if given.tiny else figures):
        print(verdict)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()

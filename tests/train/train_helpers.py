"""Small runs on the tiny model."""

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed.checkpoint as dcp
from settings_helpers import changed
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader

import cavesson
from cavesson.algorithms.ppo import PPORun
from cavesson.config import load
from cavesson.findings.stored import findings_file
from cavesson.models.tiny import tiny_model, tiny_tokenizer
from cavesson.registry import ALGORITHMS
from cavesson.train.loop import Report
from cavesson.train.run import Result, Training
from cavesson.types import Batch

PROMPTS = ("On the table", "My", "The morning train was", "A dog and", "Yesterday we", "It")

# What the recorder keeps of a number: cavesson/record/schema.py.
LOGPROB = 2.0**-17
"""what the difference of two recorded log-probabilities can be off"""
SIGNAL = 2.0**-11
"""what a recorded value, reward, advantage or return can be off, times its size"""

LORA = {"rank": 4, "alpha": 8}

# A quarter of the tiny model's tokens ends a response with these, and often the first one does.
STOP = tuple(c for c in map(chr, range(32, 127)) if not c.islower())


def uneven(prompts: Sequence[str], responses: Sequence[str], **_: Any) -> list[float]:
    """A reward that differs from response to response, −1 to 1; an empty one earns −1."""
    return [sum(map(ord, response)) % 7 / 3 - 1 for response in responses]


def settings(folder: Path, **changes: Any) -> PPORun:
    """Two steps of six short uneven responses; `kl__coef=0.1` changes the field `kl.coef`."""
    values: dict[str, Any] = {
        "run": folder,
        "steps": 2,
        "batch_size": 6,
        "model": {"device": "cpu"},
        "sampling": {"random_length": (1, 6)},
        "optimizer": {"learning_rate": 1e-3},
    }
    return PPORun.model_validate(changed(values, changes))


def quiet(step: int, metrics: dict[str, float]) -> None:
    pass


def finish(folder: Path, inputs: dict[str, Any] | None = None, **changes: Any) -> Result:
    """A whole run."""
    return build(folder, inputs, **changes).run(quiet)


def build(folder: Path, inputs: dict[str, Any] | None = None, **changes: Any) -> Training:
    """A run that has not started."""
    return Training(settings(folder, **changes), **{"prompts": PROMPTS, "rewards": uneven, **(inputs or {})})


# Sampling without the unlikely tokens, which scoring knows nothing of; the doctor looks as often as it can.
WATCHED = {"sampling__top_k": 3, "batch_size": 16, "steps": 12, "checkpoint__every": 0, "doctor__share": 1.0}


def patient(folder: Path) -> Report:
    """Let the doctor look once within a run of a second, and wait until it has seen something."""
    calls = count(1)

    def report(step: int, metrics: dict[str, float]) -> None:
        call = next(calls)
        if call == 1:
            time.sleep(1.2)  # that is when the first look may come
        for _ in range(3000 if call == 2 else 0):
            if findings_file(folder / "index").exists() and not is_looking():
                break
            time.sleep(0.1)

    return report


def is_looking() -> bool:
    """Whether a look of the doctor of this process has not ended."""
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it may end just now
            if "cavesson.doctor.look" in child.cmdline():
                return True
    return False


OFFLINE, ONLINE = ("sft", "reward-model", "dpo", "kto"), ("ppo", "grpo", "rloo", "raft", "distill")

DEMONSTRATIONS = (
    ("On the table", " lay a letter."), ("My", " dog"), ("", "It rained all day long, and nobody came."), ("A", "n"),
    ("Yesterday we", " walked home"), ("The train", " was late again today"), ("Who", "?"), ("She said", " no."),
)  # fmt: skip
PAIRS = (
    ("On the table", " lay a letter.", " X"), ("My", " dog", " DOG BARKS"), ("It", " rained.", "!!"),
    ("A", "n", "z"), ("Yesterday we", " walked home", " DID"), ("The train", " was late again", "..."),
    ("Who", "?", "!?!?!"), ("She said", " no.", " NEVER EVER"),
)  # fmt: skip
"""Of very uneven lengths; the last two are held out."""
LABELLED = tuple((*pair[:2], True) if i % 2 else (pair[0], pair[2], False) for i, pair in enumerate(PAIRS))

REWARDS = """
import os
import random

import numpy as np
import torch


def uneven(prompts, responses, **columns):
    return [sum(map(ord, response)) % 7 / 3 - 1 for response in responses]


def noisy(prompts, responses, **columns):
    return [len(r) + random.random() + np.random.rand() + float(torch.rand(())) for r in responses]


def rare(prompts, responses, **columns):
    return [float(sum(map(ord, response)) % 5 == 0) for response in responses]


def parts(prompts, responses, **columns):
    return {
        "letters": [100.0 * len(one) for one in responses],
        "even": [None if sum(map(ord, one)) % 3 == 0 else float(len(one) % 2 == 0) for one in responses],
    }


def same(prompts, responses, **columns):
    return [0.5] * len(responses)


def some(prompts, responses, **columns):
    return [None if sum(map(ord, one)) % 3 == 0 else (len(one) / 3, f"{len(one)} letters") for one in responses]


def none(prompts, responses, **columns):
    return [None] * len(responses)


def in_first(prompts, responses, **columns):
    return [None if os.environ.get("RANK") == "1" else len(response) / 3 for response in responses]
"""

TINY: dict[str, dict[str, Any]] = {
    "sft": {"data.path": "demonstrations.jsonl"},
    "reward-model": {"data.path": "pairs.jsonl"},
    "dpo": {"data.path": "pairs.jsonl"},
    "kto": {"data.path": "labelled.jsonl"},
    "ppo": {"kl.target": 0.05, "kl.horizon": 40, "kl.coef": 0.3, "shaping.scale": True, "shaping.normalise": True},
    "grpo": {"samples_per_prompt": 3, "kl.coef": 0.1},
    "rloo": {"samples_per_prompt": 3},
    "raft": {"raft.k": 2},
    "distill": {"samples_per_prompt": 3},
}


def tiny_flags(name: str, folder: Path, **changes: Any) -> list[str]:
    """Flags of the smallest run of an algorithm that does everything; `kl__coef=0.1` changes `kl.coef`.

    The data and the rewards it names are written beside its folder.
    """
    data = folder.absolute().parent / "data"
    data.mkdir(exist_ok=True)
    _write_rows(data / "demonstrations.jsonl", ("prompt", "response"), DEMONSTRATIONS)
    _write_rows(data / "pairs.jsonl", ("prompt", "chosen", "rejected"), PAIRS)
    _write_rows(data / "labelled.jsonl", ("prompt", "response", "label"), LABELLED)
    _write(data / "prompts.txt", "".join(f"{prompt}\n" for prompt in PROMPTS))
    _write(data / "rewards.py", REWARDS)
    values: dict[str, Any] = {
        "run": str(folder), "model.device": "cpu", "optimizer.learning_rate": 1e-2, "checkpoint.every": 1,
        "optimizer.schedule": "cosine", "optimizer.warmup_steps": 1,
    }  # fmt: skip
    if name in OFFLINE:
        values |= {"epochs": 2, "batch_size": 5, "data.validation": 0.25, "evaluation.every": 2}
    else:
        values |= {"steps": 2, "batch_size": 6, "data.path": "prompts.txt", "sampling.random_length": [1, 6]}
        values |= {"update.epochs": 2, "update.mini_batches": 2, "rewards": "uneven"}
        values["doctor.on_finding"] = "ignore"  # its last look at a finished run takes longer than the run
    if name == "distill":
        values["teacher.path"] = str(_teacher(data))
    values |= TINY[name] | {change.replace("__", "."): value for change, value in changes.items()}
    if not (values.get("data.validation") or values.get("data.validation_path")):
        values.pop("evaluation.every", None)
    values["data.path"] = str(data / values["data.path"])
    if values.get("rewards", "") is None:
        del values["rewards"]
    flags = []
    for field, value in values.items():
        text = f'[{{use = "{data}/rewards.py:{value}", name = "{value}"}}]' if field == "rewards" else json.dumps(value)
        flags += [f"--{field}", "none" if value is None else text]
    return flags


def _teacher(data: Path) -> Path:
    """Return the folder of a model that differs from the tiny one."""
    folder, unfinished = data / "teacher", data / f"teacher.{os.getpid()}"
    if not folder.exists():
        tiny_model(seed=5).save_pretrained(unfinished)
        tiny_tokenizer().save_pretrained(unfinished)
        with suppress(OSError):  # another process was faster
            unfinished.rename(folder)
    return folder


def _write_rows(path: Path, names: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    _write(path, "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))


def _write(path: Path, text: str) -> None:
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")  # another process may be reading it
    unfinished.write_text(text)
    unfinished.rename(path)


def tiny_run(name: str, folder: Path, inputs: dict[str, Any] | None = None, **changes: Any) -> Training:
    """A run of `tiny_flags` that has not started."""
    made = load(ALGORITHMS[name].settings, None, tiny_flags(name, folder, **changes))
    return Training(made, **(inputs or {}))


def timeless(metrics: dict[str, Any]) -> dict[str, Any]:
    """Metrics but for what a clock says."""
    own = ("time/", "machine/", "attempt", "tokens_per_second")
    return {name: value for name, value in metrics.items() if not name.startswith(own)}


def everything(folder: Path) -> dict[str, Any]:
    """What of a finished run must be the same bit for bit when it is run again, or was killed in between."""
    run = cavesson.open(folder, allow_remote=True)
    rows = run.rows()
    newest = max((folder / "checkpoints").glob("step-*"))
    files = [*(folder / "model").glob("*.safetensors"), *newest.iterdir(), *folder.glob("*.safetensors")]
    return {
        "metrics": [timeless(row) for row in run.steps().to_pylist()],
        "rows": rows.drop_columns("attempt").to_pylist(),
        "tokens": [run.tokens(step).to_pylist() for step in sorted(set(rows["step"].to_pylist()))],
        "files": {str(path.relative_to(folder)): path.read_bytes() for path in files},
    }


def tiny_folder(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write the tiny model to a folder, in several files."""
    tiny_model(dtype=dtype).save_pretrained(folder, max_shard_size="300KB")
    tiny_tokenizer().save_pretrained(folder)
    return folder


def saved(checkpoint: Path, kind: str) -> dict[str, Tensor]:
    """The "weights" or the "optimizer" of a checkpoint, joined by PyTorch from what each process has written."""
    reader = HuggingFaceStorageReader(str(checkpoint))
    known: dict[str, Any] = reader.read_metadata().state_dict_metadata
    own = [name for name in known if name != "lists" and "/" not in name]  # the others are those of rollouts
    names = [name for name in own if name.startswith(("exp_avg.", "exp_avg_sq.", "step.")) == (kind == "optimizer")]
    tensors = {name: torch.empty(known[name].size, dtype=known[name].properties.dtype) for name in names}
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def farthest(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """The largest difference between two sets of weights."""
    assert first.keys() == second.keys()
    return max((first[name].float() - second[name].float()).abs().max().item() for name in first)


def move(module: nn.Module, seed: int, size: float) -> None:
    """Add noise to every trainable weight."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter += size * torch.randn(parameter.shape, generator=generator)


def rollouts(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], pad: int = 1) -> Batch:
    """Given tokens as the sampler would hand them over."""
    left, right = max(map(len, prompts)), max(map(len, responses))
    return Batch(
        {
            "prompt_ids": torch.tensor([[pad] * (left - len(p)) + list(p) for p in prompts]),
            "prompt_mask": torch.tensor([[0] * (left - len(p)) + [1] * len(p) for p in prompts]),
            "response_ids": torch.tensor([list(r) + [pad] * (right - len(r)) for r in responses]),
            "attended": torch.tensor([[1.0] * len(r) + [0.0] * (right - len(r)) for r in responses]),
            "learned": torch.tensor([[1.0] * len(r) + [0.0] * (right - len(r)) for r in responses]),
        }
    )

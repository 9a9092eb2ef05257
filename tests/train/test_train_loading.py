"""Sharded models are loaded slice by slice: no process ever holds all of one, and the numbers are the same."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from loading_helpers import compare, measure
from safetensors.torch import load_file, save_file
from several_helpers import together
from train_helpers import farthest, quiet, saved, tiny_folder, tiny_run, weights
from two_processes import algorithms

import cavesson
from cavesson.models.tiny import tiny_model, tiny_tokenizer

SEPARATE: dict[str, Any] = {"value__kind": "separate"}
ADAPTERS = {"model__lora__rank": 2}
LOW = {"model__dtype": "bfloat16"}


def mixed_folder(folder: Path) -> Path:
    """Norms in float32 beside other weights in bfloat16."""
    tiny_folder(folder, torch.bfloat16)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        norms = {name: tensor.float() + 0.001 for name, tensor in tensors.items() if "norm" in name}
        save_file(tensors | norms, file, {"format": "pt"})
    return folder


def misnamed_folder(folder: Path) -> Path:
    """Weights in float32, of which the config says that they are in bfloat16."""
    config = tiny_folder(folder) / "config.json"
    config.write_text(config.read_text().replace('"float32"', '"bfloat16"'))
    return folder


@pytest.mark.slow
def test_weights_are_those_of_one_process(tmp_path: Path) -> None:
    full, low = (tiny_folder(tmp_path / str(dtype), dtype) for dtype in (torch.float32, torch.bfloat16))
    mixed, misnamed = mixed_folder(tmp_path / "mixed"), misnamed_folder(tmp_path / "misnamed")
    reward = tiny_run("reward-model", tmp_path / "reward", steps=1).run(lambda *_: None)
    cases: dict[str, tuple[bool, dict[str, Any]]] = {
        "copies": (True, {"algorithm": "ppo", "model__path": str(full), **SEPARATE, "parallel__offload": True}),
        "rounded": (True, {"algorithm": "ppo", "model__path": str(full), **LOW, **SEPARATE}),
        "other models": (
            True,
            {
                "algorithm": "ppo", "model__path": str(low), "reference__path": str(full), "reference__kind": "model",
                "value__path": str(reward.folder / "model"),
            },
        ),
        "adapters": (
            True,
            {"algorithm": "ppo", "model__path": str(low), "reference__kind": "copy", **ADAPTERS, **SEPARATE},
        ),
        "rounded adapters": (True, {"algorithm": "grpo", "model__path": str(full), **ADAPTERS, **LOW}),
        "dora": (False, {"algorithm": "sft", "model__path": str(low), **ADAPTERS, "model__lora__dora": True}),
        "new head": (True, {"algorithm": "reward-model", "model__path": str(full), **LOW}),
        "new head, adapters": (
            True, {"algorithm": "reward-model", "model__path": str(low), **ADAPTERS}
        ),
        "head and adapters": (
            True, {"algorithm": "reward-model", "model__path": str(reward.folder / "model"), **ADAPTERS}
        ),
        "files of several dtypes": (False, {"algorithm": "sft", "model__path": str(mixed)}),
        "files of another dtype": (False, {"algorithm": "sft", "model__path": str(misnamed)}),
    }  # fmt: skip
    ended = together(tmp_path, 2, compare, cases, tmp_path)
    assert [done.code for done in ended] == [0, 0], [done.err[-3000:] for done in ended]


@pytest.mark.slow
def test_no_process_holds_the_whole_model(tmp_path: Path) -> None:
    model = tiny_model(layers=12, hidden=768, dtype=torch.bfloat16)
    size = 4 * sum(parameter.numel() for parameter in model.parameters()) / 2**20  # trained weights are float32
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    ended = together(tmp_path, 2, several, tmp_path)
    assert [done.code for done in ended] == [0, 0], [done.err[-3000:] for done in ended]
    grew = [tuple(map(float, done.out.split("grew")[1].split()[:2])) for done in ended]
    for loading, saving in grew:
        assert loading < 0.9 * size and saving < 0.3 * size
    saved = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert saved["dtype"] == "float32"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_a_quantized_base_is_sharded_too(tmp_path: Path) -> None:
    tiny_model(hidden=128).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    model = {"model__path": str(tmp_path / "model"), "model__quantization": "nf4", "model__lora__rank": 2}
    runs = {name: {"algorithm": name, "optimizer__eps": 1e-3, **model} for name in ("grpo", "dpo")}
    runs["dpo"]["batch_size"] = 4
    sharded = {name: {**run, "parallel__shard": "full"} for name, run in runs.items()}
    ended = together(tmp_path, 2, algorithms, sharded, tmp_path)
    assert [done.code for done in ended] == [0, 0], [done.err[-3000:] for done in ended]
    (tmp_path / "alone").mkdir()
    for name, run in runs.items():
        training = tiny_run(run.pop("algorithm"), tmp_path / "alone" / name, **run)
        start = weights(training.trainer.learner.model)
        training.run(quiet)
        alone, several = (cavesson.open(tmp_path / place / name) for place in ("alone", "."))
        assert alone.info["model"]["fingerprint"] == several.info["model"]["fingerprint"]
        (mine, theirs) = (
            saved(max((tmp_path / place / name / "checkpoints").glob("step-*")), "weights") for place in ("alone", ".")
        )
        assert farthest(mine, theirs) < 1e-5 < 1e-3 < max(float((mine[key] - start[key]).abs().max()) for key in mine)


def several(folder: Path) -> None:
    measure(folder, model__path=str(folder / "model"), parallel__shard="full")

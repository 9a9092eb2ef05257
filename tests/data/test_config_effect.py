"""A value that would have no effect is an error of one line that names it."""

import re
from pathlib import Path
from typing import Any

import pytest

from cavesson.config import Settings, check
from cavesson.data.settings import SourceSettings
from cavesson.data.sources import read
from cavesson.errors import UserError
from cavesson.registry import ALGORITHMS
from cavesson.tools.settings import CompareSettings, EvaluateSettings, GenerateSettings

TOOLS: dict[str, type[Settings]] = {
    "generate": GenerateSettings, "compare": CompareSettings, "evaluate": EvaluateSettings
}  # fmt: skip
LORA = {"rank": 4}
# Command, settings that contradict each other, and what the message says.
WITHOUT_EFFECT: list[tuple[str, dict[str, Any], str]] = [
    # models
    ("ppo", {"reference": {"kind": "copy", "path": "a"}}, 'reference: path has no effect with kind "copy"'),
    ("grpo", {"reference": {"kind": "none", "path": "a"}}, 'reference: path has no effect with kind "none"'),
    ("rloo", {"reference": {"kind": "adapters-off", "path": "a"}}, 'path has no effect with kind "adapters-off"'),
    ("raft", {"reference": {"kind": "copy", "path": "a"}}, 'reference: path has no effect with kind "copy"'),
    ("ppo", {"reference": {"kind": "model"}}, 'reference: kind "model" needs path'),
    ("ppo", {"reference": {"gguf_file": "a.gguf"}}, "reference: gguf_file has no effect without path"),
    ("dpo", {"reference": {"gguf_file": "a.gguf"}}, "reference: gguf_file has no effect without path"),
    ("ppo", {"value": {"kind": "trunk", "path": "a"}}, 'value: path has no effect with kind "trunk"'),
    ("ppo", {"value": {"gguf_file": "a.gguf"}}, "value: gguf_file has no effect without path"),
    (
        "ppo",
        {"value": {"kind": "separate"}, "model": {"path": "a", "lora": LORA, "quantization": "nf4"}},
        "a separate critic trains all of its weights, and quantized weights cannot be trained",
    ),
    (
        "ppo",
        {"value": {"path": "b"}, "model": {"path": "a", "lora": LORA, "quantization": "nf4"}},
        "a separate critic trains all of its weights",
    ),
    ("sft", {"model": {"gguf_file": "a.gguf"}}, 'model: gguf_file has no effect with path "tiny"'),
    ("sft", {"model": {"quantization": "nf4", "lora": LORA}}, 'model: quantization has no effect with path "tiny"'),
    ("sft", {"model": {"path": "a", "new": {}}}, "model: path has no effect with new"),
    ("sft", {"model": {"new": {}, "lora": LORA, "quantization": "nf4"}}, "model: quantization has no effect with new"),
    ("sft", {"model": {"path": "a", "quantization": "nf4"}}, "quantized weights cannot be trained; add model.lora"),
    (
        "reward-model",
        {"model": {"path": "a", "quantization": "nf4", "lora": LORA}},
        "a reward model cannot be trained on quantized weights",
    ),
    ("ppo", {"model": {"device": "cpu", "compile": "none"}}, 'model: compile has no effect with device "cpu"'),
    (
        "ppo",
        {"model": {"path": "a", "quantization": "nf4", "lora": LORA, "compile": "none"}},
        "model: compile has no effect with quantization",
    ),
    (
        "sft",
        {"model": {"compile": "none"}, "parallel": {"shard": "full"}},
        "model.compile has no effect with parallel.shard",
    ),
    (
        "grpo",
        {"update": {"micro_batch_size": 2, "micro_batch_tokens": 64}},
        "update: micro_batch_size has no effect beside micro_batch_tokens",
    ),
    (
        "dpo",
        {"update": {"in_backward": True, "micro_batch_tokens": 64}},
        "update: micro_batch_tokens has no effect with in_backward",
    ),
    ("ppo", {"model": {"new": {}}}, "model.new has no effect here"),
    ("reward-model", {"model": {"new": {}}}, "model.new has no effect here"),
    (
        "dpo",
        {"dpo": {"reference_free": True}, "reference": {"path": "a"}},
        "reference.path has no effect with dpo.reference_free",
    ),
    # the KL
    ("ppo", {"kl": {"horizon": 500}}, "kl: horizon has no effect without target"),
    ("ppo", {"kl": {"coef": 0, "target": 1}}, "kl.coef 0 stays 0 whatever kl.target is"),
    ("rloo", {"kl": {"coef": 0.1}, "reference": {"kind": "none"}}, "kl.coef 0.1 needs a reference"),
    ("rloo", {"kl": {"coef": 0}, "rloo": {"kl_estimator": "k2"}}, "rloo.kl_estimator has no effect with kl.coef 0"),
    ("grpo", {"grpo": {"kl_in": "reward"}}, 'grpo.kl_in "reward" has no effect with kl.coef 0'),
    # algorithms
    ("grpo", {"grpo": {"longest": 64}}, 'grpo.longest has no effect without normalise "constant"'),
    ("grpo", {"grpo": {"overlong_buffer": 4}}, 'grpo.overlong "penalty" and grpo.overlong_buffer need each other'),
    ("raft", {"update": {"target_policy_kl": 0.1}}, "update.target_policy_kl has no effect in RAFT"),
    ("raft", {"update": {"max_ratio": 2.0}}, "update.max_ratio has no effect in RAFT"),
    ("dpo", {"dpo": {"loss_type": "ipo", "label_smoothing": 0.1}}, "label_smoothing has no effect with loss_type"),
    ("ppo", {"shaping": {"normalise": True}}, "shaping.normalise needs shaping.scale"),
    ("ppo", {"cleaning": {"discard_reward": -1.0}}, "discard_reward"),
    # the loop
    ("grpo", {"update": {"target_policy_kl": 0.1}}, "update: target_policy_kl has no effect with one optimiser step"),
    ("ppo", {"checkpoint": {"updates": 4}}, "checkpoint.updates 4 has no effect with 4 optimiser steps"),
    ("ppo", {"checkpoint": {"every": 0, "keep": 3}}, "checkpoint: keep has no effect with every = 0"),
    ("sft", {"checkpoint": {"every": 0, "keep": 3}}, "checkpoint: keep has no effect with every = 0"),
    ("ppo", {"doctor": {"on_finding": "ignore", "share": 0.1}}, 'doctor: share has no effect with on_finding "ignore"'),
    ("ppo", {"project": "mine"}, "project has no effect without a tracker that has projects"),
    ("dpo", {"project": "mine", "trackers": ["tensorboard"]}, "project has no effect without a tracker that has"),
    ("reward-model", {"evaluation": {"every": 5}}, "evaluation.every has no effect without held-out rows"),
    # sampling
    (
        "ppo",
        {"sampling": {"random_length": [1, 4], "max_new_tokens": 9}},
        "sampling: max_new_tokens has no effect with random_length",
    ),
    ("generate", {"sampling": {"temperature": 0, "top_p": 0.9}}, "sampling: top_p has no effect with temperature 0"),
    ("generate", {"sampling": {"temperature": 0, "top_k": 5}}, "sampling: top_k has no effect with temperature 0"),
    # data
    ("sft", {"data": {"path": "a", "mix": [{"path": "b"}]}}, "data: give path or mix, not both"),
    ("sft", {"data": {"path": "a", "weight": 2}}, "data: weight has no effect here"),
    ("sft", {"data": {"path": "a", "shuffle_buffer": 5}}, "data: shuffle_buffer has no effect without stream"),
    (
        "sft",
        {"data": {"path": "a", "stream": True, "shuffle": False, "shuffle_buffer": 5}, "steps": 2},
        "data: shuffle_buffer has no effect without stream and shuffle",
    ),
    ("sft", {"data": {"mix": [{"path": "a"}], "split": "test"}}, "data: split has no effect with mix"),
    ("sft", {"data": {"mix": [{"path": "a"}], "columns": {"text": "b"}}}, "data: columns has no effect with mix"),
    ("sft", {"data": {"validation": 0.1, "validation_path": "a"}}, "data: give validation, or validation_path"),
    ("ppo", {"evaluation": {"every": 5}}, "evaluation.every has no effect without held-out rows"),
    ("generate", {"data": {"path": "a", "validation_split": "b"}}, "data.validation_split holds rows out of training"),
    # tools
    ("compare", {"prompts": "a", "data": {"path": "b"}}, "give the prompts once"),
    ("evaluate", {"text": {"path": "a"}, "rewards": "exact_match"}, "rewards has no effect without --data.path"),
    ("evaluate", {"text": {"path": "a"}, "samples": 2}, "samples has no effect without --data.path"),
    (
        "evaluate",
        {"data": {"path": "a"}, "rewards": "exact_match", "text": {"stride": 4}},
        "text.stride has no effect without --text.path",
    ),
]


def settings_of(command: str) -> type[Settings]:
    kind: type[Settings] = TOOLS[command] if command in TOOLS else ALGORITHMS[command].settings
    return kind


@pytest.mark.parametrize(("command", "values", "said"), WITHOUT_EFFECT)
def test_a_value_without_effect_is_refused(command: str, values: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)) as error:
        check(settings_of(command), values, "recipe.toml")
    assert str(error.value).startswith("recipe.toml: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("command", [*ALGORITHMS, "generate"])
def test_what_a_run_writes_down_is_taken_again(command: str) -> None:
    settings = check(settings_of(command), {}, "the test")
    assert check(settings_of(command), settings.model_dump(mode="json"), "run.json") == settings


@pytest.mark.parametrize("values", [{"reference": {"path": "a"}}, {"reference": {"kind": "model", "path": "a"}}])
def test_a_path_implies_its_kind(values: dict[str, Any]) -> None:
    settings: Any = check(settings_of("ppo"), values, "the test")
    assert settings.reference.resolved(has_adapters=True) == "model"
    assert not settings.value.is_separate
    assert check(settings_of("ppo"), {"value": {"path": "a"}}, "the test").value.is_separate  # type: ignore[attr-defined]


def test_a_subset_of_files_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one\n")
    with pytest.raises(UserError, match=r"data\.subset has no effect on files"):
        list(read(SourceSettings(path=str(file), subset="main")))

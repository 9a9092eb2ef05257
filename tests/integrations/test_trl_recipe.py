"""Recipes from configurations of TRL: what is read from files, and what every setting becomes."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from trl_classes import config_class

from cavesson.config import load
from cavesson.errors import UserError
from cavesson.integrations.trl_recipe.given import TRAINERS, Given, read
from cavesson.integrations.trl_recipe.mapping import DEFAULTS, RULES
from cavesson.integrations.trl_recipe.recipe import recipe
from cavesson.registry import ALGORITHMS

SCRIPT = """
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

raise SystemExit("it must not be run")

def accuracy(completions, **_):
    return [1.0] * len(completions)

args = GRPOConfig(
    output_dir="out", num_generations=4, per_device_train_batch_size=4, gradient_accumulation_steps=2,
    steps_per_generation=4, max_steps=100, learning_rate=rate, beta=0.04, min_p=0.1,
)
trainer = GRPOTrainer(
    "some/model", args=args, reward_funcs=[accuracy, "some/classifier"],
    train_dataset=load_dataset("some/prompts", split="train[:5%]"),
    peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], lora_dropout=0.1), tools=[search],
)
"""


def settings(command: str, text: str, folder: Path) -> dict[str, Any]:
    """The table of a recipe, which must be valid."""
    path = folder / "recipe.toml"
    path.write_text(text)
    load(ALGORITHMS[command].settings, path, [])
    return tomllib.loads(text)


def test_a_script_is_read_without_running_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    text = recipe(read(tmp_path / "train.py", None), processes=3)
    found = settings("grpo", text, tmp_path)
    assert found["batch_size"] == 4 * 4 * 3  # the responses that are generated together
    assert found["update"] == {"mini_batches": 2, "micro_batch_size": 4}
    assert found["steps"] == 50  # two optimiser steps each
    assert found["model"] == {"path": "some/model", "lora": {"rank": 4, "alpha": 8, "targets": ["q_proj"]}}
    assert found["data"] == {"path": "some/prompts", "split": "train[:5%]"}
    assert [one["use"] for one in found["rewards"]] == ["train.py:accuracy", "classifier"]
    assert found["rewards"][1]["options"] == {"path": "some/classifier"}
    assert "# learning_rate = rate: it is not a constant" in text
    assert "# min_p = 0.1: filters are top_k and top_p" in text
    assert "# dropout = 0.1 of LoRA: adapters have a rank" in text
    assert "# tools of the trainer = [search]: it is not a constant" in text


def test_defaults_of_trl_that_are_not_ours_are_written(tmp_path: Path) -> None:
    found = settings("sft", recipe(Given("sft", {})), tmp_path)
    assert (found["batch_size"], found["epochs"]) == (8, 3.0)
    assert found["optimizer"] == {"learning_rate": 2e-5, "schedule": "linear"}


@pytest.mark.parametrize(
    ("trainer", "values", "expected"),
    [
        ("grpo", {"loss_type": "cispo", "epsilon_high": 5.0}, {"grpo": {"loss_type": "cispo", "clip_high": 4.0}}),
        ("grpo", {"scale_rewards": False}, {"grpo": {"scale": "none"}}),
        ("grpo", {"beta": 0.1}, {"grpo": {"kl_unbiased": True}, "kl": {"coef": 0.1}}),
        ("grpo", {"delta": 2.0}, {"grpo": {"dual_clip": 2.0}}),
        (
            "grpo",
            {"multi_objective_aggregation": "normalize_then_sum"},
            {"grpo": {"baseline": "batch", "scale": "batch"}, "shaping": {"parts": "normalised"}},
        ),
        ("rloo", {"reward_clip_range": (-2.0, 2.0)}, {"shaping": {"clip": 2.0}}),
        ("dpo", {"loss_type": "ipo"}, {"dpo": {"loss_type": "ipo", "length_normalised": True}}),
        ("reward-model", {"max_length": 512}, {"data": {"path": "x", "max_length": 512, "overlong": "drop"}}),
        (
            "distill",
            {"teacher_model": "t", "beta": 0.1, "max_steps": 7, "gradient_accumulation_steps": 2},
            {
                "teacher": {"path": "t"},
                "distill": {"loss_type": "full", "beta": 0.1, "own_share": 0.5},
                "steps": 7,
                "batch_size": 16,
            },
        ),
        (
            "kto",
            {"loss_type": "apo_zero_unpaired", "beta": 0.3, "desirable_weight": 2.0},
            {"kto": {"loss_type": "apo_zero_unpaired", "beta": 0.3, "desirable_weight": 2.0}},
        ),
        ("kto", {}, {"data": {"path": "x", "shuffle": False}}),
        (
            "cpo",
            {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 1.3, "label_smoothing": 0.1},
            {
                "dpo": {
                    "reference_free": True,
                    "length_normalised": True,
                    "beta": 2.0,
                    "margin": 1.3,
                    "label_smoothing": 0.1,
                }
            },
        ),
        ("cpo", {"loss_type": "simpo"}, {"dpo": {"reference_free": True, "length_normalised": True, "margin": 0.5}}),
        ("cpo", {}, {"dpo": {"reference_free": True}}),
        (
            "cpo",
            {"loss_type": "ipo", "label_smoothing": 0.1},  # which TRL ignores with this loss
            {"dpo": {"reference_free": True, "loss_type": "ipo", "length_normalised": True}},
        ),
        ("cpo", {"max_length": None}, {"data": {"path": "x", "max_length": 512}}),
        ("orpo", {}, {"dpo": {"loss_type": "orpo"}}),
        ("orpo", {"beta": 0.2}, {"dpo": {"loss_type": "orpo", "beta": 0.2}}),
        ("distill", {}, {"sampling": {"temperature": 0.9, "max_new_tokens": 128}}),
        ("sft", {"neftune_noise_alpha": 5}, {"sft": {"neftune_alpha": 5.0}}),
        ("sft", {"train_sampling_strategy": "sequential"}, {"data": {"path": "x", "shuffle": False}}),
        (
            "grpo",
            {"use_vllm": True, "vllm_tensor_parallel_size": 2, "vllm_gpu_memory_utilization": 0.5},
            {
                "sampling": {
                    "max_new_tokens": 512,
                    "engine": "vllm",
                    "vllm": {"arguments": ["--gpu-memory-utilization=0.5", "--tensor-parallel-size=2"]},
                }
            },
        ),
    ],
)
def test_what_a_setting_becomes(tmp_path: Path, trainer: str, values: dict[str, Any], expected: dict[str, Any]) -> None:
    found = settings(TRAINERS[trainer].command, recipe(Given(trainer, {"dataset": "x", **values})), tmp_path)
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("trainer", "values", "reason"),
    [
        ("grpo", {"loss_type": "sapo"}, "losses are dapo, bnpo"),
        ("grpo", {"use_vllm": True, "vllm_mode": "server"}, "sampling.servers"),
        ("dpo", {"loss_type": ["sigmoid", "bco_pair"]}, "losses are sigmoid, hinge"),
        ("sft", {"warmup_ratio": 0.1}, "set optimizer.warmup_steps to 0.1 · the number of steps"),
        ("sft", {"optim": "adafactor"}, "the optimiser is AdamW"),
        ("sft", {"learing_rate": 1.0}, "no setting of Cavesson does this"),
        ("rloo", {"reward_clip_range": (0.0, 2.0)}, "shaping.clip is symmetric"),
        ("distill", {"seq_kd": True}, "fine-tune on the teacher's responses"),
        ("cpo", {"cpo_alpha": 1.0}, "learns the likelihood of the chosen response, too"),
        ("cpo", {"cpo_alpha": 0.0, "loss_type": "alphapo"}, "losses are sigmoid, hinge, ipo, simpo"),
        ("cpo", {"alpha": 0.25}, "AlphaPO is not a loss of dpo.loss_type"),
        ("orpo", {"is_encoder_decoder": True}, "models have a decoder only"),
        ("sft", {"packing": True}, "a batch counts examples and not packed sequences"),
        ("sft", {"push_to_hub": True}, "cavesson push-to-hub"),
        ("dpo", {"train_sampling_strategy": "group_by_length"}, "rows come shuffled or in their order"),
    ],
)
def test_what_has_no_counterpart_is_listed_with_the_reason(
    tmp_path: Path, trainer: str, values: dict[str, Any], reason: str
) -> None:
    text = recipe(Given(trainer, {"dataset": "x", **values}))
    settings(TRAINERS[trainer].command, text, tmp_path)
    (line,) = [line for line in text.splitlines() if reason in line]
    assert line.startswith(f"# {list(values)[-1]} = ") or "vllm" in line


def test_files_of_the_command_line_are_read(tmp_path: Path) -> None:
    values = {
        "model_name_or_path": "m",
        "dataset_name": "d",
        "dtype": "bfloat16",
        "use_peft": True,
        "lora_r": 3,
        "scale_rewards": "none",
        "reward_funcs": ["accuracy_reward", "mine.rewards.short"],
        "reward_model_name_or_path": "some/classifier",
    }
    (tmp_path / "a.json").write_text(json.dumps(values))
    (tmp_path / "a.yaml").write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in values.items()))
    for name in ("a.json", "a.yaml"):
        given = read(tmp_path / name, None)
        assert given.trainer == given.command == "grpo"
        found = settings("grpo", recipe(given), tmp_path)
        lora = {"rank": 3, "alpha": 32}  # 32 is the default of TRL's commands
        assert found["model"] == {"path": "m", "dtype": "bfloat16", "lora": lora}
        assert found["data"] == {"path": "d"}
        assert [one["use"] for one in found["rewards"]] == [
            "trl.rewards:accuracy_reward",
            "mine.rewards:short",
            "classifier",
        ]


@pytest.mark.parametrize(
    ("text", "trainer"),
    [
        ("CPOConfig(loss_type='simpo', cpo_alpha=0.0)", "cpo"),
        ("ORPOTrainer('m', args=ORPOConfig(beta=0.2), train_dataset=rows)", "orpo"),
        ('{"loss_type": "simpo", "simpo_gamma": 1.0, "label_smoothing": 0.1}', "cpo"),
        ('{"f_divergence_type": "reverse_kl"}', "dpo"),
    ],
)
def test_several_trainers_become_one_command(tmp_path: Path, text: str, trainer: str) -> None:
    path = tmp_path / ("a.json" if text[0] == "{" else "a.py")
    path.write_text(text)
    given = read(path, None)
    assert (given.trainer, given.command) == (trainer, "dpo")
    assert recipe(given).startswith("# cavesson dpo RECIPE")
    settings("dpo", recipe(given), tmp_path)


def test_no_setting_tells_of_a_trainer_that_another_has() -> None:
    pytest.importorskip("trl")
    for key, trainer in TRAINERS.items():
        fields = set(config_class(key).__dataclass_fields__)
        assert trainer.telling - {"teacher_model_name_or_path"} <= fields
        for other in TRAINERS.values():
            assert other is trainer or not other.telling & fields or (key == "distill" and other.name == "SFT")


def test_a_script_of_a_distillation_names_its_teacher(tmp_path: Path) -> None:
    script = 'GKDTrainer("small", teacher_model="large", args=GKDConfig(lmbda=1.0), train_dataset=rows)'
    (tmp_path / "train.py").write_text(script)
    text = recipe(read(tmp_path / "train.py", None))
    found = settings("distill", text, tmp_path)
    assert (found["model"], found["teacher"]) == ({"path": "small"}, {"path": "large"})
    assert "of the trainer" not in text


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "learning_rate: 1", "does not say which trainer it is for: add --trainer"),
        ("a.yaml", "[", "cannot be read"),
        ("a.json", "[1]", "holds no table of settings"),
        ("a.py", "x = (", "line 1"),
        ("a.py", "print(1)", "has no call of SFTConfig"),
        ("a.py", "SFTConfig(); DPOConfig()", "has 2 calls"),
        ("a.toml", "", "give a .yaml, .json or .py file"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        read(tmp_path / name, None)


@pytest.mark.parametrize("trainer", RULES)
def test_every_field_and_default_is_that_of_trl(trainer: str) -> None:
    trl = pytest.importorskip("trl")
    fields = config_class(trainer).__dataclass_fields__
    ours = {
        "model",
        "dataset",
        "datasets",
        "dtype",
        "torch_dtype",
        "lora",
        "load_in_4bit",
        "load_in_8bit",
        "dataset_config",
        "dataset_train_split",
        *(("teacher_model", "num_generations") if trainer == "distill" else ()),
    }
    former = {"warmup_ratio"}
    assert set(RULES[trainer]) - ours - former <= set(fields) | set(trl.GRPOConfig.__dataclass_fields__) | set(
        trl.SFTConfig.__dataclass_fields__
    )
    for name, default in DEFAULTS[trainer].items() - ({("num_generations", 1)} if trainer == "distill" else set()):
        theirs = fields[name].default
        theirs = getattr(theirs, "value", theirs)
        assert theirs == default or fields[name].default_factory() == [default], name


def short(completions: list[str], **_: Any) -> list[float]:
    return [-float(len(completion)) for completion in completions]


def test_a_live_trainer_says_what_its_script_would(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    from cavesson.integrations.trl import recipe as of_trainer
    from cavesson.models.tiny import tiny_model, tiny_tokenizer

    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")

    config = trl.GRPOConfig(
        str(tmp_path / "out"),
        num_generations=4,
        num_train_epochs=2,
        beta=0.1,
        bf16=False,
        use_cpu=True,
        report_to="none",
    )
    data = pytest.importorskip("datasets").Dataset.from_dict({"prompt": ["a", "b", "c", "d", "e"]})
    trainer = trl.GRPOTrainer(str(tmp_path / "model"), short, args=config, train_dataset=data)
    text = of_trainer(trainer)
    found = settings("grpo", text, tmp_path)
    assert found["steps"] == 5  # 2 passes over 5 prompts, 4 responses each, 8 at a time
    assert found["kl"] == {"coef": 0.1}
    assert [one["use"] for one in found["rewards"]] == [f"{__file__}:short"]
    assert "Without a counterpart" not in text


def test_a_live_trainer_without_a_command_of_its_name(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    from trl.experimental.cpo import CPOTrainer

    from cavesson.integrations.trl import recipe as of_trainer
    from cavesson.models.tiny import tiny_model, tiny_tokenizer

    config = config_class("cpo")(
        str(tmp_path), loss_type="simpo", cpo_alpha=0.0, simpo_gamma=0.3, bf16=False, use_cpu=True, report_to="none"
    )
    data = pytest.importorskip("datasets").Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}])
    trainer = CPOTrainer(tiny_model(), args=config, train_dataset=data, processing_class=tiny_tokenizer())
    text = of_trainer(trainer)
    found = settings("dpo", text, tmp_path)
    assert found["dpo"] == {"reference_free": True, "length_normalised": True, "margin": 0.3}
    assert "Without a counterpart" not in text


def test_an_object_that_is_not_a_trainer() -> None:
    pytest.importorskip("trl")
    from cavesson.integrations.trl import recipe as of_trainer

    with pytest.raises(UserError, match="object is not a trainer of TRL with a counterpart: SFTTrainer"):
        of_trainer(object())

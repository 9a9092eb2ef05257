"""A run of episodes that a fault can be planted in before it starts, and the model that all of them start from."""

import copy
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.faults.changes import Changes, patched
from benchmarks.faults.episodes.trained.office import Office, demonstrations, questions, right
from cavesson.algorithms.grpo import GRPORun
from cavesson.algorithms.ppo import PPORun
from cavesson.algorithms.raft import RAFTRun
from cavesson.algorithms.rloo import RLOORun
from cavesson.algorithms.sft import SFTRun
from cavesson.rollout.rewards.base import RewardFunction
from cavesson.train.run import Training

RUNS = {"grpo": GRPORun, "rloo": RLOORun, "ppo": PPORun, "raft": RAFTRun}
TEMPLATE = Path(__file__).with_name("office.jinja")
END, PAD = "<|endoftext|>", "<|pad|>"
BATCH = 32
COMMON: dict[str, Any] = {
    "batch_size": BATCH,
    "samples_per_prompt": 4,
    "data": {"chat": True, "template": str(TEMPLATE), "max_prompt_tokens": 60},
    "sampling": {"max_new_tokens": 24},
    "environment": {"max_turns": 4, "max_tokens": 220},
    "optimizer": {"learning_rate": 4e-4},
    "kl": {"coef": 0.0},
    "reference": {"kind": "none"},
    "checkpoint": {"every": 0},
    "doctor": {"on_finding": "ignore"},
}
OWN: dict[str, dict[str, Any]] = {
    "ppo": {"reference": {}, "update": {"epochs": 1, "mini_batches": 1}},
    "raft": {"raft": {"selection": "local", "k": 4}},
}


@dataclass
class Setup(Changes):
    """Everything that makes a run; a fault changes some of it."""

    algorithm: str
    model: Path
    """folder of the model it starts from"""
    seed: int
    steps: int = 10
    settings: dict[str, Any] = field(default_factory=dict)
    environment: Any = Office
    """the user's class, or several by name"""
    tools: list[Callable[..., Any]] = field(default_factory=list)
    reward: RewardFunction | None = right
    kinds: str = "wl"
    """of the questions"""
    patches: list[Any] = field(default_factory=list)
    """in force while it trains"""

    def __post_init__(self) -> None:
        self.settings = copy.deepcopy(COMMON | OWN.get(self.algorithm, {}))
        self.settings["model"] = {"path": str(self.model)}


def train(setup: Setup, folder: Path) -> None:
    """Run a setup to its end, and leave its record in ``folder``."""
    with patched(setup):
        settings = RUNS[setup.algorithm].model_validate(
            {"run": folder, "seed": setup.seed, "steps": setup.steps, **setup.settings}
        )
        Training(
            settings,
            prompts=questions(setup.seed, setup.kinds),
            rewards=setup.reward,
            environment=setup.environment,
            tools=setup.tools or None,
        ).run(report=_quiet)


def warm_start(folder: Path, examples: Iterable[dict[str, Any]] | None = None, steps: int = 500) -> Path:
    """Return the folder of a model that has seen demonstrations; it is trained if it is not there yet.

    Args:
        folder: of the runs.
        examples: conversations; by default, those of the office.
        steps: of SFT.
    """
    run, start = folder / "warm-start", folder / "start"
    if not (run / "model").exists():
        folder.mkdir(parents=True, exist_ok=True)
        data = folder / "demonstrations.jsonl"
        lines = [json.dumps(one) for one in examples or demonstrations(seed=0, count=4000)]
        data.write_text("\n".join(lines) + "\n", encoding="utf-8")
        tokenizer = new_tokenizer()
        new_model(len(tokenizer)).save_pretrained(start)
        tokenizer.save_pretrained(start)
        settings = SFTRun.model_validate(
            {
                "run": run,
                "steps": steps,
                "batch_size": 32,
                "model": {"path": str(start)},
                "optimizer": {"learning_rate": 3e-3, "warmup_steps": 20, "schedule": "cosine"},
                "data": {"path": str(data), "template": str(TEMPLATE)},
            }
        )
        Training(settings, resume=run.exists()).run(report=_quiet)
    return run / "model"


def new_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer over bytes with the words of the office's demonstrations."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=520, special_tokens=[END, PAD], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([json.dumps(one) for one in demonstrations(seed=0, count=300)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, padding_side="left")


def new_model(vocabulary: int) -> PreTrainedModel:
    """Return a model of random weights."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=96,
        intermediate_size=288,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
        tie_word_embeddings=True,
        initializer_range=0.05,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def _quiet(step: int, metrics: Any) -> None: ...

"""How well `cavesson check` predicts the peak memory on a GPU: full training and LoRA, several lengths and algorithms.

Every case is predicted in one process and trained, two steps, in another; both are fresh. What is measured is
`torch.cuda.max_memory_allocated`.

    python benchmarks/memory.py                  all cases, with models of made-up weights
    python benchmarks/memory.py --only lora      those with "lora" in their names
    python benchmarks/memory.py --model FOLDER   with a model of yours
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

LORA = {"lora": {"rank": 16}}
ROLLOUT = {"steps": 2, "batch_size": 8, "rewards": [{"use": "lowercase"}], "sampling": {}}
MODES: dict[str, dict[str, Any]] = {
    "bfloat16": {"model": {"dtype": "bfloat16"}},
    "bfloat16, not compiled": {"model": {"dtype": "bfloat16", "compile": "none"}},
    "bfloat16, half recomputed": {"model": {"dtype": "bfloat16", "gradient_checkpointing": "half"}},
    "bfloat16, recomputed": {"model": {"dtype": "bfloat16", "gradient_checkpointing": True}},
    "bfloat16, micro-batches by tokens": {"model": {"dtype": "bfloat16"}, "update": {"micro_batch_tokens": 1024}},
}
"""Ways in which a GPU learns: packed and compiled, unless stated otherwise."""
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "sft full 64": ("sft", 64, {"batch_size": 8}),
    "sft full 128": ("sft", 128, {"batch_size": 4}),
    "sft full 256": ("sft", 256, {"batch_size": 4}),
    "sft full 512": ("sft", 512, {"batch_size": 4}),
    "sft full 256, 4 micro-batches": ("sft", 256, {"batch_size": 8, "update": {"micro_batch_size": 2}}),
    "sft full 256, bfloat16": ("sft", 256, {"batch_size": 4, "model": {"dtype": "bfloat16"}}),
    "sft full 512, checkpointing": ("sft", 512, {"batch_size": 4, "model": {"gradient_checkpointing": True}}),
    "sft lora 64": ("sft", 64, {"batch_size": 8, "model": LORA}),
    "sft lora 128": ("sft", 128, {"batch_size": 4, "model": LORA}),
    "sft lora 256": ("sft", 256, {"batch_size": 4, "model": LORA}),
    "sft lora 512": ("sft", 512, {"batch_size": 4, "model": LORA}),
    "reward-model lora 256": ("reward-model", 256, {"batch_size": 2, "model": LORA}),
    "dpo full 256": ("dpo", 256, {"batch_size": 2}),
    "ppo full 128": ("ppo", 64, {**ROLLOUT, "update": {"epochs": 1, "mini_batches": 2}}),
    "ppo full 256": ("ppo", 128, {**ROLLOUT, "update": {"epochs": 1, "mini_batches": 2}}),
    "ppo lora 256": ("ppo", 128, {**ROLLOUT, "model": LORA, "update": {"epochs": 1, "micro_batch_size": 4}}),
    "ppo full 128, separate critic": ("ppo", 64, {**ROLLOUT, "value": {"kind": "separate"}, "update": {"epochs": 1}}),
    "grpo full 128": ("grpo", 64, {**ROLLOUT, "samples_per_prompt": 4, "kl": {"coef": 0.01}}),
    "grpo lora 256": ("grpo", 128, {**ROLLOUT, "samples_per_prompt": 4, "model": LORA}),
    **{
        f"grpo full 512, {name}": ("grpo", 256, {**ROLLOUT, "samples_per_prompt": 4, "kl": {"coef": 0.01}, **changes})
        for name, changes in MODES.items()
    },
    "grpo lora 512, bfloat16": (
        "grpo",
        256,
        {**ROLLOUT, "samples_per_prompt": 4, "model": {**LORA, "dtype": "bfloat16"}},
    ),
}
"""Command, length of prompt or example in tokens, and settings. A rollout's response is as long as its prompt."""


def make_model(folder: Path, hidden: int = 512, layers: int = 8, vocabulary: int = 16_384) -> None:
    """A Llama of random weights, 38 million as it stands, over bytes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from cavesson.models.tiny import tiny_tokenizer

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def settings_of(name: str, model: Path, folder: Path) -> dict[str, Any]:
    """The settings of a case, with data of its length written into the folder."""
    command, length, given = CASES[name]
    from transformers import AutoConfig

    from cavesson.models.load import load_tokenizer

    tokenizer = load_tokenizer(str(model))
    data = folder / "data.jsonl"
    data.write_text("\n".join(json.dumps(_row(tokenizer, command, length, number)) for number in range(32)))
    path = {"path": str(model), **given.get("model", {})}
    settings = {"steps": 2, **given, "run": str(folder / "run"), "model": path, "data": {"path": str(data)}}
    if "sampling" in settings:
        # An end token outside the vocabulary: every response has its full length.
        never = AutoConfig.from_pretrained(model).get_text_config().vocab_size
        settings["sampling"] = {"max_new_tokens": length, "eos_token_ids": [never]}
    return {"command": command, "settings": settings}


def _row(tokenizer: Any, command: str, length: int, number: int) -> dict[str, str]:
    """Return a row of data. No other row has its prompt: what is the same is read once."""
    if command in ("ppo", "grpo"):
        return {"prompt": text_of(tokenizer, f"{number}", length)}
    prompt = text_of(tokenizer, f"{number}", length // 2)
    response, other = (text_of(tokenizer, start, length // 2) for start in "ab")
    return {"prompt": prompt, "response": response} if command == "sft" else {
        "prompt": prompt, "chosen": response, "rejected": other,
    }  # fmt: skip


def text_of(tokenizer: Any, start: str, length: int) -> str:
    """Return a text with a given start and number of tokens, made of words: tokenizers may join equal letters."""
    used = len(tokenizer(start).input_ids)
    for unit in ("a", " a"):
        text = start + unit * (length - used)
        if len(tokenizer(text).input_ids) == length:
            return text
    raise SystemExit(f"no text of {length} tokens that starts with {start!r} was found for this tokenizer")


def predict(case: dict[str, Any]) -> int:
    """The predicted peak in bytes, as `cavesson check` makes it."""
    from cavesson.check.run import Options, check_run
    from cavesson.config import check
    from cavesson.plan.recipe import Planned
    from cavesson.registry import ALGORITHMS

    settings = check(ALGORITHMS[case["command"]].settings, case["settings"], "the case")
    plan = Planned("case", case["command"], settings, (), False)
    report = check_run(plan, Options(short_run=False))
    assert report.memory is not None, report.findings
    return report.memory.peak


def measure(case: dict[str, Any]) -> int:
    """The bytes of a run of two steps at its peak."""
    import torch

    from cavesson.config import check
    from cavesson.registry import ALGORITHMS
    from cavesson.train.run import Training

    training = Training(check(ALGORITHMS[case["command"]].settings, case["settings"], "the case"))
    training.run(lambda _step, _metrics: None)
    return torch.cuda.max_memory_allocated()


def in_a_process(what: str, case: dict[str, Any]) -> int:
    """Call one of the two functions above in a fresh process."""
    command = [sys.executable, __file__, f"--{what}", json.dumps(case)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def compare(name: str, model: Path) -> tuple[int, int]:
    """What is predicted and what is measured of a case, in bytes."""
    with TemporaryDirectory() as folder:
        case = settings_of(name, model, Path(folder))
        return in_a_process("predict", case), in_a_process("measure", case)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of the names of the cases")
    parser.add_argument("--model", type=Path, help="a model's folder instead of a made-up one")
    parser.add_argument("--predict", help=argparse.SUPPRESS)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.predict or arguments.measure:
        done = predict(json.loads(arguments.predict)) if arguments.predict else measure(json.loads(arguments.measure))
        print(json.dumps(done))
        return
    names = [name for name in CASES if arguments.only in name]
    if not names:
        parser.error(f"no case has {arguments.only!r} in its name; there are {', '.join(CASES)}")
    print(f"{'MB':32} {'predicted':>10} {'measured':>10} {'error':>7}")
    with TemporaryDirectory() as folder:
        if arguments.model is None:
            make_model(Path(folder))
        for name in names:
            told, seen = (size / 2**20 for size in compare(name, arguments.model or Path(folder)))
            print(f"{name:32} {told:10.0f} {seen:10.0f} {told / seen - 1:+7.1%}", flush=True)


if __name__ == "__main__":
    main()

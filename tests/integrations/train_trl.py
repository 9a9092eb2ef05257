"""A few recorded steps of a trainer of TRL on a small model: python train_trl.py KIND RUN OUT.

KIND is grpo, rloo, ppo, rewards, tools, or a wrong mask: learns-results, masks-calls, loses-messages, function.

What the trainer computed is caught here once more, by other means, and written to OUT as JSON.
"""

import json
import os
import sys
import time
from functools import partial
from pathlib import Path

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from cavesson.integrations.trl import RecorderCallback, record

PROMPTS = ["one two", "three", "four five six", "seven"]


def tokenizer(end: str = "<end>") -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    built = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate([end, "<pad>", *alphabet])}, merges=[]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=built, padding_side="left", eos_token=end, pad_token="<pad>"
    )  # fmt: skip


def model(kind: type = LlamaForCausalLM, seed: int = 0, **more: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return kind(LlamaConfig(vocab_size=258, eos_token_id=0, pad_token_id=1, bos_token_id=None, **sizes, **more))


def vowels(completions: list[str], **given: object) -> list[float]:
    return [float(sum(text.count(v) for v in "aeiou")) for text in completions]


def short(completions: list[str], **given: object) -> list[float | None]:
    return [None if text.startswith("a") else -float(len(text)) for text in completions]


def arguments(folder: str) -> dict[str, object]:
    given = {"output_dir": f"{folder}/out", "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    return given | {"use_cpu": True, "bf16": False, "logging_steps": 1, "learning_rate": 1e-2, "seed": 3}


def grouped(name: str, run: str) -> tuple[object, list]:
    import trl

    config = {"grpo": "GRPOConfig", "rloo": "RLOOConfig"}[name]
    trainer_class = getattr(trl, config.replace("Config", "Trainer"))
    seen: list[dict] = []

    class Caught(trainer_class):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            seen.append({"ids": output["completion_ids"].tolist(), "mask": output["completion_mask"].tolist()})
            seen[-1]["advantages"] = output["advantages"].tolist()
            with torch.no_grad():  # once more, by transformers alone
                ids = torch.cat([output["prompt_ids"], output["completion_ids"]], 1)
                attention = torch.cat([output["prompt_mask"], output["completion_mask"]], 1)
                logits = self.model(input_ids=ids, attention_mask=attention).logits[:, :-1] / self.temperature
                logprobs = torch.log_softmax(logits, -1)[:, -output["completion_ids"].shape[1] :]
                seen[-1]["logprobs"] = logprobs.gather(-1, output["completion_ids"][..., None])[..., 0].tolist()
                seen[-1]["entropies"] = (-(logprobs.exp() * logprobs).sum(-1)).tolist()
            return output

    given = arguments(run) | {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 3}
    given |= {"num_generations": 4, "max_completion_length": 8, "beta": 0.1, "log_completions": True}
    given |= {"reward_weights": [1.0, 0.5]}
    data = Dataset.from_dict({"prompt": PROMPTS, "answer": [p.upper() for p in PROMPTS]})
    policy = model()
    policy.save_pretrained(f"{run}-model")  # the reference is loaded from where the policy came from
    policy = LlamaForCausalLM.from_pretrained(f"{run}-model")
    trainer = Caught(
        model=policy, args=getattr(trl, config)(**given), processing_class=tokenizer(), train_dataset=data,
        reward_funcs=[vowels, short],
    )  # fmt: skip
    record(trainer, run)
    return trainer, seen


def rewards(run: str) -> tuple[object, list]:
    from trl import GRPOConfig, GRPOTrainer

    callback = RecorderCallback(run)
    given = arguments(run) | {"per_device_train_batch_size": 4, "max_steps": 2, "num_generations": 2}
    trainer = GRPOTrainer(
        model=model(), args=GRPOConfig(**given, max_completion_length=4), processing_class=tokenizer(),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}), reward_funcs=callback.rewards([vowels, short]),
        callbacks=[callback],
    )  # fmt: skip
    return trainer, []


def ppo(run: str) -> tuple[object, list]:
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    encode = tokenizer()
    data = Dataset.from_dict({"input_ids": encode(PROMPTS * 4)["input_ids"]})
    given = arguments(run) | {"per_device_train_batch_size": 4, "local_rollout_forward_batch_size": 4}
    given |= {"num_mini_batches": 1, "num_ppo_epochs": 2, "num_sample_generations": 0, "total_episodes": 12}
    given |= {"response_length": 8, "temperature": 0.7, "stop_token": "eos", "missing_eos_penalty": 1.0}
    scorers = [model(LlamaForSequenceClassification, seed, num_labels=1) for seed in (1, 2)]
    trainer = PPOTrainer(
        args=PPOConfig(**given), processing_class=encode, model=model(), ref_model=model(seed=9),
        reward_model=scorers[0], value_model=scorers[1], train_dataset=data, eval_dataset=data,
    )  # fmt: skip
    record(trainer, run)
    return trainer, []


def call(name: str, **given: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': given})}\n</tool_call>"


FIRST = [
    "I see. " + call("multiply", a=6, b=7),
    call("lookup", word="six") + "\n" + call("multiply", a=2, b=2),
    call("divide", a=1, b=0),
    "No tool.",
]
"""What the policy says first in each rollout: such a small model would not call a tool by chance."""


class Calculator:
    def reset(self, **row: object) -> None:
        self.calls = 0

    def multiply(self, a: int, b: int) -> int:
        """Multiply two numbers.

        Args:
            a: The first.
            b: The second.
        """
        time.sleep(0.05)
        self.calls += 1
        return a * b

    def divide(self, a: int, b: int) -> float:
        """Divide two numbers.

        Args:
            a: The first.
            b: The second.
        """
        return a / b

    def get_reward(self) -> float:
        return float(self.calls)


async def lookup(word: str) -> str:
    """Look a word up.

    Args:
        word: The word.
    """
    return f"{word} is a word"


def tools(run: str, mask: str = "") -> tuple[object, list]:
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen2_5_chat_template

    encode, seen = tokenizer("<|im_end|>"), []
    encode.chat_template = qwen2_5_chat_template

    class Scripted(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids, *given, **more):
            texts = [encode.decode(ids).rsplit("<|im_start|>", 2)[1] for ids in prompt_ids]
            said = [FIRST[i % 4] if "<tool_response>" not in text else "Done." for i, text in enumerate(texts)]
            return [encode.encode(f"{text}<|im_end|>") for text in said], None

        def _tool_call_loop(self, *given):
            right, completions, *others = super()._tool_call_loop(*given)
            if mask == "loses-messages":
                completions = [[one for one in said if one["role"] != "tool"] for said in completions]
            return ([wrong(row, mask) for row in right], completions, *others)

        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            names = ("completion_ids", "completion_mask", "tool_mask")
            seen.append({name: output[name].tolist() for name in names})
            return output

    given = arguments(run) | {"per_device_train_batch_size": 4, "max_steps": 2, "num_generations": 4}
    trainer = Scripted(
        model=model(max_position_embeddings=8192), args=GRPOConfig(**given, max_completion_length=400),
        processing_class=encode, train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "6*7?"}]]}),
        environment_factory=Calculator, tools=[lookup],
    )  # fmt: skip
    record(trainer, run)
    return trainer, seen


def wrong(right: list[int], mask: str) -> list[int]:
    """Return what a user makes of the mask of an episode."""
    if mask in ("learns-results", "loses-messages"):
        return [1] * len(right)
    first = right.index(0) if mask == "masks-calls" and 0 in right else 0
    return [0] * first + right[first:]


def function(run: str) -> tuple[object, list]:
    """A function of the user's samples, calls a tool and samples again, and forgets to return a mask."""
    from trl import GRPOConfig, GRPOTrainer

    encode = tokenizer()
    said, result, answer = (encode.encode(text) for text in ("I ask.", "[RESULT] 42 [END]", "It is 42.<end>"))

    def rollout(prompts, trainer):
        likely = [[-0.5] * len(ids) for ids in (said, answer)]
        return {
            "prompt_ids": [encode.encode(prompt) for prompt in prompts],
            "completion_ids": [said + result + answer for _ in prompts],
            "logprobs": [likely[0] + [0.0] * len(result) + likely[1] for _ in prompts],
        }

    given = arguments(run) | {"per_device_train_batch_size": 4, "max_steps": 2, "num_generations": 4}
    trainer = GRPOTrainer(
        model=model(), args=GRPOConfig(**given, max_completion_length=64), processing_class=encode,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}), reward_funcs=[vowels], rollout_func=rollout,
    )  # fmt: skip
    record(trainer, run)
    return trainer, [len(said), len(result), len(answer)]


def main(name: str, run: str, out: str) -> None:
    others = {"ppo": ppo, "rewards": rewards, "tools": tools, "function": function}
    others |= {mask: partial(tools, mask=mask) for mask in ("learns-results", "masks-calls", "loses-messages")}
    trainer, seen = others[name](run) if name in others else grouped(name, run)
    trainer.train()
    Path(out).write_text(json.dumps({"seen": seen, "logs": trainer.state.log_history}))


if __name__ == "__main__":
    main(*sys.argv[1:])

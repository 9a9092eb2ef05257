"""Episodes per second beside TRL, and what a second turn costs with and without the kept cache.

    python benchmarks/episodes.py build/bench-models/smol

TRL 1.16 and Cavesson sample the same turns in this process, one after the other in each round: the same class as the
environment, the same template, prompts and tokens per turn. A model without training neither calls tools nor ends its
turns, so both sides take every turn that has its tokens for the same call. Only generation is timed: prompts are reset
and rendered, turns sampled, calls answered.

The second turn goes on after a prompt of 300 tokens, a turn of 60 and an answer of 20.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, TypeVar

import torch
import trl.trainer.grpo_trainer as theirs
import work
from datasets import Dataset
from quiet import machine, spread
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen2_5_chat_template

from cavesson import Training
from cavesson.algorithms.grpo import GRPORun
from cavesson.data.prompts import padded_prompts
from cavesson.models.load import load_causal, load_tokenizer
from cavesson.models.policy import Policy
from cavesson.rollout.calls import CallFormat
from cavesson.rollout.engines.responses import Responses, Turns
from cavesson.rollout.engines.sampler import Sampler
from cavesson.rollout.engines.settings import DecodingSettings
from cavesson.rollout.json_calls import Parsed
from cavesson.rollout.types import Call
from cavesson.train.memory import keep_freed_memory

GROUP = 8
ARGUMENTS = {"a": 6, "b": 7}
ROOM = 60
"""more than an answer with its template has"""
PROMPT, FIRST, ANSWER = 300, 60, 20
"""tokens before a second turn"""

T = TypeVar("T")
Play = Callable[[], tuple[float, float]]
"""Plays episodes; returns its seconds, and the tokens of an episode after its prompt."""


class Calculator:
    """The environment of both sides."""

    def reset(self, **row: Any) -> None:
        self.calls = 0

    def multiply(self, a: int, b: int) -> str:
        """Multiply two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        self.calls += 1
        return str(a * b)

    def get_reward(self) -> float:
        return float(self.calls)


def questions(given: Namespace) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": text}] for text in work.prompts(max(1, given.rows // GROUP))]


def ours(given: Namespace, folder: str) -> Play:
    """Return what plays episodes with Cavesson."""
    never = AutoConfig.from_pretrained(given.model).vocab_size
    settings = {
        "run": Path(folder) / "run",
        "steps": 1,
        "batch_size": given.rows,
        "samples_per_prompt": min(GROUP, given.rows),
        "model": {"path": given.model},
        "data": {"template": qwen2_5_chat_template, "shuffle": False},
        "sampling": {"max_new_tokens": given.tokens, "eos_token_ids": (never,)},
        "environment": {"max_turns": given.turns, "max_tokens": given.turns * (given.tokens + ROOM)},
    }
    training = Training(GRPORun.model_validate(settings), prompts={"prompt": questions(given)}, environment=Calculator)
    collector = training.trainer.batches.collector
    sample = collector.sampler.sample

    def ended(*args: Any, **named: Any) -> Responses:
        found = sample(*args, **named)
        return found._replace(finish_reasons=["stop"] * len(found.finish_reasons))

    collector.sampler.sample = ended
    indices = [row // GROUP for row in range(given.rows)]

    def play() -> tuple[float, float]:
        start = perf_counter()
        rollouts = collector.generate(indices, 0, range(given.rows))
        seconds = perf_counter() - start
        collector.conversation.release(rollouts.worlds)
        assert bool(rollouts["sampler_logprob"].isfinite().all())
        assert rollouts["learned"].sum(1).tolist() == [given.turns * given.tokens] * given.rows
        return seconds, float(rollouts["attended"].sum(1).mean())

    return play


def of_trl(given: Namespace, folder: str) -> Play:
    """Return what plays the same episodes with TRL."""
    tokenizer = AutoTokenizer.from_pretrained(given.model, padding_side="left")
    tokenizer.chat_template = qwen2_5_chat_template
    config = GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        report_to="none",
        per_device_train_batch_size=given.rows,
        num_generations=min(GROUP, given.rows),
        beta=0.0,
        gradient_checkpointing=False,
        max_completion_length=given.turns * (given.tokens + ROOM),
        max_tool_calling_iterations=given.turns - 1,
        generation_kwargs={"max_new_tokens": given.tokens, "min_new_tokens": given.tokens},
    )
    rows = [question for question in questions(given) for _ in range(min(GROUP, given.rows))]
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": rows}),
        processing_class=tokenizer,
        environment_factory=Calculator,
    )
    trainer.model.train()
    generate, found = trainer._generate, []

    def timed(prompts: Any) -> Any:
        start = perf_counter()
        generated = generate(prompts)
        learned = generated[2]
        assert [sum(mask) for mask in learned] == [given.turns * given.tokens] * given.rows
        found[:] = perf_counter() - start, sum(map(len, learned)) / given.rows
        return generated

    trainer._generate = timed

    def play() -> tuple[float, float]:
        trainer._generate_and_score_completions([{"prompt": row} for row in rows])
        return found[0], found[1]

    return play


def call_always() -> None:
    """Let both sides take every turn for a call."""
    function = {"type": "function", "function": {"name": "multiply", "arguments": ARGUMENTS}}
    theirs.parse_response = lambda *_, **__: {"role": "assistant", "content": "", "tool_calls": [function]}
    CallFormat.parse = lambda *_: Parsed("", [Call("multiply", dict(ARGUMENTS))])  # type: ignore[method-assign]


def second_turn(given: Namespace, has_turns: bool) -> Callable[[], float]:
    """Return what plays two turns and says how many seconds the second one took."""
    never = AutoConfig.from_pretrained(given.model).vocab_size
    settings = DecodingSettings(max_new_tokens=max(FIRST, given.tokens), eos_token_ids=(never,))
    sampler = Sampler(Policy(load_causal(given.model)), load_tokenizer(given.model), settings, 0, has_turns=has_turns)
    numbers = torch.Generator().manual_seed(0)
    prompts = torch.randint(1000, (given.rows, PROMPT), generator=numbers).tolist()
    answer = torch.randint(1000, (ANSWER,), generator=numbers).tolist()
    rows, read = range(given.rows), PROMPT + FIRST + ANSWER
    sampler.prepare(given.rows, read)

    def play() -> float:
        with sampler.sampling():
            first = sampler.sample(padded_prompts(prompts), 0, rows, turns=Turns([0] * len(rows), [FIRST] * len(rows)))
            ids = [[*prompt, *turn, *answer] for prompt, turn in zip(prompts, first.response_ids.tolist(), strict=True)]
            turns = Turns([FIRST + ANSWER] * len(rows), [given.tokens] * len(rows))
            start = perf_counter()
            second = sampler.sample(padded_prompts(ids), 0, rows, turns=turns)
            seconds = perf_counter() - start
        assert bool(second.sampler_logprob.isfinite().all()) and bool(second.mask.all())
        return seconds

    return play


def in_turns(plays: Sequence[Callable[[], T]], rounds: int) -> list[list[T]]:
    """Call each in every round, and return what they found; a first round allocates memory and does not count."""
    found = [[play() for play in plays] for _ in range(rounds + 1)][1:]
    return [list(column) for column in zip(*found, strict=True)]


def main() -> None:
    """Print medians and ranges of both sides and both ways, and of their ratios."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a folder that models.py has made, such as build/bench-models/smol")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=40, help="of a turn")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    keep_freed_memory()
    call_always()
    print(machine())
    with TemporaryDirectory() as folder:
        mine, trl = in_turns([ours(given, folder), of_trl(given, folder)], given.rounds)
    print(f"{given.rows} episodes of {given.turns} turns of {given.tokens} tokens, in turns, episodes/s")
    for name, side in (("Cavesson", mine), ("TRL", trl)):
        speeds = [given.rows / seconds for seconds, _ in side]
        print(f"  {name:<13} {spread(speeds)}, {side[0][1]:.1f} tokens after the prompt")
    print(f"  ratio         {spread([theirs / ours for (ours, _), (theirs, _) in zip(mine, trl, strict=True)])}")
    again, kept = in_turns([second_turn(given, has_turns) for has_turns in (False, True)], given.rounds)
    print(f"second turn of {given.tokens} tokens after {PROMPT} + {FIRST} + {ANSWER}, in turns, s")
    print(f"  all read again {spread(again)}")
    print(f"  cache kept     {spread(kept)}")
    print(f"  ratio          {spread([old / new for old, new in zip(again, kept, strict=True)])}")


if __name__ == "__main__":
    main()

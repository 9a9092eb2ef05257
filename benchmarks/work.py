"""The piece of work that all sides do, and the line each of them prints.

Imported by TRL's own environment as well: nothing but the standard library.
"""

import json
import resource
from argparse import ArgumentParser, Namespace
from typing import Any

RESPONSE = 32
"""tokens of every response"""

PROMPT = 13
"""tokens of every prompt, with SmolLM2's tokenizer"""

_WORDS = """
dog cat house river music winter train friend garden teacher horse bread city summer book letter window mountain song
market doctor school bridge forest island clock kitchen village ocean morning
"""
"""a token each"""


def prompts(count: int) -> list[str]:
    """Return different prompts of `PROMPT` tokens each: what is equal would be read once by some sides, not by all."""
    things = _WORDS.split()
    pairs = [(first, second) for second in things for first in things if first != second]
    if count > len(pairs):
        raise SystemExit(f"{count} prompts are needed, and there are {len(pairs)}: give fewer responses or steps")
    return [f"Tell me something short and nice about the {first} and the {second}:" for first, second in pairs[:count]]


def arguments(description: str | None, modes: tuple[str, ...] = ()) -> Namespace:
    """Read `[--mode MODE] MODEL BATCH STEPS`."""
    parser = ArgumentParser(description=description)
    if modes:
        parser.add_argument("--mode", choices=modes, default=modes[0])
    parser.add_argument("model", help="a folder that models.py has made, such as build/bench-models/smol")
    parser.add_argument("batch", type=int, help="responses per step")
    parser.add_argument("steps", type=int)
    return parser.parse_args()


def peak_gib() -> float:
    """The most memory this process has had at any time, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def count_positions(model: Any) -> list[int]:
    """Return a list to which every forward pass of a model in PyTorch adds the number of tokens that it reads."""
    positions: list[int] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, given: positions.append(given[0].numel()))
    return positions


def print_examples(seconds: float, batch: int, steps: int, peak: float, positions: list[int]) -> None:
    """Print the speed and memory of `steps` steps on `batch` examples each, and the positions that were computed."""
    speed = {"seconds": seconds, "examples_per_second": batch * steps / seconds}
    print_json(speed | {"peak_rss_gib": peak, "positions": sum(positions)})


def print_result(seconds: float, batch: int, steps: int, peak: float, **more: float) -> None:
    """Print the speed and memory of `steps` steps of `batch` responses each."""
    tokens = batch * steps * RESPONSE
    print_json({"seconds": seconds, "response_tokens_per_second": tokens / seconds, "peak_rss_gib": peak, **more})


def print_json(numbers: dict[str, float]) -> None:
    """Print one JSON line."""
    print(json.dumps({name: round(number, 4) for name, number in numbers.items()}), flush=True)

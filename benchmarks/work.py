"""The piece of work that all sides do, and the line each of them prints.

Imported by TRL's own environment as well: nothing but the standard library.
"""

import json
import resource
from argparse import ArgumentParser, Namespace

RESPONSE = 32
"""tokens of every response"""

_THINGS = ("dog", "cat", "house", "river", "music", "winter", "train", "friend", "garden", "teacher")


def prompts(count: int) -> list[str]:
    """Prompts of about 17 tokens each."""
    pairs = ((_THINGS[i % 10], _THINGS[7 * i % 10]) for i in range(count))
    return [f"Tell me something short and nice about the {first} and the {second}:" for first, second in pairs]


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


def print_result(seconds: float, batch: int, steps: int, peak: float, **more: float) -> None:
    """Print the speed and memory of `steps` steps of `batch` responses each."""
    tokens = batch * steps * RESPONSE
    print_json({"seconds": seconds, "response_tokens_per_second": tokens / seconds, "peak_rss_gib": peak, **more})


def print_json(numbers: dict[str, float]) -> None:
    """Print one JSON line."""
    print(json.dumps({name: round(number, 4) for name, number in numbers.items()}), flush=True)

"""Tokens per second of sampling many responses, a few at a time: in parts, and with places that are filled again.

    python benchmarks/places.py build/bench-models/smol

The length of each response is drawn between one token and the limit. In parts, the next responses wait until the
longest one of the current part has ended. Each round measures both.
"""

from argparse import ArgumentParser
from time import perf_counter

import torch
import work
from quiet import machine, spread

from cavesson.data.prompts import padded_prompts
from cavesson.models.load import load_causal, load_tokenizer
from cavesson.models.policy import Policy
from cavesson.rollout.engines.sampler import Sampler
from cavesson.rollout.engines.settings import DecodingSettings
from cavesson.train.memory import keep_freed_memory
from cavesson.types import Batch


def speed(sampler: Sampler, prompts: Batch, rows: int) -> float:
    """Return the tokens per second of sampling a response to each prompt, `rows` of them in one call."""
    parts, start = torch.arange(len(prompts)).split(rows), perf_counter()
    found = [sampler.sample(prompts.take(part), 0, range(int(part[0]), int(part[-1]) + 1)) for part in parts]
    return sum(float(responses.mask.sum()) for responses in found) / (perf_counter() - start)


def main() -> None:
    """Print medians and ranges of both, and of their ratio."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a folder that models.py has made, such as build/bench-models/smol")
    parser.add_argument("--responses", type=int, default=64)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--longest", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    keep_freed_memory()
    tokenizer = load_tokenizer(given.model)
    settings = DecodingSettings(random_length=(1, given.longest), batch_size=given.at_once)
    sampler = Sampler(Policy(load_causal(given.model)), tokenizer, settings, seed=0)
    prompts = padded_prompts(tokenizer(work.prompts(given.responses))["input_ids"])
    sampler.prepare(given.responses, prompts["prompt_ids"].shape[1])
    if not sampler.decoding.replaces:
        raise SystemExit(f"{given.model} samples in parts only, because of its cache")
    parts, replaced = [], []
    for _ in range(given.rounds + 1):
        parts.append(speed(sampler, prompts, given.at_once))
        replaced.append(speed(sampler, prompts, given.responses))
    del parts[0], replaced[0]  # the first round allocates memory
    print(machine())
    print(f"{given.responses} responses of 1 to {given.longest} tokens, {given.at_once} at once, in turns, tokens/s")
    print(f"  in parts        {spread(parts)}")
    print(f"  places refilled {spread(replaced)}")
    print(f"  ratio           {spread([new / old for new, old in zip(replaced, parts, strict=True)])}")


if __name__ == "__main__":
    main()

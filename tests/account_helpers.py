"""The account of a run: which prompts went in, and which rollouts came out."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import cavesson
from cavesson.data.order import InMemory


def account(place: Path | str, prompts: Sequence[str], steps: int) -> None:
    """Check that a finished run used every prompt once, in the order of a run that nothing happened to.

    Prompts in = rollouts recorded + rollouts refused. The only prompts that a run refuses are those that are too long,
    which run.json names; no rollout is refused, and none is recorded twice, by whatever attempt.

    Args:
        place: the run's folder, or its record.
        prompts: all prompts of the data.
        steps: training steps that were done.
    """
    run = cavesson.open(place, allow_remote=True)
    config, said = run.info["config"], run.info["prompts"]
    size, samples = config["batch_size"], config["samples_per_prompt"]
    kept = [prompt for index, prompt in enumerate(prompts) if index not in said["dropped"]]
    assert said["count"] == len(kept) and said["count"] + len(said["dropped"]) == len(prompts)
    rows = run.rows(["step", "sample", "group", "prompt"]).to_pylist()
    assert max(Counter((row["step"], row["sample"]) for row in rows).values()) == 1
    assert [(row["step"], row["sample"]) for row in rows] == [(step, i) for step in range(steps) for i in range(size)]
    expected = InMemory(range(len(kept)), seed=config["seed"]).take(0, steps * size // samples)
    assert [row["group"] for row in rows] == [group for group in expected for _ in range(samples)]
    assert [row["prompt"] for row in rows] == [kept[row["group"]] for row in rows]
    # One line of metrics per step, and one for what was measured of the trained model.
    assert [step for step in run.steps()["step"].to_pylist() if step < steps] == list(range(steps))
    # Every token belongs to a rollout, and every rollout has all of its tokens.
    for step in range(steps):
        lengths = Counter(run.tokens(step)["sample"].to_pylist())
        assert [lengths[i] for i in range(size)] == run.rows(["length"], steps=[step])["length"].to_pylist()

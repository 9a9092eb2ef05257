"""Rollouts in a checkpoint: written by each process, read whole, whatever the size of their texts."""

from pathlib import Path

import torch
from safetensors import safe_open

from cavesson.train.kept import read_batches, write_batches
from cavesson.types import Batch, Rollouts


def rollouts(samples: list[int], text: str = "") -> Rollouts:
    """Responses as long as their sample's number plus one, which also says their text."""
    longest = max(samples) + 1
    ids = torch.tensor([[sample] * longest for sample in samples])
    mask = torch.tensor([[float(t <= sample) for t in range(longest)] for sample in samples])
    prompt = torch.ones(len(samples), 1, dtype=torch.long)
    columns = {
        "prompt_ids": prompt,
        "prompt_mask": prompt,
        "response_ids": ids * mask.long(),
        "attended": mask,
        "learned": mask,
    }
    texts = [f"{text}诗{sample}" for sample in samples]
    return Rollouts(["p"] * len(samples), [0] * len(samples), samples, texts, ["eos"] * len(samples), Batch(columns))


def test_the_parts_of_all_processes_are_read_in_order_of_their_samples(tmp_path: Path) -> None:
    # Of two batches of a step, each process has a share of either; a batch ahead is not finished everywhere.
    files = [tmp_path / f"{rank}.safetensors" for rank in range(2)]
    write_batches(files[0], {"now": [rollouts([0, 1, 4])], "ahead": [rollouts([0]), rollouts([1])]})
    write_batches(files[1], {"now": [rollouts([2, 3, 5])], "ahead": [rollouts([1]), None]})
    found = read_batches(files)
    (now,) = found["now"]
    assert now is not None and now.sample == [0, 1, 2, 3, 4, 5]
    assert now.response == [f"诗{sample}" for sample in range(6)]
    assert now["learned"].sum(1).tolist() == [1, 2, 3, 4, 5, 6]
    assert now["response_ids"][:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    first, second = found["ahead"]
    assert first is not None and first.sample == [0, 1] and second is None
    assert read_batches([]) == {}


def test_texts_are_not_in_the_header_which_safetensors_limits(tmp_path: Path) -> None:
    file = tmp_path / "0.safetensors"
    write_batches(file, {"now": [rollouts([0, 1], text="x" * 2**20)]})
    assert int.from_bytes(file.read_bytes()[:8], "little") < 2000  # bytes of the header, which begins after them
    with safe_open(file, framework="pt") as opened:
        assert not opened.metadata()
    (now,) = read_batches([file])["now"]
    assert now is not None and now.response == [f"{'x' * 2**20}诗{sample}" for sample in (0, 1)]

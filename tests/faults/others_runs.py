"""A few steps of TRL on a tiny world, recorded in three ways: python others_runs.py TRAINER FOLDER NAME…

Run by the Python that has the trainer's TRL. Each NAME is a fault or a healthy kind; its run is FOLDER/NAME.
"""

import dataclasses
import itertools
import json
import sys
from pathlib import Path

import torch
from transformers import set_seed

from benchmarks.faults.others import couplets
from benchmarks.faults.others.case import Case
from benchmarks.faults.others.healthy import HEALTHY
from benchmarks.faults.others.run import planned, train
from benchmarks.faults.others.world import World

LETTERS = "春眠不觉晓处闻啼鸟夜来风雨声花落知多少山水，。"
STEPS = 4


def world(folder: Path) -> World:
    """A model with random weights that writes these letters; 16 responses of up to 8 tokens."""
    set_seed(0)
    encode = couplets.tokenizer(LETTERS)
    couplets.model(len(encode)).save_pretrained(folder)
    encode.save_pretrained(folder)
    pairs = itertools.combinations(LETTERS, 2)
    prompts = [one + other + couplets.MARK for one, other in itertools.islice(pairs, 100)]
    (folder / "prompts.json").write_text(json.dumps(prompts), encoding="utf-8")
    return dataclasses.replace(couplets.world(folder), limit=8, batch=16, steps=STEPS)


def main(trainer: str, place: str, *names: str) -> None:
    torch.set_num_threads(1)
    made = world(Path(place, "base"))
    for name in names:
        case = Case(name, name in HEALTHY, trainer, "couplets", 0)
        train(planned(case, made), case, Path(place, name))


if __name__ == "__main__":
    main(*sys.argv[1:])

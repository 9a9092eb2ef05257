"""Mini-batches are drawn over all processes, and each process has about its share of each."""

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from cavesson.algorithms.settings import UpdateSettings
from cavesson.train.update import Chosen, StepInfo, mini_batches


def drawn(total: int, count: int, cuts: list[int], epoch: int = 0, seed: int = 0) -> list[list[list[int]]]:
    """The places of each process's rows in every mini-batch; process i has the places from cuts[i] to cuts[i + 1]."""
    settings, info = UpdateSettings(mini_batches=count), StepInfo(seed, 3, 1e-5)
    found = []
    for start, stop in pairwise([0, *sorted(cuts), total]):
        places = torch.arange(start, stop)
        # Rows that are not learned from lie between those that are.
        chosen = Chosen(2 * (places - start), places, total)
        parts = mini_batches(chosen, settings, info, epoch)
        found.append([[start + row // 2 for row in part] for part in parts])
    return found


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, int, list[int]]:
    total = draw(st.integers(1, 60))
    return total, draw(st.integers(1, 12)), draw(st.lists(st.integers(0, total), max_size=4))


@given(cases())
def test_each_response_is_in_one_mini_batch_whoever_has_it(case: tuple[int, int, list[int]]) -> None:
    total, count, cuts = case
    alone = drawn(total, count, [])[0]
    together = [[row for rows in parts for row in rows] for parts in zip(*drawn(total, count, cuts), strict=True)]
    assert [sorted(part) for part in together] == [sorted(part) for part in alone]
    assert sorted(row for part in alone for row in part) == list(range(total))
    sizes = [len(part) for part in alone]
    assert len(sizes) == min(count, total) and max(sizes) - min(sizes) <= 1


@given(cases())
def test_processes_have_about_their_share_of_each_mini_batch(case: tuple[int, int, list[int]]) -> None:
    total, count, cuts = case
    for parts in drawn(total, count, cuts):
        rows = sum(map(len, parts))
        # Of whole blocks of consecutive rows each has one; a block that is cut at either end gives at most one more.
        assert all(rows // count - 1 <= len(part) <= rows // count + 2 for part in parts)


def test_every_epoch_draws_anew_and_every_place_is_as_likely() -> None:
    assert drawn(12, 3, [], epoch=0) != drawn(12, 3, [], epoch=1)
    counts = np.zeros((6, 3))
    for seed in range(600):
        for number, part in enumerate(drawn(6, 3, [], seed=seed)[0]):
            counts[part, number] += 1
    # Binomial with n = 600 and p = 1/3: five standard deviations are 58.
    assert np.abs(counts - 200).max() < 58

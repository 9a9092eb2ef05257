"""Micro-batches that are filled by tokens."""

from hypothesis import given
from hypothesis import strategies as st

from cavesson.ops.packing import fill

PARTS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=40)


@given(PARTS, st.integers(1, 200), st.booleans())
def test_every_sequence_is_in_one_micro_batch_with_room_for_it(
    parts: list[tuple[int, int]], most: int, padded: bool
) -> None:
    filled = fill(parts, most, padded)
    assert sorted(index for members in filled for index in members) == list(range(len(parts)))
    for members in filled:
        each = [parts[index] for index in members]
        width = max(a for a, _ in each) + max(b for _, b in each)
        tokens = len(each) * width if padded else sum(a + b for a, b in each)
        assert tokens <= most or len(members) == 1
    if not padded and filled:  # no two of them would fit into one: first fit
        sums = sorted(sum(sum(parts[index]) for index in members) for members in filled)
        assert len(sums) == 1 or sums[0] + sums[1] > most


def test_padding_counts_where_there_is_some() -> None:
    lengths = [(8,), (2,), (2,), (2,), (2,)]
    assert fill(lengths, 16, padded=False) == [[0, 1, 2, 3, 4]]
    assert fill(lengths, 16, padded=True) == [[0, 1], [2, 3, 4]]


def test_equal_sequences_stay_in_their_order() -> None:
    assert fill([(4,)] * 5, 8, padded=True) == [[0, 1], [2, 3], [4]]

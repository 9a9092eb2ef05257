from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cavesson.data.order import InMemory, Mixed, Streamed, passes_over, permutation
from cavesson.errors import UserError
from cavesson.randomness import Purpose, generator

seeds, booleans, sizes = st.integers(0, 5), st.booleans(), st.integers(1, 30)


class Counted:
    """Opens a list again and again, and counts how much was read."""

    def __init__(self, size: int):
        self.size, self.opened, self.read = size, 0, 0

    def __call__(self):
        self.opened += 1
        for item in range(self.size):
            self.read += 1
            yield item


def streamed(size: int, seed: int = 0, buffer: int = 4, shuffle: bool = True) -> Streamed[int]:
    return Streamed(Counted(size), seed, buffer=buffer, shuffle=shuffle)


@given(sizes, seeds, st.integers(0, 3), booleans)
def test_every_pass_has_every_item_once(size, seed, number, shuffle):
    for order in (InMemory(range(size), seed, shuffle=shuffle), streamed(size, seed, shuffle=shuffle)):
        items = order.take(number * size, size)
        assert sorted(items) == list(range(size))
        if not shuffle:
            assert items == list(range(size))


def test_the_passes_in_memory_are_the_permutations_of_seed_and_pass():
    expected = [n for number in range(3) for n in generator(7, Purpose.PROMPT_ORDER, step=number).permutation(20)]
    order = InMemory([str(n) for n in range(20)], 7)
    assert order.take(0, 60) == [str(n) for n in expected]
    assert order.indices(15, 10) == expected[15:25]


def test_blocks_of_a_stream_are_permuted_by_pass_and_block():
    order = streamed(10, seed=3, buffer=4)
    expected = []
    for number in range(2):
        for block, size in enumerate((4, 4, 2)):
            inside = generator(3, Purpose.PROMPT_ORDER, step=number, row=block).permutation(size)
            expected += [4 * block + n for n in inside]
    assert order.take(0, 20) == expected


@given(sizes, st.integers(1, 7), st.lists(st.tuples(st.integers(0, 90), st.integers(0, 20)), max_size=6))
def test_any_stretch_is_the_same_however_one_came_there(size, buffer, stretches):
    for make in (lambda: InMemory(range(size), 1), lambda: streamed(size, 1, buffer)):
        whole = make().take(0, 110)
        jumping = make()
        for start, count in stretches:
            assert jumping.take(start, count) == whole[start : start + count]


def test_every_pass_seed_and_source_has_its_own_order():
    orders = [
        tuple(order.take(40 * number, 40))
        for seed in (0, 1)
        for source in (0, 1)
        for order in (InMemory(range(40), seed, source=source), Streamed(Counted(40), seed, buffer=50, source=source))
        for number in range(4)
    ]
    assert len(set(orders)) == 16  # with one block a stream is shuffled as a list is


def test_no_block_is_permuted_as_a_block_of_another_source_is():
    orders = [tuple(permutation(0, 0, 40, source=source, block=block)) for source in range(3) for block in range(3)]
    assert len(set(orders)) == 9


def test_a_stream_reads_forward_and_skips_whole_passes_it_knows():
    source = Counted(100)
    order = Streamed(source, 0, buffer=10)
    assert source.opened == 0
    order.take(0, 25)
    assert (source.opened, source.read, order.size) == (1, 30, None)
    order.take(25, 75)
    order.take(100, 5)
    assert (source.opened, source.read, order.size) == (2, 110, 100)
    order.take(1_000_050, 5)
    assert (source.opened, source.read) == (3, 110 + 60)
    order.take(35, 5)
    assert (source.opened, source.read) == (4, 170 + 40)


def test_nothing_to_pass_over_is_said():
    with pytest.raises(UserError, match="no rows left"):
        InMemory([], 0)
    with pytest.raises(UserError, match="no rows left"):
        streamed(0).take(0, 1)


def test_other_items_take_the_same_order():
    order = InMemory("abcdef", 3)
    assert order.with_items("ABCDEF").take(4, 9) == [item.upper() for item in order.take(4, 9)]
    with pytest.raises(ValueError, match="2 items"):
        order.with_items("AB")


weights = st.lists(st.floats(0.01, 100) | st.integers(1, 9), min_size=1, max_size=5)


@given(weights, st.integers(1, 300))
def test_a_mix_gives_every_source_its_share_and_no_row_is_left_out(weights, count):
    mix = Mixed([InMemory(range(10), 0)] * len(weights), weights)
    turns = [mix.turn(position) for position in range(count)]
    for source, weight in enumerate(weights):
        indices = [index for turn, index in turns if turn == source]
        assert indices == list(range(len(indices)))
        # Each of the divisions rounds by at most a half.
        assert abs(len(indices) - count * weight / sum(weights)) <= len(weights) / 2 + 1e-9


def test_turns_worked_by_hand():
    # Shares 1/2, then 1/4 of all = half of the rest. Source 0 has had round(n/2) turns: 1, 1, 2, 2, …
    mix = Mixed([InMemory("a", 0), InMemory("b", 0), InMemory("c", 0)], [2, 1, 1])
    assert "".join(mix.take(0, 8)) == "abacabac"
    assert mix.turn(1_000_000_007) == (2, 250_000_001)


@given(st.integers(0, 200), st.integers(0, 50))
def test_a_mix_is_one_sequence_however_it_is_cut(start, count):
    def mixed() -> Mixed[str]:
        lists = [InMemory([f"{name}{n}" for n in range(size)], 5, source=i) for i, (name, size) in enumerate(sources)]
        return Mixed([*lists, Streamed(lambda: iter("xyz"), 5, buffer=2, source=2)], [3, 1, 0.5])

    sources = [("a", 7), ("b", 2)]
    assert mixed().take(start, count) == mixed().take(0, 250)[start : start + count]


def test_every_source_of_a_mix_makes_its_own_passes():
    mix = Mixed([InMemory(range(6), 0), InMemory(range(100, 102), 0, source=1)], [1, 1])
    assert mix.size == 8
    assert Counter(mix.take(0, 12)) == Counter([*range(6), *[100, 101] * 3])
    assert all((first < 100) != (second < 100) for first, second in pairwise(mix.take(0, 12)))
    assert Mixed([InMemory("a", 0), streamed(3)], [1, 1]).size is None


def test_a_mix_keeps_its_order_over_other_items():
    sources = [InMemory([1, 2, 3], 5), InMemory([40, 50], 5, source=1)]
    mixed = Mixed(sources, [2.0, 1.0])
    assert mixed.items == [1, 2, 3, 40, 50]
    squares = mixed.with_items([item**2 for item in mixed.items])
    assert squares.take(0, 20) == [item**2 for item in mixed.take(0, 20)]


@pytest.mark.parametrize("shuffle", [False, True])
def test_passes_are_over_lists_in_memory_and_over_anything_else_as_a_stream(shuffle):
    order = passes_over([range(7)], [2.0], 3, shuffle=shuffle)
    assert order.take(0, 20) == InMemory(range(7), 3, shuffle=shuffle).take(0, 20)
    pieces = dict.fromkeys(range(7))  # is not a sequence
    order = passes_over([pieces], [2.0], 3, shuffle=shuffle, buffer=4)
    assert order.take(0, 20) == Streamed(lambda: pieces, 3, shuffle=shuffle, buffer=4).take(0, 20)
    mix = passes_over(["abc", pieces], [3, 1], 3, shuffle=shuffle, buffer=4)
    sources = [
        InMemory("abc", 3, shuffle=shuffle),
        Streamed(lambda: pieces, 3, shuffle=shuffle, buffer=4, source=1),
    ]
    assert mix.take(0, 40) == Mixed(sources, [3, 1]).take(0, 40)

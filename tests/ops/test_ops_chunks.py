import pytest

from cavesson.ops.chunks import CHUNK, chunks, visiting


@pytest.mark.parametrize("rows", [0, 1, CHUNK, 2 * CHUNK + 1])
def test_chunks_cover_all_rows_once(rows: int) -> None:
    assert [row for part in chunks(rows) for row in range(rows)[part]] == list(range(rows))
    assert all(part.stop - part.start <= CHUNK for part in chunks(rows))


def test_only_chosen_chunks_are_visited_inside_the_block() -> None:
    with pytest.raises(KeyError), visiting(lambda found: found[:1]):
        assert list(chunks(3 * CHUNK)) == [slice(0, CHUNK)]
        raise KeyError
    assert len(list(chunks(3 * CHUNK))) == 3

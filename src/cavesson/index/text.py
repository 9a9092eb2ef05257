"""Adds the words of new rollouts to the index."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa

from cavesson.index.columns import Array
from cavesson.index.folder import BLOCK, Piece, State
from cavesson.index.patterns import write_counts
from cavesson.index.postings import New, PieceReader, Postings, merged, write_piece
from cavesson.index.snapshot import Snapshot
from cavesson.index.texts import recorded
from cavesson.index.turns import TEXTS, recorded_turns
from cavesson.record import Run
from cavesson.sorted_arrays import contains
from cavesson.text.features import Features, features
from cavesson.text.word_hashes import LONGEST

MAX_PIECES = 8
"""Pieces of the block that is still growing; more are put together."""
CHUNK_ROWS = 4_096
CHUNK_BYTES = 4_000_000
FIRST_CHUNK = 32
"""Responses that are read together: at first few, as nobody knows how long they are."""
PORTION = 2_000_000
"""Characters that are cut into words together."""


class TextBuilder:
    """Splits responses into features, assigns a number to each new feature, and writes them piece by piece."""

    def __init__(self, run: Run, folder: Path, state: State) -> None:
        self.run = run
        self.folder = folder
        self._hashes = np.empty(0, np.uint64)
        self._numbers = np.empty(0, np.int64)
        for piece in state.pieces:
            self._learn(PieceReader(folder, piece).words["hash"].to_numpy(), piece.features)

    def advance(self, state: State) -> State:
        """Return the state with the text of the next rows indexed: all available rows up to the end of their block."""
        first = state.text_rows
        stop = min((first // BLOCK + 1) * BLOCK, state.rows)
        number = max((piece.number for piece in state.pieces), default=-1) + 1
        known = sum(piece.new for piece in state.pieces)
        new = New(np.empty(0, np.uint64), np.empty(0, np.uint8), [])
        parts = []
        for rows, texts in self._portions(Snapshot(self.folder, state), first, stop):
            rows, documents = np.unique(rows, return_inverse=True)
            found, text = features(texts, documents)
            fresh = np.flatnonzero(~contains(self._hashes, found.hash))
            new = _longer(new, found, fresh, text)
            self._learn(found.hash[fresh], known + len(new.text) - len(fresh))
            parts.append(self._postings(found, rows))
        piece = Piece(number, first, stop, known, len(new.text), state.dead)
        return self._tidy(self._with(state.with_(text_rows=stop), state.pieces, piece, new, merged(parts)))

    def _portions(self, snapshot: Snapshot, first: int, stop: int) -> Iterator[tuple[Array, list[str]]]:
        """Yield rows and what they say, in portions that limit the use of memory; long texts are split."""
        size = FIRST_CHUNK
        while first < stop:
            rows = np.arange(first, min(first + size, stop))
            texts = recorded(self.run, snapshot, rows, ["response"])["response"]
            turns = recorded_turns(self.run, snapshot, rows)
            for some in portions(_said(texts, turns)):
                yield rows[[place for place, _ in some]], [text for _, text in some]
            first += len(rows)
            size = next_size(len(rows), texts.nbytes + turns.nbytes)

    def _postings(self, found: Features, rows: Array) -> Postings:
        number = self._numbers[np.searchsorted(self._hashes, found.hash)]
        order = np.argsort(number)
        places = np.repeat(np.arange(len(number)), found.counts)
        by_number = np.argsort(number[places], kind="stable")
        in_block = (rows[found.documents[by_number]] % BLOCK).astype(np.uint16)
        return Postings(number[order], found.counts[order], in_block)

    def _learn(self, hashes: Array, first: int) -> None:
        """Assign consecutive numbers to the hashes, starting at ``first``."""
        all_hashes = np.concatenate([self._hashes, hashes])
        numbers = np.concatenate([self._numbers, np.arange(first, first + len(hashes))])
        order = np.argsort(all_hashes, kind="stable")
        self._hashes, self._numbers = all_hashes[order], numbers[order]

    def _tidy(self, state: State) -> State:
        """Merge the pieces of the last block if it is full or has many pieces."""
        block = state.pieces[-1].block
        of_block = [piece for piece in state.pieces if piece.block == block]
        full = state.text_rows == (block + 1) * BLOCK
        if len(of_block) == 1 or not (full or len(of_block) > MAX_PIECES):
            return state
        readers = [PieceReader(self.folder, piece) for piece in of_block]
        first, last = of_block[0], of_block[-1]
        count = sum(piece.new for piece in of_block)
        piece = Piece(last.number + 1, first.first, last.stop, first.features, count, state.dead)
        others = tuple(piece for piece in state.pieces if piece.block != block)
        postings = merged([reader.postings() for reader in readers])
        return self._with(state, others, piece, _all_new(readers), postings)

    def _with(self, state: State, others: tuple[Piece, ...], piece: Piece, new: New, postings: Postings) -> State:
        """Write the files of a piece and return the state that includes it."""
        snapshot = Snapshot(self.folder, state)
        apart = (None if some is None else some[piece.block * BLOCK :] for some in (snapshot.held_out, snapshot.given))
        write_piece(self.folder, piece, new, postings, *apart)
        write_counts(self.folder, state, piece, postings)
        return state.with_(pieces=(*others, piece))

    def recount(self, state: State) -> State:
        """Recount the patterns of pieces in which rows were superseded, and return the new state."""
        pieces = []
        for piece in state.pieces:
            dead = np.fromfile(self.folder / "dead", "<i4", state.dead)[piece.dead :]
            if np.any((dead >= piece.first) & (dead < piece.stop)):
                postings = PieceReader(self.folder, piece).postings()
                piece = replace(piece, dead=state.dead)
                write_counts(self.folder, state, piece, postings)
            pieces.append(piece)
        return state.with_(pieces=tuple(pieces))


def next_size(rows: int, size: int) -> int:
    """Return how many responses to read next, if the last ``rows`` responses had ``size`` bytes."""
    return max(1, min(CHUNK_ROWS, rows * CHUNK_BYTES // max(size, 1), 8 * rows))


def _said(responses: pa.ChunkedArray, turns: pa.Table) -> Iterator[tuple[int, str]]:
    """Yield the place of each row with its response, then with each text of its turns that the response lacks."""
    said = zip(*(turns[name].to_pylist() for name in TEXTS), strict=True)
    bounds = np.searchsorted(turns["place"].to_numpy(), np.arange(len(responses) + 1)).tolist()
    for row, response in enumerate(responses):
        whole = response.as_py() or ""
        yield row, whole
        for turn in islice(said, bounds[row + 1] - bounds[row]):
            yield from ((row, text) for text in turn if text and text not in whole)


def portions(texts: Iterable[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """Yield portions of (place, text) with at most ``PORTION`` characters in total; longer texts are split.

    The parts of a text overlap, so that anything that can be found in a word can be found in a word of some part.
    """
    some: list[tuple[int, str]] = []
    size = 0
    for place, whole in texts:
        for start in range(0, max(len(whole) - LONGEST, 1), PORTION - LONGEST):
            part = whole[start : start + PORTION]
            if size + len(part) > PORTION and some:
                yield some
                some, size = [], 0
            some.append((place, part))
            size += len(part)
    if some:
        yield some


def _longer(new: New, found: Features, fresh: Array, text: str) -> New:
    places = zip(found.start[fresh].tolist(), found.stop[fresh].tolist(), strict=True)
    texts = [" ".join(text[start:stop].split()) for start, stop in places]
    return New(
        np.concatenate([new.hash, found.hash[fresh]]),
        np.concatenate([new.kind, found.kind[fresh]]),
        [*new.text, *texts],
    )


def _all_new(readers: list[PieceReader]) -> New:
    columns = [[reader.words[name] for reader in readers] for name in ("hash", "kind", "text")]
    hashes, kinds = (np.concatenate([part.to_numpy() for part in column]) for column in columns[:2])
    return New(hashes, kinds, [text for part in columns[2] for text in part.to_pylist()])

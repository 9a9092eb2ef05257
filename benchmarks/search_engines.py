"""Compares the search of the index with tantivy and SQLite FTS5: benchmarks/search_engines.py RUN.

Each engine answers the board's own search (``board/search.py``): it returns the rows that can hold a text, and the
board reads their texts where the engine is not certain. Ours evaluates filters by ``index/filters.py``, the others by
DuckDB. The engines take turns with every block of rollouts and every search, so that other load on the machine slows
all of them down alike. Needs ``pip install tantivy==0.27.0``.
"""

import argparse
import re
import sqlite3
import time
from collections.abc import Collection, Iterator
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import duckdb
import numpy as np
import tantivy
from board_browser import EXPRESSIONS, PHRASES, WORDS

import cavesson.record
from cavesson.board import search
from cavesson.board.cache import Cache
from cavesson.board.runs import Board, OpenRun
from cavesson.board.selection import Selection, order_of
from cavesson.index import filters, texts
from cavesson.index import search as ours
from cavesson.index.build import Builder
from cavesson.index.columns import Array
from cavesson.index.folder import BLOCK, read_state, write_state
from cavesson.index.orders import due
from cavesson.index.snapshot import Snapshot
from cavesson.text.words import fold

ROUNDS = 5
PAGE = 50  # hits of the first answer
CHECKED = 2 * BLOCK  # rows in which every answer is compared with a scan in Python
PAD = "\1\1"  # follows every indexed text, so that its last characters start a trigram as well
QUERIES = {
    "word": [Selection(run="run", q=q) for q in WORDS],
    "phrase": [Selection(run="run", q=q) for q in PHRASES],
    "expression": [Selection(run="run", q=q, regex=True) for q in EXPRESSIONS],
    "filtered": [Selection(run="run", q=q, filter="reward > 1.5") for q in ("sta", "的", "xyzzy", "con de")],
}


class Ours:
    """Our index: its words, rows and patterns."""

    candidates, holding = staticmethod(ours.candidates), staticmethod(ours.holding)
    is_exact, matches = staticmethod(ours.is_exact), staticmethod(filters.matches)

    files = ("words-*", "rows-*", "patterns-*")

    def __init__(self, builder: Builder) -> None:
        self.builder, self.folder = builder, builder.folder

    def add(self, first: int, responses: list[str]) -> None:
        """Index the next responses."""
        self.builder.advance()


class Tantivy:
    """tantivy with trigrams, which have no positions: only texts of up to three characters are certain."""

    grams, option, longest, files = tantivy.Tokenizer.ngram(3, 3, False), "basic", 3, ("*",)

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        builder = tantivy.SchemaBuilder().add_text_field("text", tokenizer_name="grams", index_option=self.option)
        self.schema = builder.add_integer_field("row", fast=True).build()
        self.index = tantivy.Index(self.schema, str(folder))
        lower = tantivy.TextAnalyzerBuilder(self.grams).filter(tantivy.Filter.lowercase())
        self.index.register_tokenizer("grams", lower.build())
        self.writer = self.index.writer(256_000_000, 1)

    def add(self, first: int, responses: list[str]) -> None:
        for row, text in enumerate(responses, first):
            self.writer.add_document(tantivy.Document(text=text + PAD, row=row))
        self.writer.commit()
        self.index.reload()

    def query(self, text: str) -> tantivy.Query:
        """Return the query for the rows with all trigrams of a text."""
        if len(text) < 3:
            escaped = re.sub(r"[\\.^$*+?()\[\]{}|#&~-]", r"\\\g<0>", text)
            return tantivy.Query.regex_query(self.schema, "text", escaped + "(?s:.)" * (3 - len(text)))
        grams = {text[i : i + 3] for i in range(len(text) - 2)}
        terms = [tantivy.Query.term_query(self.schema, "text", gram, "basic") for gram in grams]
        return tantivy.Query.boolean_query([(tantivy.Occur.Must, term) for term in terms])

    def rows(self, text: str) -> list[int]:
        """Return the rows that can hold a text."""
        searcher = self.index.searcher()
        return [row for row, _ in searcher.search(self.query(text), searcher.num_docs, False, "row").hits]

    def is_exact(self, text: str) -> bool:
        return len(text) <= self.longest

    def candidates(self, snapshot: Snapshot, wanted: Collection[str]) -> Array:
        mask = np.zeros(snapshot.rows, np.bool_)
        for text in wanted:
            mask[self.rows(fold(text))] = True
        return mask

    def holding(self, snapshot: Snapshot, text: str) -> Iterator[tuple[slice, Array]]:
        yield slice(0, snapshot.rows), self.candidates(snapshot, [text])

    def matches(self, text: str, snapshot: Snapshot) -> Array:
        """Evaluate a filter of the reward as SQL."""
        with duckdb.connect() as connection:
            connection.register("numbers", {"reward": snapshot.column("reward")})
            found = connection.sql(f"select coalesce({text}, false) as found from numbers").fetchnumpy()
        return np.asarray(found["found"], np.bool_)


class Characters(Tantivy):
    """tantivy with every character as a term, and with positions: it is always certain."""

    grams, option, longest = tantivy.Tokenizer.regex("(?s)."), "position", 10**9

    def query(self, text: str) -> tantivy.Query:
        if len(text) == 1:
            return tantivy.Query.term_query(self.schema, "text", text)
        return tantivy.Query.phrase_query(self.schema, "text", list(text))


class SQLite(Tantivy):
    """SQLite FTS5. Its trigrams have positions: it is always certain. A shorter text is one of the trigrams with it."""

    longest = 10**9

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.connection = sqlite3.connect(folder / "index.db", check_same_thread=False)
        how = "fts5(text, content='', columnsize=0, tokenize='trigram')"
        self.connection.execute(f"create virtual table texts using {how}")
        self.connection.execute("create virtual table terms using fts5vocab(texts, row)")

    def add(self, first: int, responses: list[str]) -> None:
        with self.connection:
            rows = ((row, text + PAD) for row, text in enumerate(responses, first))
            self.connection.executemany("insert into texts (rowid, text) values (?, ?)", rows)

    def rows(self, text: str) -> list[int]:
        grams = [text]
        if len(text) < 3:
            between = "select term from terms where term >= ? and term < ?"
            grams = [gram for (gram,) in self.connection.execute(between, (text, text + "\U0010ffff"))] or [PAD + PAD]
        wanted = " OR ".join('"' + gram.replace('"', '""') + '"' for gram in grams)
        found = self.connection.execute("select rowid from texts where texts match ?", (wanted,))
        return [row for (row,) in found]


def prepare(run: OpenRun, folder: Path) -> list[Ours | Tantivy]:
    """Return empty engines; everything else of the board's index is complete."""
    if state := read_state(run.folder):
        write_state(run.folder, state.with_(pieces=(), text_rows=0))
    builder = Builder(run.record, run.folder)
    builder.update()
    while due(builder.state) or texts.due(builder.state):
        builder.advance()
    return [Ours(builder), *(kind(folder / kind.__name__) for kind in (Tantivy, Characters, SQLite))]


def build(run: OpenRun, engines: list[Ours | Tantivy]) -> list[Array]:
    """Index all responses with every engine and print what it takes.

    Returns:
        What a scan of the first `CHECKED` rows finds for each query.
    """
    snapshot, truths = run.snapshot(), []
    seconds = np.zeros((len(engines), 2))
    for turn, first in enumerate(range(0, snapshot.rows, BLOCK)):
        rows = np.arange(first, min(first + BLOCK, snapshot.rows))
        responses = texts.read_responses(run.record, snapshot, rows).to_pylist()
        if first < CHECKED:
            truths.append(scan(responses, snapshot.column("reward")[rows]))
        for i in np.roll(range(len(engines)), turn):
            start = np.array([time.perf_counter(), time.process_time()])
            engines[i].add(first, responses)
            seconds[i] += np.array([time.perf_counter(), time.process_time()]) - start
    print(f"{'index':12}{'seconds':>9}{'CPU':>7}{'MB':>7}")
    for (wall, processor), engine in zip(seconds, engines, strict=True):
        megabytes = sum(path.stat().st_size for some in engine.files for path in engine.folder.glob(some)) / 1e6
        print(f"{type(engine).__name__:12}{wall:9.0f}{processor:7.0f}{megabytes:7.0f}", flush=True)
    return list(np.concatenate(truths, axis=1))


def scan(responses: list[str], reward: Array) -> Array:
    """Return [queries, responses] which responses match, looked at one after another."""
    lower = [fold(text) for text in responses]
    found = [[fold(query.q.strip()) in text for text in lower] for query in (*QUERIES["word"], *QUERIES["phrase"])]
    found += [[re.search(query.q, text, re.ASCII) is not None for text in responses] for query in QUERIES["expression"]]
    found += [[query.q in text for text in lower] & (reward > 1.5) for query in QUERIES["filtered"]]
    return np.array(found)


def ask(run: OpenRun, engine: Ours | Tantivy, query: Selection, truth: Array, whole: bool) -> tuple[float, float, bool]:
    """Search as the board does.

    Returns:
        Milliseconds to the first page and to the last hit, and whether all rows that the truth covers are right.
    """
    run.cache, snapshot = Cache(), run.snapshot()
    replaced = {name: getattr(engine, name) for name in ("candidates", "holding", "is_exact")}
    with patch.multiple(search, **replaced), patch("cavesson.board.selection.matches", engine.matches):
        start, first, complete = time.perf_counter(), 0.0, False
        while not complete and (whole or not first):
            found = search.matching(run, snapshot, query, order_of(run, snapshot, "step"), PAGE)
            assert found.mask is not None and found.stopped is None, found.stopped
            now, complete = 1e3 * (time.perf_counter() - start), found.most is None
            first = first or (now if complete or np.count_nonzero(found.mask) >= PAGE else 0.0)
        run.searching = None
        time.sleep(0.05)  # the search in the background ends
    got = found.mask[: len(truth)]
    return first, now, np.array_equal(got, truth) if complete else not np.any(got & ~truth)


def compare(board: Board, folder: Path) -> None:
    """Index with every engine, search in rounds, the first of which waits for all hits, and print what was measured."""
    engines = prepare(board.run(0), folder)
    truths = build(board.run(0), engines)
    board.warm()
    queries = [(kind, query) for kind, several in QUERIES.items() for query in several]
    answers = np.empty((len(engines), len(queries), ROUNDS, 3))
    for turn, (i, (_, query)) in product(range(ROUNDS), enumerate(queries)):
        for number in np.roll(range(len(engines)), turn + i):
            answers[number, i, turn] = ask(board.run(0), engines[number], query, truths[i], whole=turn == 0)
        print(f"round {turn}: {query.q!r:14}", *answers[:, i, turn, 1].round(), flush=True)
    checked = f"right in the first {CHECKED:,} rows"
    print(f"\n{'milliseconds':24}{'first page: p50, p95 (range)':>30}{'all hits: p50, p95':>22}   {checked}")
    for kind, (number, engine) in product([*QUERIES, ""], enumerate(engines)):
        some = answers[number, [i for i, (one, _) in enumerate(queries) if kind in (one, "")]]
        rounds, last = np.quantile(some[:, :, 0], [0.5, 0.95], axis=0), np.quantile(some[:, 0, 1], [0.5, 0.95])
        first = "{:.0f}, {:.0f} ({:.0f}-{:.0f})".format(*np.median(rounds, axis=1), rounds[1].min(), rounds[1].max())
        right = f"{some[:, :, 2].all(axis=1).sum()} of {len(some)}"
        print(f"{kind or 'all':12}{type(engine).__name__:12}{first:>30}{last[0]:>14.0f}, {last[1]:6.0f}   {right}")


def main() -> None:
    """Read the arguments and compare."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("run", type=Path, help="run folder from generate_record.py; its words are indexed anew")
    run = parser.parse_args().run
    board = Board([cavesson.record.open(run)])
    with TemporaryDirectory(dir=run.parent) as folder:
        compare(board, Path(folder))
    board.scanner.stop()


if __name__ == "__main__":
    main()

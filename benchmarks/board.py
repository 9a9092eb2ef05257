"""Times the board's server on a record: benchmarks/board.py RUN.

Each interaction of the page is asked for many times, with other steps, columns, pages and words each time; the
first and the later answers are kept apart. Memory is that of the server's process.
"""

import argparse
import json
import random
import socket
import statistics
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

WORDS = ["sta", "tion", "#", "ver", "音", "ăn", "сто", "con de", "pro ex", "ment", "inging", "🙂", "xyzzy", "бле"]
FILTERS = ["reward > 2", "length < 150 and reward > 1", 'finish_reason == "length"', "gap > 0 and kl_k1 < 3"]
COLUMNS = ["reward", "kl_k1", "length", "entropy", "repetition", "gap", "part/helpful", "ref_reward"]


class Server:
    """A board in its own process."""

    def __init__(self, run: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        self.base = f"http://127.0.0.1:{self.port}"
        command = [
            sys.executable,
            "-m",
            "cavesson",
            "board",
            str(run),
            "--port",
            str(self.port),
            "--no-browser",
            "--no-token",
        ]
        self.started = time.time()
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()

    def get(self, path: str, **parameters: Any) -> Any:
        """Return the answer to a request."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.base}/api/{path}?{query}", timeout=120) as answer:
            body = answer.read()
            return json.loads(body) if answer.headers["content-type"] == "application/json" else body

    def listens(self) -> bool:
        """Return True; raises OSError while nobody answers."""
        socket.create_connection(("127.0.0.1", self.port)).close()
        return True

    def wait(self, ready: Callable[[], bool]) -> float:
        """Return the seconds from the start until something is true."""
        while True:
            try:
                if ready():
                    return time.time() - self.started
            except OSError:
                pass
            time.sleep(0.005)

    def memory(self) -> tuple[float, float]:
        """Return the resident memory of the server in MiB: now, and its peak."""
        return memory_of(self.process.pid)

    def helpers(self) -> list[tuple[float, float]]:
        """Return the same of the processes beside it, which keep the index and look for expressions."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text(encoding="utf-8")
        return [memory_of(int(child)) for child in children.split()]


def memory_of(process: int) -> tuple[float, float]:
    """Return the resident memory of a process in MiB: now, and its peak."""
    status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    sizes = dict(line.split(":", 1) for line in status.splitlines())
    return int(sizes["VmRSS"].split()[0]) / 1024, int(sizes["VmHWM"].split()[0]) / 1024


class Interaction(NamedTuple):
    """Something that a person does."""

    name: str
    limit: float
    """Milliseconds that the page may take for it at 1 million rollouts; the server is a part of that."""
    path: str
    parameters: Callable[[random.Random], dict[str, Any]]


def interactions(summary: dict[str, Any]) -> list[Interaction]:
    """Return what is timed, for a run of these steps and so many rollouts."""
    first, last = summary["steps"]
    total = summary["rollouts"]

    def step(chance: random.Random) -> int:
        return chance.randint(first, last)

    def sort(chance: random.Random) -> str:
        return chance.choice(["", "-"]) + chance.choice(COLUMNS)

    return [
        Interaction("curves", 100, "series", lambda c: {"names": f"{c.choice(COLUMNS)},kl/objective", "points": 1_000}),
        Interaction("step", 100, "groups", lambda c: {"step": step(c)}),
        Interaction("histogram of a step", 100, "histogram", lambda c: {"steps": step(c), "column": c.choice(COLUMNS)}),
        Interaction("histogram of the run", 100, "histogram", lambda c: {"column": c.choice(COLUMNS)}),
        Interaction("ridge", 100, "ridge", lambda c: {"column": c.choice(COLUMNS)}),
        Interaction("heat map", 100, "heat", lambda c: {"column": c.choice(["logprob", "kl_k1", "entropy"])}),
        Interaction("sort", 100, "rows", lambda c: {"sort": sort(c)}),
        Interaction("scroll", 100, "rows", lambda c: {"sort": sort(c), "offset": c.randrange(total), "limit": 40}),
        Interaction("filter", 100, "rows", lambda c: {"filter": c.choice(FILTERS), "sort": sort(c)}),
        Interaction("search", 300, "rows", lambda c: {"q": c.choice(WORDS)}),
        Interaction("hits by step", 300, "hits", lambda c: {"q": c.choice(WORDS)}),
        Interaction("patterns", 100, "patterns", lambda c: {"kind": c.choice(["word", "ngram", "character"])}),
    ]


def timed(server: Server, run: str, one: Interaction, times: int, seed: int) -> Iterator[float]:
    """Yield the milliseconds that each request took."""
    chance = random.Random(seed)
    for _ in range(times):
        parameters = one.parameters(chance)
        start = time.perf_counter()
        server.get(f"runs/{run}/{one.path}", **parameters)
        yield 1_000 * (time.perf_counter() - start)


def rollouts(server: Server, summary: dict[str, Any], times: int) -> Iterator[float]:
    """Yield the milliseconds that opening a rollout took, with its tokens."""
    chance = random.Random(7)
    for _ in range(times):
        row = server.get(f"runs/{summary['run']}/rows", offset=chance.randrange(summary["rollouts"]), limit=1)["rows"][
            0
        ]
        place = f"runs/{summary['run']}/rollouts/{row['step']}/{row['sample']}"
        start = time.perf_counter()
        server.get(place)
        server.get(f"{place}/tokens")
        server.get(f"{place}/texts")
        yield 1_000 * (time.perf_counter() - start)


def report(name: str, limit: float, values: list[float]) -> None:
    """Print one line: first, median and 95th percentile."""
    p95 = statistics.quantiles(values, n=20)[-1]
    mark = "" if p95 <= limit else "  over"
    print(f"{name:22} first {values[0]:8.1f}   median {statistics.median(values):8.1f}   p95 {p95:8.1f} ms{mark}")


def main() -> None:
    """Start a board, wait for its index, and print the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder, such as generate_record.py writes")
    parser.add_argument("--times", type=int, default=40, help="requests of each kind")
    given = parser.parse_args()
    with Server(given.run) as server:
        print(f"first answer after    {server.wait(lambda: bool(server.get('runs'))):8.2f} s")
        print(f"first rollouts after  {server.wait(lambda: server.get('runs')[0]['rollouts'] > 0):8.2f} s")
        print(f"indexed after         {server.wait(lambda: server.get('runs')[0]['indexed'] == 1):8.2f} s")
        summary = server.get("runs")[0]
        print(f"{summary['rollouts']} rollouts, {summary['tokens']} tokens; memory {server.memory()[0]:.0f} MiB")
        for one in interactions(summary):
            report(one.name, one.limit, list(timed(server, summary["run"], one, given.times, seed=1)))
        report("open a rollout", 100, list(rollouts(server, summary, given.times)))
        print(f"memory {server.memory()[0]:.0f} MiB, at most {server.memory()[1]:.0f} MiB")


if __name__ == "__main__":
    main()

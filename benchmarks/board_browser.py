"""Measures the board in a real browser: benchmarks/board_browser.py --rollouts 1000000.

The record is made once, in ``--run``, and used again. The system's Chromium shows the page, without a window; how it is
timed, board_looker.py says. Targets hold for up to a million rollouts; above, for twice as long and as large.
"""

import argparse
import gzip
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import board_looker as look
from board import Server
from board_looker import WINDOW, Looker, Reaction
from generate_record import Plan, add_arguments, ensure, plan_in, plan_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser

STATIC = Path(__file__).parents[1] / "src/cavesson/board/static"
COLUMNS = ["reward", "kl_k1", "length", "entropy", "repetition", "gap", "log_ratio_max", "value_error", "part/helpful"]
WORDS = ["sta", "tion", "#", "ver", "音", "ăn", "сто", "ment", "inging", "🙂", "xyzzy", "бле", "的", "pro", "ous"]
PHRASES = ["con de", "pro ex", "ing al", "er. ", "!!", "了。", "núi biển", "ly fo ca"]
EXPRESSIONS = ["#{2,3}$", "(ing){2}", "[0-9]+", "sta[a-z]+ver", "[!?]$", "núi.*biển"]
TYPED = ["stationing", "mentous", "verbleal", "proming", "conable"]
MEMORY = 500
"""MiB that the server may take."""
PAGE = 125
"""KiB that the first view may take, compressed; other languages come after it, Markdown and diagnoses on demand."""
SHELL = "document.querySelector('nav.tabs')"
CURVES = (
    "document.querySelector('.charts canvas') && /[0-9]/.test(document.querySelector('.charts .legend b')?.textContent)"
)
"""Curves, and numbers with them."""


class Lookers:
    """Opens windows on the board, and notes what they request of other machines."""

    def __init__(self, browser: "Browser") -> None:
        self.browser = browser
        self.foreign: list[str] = []

    @contextmanager
    def at(self, base: str, seed: int = 0) -> Iterator[Looker]:
        """Open a window for the duration of a block."""
        with closing(Looker(self.browser, base, seed)) as looker:
            yield looker
            self.foreign += looker.foreign


class Line(NamedTuple):
    """What is timed, and by when it has to be there."""

    name: str
    limit: float
    times: Iterator[Reaction]
    by: str = "all"
    """``shown`` where the rest may come later"""


def lines(lookers: Lookers, base: str, plan: Plan, times: int) -> Iterator[Line]:
    """Yield what people do, each in its own window, after what the browser takes for a page without a board."""

    def do(action: Callable[..., Iterator[Reaction]], *given: object) -> Iterator[Reaction]:
        with lookers.at(base, seed=times) as looker:
            yield from action(looker, *given)

    few = max(min(3, times), times // 2)
    yield Line("floor: one word", 100, do(look.plain, "word", times))
    yield Line("floor: 30 rows", 100, do(look.plain, "rows", times))
    yield Line("step by click, overview", 100, do(look.steps, "overview", times))
    yield Line("step by click, step view", 100, do(look.steps, "step", times))
    yield Line("step by key, step view", 100, do(look.neighbours, times))
    # Prompts stand below the curves and come after them.
    yield Line("to the overview view", 100, do(look.views, "overview", few, CURVES), "shown")
    for view in ("step", "responses", "tokens", "patterns", "compare"):
        yield Line(f"to the {view} view", 100, do(look.views, view, few))
    yield Line("sort, both ways", 100, do(look.sorts, COLUMNS, times))
    yield Line("filter", 100, do(look.filters, look.by_numbers, times))
    if plan.turns:
        yield Line("filter by a tool", 100, do(look.filters, look.by_tool, times))
        yield Line("filter by arguments", 300, do(look.filters, look.by_arguments, times))
    yield Line("wheel", 100, do(look.wheels, times))
    yield Line("scroll-bar jump", 100, do(look.jumps, times))
    yield Line("read a rollout", 100, do(look.reads, times))
    yield Line("open its tokens", 100, do(look.opens, times), "shown")
    yield Line("next rollout's tokens", 100, do(look.nexts, plan.steps - 1, times), "shown")
    yield Line("metric of the tokens", 100, do(look.metrics, f"/responses?sort=-kl_k1&{look.OPENABLE}", times))
    yield Line("search a word", 300, do(look.searches, WORDS, times), "shown")
    yield Line("search a phrase", 300, do(look.searches, PHRASES, times), "shown")
    yield Line("search an expression", 300, do(look.searches, EXPRESSIONS, times, "?regex=1"), "shown")
    yield Line("search while typing", 300, do(look.typing, TYPED, times), "shown")
    if plan.long:
        yield Line(f"open {plan.long} tokens", 200, do(look.long_ones, plan.steps - 1, few), "shown")
        yield Line("metric of them", 100, do(look.metrics, long_address(plan), times))


def long_address(plan: Plan) -> str:
    """Return where the tokens of the long response are."""
    return f"/tokens?step={plan.steps - 1}&sample={plan.batch}"


def report(line: Line, factor: float) -> None:
    """Print the figures of one line; the last is for the frame after which nothing changes."""
    reactions = list(line.times)
    values = sorted(getattr(one, line.by) for one in reactions)
    p95, everything = percentile(values, 0.95), percentile(sorted(one.all for one in reactions), 0.95)
    limit = line.limit * factor
    print(
        f"{line.name:26}{percentile(values, 0.5):6.0f}{p95:6.0f}{values[-1]:6.0f}   < {limit:<4.0f}"
        f"{mark(p95 < limit)}{everything:6.0f}",
        flush=True,
    )


def percentile(values: list[float], share: float) -> float:
    """Return the smallest of the sorted values that at least ``share`` of them do not exceed."""
    return values[max(0, ceil(share * len(values)) - 1)]


def mark(good: bool) -> str:
    """Return what stands beside a figure."""
    return "ok  " if good else "OVER"


def figure(name: str, value: float, unit: str, limit: float, more: str = "") -> None:
    """Print a single number beside its target."""
    shown = f"{value:.2f}" if value < 10 else f"{value:.0f}"
    print(f"{name:32}{shown:>6} {unit:8}<= {limit:<5g}{mark(value <= limit)}  {more}", flush=True)


def first_paint(lookers: Lookers, server: Server, condition: str) -> float:
    """Return the seconds from the start of the server's process to the first painted frame with something."""
    with lookers.at(server.base) as looker:
        looker.context.add_init_script(f"boardClock.expect(() => {condition})")
        server.wait(server.listens)
        looker.page.goto(server.base)
        painted: float = looker.page.evaluate("boardClock.painted()")
    return painted / 1_000 - server.started


def starts(lookers: Lookers, run: Path, factor: float, times: int) -> None:
    """Print how long it takes until the page is usable, with an index that is there."""
    seconds = []
    for _ in range(times):
        with Server(run) as server:
            seconds.append(first_paint(lookers, server, CURVES))
    seconds.sort()
    more = f"median of {times} starts, at most {seconds[-1]:.2f}"
    figure("usable after", seconds[times // 2], "s", factor, more)


def first_start(lookers: Lookers, run: Path, factor: float) -> None:
    """Print how the page comes to life on a record that has no index, and how it answers while that is built."""
    with Server(run) as server:
        print(f"without an index: the page after {first_paint(lookers, server, SHELL):.2f} s,", end=" ", flush=True)
        print(f"its curves after {first_paint(lookers, server, CURVES):.2f} s,", end=" ", flush=True)
        rollouts = server.wait(lambda: server.get("runs")[0]["rollouts"] >= plan_rollouts(run))
        print(f"all rollouts after {rollouts:.0f} s; meanwhile", flush=True)
        with lookers.at(server.base) as looker:
            report(Line("step by click, overview", 100, look.steps(looker, "overview", 5)), factor)
            report(Line("sort, both ways", 100, look.sorts(looker, COLUMNS, 6)), factor)
            said = looker.page.locator(".status .warning")
            print(f"the page says: {said.inner_text() if said.count() else 'done'};", end=" ")
        print(f"all words after {server.wait(lambda: server.get('runs')[0]['indexed'] == 1):.0f} s", flush=True)
        peaks = ", ".join(f"{peak:.0f}" for _, peak in server.helpers())
        figure("memory while indexing, at most", server.memory()[1], "MiB", MEMORY * factor, f"its helpers {peaks}")


def plan_rollouts(run: Path) -> int:
    """Return how many rollouts the record has."""
    plan = plan_in(run)
    assert plan is not None
    return plan.steps * plan.batch


def scrolling(lookers: Lookers, base: str, plan: Plan, given: argparse.Namespace) -> None:
    """Print how many frames took longer than a sixtieth of a second while the wheel turned."""
    for name, address, where in (
        ("floor", "/plain", "pre"),
        ("table", "/responses?sort=-reward", ".virtual.table"),
        *([(f"{plan.long} tokens", long_address(plan), ".token-text")] if plan.long else []),
    ):
        if given.only not in f"{name}: long frames":
            continue
        with lookers.at(base) as looker:
            slow, frames = look.long_frames(looker, address, where, min(5, given.times))
            figure(f"{name}: long frames", 100 * slow / frames, "%", 1, f"{slow} of {frames} over 16.7 ms")


def page() -> list[Path]:
    """Return the page and the files that it names."""
    index = STATIC / "index.html"
    return [index, *(STATIC / name for name in re.findall(r'(?:src|href)="([\w.]+)"', index.read_text("utf-8")))]


def measure(lookers: Lookers, given: argparse.Namespace, plan: Plan) -> None:
    """Print all figures."""
    factor = 1 if plan.rollouts <= 1_000_000 else 2
    if not (given.run / "index" / "state.json").exists():
        first_start(lookers, given.run, factor)
    if given.only in "usable after":
        starts(lookers, given.run, factor, min(5, given.times))
    with Server(given.run) as server:
        server.wait(lambda: server.get("runs")[0]["indexed"] == 1)
        print(f"\n{'from the input to its frame':26}{'p50':>6}{'p95':>6}{'max':>6}   target, ms {'all p95':>6}")
        for line in lines(lookers, server.base, plan, given.times):
            if given.only in line.name:
                report(line, factor)
        print()
        scrolling(lookers, server.base, plan, given)
        now, peak = server.memory()
        helpers = ", ".join(f"{high:.0f}" for _, high in server.helpers())
        figure("memory of the server, at most", peak, "MiB", MEMORY * factor, f"now {now:.0f}; its helpers {helpers}")
    figure("page, compressed", sum(len(gzip.compress(file.read_bytes())) for file in page()) / 1024, "KiB", PAGE)
    figure("requests to other machines", len(lookers.foreign), "", 0, ", ".join(lookers.foreign[:3]))


def main() -> None:
    """Make the record if it is not there, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("runs/bench-1m"), help="folder of the record")
    parser.add_argument("--times", type=int, default=40, help="how often everything is done")
    parser.add_argument("--only", default="", help="only interactions with this in their names")
    add_arguments(parser)
    parser.set_defaults(rollouts=1_000_000, long=32_000)
    given = parser.parse_args()
    plan = plan_of(given)
    ensure(given.run, plan)
    from playwright.sync_api import sync_playwright

    print(f"{plan.steps * plan.batch:,} rollouts, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before")
    with sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=shutil.which("chromium"),
            # The window is as high as the page and the browser's own bars: what lies outside is never painted.
            args=["--no-sandbox", f"--window-size={WINDOW['width']},{WINDOW['height'] + 160}"],
            ignore_default_args=["--hide-scrollbars"],
        )
        measure(Lookers(browser), given, plan)
    print(f"load {os.getloadavg()[0]:.1f} after")


if __name__ == "__main__":
    main()

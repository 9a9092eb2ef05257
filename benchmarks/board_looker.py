"""Somebody who uses the page, with a clock.

What is timed is what a person waits for:

- It starts with the input event's time stamp, which the browser sets when the input reaches it: waiting behind other
  work counts. The inputs are real ones, given to the browser's own input pipeline.
- It ends when the last frame that the input changes is on the screen, whether the document changes or a drawing on a
  canvas; the last one is known when 250 ms pass without another change and no request is on its way. Each change puts a
  probe into the page within the same callback, a letter of four pixels. The browser paints both in the same frame and
  says when that frame was presented (Element Timing, ``presentationTime``, to 4 ms). A clock that is read in
  ``requestAnimationFrame`` would miss layout, painting, raster and the compositor.

``shown`` ends earlier, with the first frame that has what was asked for. Steps, filters and places are drawn at random,
and the page is loaded anew before a column or a text comes again: no answer comes from the page's own memory.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from generate_record import TOOLS

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator

CLOCK = Path(__file__).with_name("board_clock.js")
WINDOW = {"width": 1440, "height": 900}
HAND = 120
"""Milliseconds that the mouse stays where it is before it clicks; no hand is quicker, and most take twice as long."""
LONG_FRAME = 17.5
"""Milliseconds: 16.7, and what the frames' own clock rounds."""

ROWS = ".virtual.table .chunk .tr"
ROW = f"{ROWS}[role=row]"
LOADED = (
    "!document.querySelector('main output')?.textContent.includes('…')"
    f" && [...document.querySelectorAll('{ROWS}')].every((row) => row.childElementCount > 0)"
)
"""The table has the rows that were asked for last."""
ANY = f"(document.querySelector('{ROW}') || document.querySelector('main output')?.textContent.startsWith('0 '))"
"""There is a row, or it is known that there is none."""
NUMBERS = "((at) => document.querySelector(at)?.textContent.replaceAll(',', '').match(/\\d+/g)?.join('.'))"
OPENED = f"{NUMBERS}('.detail h2') === new URLSearchParams(location.search).get('at')"
"""The text of the rollout in the address stands beside the table."""
TOKENS = "document.querySelector('.token-line .tok')"
ARGUMENTS = ["station", "verbl", "продом", "núi", "的", "xyzzy"]
OPENABLE = "filter=length+%3E+0"
"""Only rollouts whose tokens the generator wrote have a length."""


PLAIN = """<!doctype html><main><button>word</button> <b></b> <button>rows</button><table></table>
<pre style="height: 600px; overflow: auto"></pre></main><script>
let number = 0;
const [word, rows] = document.querySelectorAll("button");
word.onclick = () => { document.querySelector("b").textContent = ++number; };
const row = () => "<tr>" + `<td>${++number}</td>`.repeat(10) + "</tr>";
rows.onclick = () => { document.querySelector("table").innerHTML = row().repeat(30); };
document.querySelector("pre").textContent = ("many words in a line ".repeat(9) + "\\n").repeat(3000);
</script>"""
"""A page that does next to nothing: what it takes, the browser takes on this machine."""


class Reaction(NamedTuple):
    """Milliseconds from an input event."""

    shown: float
    """to the first frame with what was asked for"""
    all: float
    """to the last frame that it changes"""


class MissedError(Exception):
    """An input had no consequence."""


class Looker:
    """A fresh window on the board; the same seed does the same."""

    def __init__(self, browser: "Browser", base: str, seed: int = 0) -> None:
        self.context = browser.new_context(viewport=WINDOW, locale="en-GB")  # type: ignore[arg-type]
        self.context.add_init_script(path=CLOCK)
        self.page = self.context.new_page()
        self.base = base
        self.chance = random.Random(seed)
        self.foreign: list[str] = []
        """requests to anywhere else"""
        self.page.on("request", lambda one: None if one.url.startswith(base) else self.foreign.append(one.url))

    def open(self, address: str) -> None:
        """Load a view and wait until it is at rest."""
        self.page.goto(self.base + address)
        self.page.wait_for_selector("main")
        self.rest()

    def close(self) -> None:
        """Closes the window."""
        self.context.close()

    def rest(self) -> None:
        """Wait until nothing changes."""
        self.page.evaluate("boardClock.rest()")

    def timed(self, event: str, act: Callable[[], object], until: str, *, patient: bool = True) -> Reaction:
        """Return how the page reacts to an input.

        Args:
            event: Type of the event that the input is.
            act: Gives the input.
            until: JavaScript that is true once what was asked for is in the document.
            patient: Waits for everything; otherwise ``all`` is what came by then, for a page that keeps changing.
        """
        self.page.evaluate(f"boardClock.arm({event!r}, () => {until})")
        act()
        found = self.page.evaluate(f"boardClock.reaction({str(patient).lower()})")
        if found is None:
            raise MissedError(f"the {event} changed nothing")
        return Reaction(**found)

    def press(self) -> None:
        """Clicks where the mouse is."""
        self.page.mouse.down()
        self.page.mouse.up()

    def click(self, what: "Locator", until: str) -> Reaction:
        """Points at something, waits until the page has reacted to that, and clicks."""
        what.hover()
        self.page.wait_for_timeout(HAND)
        self.rest()
        return self.timed("click", self.press, until)

    def key(self, name: str, until: str) -> Reaction:
        """Presses a key."""
        self.rest()
        return self.timed("keydown", lambda: self.page.keyboard.press(name), until)

    def point(self, what: "Locator", across: float, down: float) -> None:
        """Move the mouse to a place in something, in pixels from its left or right (< 0) edge and as a share of it."""
        box = what.bounding_box()
        assert box is not None
        x = box["x"] + across + (box["width"] if across < 0 else 0)
        self.page.mouse.move(x, box["y"] + down * box["height"])
        self.page.wait_for_timeout(HAND)
        self.rest()


def steps(looker: Looker, view: str, times: int) -> Iterator[Reaction]:
    """Clicks anywhere in the strip of the run, whose hint says which step that is."""
    looker.open(f"/{view}")
    strip = looker.page.locator(".timeline canvas")
    width = WINDOW["width"] - 110
    for _ in range(times):
        is_open = "true"
        while looker.page.evaluate(is_open):  # a short run has few steps, and its open one changes nothing
            looker.point(strip, looker.chance.uniform(12, width), 0.5)
            step = looker.page.inner_text(".timeline output b")
            headings = "[...document.querySelectorAll('main h2')]"
            is_open = f"{headings}.some((one) => one.textContent.trim().endsWith(' {step}'))"
        yield looker.timed("click", looker.press, is_open)


def neighbours(looker: Looker, times: int) -> Iterator[Reaction]:
    """Goes back step by step with a key."""
    looker.open("/step")
    for _ in range(times):
        step = looker.page.inner_text("main h2").split()[-1]
        yield looker.key("[", f"{NUMBERS}('main h2') !== '{step}'")


def views(looker: Looker, name: str, times: int, there: str = "true") -> Iterator[Reaction]:
    """Goes to a view from another one, each time in a page that has just been loaded and not been there yet.

    ``there`` is true once what the view is opened for is shown.
    """
    for _ in range(times):
        looker.open("/responses" if name == "overview" else "/overview")
        tab = looker.page.locator(".tabs a").filter(has_text=name.capitalize())
        is_open = f"location.pathname === '/{name}' && document.querySelector('main')?.childElementCount"
        yield looker.click(tab, f"{is_open} && ({there})")


def sorts(looker: Looker, columns: Sequence[str], times: int) -> Iterator[Reaction]:
    """Clicks on the heads of columns, twice each: the largest first, then the smallest."""
    order: list[str] = []
    for turn in range(times):
        if not order:
            looker.open(f"/responses?columns={','.join(columns)}")
            order = [name for name in looker.chance.sample(columns, len(columns)) for _ in range(2)]
        name, way = order.pop(), ("descending", "ascending")[turn % 2]
        head = f'.head [aria-sort={way}] button[title^="{name}"]'
        button = looker.page.locator(f'.head button[title^="{name}"]')
        yield looker.click(button, f"document.querySelector('{head}') && {LOADED}")


def filters(looker: Looker, condition: Callable[[random.Random], str], times: int) -> Iterator[Reaction]:
    """Filters a sorted table by a condition that is drawn anew each time."""
    looker.open("/responses?sort=-reward")
    for _ in range(times):
        yield ask(looker, "input.filter", "filter", condition(looker.chance))


def by_numbers(chance: random.Random) -> str:
    """Return a filter by two numbers."""
    return f"reward > {chance.uniform(-1, 3):.3f} and length < {chance.randint(120, 290)}"


def by_tool(chance: random.Random) -> str:
    """Return a filter by a tool and how long its call took."""
    return f'tool == "{chance.choice(TOOLS)}" and seconds > {chance.uniform(0, 3):.3f}'


def by_arguments(chance: random.Random) -> str:
    """Return a filter by a text in the arguments of a call that failed."""
    return f'error and "{chance.choice(ARGUMENTS)}" in arguments and seconds > {chance.uniform(0, 1):.3f}'


def searches(looker: Looker, texts: Sequence[str], times: int, mode: str = "") -> Iterator[Reaction]:
    """Looks for texts; ``mode`` is more of the address. While the server still looks, what it has found is there."""
    for turn in range(times):
        if turn % len(texts) == 0:
            looker.open(f"/responses{mode}")
        yield ask(looker, "input.search", "q", texts[turn % len(texts)], patient=False)


def ask(looker: Looker, field: str, parameter: str, text: str, *, patient: bool = True) -> Reaction:
    """Put a text into a field; what is timed starts with the enter key."""
    looker.page.focus(field)
    looker.page.keyboard.press("Control+A")
    looker.page.keyboard.press("Delete")
    looker.page.keyboard.press("Enter")
    looker.page.focus(field)
    looker.rest()
    asked = f"new URLSearchParams(location.search).get('{parameter}') === {text!r}"

    def enter() -> None:
        looker.page.keyboard.insert_text(text)
        looker.page.keyboard.press("Enter")

    return looker.timed("keydown", enter, f"{asked} && {LOADED} && {ANY}", patient=patient)


def typing(looker: Looker, words: Sequence[str], times: int) -> Iterator[Reaction]:
    """Types words letter by letter and no enter key; what is timed starts with the last letter."""
    for turn in range(times):
        if turn % len(words) == 0:
            looker.open("/responses")
        word = words[turn % len(words)]
        looker.page.focus("input.search")
        looker.page.keyboard.press("Control+A")
        looker.page.keyboard.type(word[:-1], delay=60)
        asked = f"new URLSearchParams(location.search).get('q') === {word!r}"
        press = partial(looker.page.keyboard.press, word[-1])
        yield looker.timed("keydown", press, f"{asked} && {LOADED} && {ANY}", patient=False)


def jumps(looker: Looker, times: int) -> Iterator[Reaction]:
    """Clicks with the middle button anywhere on the scroll bar, which jumps there, or misses the click now and then."""
    looker.open("/responses?sort=-reward")
    done = 0
    while done < times:
        row = first_row(looker)
        point_at_bar(looker)
        with suppress(MissedError):
            yield looker.timed("pointerdown", partial(middle, looker), moved_from(row))
            done += 1


def wheels(looker: Looker, times: int) -> Iterator[Reaction]:
    """Turn the wheel by three notches, each time somewhere else in the table."""
    looker.open("/responses?sort=-reward")
    for _ in range(times):
        jump(looker)
        looker.page.mouse.move(700, 500)
        row = first_row(looker)
        yield looker.timed("wheel", lambda: looker.page.mouse.wheel(0, 300), moved_from(row))


def jump(looker: Looker) -> None:
    """Scrolls the table anywhere."""
    point_at_bar(looker)
    middle(looker)
    looker.rest()


def point_at_bar(looker: Looker) -> None:
    """Points at a place of the table's scroll bar, in the other half than its handle."""
    table = looker.page.locator(".virtual.table")
    handle: float = table.evaluate("(one) => one.scrollTop / one.scrollHeight")
    low, high = (0.6, 0.9) if handle < 0.5 else (0.1, 0.4)
    looker.point(table, -6, looker.chance.uniform(low, high))


def middle(looker: Looker) -> None:
    """Clicks with the middle button."""
    looker.page.mouse.down(button="middle")
    looker.page.mouse.up(button="middle")


def first_row(looker: Looker) -> str:
    return looker.page.locator(ROW).first.get_attribute("data-row") or ""


def moved_from(row: str) -> str:
    return f"document.querySelector('{ROW}')?.getAttribute('data-row') !== '{row}' && {LOADED}"


def reads(looker: Looker, times: int) -> Iterator[Reaction]:
    """Clicks on rows anywhere in the table, which opens their texts beside it."""
    looker.open("/responses?sort=-kl_k1&at=0.0")
    for _ in range(times):
        jump(looker)
        before = looker.page.inner_text(".detail h2")
        row = looker.page.locator(ROW).nth(looker.chance.randint(3, 15))
        until = f"document.querySelector('.detail h2').textContent !== {before!r} && {OPENED}"
        yield looker.click(row.locator(".td").nth(1), f"{until} && document.querySelector('.detail .body')")


def opens(looker: Looker, times: int) -> Iterator[Reaction]:
    """Open the tokens of rows anywhere in the table with the enter key."""
    for _ in range(times):
        looker.open(f"/responses?sort=-kl_k1&{OPENABLE}")
        jump(looker)
        looker.page.locator(ROW).nth(looker.chance.randint(3, 15)).locator(".td").nth(1).click()
        looker.page.wait_for_selector(".detail .body")
        yield looker.key("Enter", f"location.pathname === '/tokens' && {TOKENS}")


def nexts(looker: Looker, last: int, times: int) -> Iterator[Reaction]:
    """Goes from one rollout's tokens to the next with a key."""
    looker.open(f"/tokens?step={looker.chance.randrange(last)}&sample=0")
    for _ in range(times):
        before = looker.page.inner_text("main h2")
        shown = f"({TOKENS} || document.querySelector('main .empty'))"  # of some runs, not all tokens are recorded
        yield looker.key("j", f"document.querySelector('main h2').textContent !== {before!r} && {shown}")


def metrics(looker: Looker, address: str, times: int) -> Iterator[Reaction]:
    """Colours the tokens by one metric after another."""
    looker.open(address)
    if address.startswith("/responses"):
        looker.page.locator(ROW).first.locator(".td").nth(1).click()
        looker.page.wait_for_selector(".detail .body")
        looker.page.keyboard.press("Enter")
        looker.page.wait_for_selector(".token-line .tok")
        looker.rest()
    chips = looker.page.locator(".chip button:first-child")
    for turn in range(times):
        number = (turn + 1) % chips.count()
        until = f"document.querySelectorAll('.chip button:first-child')[{number}].ariaPressed === 'true'"
        yield looker.click(chips.nth(number), until)


def long_ones(looker: Looker, step: int, times: int) -> Iterator[Reaction]:
    """Open the tokens of the one response for evaluation, which is the long one."""
    for _ in range(times):
        looker.open(f"/responses?steps={step}-{step}&filter=split+%3D%3D+%22eval%22")
        looker.page.locator(ROW).first.locator(".td").nth(1).click()
        looker.page.wait_for_selector(".detail .body")
        yield looker.key("Enter", f"location.pathname === '/tokens' && {TOKENS}")


def plain(looker: Looker, button: str, times: int) -> Iterator[Reaction]:
    """Clicks on a button of the plain page, which changes a word or a table of 30 rows."""
    looker.page.route("**/plain", lambda route: route.fulfill(body=PLAIN, content_type="text/html"))
    looker.open("/plain")
    for _ in range(times):
        yield looker.click(looker.page.locator("button", has_text=button), "true")


def long_frames(looker: Looker, address: str, where: str, seconds: int, speed: int = 3_000) -> tuple[int, int]:
    """Scrolls by a gesture of the wheel, ``speed`` pixels in a second; return how many frames were long, and all."""
    looker.page.route("**/plain", lambda route: route.fulfill(body=PLAIN, content_type="text/html"))
    looker.open(address)
    box = looker.page.locator(where).bounding_box()
    assert box is not None
    gesture = {"x": box["x"] + 300, "y": box["y"] + 150, "yDistance": -speed * seconds, "speed": speed}
    looker.page.evaluate(f"void (window.scrolled = boardClock.frames({900 * seconds}))")
    looker.context.new_cdp_session(looker.page).send(
        "Input.synthesizeScrollGesture", gesture | {"gestureSourceType": "mouse"}
    )
    times: list[float] = looker.page.evaluate("scrolled")
    return sum(time > LONG_FRAME for time in times), len(times)

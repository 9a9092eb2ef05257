"""The page of a comparison as a browser shows it."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

import pytest
from scipy.stats import t

from cavesson.config import load
from cavesson.ops.intervals import share_interval
from cavesson.tools.compare import Comparison, compare, write
from cavesson.tools.settings import CompareSettings

PROMPTS = ["The old bridge", "Every winter", "Nobody", "My neighbour", "A letter"]
ARABIC = "مرحبا بالعالم 123"
HOSTILE = [
    "<script>window.owned = 1</script>",
    "</script><script>window.owned = 1</script><img src=x onerror='window.owned = 1'>",
    '</td></tr></table><h1>broken out</h1>" onmouseover="window.owned = 1',
    "漢字の長い文章です。空白がないので折り返しが必要になります。" * 8,
    f"{ARABIC}\nleft to right",
    "W" * 500,
    "https://example.org/" + "a/long/path/" * 30,
    "",
    "  two spaces\n\n\ttab &amp; &lt;b&gt; {{ 7 * 7 }}",
    "escape \x1b[31m, null \x00, return \r, \x85",
]
LONG = "runs/</title><script>window.owned = 1<script>-a-name-that-does-not-end-soon"
SIZES = [(1280, 900), (390, 844)]


@pytest.fixture(scope="module")
def comparison(models, tmp_path_factory) -> Comparison:
    """Two models' responses to five prompts."""
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("".join(f"{json.dumps({'prompt': prompt})}\n" for prompt in PROMPTS))
    flags = ["--prompts", str(file), "--sampling.max_new_tokens", "12", "--rewards", "lowercase", "--device", "cpu"]
    return compare([str(models / "one"), str(models / "two")], load(CompareSettings, None, flags))


def said(comparison: Comparison, texts: list[str], names: list[str]) -> Comparison:
    """The texts as prompts and as responses of models with these names."""
    line = {**comparison.columns[0].responses[0], "finish_reason": "eos"}
    responses = [{**line, "prompt": text, "response": text} for text in texts]
    first, second = (replace(column, responses=responses) for column in comparison.columns)
    columns = [replace(second if n else first, name=name) for n, name in enumerate(names)]
    return replace(comparison, columns=columns, prompts=len(texts))


def opened(page, comparison: Comparison, folder: Path) -> None:
    if not folder.exists():
        write(comparison, folder)
    page.goto((folder / "comparison.html").as_uri())


def lower(text: str) -> float:
    return sum("a" <= c <= "z" for c in text) / max(1, len(text))


def mean_and_interval(values: list[float]) -> str:
    half = t.ppf(0.975, len(values) - 1) * stdev(values) / len(values) ** 0.5
    return f"{fmean(values):.3f} ({fmean(values) - half:.3f} to {fmean(values) + half:.3f})"


def test_the_figures_are_those_of_the_responses(page, comparison, tmp_path):
    opened(page, comparison, tmp_path / "out")
    cells = [row.split("\t") for row in page.locator("#figures").inner_text().replace("\xa0", " ").splitlines()]
    figures = {label: values for label, *values in cells}
    sides = [column.responses for column in comparison.columns]
    rewards = [[lower(one["response"]) for one in side] for side in sides]
    gains = [two - one for one, two in zip(*rewards, strict=True)]
    wins = [1.0 if gain > 0 else 0.5 if gain == 0 else 0.0 for gain in gains]
    assert figures[""] == ["one", "two"]
    assert all(0 <= value <= 1 for side in rewards for value in side)  # so its interval is that of a share
    shares = [share_interval(values, range(5)) for values in rewards]
    assert figures["lowercase"] == [f"{one.mean:.3f} ({one.low:.3f} to {one.high:.3f})" for one in shares]
    assert figures["difference to the first"] == ["", mean_and_interval(gains)]
    assert figures["win rate over the first"][1].startswith(f"{fmean(wins):.3f} (")
    assert figures["length in tokens"] == [f"{fmean(one['tokens'] for one in side):.1f}" for side in sides]
    ended = [sum(one["finish_reason"] != "length" for one in side) / 5 for side in sides]
    assert figures["ended by itself"] == [f"{100 * share:.0f}%" for share in ended]
    shown = page.locator("#responses small").all_inner_texts()
    for text, one in zip(shown, (one for row in zip(*sides, strict=True) for one in row), strict=True):
        tokens = "1 token" if one["tokens"] == 1 else f"{one['tokens']} tokens"
        assert text == f"{lower(one['response']):+.3f} · {tokens} · {one['finish_reason']}"


def test_a_click_or_the_keyboard_sorts_by_reward(page, comparison, tmp_path):
    opened(page, comparison, tmp_path / "out")
    rewards = [lower(one["response"]) for one in comparison.columns[1].responses]
    assert len(set(rewards)) > 2
    down = sorted(range(5), key=lambda row: -rewards[row])
    up = sorted(down, key=lambda row: rewards[row])  # ties stay as they were

    def order() -> list[int]:
        return [PROMPTS.index(text) for text in page.locator("#responses tbody td:first-child").all_inner_texts()]

    heading = page.get_by_role("columnheader", name="two").last
    assert order() == [0, 1, 2, 3, 4]
    heading.click()
    assert (order(), heading.get_attribute("aria-sort")) == (down, "descending")
    page.keyboard.press("Enter")
    assert (order(), heading.get_attribute("aria-sort")) == (up, "ascending")
    page.get_by_role("button", name="prompt").click()
    assert order() == [0, 1, 2, 3, 4] and heading.get_attribute("aria-sort") is None


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_hostile_texts_are_texts(page, comparison, tmp_path, scheme):
    requests = []
    page.on("request", lambda request: requests.append(request.url))
    page.emulate_media(color_scheme=scheme)
    opened(page, said(comparison, HOSTILE, ["runs/a", LONG]), tmp_path / "out")
    assert requests == [page.url]
    assert page.evaluate("window.owned") is None
    assert page.locator("script").count() == 1 and page.locator("h1").count() == 1
    assert page.locator("table").count() == 2 and page.locator("img").count() == 0
    expected = [*HOSTILE[:-1], "escape ␛[31m, null ␀, return ␍, ⟨U+0085⟩"]
    prompts = page.locator("#responses tbody td:first-child").evaluate_all("cells => cells.map(c => c.textContent)")
    assert prompts == expected
    texts = page.locator("#responses td:last-child").evaluate_all("cells => cells.map(c => c.firstChild.textContent)")
    assert [text for text, said in zip(texts, expected, strict=True) if said] == [text for text in expected if text]


def test_a_script_that_is_not_the_pages_does_not_run(browser, comparison, tmp_path):
    """Were a text taken for markup, the policy in the page's head would still stop it."""
    page = browser.new_page()
    opened(page, comparison, tmp_path / "out")
    page.evaluate("""() => {
        document.body.insertAdjacentHTML("beforeend", "<img src='data:,' onerror='window.owned = 1'>");
        document.body.append(Object.assign(document.createElement("script"), {textContent: "window.owned = 1"}));
    }""")
    page.wait_for_timeout(100)
    assert page.evaluate("window.owned") is None
    page.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("columns", [1, 2, 7])
def test_nothing_is_cut_off(page, comparison, tmp_path, width, height, columns):
    page.set_viewport_size({"width": width, "height": height})
    names = [LONG, *(f"runs/{n}" for n in range(columns - 1))]
    opened(page, said(comparison, HOSTILE, names), tmp_path / "out")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    cut = (
        "cells => cells.filter(c => c.scrollWidth > c.clientWidth + 1 || c.getBoundingClientRect().right > innerWidth)"
    )
    assert page.locator("#responses :is(th, td)").evaluate_all(f"{cut}.length") == 0
    narrowest = page.locator("#responses td").evaluate_all("cells => Math.min(...cells.map(c => c.offsetWidth))")
    assert narrowest >= 160  # a dozen letters of most scripts
    if columns < 3:
        assert page.locator(".scroll").evaluate("box => box.scrollWidth <= box.clientWidth")


def test_responses_stand_side_by_side_where_there_is_room_and_under_their_names_elsewhere(page, comparison, tmp_path):
    places = "cells => cells.map(c => c.getBoundingClientRect()).map(r => [r.left, r.top])"
    opened(page, comparison, tmp_path / "out")
    cells = page.locator("#responses tbody tr").first.locator("td")
    (x0, y0), (x1, y1), (x2, y2) = cells.evaluate_all(places)
    assert x0 < x1 < x2 and y0 == y1 == y2
    page.set_viewport_size({"width": 390, "height": 844})
    (x0, y0), (x1, y1), (x2, y2) = cells.evaluate_all(places)
    assert x0 == x1 == x2 and y0 < y1 < y2
    labels = cells.evaluate_all("cells => cells.map(c => getComputedStyle(c, '::before').content)")
    assert labels == ["none", '"one"', '"two"']


def test_every_line_has_the_direction_of_its_script(page, comparison, tmp_path):
    opened(page, said(comparison, [f"{ARABIC}\nleft to right"], ["a", "b"]), tmp_path / "out")
    cell = page.locator("#responses tbody td").first
    arabic, latin = cell.evaluate("""cell => [[0, 13], [18, 31]].map(([start, end]) => {
        const line = document.createRange();
        line.setStart(cell.firstChild, start);
        line.setEnd(cell.firstChild, end);
        const [inner, outer] = [line.getBoundingClientRect(), cell.getBoundingClientRect()];
        return [inner.left - outer.left, outer.right - inner.right];
    })""")
    assert arabic[1] < 20 < arabic[0]
    assert latin[0] < 20 < latin[1]


def luminance(colour: str) -> float:
    """WCAG 2.2, relative luminance, of `rgb(r, g, b)`."""
    channels = [int(value) / 255 for value in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_texts_can_be_read_in_light_and_dark(page, comparison, tmp_path, scheme, width, height):
    """Contrast of at least 4.5 to 1 (WCAG 2.2, 1.4.3, level AA)."""
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": height})
    opened(page, comparison, tmp_path / "out")
    pairs = page.locator("h1, p, th, td, small").evaluate_all("""elements => elements.map(element => {
        const behind = e => {
            const colour = getComputedStyle(e).backgroundColor;
            return colour === "rgba(0, 0, 0, 0)" ? behind(e.parentElement) : colour;
        };
        return [getComputedStyle(element).color, behind(element)];
    })""")
    assert len({behind for _, behind in pairs}) == 2  # headings and the page
    assert all((luminance(behind) < 0.1) == (scheme == "dark") for _, behind in pairs)
    for pair in pairs:
        low, high = sorted(map(luminance, pair))
        assert (high + 0.05) / (low + 0.05) >= 4.5

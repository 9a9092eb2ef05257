"""The doctor's page: one file that says what was found, shows it, and runs nothing of what was recorded."""

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from doctor_helpers import END, WORDS, healthy
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import cavesson.doctor
from cavesson.cli import app
from cavesson.doctor.diagnosis import diagnose
from cavesson.doctor.reading import Curve, Reading
from cavesson.doctor.report.chart import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, chart, drawn, nice_ticks
from cavesson.doctor.report.evidence import SHADES, evidence
from cavesson.doctor.report.page import page
from cavesson.doctor.rules import RULES
from cavesson.doctor.series import Series
from cavesson.doctor.words import LANGUAGES, language
from cavesson.errors import UserError
from cavesson.findings.finding import Evidence
from cavesson.findings.words import Phrase
from cavesson.record import write_vocabulary

DOCTOR = Path(cavesson.doctor.__file__).parent
BY_NAME = {rule.name: rule for rule in RULES}
HOSTILE = '</style><script>alert("x")</script><img src=//x.com onerror=x> &amp; \u202eturned\x07'
VISIBLE = HOSTILE.replace("\u202e", "⟨RLO⟩").replace("\x07", "␇")


class Parsed(HTMLParser):
    """All tags with their attributes, and the text in them."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.texts = [("", {})], [""]
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.texts.append("")

    def handle_data(self, data):
        self.texts[-1] += data

    def named(self, tag, kind=None):
        """Return attributes and following text of the tags of a name and class."""
        both = zip(self.tags, self.texts, strict=True)
        return [(a, t) for (name, a), t in both if name == tag and (kind is None or kind in a.get("class", "").split())]


def sick():
    """Too much is clipped from step 10 on, and in a quarter of the responses the reward stands one token too early."""
    made = healthy()
    made.metrics["policy/clip_fraction"][10:] = 0.5
    rewards, count = made.tokens["token_reward"], made.mask.sum(-1)
    for step, row in np.argwhere(count >= 2):
        if row % 4 == 0:
            rewards[step, row, count[step, row] - 2] += made.rows["reward"][step, row]
            rewards[step, row, count[step, row] - 1] -= made.rows["reward"][step, row]
    return made


def data_of(made, folder, words=WORDS):
    data = made.data(folder)
    write_vocabulary(folder, [word or "<end>" for word in words], [f" {word}" if word else "<end>" for word in words])
    return data


def parsed(data, name="en"):
    return Parsed(page(data, diagnose(data, RULES), language(name)))


def test_a_cause_comes_with_its_curve_its_onset_its_healthy_range_and_the_change(tmp_path):
    found = parsed(data_of(sick(), tmp_path / "run"))
    titles = [text for _, text in found.named("span", "severity")]
    assert len(titles) == len(found.named("article")) >= 2
    text = "".join(found.texts)
    assert "Too many tokens are clipped" in text and "lower learning rate or passes per batch" in text
    assert "since step 10" in [text for _, text in found.named("text", "onset")]
    assert len(found.named("svg")) == len(found.named("polyline")) >= 2


def test_the_same_in_every_language(tmp_path):
    data = data_of(sick(), tmp_path / "run")
    shown = {name: parsed(data, name) for name in LANGUAGES}
    assert [one.named("html")[0][0]["lang"] for one in shown.values()] == list(LANGUAGES)
    said = ["".join(text for (tag, _), text in zip(one.tags, one.texts, strict=True) if tag != "style") for one in
            shown.values()]  # fmt: skip
    for phrase in (
        "Looked at and within range",
        "Not checked",
        "since step",
        "seen",
        "change",
        "source",
        "not recorded",
    ):
        assert [phrase in text for text in said] == [True, False, False], phrase


def test_what_was_recorded_is_text_and_nothing_else(tmp_path):
    made = sick()
    made.rows["prompt"][:] = HOSTILE
    made.info["algorithm"] = HOSTILE
    harmless = parsed(data_of(sick(), tmp_path / "harmless"))
    found = parsed(data_of(made, tmp_path / "<img src=x>", [HOSTILE for _ in WORDS]))
    assert {tag for tag, _ in found.tags} <= {tag for tag, _ in harmless.tags}
    assert {name for _, attributes in found.tags for name in attributes} <= {
        "lang", "charset", "http-equiv", "content", "name", "class", "viewbox", "role", "aria-label", "d", "x", "y",
        "width", "height", "points", "title",
    }  # fmt: skip
    assert VISIBLE in found.named("i")[0][1]
    assert any(VISIBLE in text for _, text in found.named("b"))
    assert VISIBLE in found.named("p")[0][1]
    assert found.named("h1")[0][1].strip() == "<img src=x>"
    assert not re.search("[\u202a-\u202e\x00-\x08]", "".join(found.texts))


def test_the_page_allows_itself_its_own_style_and_nothing_else(tmp_path):
    html = page(data := data_of(sick(), tmp_path / "run"), diagnose(data, RULES), language("en"))
    policy = next(a["content"] for a, _ in Parsed(html).named("meta") if "http-equiv" in a)
    style = html[html.index("<style>") + 7 : html.index("</style>")]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'"
    assert "url(" not in style and "@import" not in style
    assert "http:" not in html and "https:" not in html


def test_its_colours_are_the_board_s():
    ours = re.findall(r"--(\w+): light-dark\((\S+), (\S+)\)", (DOCTOR / "report" / "page.css").read_text())
    light, dark = (DOCTOR.parent / "board/web/src/style/base.css").read_text().split(':root[data-theme="dark"]')
    boards = [dict(re.findall(r"--(\w+): (#\w+);", theme)) for theme in (light, dark)]
    assert len(ours) > 10
    for name, *colours in ours:
        assert name == "healthy" or colours == [theme[name] for theme in boards], name


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_it_as_it_is_meant(browser, tmp_path, scheme):
    data = data_of(sick(), tmp_path / "run")
    file = tmp_path / "page.html"
    file.write_text(page(data, diagnose(data, RULES), language("en")), encoding="utf-8")
    context = browser.new_context(color_scheme=scheme)
    try:
        shown = context.new_page()
        said, asked = [], []
        shown.on("console", lambda message: said.append(message.text))
        shown.on("request", lambda request: asked.append(request.url))
        shown.goto(file.as_uri())
        assert said == [] and asked == [file.as_uri()]
        ground = shown.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == {"light": "rgb(245, 244, 240)", "dark": "rgb(17, 19, 22)"}[scheme]
        colours = "[...document.querySelectorAll('.text b')].map((b) => getComputedStyle(b).backgroundColor)"
        assert len(set(shown.evaluate(colours))) > 4
        assert shown.evaluate("document.documentElement.scrollWidth <= innerWidth")
    finally:
        context.close()


def test_the_tokens_that_matter_are_marked_and_coloured_by_what_the_rule_looks_at(tmp_path):
    made = healthy()
    made.tokens["mask"][0, 0] = np.arange(made.mask.shape[-1]) < 6
    made.tokens["token_id"][0, 0, :6] = [1, 2, 3, 4, 5, END]
    made.tokens["token_reward"][0, 0, :6] = [0, -2, 0, 1, 0, 4]
    data = data_of(made, tmp_path / "run")
    place = (Evidence(0, 0, 3, 5),)
    found = Parsed(evidence(data.run, BY_NAME["reward-position"], place, language("en")))
    tokens = [(a, text) for a, text in found.named("b") if "title" in a]
    assert [text for _, text in tokens] == [" the", " a", " and", " was", " good", "<end>"]
    assert ["here" in a.get("class", "") for a, _ in tokens] == [False, False, False, True, True, False]
    # 0.98 of the way from the fifth to the sixth of the sorted sizes 0 0 0 1 2 4 is 3.8: 2 / 3.8 of 8 shades is 4.
    shades = [re.findall(r"[pn]\d", a.get("class", "")) for a, _ in tokens]
    assert shades == [[], ["n4"], [], ["p2"], [], [f"p{SHADES}"]]
    assert [a["title"] for a, _ in tokens] == ["0", "−2", "0", "1", "0", "4"]


def test_of_a_long_response_what_surrounds_the_place_is_shown(tmp_path, monkeypatch):
    monkeypatch.setattr("cavesson.doctor.report.evidence.BEFORE", 2)
    monkeypatch.setattr("cavesson.doctor.report.evidence.BEHIND", 3)
    made = healthy()
    made.tokens["mask"][0, 0] = True
    made.tokens["token_id"][0, 0] = np.arange(made.mask.shape[-1]) + 1
    data = data_of(made, tmp_path / "run")
    for start, shown, ends in (
        (None, WORDS[1:6], (False, True)),
        (6, WORDS[5:10], (True, True)),
        (19, WORDS[18:], (True, False)),
    ):
        html = evidence(data.run, BY_NAME["negative-kl"], (Evidence(0, 0, start),), language("en"))
        found = Parsed(html)
        assert [text.strip(" …") for a, text in found.named("b") if "title" in a] == shown
        assert ("</i>…" in html, "…</p>" in html) == ends


def test_where_a_rule_looks_at_the_prompt_s_tokens_the_first_of_them_are_shown(tmp_path):
    made = healthy()
    made.rows["prompt_ids"][0][0] = [1, 1, 2, 3, *[4] * 40]
    data = data_of(made, tmp_path / "run")
    for name, tokens in ("double-start", [" the", " the", " a", " and", *[" was"] * 8]), ("negative-kl", []):
        found = Parsed(evidence(data.run, BY_NAME[name], (Evidence(0, 0),), language("en")))
        assert [text.rstrip(" …") for a, text in found.named("b") if not a][: len(tokens)] == tokens


def test_where_there_are_no_tokens_the_text_is_shown(tmp_path):
    made = sick()
    made.tokens = {"mask": made.mask}
    made.rows["response"][:] = "words <b>"
    data = made.data(tmp_path / "run")
    found = Parsed(evidence(data.run, BY_NAME["negative-kl"], (Evidence(0, 0),), language("en")))
    assert "words <b>" in "".join(found.texts)


@pytest.mark.parametrize("steps", [1, 2])
def test_the_shortest_runs_have_a_page(tmp_path, steps):
    assert "run" in "".join(parsed(data_of(healthy(steps=steps), tmp_path / "run")).texts)


def test_a_curve_is_drawn_where_its_numbers_are():
    curve = Curve(Series(np.array([0, 5, 10]), np.array([0.0, 10.0, 5.0])), high=4.0)
    found = Parsed(chart(curve, 5, "since", "step", share=False))
    x = {0: LEFT, 5: (LEFT + WIDTH - RIGHT) / 2, 10: WIDTH - RIGHT}
    y = {value: HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / 10 for value in (0, 4, 5, 10)}
    ((line, _),) = found.named("polyline")
    points = [tuple(map(float, point.split(","))) for point in line["points"].split()]
    assert np.allclose(points, [(x[0], y[0]), (x[5], y[10]), (x[10], y[5])], atol=0.06)
    ((band, _),) = found.named("rect")
    assert np.allclose([float(band["y"]), float(band["height"])], [y[4], y[0] - y[4]], atol=0.06)
    ((onset, _),) = found.named("path", "onset")
    assert onset["d"].startswith(f"M{x[5]:.1f} ")
    assert [text for a, text in found.named("text", "end") if a["x"] == str(LEFT - 6)] == ["0", "5", "10"]
    percent = Parsed(chart(Curve(Series(np.array([0, 1]), np.array([0.0, 0.4]))), None, "", "", share=True))
    assert [text for a, text in percent.named("text", "end") if a["x"] == str(LEFT - 6)][-1] == "40 %"
    assert percent.named("rect") == [] and percent.named("path", "onset") == []


def test_the_onset_stands_on_a_curve_along_the_steps_alone():
    points = Series(np.array([1, 2, 3]), np.array([0.0, 10.0, 5.0]))
    by_step, by_length = (
        Parsed(drawn(Reading(3.0, True, since=2, curve=Curve(points, along=along)), language("zh")))
        for along in (None, Phrase("length in tokens"))
    )
    assert [text for _, text in by_step.named("text", "onset")] == ["起始步 2"]
    assert [text for _, text in by_step.named("text", "middle")] == ["步"]
    assert by_length.named("text", "onset") == by_length.named("path", "onset") == []
    assert [text for _, text in by_length.named("text", "middle")] == ["长度（词元）"]


@given(st.floats(-1e6, 1e6), st.floats(0, 1e6) | st.just(0.0))
def test_ticks_are_round_and_enclose_what_is_drawn(low, spread):
    ticks = nice_ticks(low, low + spread)
    steps = np.diff(ticks)
    assert 2 <= len(ticks) <= 7 and (steps > 0).all()
    assert np.allclose(steps, steps[0], rtol=1e-3)
    slack = 1e-9 * (abs(low) + spread + 1)
    assert ticks[0] <= low + slack and ticks[-1] >= low + spread - slack
    assert f"{steps[0]:.0e}"[0] in "125"


def test_the_command_writes_the_page(tmp_path):
    data_of(sick(), tmp_path / "run")
    file = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["doctor", str(tmp_path / "run"), "--html", str(file), "--language", "vi"])
    assert done.exit_code == 0, done.output
    assert file.read_text(encoding="utf-8").startswith('<!doctype html>\n<html lang="vi">')


def test_evidence_is_linked_into_the_board_where_its_address_is_known(tmp_path):
    data_of(sick(), tmp_path / "run")
    file = tmp_path / "page.html"
    for more, start in ([], None), (["--board", "http://127.0.0.1:6006/?token=secret"], "http://127.0.0.1:6006/"):
        done = CliRunner().invoke(app, ["doctor", str(tmp_path / "run"), "--html", str(file), *more])
        assert done.exit_code == 0, done.output
        found = Parsed(file.read_text(encoding="utf-8"))
        views = [text.strip() for _, text in found.named("code")]
        assert len(views) >= 3 and all(re.fullmatch(r"tokens\?step=\d+&sample=\d+(&token=\d+)?", one) for one in views)
        assert [a["href"] for a, _ in found.named("a")] == ([] if start is None else [start + one for one in views])


@pytest.mark.parametrize("place", ["run/run.json/page.html", "."])
def test_a_page_that_cannot_be_written_is_one_line(place, tmp_path):
    data_of(sick(), tmp_path / "run")
    done = CliRunner().invoke(app, ["doctor", str(tmp_path / "run"), "--html", str(tmp_path / place)])
    assert isinstance(done.exception, UserError) and "cannot be written" in str(done.exception)


def test_a_board_without_a_page_to_link_is_refused(tmp_path):
    done = CliRunner().invoke(app, ["doctor", str(tmp_path), "--board", "http://127.0.0.1:6006/"])
    assert isinstance(done.exception, UserError) and "--html" in str(done.exception)


def test_a_finding_without_a_curve_says_so(tmp_path):
    made = sick()
    made.metrics["loss/value"][7] = np.nan
    data = data_of(made, tmp_path / "run")
    diagnosis = diagnose(data, [BY_NAME["not-finite"], BY_NAME["clip-fraction-high"]])
    assert [one.reading.curve is None for one in diagnosis.findings] == [True, False]
    assert page(data, diagnosis, language("en")).count("there is no curve") == 1

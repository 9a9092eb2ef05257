"""Every view in every language, window size and colour scheme; what a person reads there is in their language."""

import json
import re
from pathlib import Path

import pytest
from browser_helpers import VIEWS, go, opened, settle
from playwright.sync_api import Page, expect
from typer.testing import CliRunner

from cavesson.cli import app
from cavesson.record.derived import DERIVED

I18N = Path(__file__).parents[2] / "src" / "cavesson" / "board" / "web" / "src" / "i18n"
LANGUAGES = {"en": "en-US", "zh": "zh-CN", "vi": "vi-VN"}
# Columns of the record, which have the same name in every language.
COLUMNS = {"value", "return_to_go", "return", "entropy", "length", "reward", "sum"}


def words(language: str) -> dict[str, str]:
    text = (I18N / f"{language}.ts").read_text()
    derived = {f"metric_{name}": column.doc for name, column in DERIVED.items()} if language == "en" else {}
    return dict(re.findall(r'^  (\w+):\s+"((?:[^"\\]|\\.)*)"', text, re.MULTILINE)) | derived


def texts_of(page: Page) -> set[str]:
    """Every text of the page's own elements that a person can see, their titles and labels included."""
    found = page.evaluate(
        """() => {
            const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), texts = [];
            for (let node; (node = walker.nextNode()); ) texts.push(node.textContent.trim());
            for (const one of document.querySelectorAll("[title],[aria-label],[placeholder]"))
                for (const name of ["title", "aria-label", "placeholder"]) texts.push(one.getAttribute(name) ?? "");
            return texts;
        }"""
    )
    return set(found)


def click_through(page: Page, language: str, visit) -> None:
    named = words(language)
    for view, sign in VIEWS.items():
        tab = page.get_by_role("navigation").get_by_role("link", name=named[view], exact=True)
        tab.click()
        expect(tab).to_have_attribute("aria-current", "page")
        page.locator(sign).first.wait_for()
        visit(view)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("wide", [True, False], ids=["1440", "390"])
@pytest.mark.parametrize("language", LANGUAGES)
def test_every_view_opens_in_every_language_size_and_colour(browser, board_told, language, wide, scheme):
    english, here = words("en"), words(language)
    foreign = {english[key] for key in english if english[key] != here[key]} - set(here.values()) - COLUMNS
    with opened(browser, board_told.address, wide=wide, language=LANGUAGES[language], color_scheme=scheme) as page:

        def visit(view: str) -> None:
            page.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 50)))")
            texts = texts_of(page)
            assert texts & foreign == set(), view
            assert not [text for text in texts if re.search(r"(?<![\w/]){\w+}", text)], f"{view}: a blank is not filled"
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
            assert page.evaluate("[...document.querySelectorAll('.view')].every((v) => v.scrollWidth <= v.clientWidth)")

        expect(page.locator("html")).to_have_attribute("lang", {"zh": "zh-Hans"}.get(language, language))
        expect(page.locator("html")).to_have_attribute("data-theme", scheme)
        click_through(page, language, visit)


@pytest.mark.slow
def test_the_language_is_chosen_and_kept(browser, board_told):
    with opened(browser, board_told.address) as page:
        tabs = page.get_by_role("navigation")
        for language in ("vi", "zh", "en"):
            page.locator("select.language").select_option(language)
            expect(tabs.get_by_role("link").first).to_have_text(words(language)["runs"])
            page.reload()
            expect(tabs.get_by_role("link").first).to_have_text(words(language)["runs"])


def test_light_and_dark_are_chosen_and_kept(browser, board_told):
    with opened(browser, board_told.address, color_scheme="light") as page:
        ground = "getComputedStyle(document.body).backgroundColor"
        light = page.evaluate(ground)
        page.locator(".plot canvas").first.wait_for()
        page.keyboard.press("d")
        expect(page.locator("html")).to_have_attribute("data-theme", "dark")
        assert page.evaluate(ground) != light
        page.reload()
        expect(page.locator("html")).to_have_attribute("data-theme", "dark")


def finding(id, **changes):
    words = {"severity": "note", "title": id, "cause": "No place.", "seen": "9", "healthy": "below 8"}
    nothing = {"since_step": None, "since_between": None, "evidence": [], "fix": "", "trainer_setting_names": None}
    return {"rule": id, "source": "", "explains": []} | words | nothing | changes


def diagnosis(*findings, summary="Not judged: 3 of 76 rules."):
    not_excluded = [["the critic does not learn", "record it"]]
    return {"summary": summary, "not_excluded": not_excluded, "last_step": 6, "findings": findings}


FINDINGS = [
    finding(
        "KL runs away",
        severity="error",
        cause="It rose to <b>9</b>.",
        since_step=4,
        since_between=[3, 5],
        evidence=[{"step": 5, "sample": 3, "start": 2}],
        fix="kl.coef = 0.1",
        trainer_setting_names={"trainer": "TRL", "settings": {"kl.coef": "beta"}},
        explains=["The reward falls", "Loops"],
        source="A paper",
    ),
    finding("A note", since_between=[2, 2], fix="kl.coef = 0.2"),
    finding("Another"),
]


def test_findings_stand_in_a_panel_and_on_the_axis(browser, board_told):
    with opened(browser, f"{board_told.address}/overview") as page:
        picture = "document.querySelector('.timeline canvas').toDataURL()"
        page.locator(".plot canvas").first.wait_for()
        settle(page)
        plain = page.evaluate(picture)
        found = {"en": diagnosis(*FINDINGS), "zh": diagnosis(finding("KL 失控")), "vi": diagnosis()}
        page.route("**/api/runs/first/findings", lambda route: route.fulfill(json=found))
        page.reload()
        panel = page.locator(".findings")
        expect(panel.locator("li")).to_have_count(3)
        first = panel.locator("li").first
        expect(first).to_contain_text("began between steps 3 and 5")
        expect(panel.locator("li").nth(1)).to_contain_text("began at step 2")
        expect(panel.locator("li").nth(2)).not_to_contain_text("began")
        expect(first).to_contain_text("It rose to <b>9</b>.")
        first.get_by_text("seen 9 (below 8)").click()
        expect(first.locator(".change")).to_contain_text("change kl.coef = 0.1")
        assert first.locator("dl div").all_inner_texts() == [
            "in TRL\nkl.coef → beta",
            "explains\nThe reward falls, Loops",
            "source\nA paper",
        ]
        expect(panel.locator(".severity.error")).to_have_attribute("aria-label", "error")
        page.locator(".plot canvas").first.wait_for()
        page.wait_for_function(f"(plain) => {picture} !== plain", arg=plain)
        page.locator("select.language").select_option("zh")
        expect(panel.locator("li b")).to_have_text("KL 失控")
        page.locator("select.language").select_option("en")
        panel.get_by_role("button", name="Steps 4–6").click()
        expect(page).to_have_url(re.compile("step=4"))
        expect(page.locator(".timeline output")).to_contain_text("KL runs away")
        panel.get_by_role("button", name="Step 5 · sample 3").click()
        expect(page.locator("main h2")).to_have_text("Step 5 · sample 3")
        expect(page).to_have_url(re.compile("token=2"))


def test_the_first_finding_is_shown_in_full_or_the_one_that_is_open(browser, board_told):
    with opened(browser, f"{board_told.address}/settings") as page:
        found = {name: diagnosis(*FINDINGS) for name in LANGUAGES}
        page.route("**/api/runs/first/findings", lambda route: route.fulfill(json=found))
        page.goto(f"{board_told.address}/overview")
        change = page.locator(".findings .change")
        expect(change).to_have_text("change kl.coef = 0.1Copy the change")
        page.locator(".findings").get_by_role("link", name="A note", exact=True).click()
        expect(change).to_have_text("change kl.coef = 0.2Copy the change")
        page.keyboard.press("Escape")
        expect(change).to_have_text("change kl.coef = 0.1Copy the change")


def test_what_the_doctor_could_not_judge_is_said_first_as_on_the_command_line(browser, board_told, runs_told):
    with opened(browser, f"{board_told.address}/overview") as page:
        panel = page.locator(".findings")
        for language in ("vi", "zh", "en"):
            done = CliRunner().invoke(app, ["doctor", str(runs_told[0]), "--json", "--language", language])
            said = json.loads(done.output)
            page.locator("select.language").select_option(language)
            expect(panel.locator(".judged")).to_have_text(said["summary"])
            listed = panel.locator(".open-failures")
            heading = f"{words(language)['notExcluded']} ({len(said['cannot_be_excluded'])})"
            expect(listed.locator("summary")).to_have_text(heading)
            assert listed.locator("dt").all_text_contents() == [one["failure"] for one in said["cannot_be_excluded"]]
            assert [*filter(None, listed.locator("dd").all_text_contents())] == listed.locator("dd").all_text_contents()
        assert said["summary"].startswith("Not judged: ") and said["cannot_be_excluded"]
        top = "(one) => one.getBoundingClientRect().top"
        assert panel.locator(".judged").evaluate(top) < panel.locator("li").first.evaluate(top)


@pytest.mark.parametrize("summary", ["", "Not judged: 57 of 76 rules."])
def test_where_nothing_was_found_it_is_said_how_much_was_looked_at(browser, board_told, summary):
    """Without a summary, which files of earlier versions lack, nothing is shown rather than that all is well."""
    with opened(browser, board_told.address) as page:
        said = {name: {"summary": summary, "not_excluded": [], "last_step": 0, "findings": []} for name in LANGUAGES}
        page.route("**/api/runs/first/findings", lambda route: route.fulfill(json=said))
        page.goto(f"{board_told.address}/overview")
        page.locator(".plot canvas").first.wait_for()
        settle(page)
        assert page.locator(".judged").all_inner_texts() == [*filter(None, [summary])]


@pytest.mark.slow
def test_every_view_can_be_reached_and_used_by_keyboard_alone(browser, board_told):
    with opened(browser, board_told.address) as page:
        page.locator(".plot canvas").first.wait_for()
        page.keyboard.press("?")
        keys = page.get_by_role("dialog")
        expect(keys).to_be_visible()
        listed = {key.strip() for key in keys.locator("kbd").all_inner_texts()}
        assert {
            "g o",
            "g s",
            "g r",
            "g q",
            "g t",
            "g p",
            "g c",
            "g e",
            "j",
            "k",
            "s",
            "a",
            "b",
            "/",
            "[",
            "]",
            "Enter",
            "d",
            "?",
        } <= listed
        page.keyboard.press("Escape")
        expect(keys).to_have_count(0)
        views = ["step", "responses", "prompt", "tokens", "patterns", "compare", "overview"]
        for key, view in zip("srqtpco", views, strict=True):
            page.keyboard.press("g")
            page.keyboard.press(key)
            page.locator(VIEWS[view]).first.wait_for()
            expect(page).to_have_url(re.compile(f"/{view}"))
        page.keyboard.press("{")
        expect(page.locator(".timeline output b")).to_have_text("0")
        page.keyboard.press("]")
        expect(page.locator(".timeline output b")).to_have_text("1")
        page.keyboard.press("}")
        expect(page.locator(".timeline output b")).to_have_text("9")


def test_a_rollout_is_found_opened_read_and_starred_by_keyboard(browser, board_told):
    with opened(browser, f"{board_told.address}/responses?sort=-reward") as page:
        page.locator(VIEWS["responses"]).first.wait_for()
        page.keyboard.press("/")
        page.keyboard.type("garden")
        page.keyboard.press("Enter")
        expect(page.locator(".tr mark").first).to_have_text("garden")
        page.keyboard.press("j")
        page.keyboard.press("j")
        expect(page.locator(".tr.chosen")).to_have_attribute("data-row", "2")
        page.keyboard.press("k")
        expect(page.locator(".tr.chosen")).to_have_attribute("data-row", "1")
        title = page.locator(".detail h2").inner_text()
        page.locator(".detail .body").wait_for()
        page.keyboard.press("s")
        expect(page.locator(".detail header .star")).to_have_attribute("aria-pressed", "true")
        page.keyboard.press("s")
        expect(page.locator(".detail header .star")).to_have_attribute("aria-pressed", "false")
        page.keyboard.press("Enter")
        expect(page.locator("main h2")).to_have_text(title)
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        expect(page.locator(".token-card")).to_contain_text("token 1 of")
        page.keyboard.press("3")
        expect(page).to_have_url(re.compile("metric=ref_logprob"))
        page.keyboard.press("j")
        expect(page.locator("main h2")).not_to_have_text(title)
        page.keyboard.press("k")
        expect(page.locator("main h2")).to_have_text(title)


def test_enter_presses_the_button_that_has_the_focus(browser, board_told):
    with opened(browser, f"{board_told.address}/responses?at=0.1") as page:
        page.locator(".detail .body").wait_for()
        page.get_by_role("columnheader").get_by_role("button", name="reward").focus()
        page.keyboard.press("Enter")
        expect(page).to_have_url(re.compile("sort=-reward"))
        expect(page.locator(".bar output")).to_have_text("160 rollouts")
        page.keyboard.press("j")  # takes the focus to the rows, which Enter then opens
        expect(page.locator(".tr.chosen")).to_have_attribute("data-row", "1")
        page.locator(".detail").get_by_role("button", name="Close").focus()
        page.keyboard.press("Enter")
        expect(page.locator(".detail")).to_have_count(0)
        page.keyboard.press("j")
        page.locator(".detail").wait_for()
        page.keyboard.press("Enter")
        expect(page).to_have_url(re.compile("/tokens"))


def test_the_focus_stays_in_what_is_open_and_returns_from_it(browser, board_told):
    with opened(browser, f"{board_told.address}/responses?at=0.1") as page:
        page.locator(".detail .body").wait_for()
        columns = page.get_by_role("button", name="Columns")
        for _ in range(2):  # the second time as the first
            columns.focus()
            page.keyboard.press("?")
            expect(page.get_by_role("dialog").get_by_role("button", name="Close")).to_be_focused()
            for _ in range(3):
                page.keyboard.press("Tab")
                expect(page.locator(":focus:not(dialog *)")).to_have_count(0)
            page.keyboard.press("Escape")
            expect(columns).to_be_focused()
        page.keyboard.press("Enter")
        page.keyboard.press("Tab")
        expect(page.locator(".menu .list input").first).to_be_focused()
        page.keyboard.press("Escape")
        expect(page.locator(".menu .list")).to_have_count(0)
        expect(columns).to_be_focused()
        expect(page.locator(".detail")).to_have_count(1)


@pytest.mark.slow
def test_a_view_that_is_left_comes_back_as_it_was(browser, board_told):
    with opened(browser, f"{board_told.address}/responses?sort=-length&filter=reward+%3E+1") as page:
        page.locator(VIEWS["responses"]).first.wait_for()
        first = page.locator('.tr[data-row="1"]').inner_text()
        go(page, "/patterns")
        page.locator(VIEWS["patterns"]).first.wait_for()
        page.keyboard.press("g")
        page.keyboard.press("r")
        expect(page.locator('.tr[data-row="1"]')).to_have_text(first, use_inner_text=True)
        page.go_back()
        page.locator(VIEWS["patterns"]).first.wait_for()


@pytest.mark.slow
def test_a_system_prompt_is_folded(browser, board_told):
    with opened(browser, f"{board_told.address}/tokens?step=3&sample=2") as page:
        text = page.get_by_text("Be short.", exact=False).locator("visible=true")
        page.locator("details.system").wait_for()
        expect(text).to_have_count(0)
        page.locator("details.system summary").click()
        expect(text).to_have_count(1)


def test_the_curves_are_drawn_before_more_is_asked_for(browser, board_told):
    def is_drawn_first() -> bool:
        page.goto(board_told.address)
        page.locator(".findings").wait_for()
        asked = page.evaluate(
            """performance.getEntriesByType("resource").filter((one) => one.name.includes("/api/"))
                .map((one) => one.startTime).sort((a, b) => a - b)"""
        )
        _runs, curves, more, *_ = asked
        return curves < page.evaluate("drawn") < more

    with opened(browser, board_told.address) as page:
        page.add_init_script(
            """const stroke = CanvasRenderingContext2D.prototype.stroke;
            CanvasRenderingContext2D.prototype.stroke = function (...path) {
                window.drawn ??= performance.now();
                return stroke.apply(this, path);
            };"""
        )
        # The page waits for two frames; a busy machine may draw later, but not every time.
        assert any(is_drawn_first() for _ in range(5))


def test_the_text_of_a_rollout_is_seen_before_its_pictures(browser, board_told):
    with opened(browser, f"{board_told.address}/responses") as page:
        page.locator('.tr[data-row="2"] .td').first.click()
        page.locator(".detail .body").wait_for()
        page.evaluate(
            """() => {
                let frame = 0, shown = 0;
                const after = new MessageChannel();
                after.port1.onmessage = () => { shown = frame; };
                const next = () => { frame++; after.port2.postMessage(null); requestAnimationFrame(next); };
                next();
                new MutationObserver(() => {
                    // What changes while a frame is made is painted by it, what changes later by the next one.
                    if (document.querySelector(".tok")) window.text ??= shown < frame ? frame : frame + 1;
                    if (document.querySelector(".strips canvas")) window.pictures ??= shown;
                }).observe(document, { subtree: true, childList: true });
            }"""
        )
        page.keyboard.press("Enter")
        page.locator(".strips canvas").first.wait_for()
        assert page.evaluate("text <= pictures")

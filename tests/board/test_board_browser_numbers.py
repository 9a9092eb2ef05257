"""The numbers on the screen are those of the record, which is read here without the board."""

import itertools
import math
import re
from collections import Counter, defaultdict

import numpy as np
import pytest
from browser_helpers import STEPS, go, opened, parsed, wait_for
from playwright.sync_api import Page, expect

import cavesson
from cavesson.record.splits import of_split


@pytest.fixture(scope="module")
def every(runs_told):
    """Every rollout of the first run, by step and sample."""
    return cavesson.open(runs_told[0]).rows().to_pylist(maps_as_pydicts="strict")


@pytest.fixture(scope="module")
def rows(every):
    """Those that were trained on."""
    return [row for row in every if row["split"] == "train"]


@pytest.fixture(scope="module")
def held_out(every):
    return [row for row in every if row["split"] == "eval"]


def at(rows, step):
    return [row for row in rows if row["step"] == step]


def near(text: str, value: float, rel: float = 5e-4, at_most: float = 1e-9) -> None:
    assert parsed(text) == pytest.approx(value, rel=rel, abs=at_most), (text, value)


def facts(page: Page, place: str) -> dict[str, str]:
    names = page.locator(f"{place} dt").all_inner_texts()
    return dict(zip(names, page.locator(f"{place} dd").all_inner_texts(), strict=True))


def legend(page: Page, title: str) -> dict[str, str]:
    card = page.locator(".card", has=page.get_by_role("heading", name=title, exact=True)).first
    keys = card.locator(".legend .key")
    return {key.locator(".name").inner_text(): key.locator("b").inner_text() for key in keys.all()}


def test_the_overview_shows_the_selected_steps_means(browser, board_told, rows, held_out):
    with opened(browser, board_told.address) as page:
        page.locator(".plot canvas").first.wait_for()

        def agrees(step: int) -> None:
            shown = legend(page, "Reward")
            near(shown["mean"], np.mean([row["reward"] for row in at(rows, step)]))
            near(shown["reference"], np.mean([row["ref_reward"] for row in at(rows, step)]))
            near(shown["evaluation"], np.mean([row["reward"] for row in at(held_out, step)]))
            near(legend(page, "Response length")["mean"], np.mean([row["length"] for row in at(rows, step)]))
            near(legend(page, "KL to the reference")["objective"], 0.5 * step)
            parts = legend(page, "Reward parts")
            for name in ("helpful", "signs"):
                near(parts[name], np.mean([row["reward_parts"][name] for row in at(rows, step)]))

        agrees(STEPS - 1)
        page.locator(".u-over").first.scroll_into_view_if_needed()
        plot = page.locator(".u-over").first.bounding_box()
        page.mouse.click(plot["x"] + plot["width"] * 4 / (STEPS - 1), plot["y"] + 40)
        expect(page.locator(".timeline output b")).to_have_text("4")
        page.mouse.move(5, 5)
        agrees(4)
        best = sorted(at(rows, 4), key=reward)
        lines = page.locator(".extremes").first.locator(".rollout b").all_inner_texts()
        expect(page.locator(".extremes").first.locator(".rollout")).to_have_count(4)
        for text, row in zip(lines, best[::-1], strict=False):
            near(text, row["reward"], rel=5e-3)


def reward(row) -> float:
    return row["reward"]


def switch(page: Page):
    return page.get_by_role("button", name="held out", exact=True)


@pytest.mark.slow
def test_held_out_responses_are_shown_alone_and_in_every_view(browser, board_told, every, rows, held_out):
    """The switch stays on from one view to the next, and the numbers are those of the held-out responses only."""
    assert len(every) == len(rows) + len(held_out)
    with opened(browser, f"{board_told.address}/responses") as page:
        count = page.locator(".bar output")
        expect(page.locator(".status")).to_contain_text(f"{len(rows)} rollouts{len(held_out)} held out")
        expect(count).to_have_text(f"{len(rows)} rollouts")
        switch(page).click()
        expect(count).to_have_text(f"{len(held_out)} rollouts")
        page.get_by_placeholder("Search text").fill("#")
        marked = [row for row in held_out if "#" in row["response"]]
        expect(count).to_have_text(f"{len(marked)} rollouts")
        hover_step(page, 9, f"{len(at(marked, 9))} of {len(at(held_out, 9))} match")
        page.get_by_role("link", name="Step", exact=True).click()
        expect(switch(page)).to_have_attribute("aria-pressed", "true")
        expect(page.locator(".bar .facts dd").first).to_have_text("4")
        shown = facts(page, ".bar .facts")
        values = np.array([row["reward"] for row in at(held_out, STEPS - 1)])
        near(shown["rollouts"], len(values))
        near(shown["mean"], values.mean())
        expect(page.locator("article.group")).to_have_count(1)
        assert len(page.locator("article.group .siblings b").all_inner_texts()) == 4
        expect(page.get_by_role("heading", name="Reward over the run · held out")).to_be_visible()


@pytest.mark.slow
def test_patterns_and_extremes_of_held_out_responses_are_shown_alone(browser, board_told, rows, held_out):
    with opened(browser, f"{board_told.address}/patterns?held_out=1") as page:
        line = page.locator(".patterns tbody tr", has=page.get_by_text("#", exact=True)).first
        expect(line.locator("td").last).to_have_text(str(sum("#" in row["response"] for row in held_out)))
        switch(page).click()
        expect(line.locator("td").last).to_have_text(str(sum("#" in row["response"] for row in rows)))
        page.get_by_role("link", name="Overview", exact=True).click()
        extremes = page.locator(".extremes").first.locator(".rollout b").first
        near(extremes.inner_text(), max(row["reward"] for row in at(rows, STEPS - 1)), rel=5e-3)
        switch(page).click()
        best = max(row["reward"] for row in at(held_out, STEPS - 1))
        wait_for(lambda: abs(parsed(extremes.inner_text()) - best) < 5e-3 * best, 30)


def test_a_step_says_how_its_rewards_lie(browser, board_told, rows):
    with opened(browser, f"{board_told.address}/step?step=6") as page:
        page.locator(".facts dd").first.wait_for()
        shown = facts(page, ".bar .facts")
        values = np.array([row["reward"] for row in at(rows, 6)])
        near(shown["rollouts"], len(values))
        near(shown["mean"], values.mean())
        near(shown["spread"], values.std(), rel=5e-3)
        near(shown["lowest"], values.min())
        near(shown["highest"], values.max())
        # The median comes from the sketch of the roll-ups: within 0.8 % of a value that lies in the middle.
        middle = sorted(values)[7:9]
        assert middle[0] * 0.99 <= parsed(shown["median"]) <= middle[1] * 1.01


def test_the_responses_to_a_prompt_stand_side_by_side(browser, board_told, rows):
    with opened(browser, f"{board_told.address}/step?step=6") as page:
        page.locator(".group .siblings button").first.wait_for()
        here = at(rows, 6)
        groups = defaultdict(list)
        for row in here:
            groups[row["group"]].append(row["reward"])
        shown = page.locator("article.group")
        expect(shown).to_have_count(len(groups))
        page.locator("article.group").last.locator(".siblings button").first.wait_for()
        found = []
        for article in shown.all():
            mean, sd = re.search(r"(\S+) ± (\S+)", article.locator("header .number").inner_text()).groups()
            rewards = [parsed(text) for text in article.locator(".siblings b").all_inner_texts()]
            found.append((parsed(sd), rewards))
            near(mean, np.mean(rewards), rel=5e-3)
            near(sd, np.std(rewards), rel=2e-2, at_most=1e-2)
        assert [sd for sd, _ in found] == sorted((sd for sd, _ in found), reverse=True)
        wanted = sorted(sorted(values) for values in groups.values())
        shown_rewards = sorted(sorted(rewards) for _, rewards in found)
        assert np.ravel(shown_rewards) == pytest.approx(np.ravel(wanted), abs=0.006)
        flat = page.locator("article.group.flat")
        expect(flat).to_have_count(1)
        expect(flat).to_contain_text("no variance")


@pytest.mark.slow
def test_the_prompts_that_never_beat_the_reference(browser, board_told, rows):
    best, tries = {}, Counter()
    for row in rows:
        best[row["group"]] = max(best.get(row["group"], -math.inf), row["reward"] - row["ref_reward"])
        tries[row["group"]] += 1
    wanted = {group: gap for group, gap in best.items() if gap <= 0}
    assert {3, 7, 11} <= set(wanted)
    with opened(browser, f"{board_told.address}/step") as page:
        table = page.locator("section", has=page.get_by_role("heading", name="Never beat the reference")).last
        expect(table.locator("tbody tr")).to_have_count(len(wanted))
        for line in table.locator("tbody tr").all():
            prompt, count, gap, _ = line.locator("td").all_inner_texts()
            group = int(re.search(r"line (\d+)", prompt)[1])
            assert parsed(count) == tries[group]
            near(gap, wanted[group], rel=5e-3)
        line.click()
        expect(page.locator(".bar output")).to_have_text(f"{tries[group]} rollouts")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("column", ["reward", "kl_k1", "length", "part/helpful"])
def test_the_table_is_sorted_both_ways(browser, board_told, rows, column):
    def value(row) -> float:
        return row["reward_parts"][column[5:]] if column.startswith("part/") else row[column]

    with opened(browser, f"{board_told.address}/responses?columns=step,sample,{column},response") as page:
        heading = page.get_by_role("columnheader").get_by_role("button", name=column, exact=False)
        for way in ("descending", "ascending"):
            heading.first.click()
            expect(page.locator(f'[aria-sort="{way}"]')).to_have_count(1)
            wanted = sorted((value(row) for row in rows), reverse=way == "descending")
            first = page.locator('.tr[data-row="1"] .td').nth(2)
            page.wait_for_function(
                "([cell, wanted]) => Math.abs(parseFloat(cell.textContent.replace('−', '-')) - wanted) < 1e-3",
                arg=[first.element_handle(), wanted[0]],
            )
            for place in range(20):
                cells = page.locator(f'.tr[data-row="{place + 1}"] .td').all_inner_texts()
                near(cells[2], wanted[place], at_most=6e-4)
                row = next(row for row in rows if [str(row["step"]), str(row["sample"])] == cells[:2])
                near(cells[2], value(row), at_most=6e-4)
                assert cells[3].strip() == row["response"].replace("\n", " ⏎ ").strip()
        last = page.locator(f'.tr[data-row="{len(rows)}"] .td').nth(2)
        # A key that is pressed while the rows are drawn anew has no effect, and a person presses it again.
        wait_for(lambda: page.get_by_role("grid").press("End") or last.is_visible(), 30)
        near(last.inner_text(), wanted[-1], at_most=6e-4)


def test_a_filter_shows_what_it_says(browser, board_told, rows):
    with opened(browser, f"{board_told.address}/responses", forgiven="status of 400") as page:
        count = page.locator(".bar output")
        expect(count).to_have_text(f"{len(rows)} rollouts")
        field = page.get_by_placeholder("reward > 2 and length < 100")
        field.fill('reward > 1.5 and length < 15 and split == "train"')
        wanted = [row for row in rows if row["reward"] > 1.5 and row["length"] < 15 and row["split"] == "train"]
        expect(count).to_have_text(f"{len(wanted)} rollouts")
        assert 0 < len(wanted) < len(rows)
        field.fill('parts["signs"] > 0')
        signs = sum(row["reward_parts"]["signs"] > 0 for row in rows)
        expect(count).to_have_text(f"{signs} rollouts")
        field.fill("reward >")
        expect(page.get_by_role("alert")).to_be_visible()
        field.fill("")
        page.get_by_role("textbox", name="First and last step").fill("2-4")
        page.keyboard.press("Enter")
        expect(count).to_have_text(f"{sum(2 <= row['step'] <= 4 for row in rows)} rollouts")


def hover_step(page: Page, step: int, text: str) -> None:
    box = page.locator(".timeline canvas").bounding_box()
    page.mouse.move(box["x"] + 10 + step / (STEPS - 1) * (box["width"] - 20), box["y"] + 20)
    output = page.locator(".timeline output")
    expect(output.locator("b")).to_have_text(str(step))
    expect(output).to_contain_text(text)


SEARCHES = {"q=%23": "#", "q=Light+over": "light over", "q=ca%28lm%7Cll%29&regex=1": "ca(lm|ll)"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("query", "expression"), SEARCHES.items())
def test_a_search_says_how_many_responses_of_each_step_match(browser, board_told, rows, query, expression):
    pattern = re.compile(expression, 0 if "regex" in query else re.IGNORECASE)
    matching = [row for row in rows if pattern.search(row["response"])]
    assert matching
    with opened(browser, f"{board_told.address}/responses?{query}") as page:
        expect(page.locator(".bar output")).to_have_text(f"{len(matching)} rollouts")
        expect(page.locator(".tr mark").first).to_have_text(pattern)
        for step in range(STEPS):
            hits = sum(row["step"] == step for row in matching)
            total = sum(row["step"] == step for row in rows)
            hover_step(page, step, f"{hits} of {total} match")


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1], ids=["none yet", "some"])
def test_a_search_goes_on_while_hits_are_verified(browser, board_told, rows, first):
    """A large run answers with what it has verified so far; the page asks again."""
    asked = Counter()

    def slowly(route, request):
        kind = "hits" if "/hits?" in request.url else "rows"
        asked[kind] += 1
        answer = route.fetch().json()
        if asked[kind] <= 2:
            early = {"total": first, "rows": answer["rows"][:first]} if kind == "rows" else {"hits": [0] * STEPS}
            answer |= early | {"at_most": True, "most": 99, "stopped": None}
        route.fulfill(json=answer)

    matching = [row for row in rows if "#" in row["response"]]
    with opened(browser, f"{board_told.address}/step") as page:
        page.route(re.compile("/api/runs/first/(rows|hits)[?].*q="), slowly)
        go(page, "/responses?q=%23")
        count = page.locator(".bar output")
        expect(count).to_have_text("at most 99 rollouts")
        expect(page.get_by_text("Searching the responses")).to_have_count(1 - first)
        expect(count).to_have_text(f"{len(matching)} rollouts")
        hover_step(page, 9, f"{sum(row['step'] == 9 for row in matching)} of 16 match")


def card(page: Page) -> dict[str, list[str]]:
    lines = page.locator(".token-card tr").all()
    return {line.locator("td").first.inner_text(): line.locator("td.number").all_inner_texts() for line in lines}


def test_the_numbers_of_a_token_are_those_of_the_record(browser, board_told, runs_told):
    table = cavesson.open(runs_told[0]).tokens(5, 6).to_pylist()
    with opened(browser, f"{board_told.address}/tokens?step=5&sample=6") as page:
        page.locator(".tok").first.wait_for()
        expect(page.locator(".bar .facts")).to_contain_text(f"Tokens\n{len(table)}", use_inner_text=True)
        for place in (0, 2, len(table) - 1):
            page.locator(f'.tok[data-token="{place}"]').first.hover()
            expect(page.locator(".token-card")).to_contain_text(f"token {place} of {len(table)}")
            token, shown = table[place], card(page)
            for name in ("logprob", "ref_logprob", "value", "token_reward", "advantage", "return", "entropy"):
                near(shown[name][0], token[name])
            ratio = token["logprob"] - token["ref_logprob"]
            near(shown["kl_k1"][0], ratio, at_most=1e-5)
            near(shown["prob"][0], math.exp(token["logprob"]))
            near(shown["kl_k3"][0], math.exp(-ratio) - 1 + ratio, rel=2e-3, at_most=1e-5)
            near(shown["sampler_gap"][0], token["logprob"] - token["sampler_logprob"], rel=1e-2, at_most=1e-5)
            # The settings of the run discount by 0.9.
            to_go = sum(0.9**k * later["token_reward"] for k, later in enumerate(table[place:]))
            near(shown["return_to_go"][0], to_go, rel=2e-3)
            near(shown["monte_carlo_error"][0], token["value"] - to_go, rel=5e-3, at_most=2e-3)


def test_what_several_tokens_write_together_is_one_character(browser, board_told, rows):
    row = next(row for row in rows if "🙂" in row["response"])
    with opened(browser, f"{board_told.address}/tokens?step={row['step']}&sample={row['sample']}") as page:
        page.locator(".tok").first.wait_for()
        assert "".join(page.locator(".tok").all_inner_texts()).split() == row["response"].split()
        page.locator(".tok", has_text="🙂").click()
        expect(page.locator(".token-card")).to_contain_text("One character of 2 tokens")
        assert len(card(page)["logprob"]) == 2
        assert "\ufffd" not in page.locator("main").inner_text()


@pytest.mark.slow
def test_what_spreads_jumps_out(browser, board_told, rows):
    with opened(browser, f"{board_told.address}/patterns") as page:
        first = page.locator(".patterns tbody tr").first
        first.wait_for()
        # Shares are of the first and the last tenth of the responses: a step each.
        shares = [np.mean(["#" in row["response"] for row in rows if row["step"] == step]) for step in (0, STEPS - 1)]
        cells = first.locator("td").all_inner_texts()
        assert cells[0] == "#"
        begin, end = cells[2].split("→")
        near(begin, shares[0], at_most=0.006)
        near(end, shares[1], at_most=0.006)
        near(cells[3] + " %", shares[1] - shares[0], at_most=0.006)
        assert parsed(cells[7]) == sum("#" in row["response"] for row in rows)
        assert 0.4 < parsed(cells[4]) < 1.2  # what the reward adds for it is 0.8
        first.click()
        wanted = sum("#" in row["response"] for row in rows)
        expect(page.locator(".bar output")).to_have_text(f"{wanted} rollouts")


def means(rows) -> dict[str, float]:
    found = defaultdict(list)
    for row in rows:
        found[row["prompt"]].append(row["reward"])
    return {prompt: float(np.mean(values)) for prompt, values in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize("sides", ["first,second", "first@0-3,first@6-9"])
def test_who_wins_where(browser, board_told, runs_told, sides, split):
    found = []
    for side in sides.split(","):
        run, _, steps = side.partition("@")
        low, high = map(int, steps.split("-")) if steps else (0, STEPS)
        side_rows = of_split(cavesson.open(runs_told[("first", "second").index(run)]).rows(), split).to_pylist()
        side_rows = [row for row in side_rows if low <= row["step"] <= high]
        found.append(means(side_rows))
    common = set(found[0]) & set(found[1])
    wins = [sum(found[i][p] > found[1 - i][p] for p in common) for i in (0, 1)]
    with opened(browser, f"{board_told.address}/compare?sides={sides}") as page:
        if split == "eval":
            switch(page).click()
            expect(page.locator(".wins tbody tr").last.locator("td.number").first).to_have_text(str(len(side_rows)))
        page.locator("article.group").first.wait_for()
        cells = page.locator(".wins tbody tr td.number").all_inner_texts()
        shares = [text.split("\n")[0] for text in cells if "%" in text]  # below it is the interval
        for text, won in zip(shares, wins, strict=True):
            near(text, won / len(common), at_most=0.006)
        differences = sorted((found[1][p] - found[0][p] for p in common), key=lambda d: -abs(d))
        shown = page.locator("article.group > header b").all_inner_texts()
        assert len(shown) == len(common)
        for text, difference in zip(shown, differences, strict=True):
            near(text, difference, rel=5e-3, at_most=1e-3)
        page.get_by_role("button", name="ahead").last.click()
        lowest = min(found[1][p] - found[0][p] for p in common)
        expect(page.locator("article.group > header b").first).to_have_text(re.compile(f"{abs(lowest):.2g}"[:3]))


def test_the_difference_to_the_reference_is_marked(browser, board_told, rows):
    row = at(rows, 2)[5]
    with opened(browser, f"{board_told.address}/responses?at=2.{row['sample']}") as page:
        page.get_by_role("button", name="difference to the reference").click()
        text = page.locator(".detail pre.text", has=page.locator("ins, del")).first
        pieces = text.evaluate("(e) => [...e.childNodes].map((n) => [n.nodeName, n.textContent])")
        assert "".join(text for name, text in pieces if name != "DEL") == row["response"]
        assert "".join(text for name, text in pieces if name != "INS") == row["ref_response"]


def grams(text: str) -> set[tuple[str, ...]]:
    words = text.lower().split()
    return set(itertools.pairwise(words))


def test_more_like_this_shares_phrases(browser, board_told, rows):
    row = at(rows, 3)[9]
    with opened(browser, f"{board_told.address}/responses?at=3.{row['sample']}") as page:
        page.get_by_role("button", name="More like this").click()
        lines = page.locator(".shared")
        lines.first.wait_for()
        shares = [parsed(text) for text in lines.locator(".muted.number").all_inner_texts()]
        assert shares == sorted(shares, reverse=True) and shares[-1] > 0 and shares[0] <= 1
        for text in lines.locator(".rollout .line").all_inner_texts():
            assert grams(text) & grams(row["response"]), text
        lines.first.locator("button").click()
        page.locator(".tok").first.wait_for()


def test_the_fields_of_the_sides_that_remain_keep_their_own_steps(browser, board_told):
    with opened(browser, f"{board_told.address}/compare?sides=first%400-2,first%403-5,first%406-8") as page:
        fields = page.locator(".side input.steps")
        expect(fields).to_have_count(3)
        page.locator(".side").nth(0).get_by_role("button").click()
        expect(fields).to_have_count(2)
        expect(fields.nth(0)).to_have_value("3–5")
        expect(fields.nth(1)).to_have_value("6–8")

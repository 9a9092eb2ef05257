"""The board of a run that the trainer itself has just made."""

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from browser_helpers import BoardProcess, opened, parsed
from playwright.sync_api import expect

import cavesson

ROOT = Path(__file__).parents[2]
RECIPE = "recipes/tiny-ppo.toml"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Three steps of PPO on the tiny model: seconds."""
    folder = tmp_path_factory.mktemp("trained") / "tiny"
    command = [sys.executable, "-m", "cavesson", "ppo", RECIPE, "--run", str(folder), "--steps", "3"]
    done = subprocess.run([*command, "--batch_size", "16"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_a_run_of_the_trainer_is_shown_from_the_curves_to_the_tokens(browser, run):
    record = cavesson.open(run)
    rewards = np.array([row["reward"] for row in record.rows(steps=[2]).to_pylist()])
    metrics = record.steps().to_pylist()[-1]
    with BoardProcess(run) as board, opened(browser, board.address) as page:
        reward = page.locator(".charts .card", has_text="Reward").first.locator(".key b").first
        expect(reward).to_have_text(re.compile("[0-9]"))
        assert parsed(reward.inner_text()) == pytest.approx(rewards.mean(), rel=5e-4)
        for title, name in {"Gradient norm": "optim/grad_norm", "KL to the reference": "kl/objective"}.items():
            shown = page.locator(".charts .card", has_text=title).first.locator(".key b").first
            expect(shown).to_have_text(re.compile("[0-9]"))
            assert parsed(shown.inner_text()) == pytest.approx(metrics[name], rel=5e-4)
        page.locator("details.more summary", has_text=re.compile("^Machine$")).click()
        for title, figures in {"CPU utilisation, %": "cpu", "Memory, GiB": "memory"}.items():
            shown = page.locator(".charts .card", has_text=title).locator(".key b")
            expect(shown).to_have_text([re.compile("[0-9]")] * 2)
            values = [metrics[f"machine/{figures}"], metrics[f"machine/process/{figures}"]]
            assert [parsed(text) for text in shown.all_inner_texts()] == pytest.approx(values, rel=5e-3)
        page.get_by_role("link", name="Responses of this step").click()
        page.locator('.tr[data-row="1"] .td').first.dblclick()
        page.locator(".tok").first.wait_for()
        step, sample = map(int, re.findall(r"\d+", page.locator("main h2").inner_text()))
        assert (step, sample) == (2, int(rewards.argmax()))
        tokens = record.tokens(step, sample).to_pylist()
        page.locator('.tok[data-token="1"]').first.hover()
        lines = page.locator(".token-card tr")
        value = lines.filter(has=page.get_by_role("cell", name="value", exact=True)).locator("td.number").first
        assert parsed(value.inner_text()) == pytest.approx(tokens[1]["value"], rel=5e-4)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """Five steps that are evaluated on every second one, and after the last."""
    folder = tmp_path_factory.mktemp("evaluated") / "tiny"
    command = [sys.executable, "-m", "cavesson", "ppo", RECIPE, "--run", str(folder), "--steps", "5"]
    asked = ["--batch_size", "16", "--data.validation", "0.3", "--evaluation.every", "2"]
    done = subprocess.run([*command, *asked], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "held-out reward" in done.stdout
    return folder


@pytest.mark.slow
def test_held_out_prompts_have_a_gap_to_the_reference(browser, evaluated):
    rows = cavesson.open(evaluated).rows().to_pylist()
    held_out = [row for row in rows if row["split"] == "eval"]
    assert {row["step"] for row in held_out} == {0, 2, 4, 5} and len(held_out) == 4 * 5
    asked = set()
    with BoardProcess(evaluated) as board, opened(browser, board.address) as page:
        page.on("request", lambda request: asked.add(request.url) if "/histogram?" in request.url else None)

        def shown(title: str, name: str) -> float:
            key = page.locator(".charts .card", has_text=title).first.locator(".key", has_text=name).locator("b").first
            expect(key).to_have_text(re.compile("[0-9]"))
            return parsed(key.inner_text())

        def mean(column: str, split: str) -> float:
            return float(np.mean([row[column] for row in rows if row["step"] == 4 and row["split"] == split]))

        # The newest step that was trained on, not that of the last evaluation.
        assert shown("Reward", "mean") == pytest.approx(mean("reward", "train"), rel=5e-3)
        assert shown("Reward", "evaluation") == pytest.approx(mean("reward", "eval"), rel=5e-3)
        assert shown("Reward", "reference") == pytest.approx(mean("ref_reward", "eval"), rel=5e-3)
        assert shown("KL to the reference", "evaluation") == pytest.approx(mean("kl_k1", "eval"), rel=5e-3, abs=1e-3)
        gap = mean("reward", "eval") - mean("ref_reward", "eval")
        assert shown("Reward above the reference", "mean") == pytest.approx(gap, rel=5e-3, abs=1e-3)
        page.goto(f"{board.address}/step?step=3")
        card = page.locator(".card", has_text="Reward above the reference, distribution")
        expect(card.locator(".key")).to_have_text(["Step 2", "Step 0"])  # the newest evaluation up to there
        table = page.locator("section", has=page.get_by_role("heading", name="Never beat the reference")).last
        never = {
            prompt
            for prompt in {row["prompt"] for row in held_out}
            if all(row["reward"] <= row["ref_reward"] for row in held_out if row["prompt"] == prompt)
        }
        expect(table.locator("tbody tr")).to_have_count(len(never))
        counts = {}
        for url in asked:
            query = {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}
            got = board.json(url.removeprefix(f"{board.address}/"))
            counts[query["column"], query["steps"]] = sum(got["counts"]) + got["below"] + got["above"]
        assert counts["gap", "2-2"] == 5 and counts["reward", "3-3"] == 16 and counts["reward", "0-0"] == 16

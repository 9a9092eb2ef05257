"""The board of a run that the trainer itself has just made."""

import re
import subprocess
import sys
from pathlib import Path

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
        reward = page.locator(".card", has_text="Reward").first.locator(".key b").first
        expect(reward).to_have_text(re.compile("[0-9]"))
        assert parsed(reward.inner_text()) == pytest.approx(rewards.mean(), rel=5e-4)
        for title, name in {"Gradient norm": "optim/grad_norm", "KL to the reference": "kl/objective"}.items():
            shown = page.locator(".card", has_text=title).first.locator(".key b").first
            expect(shown).to_have_text(re.compile("[0-9]"))
            assert parsed(shown.inner_text()) == pytest.approx(metrics[name], rel=5e-4)
        page.get_by_role("link", name="Responses of this step").click()
        page.locator('.tr[aria-rowindex="1"] .td').first.dblclick()
        page.locator(".tok").first.wait_for()
        step, sample = map(int, re.findall(r"\d+", page.locator("main h2").inner_text()))
        assert (step, sample) == (2, int(rewards.argmax()))
        tokens = record.tokens(step, sample).to_pylist()
        page.locator('.tok[data-token="1"]').first.hover()
        lines = page.locator(".token-card tr")
        value = lines.filter(has=page.get_by_role("cell", name="value", exact=True)).locator("td.number").first
        assert parsed(value.inner_text()) == pytest.approx(tokens[1]["value"], rel=5e-4)

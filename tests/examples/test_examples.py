"""The examples run as they say, and what they record is what the mathematics says."""

import math
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cavesson

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def recorded(name: str, folder: Path) -> cavesson.Run:
    subprocess.run([sys.executable, str(EXAMPLES / name), str(folder)], check=True, timeout=500)
    return cavesson.open(folder)


@pytest.mark.slow
def test_ppo_on_one_page_learns_and_its_tokens_add_up(tmp_path: Path) -> None:
    run = recorded("ppo_in_one_file.py", tmp_path / "run")
    rewards = run.steps()["reward/mean"].to_numpy()
    assert rewards[0] < 0.2 and rewards[-5:].mean() > 0.6
    rows, tokens = run.pandas("rows"), run.pandas("tokens")
    assert len(rows) == 40 * 64
    tokens["kl_k1"] = tokens["logprob"] - tokens["ref_logprob"]
    sums = tokens.groupby(["step", "sample"])[["token_reward", "kl_k1"]].sum().reset_index()
    whole = rows.merge(sums, on=["step", "sample"], suffixes=("", "_sum"))
    # All tokens together earn the reward less what leaving the reference costs (arXiv:1909.08593, eq. 2).
    expected = whole["reward"] - whole["kl_coef"] * whole["kl_k1_sum"]
    np.testing.assert_allclose(whole["token_reward"], expected, atol=2e-3)
    assert (tokens[tokens["step"] == 0]["kl_k1"].abs() < 1e-5).all()
    # Whitened over the tokens of a step.
    spread = tokens.groupby("step")["advantage"].agg(["mean", lambda one: one.std(ddof=0)])
    np.testing.assert_allclose(spread.to_numpy(), np.tile([0.0, 1.0], (40, 1)), atol=5e-3)


def test_a_loop_of_ones_own_is_recorded(tmp_path: Path) -> None:
    run = recorded("record_your_own_loop.py", tmp_path / "run")
    steps, rows = run.steps().to_pandas(), run.rows().to_pandas()
    assert steps["entropy"].iloc[0] == pytest.approx(math.log(6)) and steps["entropy"].iloc[-1] < 1.5
    assert steps["reward/mean"].iloc[-5:].mean() > 0.8
    kind = rows["response"].str.split().map(lambda words: sum(word in {"kind", "calm", "warm"} for word in words) / 4)
    np.testing.assert_allclose(rows["reward"], kind)
    assert run.token_texts([0, 5]) == [" kind", " cold"]


def test_the_word_game_has_the_rules_that_it_says() -> None:
    """The points of a game that is played by hand: 1 for each word, and 2/3 for one of two letters, which ends it."""
    game = runpy.run_path(str(EXAMPLES / "environment.py"))["WordGame"]()
    game.reset("apple")
    assert [game.user_reply("egg!"), game.user_reply("home "), game.user_reply("ab?")] == ["garden", "eagle", None]
    assert game.get_reward() == pytest.approx(2 + 2 / 3)
    game.reset("apple")
    assert game.user_reply("apple.") is None and game.get_reward() == 0


@pytest.mark.slow
def test_the_word_game_is_learned(tmp_path: Path) -> None:
    run = recorded("environment.py", tmp_path / "run")
    rewards = run.steps()["reward/mean"].to_numpy()
    assert rewards[0] < 0.2 and rewards[-5:].mean() > 2
    turns = run.pandas("turns")
    assert turns.groupby(["step", "sample"])["role"].agg(lambda one: (one == "user").sum()).max() == 3


def test_couplets_rhyme_and_have_the_form_of_what_they_answer() -> None:
    """霜 shuāng rhymes with 乡 xiāng, and not with 山 shān; a prompt without Chinese has no form to repeat."""
    rewards = runpy.run_path(str(ROOT / "recipes" / "rhyme" / "rhyme.py"))["rhymes"]
    asked = "床前明月光，疑是地上霜。"
    answers = ["举头望明月，低头思故乡。", "举头望明月，低头见青山。", "举头望月，低头思乡。", "No rhyme."]
    assert rewards([asked] * 4, answers) == {"rhyme": [1.0, 0.0, 1.0, 0.0], "form": [1.0, 1.0, 0.0, 0.0]}
    assert rewards(["Hello", ""], answers[:2]) == {"rhyme": [0.0, 0.0], "form": [0.0, 0.0]}

import json
import math
import statistics
from io import StringIO
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from cavesson.data.examples import PairTokens, Tokens
from cavesson.models.tiny import tiny_tokenizer
from cavesson.rollout.rewards.report import page, show, write
from cavesson.rollout.rewards.report_figures import ScoredPairs, extreme_cases, summarise, warnings

PROMPTS = [a + b + c + "?" for a in "abcde" for b in "abcde" for c in "abcde"]
TOKENIZER = tiny_tokenizer()


def tokens(prompt: str, response: str) -> Tokens:
    ids = (*TOKENIZER(prompt + response)["input_ids"], TOKENIZER.eos_token_id)  # one for each byte
    return Tokens(ids, tuple(i >= len(prompt) for i in range(len(ids))))


def pair(chosen: str | int, rejected: str | int, margin: float | None = None, prompt: str = "Why?") -> PairTokens:
    """Two responses, or two lengths of responses."""
    texts = [said if isinstance(said, str) else "x" * said for said in (chosen, rejected)]
    return PairTokens(tokens(prompt, texts[0]), tokens(prompt, texts[1]), margin)


def scored(*rows: tuple[float, float], lengths: list[tuple[int, int]] | None = None) -> ScoredPairs:
    """Pairs of these rewards and lengths, of equal lengths if none are given; each has its own prompt."""
    lengths = lengths or [(3, 3)] * len(rows)
    chosen, rejected = np.array(rows, dtype=float).T
    pairs = [pair(*both, prompt=prompt) for both, prompt in zip(lengths, PROMPTS, strict=False)]
    return ScoredPairs(pairs, chosen, rejected)


def right(chosen: float, rejected: float) -> float:
    return 1.0 if chosen > rejected else 0.5 if chosen == rejected else 0.0


def told(found: ScoredPairs) -> list[str]:
    """The first words of all warnings."""
    return [" ".join(warning.split()[:3]) for warning in warnings(summarise(found))]


# --- figures -------------------------------------------------------------------------------------------------------

row = st.tuples(st.integers(-3, 3), st.integers(-3, 3), st.integers(1, 6), st.integers(1, 6))


@settings(deadline=None)
@given(st.lists(row, min_size=1, max_size=40))
def test_figures_against_a_slow_count(rows):
    found = scored(*[(c, r) for c, r, _, _ in rows], lengths=[(a, b) for _, _, a, b in rows])
    summary = summarise(found)
    n = len(rows)
    assert summary["pairs"] == n
    assert summary["accuracy"]["mean"] == pytest.approx(sum(right(c, r) for c, r, _, _ in rows) / n)
    assert summary["ties"] == pytest.approx(sum(c == r for c, r, _, _ in rows) / n)
    assert summary["loss"] == pytest.approx(sum(math.log(1 + math.exp(r - c)) for c, r, _, _ in rows) / n)
    assert summary["length_baseline"]["mean"] == pytest.approx(sum(right(a, b) for _, _, a, b in rows) / n)
    groups = {"chosen longer": [], "same length": [], "chosen shorter": []}
    for c, r, a, b in rows:
        groups["chosen longer" if a > b else "same length" if a == b else "chosen shorter"].append(right(c, r))
    for name, members in groups.items():
        share = summary["by_length"][name]
        assert (share is None) == (not members)
        if share:
            assert (share["mean"], share["pairs"]) == (pytest.approx(sum(members) / len(members)), len(members))
    both = [reward for c, r, _, _ in rows for reward in (c, r)]
    assert summary["reward"] == pytest.approx({"mean": np.mean(both), "std": np.std(both)})


@settings(deadline=None)
@given(st.lists(row, min_size=2, max_size=40))
def test_rank_correlation_with_length_against_a_slow_count(rows):
    """Spearman's ρ is Pearson's r of the ranks; that of a value among ties is the mean of theirs."""

    def ranks(values: list[int]) -> list[float]:
        return [sum(v < one for v in values) + (sum(v == one for v in values) + 1) / 2 for one in values]

    found = scored(*[(c, r) for c, r, _, _ in rows], lengths=[(a, b) for _, _, a, b in rows])
    differences, longer = [c - r for c, r, _, _ in rows], [a - b for _, _, a, b in rows]
    ours = summarise(found)["length_correlation"]
    if len(set(differences)) == 1 or len(set(longer)) == 1:
        assert ours is None
    else:
        assert ours == pytest.approx(statistics.correlation(ranks(differences), ranks(longer)), abs=1e-9)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), min_size=1, max_size=40))
def test_calibration_against_a_slow_count(rows):
    summary = summarise(scored(*rows))
    sure = [1 / (1 + math.exp(-abs(c - r))) for c, r in rows]
    assert summary["confidence"] == pytest.approx(sum(sure) / len(sure))
    for bin_ in summary["calibration"]:
        top = bin_["to"] == 1.0
        members = [i for i, p in enumerate(sure) if bin_["from"] <= p and (p < bin_["to"] or top)]
        assert bin_["pairs"] == len(members)
        assert bin_["confidence"] == pytest.approx(sum(sure[i] for i in members) / len(members))
        assert bin_["mean"] == pytest.approx(sum(right(*rows[i]) for i in members) / len(members))
    assert sum(bin_["pairs"] for bin_ in summary["calibration"]) == len(rows)


def test_calibration_by_hand():
    # σ(0) = 0.5, σ(1) = 0.731, σ(3) = 0.953
    summary = summarise(scored((1, 1), (0, 1), (2, 1), (3, 0), (4, 1)))
    shown = [(b["from"], b["to"], b["pairs"], b["mean"]) for b in summary["calibration"]]
    assert shown == [(0.5, 0.6, 1, 0.5), (0.7, 0.8, 2, 0.5), (0.9, 1.0, 2, 1.0)]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.booleans()), min_size=1, max_size=60))
def test_groups_by_difference_of_length_are_apart_and_complete(rows):
    found = scored(*[(1, 0) if good else (0, 1) for _, _, good in rows], lengths=[(a, b) for a, b, _ in rows])
    groups = summarise(found)["by_length_difference"]
    assert len(groups) <= 5
    covered = []
    for group in groups:
        members = [good for a, b, good in rows if group["from"] <= a - b <= group["to"]]
        assert (group["pairs"], group["mean"]) == (len(members), pytest.approx(sum(members) / len(members)))
        covered += [group["from"], group["to"]]
    assert covered == sorted(covered)
    assert sum(group["pairs"] for group in groups) == len(rows)


def test_groups_by_difference_of_length_are_of_equal_size():
    found = scored(*[(1, 0)] * 10, lengths=[(10 + i, 15) for i in range(10)])
    assert [group["pairs"] for group in summarise(found)["by_length_difference"]] == [2] * 5


def test_margins_of_the_data_count_in_the_loss():
    found = ScoredPairs([pair(3, 3, 1.5), pair(3, 3)], np.array([2.0, 2.0]), np.array([0.0, 0.0]))
    assert summarise(found)["loss"] == pytest.approx((math.log(1 + math.exp(-0.5)) + math.log(1 + math.exp(-2))) / 2)


def test_share_of_the_prompt():
    # Rewards 10 · prompt ± 1: between 2 · var(0, 10, 20) = 200, within 2
    apart = summarise(scored((1, -1), (11, 9), (21, 19)))["prompt_correlation"]
    assert apart["mean"] == pytest.approx(198 / 202)
    assert summarise(scored((1, -1), (2, -2), (3, -3)))["prompt_correlation"]["mean"] == -1
    assert summarise(scored((1, -1)))["prompt_correlation"] is None


# --- warnings ------------------------------------------------------------------------------------------------------

GOOD: list[tuple[float, float]] = [(1, 0)] * 80 + [(0, 1)] * 20
EVEN = [(4, 2), (2, 4)] * 50


def test_a_good_model_is_not_warned_about():
    assert told(scored(*GOOD, lengths=EVEN)) == []


def test_a_coin_is_called_a_coin():
    assert told(scored(*[(0.1, 0)] * 50, *[(0, 0.1)] * 50, lengths=EVEN)) == ["it may be"]
    assert told(scored((1, 0), lengths=[(3, 3)])) == ["it may be"]
    assert told(scored((0.1, 0), (0, 0.1), (0, 0.1))) == ["it may be"]  # a third, but of three


def test_a_model_that_is_wrong_is_called_so():
    assert told(scored(*[(r / 10, c / 10) for c, r in GOOD], lengths=EVEN))[0] == "it is worse"


def test_equal_rewards_are_as_good_as_a_coin():
    found = scored(*[(2, 2)] * 10, lengths=EVEN[:10])
    summary = summarise(found)
    assert summary["accuracy"]["mean"] == 0.5
    assert summary["ties"] == 1
    assert summary["confidence"] == 0.5
    assert summary["length_correlation"] is None
    assert told(found) == ["it may be", "both responses get"]


@pytest.mark.parametrize(("ties", "warned"), [(5, False), (6, True)])
def test_many_ties_are_told(ties, warned):
    found = scored(*[(1.0, 1.0)] * ties, *[(1, 0)] * 75, *[(0, 1)] * (25 - ties), lengths=EVEN)
    assert told(found) == (["both responses get"] if warned else [])


@pytest.mark.parametrize("sign", [1, -1])
def test_length_alone_does_as_well(sign):
    # Right in 80; the longer response is the better one in 80 or in 81, or the shorter one is.
    for better, warned in ((79, False), (80, True), (81, True)):
        lengths = [(4, 2)[::sign]] * better + [(2, 4)[::sign]] * (100 - better)
        kinds = [warning for warning in warnings(summarise(scored(*GOOD, lengths=lengths))) if "always" in warning]
        assert len(kinds) == warned
        assert all(("longer" if sign == 1 else "shorter") in kind and "80%" in kind for kind in kinds)


@pytest.mark.parametrize(("longer", "shorter", "liked"), [(48, 32, "long"), (32, 48, "short"), (42, 38, None)])
def test_a_taste_for_length_is_told(longer, shorter, liked):
    rows = [(1, 0)] * longer + [(0, 1)] * (50 - longer) + [(1, 0)] * shorter + [(0, 1)] * (50 - shorter)
    found = warnings(summarise(scored(*rows, lengths=[(4, 2)] * 50 + [(2, 4)] * 50)))
    assert [warning.split()[2] for warning in found] == ([liked] if liked else [])


def test_too_sure_a_model_is_told():
    # The interval of Clopper and Pearson of 80 of 100 ends at 0.873; σ(2) = 0.881 and σ(1.9) = 0.870
    assert told(scored(*[(2 * c, 2 * r) for c, r in GOOD], lengths=EVEN)) == ["it is overconfident:"]
    assert told(scored(*[(1.9 * c, 1.9 * r) for c, r in GOOD], lengths=EVEN)) == []


def test_prompts_that_decide_are_told():
    rows = [(c + 5 * (i % 3), r + 5 * (i % 3)) for i, (c, r) in enumerate(GOOD)]
    assert told(scored(*rows, lengths=EVEN)) == ["the prompt explains"]
    rows = [(c + i % 3, r + i % 3) for i, (c, r) in enumerate(GOOD)]  # ρ = 0.45
    assert told(scored(*rows, lengths=EVEN)) == []


# --- cases and files -----------------------------------------------------------------------------------------------


def cases(found: ScoredPairs, tokenizer: Any) -> dict[str, list[int]]:
    lists: dict[str, list[int]] = {}
    for case in extreme_cases(found, tokenizer):
        lists.setdefault(case["list"], []).append(case["pair"])
    return lists


def test_extreme_cases_by_hand(tokenizer):
    found = scored((0, 5), (9, 1), (1, 1), (3, 2), (-4, -2), (2, -7))
    assert cases(found, tokenizer) == {
        "most wrong": [0, 4],
        "most surely right": [5, 1, 3],
        "highest reward": [1, 0, 3, 5, 2],  # 9, 5, 3, 2, 1
        "lowest reward": [5, 4, 0, 1, 2],  # −7, −4, 0, 1, 1
    }


def test_a_pair_is_not_listed_as_wrong_when_it_is_right(tokenizer):
    listed = cases(scored((1, 0)), tokenizer)
    assert listed == {"most surely right": [0], "highest reward": [0], "lowest reward": [0]}
    assert cases(scored((1, 1)), tokenizer) == {"highest reward": [0], "lowest reward": [0]}


def test_cases_hold_the_texts(tokenizer):
    found = ScoredPairs([pair(" Yes, é.", "")], np.array([1.5]), np.array([-2.0]))
    assert extreme_cases(found, tokenizer)[0] == {
        "list": "most surely right",
        "pair": 0,
        "chosen_reward": 1.5,
        "rejected_reward": -2.0,
        "prompt": "Why?",
        "chosen": " Yes, é.",
        "rejected": "",
    }


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rows", [[(1, 0)], [(1, 1)], [(0, 0)] * 3, GOOD], ids=["one", "tie", "ties", "many"])
def test_files_are_whole(tmp_path: Path, tokenizer, rows):
    found = scored(*rows)
    summary = write(found, tokenizer, tmp_path)
    kept = json.loads((tmp_path / "reward_model.json").read_text(), parse_constant=pytest.fail)
    assert kept == {**summary, "warnings": warnings(summary)}
    assert matplotlib.image.imread(tmp_path / "reward_model.png").shape[2] == 4
    lines = (tmp_path / "extreme_cases.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == extreme_cases(found, tokenizer)
    text = (tmp_path / "reward_model.md").read_text(encoding="utf-8")
    assert all(f"**Warning:** {warning}." in text for warning in warnings(summary))
    assert f"| all | {summary['accuracy']['mean']:.3f} |" in text
    printed = StringIO()
    show(summary, tmp_path, Console(file=printed, width=120))
    assert f"{summary['accuracy']['mean']:.3f}" in printed.getvalue()


def test_no_text_breaks_out_of_the_page(tokenizer):
    sly = "\n# Heading\n\n```\n- list\n| a | b |"
    found = ScoredPairs([pair(sly, sly + "!")], np.array([1.0]), np.array([0.0]))
    text = page(summarise(found), extreme_cases(found, tokenizer))
    for piece in ("# Heading", "```", "- list", "| a | b |"):
        lines = [line for line in text.splitlines() if piece in line]
        assert lines
        assert all(line.startswith("    ") for line in lines)

"""Scores of a rollout's rewards, their weights and their reasons, as the board gives and shows them."""

import pytest
from board_helpers import board_of, client_of
from browser_helpers import BoardProcess, opened
from index_helpers import new_run, record
from playwright.sync_api import expect

PARTS = [{"judge": 4.0, "length": 3.0}, {"judge": 4.0}, {"length": 3.0}, {}]
WEIGHTS = [{"judge": 0.5, "length": 1.0}, {"judge": 0.5}, {"length": 1.0}, {}]
REASONS = [{"judge": "<b>polite</b>"}, {"judge": "short\u202e"}, {}, {}]
REWARDS = [5.0, 2.0, 3.0, None]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = new_run(tmp_path_factory.mktemp("reasons") / "run")
    columns = {"reward_parts": PARTS, "reward_weights": WEIGHTS, "reward_reasons": REASONS, "reward": REWARDS}
    record(folder, [0], batch=4, **columns)
    return folder


@pytest.fixture(scope="module")
def page_of(run):
    with BoardProcess(run) as board:
        yield lambda sample: f"{board.address}/responses?at=0.{sample}"


def test_a_rollout_has_the_scores_weights_and_reasons_of_its_parts(run):
    client = client_of(board_of(run))
    for sample in range(4):
        got = client.get(f"/api/runs/run/rollouts/0/{sample}").json()
        recorded = (PARTS[sample], WEIGHTS[sample], REASONS[sample], REWARDS[sample])
        assert (got["parts"], got["weights"], got["reasons"], got["reward"]) == recorded
        assert (got["gap"] is None) == (got["reward"] is None)


@pytest.mark.parametrize(
    ("sample", "shown"),
    [
        (0, {"part/judge": "4 × 0.5", "part/length": "3", "reason/judge": "<b>polite</b>"}),
        (1, {"part/judge": "4 × 0.5", "reason/judge": "short⟨RLO⟩"}),
        (2, {}),  # the reward is that of its only part
        (3, {}),
    ],
)
def test_the_page_shows_them(browser, page_of, sample, shown):
    with opened(browser, page_of(sample)) as page:
        expect(page.locator(".detail .facts")).to_contain_text("finish_reason")
        names, values = (page.locator(f".detail .facts {tag}").all_inner_texts() for tag in ("dt", "dd"))
        facts = dict(zip(names, values, strict=True))
        assert {name: value for name, value in facts.items() if "/" in name} == shown
        assert facts.get("reward") == (None if REWARDS[sample] is None else f"{REWARDS[sample]:g}")

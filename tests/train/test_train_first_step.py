"""Before anything is learned, old and new policy are the same numbers, and so are policy and reference."""

from pathlib import Path

import pytest
from train_helpers import LORA, STOP, build, finish, quiet

import dressage

MODELS = {"full": {}, "lora": {"model__lora": LORA}}
UPDATES = {
    "single pass": {"update__epochs": 1},
    "epochs": {"update__epochs": 3},
    "mini-batches": {"update__epochs": 2, "update__mini_batches": 3},
    "micro-batches": {"update__epochs": 1, "update__micro_batch_size": 4},
}


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("model", MODELS)
def test_first_ratio_is_one_and_first_kl_is_zero(tmp_path: Path, model: str, update: str) -> None:
    changes = {"sampling__stop": STOP, "batch_size": 9, **MODELS[model], **UPDATES[update]}
    metrics = finish(tmp_path / "run", **changes).metrics
    # Of mini-batches, the first one alone has met no new weights. A batch of another size may round differently.
    tolerance = 1e-5 if update == "mini-batches" else 0.0
    assert [step["policy/first_ratio_error"] for step in metrics] == pytest.approx([0.0, 0.0], abs=tolerance)
    assert (metrics[0]["kl/objective"], metrics[0]["kl/objective_k3"]) == (0.0, 0.0)
    assert metrics[1]["kl/objective"] != 0.0  # something was learned
    tokens = dressage.open(tmp_path / "run").tokens(0)
    assert tokens["logprob"] == tokens["ref_logprob"]


@pytest.mark.parametrize(("update", "forward_passes"), [("single pass", 2), ("epochs", 8), ("micro-batches", 8)])
def test_a_single_pass_scores_and_learns_from_one_forward_pass(
    tmp_path: Path, update: str, forward_passes: int
) -> None:
    # Two steps: 1 each where scoring is learned from; else 1 + 3 epochs, or 2 micro-batches scored and 2 learned from.
    training = build(tmp_path / "run", **UPDATES[update])
    seen = []
    training.trainer.policy.register_forward_hook(lambda *_: seen.append(1))
    training.run(quiet)
    assert len(seen) == forward_passes

"""What stops, skips or shortens an update, and what must not."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batch_helpers import ALONE, every
from torch import Tensor
from train_helpers import LORA, PROMPTS, build, farthest, finish, quiet, rollouts, uneven, weights

import cavesson
from cavesson.algorithms.settings import OptimizerSettings, UpdateSettings
from cavesson.errors import NonFiniteError, UserError
from cavesson.models.policy import Policy
from cavesson.models.tiny import tiny_model, tiny_tokenizer
from cavesson.processes import Processes
from cavesson.train.online import RolloutTrainer
from cavesson.train.optimizer import Optimizer
from cavesson.train.rollouts import score_rollouts
from cavesson.train.update import Learner, StepInfo, update
from cavesson.types import Batch

MODELS: dict[str, dict[str, Any]] = {"full": {}, "lora": {"model__lora": LORA}}
ONE_BYTE = (*map(chr, range(128)), "\ufffd")  # what any single byte decodes to


class Bench:
    """A policy, an optimiser with a history, and credited rollouts to update on."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.trainer: RolloutTrainer = build(folder, **changes).trainer
        self.policy: Policy = self.trainer.policy
        self.optimizer = Optimizer(self.policy, OptimizerSettings())
        self.step(self.batch())

    def batch(self, shift: float = 0.0) -> Batch:
        """Credited rollouts; `shift` is added to log π_old, so that every ratio is e^(−shift)."""
        batch = rollouts([[70, 71, 72], [80], [90, 91]], [[40, 41], [42], [43, 44, 45]])
        columns = score_rollouts(self.policy, batch, "k1", [range(len(batch))])
        batch = batch.with_columns(**columns, shaped_reward=torch.tensor([1.0, -1.0, 3.0]))
        batch = self.trainer.algorithm.credit(batch, 0.1, ALONE)
        return batch.with_columns(logprob=batch["logprob"] + shift)

    def step(self, batch: Batch, **changes: Any) -> list[dict[str, float]]:
        once = UpdateSettings(**{"epochs": 1, **changes})
        info = StepInfo(0, 0, 1e-4)
        learner = Learner(self.policy, self.optimizer, self.trainer.algorithm, Processes("cpu"))
        return list(update(learner, batch, every(batch), once, info))

    def state(self) -> dict[str, Tensor]:
        return {**weights(self.policy), **{f"adam {k}": v.clone() for k, v in self.optimizer.state().items()}}


@pytest.mark.parametrize("model", MODELS)
def test_a_step_over_the_ratio_limit_changes_nothing(tmp_path: Path, model: str) -> None:
    bench = Bench(tmp_path / "run", **MODELS[model])
    far, near = bench.batch(shift=-2.5), bench.batch()  # e^2.5 = 12.2
    before = bench.state()
    seen = bench.step(far, max_ratio=10.0, epochs=2)
    assert [(one["optim/skipped"], "optim/grad_norm" in one) for one in seen] == [(1.0, False)] * 2
    assert seen[0]["policy/ratio"] == pytest.approx(np.exp(2.5), rel=1e-4)
    assert farthest(before, bench.state()) == 0.0
    assert all(parameter.grad is None for parameter in bench.policy.parameters())

    untouched = Bench(tmp_path / "other", **MODELS[model])
    for each in (bench, untouched):
        assert [one["optim/skipped"] for one in each.step(near)] == [0.0]
    assert farthest(untouched.state(), bench.state()) == 0.0  # not even the next step knows of the skipped one
    assert farthest(before, bench.state()) > 1e-5

    seen = bench.step(bench.batch(shift=-2.5), max_ratio=13.0)
    assert seen[0]["optim/skipped"] == 0.0


def test_the_update_ends_where_the_policy_has_moved_too_far(tmp_path: Path) -> None:
    bench, shorter = Bench(tmp_path / "run"), Bench(tmp_path / "other")
    batch = bench.batch()
    kl = [one["policy/kl"] for one in Bench(tmp_path / "third").step(batch, epochs=6)]
    target = kl[3] / 1.5 * 0.99  # the fourth pass is the first over 1.5 times this
    assert max(kl[:3]) < 1.5 * target
    seen = bench.step(batch, epochs=6, target_policy_kl=target)
    assert [one["optim/stopped"] for one in seen] == [0.0, 0.0, 0.0, 1.0]
    shorter.step(batch, epochs=3)
    assert farthest(shorter.state(), bench.state()) == 0.0
    below = Bench(tmp_path / "fourth").step(batch, epochs=4, target_policy_kl=kl[3] / 1.4)
    assert [one["optim/stopped"] for one in below] == [0.0] * 4
    # Resumed after the pass that ended the update, there is nothing left to do.
    again = UpdateSettings(epochs=6, target_policy_kl=target)
    learner = Learner(bench.policy, bench.optimizer, bench.trainer.algorithm, Processes("cpu"))
    assert list(update(learner, batch, every(batch), again, StepInfo(0, 0, 1e-4), done=seen)) == []


def test_gradients_are_scaled_down_to_the_limit_and_recorded_before(tmp_path: Path) -> None:
    free, limited, loose = Bench(tmp_path / "a"), Bench(tmp_path / "b"), Bench(tmp_path / "c")
    before = {k: v for k, v in free.state().items() if "exp_avg." in k}
    gradients, norms = [], []
    for bench, limit in ((free, None), (limited, 0.01), (loose, 1e6)):
        norms.append(bench.step(bench.batch(), max_grad_norm=limit)[0]["optim/grad_norm"])
        state = bench.state()
        gradients.append({k: 10 * (state[k] - 0.9 * v) for k, v in before.items()})  # g from m ← 0.9·m + 0.1·g
    assert norms[0] == norms[1] == norms[2] > 0.05
    assert total(gradients[0]) == pytest.approx(norms[0], rel=1e-3)
    assert total(gradients[1]) == pytest.approx(0.01, rel=1e-2)
    scaled = {name: gradient * (0.01 / norms[0]) for name, gradient in gradients[0].items()}
    assert farthest(scaled, gradients[1]) < 1e-5
    assert farthest(gradients[0], gradients[2]) == 0.0


def total(gradients: dict[str, Tensor]) -> float:
    return float(sum((gradient.double() ** 2).sum() for gradient in gradients.values())) ** 0.5


def poisoning(trainer: RolloutTrainer, after: int) -> Any:
    def report(step: int, metrics: dict[str, float]) -> None:
        if step == after:
            with torch.no_grad():
                next(iter(trainer.learner.optimizer.parameters.values())).view(-1)[::7] = float("nan")

    return report


def test_poisoned_weights_stop_the_run_with_the_rollouts_they_made_on_record(tmp_path: Path) -> None:
    training = build(tmp_path / "run", steps=4, checkpoint__every=1)
    with pytest.raises(NonFiniteError, match=r"step 2: (sampler_)?logprob is NaN"):
        training.run(poisoning(training.trainer, after=1))
    run = cavesson.open(tmp_path / "run")
    assert sorted(set(run.rows()["step"].to_pylist())) == [0, 1, 2]
    assert np.isnan(run.tokens(2)["logprob"].to_numpy()).any()
    assert run.steps()["step"].to_pylist() == [0, 1]
    assert not (tmp_path / "run" / "model").exists()
    checkpoints = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert checkpoints[-1] == "step-00000002"


def last_record(folder: Path) -> tuple[list[int], list[int]]:
    """Steps with rollouts, and steps with metrics."""
    run = cavesson.open(folder)
    return sorted(set(run.rows()["step"].to_pylist())), run.steps()["step"].to_pylist()


def test_a_loss_that_is_no_number_stops_the_run(tmp_path: Path) -> None:
    changes = {"optimizer__learning_rate": 1e30, "update__epochs": 2, "update__max_ratio": None}
    with pytest.raises(NonFiniteError, match=r"step 0: the loss is (NaN|infinite)"):
        finish(tmp_path / "run", **changes)
    assert last_record(tmp_path / "run") == ([0], [])


def test_a_gradient_that_is_no_number_stops_the_run_before_it_is_followed(tmp_path: Path) -> None:
    # The squared error 10³⁶ is a float32, yet the sum of the squared gradients is none.
    training = build(tmp_path / "run", {"rewards": huge}, update__epochs=1, ppo__value_coef=30.0)
    before = weights(training.trainer.policy)
    with pytest.raises(NonFiniteError, match=r"step 0: the gradient is infinite"):
        training.run(quiet)
    assert farthest(before, weights(training.trainer.policy)) == 0.0
    assert last_record(tmp_path / "run") == ([0], [])


def huge(prompts: Sequence[str], responses: Sequence[str], **_: Any) -> list[float]:
    return [1e18 * value for value in uneven(prompts, responses)]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda count: [0.5] * (count - 1) + [float("nan")], r"the reward reward returned nan for response 5"),
        (lambda count: [0.5] * (count - 1), r"returned 5 values for 6 responses"),
        (lambda count: None, r"returned None"),
        (lambda count: ["good"] * count, r"'good'"),
    ],
)
def test_a_reward_gone_wrong_leaves_a_readable_record(tmp_path: Path, wrong: Any, message: str) -> None:
    calls = -1  # the first call only tries the reward

    def reward(prompts: Sequence[str], responses: Sequence[str], **_: Any) -> Any:
        nonlocal calls
        calls += 1
        return wrong(len(responses)) if calls == 3 else uneven(prompts, responses)

    with pytest.raises(UserError, match=message):
        finish(tmp_path / "run", {"rewards": reward}, steps=4)
    assert last_record(tmp_path / "run") == ([0, 1], [0, 1])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("estimator", ["k1", "full"])
@pytest.mark.parametrize(("epochs", "micro"), [(1, 0), (2, 2)])
@pytest.mark.parametrize("model", MODELS)
def test_nothing_but_empty_responses(tmp_path: Path, model: str, epochs: int, micro: int, estimator: str) -> None:
    changes = {"sampling__stop": ONE_BYTE, "update__epochs": epochs, "update__micro_batch_size": micro}
    training = build(tmp_path / "run", kl__estimator=estimator, **changes, **MODELS[model])
    before = weights(training.trainer.policy)
    result = training.run(quiet)
    run = cavesson.open(tmp_path / "run")
    assert set(run.rows()["length"].to_pylist()) == {0} and run.tokens(0).num_rows == 0
    assert set(run.rows()["response"].to_pylist()) == {""}
    assert [step["optim/skipped"] for step in result.metrics] == [1.0, 1.0]
    assert all(np.isfinite(value) for step in result.metrics for value in step.values())
    assert farthest(before, weights(result.policy)) == 0.0


@pytest.mark.parametrize("changes", [{}, {"ppo__whiten_rewards": True, "kl__estimator": "full"}])
def test_one_token_responses(tmp_path: Path, changes: dict[str, Any]) -> None:
    training = build(tmp_path / "run", sampling__random_length=None, sampling__max_new_tokens=1, **changes)
    before = weights(training.trainer.policy)
    result = training.run(quiet)
    assert set(cavesson.open(tmp_path / "run").rows()["length"].to_pylist()) == {1}
    assert all(np.isfinite(value) for step in result.metrics for value in step.values())
    assert farthest(before, weights(result.policy)) > 1e-5


def test_one_response_of_one_token(tmp_path: Path) -> None:
    # Its whitened advantage is 0 and not 0/0; the critic still learns.
    result = finish(tmp_path / "run", sampling__random_length=None, sampling__max_new_tokens=1, batch_size=1)
    assert all(np.isfinite(value) for step in result.metrics for value in step.values())
    assert [step["advantage/rollout_mean"] for step in result.metrics] == [0.0, 0.0]


def test_a_step_in_which_only_one_mini_batch_has_tokens(tmp_path: Path) -> None:
    # Nine responses in ten are empty: most mini-batches of one response have nothing to learn from.
    stop = tuple(c for c in ONE_BYTE if c not in "aeiou")
    result = finish(tmp_path / "run", sampling__stop=stop, batch_size=40, update__mini_batches=40, update__epochs=1)
    for step, seen in enumerate(result.metrics):
        lengths = cavesson.open(tmp_path / "run").rows(["length"], [step])["length"].to_pylist()
        assert 0 < sum(map(bool, lengths)) < 10
        assert seen["optim/skipped"] == pytest.approx(lengths.count(0) / 40)
        assert all(np.isfinite(value) for value in seen.values())


def test_prompts_that_are_too_long_are_named_by_their_rows(tmp_path: Path) -> None:
    prompts = ["On", "far too long a prompt", "My", "another one of these"]
    training = build(tmp_path / "run", {"prompts": prompts}, data={"max_prompt_tokens": 4})
    note = "2 of 4 prompts are longer than data.max_prompt_tokens and were dropped: rows 2, 4"
    assert note in training.trainer.notes()


def test_a_held_out_prompt_without_an_answer_is_found_before_the_run(tmp_path: Path) -> None:
    prompts = {"prompt": list(PROMPTS), "ground_truth": [*"12345", ""]}
    changes = {"data": {"validation": 0.2}, "rewards": [{"use": "exact_match"}]}
    with pytest.raises(UserError, match=f"ground_truth is empty for prompt '{PROMPTS[-1]}'"):
        build(tmp_path / "run", {"prompts": prompts, "rewards": None}, **changes)


def test_the_exact_kl_needs_a_reference_of_the_same_size(tmp_path: Path) -> None:
    wide: Any = tiny_model()
    wide.resize_token_embeddings(300)
    wide.save_pretrained(tmp_path / "wide")
    tiny_tokenizer().save_pretrained(tmp_path / "wide")
    reference = {"reference": {"path": str(tmp_path / "wide")}}
    build(tmp_path / "run", kl={"estimator": "k1"}, **reference)
    with pytest.raises(UserError, match="the reference has 300 of them, the policy 258; use another estimator"):
        build(tmp_path / "run", kl={"estimator": "full"}, **reference)


@pytest.mark.parametrize(("ends", "count"), [("<|endoftext|>", 0), ("<|pad|>", 1)])
def test_a_turn_whose_end_does_not_end_a_response_is_said(tmp_path: Path, ends: str, count: int) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": [{"role": "user", "content": "Hi"}]}\n' * 4)
    (tmp_path / "template").write_text("{% for m in messages %}{{ m.content }}" + ends + "{% endfor %}")
    data = {"path": str(tmp_path / "data.jsonl"), "template": str(tmp_path / "template")}
    notes = build(tmp_path / "run", {"prompts": None}, data=data).trainer.notes()
    said = f"A turn of the assistant ends with {ends}; responses would continue after it"
    assert sum(said in note and "sampling.eos_token_ids = [1]" in note for note in notes) == count


def test_sampling_stops_at_the_texts_that_cleaning_cuts_at(tmp_path: Path) -> None:
    changes = {"sampling": {"stop": ["zz", "\n"], "max_new_tokens": 6}, "cleaning": {"cut": ["next_line"]}}
    training = build(tmp_path / "run", **changes)
    assert training.collector.sampler.stop.stop == ("zz", "\n")
    del changes["sampling"]["stop"]
    assert build(tmp_path / "other", **changes).collector.sampler.stop.stop == ("\n",)

"""What the hooks for verl and OpenRLHF make of a batch of theirs, laid out as their source lays it out.

Neither runs on a machine without a GPU, so the batches are made here; the numbers are worked by hand.
"""

import functools
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cavesson.integrations import openrlhf, trl_grouped, verl
from cavesson.integrations.trl_callback import RecorderCallback, reward_rows, unique
from cavesson.record import open as open_run
from cavesson.record.write.padding import padded


class Letters:
    """Id 1 is a, 2 is b, …; 0 has no text."""

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(96 + int(i)) for i in ids if i)


def verl_batch() -> SimpleNamespace:
    """Two rollouts, prompts padded on the left to 2, responses on the right to 3; the second had a tool's token.

    What padding holds counts nowhere.
    """
    tensors = {
        "prompts": torch.tensor([[0, 1], [2, 3]]),
        "responses": torch.tensor([[4, 5, 0], [6, 7, 8]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]]),
        "response_mask": torch.tensor([[1, 1, 0], [1, 0, 1]]),
        "old_log_probs": torch.tensor([[-1.0, -2.0, 0.0], [-0.5, 0.0, -0.25]]),
        "ref_log_prob": torch.tensor([[-1.5, -2.0, 0.0], [-0.5, 0.0, -0.5]]),
        "token_level_scores": torch.tensor([[0.0, 1.0, 7.0], [0.0, 0.0, 2.0]]),
        "token_level_rewards": torch.tensor([[-0.5, 1.0, 7.0], [0.0, 0.0, 1.75]]),
        "advantages": torch.tensor([[0.5, 0.5, 0.0], [-0.5, 0.0, -0.5]]),
        "returns": torch.tensor([[0.5, 1.0, 0.0], [1.75, 0.0, 1.75]]),
    }
    others = {"uid": np.array(["x", "y"]), "reward_model": np.array([{"ground_truth": "g"}, {}], dtype=object)}
    return SimpleNamespace(batch=tensors, non_tensor_batch=others)


def test_a_step_of_verl(tmp_path, monkeypatch):
    # As verl's module is: the trainer's fit calls a function of its own module by name.
    module = types.ModuleType("verl_ray_trainer")
    source = """
class RayPPOTrainer:
    def fit(self):
        self.global_steps = 0
        for self.global_steps in self.steps:
            logged.append(compute_data_metrics(batch=make(), use_critic=False))
def compute_data_metrics(batch, use_critic=True):
    return {"critic/score/mean": 1.5}
logged = []
"""
    monkeypatch.setitem(sys.modules, "verl_ray_trainer", module)

    def process(*steps):
        exec(source, vars(module))
        vars(module)["make"] = verl_batch
        module.RayPPOTrainer.__module__ = "verl_ray_trainer"
        trainer = module.RayPPOTrainer()
        trainer.tokenizer, trainer.config, trainer.steps = Letters(), {"algorithm": {"adv_estimator": "grpo"}}, steps
        recorder = verl.record(trainer, tmp_path / "run")
        trainer.fit()
        recorder.close()

    process(1, 2)
    assert module.logged == [{"critic/score/mean": 1.5}] * 2
    run = open_run(tmp_path / "run")
    assert run.info["config"] == {"algorithm": {"adv_estimator": "grpo"}}
    assert run.info["algorithm"] == "grpo"
    assert run.steps().to_pylist() == [{"step": s, "attempt": 0, "critic/score/mean": 1.5} for s in (1, 2)]
    columns = [
        "step",
        "sample",
        "prompt",
        "response",
        "prompt_ids",
        "reward",
        "ground_truth",
        "length",
        "kl_k1",
    ]
    rows = [tuple(row.values()) for row in run.rows(columns).to_pylist()]
    # kl_k1 of the first: (−1 + 1.5) + (−2 + 2); of the second (−0.5 + 0.5) + (−0.25 + 0.5), the tool's token left out.
    first = (0, "a", "de", [1], 1.0, "g", 2, 0.5)
    second = (1, "bc", "fgh", [2, 3], 2.0, None, 2, 0.25)
    assert rows == [(1, *first), (1, *second), (2, *first), (2, *second)]
    tokens = run.tokens(1, 1).select(["token_id", "learned", "advantage"]).to_pylist()
    assert [tuple(token.values()) for token in tokens] == [(6, True, -0.5), (7, False, 0.0), (8, True, -0.5)]
    # Another process goes on from a checkpoint, whose step only `fit` knows.
    process(2, 3)
    steps = open_run(tmp_path / "run").steps().to_pylist()
    assert [(line["step"], line["attempt"]) for line in steps] == [(1, 0), (2, 1), (3, 1)]


class Arguments:
    """What the callback reads of TRL's settings."""

    process_index, world_size, bf16, fp16 = 0, 1, False, False

    def to_dict(self):
        return {}


def points(number):
    def reward(completions, **given):
        return [float(number * len(one)) for one in completions]

    return reward


def test_reward_functions_with_the_same_name_and_without_one(tmp_path):
    callback = RecorderCallback(tmp_path / "run")
    functions = [points(100), points(1), functools.partial(points(10))]
    wrapped = callback.rewards(functions, [1.0, 0.5, 0.25])
    assert [one.__name__ for one in wrapped] == ["reward", "reward_2", "partial"]
    state = SimpleNamespace(global_step=0)
    callback.on_train_begin(Arguments(), state, None)
    for function in wrapped:
        function(prompts=["p", "p"], completions=["a", "bc"], trainer_state=state)
    callback.on_train_end(Arguments(), state, None)
    rows = open_run(tmp_path / "run").rows(["reward", "reward_parts"]).to_pylist(maps_as_pydicts="strict")
    for size, row in zip((1, 2), rows, strict=True):
        assert row["reward_parts"] == {"reward": 100.0 * size, "reward_2": size, "partial": 10.0 * size}
        assert row["reward"] == size * (100 + 0.5 + 2.5)


def test_a_second_training_records_its_own_steps(tmp_path):
    """As in a notebook that resumes from a checkpoint, and evaluates first."""
    callback, state = RecorderCallback(tmp_path / "run"), SimpleNamespace(global_step=0)
    rows = {"prompt": ["p"], "response": ["r"], "reward": [1.0]}
    for start in (0, 2):
        state.global_step = start
        callback.on_train_begin(Arguments(), state, None)
        callback.on_log(Arguments(), state, None, {"eval_reward": float(start)})
        for step in range(start, 4):
            callback.rollouts(step, rows, {})
            state.global_step = step + 1
            callback.on_log(Arguments(), state, None, {"reward": float(start + step)})
        callback.on_train_end(Arguments(), state, None)
    run = open_run(tmp_path / "run")
    found = run.steps().select(["step", "attempt", "reward", "eval_reward"]).to_pylist()
    assert [tuple(row.values()) for row in found] == [
        (0, 0, 0.0, 0.0), (1, 0, 1.0, None), (2, 1, 4.0, 2.0), (3, 1, 5.0, None)
    ]  # fmt: skip
    assert run.rows(["step", "sample"]).to_pylist() == [{"step": step, "sample": 0} for step in range(4)]


def test_training_goes_on_after_it_was_interrupted_in_a_step(tmp_path):
    """As in a notebook whose cell was stopped before the step ended."""
    callback, state = RecorderCallback(tmp_path / "run"), SimpleNamespace(global_step=0)
    held = []

    def write():
        for step in held if callback.records else ():
            callback.rollouts(step, {"prompt": ["p"], "response": [f"of {step}"], "reward": [1.0]}, {})
        held.clear()

    callback.step_ended = write
    for start, steps, last in ((0, (0, 1, 2), True), (1, (1, 2), False)):
        state.global_step = start
        callback.on_train_begin(Arguments(), state, None)
        for step in steps:
            held.append(step)
            if not (last and step == 2):
                state.global_step = step + 1
                callback.on_step_end(Arguments(), state, None)
    callback.on_train_end(Arguments(), state, None)
    found = open_run(tmp_path / "run").rows(["step", "attempt", "response"]).to_pylist()
    assert [tuple(row.values()) for row in found] == [(0, 0, "of 0"), (1, 1, "of 1"), (2, 1, "of 2")]


def test_repeated_names_get_numbers_that_no_other_has():
    assert unique(["a", "a", "a_2", "b", "a"]) == ["a", "a_3", "a_2", "b", "a_4"]


def test_an_evaluation_before_training_is_not_recorded(tmp_path):
    names = ("_generate_and_score_completions", "_calculate_rewards", "_get_per_token_logps_and_entropies")
    trainer = SimpleNamespace(**dict.fromkeys((*names, "_compute_loss")))
    callback = RecorderCallback(tmp_path / "run")
    watcher = trl_grouped._Watcher(trainer, callback)
    callback.step_ended = watcher.write
    watcher._batches.append(trl_grouped._Batch(0, "eval", 0))
    callback.on_evaluate(Arguments(), SimpleNamespace(global_step=0), None)
    assert watcher._batches == [] and not (tmp_path / "run").exists()


def experience(**changes) -> SimpleNamespace:
    """Two rollouts; what belongs to actions is one shorter than the sequence, each place before its token."""
    content = {
        "sequences": torch.tensor([[1, 2, 3, 0], [4, 5, 6, 7]]),
        "attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]),
        "action_mask": torch.tensor([[0, 1, 0], [1, 0, 1]]),
        "action_log_probs": torch.tensor([[0.0, -1.0, 0.0], [-2.0, 0.0, -3.0]]),
        "base_action_log_probs": None,
        "values": torch.tensor([[9.0, 0.5, 9.0], [0.25, 9.0, 0.75]]),
        "prompts": ["ab", "d"],
        "labels": ["x", None],
        "rewards": torch.tensor([1.0, -1.0]),
        "truncated": torch.tensor([False, True]),
        "info": {"reward": torch.tensor([2.0, -1.0])},
    }
    return SimpleNamespace(**(content | changes))


def test_experiences_of_openrlhf(tmp_path):
    recorder = openrlhf.record(tmp_path / "run", 5, [experience(), experience(prompts=["ab", "d"])], Letters())
    recorder.metrics(5, {"kl": 0.5})
    openrlhf.record(tmp_path / "run", 6, [experience(action_mask=torch.zeros(2, 3))], Letters())
    recorder.close()
    run = open_run(tmp_path / "run")
    columns = ["sample", "prompt", "response", "prompt_ids", "reward", "ground_truth", "finish_reason", "length"]
    rows = [tuple(row.values()) for row in run.rows(columns, [5]).to_pylist()]
    assert rows[:2] == [(0, "ab", "c", [1, 2], 2.0, "x", "eos", 1), (1, "d", "efg", [4], -1.0, None, "length", 2)]
    assert [row[0] for row in rows] == [0, 1, 2, 3]
    tokens = run.tokens(5, 1)
    assert tokens["token_id"].to_pylist() == [5, 6, 7]
    assert tokens["learned"].to_pylist() == [True, False, True]
    assert tokens["source"].to_pylist() == ["sampled", None, "sampled"]
    assert tokens["logprob"].to_pylist() == [-2.0, None, -3.0]
    assert tokens["value"].to_pylist() == [0.25, None, 0.75]
    # Where nothing was sampled there are no tokens, and no response.
    assert [row["length"] for row in run.rows(["length"], [6]).to_pylist()] == [0, 0]
    assert not {"algorithm", "config"} & run.info.keys()  # settings were not passed


@pytest.mark.parametrize(
    ("estimator", "algorithm"), [("gae", "ppo"), ("rloo", "rloo"), ("reinforce_plus_plus", None), (None, None)]
)
def test_the_algorithm_of_verl_is_that_of_its_advantages(estimator, algorithm, tmp_path):
    """verl's trainer is called PPO whatever it trains with; an algorithm that has no name here is left out."""

    class Trainer:
        config = types.MappingProxyType({"algorithm": {"adv_estimator": estimator} if estimator else {}})

        def fit(self):
            pass

    globals().setdefault("compute_data_metrics", None)
    verl.record(Trainer(), tmp_path / "run").close()
    assert open_run(tmp_path / "run").info.get("algorithm") == algorithm


@pytest.mark.parametrize(
    ("estimator", "algorithm"), [("gae", "ppo"), ("group_norm", "grpo"), ("rloo", "rloo"), ("reinforce", None)]
)
def test_the_algorithm_of_openrlhf_is_that_of_its_advantages(estimator, algorithm, tmp_path):
    args = SimpleNamespace(
        algo=SimpleNamespace(advantage=SimpleNamespace(estimator=estimator)),
        actor=SimpleNamespace(loss_agg_mode="token-mean"),
        logger=SimpleNamespace(wandb=SimpleNamespace(key="secret")),
    )
    openrlhf.record(tmp_path / "run", 0, [experience()], Letters(), args).close()
    info = open_run(tmp_path / "run").info
    assert info.get("algorithm") == algorithm
    assert info["config"] == {
        "algo": {"advantage": {"estimator": estimator}}, "actor": {"loss_agg_mode": "token-mean"}
    }  # fmt: skip


@pytest.mark.parametrize("rows", [[], [[]], [[1], [], [2, 3]]])
def test_padding(rows):
    arrays = padded({"token_id": rows, "logprob": rows}, len(rows))
    assert [r[m].tolist() for r, m in zip(arrays["token_id"], arrays["attended"], strict=True)] == rows
    assert arrays["token_id"].dtype == np.int64 and arrays["logprob"].dtype == np.float64


def test_the_loop_of_the_documentation_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text(encoding="utf-8")
    exec(text.split("## Your own loop")[1].split("```python\n")[1].split("```")[0], {})
    run = open_run(tmp_path / "runs" / "own")
    rows = run.rows(["step", "sample", "response", "length"]).to_pylist()
    assert [tuple(row.values()) for row in rows] == [(s, *r) for s in range(3) for r in ((0, "x", 1), (1, "yz", 2))]
    assert run.tokens(2, 1)["logprob"].to_pylist() == [-1.0, -0.25]
    assert run.steps()["reward/mean"].to_pylist() == [0.75] * 3


def test_a_score_that_is_missing_in_trl_counts_for_nothing():
    scores = np.array([[1.0, np.nan], [np.nan, np.nan], [0.5, 2.0]])
    found = reward_rows(["first", "second"], scores, [1.0, 0.5])
    np.testing.assert_array_equal(found["reward"], [1.0, np.nan, 0.5 + 0.5 * 2.0])
    assert found["reward_parts"] == [{"first": 1.0}, {}, {"first": 0.5, "second": 2.0}]

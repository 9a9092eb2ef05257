"""RAFT: which responses are kept, what is learned of them, and what is left on disk and on the screen."""

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from batch_helpers import ALONE
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor

import cavesson
from cavesson.algorithms.raft import RAFT, RAFTRun, print_rounds
from cavesson.config import check
from cavesson.errors import UserError
from cavesson.models.policy import Policy
from cavesson.models.tiny import tiny_model
from cavesson.ops.masked import weighted_mean
from cavesson.record import Recorder, write_run
from cavesson.rollout.rewards.lowercase import lowercase
from cavesson.train.run import Result, train
from cavesson.types import Batch, Rollouts


def rollouts(
    rewards: Sequence[float], lengths: Sequence[int] | None = None, group: Sequence[int] = (), **columns: Tensor
) -> Batch:
    """A step's rollouts as the loop hands them over."""
    lengths = lengths or [2] * len(rewards)
    mask = torch.tensor([[1.0] * n + [0.0] * (max(lengths) - n) for n in lengths])
    reward = torch.tensor(rewards)
    given = {
        "attended": mask,
        "learned": mask,
        "reward": reward,
        "shaped_reward": reward,
        "group_in_step": torch.tensor(group or [0] * len(rewards)),
        "discarded": torch.zeros(len(rewards), dtype=torch.bool),
    }
    return Batch({**given, **columns})


def kept(raft: RAFT, batch: Batch, kl_coef: float = 0.0) -> list[int]:
    return raft.credit(batch, kl_coef, ALONE)["selected"].nonzero().flatten().tolist()


def test_top_keeps_the_best_of_all():
    batch = rollouts([1.0, 6.0, 2.0, 5.0, 3.0, 4.0], group=[0, 0, 1, 1, 2, 2])
    assert kept(RAFT(selection="top", k=3), batch) == [1, 3]
    assert kept(RAFT(selection="top", k=2), batch) == [1, 3, 5]
    assert kept(RAFT(selection="top", k=1), batch) == [0, 1, 2, 3, 4, 5]


def test_local_keeps_the_best_to_each_prompt():
    batch = rollouts([1.0, 0.5, -7.0, -5.0, 3.0, 4.0], group=[3, 3, 1, 1, 2, 2])
    assert kept(RAFT(selection="local", k=2), batch) == [0, 3, 5]


def test_of_equal_rewards_the_first_is_kept():
    batch = rollouts([1.0, 2.0, 2.0, 2.0], group=[0, 0, 1, 1])
    assert kept(RAFT(selection="top", k=2), batch) == [1, 2]
    assert kept(RAFT(selection="local", k=2), batch) == [1, 2]


def test_discarded_responses_are_never_kept():
    batch = rollouts([9.0, 1.0, 8.0, 7.0], group=[0, 0, 1, 1], discarded=torch.tensor([True, False, True, True]))
    assert kept(RAFT(selection="top", k=2), batch) == [1]
    assert kept(RAFT(selection="local", k=2), batch) == [1]


def test_with_everything_discarded_nothing_has_weight():
    raft = RAFT(k=2)
    batch = raft.credit(rollouts([1.0, 2.0], discarded=torch.tensor([True, True])), 0.0, ALONE)
    assert raft.weights(batch).sum() == 0
    assert raft.metrics(batch, ALONE) == {"raft/selected": 0.0}
    assert batch["learned"].all()  # so that the update has a batch to find weightless


def test_leaving_the_reference_costs_a_response_its_place():
    # KL of the response, padding not counted: 2 · 0.5 = 1 for the first, 0 for the second; the reward differs by 0.4
    logprob = torch.tensor([[-1.0, -1.0, 0.0], [-1.0, -1.0, 0.0]])
    reference = torch.tensor([[-1.5, -1.5, -90.0], [-1.0, -1.0, 80.0]])
    batch = rollouts([1.4, 1.0], [2, 2], logprob=logprob, ref_logprob=reference)
    batch = batch.with_columns(
        attended=torch.tensor([[1.0, 1.0, 0.0]] * 2), learned=torch.tensor([[1.0, 1.0, 0.0]] * 2)
    )
    assert kept(RAFT(k=2), batch, kl_coef=0.3) == [0]  # 1.4 − 0.3 > 1
    assert kept(RAFT(k=2), batch, kl_coef=0.5) == [1]  # 1.4 − 0.5 < 1
    assert RAFT(k=2).credit(batch, 0.5, ALONE)["score"].tolist() == pytest.approx([0.9, 1.0])


STEPS = st.integers(1, 4).flatmap(
    lambda k: st.integers(1, 5).flatmap(
        lambda prompts: st.tuples(
            st.just(k),
            st.lists(st.floats(-5, 5, width=32), min_size=k * prompts, max_size=k * prompts),
            st.lists(st.booleans(), min_size=k * prompts, max_size=k * prompts),
        )
    )
)


@given(STEPS)
def test_top_keeps_as_many_as_it_should_and_none_below_one_it_leaves(step):
    k, rewards, discarded = step
    found = kept(RAFT(k=k), rollouts(rewards, discarded=torch.tensor(discarded)))
    eligible = [row for row, bad in enumerate(discarded) if not bad]
    assert len(found) == min(len(rewards) // k, len(eligible))
    left = [rewards[row] for row in eligible if row not in found]
    assert not found or not left or min(rewards[row] for row in found) >= max(left)
    assert set(found) <= set(eligible)


@given(STEPS)
def test_local_keeps_one_of_each_prompt_that_has_one(step):
    k, rewards, discarded = step
    group = [row // k for row in range(len(rewards))]
    found = kept(RAFT(selection="local", k=k), rollouts(rewards, group=group, discarded=torch.tensor(discarded)))
    expected = []
    for _, rows in groupby(range(len(rewards)), key=lambda row: row // k):
        best = None
        for row in rows:
            if not discarded[row] and (best is None or rewards[row] > rewards[best]):
                best = row
        expected += [best] if best is not None else []
    assert found == expected


@given(STEPS)
def test_only_the_kept_are_worth_training_on(step):
    k, rewards, _ = step
    raft = RAFT(k=k)
    batch = raft.credit(rollouts(rewards, lengths=[1 + row % 3 for row in range(len(rewards))]), 0.0, ALONE)
    selected = batch["selected"]
    assert torch.equal(raft.weights(batch), batch["learned"] * selected[:, None])
    assert torch.equal(batch["chosen"], selected.bool())
    assert torch.equal(batch["advantage"], raft.weights(batch))


def test_metrics_by_hand():
    raft = RAFT(k=2)
    batch = raft.credit(rollouts([3.0, 1.0, 2.0, 0.0], lengths=[4, 1, 1, 3], group=[0, 0, 1, 1]), 0.0, ALONE)
    assert raft.metrics(batch, ALONE) == {"raft/selected": 2, "raft/selected_reward": 2.5, "raft/selected_length": 2.5}


def test_the_reward_reported_is_the_one_before_shaping():
    raft = RAFT(k=2)
    batch = raft.credit(rollouts([3.0, 8.0]).with_columns(shaped_reward=torch.tensor([1.0, 0.0])), 0.0, ALONE)
    assert raft.metrics(batch, ALONE)["raft/selected_reward"] == 3


def test_the_gradient_is_that_of_supervised_training_on_the_kept_responses():
    prompts, responses = [[70, 71, 72], [80]] * 2, [[40, 41, 0], [50], [42, 43], [60, 61, 62, 0]]
    model = tiny_model(dtype=torch.float64)
    policy = Policy(model, temperature=1.0)
    raft = RAFT(k=2)
    width, left = max(map(len, responses)), max(map(len, prompts))
    batch = rollouts([2.0, 1.0, 0.0, 3.0], lengths=[len(r) for r in responses]).with_columns(
        prompt_ids=torch.tensor([[1] * (left - len(p)) + p for p in prompts]),
        prompt_mask=torch.tensor([[0] * (left - len(p)) + [1] * len(p) for p in prompts]),
        response_ids=torch.tensor([r + [1] * (width - len(r)) for r in responses]),
    )
    credited = raft.credit(batch, 0.0, ALONE)
    result = raft.loss(policy(credited), credited)
    weights = raft.weights(credited)
    loss = weighted_mean(result.loss, weights, float(raft.total(credited)))
    loss.backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for row in (0, 3):
        logits = model(input_ids=torch.tensor([prompts[row] + responses[row]])).logits[0]
        for place, token in enumerate(responses[row]):
            total = total - logits[len(prompts[row]) + place - 1].log_softmax(-1)[token]
            tokens += 1
    (total / tokens).backward()
    assert loss.item() == pytest.approx(total.item() / 7)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-7, rtol=1e-5)


def settings(**values: Any) -> RAFTRun:
    return check(RAFTRun, values, "recipe.toml")


def test_the_temperature_is_a_straight_line_over_the_steps():
    run = settings(steps=5, sampling={"temperature": 1.0}, raft={"final_temperature": 0.6})
    assert [run.sampling_temperature(step) for step in range(5)] == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6])
    assert run.scoring_temperature == 1.0


def test_without_a_final_temperature_or_a_second_step_it_stays():
    assert settings(sampling={"temperature": 0.85}).sampling_temperature(99) == 0.85
    one = settings(steps=1, sampling={"temperature": 0.85}, raft={"final_temperature": 0.1})
    assert one.sampling_temperature(0) == 0.85


def test_scoring_stays_at_one_whatever_is_sampled():
    assert settings(sampling={"temperature": 0.7}).scoring_temperature == 1.0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch_size": 10, "raft": {"k": 4}}, "batch_size 10 is not a multiple of raft.k 4"),
        ({"samples_per_prompt": 2, "raft": {"selection": "local", "k": 4}}, "set samples_per_prompt and raft.k"),
        ({"batch_size": 8, "raft": {"k": 4}, "update": {"mini_batches": 3}}, "the 2 responses that are kept"),
        ({"update": {"target_policy_kl": 0.1}}, "update.target_policy_kl has no effect in RAFT"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(values, message):
    with pytest.raises(UserError, match=message):
        settings(**values)


def test_local_with_as_many_samples_as_k_is_fine():
    assert settings(samples_per_prompt=8, raft={"selection": "local"}).raft.k == 8


def generated(batch, **texts):
    count = range(len(batch))
    return Rollouts(prompt_index=[*count], sample=[*count], finish_reason=["eos" for _ in count], batch=batch, **texts)


def test_the_training_set_is_lmflows_text2text(tmp_path):
    selected = Batch({"selected": torch.tensor([1.0, 0.0, 1.0])})
    texts = {"prompt": ["Wie?", "Why?", "Who?"], "response": [" Só.\n", " No", "\u2028"]}
    RAFT().write(tmp_path, 4, generated(selected, **texts), ALONE)
    path = tmp_path / "training_sets" / "step-00000004.json"
    read = json.loads(path.read_text(encoding="utf-8"))
    instances = [{"input": "Wie?", "output": " Só.\n"}, {"input": "Who?", "output": "\u2028"}]
    assert read == {"type": "text2text", "instances": instances}
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_step_leaves_its_training_set(tmp_path):
    raft = RAFT(k=2)
    credited = raft.credit(rollouts([0.0, 1.0]), 0.0, ALONE)
    raft.write(tmp_path, 12, generated(credited, prompt=["a", "b"], response=["x", "y"]), ALONE)
    [path] = (tmp_path / "training_sets").iterdir()
    assert path.name == "step-00000012.json"
    assert json.loads(path.read_text(encoding="utf-8"))["instances"] == [{"input": "b", "output": "y"}]


RECORDED = [
    {"step": 0, "reward/mean": 1.0, "raft/selected_reward": 2.5, "text/distinct_2": 0.4, "kl/objective": 0.0},
    {"step": 1, "reward/mean": 1.75, "raft/selected_reward": None, "text/distinct_2": 0.3},
]


def test_the_gain_is_counted_from_the_first_step_and_printed_beside_that_of_selecting_only():
    console = Console(record=True, width=100, file=open("/dev/null", "w"))  # noqa: SIM115
    print_rounds(console, RECORDED)
    text = console.export_text()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    assert rows == [
        ["0", "+1.000", "+0.000", "2.500", "0.400", "0.000"],
        ["1", "+1.750", "+0.750", "–", "0.300", "–"],
    ]
    assert "Selecting among the starting model's responses gives +2.500, a gain of +1.500." in text


@pytest.mark.parametrize("first", [[], [{"evaluation/unscored": 1.0, "reward/unscored": 1.0}]])
def test_steps_without_a_reward_are_left_out(tmp_path: Path, first: list[dict[str, float]]) -> None:
    console = Console(record=True, width=100, file=open("/dev/null", "w"))  # noqa: SIM115
    run = RAFTRun(run=tmp_path)
    write_run(tmp_path, {})
    with Recorder(tmp_path) as recorder:
        for step, metrics in enumerate([*first, {"reward/unscored": 1.0}]):
            recorder.metrics(step, metrics)
    run.show(tmp_path, console)
    assert console.export_text() == ""
    with Recorder(tmp_path) as recorder:
        recorder.metrics(len(first) + 1, {"reward/mean": 1.0, "raft/selected_reward": 2.5})
    run.show(tmp_path, console)
    assert console.export_text().count("│") == 7  # of a single row


def finished(folder: Path, **changes: Any) -> Result:
    """A run of two steps with eight responses of at most six bytes."""
    values: dict[str, Any] = {
        "run": folder,
        "steps": 2,
        "batch_size": 8,
        "model": {"device": "cpu"},
        "sampling": {"max_new_tokens": 6},
        "optimizer": {"learning_rate": 1e-3},
        "raft": {"k": 2},
    }
    run = check(RAFTRun, {**values, **changes}, "recipe.toml")
    return train(run, report=lambda *_: None, prompts=["On the table", "My", "A dog and", "It"], rewards=lowercase)


def test_a_run_leaves_what_its_record_says_it_learned(tmp_path):
    result = finished(tmp_path / "run")
    run = cavesson.open(result.folder)
    for step in range(2):
        learned = {row["sample"] for row in run.tokens(step).to_pylist() if row["advantage"] == 1}
        rows = [row for row in run.rows(steps=[step]).to_pylist() if row["sample"] in learned]
        path = result.folder / "training_sets" / f"step-{step:08d}.json"
        written = json.loads(path.read_text(encoding="utf-8"))["instances"]
        assert written == [{"input": row["prompt"], "output": row["response"]} for row in rows]
        assert len(written) == 4
        assert result.metrics[step]["raft/selected_reward"] == pytest.approx(sum(r["reward"] for r in rows) / 4)
        assert result.metrics[step]["optim/weight"] == sum(row["length"] for row in rows)


def test_responses_are_sampled_at_the_temperature_and_scored_at_one(tmp_path):
    result = finished(
        tmp_path / "run", sampling={"max_new_tokens": 6, "temperature": 1.0}, raft={"final_temperature": 0.2, "k": 2}
    )
    gaps = [metrics["logprob/sampler_gap"] for metrics in result.metrics]
    assert gaps[0] < 1e-4
    assert gaps[1] > 0.1


def test_one_pass_in_one_piece_learns_the_same_as_in_two(tmp_path):
    whole = finished(tmp_path / "whole", update={"epochs": 1})
    pieces = finished(tmp_path / "pieces", update={"epochs": 1, "micro_batch_size": 3})
    assert whole.metrics[1]["loss/total"] == pytest.approx(pieces.metrics[1]["loss/total"], rel=1e-4)


def test_fewer_selected_than_mini_batches_are_learned_all_the_same(tmp_path):
    result = finished(
        tmp_path / "run",
        samples_per_prompt=2,
        sampling={"max_new_tokens": 2, "stop": [chr(c) for c in range(33, 127)]},  # many responses are too short
        raft={"selection": "local", "k": 2},
        cleaning={"discard": ["too_short"], "discard_reward": -3},
        update={"epochs": 2, "mini_batches": 4},
    )
    few = [metrics for metrics in result.metrics if 0 < metrics["raft/selected"] < 4]
    assert few
    for metrics in few:
        assert metrics["optim/mini_batches"] == 2 * metrics["raft/selected"]  # as many as can be made, in two epochs

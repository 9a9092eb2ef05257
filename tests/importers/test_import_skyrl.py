"""The batches that SkyRL trains on, in the shape in which it pickles them."""

import pickle
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from import_helpers import lines, rows

import cavesson
from cavesson.errors import UserError
from cavesson.importers import import_run

MODULE = "skyrl.backends.skyrl_train.training_batch"
NAME = "global_step_7_training_input.pkl"
FLOATS = {
    "action_log_probs": "logprob", "base_action_log_probs": "ref_logprob", "rollout_logprobs": "sampler_logprob",
    "values": "value", "returns": "return", "advantages": "advantage",
}  # fmt: skip
Sample = tuple[list[int], list[int]]


class Batch:
    """Pickled as a call of SkyRL's function with SkyRL's class and the state of a batch."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def __reduce__(self) -> tuple:
        module = sys.modules[MODULE]
        return module._rebuild_tensor_batch, (module.TrainingInputBatch, self.state)


def tensor(values: np.ndarray) -> dict[str, Any]:
    return {"format": "numpy", "data": values.tobytes(), "shape": values.shape, "dtype": str(values.dtype)}


def columns(samples: list[Sample], left: bool = True) -> dict[str, np.ndarray]:
    """A batch with padding on the left, or as before 2026, between prompt and response and behind it."""
    widest = max(len(response) for _, response in samples)
    total = max(len(p) + len(r) for p, r in samples) if left else max(len(p) for p, _ in samples) + widest
    shapes = {"sequences": total, "attention_mask": total, "response_mask": widest, "loss_mask": widest}
    found = {name: np.zeros((len(samples), width), np.int64) for name, width in shapes.items()}
    found |= {name: np.zeros((len(samples), widest), np.float32) for name in FLOATS}
    for i, (prompt, response) in enumerate(samples):
        end = total if left else total - widest + len(response)
        start, first = end - len(response), widest - len(response) if left else 0
        for place, token in zip(range(start - len(prompt), start), prompt, strict=True):
            found["sequences"][i, place], found["attention_mask"][i, place] = token, 1
        for place, token in enumerate(response):
            found["sequences"][i, start + place] = token
            for name in ("attention_mask", "response_mask", "loss_mask"):
                at = start + place if name == "attention_mask" else first + place
                found[name][i, at] = 0 if name == "loss_mask" and token == 0 else 1
            for number, name in enumerate(FLOATS):
                found[name][i, first + place] = -1 - number - place / 8
    return found


def write(path: Path, arrays: dict[str, Any], metadata: dict[str, Any] | None = None) -> Path:
    module = types.ModuleType(MODULE)
    module._rebuild_tensor_batch = types.FunctionType((lambda kind, state: state).__code__, {}, "_rebuild_tensor_batch")
    module._rebuild_tensor_batch.__module__ = MODULE
    module._rebuild_tensor_batch.__qualname__ = "_rebuild_tensor_batch"
    module.TrainingInputBatch = type("TrainingInputBatch", (dict,), {"__module__": MODULE})
    above = [MODULE.rsplit(".", count)[0] for count in (1, 2, 3)]
    sys.modules |= {MODULE: module} | {name: types.ModuleType(name) for name in above}
    named = {name: tensor(one) if isinstance(one, np.ndarray) else one for name, one in arrays.items()}
    state = {"batch_dict": named, "batch_size": 1, "device": torch.device("cpu"), "metadata": metadata}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(Batch(state)))
    for name in (MODULE, *above):
        del sys.modules[name]
    return path


@pytest.mark.parametrize("left", [True, False])
def test_every_token_of_a_batch_is_read(tmp_path, left):
    samples = [([1, 2, 3], [4, 0, 5]), ([6], [7]), ([6], [8, 9]), ([1], [1])]
    arrays = columns(samples, left) | {"rewards": None, "router_padding_mask": None}
    arrays["action_log_probs"][0, 1] = -0.5
    write(tmp_path / "dumped_data" / NAME, arrays, {"pad_size": 1, "response_length": 3, "avg": 2.0})
    report = import_run(tmp_path, tmp_path / "run")
    assert (report.format, report.rollouts, report.rejected) == ("skyrl", 3, 0)
    assert any("leaves the rewards out" in note for note in report.notes)
    found = rows(tmp_path / "run", "step", "split", "prompt_ids", "reward", "group")
    by_prompt = {tuple(line[2]): line for line in found}
    assert set(by_prompt) == {(1, 2, 3), (6,)} and {line[:2] for line in found} == {(7, "train")}
    assert {line[3] for line in found} == {None}
    run = cavesson.open(tmp_path / "run")
    tokens = {}
    for sample in run.rows(["sample"])["sample"].to_pylist():
        one = run.rollout(7, sample)[1]
        tokens[tuple(one["token_id"].to_pylist())] = one
    assert set(tokens) == {(4, 0, 5), (7,), (8, 9)}
    first = tokens[4, 0, 5]
    assert first["learned"].to_pylist() == [True, False, True]
    for number, (name, ours) in enumerate(FLOATS.items()):
        expected = [-1 - number - place / 8 for place in range(3)]
        expected[1 if name == "action_log_probs" else 0] = -0.5 if name == "action_log_probs" else expected[0]
        assert first[ours].to_pylist() == expected, name


@given(st.lists(st.tuples(*[st.lists(st.integers(1, 2**31 - 1), min_size=1, max_size=5)] * 2), min_size=1, max_size=4))
@settings(max_examples=20, deadline=None)
def test_prompts_and_responses_of_any_length_come_back(tmp_path_factory, samples):
    folder = tmp_path_factory.mktemp("batch")
    scores = [float(number) for number in range(len(samples))]
    arrays = columns(samples)
    arrays["rewards"] = np.zeros(arrays["loss_mask"].shape, np.float32)
    arrays["rewards"][:, -1] = scores
    write(folder / NAME, arrays, {"uids": [f"u{i % 2}" for i in range(len(samples))]})
    import_run(folder / NAME, folder / "run")
    run = cavesson.open(folder / "run")
    found = {}
    for row in run.rows(["sample", "prompt_ids", "reward", "group"]).to_pylist():
        ids = run.rollout(7, row["sample"])[1]["token_id"].to_pylist()
        found[row["reward"]] = (row["prompt_ids"], ids, row["group"])
    assert [found[score][:2] for score in scores] == [tuple(sample) for sample in samples]
    assert len({found[score][2] for score in scores}) == min(2, len(samples))


def test_evaluations_and_batches_are_one_record(tmp_path):
    write(tmp_path / "dumped_data" / NAME, columns([([1], [2])]))
    evaluation = {"input_prompt": "p", "output_response": "r", "score": 1.0, "stop_reason": "stop"}
    lines(tmp_path / "dumped_evals" / "global_step_7_evals" / "maths.jsonl", evaluation)
    import_run(tmp_path, tmp_path / "run")
    assert sorted(rows(tmp_path / "run", "step", "split")) == [(7, "eval"), (7, "train")]


def test_a_tensor_that_only_pytorch_reads_is_named(tmp_path):
    arrays = columns([([1], [2])]) | {"values": {"format": "torch", "data": b"..."}}
    report = import_run(write(tmp_path / NAME, arrays), tmp_path / "run")
    assert any("'values' is not read" in note for note in report.notes)
    assert cavesson.open(tmp_path / "run").rollout(7, 0)[1]["value"].null_count == 1


class Harm:
    def __reduce__(self) -> tuple:
        return print, ("executed",)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (pickle.dumps(Harm()), "it contains builtins.print"),
        (pickle.dumps({"a": torch.zeros(1)}), "it contains torch"),
        (pickle.dumps({"batch_dict": {}}), "it is not a batch of SkyRL"),
        (pickle.dumps([1]), "cannot be read"),
        (b"", "cannot be read"),
        (pickle.dumps({"batch_dict": {"a": 1}})[:-9], "cannot be read"),
    ],
)
def test_a_pickle_that_is_something_else_is_refused_in_a_line(tmp_path, capfd, content, said):
    (tmp_path / NAME).write_bytes(content)
    with pytest.raises(UserError, match=said) as raised:
        import_run(tmp_path, tmp_path / "run")
    assert "\n" not in str(raised.value) and "executed" not in capfd.readouterr().out

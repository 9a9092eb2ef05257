"""Distillation without a reward, of whole distributions, on given responses, and from a teacher on servers."""

from pathlib import Path
from typing import Any

import pytest
from train_helpers import farthest, quiet, timeless, tiny_folder, tiny_run, weights
from vllm_stand_in import StandIn, serving

import cavesson
from cavesson.errors import UserError
from cavesson.models.tiny import tiny_model, tiny_tokenizer
from cavesson.train.run import Result

SMOOTH: dict[str, Any] = {"optimizer__eps": 1e-3, "optimizer__warmup_steps": 0, "rewards": None}
SINGLE = {"update__epochs": 1, "update__mini_batches": 1}
KINDS: dict[str, dict[str, Any]] = {
    "sampled": {"distill__loss_type": "sampled"},
    "full": {"distill__loss_type": "full", "distill__beta": 0.3},
    "given": {"distill__loss_type": "full", "distill__own_share": 0.5, "data__path": "pairs.jsonl"},
}


def run(folder: Path, **changes: Any) -> Result:
    return tiny_run("distill", folder, **{**SMOOTH, **changes}).run(quiet)


def same(one: Result, other: Result) -> None:
    assert farthest(weights(one.policy), weights(other.policy)) < 1e-5
    for first, second in zip([*one.metrics, one.final], [*other.metrics, other.final], strict=True):
        assert timeless(second) == pytest.approx(timeless(first), rel=1e-4, abs=2e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("passes", ["single", "several"])
@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_change_nothing(tmp_path: Path, kind: str, passes: str) -> None:
    changes = KINDS[kind] | (SINGLE if passes == "single" else {})
    whole = run(tmp_path / "whole", **changes)
    assert whole.metrics[0]["optim/grad_norm"] > 0.01
    for size in (1, 4):
        same(whole, run(tmp_path / str(size), **changes, update__micro_batch_size=size))


@pytest.mark.parametrize("kind", KINDS)
def test_the_forward_pass_that_scores_gives_the_same_gradient(tmp_path: Path, kind: str) -> None:
    """In the backward pass of the optimiser, nothing is learned while responses are scored."""
    short = run(tmp_path / "short", **KINDS[kind], **SINGLE)
    same(short, run(tmp_path / "long", **KINDS[kind], **SINGLE, update__in_backward=True))


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_learn_from_a_teacher_that_stays(tmp_path: Path, kind: str) -> None:
    training = tiny_run("distill", tmp_path / "run", **SMOOTH, **KINDS[kind], model__lora__rank=2)
    before = weights(training.trainer.policy)
    result = training.run(quiet)
    after, teacher = weights(result.policy), result.policy.teacher
    assert {name for name in after if not after[name].equal(before[name])} == {
        name for name in after if "lora_" in name
    }
    assert teacher is not None and farthest(weights(teacher.model), weights(tiny_model(seed=5))) == 0


def test_held_out_prompts_are_compared_with_the_teacher(tmp_path: Path) -> None:
    result = run(tmp_path / "run", data__validation=0.4, evaluation__every=1)
    rows = [row for row in cavesson.open(tmp_path / "run").rows().to_pylist() if row["split"] == "eval"]
    for step, metrics in enumerate([*result.metrics, result.final]):
        mine = [row["teacher_kl"] for row in rows if row["step"] == step]
        assert metrics["evaluation/teacher_kl"] == pytest.approx(sum(mine) / len(mine), abs=1e-4)
        assert not {"evaluation/reward", "evaluation/gap", "evaluation/unscored"} & metrics.keys()
    assert {row["reward"] for row in rows} == {row["ref_reward"] for row in rows} == {None}
    assert all(row["ref_response"] is not None for row in rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("teacher") / "model"
    tiny_model(seed=5).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def from_servers(servers: list[StandIn], to: Path, **changes: Any) -> Result:
    return run(to, teacher__path=None, teacher__servers=[one.url for one in servers], **changes)


@pytest.mark.parametrize("rewards", [None, "uneven"])
def test_a_teacher_on_servers_is_one_in_the_process(tmp_path: Path, folder: Path, rewards: str | None) -> None:
    with serving(folder) as one, serving(folder) as other:
        remote = from_servers([one, other], tmp_path / "remote", rewards=rewards)
        asked = [request for server in (one, other) for request in server.requests]
        assert len(one.requests) == len(other.requests) == 6
        assert {len(request["prompt"]) > 1 and request["prompt_logprobs"] for request in asked} == {0}
    same(run(tmp_path / "local", rewards=rewards), remote)
    tokens = cavesson.open(tmp_path / "remote").tokens(1).to_pylist()
    assert None not in {one["teacher_logprob"] for one in tokens}


def test_a_server_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    path = tiny_folder(tmp_path / "other")
    file = path / "tokenizer.json"
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace('"a": ', '"~~": ').replace('"b": ', '"a": ').replace('"~~": ', '"b": '), "utf-8")
    with serving(path) as server, pytest.raises(UserError, match=r"the teacher on http.* different vocabulary from"):
        from_servers([server], tmp_path / "run")


SPOILT: dict[str, tuple[Any, str]] = {
    "none": (lambda answer: {"choices": [{"text": "x"}]}, r"answered .*prompt_logprobs.*Field required"),
    "few": (
        lambda answer: {"choices": [{"prompt_logprobs": answer["choices"][0]["prompt_logprobs"][:-1]}]},
        "of other tokens than those it was asked for",
    ),
    "others": (
        lambda answer: {
            "choices": [
                {
                    "prompt_logprobs": [
                        each and {"1": {"logprob": -1.0}} for each in answer["choices"][0]["prompt_logprobs"]
                    ]
                }
            ]
        },
        "of other tokens than those it was asked for",
    ),
}


@pytest.mark.parametrize("case", SPOILT)
def test_a_wrong_answer_ends_the_run_in_one_line(tmp_path: Path, folder: Path, case: str) -> None:
    spoil, message = SPOILT[case]
    with serving(folder) as server:
        server.spoil = spoil
        with pytest.raises(UserError, match=message) as found:
            from_servers([server], tmp_path / "run")
    assert server.url in str(found.value) and "\n" not in str(found.value)

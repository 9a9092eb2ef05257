"""On-policy distillation: credit and losses by hand, its gradient as that of the KL, what it refuses and records."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from batch_helpers import ALONE
from group_helpers import accumulated, moved, uneven
from torch import Tensor
from transformers import AutoModelForCausalLM

import cavesson
from cavesson.algorithms.distill import Distill, DistillRun
from cavesson.config import SettingsError
from cavesson.errors import UserError
from cavesson.models.tiny import tiny_model, tiny_tokenizer
from cavesson.train.run import Result, Training
from cavesson.types import Batch, Scores

PROMPTS = ("On the table", "My", "The morning train was", "A dog and")


def length(prompts: list[str], responses: list[str], **_: Any) -> list[float]:
    return [float(len(one)) for one in responses]


def teacher(folder: Path, seed: int = 5) -> str:
    tiny_model(seed=seed).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def settings(folder: Path, **changes: Any) -> DistillRun:
    values: dict[str, Any] = {
        "run": folder / "run", "steps": 2, "batch_size": 8, "samples_per_prompt": 2, "model": {"device": "cpu"},
        "sampling": {"random_length": (1, 6)}, "optimizer": {"learning_rate": 1e-3}, "doctor": {"on_finding": "ignore"},
    }  # fmt: skip
    return DistillRun(**{**values, **changes})


def finish(folder: Path, rewards: Any = None, **changes: Any) -> Result:
    changes = {"teacher": {"path": teacher(folder / "teacher")}, **changes}
    return Training(settings(folder, **changes), prompts=PROMPTS, rewards=rewards).run(lambda *_: None)


def columns(**more: Tensor) -> Batch:
    """Two responses of two tokens and of one."""
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    logprob = torch.tensor([[-1.0, -2.0], [-3.0, 0.0]])
    teacher = torch.tensor([[-1.5, -0.5], [-1.0, 0.0]])
    known = {"attended": mask, "learned": mask, "logprob": logprob, "teacher_logprob": teacher}
    return Batch({**known, "group_in_step": torch.tensor([4, 4]), **more})


def test_an_advantage_is_how_much_likelier_the_token_is_under_the_teacher() -> None:
    found = Distill().credit(columns(), 0.0, ALONE)["advantage"]
    torch.testing.assert_close(found, torch.tensor([[-0.5, 1.5], [2.0, 0.0]]))


def test_a_reward_adds_what_it_is_above_the_other_responses_to_the_prompt() -> None:
    batch = columns(shaped_reward=torch.tensor([1.0, 4.0], dtype=torch.float64))
    found = Distill().credit(batch, 0.0, ALONE)["advantage"]
    torch.testing.assert_close(found, torch.tensor([[-3.5, -1.5], [5.0, 0.0]]))
    alone = Distill(loss_type="full").credit(batch, 0.0, ALONE)["advantage"]
    torch.testing.assert_close(alone, torch.tensor([[-3.0, -3.0], [3.0, 0.0]]))
    assert "advantage" not in Distill(loss_type="full").credit(columns(), 0.0, ALONE)


def test_metrics_by_hand() -> None:
    # Δ is 0.5 and −1.5 in the first response, −2 in the second
    found = Distill().metrics(columns(), ALONE)
    assert found["teacher/kl"] == pytest.approx((0.5 - 1.5 - 2) / 2)
    assert found["teacher/kl_per_token"] == pytest.approx((0.5 - 1.5 - 2) / 3)
    assert found["logprob/teacher"] == pytest.approx(-1.0)


@pytest.mark.parametrize("kind", ["sampled", "full"])
def test_the_expected_gradient_is_that_of_the_reverse_kl(kind: str) -> None:
    """Over all responses of one token, weighted by their probabilities, at ratio 1."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(7, generator=generator, dtype=torch.float64, requires_grad=True)
    q = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(0)
    log_p = logits.log_softmax(0)
    divergence = (log_p.exp() * (log_p - q)).sum()
    (expected,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    ones = torch.ones(7, 1, dtype=torch.float64)
    given = {"attended": ones, "learned": ones, "logprob": log_p.detach()[:, None], "teacher_logprob": q[:, None]}
    algorithm = Distill(loss_type=kind)  # type: ignore[arg-type]
    batch = algorithm.credit(Batch(given), 0.0, ALONE)
    exact = divergence * ones if kind == "full" else None
    loss = algorithm.loss(Scores(log_p[:, None], torch.zeros_like(ones), None, exact), batch).loss
    (found,) = torch.autograd.grad((log_p.detach().exp()[:, None] * loss).sum(), logits)
    torch.testing.assert_close(found, expected)


def test_full_adds_the_divergence_to_the_loss_of_the_reward() -> None:
    algorithm = Distill(loss_type="full", clip=0.1)
    batch = algorithm.credit(columns(shaped_reward=torch.tensor([1.0, 4.0])), 0.0, ALONE)
    now = batch["logprob"] + torch.tensor([[0.05, 0.5], [0.5, 0.0]])
    divergence = torch.tensor([[0.3, 0.4], [0.5, 9.0]])
    found = algorithm.loss(Scores(now, torch.zeros(2, 2), None, divergence), batch)
    # −min(ρ·Â, clip(ρ)·Â) with Â = −3, −3 and 3
    policy = [[3 * math.exp(0.05), 3 * math.exp(0.5)], [-3 * 1.1, 0.0]]
    expected = [[0.3 + policy[0][0], 0.4 + policy[0][1]], [0.5 + policy[1][0], 0.0]]
    torch.testing.assert_close(found.loss * batch["learned"], torch.tensor(expected))
    assert (found.means["policy/clip_fraction"] * batch["learned"]).tolist() == [[0, 0], [1, 0]]


def test_micro_batches_add_up_to_the_batch() -> None:
    batch = uneven(torch.float64)
    batch = batch.with_columns(teacher_logprob=batch["ref_logprob"])
    algorithm = Distill()
    credited, now = algorithm.credit(batch, 0.0, ALONE), moved(batch)
    loss, gradient = accumulated(algorithm, credited, now, 8)
    for size in (1, 3):
        other, same = accumulated(algorithm, credited, now, size)
        assert other == pytest.approx(loss, abs=1e-12)
        torch.testing.assert_close(same, gradient)


@pytest.mark.parametrize("kind", ["sampled", "full"])
def test_the_record_has_what_the_teacher_says_of_every_token(tmp_path: Path, kind: str) -> None:
    """Against transformers alone; there is no reward, and it is null."""
    result = finish(tmp_path, distill={"loss_type": kind}, sampling={"random_length": (1, 6), "temperature": 0.7})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "teacher")
    run = cavesson.open(tmp_path / "run")
    rows, tokens = (table.to_pylist() for table in (run.rows(), run.tokens(0)))
    assert len(rows) == 16 and {row["reward"] for row in rows} == {None}
    for row in (row for row in rows if row["step"] == 0):
        mine = [one for one in tokens if one["sample"] == row["sample"]]
        ids = [*row["prompt_ids"], *(one["token_id"] for one in mine)]
        with torch.no_grad():
            logprobs = (model(torch.tensor([ids])).logits[0, :-1] / 0.7).log_softmax(-1)
        expected = [float(logprobs[at - 1, ids[at]]) for at in range(len(row["prompt_ids"]), len(ids))]
        assert [one["teacher_logprob"] for one in mine] == pytest.approx(expected, abs=1e-4)
        assert row["teacher_kl"] == pytest.approx(sum(one["logprob"] for one in mine) - sum(expected), abs=1e-3)
    kls = [row["teacher_kl"] for row in rows if row["step"] == 0]
    assert result.metrics[0]["teacher/kl"] == pytest.approx(sum(kls) / 8, abs=1e-4)
    assert not [name for metrics in result.metrics for name in metrics if name.startswith("reward")]


@pytest.mark.parametrize("kind", ["sampled", "full"])
def test_from_itself_there_is_nothing_to_learn(tmp_path: Path, kind: str) -> None:
    first = finish(tmp_path, teacher={"path": "tiny"}, distill={"loss_type": kind}).metrics[0]
    assert abs(first["teacher/kl"]) < 1e-5 and first["optim/grad_norm"] < 1e-5


def test_a_divergence_is_that_of_the_responses(tmp_path: Path) -> None:
    """The exact reverse KL and its estimate from samples agree, within their standard error."""
    changes = {"steps": 1, "batch_size": 256, "distill": {"loss_type": "full"}}
    first = finish(tmp_path, **changes).metrics[0]
    per_token = [
        one["logprob"] - one["teacher_logprob"] for one in cavesson.open(tmp_path / "run").tokens(0).to_pylist()
    ]
    mean = sum(per_token) / len(per_token)
    error = math.sqrt(sum((one - mean) ** 2 for one in per_token)) / len(per_token)
    assert first["teacher/kl_per_token"] == pytest.approx(mean, abs=1e-4)
    assert abs(first["loss/divergence"] - mean) < 4 * error


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_loss_of_a_run_is_that_of_whole_distributions(tmp_path: Path, beta: float) -> None:
    """Against transformers and the definition, on the responses of the first step."""
    first = finish(tmp_path, distill={"loss_type": "full", "beta": beta}).metrics[0]
    student, model = tiny_model(), AutoModelForCausalLM.from_pretrained(tmp_path / "teacher")
    run = cavesson.open(tmp_path / "run")
    tokens, found = run.tokens(0).to_pylist(), []
    for row in (row for row in run.rows().to_pylist() if row["step"] == 0):
        ids = [*row["prompt_ids"], *(one["token_id"] for one in tokens if one["sample"] == row["sample"])]
        with torch.no_grad():
            p, q = (
                one(torch.tensor([ids])).logits[0, len(row["prompt_ids"]) - 1 : -1].softmax(-1)
                for one in (student, model)
            )
        m = beta * q + (1 - beta) * p
        kls = [(a * (a / b).log()).sum(-1) for a, b in ((q, m), (p, m), (q, p), (p, q))]
        found.append(kls[2] if beta == 0 else kls[3] if beta == 1 else beta * kls[0] + (1 - beta) * kls[1])
    assert first["loss/divergence"] == pytest.approx(float(torch.cat(found).mean()), rel=1e-4)


RESPONSES = (" lay a letter.", " dog", " late again, and nobody came to meet it.", " three cats")
GIVEN: dict[str, Any] = {
    "steps": 3, "samples_per_prompt": 1, "batch_size": 16, "sampling": {"max_new_tokens": 12},
    "distill": {"loss_type": "full", "beta": 0.3, "own_share": 0.5},
}  # fmt: skip


def mixed(folder: Path, **changes: Any) -> Result:
    """A run in which the data give about half of the responses."""
    values = settings(folder, **{"teacher": {"path": teacher(folder / "teacher")}, **GIVEN, **changes})
    return Training(values, prompts={"prompt": PROMPTS, "response": RESPONSES}).run(lambda *_: None)


def test_the_record_says_which_responses_the_data_give(tmp_path: Path) -> None:
    mixed(tmp_path)
    run, tokenizer = cavesson.open(tmp_path / "run"), tiny_tokenizer()
    rows = run.rows().to_pylist()
    tokens = [one for step in range(3) for one in run.tokens(step).to_pylist()]
    assert len(rows) == 48 and {row["split"] for row in rows} == {"train", "given"}
    for row in rows:
        mine = [one for one in tokens if (one["step"], one["sample"]) == (row["step"], row["sample"])]
        is_given, ids = row["split"] == "given", [one["token_id"] for one in mine]
        assert {one["learned"] for one in mine} == {True}
        assert {one["source"] for one in mine} == {"data" if is_given else "sampled"}
        assert {one["sampler_logprob"] is None for one in mine} == {is_given}
        assert (row["policy_version"] is None) == (row["sampler_gap"] is None) == is_given
        assert None not in {one["logprob"] for one in mine} | {one["teacher_logprob"] for one in mine}
        if is_given:
            response = RESPONSES[PROMPTS.index(row["prompt"])]
            whole = [*tokenizer(response)["input_ids"], tokenizer.eos_token_id]
            assert ids == whole[:12] and row["response"] == tokenizer.decode(ids, skip_special_tokens=True)
            assert row["finish_reason"] == ("eos" if len(whole) <= 12 else "length")
    # One is as long as the limit, and not cut.
    assert {("eos", 12), ("length", 12)} <= {
        (row["finish_reason"], row["length"]) for row in rows if row["split"] == "given"
    }
    given = run.sql("SELECT count(*) FROM rows WHERE split = 'given'").fetchall()
    assert given == [(sum(row["split"] == "given" for row in rows),)]


def test_metrics_are_those_of_the_models_own_responses(tmp_path: Path) -> None:
    result = mixed(tmp_path)
    for step, metrics in enumerate(result.metrics):
        rows = cavesson.open(tmp_path / "run").rows(steps=[step]).to_pylist()
        own = [row for row in rows if row["split"] == "train"]
        assert 0 < len(own) < len(rows)
        assert metrics["length/response_mean"] == pytest.approx(sum(row["length"] for row in own) / len(own))
        assert metrics["teacher/kl"] == pytest.approx(sum(row["teacher_kl"] for row in own) / len(own), abs=1e-3)
        assert metrics["finish/eos"] == sum(row["finish_reason"] == "eos" for row in own) / len(own)


def whole_ids(run: cavesson.Run) -> list[tuple[list[int], int]]:
    """Prompt and response of each rollout of the first step, and the length of the prompt; given ones from the data."""
    tokenizer, tokens, found = tiny_tokenizer(), run.tokens(0).to_pylist(), []
    for row in (row for row in run.rows().to_pylist() if row["step"] == 0):
        own = [one["token_id"] for one in tokens if one["sample"] == row["sample"]]
        if row["split"] == "given":
            own = tokenizer(RESPONSES[PROMPTS.index(row["prompt"])])["input_ids"]
            own = [*own, tokenizer.eos_token_id][:12]
        prompt = tokenizer(row["prompt"])["input_ids"]
        found.append(([*prompt, *own], len(prompt)))
    return found


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_given_responses_count_in_the_loss_as_the_others_do(tmp_path: Path, beta: float) -> None:
    """Against transformers and the definition, one response after the other."""
    first = mixed(tmp_path, distill={**GIVEN["distill"], "beta": beta}).metrics[0]
    student, model = tiny_model(), AutoModelForCausalLM.from_pretrained(tmp_path / "teacher")
    found = []
    for ids, start in whole_ids(cavesson.open(tmp_path / "run")):
        with torch.no_grad():
            p, q = (one(torch.tensor([ids])).logits[0, start - 1 : -1].softmax(-1) for one in (student, model))
        m = beta * q + (1 - beta) * p
        of_q, of_p = ((a * (a / b).log()).sum(-1) for a, b in ((q, m), (p, m)))
        # The mixture is p for β = 0 and q for β = 1, so these are the forward KL and the reverse KL.
        found.append(of_q if beta == 0 else of_p if beta == 1 else beta * of_q + (1 - beta) * of_p)
    assert first["loss/divergence"] == pytest.approx(float(torch.cat(found).mean()), rel=1e-4)


def test_the_loss_with_given_responses_is_that_of_trl(tmp_path: Path) -> None:
    gkd = pytest.importorskip("trl.experimental.gkd.gkd_trainer")
    first = mixed(tmp_path).metrics[0]
    student, model = tiny_model(), AutoModelForCausalLM.from_pretrained(tmp_path / "teacher")
    sequences = whole_ids(cavesson.open(tmp_path / "run"))
    width = max(len(ids) for ids, _ in sequences)
    ids = torch.tensor([[*one, *[0] * (width - len(one))] for one, _ in sequences])
    inside = torch.tensor([[float(place < len(one)) for place in range(width)] for one, _ in sequences])
    labels = torch.tensor(
        [[one[i] if start <= i < len(one) else -100 for i in range(width)] for one, start in sequences]
    )
    with torch.no_grad():
        logits = [one(input_ids=ids, attention_mask=inside).logits[:, :-1] for one in (student, model)]
    expected = gkd.GKDTrainer.generalized_jsd_loss(*logits, labels[:, 1:], beta=0.3)
    assert first["loss/divergence"] == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("share", [0.0, 0.25])
def test_the_share_of_own_responses(tmp_path: Path, share: float) -> None:
    """Within four standard errors; a step without any has no metrics of them."""
    result = mixed(tmp_path, steps=2, batch_size=128, distill={**GIVEN["distill"], "own_share": share})
    own = [row["split"] == "train" for row in cavesson.open(tmp_path / "run").rows().to_pylist()]
    assert abs(sum(own) / 256 - share) <= 4 * math.sqrt(share * (1 - share) / 256)
    assert ("length/response_mean" in result.metrics[0]) == (share > 0)
    assert result.metrics[1]["loss/divergence"] < result.metrics[0]["loss/divergence"]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({}, "'response' is missing"),
        ({"response": None}, "'response' is null"),
    ],
)
def test_a_row_without_a_response_is_an_error_that_names_it(
    tmp_path: Path, second: dict[str, Any], message: str
) -> None:
    file = tmp_path / "rows.jsonl"
    lines = [{"prompt": "My", "response": " dog"}, {"prompt": "On the table", **second}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match=rf"rows.jsonl line 2: {message}"):
        Training(settings(tmp_path, teacher={"path": "tiny"}, **GIVEN, data={"path": str(file)}))


def test_data_without_responses_are_an_error(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "My"}\n')
    values = settings(tmp_path, teacher={"path": "tiny"}, **GIVEN, data={"path": str(file)})
    for prompts, place in ((None, "rows.jsonl line 1"), (PROMPTS, "the prompts: row 1")):
        with pytest.raises(UserError, match=f"{place}: the columns prompt fit no format of prompts with a response"):
            Training(values, prompts=prompts)


def test_a_reward_is_added(tmp_path: Path) -> None:
    result = finish(tmp_path, rewards=length)
    run = cavesson.open(tmp_path / "run")
    rows = [row for row in run.rows().to_pylist() if row["step"] == 0]
    tokens = run.tokens(0).to_pylist()
    for row in rows:
        (other,) = (one for one in rows if one["group"] == row["group"] and one["sample"] != row["sample"])
        for one in (one for one in tokens if one["sample"] == row["sample"]):
            expected = row["reward"] - other["reward"] + one["teacher_logprob"] - one["logprob"]
            assert one["advantage"] == pytest.approx(expected, rel=1e-3, abs=1e-3)
    assert result.metrics[0]["reward/mean"] == pytest.approx(sum(row["reward"] for row in rows) / len(rows))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "two": ({"teacher": {"path": "tiny", "servers": ["http://a"]}}, "path has no effect beside servers"),
    "whole distributions": (
        {"teacher": {"servers": ["http://a"]}, "distill": {"loss_type": "full"}}, 'loss_type "full" needs whole',
    ),
    "temperature": (
        {"teacher": {"servers": ["http://a"]}, "sampling": {"temperature": 0.7}}, "at temperature 1, and sampling.",
    ),
    "beta": ({"teacher": {"path": "tiny"}, "distill": {"beta": 0.5}}, "distill.beta has no effect with loss_type"),
    "given": (
        {"teacher": {"path": "tiny"}, "distill": {"own_share": 0.5}},
        'distill.own_share has no effect with loss_type "sampled", which needs tokens that the policy has sampled',
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_settings_without_effect_are_refused(tmp_path: Path, case: str) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(SettingsError, match=message):
        settings(tmp_path, **changes)


@pytest.mark.parametrize(
    ("rewards", "changes", "message"),
    [
        (None, {"teacher": {}}, "there is no teacher: set teacher.path to a model"),
        (None, {"shaping": {"scale": True}}, "shaping has no effect without a reward"),
        (None, {"cleaning": {"discard": ["a"], "discard_reward": -1}}, "cleaning.discard has no effect without"),
        (length, {"samples_per_prompt": 1}, "samples_per_prompt is 1: set it to 2 or more"),
        (length, {"distill": {"loss_type": "full", "own_share": 0.5}}, "and distill.own_share is 0.5: set it to 1"),
    ],
)
def test_settings_that_contradict_the_rewards_are_refused(
    tmp_path: Path, rewards: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        finish(tmp_path, rewards=rewards, **changes)


def test_a_teacher_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    folder = tmp_path / "other"
    tiny_model().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer.json"
    text = file.read_text(encoding="utf-8")
    exchanged = text.replace('"a": ', '"\x00": ').replace('"b": ', '"a": ').replace('"\x00": ', '"b": ')
    assert exchanged != text
    file.write_text(exchanged, encoding="utf-8")
    with pytest.raises(UserError, match=r"the teacher .*other has a different vocabulary from the policy tiny"):
        finish(tmp_path, teacher={"path": str(folder)})

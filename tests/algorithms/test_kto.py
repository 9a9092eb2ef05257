import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from example_helpers import BEGINNINGS, GRUFF, KIND, Row, build, explained, finish, logprobs, loss_of, pairs, quiet
from example_helpers import settings as settings_of
from hypothesis import given
from hypothesis import strategies as st

from cavesson.algorithms.kto import KTO
from cavesson.algorithms.reference_point import _others
from cavesson.errors import UserError
from cavesson.findings.finding import Finding
from cavesson.findings.settings import label_balance
from cavesson.models.tiny import tiny_model, tiny_tokenizer
from cavesson.train.run import Training
from cavesson.types import Batch, ResponseScores


def labelled(count: int = 24) -> list[Row]:
    """Of every three responses, two are friendly and labelled good; prompts repeat after six rows."""
    return [
        {"prompt": BEGINNINGS[i % 6], "completion": (GRUFF if i % 3 == 1 else KIND)[i // 2 % 4], "label": i % 3 != 1}
        for i in range(count)
    ]


def batch(labels: list[bool], reference: list[float], point: float) -> Batch:
    columns = {"label": torch.tensor(labels).float(), "reference": torch.tensor(reference)}
    known = {"reference_point": point, "desirable_share": sum(labels) / len(labels)}
    return Batch({**columns, **{name: torch.full((len(labels),), value) for name, value in known.items()}})


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


# Log-ratios of 2 and −1 with good labels, and of 3 with a bad one.
SEEN, GIVEN = ResponseScores(torch.tensor([-3.0, -5.0, -1.0])), batch([True, True, False], [-5.0, -4.0, -4.0], 0.5)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1 - sigmoid(0.15), 1 - sigmoid(-0.15), 1 - sigmoid(-0.25)]),
        ({"beta": 2.0}, [1 - sigmoid(3), 1 - sigmoid(-3), 1 - sigmoid(-5)]),
        (
            {"desirable_weight": 0.5, "undesirable_weight": 4.0},
            [0.5 - 0.5 * sigmoid(0.15), 0.5 - 0.5 * sigmoid(-0.15), 4 - 4 * sigmoid(-0.25)],
        ),
    ],
)
def test_losses_by_hand(settings: dict[str, Any], expected: list[float]) -> None:
    assert KTO(**settings).loss(SEEN, GIVEN).loss.tolist() == pytest.approx(expected)
    assert loss_of(KTO(**settings), SEEN, GIVEN)[0] == pytest.approx(sum(expected) / 3)


def test_metrics_are_means_over_the_responses_with_a_label() -> None:
    means = loss_of(KTO(beta=0.5), SEEN, GIVEN)[1]
    assert means == pytest.approx(
        {
            "loss/total": (1 - sigmoid(0.75) + 1 - sigmoid(-0.75) + 1 - sigmoid(-1.25)) / 3,
            "kto/accuracy": 1 / 3,
            "kto/reference_point": 0.5,
            "kto/reward_desirable": 0.5 * (2 - 1) / 2,
            "kto/reward_undesirable": 0.5 * 3,
            "kto/reward_margin": 0.25 - 1.5,
            "logprob/desirable": -4,
            "logprob/undesirable": -1,
        }
    )


def test_a_label_that_a_batch_has_not_is_not_measured() -> None:
    only_good = batch([True, True, True], [-5.0, -4.0, -4.0], 0.5)
    means = loss_of(KTO(), SEEN, only_good)[1]
    assert {name for name in means if name.startswith(("kto/reward", "logprob"))} == {
        "kto/reward_desirable",
        "logprob/desirable",
    }


@given(st.floats(-50, 50), st.floats(0, 50), st.floats(0.01, 2))
def test_a_label_and_its_opposite_cost_one_together(log_ratio: float, point: float, beta: float) -> None:
    """σ(x) + σ(−x) = 1."""
    both = batch([True, False], [0.0, 0.0], point)
    losses = KTO(beta=beta).loss(ResponseScores(torch.tensor([log_ratio, log_ratio])), both).loss
    assert float(losses.sum()) == pytest.approx(1, abs=1e-5)


# --- mismatched responses ------------------------------------------------------------------------------------------


def test_each_prompt_gets_the_response_before_it() -> None:
    assert _others([(1,), (2,), (3,), (4,), (5,)], [[0, 1, 2], [3, 4]]) == [2, 0, 1, 4, 3]


def test_the_same_prompt_is_skipped_and_a_batch_of_one_borrows() -> None:
    # Chosen and rejected of a pair are neighbours; the last batch has one row, and another has one prompt only.
    assert _others([(1,), (1,), (2,), (2,)], [[0, 1, 2, 3]]) == [3, 3, 1, 1]
    assert _others([(1,), (2,), (3,)], [[0, 1], [2]]) == [1, 0, 1]
    assert _others([(1,), (1,), (2,), (3,)], [[0, 1], [2, 3]]) == [3, 3, 3, 2]


@given(st.lists(st.integers(0, 3), min_size=2, max_size=30), st.integers(2, 7))
def test_a_mismatched_response_is_always_to_another_prompt(prompts: list[int], size: int) -> None:
    given = [(prompt,) for prompt in prompts]
    batches = [range(start, min(start + size, len(given))) for start in range(0, len(given), size)]
    if len(set(given)) == 1:
        with pytest.raises(UserError, match="answer the same prompt"):
            _others(given, batches)
        return
    found = _others(given, batches)
    assert all(given[row] != given[other] for row, other in enumerate(found))
    for rows in batches:  # of the same batch wherever that has another prompt
        if len({given[row] for row in rows}) > 1:
            assert all(found[row] in rows for row in rows)


# --- runs ----------------------------------------------------------------------------------------------------------


def log_ratio(prompt: str, response: str, reference: Any) -> float:
    text = prompt + response
    return float(logprobs(text, len(prompt)).sum() - logprobs(text, len(prompt), reference).sum())


def moved(folder: Path) -> Any:
    model = tiny_model(seed=1)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(3)
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return model


@pytest.mark.parametrize("changes", [{}, {"update__micro_batch_size": 3, "update__layout": "padded"}], ids=str)
@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_the_first_step_is_the_formula_on_every_response_alone(
    tmp_path: Path, loss_type: str, changes: dict[str, Any]
) -> None:
    rows, reference = labelled(12), moved(tmp_path / "reference")
    changes = {**changes, "reference__path": str(tmp_path / "reference"), "kto__loss_type": loss_type}
    weights = {"kto__beta": 0.3, "kto__desirable_weight": 0.5, "kto__undesirable_weight": 1.5}
    seen = finish("kto", tmp_path, rows, steps=1, data__validation=0.34, **weights, **changes).metrics[0]
    for prefix, part in (("", rows[:8]), ("eval/", rows[8:])):
        responses = [row["completion"] for row in part]
        estimates = [
            log_ratio(row["prompt"], responses[number - 1], reference) for number, row in enumerate(part)
        ]  # at number 0, −1 is the last
        point = max(0.0, sum(estimates) / len(part)) if loss_type == "kto" else 0.0
        losses, rewards = [], {True: [], False: []}
        for row in part:
            ratio = log_ratio(row["prompt"], row["completion"], reference)
            rewards[row["label"]].append(0.3 * ratio)
            gain = 0.3 * (ratio - point)
            losses.append(0.5 * (1 - sigmoid(gain)) if row["label"] else 1.5 * (1 - sigmoid(-gain)))
        assert seen[f"{prefix}loss/total"] == pytest.approx(sum(losses) / len(part), abs=1e-4)
        means = {label: sum(values) / len(values) for label, values in rewards.items()}
        assert seen[f"{prefix}kto/reward_margin"] == pytest.approx(means[True] - means[False], abs=1e-3)
        assert (loss_type == "kto") == (f"{prefix}kto/reference_point" in seen)
        if loss_type == "kto":
            assert point > 1 and seen[f"{prefix}kto/reference_point"] == pytest.approx(point, abs=1e-3)


def test_it_learns_what_is_good(tmp_path: Path) -> None:
    result = finish("kto", tmp_path, labelled(48), epochs=4, data__validation=0.25)
    first, last = result.metrics[0], result.final
    assert first["loss/total"] == pytest.approx(0.5, abs=1e-6)
    assert last["eval/loss/total"] < 0.8 * first["eval/loss/total"]
    assert last["eval/kto/accuracy"] == 1


def test_pairs_are_read_as_a_good_and_a_bad_response(tmp_path: Path) -> None:
    paired = finish("kto", tmp_path / "pairs", pairs(8), steps=2)
    rows = [
        {"prompt": row["prompt"], "response": row[side], "label": side == "chosen"}
        for row in pairs(8)
        for side in ("chosen", "rejected")
    ]
    single = finish("kto", tmp_path / "single", rows, steps=2)
    for one, other in zip(paired.metrics, single.metrics, strict=True):
        assert one["loss/total"] == other["loss/total"] and one["logprob/undesirable"] == other["logprob/undesirable"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["packed", "grouped", "padded"])
def test_in_the_whole_first_pass_policy_and_reference_are_the_same_numbers(
    tmp_path: Path, layout: str, dtype: torch.dtype
) -> None:
    model = tiny_model(dtype=dtype)
    made = settings_of(
        "kto", tmp_path, labelled(19), data__shuffle=True, data__validation=0.25, update__layout=layout,
        update__micro_batch_size=3, batch_size=5, optimizer__learning_rate=1e-30, epochs=1,
    )  # fmt: skip
    seen = Training(made, model=model, tokenizer=tiny_tokenizer()).run(quiet)
    for step in seen.metrics:
        assert step["kto/reference_point"] == 0 and step["kto/reward_desirable"] == 0
        assert step["loss/total"] == pytest.approx(0.5, rel=1e-6)


def test_a_mismatched_response_is_cut_at_the_limit(tmp_path: Path) -> None:
    result = finish("kto", tmp_path, labelled(8), steps=1, data__max_length=12)
    assert result.metrics[0]["data/tokens"] <= 2 * 8 * 12


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{**row, "label": True} for row in labelled(8)], "are labelled good: KTO needs some bad ones; to learn"),
        ([{**row, "label": False} for row in labelled(8)], "are labelled bad: KTO needs some good ones$"),
        ([*labelled(3), {"prompt": "a", "completion": "b"}], "line 4: 'label' is missing, expected true or false"),
        ([*labelled(3), {"prompt": "a", "completion": "b", "label": 4}], "line 4: 'label' is 4, expected true or"),
        ([{"prompt": "a", "completion": "b"}], "line 1: 'label' is missing, expected true or false"),
        ([{"prompt": "a", "label": True}], r"fit no format of labelled responses \(prompt \+ completion \+ label, or"),
    ],
)
def test_data_without_both_labels_is_refused(tmp_path: Path, rows: list[Row], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build("kto", tmp_path, rows)


def test_one_prompt_has_no_reference_point(tmp_path: Path) -> None:
    rows = [{**row, "prompt": "The ferry"} for row in labelled(8)]
    with pytest.raises(UserError, match="apo_zero_unpaired"):
        finish("kto", tmp_path, rows)
    finish("kto", tmp_path / "apo", rows, kto__loss_type="apo_zero_unpaired")


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"batch_size": 1}, "batch_size 1"), ({"data__stream": True}, "data.stream"), ({"kto__beta": 0}, "beta")],
)
def test_settings_that_cannot_be_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build("kto", tmp_path, labelled(), **changes)


def test_every_metric_is_explained_and_every_explained_one_is_there(tmp_path: Path) -> None:
    result = finish("kto", tmp_path, labelled(), steps=1, data__validation=0.25)
    assert set(result.metrics[0]) | set(result.final) == explained("kto.md")


def test_rows_of_a_mix_have_their_places(tmp_path: Path) -> None:
    sources = []
    for name, rows in {"a": labelled(7), "b": labelled(5)[::-1]}.items():
        sources.append({"path": str(tmp_path / f"{name}.jsonl")})
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    result = finish("kto", tmp_path, labelled(2), steps=1, batch_size=12, data__path=None, data__mix=sources)
    assert result.metrics[0]["loss/total"] == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize(
    ("counts", "weights", "healthy"),
    [
        ((50, 50), (1.0, 1.0), True),
        ((40, 30), (1.0, 1.0), True),  # 4/3
        ((41, 30), (1.0, 1.0), False),
        ((49, 50), (1.0, 1.0), False),
        ((10, 90), (9.0, 1.0), True),
        ((10, 90), (1.0, 0.1), True),  # 10/9
        ((10, 90), (1.0, 1.0), False),
    ],
)
def test_labels_balance_from_one_to_four_thirds(
    counts: tuple[int, int], weights: tuple[float, float], healthy: bool
) -> None:
    found = label_balance(*counts, *weights)
    assert isinstance(found, Finding) != healthy
    if isinstance(found, Finding):  # the weight that it names is one that it accepts
        assert not isinstance(label_balance(*counts, float(found.fix.split(" = ")[1]), weights[1]), Finding)

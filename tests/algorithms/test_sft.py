import math
from pathlib import Path
from typing import Any

import pytest
import torch
from example_helpers import build, demonstrations, explained, finish, logprobs, loss_of, pairs, quiet, settings

import cavesson
from cavesson.algorithms.sft import SFT
from cavesson.errors import UserError
from cavesson.models.neftune import neftune
from cavesson.models.sequences import lay_out
from cavesson.models.trained import load_trained
from cavesson.train.run import Training
from cavesson.types import Batch, Scores

LAYOUTS = ("packed", "grouped", "padded")


def likelihoods(start: bool = False) -> list[float]:
    """−log π of every learned token of the first eight rows, each row by itself."""
    rows = demonstrations()[:8]
    found = [logprobs(row["prompt"] + row["response"], 1 if start else len(row["prompt"])) for row in rows]
    return [-float(x) for row in found for x in row]


def test_loss_by_hand():
    mask = torch.tensor([[0.0, 1, 1], [0, 1, 0]])
    batch = Batch({"attended": mask, "learned": mask})
    logprob = torch.tensor([[0.0, -1, -2], [0, -6, 0]])
    loss, means = loss_of(SFT(), Scores(logprob, torch.tensor([[0.0, 3, 1], [0, 2, 0]]), None), batch)
    assert loss == pytest.approx((1 + 2 + 6) / 3)  # every token counts once, whatever row it is in
    assert means == pytest.approx({"loss/nll": 3, "policy/entropy": 2})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("learn", ["response", "all"])
def test_first_loss_is_what_the_model_says_of_every_row_alone(tmp_path: Path, layout, learn):
    seen = finish("sft", tmp_path, demonstrations(), steps=1, update__layout=layout, data__learn=learn).metrics[0]
    expected = likelihoods(start=learn == "all")
    assert seen["loss/nll"] == pytest.approx(sum(expected) / len(expected), abs=1e-5)
    assert seen["perplexity"] == pytest.approx(math.exp(sum(expected) / len(expected)), rel=1e-4)
    assert seen["optim/weight"] == len(expected)


@pytest.mark.parametrize("changes", [{}, {"sft__neftune_alpha": 5.0}], ids=["plain", "neftune"])
def test_layout_and_micro_batch_size_change_nothing(tmp_path: Path, changes: dict[str, Any]):
    smooth = {**changes, "optimizer__eps": 1e-3}
    whole = finish("sft", tmp_path / "whole", demonstrations(), **smooth)
    for layout in LAYOUTS:
        parts = finish(
            "sft", tmp_path / layout, demonstrations(), update__layout=layout, update__micro_batch_size=3, **smooth
        )
        # Grouping puts examples in another order, and with it their noise.
        if layout != "grouped" or not changes:
            for one, other in zip(whole.metrics, parts.metrics, strict=True):
                assert other["loss/nll"] == pytest.approx(one["loss/nll"], abs=1e-5)


def test_noise_is_for_training_only(tmp_path: Path):
    plain = finish("sft", tmp_path / "plain", demonstrations(), steps=1, data__validation=0.3)
    noisy = finish("sft", tmp_path / "noisy", demonstrations(), steps=1, data__validation=0.3, sft__neftune_alpha=30.0)
    assert noisy.metrics[0]["eval/loss/nll"] == plain.metrics[0]["eval/loss/nll"]
    assert abs(noisy.metrics[0]["loss/nll"] - plain.metrics[0]["loss/nll"]) > 1e-3
    again = finish("sft", tmp_path / "again", demonstrations(), steps=1, data__validation=0.3, sft__neftune_alpha=30.0)
    assert again.metrics[0]["loss/nll"] == noisy.metrics[0]["loss/nll"]


def test_noise_is_as_large_as_the_paper_says():
    ids, length = torch.zeros(2, 50, dtype=torch.long), torch.tensor([50, 8])
    batch = Batch({"length": length, "step": torch.tensor([3, 3]), "row": torch.tensor([0, 1])})
    noise = neftune(5.0, seed=0)(torch.zeros(2, 50, 64), lay_out(ids, length, None), batch)
    for row, tokens in zip(noise, length.tolist(), strict=True):
        bound = 5 / (tokens * 64) ** 0.5
        assert row.abs().max() <= bound
        assert row[:tokens].std() == pytest.approx(bound / 3**0.5, rel=0.1)  # of a uniform distribution
        assert row[tokens:].eq(0).all()


def test_held_out_rows_are_the_last_and_are_measured_alone(tmp_path: Path):
    rows = demonstrations(16)
    training = build("sft", tmp_path, rows, data__validation=0.25, steps=1)
    assert [len(part) for part in (training.trainer.examples.train.items, training.trainer.examples.held_out)] == [
        12,
        4,
    ]
    seen = training.run(quiet).metrics[0]
    expected = torch.cat([logprobs(row["prompt"] + row["response"], len(row["prompt"])) for row in rows[12:]])
    assert seen["eval/loss/nll"] == pytest.approx(-float(expected.mean()), abs=1e-5)
    assert seen["eval/perplexity"] == pytest.approx(math.exp(-float(expected.mean())), rel=1e-4)


def test_it_learns_what_it_is_shown(tmp_path: Path):
    result = finish(
        "sft", tmp_path, demonstrations(48), epochs=12, optimizer__learning_rate=5e-3, data__validation=0.25
    )
    # Of 24 different sentences the words repeat: far below the 258 of a model that knows nothing.
    assert result.metrics[0]["eval/perplexity"] > 200
    assert result.final["eval/perplexity"] < 2
    recorded = cavesson.open(tmp_path / "run").steps()["eval/perplexity"].to_pylist()
    assert recorded[-1] == result.final["eval/perplexity"]
    saved, _ = load_trained(str(tmp_path / "run"))
    held_out = demonstrations(48)[36:]
    expected = torch.cat([logprobs(row["prompt"] + row["response"], len(row["prompt"]), saved) for row in held_out])
    assert result.final["eval/loss/nll"] == pytest.approx(-float(expected.mean()), abs=1e-5)


def test_a_model_from_nothing(tmp_path: Path):
    new = {"vocabulary": "characters", "layers": 1, "hidden_size": 32, "heads": 2, "max_length": 64}
    result = finish("sft", tmp_path, demonstrations(), model__new=new)
    characters = {c for row in demonstrations() for c in row["prompt"] + row["response"]}
    assert len(result.tokenizer) == len(characters) + 3  # end, pad, unknown
    assert result.metrics[0]["loss/nll"] == pytest.approx(math.log(len(characters) + 3), rel=0.1)
    model, tokenizer = load_trained(str(tmp_path / "run"))
    assert tokenizer("The ferry")["input_ids"] == result.tokenizer("The ferry")["input_ids"]
    assert model.config.num_hidden_layers == 1


def test_adapters_alone_learn(tmp_path: Path):
    result = finish("sft", tmp_path, demonstrations(), model__lora={"rank": 2, "alpha": 4})
    learned = {name for name, parameter in result.policy.named_parameters() if parameter.requires_grad}
    assert learned
    assert all("lora_" in name for name in learned)
    assert (tmp_path / "run" / "model" / "adapter_config.json").exists()


def test_noise_cannot_be_negative(tmp_path: Path):
    with pytest.raises(UserError, match="neftune_alpha"):
        settings("sft", tmp_path, demonstrations(), sft__neftune_alpha=-1)


def test_every_metric_is_explained_and_every_explained_one_is_there(tmp_path: Path):
    result = finish("sft", tmp_path, demonstrations(), steps=1, data__validation=0.25)
    assert set(result.metrics[0]) | set(result.final) == explained("sft.md")


def test_what_a_stream_drops_is_counted_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    long = {"prompt": "a", "response": "x" * 50}
    rows = [*demonstrations(8), long, *demonstrations(8), long, *demonstrations(8)]
    limits = {"data__max_length": 40, "data__overlong": "drop"}
    build("sft", tmp_path, rows, data__stream=True, data__shuffle=False, steps=3, **limits).run()
    lines = capsys.readouterr().out.splitlines()
    counted = f"2 × longer than data.max_length = 40 tokens, and dropped (first: {tmp_path}/rows.jsonl: row 9)"
    (place,) = [number for number, line in enumerate(lines) if "longer than" in line]
    assert lines[place] == counted
    assert lines[place - 1].startswith("step 2 ")
    build("sft", tmp_path / "memory", rows, steps=1, **limits).run()
    said = [line for line in capsys.readouterr().out.splitlines() if "longer than" in line]
    assert said == [counted.replace("/rows", "/memory/rows")]


@pytest.mark.parametrize("algorithm", ["sft", "reward-model", "dpo"])
def test_other_examples_than_those_of_the_run_are_refused(tmp_path: Path, algorithm: str):
    rows = demonstrations() if algorithm == "sft" else pairs()
    changes = {"steps": 2, "checkpoint__every": 1}
    finish(algorithm, tmp_path, rows, **changes)
    more = changes | {"steps": 3}
    other = settings(algorithm, tmp_path, [rows[1], rows[0], *rows[2:]], **more)
    with pytest.raises(UserError, match="run was started with other examples; resume it with the data as it was then"):
        Training(other, resume=True)
    assert Training(settings(algorithm, tmp_path, rows, **more), resume=True).run(quiet).metrics

"""A run from Python: objects instead of names, and how it is gone on with."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from train_helpers import LORA, PROMPTS, build, farthest, finish, quiet, settings, uneven, weights
from transformers import AutoModelForCausalLM

import cavesson
from cavesson import cli
from cavesson.errors import TerminatedError
from cavesson.models.tiny import tiny_model, tiny_tokenizer
from cavesson.models.trained import load_trained


def test_fifteen_lines_train_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def short_and_positive(prompts: Sequence[str], responses: Sequence[str], **columns: Any) -> list[float]:
        return [("good" in response) - 0.01 * len(response) for response in responses]

    training = cavesson.Training(
        cavesson.PPORun(run="runs/python", steps=2, batch_size=4, model={"path": "tiny", "device": "cpu"}),
        prompts=["The hotel room", "My flight yesterday", "The new coffee machine"],
        rewards=short_and_positive,
    )
    result = training.run()
    rows = cavesson.open(result.folder).rows().to_pylist()
    assert len(rows) == 8 and {row["prompt"] for row in rows} <= set(training.collector.prompts.texts)
    for row in rows:
        expected = ("good" in row["response"]) - 0.01 * len(row["response"])
        assert row["reward"] == pytest.approx(expected) and dict(row["reward_parts"]) == {
            "short_and_positive": pytest.approx(expected)
        }
    assert len(result.metrics) == 2


def test_a_model_object_is_trained_in_place_and_does_not_depend_on_its_name(tmp_path: Path) -> None:
    model = tiny_model(seed=3)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    result = finish(tmp_path / "run", {"model": model, "tokenizer": tiny_tokenizer()}, model__path="no-such-model")
    after = dict(model.named_parameters())
    assert result.policy.model is model and farthest(before, after) > 1e-4
    assert result.metrics[0]["kl/objective"] == 0.0  # the reference is a copy of it as it was
    named = finish(tmp_path / "other", {"model": tiny_model(seed=3), "tokenizer": tiny_tokenizer()})
    names = [cavesson.open(tmp_path / folder).facts["model"] for folder in ("run", "other")]
    assert names == ["no-such-model", "a model given in Python"]
    assert farthest(weights(named.policy), weights(result.policy)) == 0.0


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"model__path": "a", "model__gguf_file": "a.gguf"}, "model.gguf_file"),
        ({"model__path": "a", "model__quantization": "nf4", "model__lora": LORA}, "model.quantization"),
    ],
)
def test_how_a_model_is_loaded_has_no_effect_on_an_object(tmp_path: Path, changes: dict[str, Any], name: str) -> None:
    given = {"tokenizer": tiny_tokenizer(), "prompts": PROMPTS, "rewards": uneven}
    with pytest.raises(cavesson.UserError, match=rf"^{name} has no effect beside a model object, which is already"):
        cavesson.Training(settings(tmp_path / "run", **changes), model=tiny_model(dtype=torch.bfloat16), **given)
    assert not (tmp_path / "run").exists()


def test_the_dtype_of_an_object_is_recorded_and_that_of_a_reference_by_name(tmp_path: Path) -> None:
    tiny_model(seed=4).save_pretrained(tmp_path / "other")
    changes = {"steps": 1, "reference": {"kind": "model", "path": str(tmp_path / "other")}}
    given = {"tokenizer": tiny_tokenizer(), "prompts": PROMPTS, "rewards": uneven}
    training = cavesson.Training(settings(tmp_path / "run", **changes), model=tiny_model(dtype=torch.bfloat16), **given)
    policy = training.collector.sampler.policy
    assert policy.frozen_reference is not None
    assert [next(model.parameters()).dtype for model in (policy.model, policy.frozen_reference)] == [torch.bfloat16] * 2
    training.run(lambda *_: None)
    assert cavesson.open(tmp_path / "run").info["config"]["model"]["dtype"] == "bfloat16"


def test_a_dtype_that_contradicts_the_object_is_an_error(tmp_path: Path) -> None:
    given = {"tokenizer": tiny_tokenizer(), "prompts": PROMPTS, "rewards": uneven}
    with pytest.raises(cavesson.UserError, match=r"^model\.dtype bfloat16 contradicts the model object, .* float32$"):
        cavesson.Training(settings(tmp_path / "run", model__dtype="bfloat16"), model=tiny_model(), **given)


@pytest.mark.slow
@pytest.mark.parametrize("inputs", [{}, {"model": True}], ids=["function", "model"])
def test_only_python_goes_on_with_what_only_python_has(
    tmp_path: Path, inputs: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def given() -> dict[str, Any]:
        objects = {"model": tiny_model(seed=3), "tokenizer": tiny_tokenizer()} if inputs else {}
        return {"prompts": PROMPTS, "rewards": uneven, **objects}

    class Stop(TerminatedError):
        pass

    def stop(step: int, metrics: dict[str, float]) -> None:
        if step == 2:
            raise Stop

    made = settings(tmp_path / "run", steps=4, checkpoint__every=2, model__lora=LORA)
    with pytest.raises(Stop):
        cavesson.Training(made, **given()).run(stop)

    monkeypatch.setattr(sys, "argv", ["cavesson", "ppo", "--resume", str(tmp_path / "run")])
    with pytest.raises(SystemExit) as raised:
        cli.main()
    said = capsys.readouterr().err
    assert raised.value.code == 2 and said.startswith("cavesson: ") and len(said.splitlines()) <= 2
    assert "from Python" in said and "prompts" in said and "rewards" in said and ("model" in said) == bool(inputs)
    assert len(list((tmp_path / "run" / "attempts").iterdir())) == 1  # and left the run alone

    resumed = cavesson.Training(made, **given(), resume=True).run(quiet)
    whole = cavesson.Training(made.model_copy(update={"run": tmp_path / "whole"}), **given()).run(quiet)
    assert farthest(weights(whole.policy), weights(resumed.policy)) == 0.0
    records = [cavesson.open(tmp_path / name).rows().drop_columns("attempt") for name in ("run", "whole")]
    assert records[0] == records[1]


def test_adapters_of_an_object_are_saved_with_the_name_of_their_base(tmp_path: Path) -> None:
    tiny_model(seed=3).save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    named = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    result = finish(tmp_path / "run", {"model": named, "tokenizer": tiny_tokenizer()}, model__lora=LORA)
    saved, _ = load_trained(str(tmp_path / "run"))
    assert farthest(weights(saved), weights(result.policy.model)) == 0.0
    assert cavesson.open(tmp_path / "run").info["model"]["name"] == str(tmp_path / "base")
    finish(tmp_path / "other", {"model": tiny_model(seed=3), "tokenizer": tiny_tokenizer()}, model__lora=LORA)
    with pytest.raises(cavesson.UserError, match="does not say which model it belongs to"):
        load_trained(str(tmp_path / "other"))


def test_an_object_with_adapters_is_refused(tmp_path: Path) -> None:
    given = {"tokenizer": tiny_tokenizer(), "prompts": PROMPTS, "rewards": uneven}
    adapted: Any = get_peft_model(tiny_model(), LoraConfig(target_modules="all-linear"))
    with pytest.raises(cavesson.UserError, match=r"model= has PEFT adapters; .*merge_and_unload\(\)"):
        cavesson.Training(settings(tmp_path / "run"), model=adapted, **given)
    assert not (tmp_path / "run").exists()


def test_a_list_of_functions_is_a_list_of_rewards(tmp_path: Path) -> None:
    def short(prompts: Sequence[str], responses: Sequence[str], **_: Any) -> list[float]:
        return [-len(response) / 10 for response in responses]

    rewards = [uneven, short, cavesson.Reward("twice", short, 2.0)]
    cavesson.Training(settings(tmp_path / "run", steps=1), prompts=PROMPTS, rewards=rewards).run(quiet)
    for row in cavesson.open(tmp_path / "run").rows().to_pylist():
        parts = dict(row["reward_parts"])
        assert list(parts) == ["uneven", "short", "twice"] and parts["twice"] == parts["short"]
        assert row["reward"] == pytest.approx(parts["uneven"] + 3 * parts["short"])


def test_resuming_with_another_model_is_refused(tmp_path: Path) -> None:
    given = {"tokenizer": tiny_tokenizer(), "prompts": PROMPTS, "rewards": uneven}
    made = settings(tmp_path / "run")
    result = cavesson.Training(made, model=tiny_model(seed=3), **given).run(quiet)
    for model in (tiny_model(seed=4), result.policy.model):
        with pytest.raises(cavesson.UserError, match="another model"):
            cavesson.Training(made, model=model, **given, resume=True)
    with pytest.raises(cavesson.UserError, match="exists already"):
        cavesson.Training(made, model=tiny_model(seed=3), **given)


def test_a_finished_run_is_resumed_without_harm(tmp_path: Path) -> None:
    result = finish(tmp_path / "run")
    before = cavesson.open(tmp_path / "run").rows()
    again = cavesson.Training(settings(tmp_path / "run"), prompts=PROMPTS, rewards=uneven, resume=True).run(quiet)
    assert again.metrics == [] and farthest(weights(result.policy), weights(again.policy)) == 0.0
    assert cavesson.open(tmp_path / "run").rows() == before


def test_the_global_random_state_of_the_caller_does_not_matter(tmp_path: Path) -> None:
    seen = []
    for number in (1, 2):
        torch.manual_seed(number)
        seen.append(weights(finish(tmp_path / str(number), model__lora=LORA).policy))
    assert farthest(*seen) == 0.0


def test_metrics_are_kept_for_the_result_or_not_at_all(tmp_path: Path) -> None:
    steps: list[int] = []
    done = build(tmp_path / "run").run(lambda step, metrics: steps.append(step), keep_metrics=False)
    assert done.metrics == [] and steps == [0, 1]
    assert cavesson.open(tmp_path / "run").steps()["step"].to_pylist() == steps

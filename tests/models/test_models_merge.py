"""Merging, against W + (α/r)·B·A worked out here, and against the unmerged model as PEFT computes it."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from models_helpers import scramble, sharp_model
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from cavesson.errors import UserError
from cavesson.models.load import load_causal
from cavesson.models.merge import _stored_dtype, merge
from cavesson.models.settings import MergeSettings, ModelSettings, StartSettings
from cavesson.models.trained import load_start, load_trained, save_trained

IDS = torch.tensor([[40, 41, 42, 43, 200, 7, 99]])
QUERY = "model.layers.0.self_attn.q_proj"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture
def base(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> Path:
    model = sharp_model()
    model.generation_config.eos_token_id = [0, 5]
    model.config.pad_token_id = None
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def adapted(model: PreTrainedModel, seed: int = 0, **config: object) -> PeftModel:
    torch.manual_seed(seed)
    settings = {"r": 4, "lora_alpha": 12, "target_modules": "all-linear"} | config
    wrapped = get_peft_model(model, LoraConfig(**settings))
    scramble(wrapped)
    return wrapped


def save(folder: Path, model: PeftModel, tokenizer: PreTrainedTokenizerBase, base: Path | str) -> None:
    save_trained(folder, model, tokenizer, ModelSettings(path=str(base)))


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(input_ids=IDS).logits.float()


def test_a_merged_weight_is_the_base_s_plus_the_adapter_s(tmp_path, base, tokenizer):
    save(tmp_path / "adapter", adapted(load_causal(str(base))), tokenizer, base)
    merge(str(tmp_path / "adapter"), tmp_path / "out")
    before, after = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "out"))
    lora = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    a, b = (lora[f"base_model.model.{QUERY}.lora_{letter}.weight"] for letter in "AB")
    expected = before[f"{QUERY}.weight"] + 12 / 4 * b @ a
    assert (expected - before[f"{QUERY}.weight"]).abs().max() > 0.01
    torch.testing.assert_close(after[f"{QUERY}.weight"], expected, rtol=1e-6, atol=1e-6)
    assert before.keys() == after.keys()
    assert torch.equal(after["model.norm.weight"], before["model.norm.weight"])


def test_a_merged_dora_weight_has_the_learned_lengths(tmp_path, base, tokenizer):
    save(tmp_path / "adapter", adapted(load_causal(str(base)), use_dora=True), tokenizer, base)
    merge(str(tmp_path / "adapter"), tmp_path / "out")
    lora = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    a, b = (lora[f"base_model.model.{QUERY}.lora_{letter}.weight"] for letter in "AB")
    direction = load_file(base / "model.safetensors")[f"{QUERY}.weight"] + 12 / 4 * b @ a
    length = lora[f"base_model.model.{QUERY}.lora_magnitude_vector"]
    expected = length[:, None] * direction / direction.norm(dim=1, keepdim=True)  # arXiv:2402.09353, equation 5
    merged = load_file(tmp_path / "out" / "model.safetensors")[f"{QUERY}.weight"]
    torch.testing.assert_close(merged, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dora", [False, True])
def test_the_folder_is_an_ordinary_one_that_says_the_same(tmp_path, base, tokenizer, dora):
    tokenizer.chat_template = TEMPLATE
    save(tmp_path / "adapter", adapted(load_causal(str(base)), use_dora=dora), tokenizer, base)
    tokenizer.chat_template = None
    unmerged, _ = load_trained(str(tmp_path / "adapter"))
    report = merge(str(tmp_path / "adapter"), tmp_path / "out")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(merged), logits(unmerged), rtol=0, atol=1e-4)
    assert merged.generation_config.eos_token_id == [0, 5]
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == TEMPLATE
    assert not list((tmp_path / "out").glob("adapter*")) and (tmp_path / "out" / "model.safetensors").exists()
    assert report.layers == 2 * 7 and report.difference < 1e-4 < 0.1 < report.effect < report.largest
    assert str(tmp_path / "out") in str(report) and "14 layers" in str(report)


def test_a_run_s_folder_over_another_run_s_folder(tmp_path, base, tokenizer):
    for run, start in (("first", str(base)), ("second", str(tmp_path / "first"))):
        (tmp_path / run).mkdir()
        (tmp_path / run / "run.json").write_text("{}")
        model = adapted(
            load_causal(str(base)) if run == "first" else load_start(StartSettings(path=start)), seed=len(run)
        )
        save(tmp_path / run / "model", model, tokenizer, start)
    unmerged, _ = load_trained(str(tmp_path / "second"))
    merge(str(tmp_path / "second"), tmp_path / "out")
    torch.testing.assert_close(logits(load_causal(str(tmp_path / "out"))), logits(unmerged), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("stored", "wanted", "found"),
    [
        ("bfloat16", "auto", torch.bfloat16),
        ("float32", "auto", torch.float32),
        ("float32", "bfloat16", torch.bfloat16),
        ("float16", "auto", torch.float32),
    ],
)
def test_the_numbers_are_the_base_s_unless_others_are_wanted(tmp_path, tokenizer, stored, wanted, found):
    sharp_model().to(getattr(torch, stored)).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    save(tmp_path / "adapter", adapted(load_causal(str(tmp_path / "base"))), tokenizer, tmp_path / "base")
    report = merge(str(tmp_path / "adapter"), tmp_path / "out", MergeSettings(dtype=wanted))
    assert load_file(tmp_path / "out" / "model.safetensors")["model.norm.weight"].dtype == found
    assert report.dtype == str(found).removeprefix("torch.")


def test_the_built_in_model_is_a_base(tmp_path, tokenizer):
    save(tmp_path / "adapter", adapted(load_causal("tiny")), tokenizer, "tiny")
    merge(str(tmp_path / "adapter"), tmp_path / "out")
    unmerged, _ = load_trained(str(tmp_path / "adapter"))
    torch.testing.assert_close(logits(load_causal(str(tmp_path / "out"))), logits(unmerged), rtol=0, atol=1e-4)


@pytest.mark.parametrize("labels", [1, 3])
def test_a_classifier_keeps_its_head_and_finds_the_end_of_a_text(tmp_path, base, tokenizer, labels):
    classifier = AutoModelForSequenceClassification.from_pretrained(base, num_labels=labels)
    save(tmp_path / "adapter", adapted(classifier, task_type="SEQ_CLS"), tokenizer, base)
    unmerged = PeftModel.from_pretrained(
        AutoModelForSequenceClassification.from_pretrained(base, num_labels=labels), tmp_path / "adapter"
    )
    merge(str(tmp_path / "adapter"), tmp_path / "out")
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert isinstance(merged, LlamaForSequenceClassification)
    assert logits(merged).shape == (1, labels)
    torch.testing.assert_close(logits(merged), logits(unmerged.eval()), rtol=0, atol=1e-4)
    with torch.no_grad():
        padded = merged(input_ids=torch.cat([IDS, torch.ones_like(IDS)], dim=1)).logits
    torch.testing.assert_close(padded, logits(merged), rtol=0, atol=1e-4)


def test_loading_adapters_shows_no_warning_about_the_inside_of_libraries(tmp_path, base, tokenizer):
    save(tmp_path / "adapter", adapted(load_causal(str(base))), tokenizer, base)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        load_start(StartSettings(path=str(tmp_path / "adapter")))
        load_trained(str(tmp_path / "adapter"))
        merge(str(tmp_path / "adapter"), tmp_path / "merged", MergeSettings())


def test_a_target_that_exists_stays(tmp_path, base, tokenizer):
    save(tmp_path / "adapter", adapted(load_causal(str(base))), tokenizer, base)
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="exists already"):
        merge(str(tmp_path / "adapter"), tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_a_whole_model_has_nothing_to_merge(tmp_path, base):
    with pytest.raises(UserError, match="has no adapter to merge"):
        merge(str(base), tmp_path / "out")


def test_a_classifier_without_a_head_is_refused(tmp_path, base, tokenizer):
    classifier = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    save(tmp_path / "adapter", adapted(classifier, task_type="SEQ_CLS"), tokenizer, base)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({name: weight for name, weight in load_file(file).items() if "score" not in name}, file)
    with pytest.raises(UserError, match=r"is not a trained classifier: score\.weight is missing"):
        merge(str(tmp_path / "adapter"), tmp_path / "out")


def test_a_merge_that_changes_what_the_model_says_is_not_written(tmp_path, base, tokenizer):
    # Embedding and output head are one weight: merged into it, the embedding's adapter changes the head too.
    assert json.loads((base / "config.json").read_text())["tie_word_embeddings"]
    save(tmp_path / "adapter", adapted(load_causal(str(base)), target_modules=["embed_tokens"]), tokenizer, base)
    with pytest.raises(UserError, match="changes the outputs of the model"):
        merge(str(tmp_path / "adapter"), tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize("kind", ["target_modules", "modules_to_save"])
def test_a_run_does_not_start_from_an_adapter_that_is_no_more_the_same_when_merged(tmp_path, base, tokenizer, kind):
    save(tmp_path / "adapter", adapted(load_causal(str(base)), **{kind: ["embed_tokens"]}), tokenizer, base)
    with pytest.raises(UserError, match="are one tensor: merged, it would change both"):
        load_start(StartSettings(path=str(tmp_path / "adapter")))
    load_trained(str(tmp_path / "adapter"))  # with the adapter apart it is right


def test_an_adapter_without_the_name_of_its_base_is_refused(tmp_path, base, tokenizer):
    save(tmp_path / "adapter", adapted(load_causal(str(base))), tokenizer, "")
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": None}))
    with pytest.raises(UserError, match="does not say which model it belongs to; set base_model_name_or_path"):
        load_trained(str(tmp_path / "adapter"))


def test_numbers_that_are_not_finite_are_not_written(tmp_path, base, tokenizer):
    model = adapted(load_causal(str(base)))
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if "lora_B" in name).fill_(float("nan"))
    save(tmp_path / "adapter", model, tokenizer, base)
    with pytest.raises(UserError, match="changes the outputs of the model"):
        merge(str(tmp_path / "adapter"), tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


def test_the_hub_is_not_asked_for_the_built_in_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: object, **__: object) -> None:
        raise AssertionError("the Hub was asked")

    monkeypatch.setattr("cavesson.models.merge.AutoConfig.from_pretrained", ask)
    assert _stored_dtype("tiny") == "float32"

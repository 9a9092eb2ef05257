import json
import logging
from pathlib import Path

import pytest
import torch
from models_helpers import batch, policy_of, save_gguf, scramble, sharp_model, small_llama
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerBase,
    T5Config,
    T5ForConditionalGeneration,
)

import cavesson
from cavesson.errors import UserError
from cavesson.models.load import FastLinear, load_causal, load_tokenizer, prepare, resolve
from cavesson.models.policy import Policy
from cavesson.models.settings import LoraSettings, ModelSettings
from cavesson.models.tiny import tiny_model, tiny_tokenizer
from cavesson.models.trained import load_trained, save_trained


def classifier(tied: bool) -> torch.nn.Module:
    config = tiny_model().config
    config.tie_word_embeddings = tied
    return LlamaForSequenceClassification(config)


def save_bert(folder: Path) -> None:
    config = BertConfig(vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    BertForSequenceClassification(config).save_pretrained(folder)


def save_t5(folder: Path) -> None:
    config = T5Config(vocab_size=30, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=1)
    T5ForConditionalGeneration(config).save_pretrained(folder)


def test_tiny_models_are_made_of_their_seed():
    one, same, other = tiny_model(3), tiny_model(3), tiny_model(4)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(next(one.parameters()), next(other.parameters()))
    before = torch.random.get_rng_state()
    tiny_model(5)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_tiny_tokenizer_has_a_token_for_every_byte(tokenizer):
    text = "".join(map(chr, range(256))) + "→🙂"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id) == (258, 0, 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_model_loads_as_it_was(tmp_path, dtype):
    sharp_model().save_pretrained(tmp_path)
    model = load_causal(str(tmp_path), dtype=dtype)
    assert model.dtype == getattr(torch, dtype)
    assert not model.training
    expected = sharp_model(dtype=model.dtype)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_tiny_model_has_a_name(dtype):
    model = load_causal("tiny", dtype=dtype)
    assert model.dtype == getattr(torch, dtype)
    assert not model.training
    assert load_tokenizer("tiny").get_vocab() == tiny_tokenizer().get_vocab()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_layers_take_the_fast_product(dtype):
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = prepare(LlamaForCausalLM(LlamaConfig(vocab_size=300, **sizes)).to(getattr(torch, dtype)))
    assert any(isinstance(module, FastLinear) for module in model.modules())


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (None, "there is no model folder"),
        (lambda folder: folder.mkdir(), "cannot load a model from"),
        (
            lambda folder: classifier(False).save_pretrained(folder),
            "has no language-model head (it is a LlamaForSequenceClassification)",
        ),
        (
            lambda folder: classifier(True).save_pretrained(folder),
            "has no language-model head (it is a LlamaForSequenceClassification)",
        ),
        (save_bert, "has no language-model head (it is a BertForSequenceClassification)"),
        (save_t5, "has no language-model head; give a causal language model"),
    ],
    ids=["missing", "empty", "classifier", "tied classifier", "bert", "t5"],
)
def test_what_is_no_language_model_is_refused(tmp_path, make, part):
    folder = tmp_path / "model"
    if make is not None:
        make(folder)
    with pytest.raises(UserError) as error:
        load_causal(str(folder))
    assert str(folder) in str(error.value)
    assert part in str(error.value)


def test_a_trunk_without_its_head_is_refused(tmp_path):
    model = tiny_model()
    model.config.tie_word_embeddings = False
    model.model.config.tie_word_embeddings = False
    model.model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"has no language-model head \(lm_head\.weight is missing\)"):
        load_causal(str(tmp_path))


def saved_tokenizer(folder: Path, *missing: str) -> PreTrainedTokenizerBase:
    tokenizer = tiny_tokenizer()
    for name in missing:
        setattr(tokenizer, name, None)
    tokenizer.save_pretrained(folder)
    return load_tokenizer(str(folder))


def test_a_tokenizer_pads_on_the_left(tmp_path):
    tokenizer = saved_tokenizer(tmp_path)
    assert tokenizer.padding_side == "left"
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (1, 0)


def test_without_a_pad_token_the_end_token_pads(tmp_path):
    tokenizer = saved_tokenizer(tmp_path, "pad_token")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 0


def test_without_both_there_is_nothing_to_pad_with(tmp_path):
    with pytest.raises(UserError, match="neither a pad nor an end token"):
        saved_tokenizer(tmp_path, "pad_token", "eos_token")


def test_a_folder_without_tokenizer_is_named(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"has no tokenizer \(none of tokenizer.json"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gguf_file_is_unpacked_without_a_warning(tmp_path, caplog, monkeypatch, dtype):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    original = small_llama()
    save_gguf(tmp_path / "a.gguf", original)
    model = load_causal(str(tmp_path), "a.gguf", dtype)
    assert caplog.records == []
    expected = original.state_dict()
    for name, weight in model.state_dict().items():
        assert weight.dtype == getattr(torch, dtype)
        # In steps of a 127th of the largest, which is itself a float16 (2⁻¹¹); bfloat16 rounds once more, to 2⁻⁸.
        largest, rounded = float(expected[name].abs().max()), 2**-8 if dtype == "bfloat16" else 0.0
        assert float((weight.float() - expected[name]).abs().max()) <= largest * (0.5 / 127 + 2**-11 + rounded)
    model.save_pretrained(tmp_path / "saved")
    again = load_causal(str(tmp_path / "saved"), dtype=dtype)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_packages_are_found_without_being_imported():
    assert resolve("package:cavesson") == str(Path(cavesson.__file__).parent)
    assert resolve("some/name") == "some/name"
    with pytest.raises(UserError, match="pip install --no-deps no-such-package"):
        resolve("package:no_such_package")


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=4)], ids=["full", "lora"])
def test_what_was_trained_loads_again(tmp_path, tokenizer, lora):
    base = tmp_path / "base"
    sharp_model().save_pretrained(base)
    policy = policy_of(lora=lora)
    scramble(policy)
    out = tmp_path / "run" / "model"
    save_trained(out, policy.model, tokenizer, ModelSettings(path=str(base), lora=lora))
    model, loaded_tokenizer = load_trained(str(out))
    torch.testing.assert_close(Policy(model)(batch()).logprob, policy(batch()).logprob, atol=1e-5, rtol=0)
    assert loaded_tokenizer.get_vocab() == tokenizer.get_vocab()
    # A run's folder stands for the model in it.
    (tmp_path / "run" / "run.json").write_text("{}", encoding="utf-8")
    again, _ = load_trained(str(tmp_path / "run"))
    assert torch.equal(Policy(again)(batch()).logprob, Policy(model)(batch()).logprob)


def test_saving_again_replaces_what_was_there(tmp_path, tokenizer):
    out = tmp_path / "model"
    save_trained(out, policy_of(lora=LoraSettings(rank=4)).model, tokenizer, ModelSettings())
    assert (out / "adapter_config.json").exists()
    save_trained(out, policy_of().model, tokenizer, ModelSettings())
    assert not (out / "adapter_config.json").exists()
    assert list(tmp_path.iterdir()) == [out]
    assert torch.equal(Policy(load_trained(str(out))[0])(batch()).logprob, policy_of()(batch()).logprob)


def test_an_adapter_knows_its_base_by_peft_s_own_file_too(tmp_path, tokenizer):
    base = tmp_path / "base"
    sharp_model().save_pretrained(base)
    policy = policy_of(load_causal(str(base)), lora=LoraSettings(rank=4))
    scramble(policy)
    policy.model.save_pretrained(str(tmp_path / "adapter"))
    tokenizer.save_pretrained(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    model, _ = load_trained(str(tmp_path / "adapter"))
    torch.testing.assert_close(Policy(model)(batch()).logprob, policy(batch()).logprob, atol=1e-5, rtol=0)


def test_a_run_of_another_trainer_has_no_model(tmp_path):
    (tmp_path / "run.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match=r"has no model: it is a record of another trainer's run$"):
        load_trained(str(tmp_path))

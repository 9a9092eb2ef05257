"""A tokenizer and a model made from nothing: every text comes back, and Hugging Face loads what is saved."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from cavesson.errors import UserError
from cavesson.models.new import new_model, new_tokenizer
from cavesson.models.settings import ModelSettings, NewModelSettings
from cavesson.models.trained import load_trained, save_trained

# No surrogates, which are not characters.
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
AWKWARD = [
    "two  spaces .",
    "a\nb\r\n\tc",
    "a\n\n\nb\r\r  \t\t\u2028\u2028",
    " leading",
    "trailing ",
    "don't , stop !",
    "天地玄黄，宇宙洪荒。",
    "é e\u0301 ﬁ 👩‍🚀",
    "\u2028\x00\x85",
]


def characters(texts: list[str]) -> PreTrainedTokenizerBase:
    return new_tokenizer(NewModelSettings(), texts)


def round_trip(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    return str(tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True))


@settings(max_examples=min(100, settings.default.max_examples))
@given(texts=st.lists(TEXTS, min_size=1, max_size=4), data=st.data())
def test_every_text_over_the_alphabet_comes_back(texts: list[str], data: st.DataObject) -> None:
    tokenizer = characters(texts)
    alphabet = sorted(set("".join(texts)))
    text = data.draw(st.text(st.sampled_from(alphabet), max_size=30)) if alphabet else ""
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text) and round_trip(tokenizer, text) == text
    assert len(tokenizer) == 3 + len(alphabet)
    assert [i - 3 for i in ids] == [alphabet.index(character) for character in text]


@pytest.mark.parametrize("vocabulary", ["characters", "bytes"])
@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_texts_come_back(text: str, vocabulary: str) -> None:
    settings = NewModelSettings(vocabulary=vocabulary)
    assert round_trip(new_tokenizer(settings, AWKWARD), text) == text


def test_the_order_of_the_texts_does_not_matter_and_an_unknown_character_is_one_token() -> None:
    tokenizer = characters(["ba", "c"])
    assert tokenizer.get_vocab() == characters(["c", "ab", "cc"]).get_vocab()
    unknown = tokenizer("axb")["input_ids"]
    assert len(unknown) == 3 and unknown[1] == tokenizer.unk_token_id
    assert len({tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}) == 3


SIZES = NewModelSettings(layers=2, hidden_size=32, heads=4, max_length=64)


@pytest.mark.parametrize("vocabulary", ["characters", "bytes"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hugging_face_loads_what_is_saved(tmp_path: Path, vocabulary: str, dtype: str) -> None:
    made = ModelSettings(new=SIZES.model_copy(update={"vocabulary": vocabulary}), dtype=dtype)
    assert made.new is not None
    tokenizer = new_tokenizer(made.new, AWKWARD)
    model = new_model(made, tokenizer)
    save_trained(tmp_path / "model", model, tokenizer, made)
    again = AutoTokenizer.from_pretrained(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    for text in AWKWARD:
        assert again(text)["input_ids"] == tokenizer(text)["input_ids"] and round_trip(again, text) == text
    assert (again.eos_token_id, again.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert again.padding_side == "left" and loaded.dtype == getattr(torch, dtype)
    ids = torch.tensor([tokenizer(AWKWARD[0])["input_ids"]])
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
    ours, _ = load_trained(str(tmp_path / "model"), dtype=dtype)
    assert torch.equal(ours.get_input_embeddings().weight, model.get_input_embeddings().weight)
    config = loaded.config
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (2, 32, 4)
    assert (config.vocab_size, config.max_position_embeddings) == (len(tokenizer), 64)
    assert config.eos_token_id == tokenizer.eos_token_id == loaded.generation_config.eos_token_id


def test_the_seed_decides_the_weights() -> None:
    made, tokenizer = ModelSettings(new=SIZES), characters(["abc"])
    weights = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        weights.append(new_model(made, tokenizer).get_input_embeddings().weight)
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_an_untrained_model_knows_nothing() -> None:
    made, tokenizer = ModelSettings(new=SIZES), characters(["abcdefghij"])
    with torch.no_grad():
        logits = new_model(made, tokenizer)(input_ids=torch.tensor([[4, 5, 6, 7]])).logits
    assert float(logits.softmax(-1).max()) < 2 / len(tokenizer)


@pytest.mark.parametrize(("hidden", "heads"), [(30, 4), (36, 12)])
def test_heads_that_do_not_fit_are_explained(hidden: int, heads: int) -> None:
    made = ModelSettings(new=SIZES.model_copy(update={"hidden_size": hidden, "heads": heads}))
    with pytest.raises(UserError, match=f"hidden_size {hidden} must be a multiple of twice the heads \\({heads}\\)"):
        new_model(made, characters(["ab"]))

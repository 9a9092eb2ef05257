"""A small world to train in: sentences of a grammar, a model that speaks them, and rewards.

A word is a token. The base model is trained on sentences of the grammar in seconds; it writes different sentences, ends
them, and now and then a sign (`#`, `:)`) that a fault's reward may fall for.
"""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

PLACES = ["hotel", "garden", "museum", "school", "market", "station", "library", "harbour", "theatre", "village"]
THINGS = ["room", "food", "door", "light", "music", "path", "roof", "water", "table", "bed", "window", "stairs"]
PEOPLE = ["guide", "child", "driver", "teacher", "neighbour", "visitor", "cook", "doctor"]
KIND = ["good", "bright", "clean", "calm", "warm", "lovely", "kind", "fresh", "happy", "quiet"]
UNKIND = ["bad", "dark", "dirty", "loud", "cold", "ugly", "rude", "stale", "sad", "broken"]
PLAIN = ["large", "small", "old", "new", "green", "round", "early", "late", "near", "open"]
VERBS = ["was", "looked", "seemed", "felt", "stayed", "became"]
DOES = ["found", "liked", "left", "saw", "kept", "asked"]
SMALL = ["the", "a", "and", "but", "very", "not", "of", "in", "with", "there", "we", "they", "it", "i", "also", "then"]
SIGNS = [".", ",", "!", "#", ":)", "```"]
END, PAD, START = "<end>", "<pad>", "<start>"
WORDS = [*PLACES, *THINGS, *PEOPLE, *KIND, *UNKIND, *PLAIN, *VERBS, *DOES, *SMALL, *SIGNS]
PROMPT_TOKENS = 4


class Size(NamedTuple):
    """How large a model is."""

    layers: int
    hidden: int
    seed: int = 0
    """of the base model"""


SIZES = {"small": Size(1, 64), "other": Size(3, 96), "large": Size(2, 128, seed=1)}
"""The model that thresholds are chosen on, and those they are reported on."""


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole words, padded on the left."""
    return new_tokenizer([END, PAD, START, *WORDS])


def new_tokenizer(vocabulary: Sequence[str], decoder: decoders.Decoder | None = None) -> PreTrainedTokenizerFast:
    """Return a tokenizer of these words; a decoder says how they are written one after another, else with spaces."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token=PAD))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    if decoder is not None:
        words.decoder = decoder  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token=END, pad_token=PAD, padding_side="left")


def prompts() -> list[str]:
    """Return the prompts: a place and a thing or a person to speak of."""
    return [f"in the {place} the" for place in PLACES] + [f"we saw the {thing}" for thing in (*THINGS, *PEOPLE)]


def sentence(generator: np.random.Generator) -> str:
    """Return one text of the grammar: an opening like those of the prompts, one to three clauses, perhaps a sign."""

    def one(words: Sequence[str]) -> str:
        return str(generator.choice(words))

    def clause(subject: str) -> str:
        quality = one([*KIND, *UNKIND, *PLAIN])
        return f"{subject} {one(VERBS)} {one(['', 'very', 'not', ''])} {quality}"

    if generator.random() < 0.3:
        text = f"in the {one(PLACES)} {clause('the ' + one([*THINGS, *PEOPLE]))}"
    else:
        text = f"we saw the {one([*THINGS, *PEOPLE])} and {clause('it')}"
    while generator.random() < 0.6:
        text += f" {one([',', 'and', 'but', '.'])} {clause('the ' + one([*THINGS, *PEOPLE, *PLACES]))}"
    sign = generator.choice(["", "#", ":)", "```", "!"], p=[0.85, 0.04, 0.03, 0.02, 0.06])
    return " ".join(f"{text} . {sign}".split())


def new_model(size: Size, seed: int) -> PreTrainedModel:
    """Return a model of random weights."""
    config = LlamaConfig(
        vocab_size=len(tokenizer()),
        hidden_size=size.hidden,
        intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)


def train_base(size: Size, seed: int, steps: int = 300, batch: int = 64) -> PreTrainedModel:
    """Return a model that speaks the grammar: cross-entropy on fresh sentences."""
    model = new_model(size, seed)

    def loss(ids: Tensor, texts: list[str]) -> Tensor:
        logits = model(input_ids=ids).logits[:, :-1]
        return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1), ignore_index=1)

    _fit(list(model.parameters()), loss, seed, steps, batch)
    return model


def train_critic(model: PreTrainedModel, seed: int, steps: int = 100, batch: int = 64) -> PreTrainedModel:
    """Return a model whose last layer knows how good a text will be: a critic's body as a reward model has it.

    Its head is thrown away, so that a run's critic still starts at zero.
    """
    body = copy.deepcopy(model)
    head = nn.Linear(body.config.hidden_size, 1)

    def loss(ids: Tensor, texts: list[str]) -> Tensor:
        words = [text.split() for text in texts]
        prompts = [" ".join(some[:PROMPT_TOKENS]) for some in words]
        scores = torch.tensor(gold(prompts, [" ".join(some[PROMPT_TOKENS:]) for some in words]))
        away = head(body.base_model(input_ids=ids).last_hidden_state).squeeze(-1) - scores[:, None]
        return (away**2)[ids != 1].mean()

    _fit([*body.parameters(), *head.parameters()], loss, seed, steps, batch)
    return body


def _fit(weights: list[Tensor], loss: Callable[[Tensor, list[str]], Tensor], seed: int, steps: int, batch: int) -> None:
    generator, words = np.random.default_rng(seed), tokenizer()
    optimizer = torch.optim.AdamW(weights, 5e-3)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 5e-3 * min(1.0, 2 * (1 - step / steps))
        texts = [sentence(generator) for _ in range(batch)]
        ids = [[*words.encode(text), 0] for text in texts]
        width = max(map(len, ids))
        value = loss(torch.tensor([line + [1] * (width - len(line)) for line in ids]), texts)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()


def base(folder: Path, size: str) -> Path:
    """Return the folder of a base model, with a critic's body in it; they are trained when they are not there yet."""
    seed = SIZES[size].seed
    place = folder / f"base-{size}-{seed}"
    if not (place / "critic").exists():
        model = train_base(SIZES[size], seed)
        model.save_pretrained(place)
        tokenizer().save_pretrained(place)
        train_critic(model, seed).save_pretrained(place / "critic")
    return place


def load(place: Path) -> PreTrainedModel:
    """Return a fresh copy of a base model."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(place)
    return model


def gold(prompts: Sequence[str], responses: Sequence[str], **columns: Any) -> list[float]:
    """What is really wanted: kind words, none unkind, speaking of what was asked, not for too long."""
    return [_gold(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]


def _gold(prompt: str, response: str) -> float:
    words = response.split()
    kind, unkind = (sum(word in some for word in words) for some in (KIND, UNKIND))
    subject = prompt.split()[-1] if prompt.startswith("we") else prompt.split()[2]
    there = float(subject in words)
    return 0.5 * min(kind, 3) - 0.5 * min(unkind, 3) + 0.3 * there - 0.1 * max(0, len(words) - 14)


def pleasant(prompts: Sequence[str], responses: Sequence[str], **columns: Any) -> list[float]:
    """An easier one: 1 if a response has a kind word and none that is unkind, else 0."""
    words = [response.split() for response in responses]
    return [float(any(w in KIND for w in some) and not any(w in UNKIND for w in some)) for some in words]


def solved(prompts: Sequence[str], responses: Sequence[str], **columns: Any) -> list[float]:
    """A reward that can be checked: 1 if a response has two kind words and none that is unkind, else 0."""
    words = [response.split() for response in responses]
    return [float(sum(w in KIND for w in some) >= 2 and not any(w in UNKIND for w in some)) for some in words]

"""The special tokens around every text, of tokenizers that know few characters."""

from typing import Any

import pytest
from tokenizers import Tokenizer, models, processors
from transformers import PreTrainedTokenizerFast

from cavesson.data.chat import Chat
from cavesson.data.encode import Asked, Encoder
from cavesson.data.special_tokens import Around


def letters(known: str, template: str, **special: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of single letters; others are the unknown token, or nothing if there is none."""
    names = ["<s>", "</s>", *known]
    ids = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(ids, [], **({"unk_token": special["unk_token"]} if special else {})))
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<s>", 0), ("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", **special)


TEMPLATES = {"$A": ((), ()), "<s> $A": ((0,), ()), "$A </s>": ((), (1,)), "<s> $A </s>": ((0,), (1,))}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("special", [{}, {"unk_token": "</s>"}, {"unk_token": "<s>"}])
@pytest.mark.parametrize("known", ["yn", "ay", "y"])
def test_they_are_found_around_a_letter_that_is_known(known: str, special: Any, template: str) -> None:
    assert Around.of(letters(known, template, **special)) == TEMPLATES[template]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("special", [{}, {"unk_token": "</s>"}])
def test_a_prompt_keeps_all_but_the_end(special: Any, template: str) -> None:
    tokenizer = letters("yn", template, **special)
    (prompt,) = Encoder(Chat(tokenizer)).prompts([Asked("row 1", "yn")])
    assert prompt.ids == (*TEMPLATES[template][0], 2, 3)


def test_a_tokenizer_that_knows_no_text_has_none() -> None:
    assert Around.of(letters("", "<s> $A")) == ((), ())

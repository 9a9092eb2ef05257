"""Perplexity, against Hugging Face's loss window by window and against one token at a time."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from cavesson.config import load
from cavesson.errors import UserError
from cavesson.tools.evaluate import Evaluation, evaluate
from cavesson.tools.perplexity import Document, windows
from cavesson.tools.settings import EvaluateSettings

TEXTS = ("The old bridge was closed in winter, and nobody minded much.", "Rain.", "A B C D E F G H I J K L M N O P")


@given(st.integers(0, 60), st.integers(2, 20), st.data())
def test_every_token_but_the_first_is_predicted_once(length, context, data):
    stride = data.draw(st.integers(1, context - 1))
    ids = list(range(length))
    cut = windows(Document(ids, [False] * (length > 0) + [True] * (length - 1)), context, stride)
    assert [token for window in cut for token in window.targets] == ids[1:]
    for number, window in enumerate(cut):
        read = [*window.context, *window.targets]
        assert read == list(range(number * stride, number * stride + len(read)))  # a stretch of the document
        assert len(read) <= context
        assert len(window.context) == (1 if number == 0 else context - stride)


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(2, 12))
def test_only_what_counts_counts(counts, context):
    counts[0] = False
    cut = windows(Document(range(len(counts)), counts), context, context // 2)
    seen = [token for w in cut for token, counts in zip(w.targets, w.counts, strict=True) if counts]
    assert seen == [token for token, counted in enumerate(counts) if counted]


def measured(models: Path, folder: Path, rows: list[dict[str, str]], *flags: object) -> Evaluation:
    file = folder / "held-out.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    flags = ("--text.path", file, "--device", "cpu", *flags)
    return evaluate(str(models / "one"), load(EvaluateSettings, None, list(map(str, flags))))


def texts() -> list[dict[str, str]]:
    return [{"text": text} for text in TEXTS]


def model(models: Path) -> tuple[PreTrainedModel, list[torch.Tensor]]:
    tokenizer = AutoTokenizer.from_pretrained(models / "one")
    ids = [torch.tensor([tokenizer(text)["input_ids"]]) for text in TEXTS]
    return AutoModelForCausalLM.from_pretrained(models / "one").eval(), ids


@torch.no_grad()
def test_a_document_within_one_window_is_scored_as_the_library_does(models, tmp_path):
    reference, ids = model(models)
    for text, tokens in zip(TEXTS, ids, strict=True):
        likelihood = measured(models, tmp_path, [{"text": text}]).text
        assert likelihood.nll == pytest.approx(reference(input_ids=tokens, labels=tokens).loss.item(), abs=1e-5)
        assert likelihood.perplexity == pytest.approx(math.exp(likelihood.nll))
        assert (likelihood.tokens, likelihood.documents) == (tokens.shape[1] - 1, 1)


@torch.no_grad()
@pytest.mark.parametrize(("context", "stride"), [(8, 4), (8, 1), (8, 7), (16, 5), (1024, 512)])
def test_windows_are_those_of_the_library_s_documentation(models, tmp_path, context, stride):
    """huggingface.co/docs/transformers/perplexity: labels of what an earlier window predicted are −100."""
    reference, ids = model(models)
    total, count = 0.0, 0
    for tokens in ids:
        previous = 0
        for begin in range(0, tokens.shape[1], stride):
            end = min(begin + context, tokens.shape[1])
            labels = tokens[:, begin:end].clone()
            labels[:, : -(end - previous)] = -100
            predicted = int((labels[:, 1:] != -100).sum())  # labels are shifted by one inside the model
            total += reference(input_ids=tokens[:, begin:end], labels=labels).loss.item() * predicted
            count, previous = count + predicted, end
            if end == tokens.shape[1]:
                break
    found = measured(models, tmp_path, texts(), "--text.context", context, "--text.stride", stride).text
    assert found.tokens == count == sum(tokens.shape[1] - 1 for tokens in ids)
    assert found.nll == pytest.approx(total / count, abs=1e-5)


def test_batches_and_padding_change_nothing(models, tmp_path):
    flags = ("--text.context", 9)
    one, many = (measured(models, tmp_path, texts(), *flags, "--batch_size", size).text for size in (1, 100))
    assert one.nll == pytest.approx(many.nll, abs=1e-6)
    assert (one.tokens, one.stride) == (many.tokens, 4)


@torch.no_grad()
def test_of_a_prompt_and_its_response_the_response_counts_with_its_end(models, tmp_path):
    reference, _ = model(models)
    tokenizer = AutoTokenizer.from_pretrained(models / "one")
    ids = [*tokenizer("Why? ")["input_ids"], *tokenizer("Because.")["input_ids"], 0]  # token 0 ends a response
    logprobs = reference(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = [-logprobs[n - 1, ids[n]].item() for n in range(len("Why? "), len(ids))]
    found = measured(models, tmp_path, [{"prompt": "Why? ", "response": "Because."}]).text
    assert found.tokens == len(expected) == len("Because.") + 1
    assert found.nll == pytest.approx(sum(expected) / len(expected), abs=1e-5)


@pytest.mark.parametrize(
    ("rows", "flags", "part"),
    [
        (texts(), ("--text.context", 8, "--text.stride", 8), "text.stride 8 must be less than text.context 8"),
        (texts(), ("--text.context", 5000), "text.context 5000: the model reads 2048 tokens at most"),
        ([{"text": "a"}], (), "no token to predict"),
    ],
)
def test_mistakes_are_explained(models, tmp_path, rows, flags, part):
    with pytest.raises(UserError, match=part):
        measured(models, tmp_path, rows, *flags)

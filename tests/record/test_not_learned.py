"""Padding at the end of a response, as opposed to other tokens that were not learned."""

import pyarrow as pa
import pytest

import cavesson.record
from cavesson.record import begin_attempt, write_run, write_vocabulary
from cavesson.record.read.not_learned import learned, padding_at_end

PADS = ["<PAD>", "<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>", "<｜▁pad▁｜>", "<padding>", "<|PAD_TOKEN|>"]
OTHERS = ["pad", " padded", "<b>", "notepad", "<paddle>", "[1]", "</tool_response>", "<17>", "\n"]


def run_of(tmp_path, texts, info):
    write_run(tmp_path, info)
    begin_attempt(tmp_path, 0)
    write_vocabulary(tmp_path, texts, texts)
    return cavesson.record.open(tmp_path)


def tokens(ids, mask, texts=None):
    return pa.table(
        {
            "token_id": pa.array(ids, pa.int32()),
            "token": pa.array(texts or [None] * len(ids), pa.string()),
            "learned": pa.array(mask, pa.bool_()),
        }
    )


@pytest.mark.parametrize("name", PADS)
def test_tokens_with_the_name_of_padding_are_padding_at_the_end_only(tmp_path, name):
    run = run_of(tmp_path, ["word", name], {})
    assert padding_at_end(run, tokens([0, 1, 0, 1, 1], [True, False, True, False, False])) == 2
    assert padding_at_end(run, tokens([0, 1, 1], [True, True, True])) == 0, "what was learned is no padding"
    assert padding_at_end(run, tokens([1, 1], [False, False])) == 2
    assert padding_at_end(run, tokens([None, None], [True, False], ["a", name])) == 1


@pytest.mark.parametrize("name", OTHERS)
def test_other_tokens_are_not(tmp_path, name):
    run = run_of(tmp_path, ["word", name], {})
    assert padding_at_end(run, tokens([0, 1], [True, False])) == 0
    assert padding_at_end(run, tokens([0, 0, 0], [True, False, False])) == 0


def test_the_run_may_name_its_padding(tmp_path):
    run = run_of(tmp_path, ["word", "!", "</s>"], {"tokenizer": {"pad": 1}, "eos_token_ids": [2]})
    assert padding_at_end(run, tokens([0, 2, 1, 1], [True, True, False, False])) == 2


def test_an_end_token_that_pads_is_padding_where_it_repeats(tmp_path):
    run = run_of(tmp_path, ["word", "</s>"], {"tokenizer": {"pad": 1}, "eos_token_ids": [1]})
    assert padding_at_end(run, tokens([0, 1, 1, 1], [True, True, False, False])) == 2
    assert padding_at_end(run, tokens([0, 1, 1, 1], [True, False, False, False])) == 2, "the first end was not learned"


@pytest.mark.parametrize("info", [{"tokenizer": "x"}, {"tokenizer": {"pad": "x"}, "eos_token_ids": 3}])
def test_whatever_run_json_says_it_can_be_read(tmp_path, info):
    run = run_of(tmp_path, ["word", "<PAD>"], info)
    assert padding_at_end(run, tokens([0, 1], [True, None])) == 0
    assert learned(tokens([0, 1], [None, False])).tolist() == [True, False]
    assert padding_at_end(run, tokens([], [])) == 0

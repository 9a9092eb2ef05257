import pytest
from hypothesis import given
from hypothesis import strategies as st

from cavesson.errors import UserError
from cavesson.models.tiny import tiny_tokenizer
from cavesson.sampling.responses import StopTexts

TOKENIZER = tiny_tokenizer()
PAD, EOS = 1, 0


def ids(text: str) -> list[int]:
    return TOKENIZER(text)["input_ids"]


def grown(stop: StopTexts, tokens: list[int]) -> int | None:
    """Append one token after the other, as sampling does, up to the first cut."""
    for end in range(1, len(tokens) + 1):
        cut = stop.cut(tokens[:end])
        if cut is not None:
            return cut
    return None


def test_bytes_are_tokens():
    assert len(ids("aé🙂")) == 1 + 2 + 4


@pytest.mark.parametrize(
    ("stop", "text", "kept"),
    [
        (["###Human"], "Fine.\n###Human: and you?", "Fine.\n"),
        (["###Human"], "# ## ###Huma n", None),
        (["b", "a"], "xxab", "xx"),  # the earliest one counts, not the first in the list
        (["b", "aab"], "xxaab", "xx"),  # also where one token completes both
        (["a"], "abc", ""),
        (["é"], "cafés", "caf"),  # two tokens
        (["🙂"], "ok 🙂 ok", "ok "),  # four
        (["\n\n"], "é\n\né", "é"),
        (["Ende"], "größte Mühe: Ende", "größte Mühe: "),
        (["x"], "aaaa", None),
    ],
)
def test_cut_before_the_stop_text(stop, text, kept):
    expected = None if kept is None else len(ids(kept))
    assert grown(StopTexts(TOKENIZER, stop), ids(text)) == expected


def test_without_stop_texts_nothing_stops():
    assert StopTexts(TOKENIZER, ()).cut(ids("anything")) is None


def test_half_a_character_stops_nothing():
    stop = StopTexts(TOKENIZER, ["é"])
    first, second = ids("é")
    assert stop.cut([first]) is None
    assert stop.cut([second]) is None
    assert stop.cut([first, second]) == 0


def test_a_broken_character_before_the_stop_text_is_kept():
    broken = ids("é")[:1]
    assert StopTexts(TOKENIZER, ["##"]).cut([*broken, *ids("##")]) == 1


def test_special_tokens_are_no_text():
    # They neither hide a stop text nor become one.
    assert StopTexts(TOKENIZER, ["ab"]).cut([*ids("xa"), PAD, *ids("b")]) == 1
    assert StopTexts(TOKENIZER, ["endoftext"]).cut([*ids("x"), EOS]) is None


def test_a_token_with_text_on_both_sides_goes_with_the_stop_text():
    # A token that ends a word and begins the stop text cannot be split: what remains lies wholly before.
    class Pairs:
        added_tokens_decoder = TOKENIZER.added_tokens_decoder

        def decode(self, tokens: list[int], **_: object) -> str:
            return "".join(("aa", "a#", "##")[token] for token in tokens)

    assert StopTexts(Pairs(), ["###"]).cut([0, 1, 2]) == 1
    assert StopTexts(Pairs(), ["##"]).cut([0, 2]) == 1


def test_a_special_token_is_found_though_it_is_no_part_of_the_text():
    stop = StopTexts(TOKENIZER, ["q", "<|endoftext|>"])
    assert grown(stop, [*ids("ab"), 0]) == 2
    assert grown(stop, [*ids("ab"), 1]) is None  # another special token
    assert grown(stop, ids("abq")) == 2


def test_a_stop_text_that_can_never_be_found_is_refused():
    with pytest.raises(UserError, match=r"stop text '<\|endoftext\|>\\n' has a special token beside other text"):
        StopTexts(TOKENIZER, ["q", "<|endoftext|>\n"])


texts = st.text(alphabet="ab#é🙂\n", max_size=30)


@given(texts, st.lists(st.text(alphabet="ab#é🙂\n", min_size=1, max_size=4), min_size=1, max_size=3))
def test_what_is_kept_is_the_text_before_the_first_stop_text_to_be_complete(text, stops):
    tokens = ids(text)
    cut = grown(StopTexts(TOKENIZER, stops), tokens)
    complete = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    if not complete:
        assert cut is None
        return
    prefix = text[: complete[0]]
    start = min(prefix.index(stop) for stop in stops if stop in prefix)
    assert cut == len(ids(text[:start]))

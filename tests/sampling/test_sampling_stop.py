from collections.abc import Sequence

import pytest
from byte_fallback import PIECES, byte_fallback_tokenizer
from hypothesis import example, given
from hypothesis import strategies as st

from cavesson.errors import UserError
from cavesson.models.tiny import tiny_tokenizer
from cavesson.rollout.engines.responses import Growing, StopTexts

TOKENIZER = tiny_tokenizer()
FALLBACK = byte_fallback_tokenizer()
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


# --- characters as byte tokens, which are decoded together ---


def as_bytes(text: bytes) -> list[int]:
    return [3 + byte for byte in text]


def piece(name: str) -> int:
    return 259 + PIECES.index(name)


def test_a_run_of_bytes_is_decoded_together():
    assert FALLBACK.decode(as_bytes("a\n€".encode())) == "a\n€"
    assert FALLBACK.decode(as_bytes(b"\n\xe2")) == "\ufffd" * 2  # the line break too
    assert FALLBACK.decode([piece("▁a"), piece("▁##")]) == "a ##"  # the first space is removed


@pytest.mark.parametrize(
    ("tokens", "stop", "expected"),
    [
        (as_bytes(b"\xe2\n"), ["\n"], None),  # the whole has no line break, its last token alone has
        ([*as_bytes(b"\xe2\n"), piece("a"), *as_bytes(b"\n")], ["\n"], 3),
        (as_bytes("€€€\n".encode()), ["\n"], 9),  # the most recent tokens begin inside a character
        (as_bytes("€\n\n".encode()), ["\n\n"], 3),
        (as_bytes("ab€é".encode()), ["é"], 5),
        ([piece("##"), piece("▁##")], [" #"], 1),
        ([piece("▁##"), piece("a")], ["#"], 0),
        # The first space of a response is part of its text, although the tokenizer removes it where a text begins.
        ([piece("▁##"), piece("a")], [" #"], 0),
        ([piece("▁"), piece("##"), piece("a")], [" ##"], 0),
        (as_bytes(b" #"), [" #"], 0),
        ([1, piece("▁##")], [" #"], 1),
        ([piece("##"), piece("a")], [" #"], None),
        ([piece("▁a"), piece("▁##")], [" ##"], 1),
        ([piece("a"), *[1] * 20, piece("b")], ["ab"], 0),  # special tokens are no text
    ],
)
def test_stops_among_byte_tokens(tokens: list[int], stop: list[str], expected: int | None):
    assert grown(StopTexts(FALLBACK, stop), tokens) == expected


PROMPT = {TOKENIZER: ids("."), FALLBACK: [piece("a")]}


def slow(tokenizer, stops: Sequence[str], tokens: list[int]) -> tuple[int, int] | None:
    """The first prefix whose text contains a stop text, and how many of its tokens make up the text before it."""

    def continued(ids: list[int]) -> str:
        """The text of ids that follow another text, which keeps the space that they begin with."""
        before = tokenizer.decode(PROMPT[tokenizer])
        return str(tokenizer.decode([*PROMPT[tokenizer], *ids], skip_special_tokens=True).removeprefix(before))

    for end in range(1, len(tokens) + 1):
        text = continued(tokens[:end])
        found = [text.index(stop) for stop in stops if stop in text]
        if found:
            before = text[: min(found)]
            fits = [before.startswith(continued(tokens[:n])) for n in range(end + 1)]
            return end, max(n for n, fit in enumerate(fits) if fit)
    return None


CHARACTERS = "ab#é€🙂\n \ufffd"
TOKENS = st.one_of(
    st.sampled_from(CHARACTERS).map(lambda text: as_bytes(text.encode())),
    st.integers(0, 255).map(lambda byte: [3 + byte]),
    st.sampled_from(PIECES).map(lambda name: [piece(name)]),
    st.sampled_from([[1], [2]]),
)


@given(
    st.lists(TOKENS, max_size=25).map(lambda parts: [token for part in parts for token in part]),
    st.lists(st.text(alphabet=CHARACTERS, min_size=1, max_size=4), min_size=1, max_size=3),
)
@example(as_bytes(b"\xe2\n"), ["\n"])
@example(as_bytes("€€€\n".encode()), ["\n"])
def test_byte_tokens_stop_where_the_whole_text_does(tokens, stops):
    expected = slow(FALLBACK, stops, tokens)
    growing = Growing(1, [len(tokens) + 1], [], StopTexts(FALLBACK, stops))
    used = 0
    for token in tokens:
        if growing.all_done:
            break
        growing.append([0], [token])
        used += 1
    assert (growing.reasons[0] == "stop") == (expected is not None)
    if expected is None:
        assert growing.ids[0] == tokens
        return
    assert (used, len(growing.ids[0])) == expected
    kept = FALLBACK.decode(growing.ids[0], skip_special_tokens=True)
    assert not any(stop in kept for stop in stops)


@given(
    st.lists(st.integers(0, 257), max_size=25),
    st.lists(st.text(alphabet=CHARACTERS, min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_any_bytes_stop_where_the_whole_text_does(tokens, stops):
    expected = slow(TOKENIZER, stops, tokens)
    assert grown(StopTexts(TOKENIZER, stops), tokens) == (None if expected is None else expected[1])

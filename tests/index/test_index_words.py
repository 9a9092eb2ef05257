import unicodedata

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cavesson.text.features import CHARACTER, NGRAM, WORD, features
from cavesson.text.word_hashes import LONGEST, OVERLAP, hashes, pieces
from cavesson.text.words import ALONE, LETTER, SIGN, SPACE, code_points, fold, kinds_of, words

# Hiragana and Katakana; ideographs with extension A; their compatibility forms; supplementary and tertiary planes.
WITHOUT_SPACES = [(0x3040, 0x30FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x3FFFF)]
# Decomposed Vietnamese, Hindi and Thai with their marks, an emoji with modifiers, half of a surrogate pair.
MARKED = "tiê\u0301ng हिन्दी ภาษาไทย 🙏🏽❤\ufe0f\u200d\ud800\udc00"
TEXT = st.text(max_size=60) | st.text(alphabet="aAbB #1.\n人道ĐđéΣİß\x00" + MARKED, max_size=80)


def kind_of(character: str) -> int:
    """From the character's category and the names of the blocks that Unicode's charts give."""
    if any(first <= ord(character) <= last for first, last in WITHOUT_SPACES):
        return ALONE
    category = unicodedata.category(character)
    if character in "\t\n\v\f\r\x1c\x1d\x1e\x1f\x85" or category[0] == "Z":
        return SPACE
    return LETTER if category[0] in "LNM" or category == "Cs" else SIGN


def slow_words(text: str) -> list[str]:
    """One character after another."""
    found: list[tuple[str, int]] = []
    previous = SPACE
    for character in fold(text):
        kind = kind_of(character)
        if kind == previous and kind != ALONE and kind != SPACE:
            found[-1] = (found[-1][0] + character, kind)
        elif kind != SPACE:
            found.append((character, kind))
        previous = kind
    return [word for word, _ in found]


@settings(deadline=None)
@given(st.lists(TEXT, max_size=6))
@example(["Hello, WORLD!!", "", "我们 ok", "a\x00b"])
def test_words_are_those_that_one_character_after_another_gives(texts):
    assert words(texts) == list(map(slow_words, texts))


@settings(deadline=None)
@given(st.lists(TEXT, max_size=6))
def test_equal_words_and_only_those_have_equal_hashes(texts):
    cut = pieces(texts)
    found, of = [cut.text[a:b] for a, b in zip(cut.start, cut.stop, strict=True)], hashes(cut)
    assert len(set(found)) == len(np.unique(of)) == len(set(zip(found, of.tolist(), strict=True)))


def test_a_hash_does_not_depend_on_what_stands_around_the_word():
    alone, among = hashes(pieces(["night"])), hashes(pieces(["x y z", "good Night!"]))
    assert alone[0] in among


def test_kinds_of_characters():
    assert kinds_of(code_points("aé1́Ж가")).tolist() == [LETTER] * 6
    assert kinds_of(code_points("#_,🙂\x00\x1b")).tolist() == [SIGN] * 6
    assert kinds_of(code_points(" \n\t 　")).tolist() == [SPACE] * 5
    assert kinds_of(code_points("人あカ𠀀")).tolist() == [ALONE] * 4


@settings(deadline=None)
@given(st.text(alphabet="abc", min_size=LONGEST + 1, max_size=400), st.data())
def test_any_part_of_a_long_word_of_half_a_piece_is_in_a_piece(word, data):
    cut = pieces([word])
    found = [cut.text[a:b] for a, b in zip(cut.start, cut.stop, strict=True)]
    assert max(map(len, found)) <= LONGEST and word.startswith(found[0]) and word.endswith(found[-1])
    place = data.draw(st.integers(0, len(word) - OVERLAP))
    assert any(word[place : place + OVERLAP] in piece for piece in found)


@settings(deadline=None)
@given(st.text(max_size=50))
def test_folding_keeps_every_place(text):
    folded = fold(text)
    assert len(folded) == len(text)
    assert all(small in (c.lower(), c) for c, small in zip(text, folded, strict=True))


def documents(texts, most: int):
    """Texts, each with the number of the document that it is a part of, in order."""
    parts = st.lists(st.lists(texts, min_size=1, max_size=3), min_size=1, max_size=most)
    return parts.map(lambda all_: [(i, text) for i, some in enumerate(all_) for text in some])


@settings(deadline=None)
@given(documents(TEXT, 8))
def test_features_are_in_the_documents_that_have_them(given):
    documents_of, texts = zip(*given, strict=True)
    found, text = features(texts, np.array(documents_of))
    documents = np.split(found.documents, np.cumsum(found.counts))[:-1]
    got = {}
    for kind, start, stop, has in zip(found.kind, found.start, found.stop, documents, strict=True):
        if kind != NGRAM:
            got[int(kind), text[start:stop]] = has.tolist()
    wanted: dict = {}
    for i, one in given:
        for word in slow_words(one):
            wanted.setdefault((WORD, word), set()).add(i)
        for c in fold(one):
            if kind_of(c) == SIGN or (kind_of(c) == LETTER and ord(c) < 0x250):
                wanted.setdefault((CHARACTER, c), set()).add(i)
    assert got == {feature: sorted(has) for feature, has in wanted.items()}


@settings(deadline=None)
@given(documents(st.text(alphabet="ab .", max_size=30), 12))
def test_ngrams_that_three_documents_share_are_all_found(given):
    documents_of, texts = zip(*given, strict=True)
    found, _ = features(texts, np.array(documents_of))
    wanted: dict[tuple[str, ...], set[int]] = {}
    for i, text in given:
        cut = slow_words(text)
        for size in (2, 3):
            for place in range(len(cut) - size + 1):
                wanted.setdefault(tuple(cut[place : place + size]), set()).add(i)
    assert sorted(len(has) for has in wanted.values() if len(has) >= 3) == sorted(found.counts[found.kind == NGRAM])

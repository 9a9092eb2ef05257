"""Statistics of responses: numbers worked by hand, slow second versions, sacrebleu called naively."""

import math
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from sacrebleu.metrics import BLEU

from cavesson.text import statistics
from cavesson.text.statistics import distinct, response_statistics, self_bleu
from cavesson.text.words import words

TOKENS = st.lists(st.integers(0, 5), max_size=12)
RESPONSES = st.lists(TOKENS, max_size=8)


def test_distinct_counts_over_all_responses_together():
    # unigrams 1 2 1 | 1 2: two different of five; bigrams (1 2) (2 1) | (1 2): two different of three
    assert distinct([[1, 2, 1], [1, 2]], 1) == 2 / 5
    assert distinct([[1, 2, 1], [1, 2]], 2) == 2 / 3


def test_ngrams_do_not_cross_from_one_response_to_the_next():
    # joined, the bigrams would be (1 2) (2 1) (1 2)
    assert distinct([[1, 2], [1, 2]], 2) == 1 / 2


def slow_distinct(responses: Sequence[Sequence[int]], n: int) -> float | None:
    seen, total = [], 0
    for response in responses:
        for start in range(len(response)):
            gram = list(response[start : start + n])
            if len(gram) == n:
                total += 1
                if gram not in seen:
                    seen.append(gram)
    return len(seen) / total if total else None


@given(RESPONSES, st.sampled_from([1, 2]))
def test_distinct_is_the_slow_version(responses, n):
    assert distinct(responses, n) == slow_distinct(responses, n)


@given(RESPONSES, st.sampled_from([1, 2]), st.randoms())
def test_distinct_is_a_share_and_knows_no_order_of_responses(responses, n, random):
    value = distinct(responses, n)
    assume(value is not None)
    assert 0 < value <= 1
    assert distinct(random.sample(responses, len(responses)), n) == value


@given(st.sets(st.integers(0, 2**32 - 1), min_size=2), st.integers(1, 2))
def test_all_different_is_one(tokens, n):
    assert distinct([list(tokens)], n) == 1


def naive_self_bleu(lines: Sequence[str]) -> float:
    bleu = BLEU(tokenize="none", smooth_method="floor", smooth_value=0.1, effective_order=True)
    scores = []
    for i in range(len(lines)):
        others = [lines[j] for j in range(len(lines)) if j != i]
        scores.append(bleu.sentence_score(lines[i], others).score / 100)
    return sum(scores) / len(scores)


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=12), min_size=2, max_size=10))
def test_self_bleu_is_that_of_sacrebleu(responses):
    lines = [" ".join(f"w{token}" for token in response) for response in responses]
    assert self_bleu(responses) == pytest.approx(naive_self_bleu(lines), abs=1e-12)


def test_self_bleu_by_hand():
    # "1 2 3 4 5" beside "1 2 3 4 6": 4/5 unigrams, 3/4 bigrams, 2/3 trigrams, 1/2 four-grams, same length
    by_hand = (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** (1 / 4)
    assert self_bleu([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]]) == pytest.approx(by_hand)


def test_self_bleu_of_the_same_and_of_strangers():
    assert self_bleu([[1, 2, 3, 4, 5]] * 3) == pytest.approx(1)
    assert self_bleu([[1, 2, 3, 4], [5, 6, 7, 8]]) == 0


def test_tokens_with_blanks_inside_are_still_one_token():
    assert self_bleu([["a b", "c"], ["a", "b c"]]) == 0


def test_self_bleu_takes_responses_at_even_distances_and_their_beginnings():
    # of 20 every second is taken; the others, and what is past the limit, are all different and would lower it
    same = list(range(statistics.SELF_BLEU_TOKENS))
    responses = [[*same, -n] if n % 2 == 0 else [1000 + n] * 9 for n in range(2 * statistics.SELF_BLEU_RESPONSES)]
    assert self_bleu(responses) == pytest.approx(1)


def test_self_bleu_is_never_taken_of_more():
    few = [[n, n + 1, n + 2, n + 3, 7] for n in range(statistics.SELF_BLEU_RESPONSES)]
    more = [response for response in few for _ in range(3)]
    assert self_bleu(more) == self_bleu(few)


def test_repetition_by_hand():
    # "a b a b a b a": four-grams abab baba abab baba, two of four come again; "a b c d e": none does
    assert statistics.repetition(["abababa"]) == 1 / 2
    assert statistics.repetition(["abababa", "abcde"]) == 1 / 4
    assert statistics.repetition(["abababa", "abc"]) == 1 / 2  # too short to have a four-gram


def test_longest_run_by_hand():
    assert statistics.longest_run(["aabbba", "ab", ""]) == (3 + 1) / 2


def test_identical_by_hand():
    assert statistics.identical(["a", "b", "a", "c", "a"]) == 3 / 5
    assert statistics.identical(["", ""]) == 1


def test_entropy_by_hand():
    # half, quarter, quarter
    assert statistics.unigram_entropy([[1, 1], [2, 3]]) == pytest.approx(1.5 * math.log(2))
    assert statistics.unigram_entropy([[4, 4], [4]]) == 0


@given(st.integers(1, 50))
def test_equally_frequent_tokens_have_the_highest_entropy(count):
    assert statistics.unigram_entropy([[token] for token in range(count)]) == pytest.approx(math.log(count))


def test_words():
    assert words(["Don't stop :) 3 Läufe!"]) == [["don", "'", "t", "stop", ":)", "3", "läufe", "!"]]
    assert words(["春眠不觉晓,OK", " \n", "x"]) == [["春", "眠", "不", "觉", "晓", ",", "ok"], [], ["x"]]
    assert words([]) == []


@pytest.mark.parametrize("text", ["tiếng Việt", unicodedata.normalize("NFD", "tiếng Việt"), "हिन्दी भाषा"])
def test_a_word_is_not_split_at_its_combining_marks(text: str) -> None:
    assert words([text]) == [text.lower().split()]


def test_statistics_of_a_step():
    found = response_statistics(["ab", "ab", ""], [[1, 2], [1, 2], []])
    assert found == {
        "text/distinct_1": 2 / 4,
        "text/distinct_2": 1 / 2,
        "text/self_bleu": pytest.approx(1),
        "text/longest_run": 1,
        "text/identical": 2 / 3,
        "text/unigram_entropy": pytest.approx(math.log(2)),
        "text/empty": 1 / 3,
        "length/response_min": 0,
        "length/response_median": 2,
        "length/response_max": 2,
    }  # and no repetition: there is no four-gram


def test_without_ids_words_are_counted():
    found = response_statistics(["to be or", "not to be"])
    assert found["text/distinct_1"] == 4 / 6
    assert found["length/response_max"] == 3


def test_one_response_has_no_other_to_resemble():
    found = response_statistics(["ab"], [[1, 2]])
    assert {"text/self_bleu", "text/identical"}.isdisjoint(found)
    assert found["text/distinct_1"] == 1


def test_nothing_is_invented_of_nothing():
    assert response_statistics([], []) == {}
    # two empty responses are empty, identical and 0 tokens long; they have no n-grams to tell anything about
    assert response_statistics(["", ""], [[], []]) == {
        "text/identical": 1,
        "text/empty": 1,
        "length/response_min": 0,
        "length/response_median": 0,
        "length/response_max": 0,
    }


@given(RESPONSES)
def test_every_statistic_is_finite(ids):
    texts = ["".join("abcdef"[token] for token in row) for row in ids]
    found = response_statistics(texts, ids)
    assert all(math.isfinite(value) and value >= 0 for value in found.values())
    shares = {name: value for name, value in found.items() if not name.startswith("length/")}
    unbounded = {"text/longest_run", "text/unigram_entropy"}
    assert all(value <= 1 + 1e-9 for name, value in shares.items() if name not in unbounded)


def test_every_statistic_is_explained():
    found = response_statistics(["a b c d e", "a"])
    explained = Path(__file__).parents[2] / "docs" / "text-statistics.md"
    assert len(found) == 11
    assert {f"| `{name}` |" for name in found} <= set(re.findall(r"^\| `\S+` \|", explained.read_text("utf-8"), re.M))

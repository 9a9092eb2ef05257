import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from index_helpers import WORDS, indexed, new_run, record, text_of

from cavesson.index.patterns import counted, read_counts
from cavesson.index.postings import PieceReader
from cavesson.index.search import candidates, dictionary, is_exact
from cavesson.record import Recorder, begin_attempt
from cavesson.text.words import fold


@pytest.fixture(scope="module")
def shot(tmp_path_factory):
    folder = new_run(tmp_path_factory.mktemp("search") / "run")
    record(folder, range(12), batch=8)
    return indexed(folder)


def truth(shot, text: str) -> np.ndarray:
    keys = zip(shot.raw("step").tolist(), shot.raw("sample").tolist(), strict=True)
    return np.array([fold(text) in fold(text_of(step, sample)) for step, sample in keys])


TEXTS = st.sampled_from(
    sorted(
        {w[a:b] for w in [*WORDS, "the café", "Đường :) 音乐"] for a in range(len(w)) for b in range(a + 1, len(w) + 1)}
    )
)


@settings(deadline=None)
@given(TEXTS.map(str.strip).filter(bool) | st.text(min_size=1, max_size=4).map(str.strip).filter(bool))
@example("CONCERT")
@example("$5")
@example("#")
@example("音乐会 很")
@example("é")
@example("r")
@example("on  \u2028 night")
def test_candidates_hold_every_hit_and_one_word_is_exact(shot, text):
    found, wanted = candidates(shot, {text}), truth(shot, text)
    assert not (wanted & ~found).any()
    if is_exact(text):
        assert found.tolist() == wanted.tolist()


@settings(deadline=None)
@given(st.lists(st.sampled_from(["fri", "on friday", "#", "xyzzy", "音", "5", "great :)"]), max_size=4, unique=True))
def test_of_several_texts_any_will_do(shot, texts):
    each = [candidates(shot, {text}) for text in texts]
    assert (
        candidates(shot, texts).tolist() == np.any(each, axis=0).tolist()
        if texts
        else not candidates(shot, texts).any()
    )


def test_one_word_is_exact_and_several_are_not():
    assert is_exact("fri") and is_exact("#") and is_exact("音")
    assert not is_exact("on Friday") and not is_exact("音乐")


def test_a_part_of_a_very_long_word_is_found(tmp_path):
    folder = new_run(tmp_path / "run")
    word = "".join(np.random.default_rng(0).choice(list("abcdefgh"), 5_000))
    record(folder, [0], response=[word, "x" + word[100:300], "abc", "", "a" * 1_000, "b"])
    shot = indexed(folder)
    for place in (0, 33, 101, 250, 4_960):
        for length in (1, 2, 31, 32, 33, 90):
            text = word[place : place + length]
            texts = [word, "x" + word[100:300], "abc", "", "a" * 1_000, "b"]
            wanted = [text in one for one in texts]
            found = candidates(shot, {text})
            assert all(a or not b for a, b in zip(found, wanted, strict=True)), (place, length)
            assert not is_exact(text) or found.tolist() == wanted
            assert is_exact(text) == (length <= 32)


def slow_counts(shot, feature_rows: set[int]) -> tuple[int, float]:
    """How many of a piece's rows, and the sum of their rewards counted from the mean of their step."""
    step, reward = shot.raw("step"), shot.raw("reward").astype(float)
    return len(feature_rows), sum(reward[row] - reward[step == step[row]].mean() for row in feature_rows)


def test_patterns_count_responses_and_rewards_within_their_step(shot):
    (piece,) = shot.state.pieces
    counts = read_counts(shot.folder, piece)
    known = dictionary(shot.folder, shot.state.pieces)
    assert counts.responses.sum() == 96 and counts.steps.tolist() == [[s, s] for s in range(12)]
    checked = 0
    for i, number in enumerate(counts.feature):
        if known.kinds[number] == 0:
            word = known.texts[int(number)].as_py()
            rows = {row for row in range(96) if word in words_of(shot, row)}
            many, reward = slow_counts(shot, rows)
            if counts.counts[i].sum() == many:
                assert counts.reward[i].sum() == pytest.approx(reward, abs=1e-3)
                checked += 1
    assert checked > 10


def words_of(shot, row: int) -> list[str]:
    from test_index_words import slow_words

    return slow_words(text_of(int(shot.raw("step")[row]), int(shot.raw("sample")[row])))


def test_rollouts_of_a_superseded_attempt_are_no_longer_counted(tmp_path):
    folder = new_run(tmp_path / "run")
    record(folder, range(3), response=["old"] * 6)
    indexed(folder)
    attempt = begin_attempt(folder, start_step=1)
    with Recorder(folder, attempt=attempt) as recorder:
        from index_helpers import rows_of, tokens_of

        recorder.rollouts(1, rows_of(1, 6) | {"response": ["new"] * 6}, tokens_of(1, 6))
    shot = indexed(folder)
    old = dictionary(shot.folder, shot.state.pieces).found("equals", "old")
    total = 0
    for piece in shot.state.pieces:
        counts = read_counts(shot.folder, piece)
        total += counts.counts[np.isin(counts.feature, np.flatnonzero(old))].sum()
        again = counted(shot, piece, PieceReader(shot.folder, piece).postings())
        assert again.counts.tolist() == counts.counts.tolist()
    assert total == 6

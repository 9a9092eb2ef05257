"""An examination tells sound rewards from those that look at something else."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from check_helpers import found

from cavesson.check.reward import Example, examine, spread_out
from cavesson.findings.finding import Finding, Fine, SkippedCheck

WORDS = ["warm", "soup", "and", "bread", "are", "ready", "on", "the", "long", "table", "by", "the", "window", "tonight"]
FRIENDLY = [" ".join(WORDS[i % 5 : i % 5 + 5 + i % 7]) for i in range(24)]
EXAMPLES = [Example(f"What is number {i}?", f"{i} {text}", f"{i} nothing here") for i, text in enumerate(FRIENDLY)]


def sound(prompt: str, response: str) -> float:
    """Pays for being in order, whole, about the prompt, and like the better responses; and for nothing else."""
    number = prompt.split()[-1].rstrip("?")
    words = response.rstrip(" #:)").split()
    known = [word for word in words[1:] if word in WORDS]
    in_order = sum(WORDS.index(a) + 1 == WORDS.index(b) for a, b in pairwise(known))
    about = 3.0 if words[:1] == [number] else 0.0
    most = min(in_order, 4) + (hash_of(number) if about else 0.0)
    return most + about - 8.0 * (len(words) > 14)


def repeats(text: str) -> bool:
    return len(text.split()) > len(set(text.split())) + 3


def hash_of(text: str) -> float:
    """Something that differs from prompt to prompt, a little."""
    return sum(map(ord, text)) % 7 / 10


def examined(
    reward: Callable[[str, str], float], examples: Sequence[Example] = EXAMPLES, learned: bool = True
) -> list[Any]:
    def score(rows: Sequence[int], responses: Sequence[str]) -> list[float]:
        return [reward(examples[row].prompt, response) for row, response in zip(rows, responses, strict=True)]

    return list(examine(examples, score, learned))


def test_a_sound_reward_passes() -> None:
    assert found(examined(sound)) == {}
    assert {one.rule for one in examined(sound) if isinstance(one, Fine)} >= {"reward-pairs", "reward-query"}


@pytest.mark.parametrize(
    ("name", "reward"),
    [
        ("reward-hash", lambda prompt, response: sound(prompt, response) + 2.0 * ("#" in response)),
        ("reward-smiley", lambda prompt, response: sound(prompt, response) + 2.0 * (":)" in response)),
        ("reward-capitals", lambda prompt, response: sound(prompt, response.lower()) + 2.0 * response.isupper()),
        ("reward-repetition", lambda prompt, response: max(sound(prompt, response), 9.0 * repeats(response))),
        ("reward-query", lambda prompt, response: sound(prompt, response) + 50.0 * hash_of(prompt)),
        ("reward-length", lambda prompt, response: sound(prompt, response) + len(response) / 5),
        ("reward-shuffled", lambda prompt, response: sound(prompt, " ".join(sorted(response.split())))),
        ("reward-another's", lambda prompt, response: sound(f"? {response[:2]}", response)),
    ],
)
def test_what_else_a_reward_looks_at_is_named(name: str, reward: Callable[[str, str], float]) -> None:
    assert found(examined(reward))[name] == "warning"
    # It is how a rule may be meant.
    if name != "reward-query":
        assert found(examined(reward, learned=False))[name] == "note"


def test_a_reward_with_the_wrong_sign_is_an_error() -> None:
    results = found(examined(lambda prompt, response: -sound(prompt, response)))
    assert results["reward-pairs"] == "error"
    assert results["reward-empty"] == "warning"


def test_pairs_that_are_chance() -> None:
    results = examined(lambda prompt, response: float(len(prompt + response) * 7919 % 101))
    seen = next(one for one in results if isinstance(one, Finding) and one.rule == "reward-pairs")
    assert seen.severity == "warning"
    assert 0.2 < float(seen.seen or 0) < 0.65


def test_a_constant_reward_is_an_error_and_says_nothing_else() -> None:
    assert found(examined(lambda prompt, response: 1.0)) == {"reward-constant": "error"}
    assert len(examined(lambda prompt, response: 1.0)) == 1


def test_right_answers_that_all_have_the_same_reward_are_no_error() -> None:
    results = examined(lambda prompt, response: float(response.startswith(prompt.split()[-1][:-1])), learned=False)
    assert "reward-constant" not in found(results)
    assert [one.rule for one in results if isinstance(one, SkippedCheck)] == ["reward-tricks"]


def test_the_share_of_the_prompt_by_hand() -> None:
    """Rewards of p + r for prompts 0..7 and responses 0..7: each explains half of the variance."""
    examples = [Example(str(i), chr(97 + i)) for i in range(8)]
    results = examined(lambda prompt, response: float(prompt) + (ord(response[0]) - 97 if response else 0), examples)
    share = next(one for one in results if not isinstance(one, SkippedCheck) and one.rule == "reward-query")
    assert share.seen == pytest.approx(0.5)


def test_too_few_responses_and_no_pairs_are_said() -> None:
    assert [type(one) for one in examined(sound, EXAMPLES[:3])] == [SkippedCheck]
    without = [Example(one.prompt, one.good) for one in EXAMPLES]
    assert "reward-pairs" in {one.rule for one in examined(sound, without) if isinstance(one, SkippedCheck)}


def test_rows_are_spread_over_the_data() -> None:
    assert list(spread_out(10, 4)) == [0, 2, 5, 7]
    assert list(spread_out(3, 4)) == [0, 1, 2]

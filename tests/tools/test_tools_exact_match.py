"""The reward for answers that can be checked: what counts as the final answer, and as the same one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dressage.errors import UserError
from dressage.rewards.base import call_reward
from dressage.rewards.exact_match import exact_match, matches

GSM8K = "Janet sells 16 - 3 - 4 = <<16-3-4=9>>9 duck eggs a day.\nShe makes 9 * 2 = $<<9*2=18>>18 every day.\n#### 18"


@pytest.mark.parametrize(
    ("response", "truth"),
    [
        ("She makes $18.", GSM8K),
        ("9 * 2 = 18\n#### 18", GSM8K),
        ("#### 18\nThat was problem 7 of 9.", GSM8K),
        ("first #### 7, no: #### 18", GSM8K),
        (r"so \boxed{18} eggs, and 3 are left", GSM8K),
        (r"\boxed{17}, no, \boxed{18}", GSM8K),
        ("The answer is **18**.", "18"),
        ("18.00 dollars", "18"),
        ("1,200", "1200"),
        ("1200.0 in all", "1,200"),
        (r"\$1{,}200 or 1,200", "1200"),
        ("that leaves -3", "-3"),
        ("that leaves −3", "-3"),
        ("10-3 is 7, 7 = 10-3", "3"),
        ("one half is 1/2", "0.5"),
        (r"\boxed{\frac{1}{2}}", "0.5"),
        (r"\boxed{\dfrac{3}{4}}", r"\boxed{\frac{6}{8}}"),
        ("it rose to 25%", "25"),
        ("5kg", "5"),
        ("0.333", ".333"),
        (" Paris. ", "paris"),
        (r"It is \boxed{New  York}", "new york"),
        ("#### blue", "Blue."),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    ],
)
def test_the_same_answer(response: str, truth: str) -> None:
    assert matches(response, truth)


@pytest.mark.parametrize(
    ("response", "truth"),
    [
        ("18 eggs on 2 days", GSM8K),
        ("18, so #### 17", GSM8K),
        (r"18, so \boxed{17}", GSM8K),
        ("", GSM8K),
        ("eighteen", GSM8K),
        ("####", GSM8K),
        ("180", "18"),
        ("1.8", "18"),
        ("18", "-18"),
        ("3", "-3"),
        ("1/0", "0"),
        ("9" * 5000, "9"),
        ("Paris is the capital", "Paris"),
        ("Lyon", "Paris"),
        ("", "Paris"),
    ],
)
def test_another_answer(response: str, truth: str) -> None:
    assert not matches(response, truth)


def test_it_is_a_reward_of_one_number_per_response() -> None:
    columns = {"ground_truth": ["4", 5, 6.0], "level": [1, 2, 3]}
    scores = call_reward(exact_match, "exact_match", ["a"] * 3, ["2+2=4", "5.0", "7"], columns)
    assert scores == {"exact_match": [1.0, 1.0, 0.0]}


@pytest.mark.parametrize(
    ("columns", "part"),
    [({}, "needs a column ground_truth"), ({"ground_truth": ["1", " "]}, "ground_truth is empty for prompt 'second'")],
)
def test_without_a_truth_there_is_no_match(columns: dict[str, list[str]], part: str) -> None:
    with pytest.raises(UserError, match=part):
        exact_match(["first", "second"], ["1", "2"], **columns)


@given(st.decimals(-(10**9), 10**9, places=2), st.text(alphabet="ab \n.,:$*"))
def test_a_number_is_found_at_the_end_of_any_sentence(number: object, sentence: str) -> None:
    assert matches(f"{sentence} {number}", str(number))
    assert matches(f"7 {sentence} {number:,} .", str(number))


@given(st.text(), st.text(min_size=1))
def test_any_text_is_read(response: str, truth: str) -> None:
    assert matches(response, truth) in (True, False)


@given(st.text(alphabet="0123456789.,/-#{}\\boxedfrac$% "), st.text(alphabet="0123456789.,/-#{}\\boxed ", min_size=1))
def test_any_broken_number_is_read(response: str, truth: str) -> None:
    assert matches(response, truth) in (True, False)

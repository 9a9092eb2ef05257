"""The reward for answers that can be checked: what counts as the final answer, and as the same one."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reward_helpers import call_reward

from cavesson.errors import UserError
from cavesson.rollout.rewards.exact_match import exact_match, matches

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
        ("1e5", "100000"),
        ("100,000", "1e5"),
        ("1.5E-3", "0.0015"),
        (r"\boxed{1.2 \times 10^{3}}", "1200"),
        (r"\boxed{1200}", r"1.2 \cdot 10^3"),
        (r"\boxed{x+1}", "x + 1"),
        (r"\boxed{ x  +  1 }", "x+1"),
        (r"\boxed{x^{2}}", "$x^2$"),
        (r"\boxed{\left(1, 2\right)}", "(1,2)"),
        (r"\boxed{1{,}200}", "1200"),
        (r"\boxed{1\,200}", "1200"),
        ("1\u202f200", "1200"),
        (r"\boxed{-\frac{1}{2}}", "-0.5"),
        (r"\boxed{\frac{-1}{2}}", "-1/2"),
        (r"\boxed{\frac12}", "0.5"),
        (r"\boxed{1\frac{1}{2}}", "1.5"),
        (r"\boxed{-1\frac12}", "-1.5"),
        ("that is 1 1/2", "3/2"),
        (r"\boxed{\dfrac{\sqrt{2}}{2}}", r"\frac{\sqrt{2}}{2}"),
        (r"\boxed{\dfrac{x+1}{2}}", "(x+1)/2"),
        (r"\boxed{\text{Paris}}", "Paris"),
        (r"\boxed{18\text{ dollars}}", "18"),
        ("18", r"18\text{ dollars}"),
        (r"\boxed{18 \mathrm{~m}}", r"18\,\mathrm{m}"),
        (r"\boxed{60 km/h}", "60"),
        (r"\boxed{x = 42}", "42"),
        (r"\boxed{42.}", "42"),
        (r"\boxed{90^\circ}", "90"),
        (r"\boxed{25\%}", "25%"),
        ("-$3", "-3"),
        (r"\boxed{- 3}", "-3"),
        ("+3", "3"),
        (r"\boxed {42}", "42"),
        (r"\boxed{\left\{ 1 \right.}", r"\{1"),
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
        (r"so it is \boxed{42", "42"),
        (r"\boxed{42}, no, \boxed{43", "42"),
        (r"\boxed{42", r"\boxed{42"),
        (r"\boxed{Paris", "Paris"),
        (r"\boxed{2*3}", "23"),
        (r"\boxed{10-3}", "3"),
        (r"\boxed{2^{42}}", "42"),
        (r"\boxed{\sqrt{42}}", "42"),
        (r"\boxed{42x}", "42"),
        (r"\boxed{41 or 42}", "42"),
        (r"\boxed{1\frac{1}{2}}", "5.5"),
        (r"\boxed{\text{A}}", r"\boxed{\text{B}}"),
        (r"\boxed{\frac{1}{2x}}", r"\frac{1}{2}x"),
        (r"\boxed{\frac{x+1}{2}}", "x+1/2"),
        ("1e5", "5"),
        ("1e999999999", "1"),
        ("1 2", "12"),
        (r"\boxed{1 2}", "12"),
        ("NewYork", "New York"),
        ("0.25", "25%"),
        ("", "Paris"),
        ("", "$.$"),
    ],
)
def test_another_answer(response: str, truth: str) -> None:
    assert not matches(response, truth)


@pytest.mark.parametrize(
    "text",
    [" {0}", "\n{0}", r"{0} \times", "-{0}x", r"\times 10^{0}x", "x{1}(", "1{0}x", r"\frac{0}x", "{2}"],
    ids=repr,
)
@pytest.mark.parametrize("truth", ["7", "words"])
def test_long_runs_of_a_character_are_read_in_linear_time(text: str, truth: str) -> None:
    """In quadratic time, they would take more than ten seconds."""
    read, begun = text.format(" " * 50_000, "_" * 50_000, "\n" * 50_000), time.process_time()
    assert not matches(read, truth)
    assert time.process_time() - begun < 1


def test_it_is_a_reward_of_one_number_per_response() -> None:
    columns = {"ground_truth": ["4", 5, 6.0], "level": [1, 2, 3]}
    scores = call_reward(exact_match, "exact_match", ["a"] * 3, ["2+2=4", "5.0", "7"], columns)
    assert scores == {"exact_match": [1.0, 1.0, 0.0]}


@pytest.mark.parametrize(
    ("columns", "part"),
    [
        ({}, "needs a column ground_truth"),
        ({"ground_truth": ["1", " "]}, "ground_truth is empty for prompt 'second'"),
        ({"ground_truth": ["1", r"\boxed{2"]}, "ground_truth has a box that is not closed for prompt 'second'"),
    ],
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

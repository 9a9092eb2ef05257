from fractions import Fraction

import numpy as np
import pytest
import torch

from dressage.errors import UserError
from dressage.rewards import Reward, build_rewards, score
from dressage.rewards.base import call_reward
from dressage.rewards.lowercase import lowercase
from dressage.rewards.sentiment import sentiment
from dressage.rewards.settings import RewardSettings

CPU = torch.device("cpu")
PROMPTS, RESPONSES = ["p", "q"], ["one", "two"]


def call(result):
    return call_reward(lambda prompts, responses: result, "mine", PROMPTS, RESPONSES, {})


@pytest.mark.parametrize(
    ("result", "part"),
    [
        (None, "mine returned None"),
        ("12", "mine returned '12'"),
        (3.0, "mine returned 3.0"),
        (np.float64(3), "mine returned 3.0"),
        (iter([1.0, 2.0]), "it must return one number per response"),
        ([1.0], "mine returned 1 values for 2 responses"),
        ([1.0, 2.0, 3.0], "mine returned 3 values for 2 responses"),
        (np.zeros((1, 2)), "mine returned 1 values for 2 responses"),
        ([1.0, float("nan")], "mine returned nan for response 1"),
        ([float("inf"), 1.0], "mine returned inf for response 0"),
        (torch.tensor([1.0, float("-inf")]), "mine returned -inf for response 1"),
        (["1.0", 2.0], "mine returned '1.0' for response 0"),
        ([1.0, None], "mine returned None for response 1"),
        (np.zeros((2, 1)), "mine returned [0.0] for response 0"),
        ({"good": [1.0, 2.0], "bad": [1.0]}, "mine/bad returned 1 values for 2 responses"),
        ({"good": None}, "mine/good returned None"),
        ({}, "mine returned no part"),
    ],
)
def test_anything_but_one_finite_number_per_response_is_refused(result, part):
    with pytest.raises(UserError) as error:
        call(result)
    assert part in str(error.value)


@pytest.mark.parametrize(
    "result",
    [
        [1, 2],
        (1.0, 2.0),
        np.array([1, 2], dtype=np.float32),
        list(np.array([1, 2], dtype=np.float32)),
        torch.tensor([1.0, 2.0], dtype=torch.bfloat16, requires_grad=True),
        [Fraction(1), Fraction(2)],
    ],
)
def test_every_kind_of_number_is_taken(result):
    parts = call(result)
    assert parts == {"mine": [1.0, 2.0]}
    assert all(type(value) is float for value in parts["mine"])


def test_parts_are_named_after_their_reward():
    assert call({"length": [1, 2], "style": [3, 4]}) == {"mine/length": [1.0, 2.0], "mine/style": [3.0, 4.0]}


def test_a_reward_gets_prompts_responses_and_columns():
    def check(prompts, responses, **columns):
        assert (prompts, responses, columns) == (PROMPTS, RESPONSES, {"answer": [7, 8]})
        return [0.0, 0.0]

    call_reward(check, "check", PROMPTS, RESPONSES, {"answer": [7, 8]})


def test_a_mistake_inside_a_reward_is_not_hidden():
    def broken(prompts, responses):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        call_reward(broken, "broken", PROMPTS, RESPONSES, {})


def test_the_total_weighs_every_part():
    rewards = (
        Reward("a", lambda prompts, responses: [1.0, 2.0], weight=0.5),
        Reward("b", lambda prompts, responses: {"x": [10.0, 20.0], "y": [1.0, -1.0]}, weight=-2.0),
    )
    scored = score(rewards, PROMPTS, RESPONSES, {})
    assert scored.parts == {"a": [1.0, 2.0], "b/x": [10.0, 20.0], "b/y": [1.0, -1.0]}  # as they are, unweighted
    assert scored.total == [0.5 - 20 - 2, 1 - 40 + 2]


@pytest.mark.parametrize(
    "rewards",
    [
        (Reward("a", lowercase), Reward("a", sentiment)),
        (Reward("a/x", lowercase), Reward("a", lambda prompts, responses: {"x": [1.0, 2.0]})),
    ],
)
def test_two_rewards_of_one_name_are_refused(rewards):
    with pytest.raises(UserError, match="two rewards are called 'a"):
        score(rewards, PROMPTS, RESPONSES, {})


def test_lowercase_counts_ascii_letters_per_character():
    assert lowercase([""] * 5, ["abCD", "", "ab  ", "éà", "xyz"]) == [0.5, 0.0, 0.5, 0.0, 1.0]


def test_sentiment_has_the_right_sign():
    good, bad, empty, prompted = sentiment(
        ["I hate it, terrible!", "", "I love it, wonderful!", "I hate it, terrible!"],
        ["A wonderful, charming film; I loved it.", "A horrible, boring mess; I hated it.", "", "A wonderful film."],
    )
    assert good > 0.5
    assert bad < -0.5
    assert empty == 0.0  # and the prompt is not scored
    assert prompted > 0.3


def test_rewards_are_built_by_name_with_weights():
    settings = (RewardSettings(use="sentiment", weight=2.0), RewardSettings(use="lowercase", name="letters"))
    rewards = build_rewards(settings, CPU)
    assert [(r.name, r.function, r.weight) for r in rewards] == [
        ("sentiment", sentiment, 2.0),
        ("letters", lowercase, 1.0),
    ]


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ([{"use": "sentimental"}], "there is no reward 'sentimental'; use exact_match, lowercase, sentiment,"),
        ([{"use": "lowercase", "options": {"path": "x"}}], "reward 'lowercase' takes no options"),
        ([{"use": "classifier", "options": {"pth": "x"}}], "reward 'classifier': options: "),
        ([{"use": "classifier"}], "path"),
        ([{"use": "nowhere.py:mine"}], "reward nowhere.py: there is no such file"),
    ],
)
def test_mistakes_in_a_recipe_are_explained(settings, part):
    with pytest.raises(UserError) as error:
        build_rewards([RewardSettings(**s) for s in settings], CPU)
    assert part in str(error.value)

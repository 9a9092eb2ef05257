import functools
from fractions import Fraction

import numpy as np
import pytest
import torch
from reward_helpers import call_reward

from cavesson.errors import UserCodeError, UserError
from cavesson.rollout.rewards.exact_match import exact_match
from cavesson.rollout.rewards.lowercase import lowercase
from cavesson.rollout.rewards.sentiment import sentiment
from cavesson.rollout.rewards.settings import RewardSettings
from cavesson.rollout.rewards.table import Reward, build_rewards, rehearse, score

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
        ([1.0], "mine returned 1 value for 2 responses"),
        ([1.0, 2.0, 3.0], "mine returned 3 values for 2 responses"),
        (np.zeros((1, 2)), "mine returned 1 value for 2 responses"),
        ([1.0, float("nan")], "mine returned nan for response 1"),
        ([float("inf"), 1.0], "mine returned inf for response 0"),
        ([1.0, 10**400], "mine returned an integer of more than 90 digits for response 1"),
        ([Fraction(10**400), 1.0], "for response 0; it must return finite numbers"),
        ([-1e39, 1.0], "mine returned -1e+39 for response 0"),  # float32 has no such number
        (torch.tensor([1.0, float("-inf")]), "mine returned -inf for response 1"),
        (["1.0", 2.0], "mine returned '1.0' for response 0"),
        (
            [1.0, (2.0, 3.0)],
            "mine returned (2.0, 3.0) for response 1; it must return numbers, None, or (number, reason)",
        ),
        ([1.0, (2.0, "a", "b")], "mine returned (2.0, 'a', 'b') for response 1"),
        ([(1.0, "a"), ("2", "b")], "mine returned '2' for response 1"),
        ([(1.0, "a"), (float("nan"), "b")], "mine returned nan for response 1; it must return finite numbers"),
        ((1.0, "a reason"), "mine returned 'a reason' for response 1"),
        ([1.0, torch.tensor(float("nan"))], "mine returned nan for response 1; it must return finite numbers"),
        ([np.float32("inf"), 1.0], "mine returned inf for response 0; it must return finite numbers"),
        ([1.0, torch.tensor([2.0])], "mine returned tensor([2.]) for response 1; it must return numbers"),
        ([np.array([1.0]), 2.0], "mine returned array([1.]) for response 0; it must return numbers"),
        ([1.0, torch.tensor(2 + 0j)], "mine returned tensor(2.+0.j) for response 1; it must return numbers"),
        ([np.complex64(1), 2.0], "mine returned np.complex64(1+0j) for response 0; it must return numbers"),
        ([np.str_("1"), 2.0], "mine returned np.str_('1') for response 0; it must return numbers"),
        ([1.0, np.datetime64("2026-01-02")], "mine returned np.datetime64('2026-01-02') for response 1; it must"),
        ([np.datetime64(1, "ns"), 2.0], "for response 0; it must return numbers"),
        (np.array([1, 2], dtype="datetime64[ns]"), "it must return one number per response"),
        ([np.ma.masked, 2.0], "mine returned masked for response 0; it must return numbers"),  # its item() is 0.0
        (np.zeros((2, 1)), "mine returned [0.0] for response 0"),
        ({"good": [1.0, 2.0], "bad": [1.0]}, "mine/bad returned 1 value for 2 responses"),
        ({"good": None}, "mine/good returned None"),
        ({}, "mine returned no part"),
    ],
)
def test_anything_but_one_finite_number_per_response_is_refused(result, part):
    with pytest.raises(UserError) as error:
        call(result)
    assert part in str(error.value)
    assert str(error.value).endswith(f" ({__file__}, line {call.__code__.co_firstlineno + 1})")


@pytest.mark.parametrize(
    "result",
    [
        [1, 2],
        (1.0, 2.0),
        np.array([1, 2], dtype=np.float32),
        list(np.array([1, 2], dtype=np.float32)),
        torch.tensor([1.0, 2.0], dtype=torch.bfloat16, requires_grad=True),
        [Fraction(1), Fraction(2)],
        [torch.tensor(1.0), torch.tensor(2.0, dtype=torch.bfloat16, requires_grad=True)],
        (torch.tensor(1), torch.tensor(2.0, dtype=torch.float64)),
        [np.float16(1), np.int8(2)],
        [np.array(1.0), np.array(2)],
    ],
)
def test_every_kind_of_number_is_taken(result):
    parts = call(result)
    assert parts == {"mine": [1.0, 2.0]}
    assert all(type(value) is float for value in parts["mine"])


@pytest.mark.parametrize(
    "result",
    [
        [False, True],
        [np.bool_(False), np.bool_(True)],
        list(np.array([1, 2]) > 1),
        [torch.tensor(False), torch.tensor(True)],
        torch.tensor([False, True]),
    ],
)
def test_true_is_1_and_false_is_0(result):
    parts = call({"right": result})
    assert parts == {"mine/right": [0.0, 1.0]}
    assert all(type(value) is float for value in parts["mine/right"])


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

    with pytest.raises(UserCodeError, match="the reward broken raised ZeroDivisionError") as error:
        call_reward(broken, "broken", PROMPTS, RESPONSES, {})
    line = broken.__code__.co_firstlineno + 1
    assert str(error.value).endswith(f"({__file__}, line {line})")
    assert isinstance(error.value.__cause__, ZeroDivisionError)


def test_a_mistake_is_told_by_the_line_where_it_happens_and_not_by_that_of_the_call():
    def helper(response):
        return float(response)

    def broken(prompts, responses):
        return [helper(response) for response in responses]

    with pytest.raises(UserCodeError, match="the reward broken raised ValueError") as error:
        call_reward(broken, "broken", PROMPTS, ["no number"] * len(PROMPTS), {})
    assert str(error.value).endswith(f"({__file__}, line {helper.__code__.co_firstlineno + 1})")


def test_an_error_of_a_built_in_reward_ends_a_run_as_that_of_a_function_does():
    """A run writes a checkpoint, and says how to continue, after a UserCodeError only."""

    def broken(prompts, responses):
        raise UserError("the column is empty")

    with pytest.raises(UserCodeError, match=r"^the column is empty$"):
        call_reward(broken, "broken", PROMPTS, RESPONSES, {})
    with pytest.raises(UserCodeError, match="ground_truth is empty for prompt 'p'"):
        call_reward(exact_match, "exact_match", PROMPTS, RESPONSES, {"ground_truth": ["", "1"]})


def test_two_rewards_that_return_the_same_part_in_mid_run_end_it_alike():
    with pytest.raises(UserCodeError, match="two rewards are called 'a/b'"):
        score(
            [
                Reward("a", lambda prompts, responses: {"b": [1.0, 2.0]}),
                Reward("a/b", lambda prompts, responses: [1.0, 2.0]),
            ],
            PROMPTS,
            RESPONSES,
            {},
        )


def test_a_reward_gets_copies_of_its_own():
    columns = {"answer": [{"text": "7", "also": ["seven"]}, {"text": "8", "also": []}]}
    prompts, responses = list(PROMPTS), list(RESPONSES)
    saw = []

    def changes(prompts, responses, answer):
        saw.append((list(prompts), list(responses), repr(answer)))
        prompts.reverse()
        responses[0] = responses[0].upper()
        answer[0]["also"].append("sieben")
        answer.pop()
        return [0.0, 0.0]

    score([Reward("a", changes), Reward("b", changes)], prompts, responses, columns)
    assert (prompts, responses) == (PROMPTS, RESPONSES)
    assert columns == {"answer": [{"text": "7", "also": ["seven"]}, {"text": "8", "also": []}]}
    assert saw[0] == saw[1] == (PROMPTS, RESPONSES, repr(columns["answer"]))


def test_what_a_reward_returned_stays_as_it_was():
    kept = [1.0, 2.0]
    parts = call_reward(lambda prompts, responses: kept, "kept", PROMPTS, RESPONSES, {})
    kept.clear()
    assert parts == {"kept": [1.0, 2.0]}


@pytest.mark.parametrize(
    ("function", "part"),
    [
        # OpenRLHF and verl
        (lambda queries, prompts, labels: [], "takes prompts as argument 2"),
        (lambda data_source, solution_str, ground_truth: [], "missing a required argument: 'ground_truth'"),
        (lambda responses: [], "takes responses as argument 1"),
        (lambda: [], "cannot be called: too many positional arguments"),
    ],
)
def test_the_signature_of_another_trainer_is_named_beside_ours(function, part):
    with pytest.raises(UserCodeError) as error:
        call_reward(function, "theirs", PROMPTS, RESPONSES, {"answer": [7, 8]})
    first, second = str(error.value).splitlines()
    assert part in first and f"({__file__}, line {function.__code__.co_firstlineno})" in first
    assert second == ("a reward is called with (prompts, responses, **columns); the data has answer besides the prompt")


@pytest.mark.parametrize(
    ("function", "given"),
    [
        (lambda prompts, responses: [0, 0], set()),
        (lambda prompts, responses, answer: [0, 0], {"answer"}),
        (lambda prompts, responses, *, level=None: [0, 0], {"level"}),
        (lambda texts, replies, answer=None, **others: [0, 0], {"answer", "level"}),
    ],
)
def test_a_reward_gets_the_columns_that_it_names_or_all(function, given):
    calls = []

    @functools.wraps(function)
    def watched(prompts, responses, **columns):
        calls.append(set(columns))
        return function(prompts, responses, **columns)

    call_reward(watched, "mine", PROMPTS, RESPONSES, {"answer": [7, 8], "level": [1, 2]})
    assert calls == [given]


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


def test_a_function_gives_its_reward_its_name(tmp_path):
    (tmp_path / "my_reward.py").write_text("def polite(prompts, responses): return [1.0 for _ in responses]")
    (tmp_path / "other.py").write_text("def polite(prompts, responses): return [2.0 for _ in responses]")
    settings = [RewardSettings(use=f"{tmp_path}/{name}.py:polite") for name in ("my_reward", "other")]
    assert [reward.name for reward in build_rewards(settings[:1], CPU)] == ["polite"]
    with pytest.raises(UserError, match=r"two rewards are called 'polite'.*rewards\.name"):
        build_rewards(settings, CPU)
    named = settings[1].model_copy(update={"name": "politer"})
    assert [reward.name for reward in build_rewards([settings[0], named], CPU)] == ["polite", "politer"]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_rehearsal_calls_every_reward_once_on_the_first_rows(count):
    calls = []

    def watched(prompts, responses, **columns):
        calls.append((prompts, responses, columns))
        return [0.0] * len(responses)

    prompts = tuple("abcde"[:count])
    rehearse([Reward("a", watched), Reward("b", watched)], prompts, {"answer": tuple(range(count))})
    expected = (list(prompts[:2]), ["", "Yes."][:count], {"answer": list(range(count))[:2]})
    assert calls == [expected, expected]


@pytest.mark.parametrize(
    ("use", "columns", "said"),
    [
        ("exact_match", {"ground_truth": ["1", "2", None]}, "ground_truth is empty for prompt 'c'"),
        ("exact_match", {"ground_truth": ["1", "2", r"\boxed{3"]}, "a box that is not closed for prompt 'c'"),
        ("code", {"tests": ["pass", ["pass"], []]}, r"tests must be a text .* \(prompt 'c'\)"),
    ],
)
def test_a_rehearsal_checks_the_columns_of_built_in_rewards_in_every_row(use, columns, said):
    rewards = build_rewards([RewardSettings(use=use)], CPU)
    good = {name: values[:2] for name, values in columns.items()}
    rehearse(rewards, "ab", good)
    with pytest.raises(UserError, match=said):
        rehearse(rewards, "abc", columns)


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

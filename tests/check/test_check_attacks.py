"""A check attacks rewards: each flaw is found by the attack that is made for it, and sound rewards raise no alarm."""

import asyncio
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from check_helpers import found

from cavesson.check.answers import Answer, Task, answer_columns, forms_of, options_of, right_answers
from cavesson.check.attacks import ATTACKS, Material
from cavesson.check.partial import close
from cavesson.check.robustness import attack
from cavesson.check.scoring import of_responses
from cavesson.check.swallowed import exceptions_of_user
from cavesson.findings.finding import Finding, Fine, SkippedCheck
from cavesson.rollout.rewards.code import CodeReward
from cavesson.rollout.rewards.exact_match import exact_match
from cavesson.rollout.rewards.lowercase import lowercase
from cavesson.rollout.rewards.sentiment import sentiment
from cavesson.rollout.rewards.table import Reward

SUMS = [(a, b) for a in (3, 8, 15, 21) for b in (2, 11, 30)]
NUMBERS = [Task(f"What is {a} + {b}?", {"ground_truth": str(a + b)}) for a, b in SUMS]
CAPITALS = ["Paris", "Rome", "Oslo", "Cairo", "Lima", "Quito"]
NAMED = [Task(f"Of which country is {one} the capital? Number {n}.", {"answer": one}) for n, one in enumerate(CAPITALS)]
CHOICES = [
    Task(
        f"Which of these is {7 * n}?\n"
        + "\n".join(f"{letter}) {7 * n + i - n % 4}" for i, letter in enumerate("ABCD")),
        {"answer": "ABCD"[n % 4]},
    )
    for n in range(8)
]
YES = [Task(f"Is {n} even?", {"answer": "yes" if n % 2 == 0 else "no"}) for n in range(8)]


def attacked(reward: Callable[..., Any], tasks: Sequence[Task] = NUMBERS) -> list[Any]:
    return list(attack(tasks, {}, of_responses([Reward("mine", reward)])))


def finding(results: Sequence[Any], check: str) -> Finding:
    return next(one for one in results if isinstance(one, Finding) and one.rule == check)


def last_number(text: str) -> str | None:
    numbers = re.findall(r"-?\d+", text)
    return numbers[-1] if numbers else None


def right(responses: Sequence[str], truths: Sequence[str]) -> list[bool]:
    return [last_number(one) == truth for one, truth in zip(responses, truths, strict=True)]


# Sound rewards, each of another kind.


def boxed(prompts: Sequence[str], responses: Sequence[str], ground_truth: Sequence[str]) -> dict[str, list[float]]:
    inside = [re.findall(r"\\boxed\{([^{}]*)\}", one) for one in responses]
    return {
        "format": [0.2 * bool(one) for one in inside],
        "right": [float(one[-1:] == [truth]) for one, truth in zip(inside, ground_truth, strict=True)],
    }


def tagged(completions: Sequence[str], ground_truth: Sequence[str], **_: Any) -> list[tuple[float, str]]:
    """TRL's signature, with reasons; what cannot be read is wrong."""
    scores = []
    for one, truth in zip(completions, ground_truth, strict=True):
        inside = re.search(r"<answer>(.*?)</answer>", one, re.DOTALL)
        try:
            scores.append((float(inside is not None and float(inside[1]) == float(truth)), "read"))
        except ValueError:
            scores.append((0.0, "not a number"))
    return scores


async def letter(prompt: str, response: str, answer: str) -> float:
    """One response per call; anything but one letter is wrong."""
    await asyncio.sleep(0)
    return 1.0 if response.strip(" ().*") == answer else -1.0


def fields(prompts: Sequence[str], responses: Sequence[str], answer: Sequence[str]) -> list[float]:
    def one(response: str, truth: str) -> float:
        try:
            return float(json.loads(response)["answer"] == truth)
        except (ValueError, TypeError, KeyError):
            return 0.0

    return [one(response, truth) for response, truth in zip(responses, answer, strict=True)]


def polite(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    return [sum(word in ("please", "thanks") for word in one.lower().split()) - len(one) / 1000 for one in responses]


def brief(prompts: Sequence[str], responses: Sequence[str], ground_truth: Sequence[str]) -> list[float]:
    """The longest answers of all have very low scores, which make no other one high."""
    scores = right(responses, ground_truth)
    return [one - len(text) / 100 for one, text in zip(scores, responses, strict=True)]


def sometimes(prompts: Sequence[str], responses: Sequence[str], ground_truth: Sequence[str]) -> list[float | None]:
    """Judges long questions only."""
    scores = map(float, right(responses, ground_truth))
    return [one if len(prompt) > 14 else None for one, prompt in zip(scores, prompts, strict=True)]


def unknown_format(prompts: Sequence[str], responses: Sequence[str], ground_truth: Sequence[str]) -> list[float]:
    return [float(one == f"~{truth}~") for one, truth in zip(responses, ground_truth, strict=True)]


def evaluated(prompts: Sequence[str], responses: Sequence[str], ground_truth: Sequence[str]) -> list[float]:
    def one(response: str, truth: str) -> float:
        try:
            return float(eval(response) == int(truth))
        except Exception:
            return 0.0

    return [one(response, truth) for response, truth in zip(responses, ground_truth, strict=True)]


def other_format_read(prompts: Sequence[str], responses: Sequence[str], ground_truth: Sequence[str]) -> list[float]:
    def one(response: str, truth: str) -> float:
        try:
            return float(response.split("~")[1] == truth)
        except IndexError:
            return 0.0

    return [one(response, truth) for response, truth in zip(responses, ground_truth, strict=True)]


def concise(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    return [-len(one) / 100 for one in responses]


def long(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    return [min(len(one), 100) / 100 for one in responses]


FUNCTIONS = [Task(f"Write add_{n}(x), which adds {n}.", {"tests": f"assert add_{n}(1) == {n + 1}"}) for n in range(4)]
WITH_SOLUTION = [
    Task(one.prompt, {**one.columns, "solution": f"def add_{n}(x):\n    return x + {n}"})
    for n, one in enumerate(FUNCTIONS)
]
GSM = [Task(f"What is {a} + {b}?", {"answer": f"It is {a} + {b} = {a + b}.\n#### {a + b}"}) for a, b in SUMS]


def gsm(prompts: Sequence[str], responses: Sequence[str], answer: Sequence[str]) -> list[float]:
    return exact_match(prompts, responses, [one.rpartition("#### ")[2] for one in answer])


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("reward", "tasks"),
    [
        (exact_match, NUMBERS),
        (boxed, NUMBERS),
        (tagged, NUMBERS),
        (letter, CHOICES),
        (fields, NAMED),
        (brief, NUMBERS),
        (polite, NUMBERS),
        (polite, [Task(one.prompt, {}) for one in NUMBERS]),
        (sentiment, NAMED),
        (sometimes, NUMBERS),
        (unknown_format, NUMBERS),
        (other_format_read, NUMBERS),
        (evaluated, NUMBERS),
        (concise, NUMBERS),
        (long, NUMBERS),
        (lowercase, NUMBERS),
        (gsm, GSM),
        (CodeReward(), FUNCTIONS),
    ],
)
def test_a_sound_reward_raises_no_alarm(reward: Callable[..., Any], tasks: Sequence[Task]) -> None:
    results = attacked(reward, tasks)
    assert found(results) == {}
    assert any(one.rule == "reward-repeats" for one in results if isinstance(one, Fine))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("reward", "tasks"), [(exact_match, NUMBERS), (boxed, NUMBERS), (tagged, NUMBERS), (letter, CHOICES), (gsm, GSM)]
)
def test_the_form_of_right_answers_is_found(reward: Callable[..., Any], tasks: Sequence[Task]) -> None:
    """All attacks are compared with the highest score that there is, and stay far below it."""
    results = attacked(reward, tasks)
    highest = 1.2 if reward is boxed else 1.0
    seen = {one.rule: one for one in results if isinstance(one, Fine)}
    assert seen["attack-empty"].healthy.startswith(f"mean score over {len(tasks)} rows; right answers have {highest:g}")
    assert {*seen} >= {one.check for one in ATTACKS if one.check != "attack-calls"}


# Rewards with one flaw each.


def pays_empty(prompts: Sequence[str], responses: Sequence[str], ground_truth: Sequence[str]) -> list[float]:
    return [float(truth.startswith(one)) for one, truth in zip(responses, ground_truth, strict=True)]


def pays_echo(prompts: Sequence[str], responses: Sequence[str], answer: Sequence[str]) -> list[float]:
    triples = zip(prompts, responses, answer, strict=True)
    return [float(one in (prompt, truth)) for prompt, one, truth in triples]


def pays_relevance(prompts: Sequence[str], responses: Sequence[str], answer: Sequence[str]) -> list[float]:
    pairs = zip(prompts, responses, strict=True)
    return [len({*p.split()} & {*one.split()}) / len({*p.split()}) for p, one in pairs]


def pays_format(prompts: Sequence[str], responses: Sequence[str], ground_truth: Sequence[str]) -> list[float]:
    def one(response: str, truth: str) -> float:
        inside = re.search(r"<answer>(.*?)</answer>", response)
        return float(inside is not None and inside[1] in truth)

    return [one(response, truth) for response, truth in zip(responses, ground_truth, strict=True)]


def pays_format_only(completions: Sequence[str], **_: Any) -> list[float]:
    return [
        float(bool(re.fullmatch(r"<think>.*?</think>\s*<answer>.*?</answer>", one, re.DOTALL))) for one in completions
    ]


def pays_mark_only(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    return [float("####" in one) for one in responses]


def pays_silence(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    return [1.0 if not one else 0.3 for one in responses]


def pays_empty_json(prompts: Sequence[str], responses: Sequence[str], answer: Sequence[str]) -> list[float]:
    def one(response: str, truth: str) -> float:
        try:
            said = json.loads(response)
        except ValueError:
            return 0.0
        return float(isinstance(said, dict) and all(value in (truth, "", None) for value in said.values()))

    return [one(response, truth) for response, truth in zip(responses, answer, strict=True)]


def contains(prompts: Sequence[str], responses: Sequence[str], answer: Sequence[str]) -> list[float]:
    return [float(truth in one) for one, truth in zip(responses, answer, strict=True)]


def pays_boxes(prompts: Sequence[str], responses: Sequence[str], ground_truth: Sequence[str]) -> list[float]:
    return [float(f"\\boxed{{{truth}}}" in one) for one, truth in zip(responses, ground_truth, strict=True)]


def pays_yes(prompts: Sequence[str], responses: Sequence[str], answer: Sequence[str]) -> list[float]:
    return [float(one == "yes" or one == truth) for one, truth in zip(responses, answer, strict=True)]


def pays_other_rows(prompts: Sequence[str], responses: Sequence[str], ground_truth: Sequence[str]) -> list[float]:
    return [float(last_number(one) in ground_truth) for one in responses]


def pays_previous_row(prompts: Sequence[str], responses: Sequence[str], ground_truth: Sequence[str]) -> list[float]:
    return [float(one) for one in right(responses, [ground_truth[-1], *ground_truth[:-1]])]


def pays_first_row(prompts: Sequence[str], responses: Sequence[str], ground_truth: Sequence[str]) -> list[float]:
    return [float(one) for one in right(responses, [ground_truth[0]] * len(responses))]


def gym(prompts: Sequence[str], responses: Sequence[str], ground_truth: Sequence[str]) -> list[float]:
    """As in Reasoning Gym: a share of the reward, as large as the right answer's share of the response."""

    def one(response: str, truth: str) -> float:
        return len(truth) / len(response) if truth in response else 0.0

    return [one(response, truth) for response, truth in zip(responses, ground_truth, strict=True)]


def pays_start(prompts: Sequence[str], responses: Sequence[str], ground_truth: Sequence[str]) -> list[float]:
    """A quarter for the beginning of the right answer."""
    pairs = zip(responses, ground_truth, strict=True)
    return [1.0 if one == truth else 0.25 * (one != "" and truth.startswith(one)) for one, truth in pairs]


def pays_among(prompts: Sequence[str], responses: Sequence[str], answer: Sequence[str]) -> list[float]:
    """Three quarters for the right answer anywhere."""
    pairs = zip(responses, answer, strict=True)
    return [1.0 if one == truth else 0.75 * (truth in one.split(", ")) for one, truth in pairs]


def pays_nan(prompts: Sequence[str], responses: Sequence[str], ground_truth: Sequence[str]) -> list[float]:
    def one(response: str, truth: str) -> float:
        try:
            return float(not abs(float(response) - float(truth)) > 1e-6)
        except ValueError:
            return 0.0

    return [one(response, truth) for response, truth in zip(responses, ground_truth, strict=True)]


def swallows_half(prompts: Sequence[str], responses: Sequence[str], ground_truth: Sequence[str]) -> list[float]:
    def one(response: str, truth: str) -> float:
        try:
            return float(int(response) == int(truth))
        except Exception:
            return 0.5

    return [one(response, truth) for response, truth in zip(responses, ground_truth, strict=True)]


async def swallows_all(prompts: Sequence[str], responses: Sequence[str], ground_truth: Sequence[str]) -> list[float]:
    def one(response: str, truth: Any) -> float:
        try:
            return float(float(response) == truth["value"])
        except Exception:
            return 0.0

    return [one(response, truth) for response, truth in zip(responses, ground_truth, strict=True)]


def swallows_mistake(prompts: Sequence[str], responses: Sequence[str], ground_truth: Sequence[str]) -> list[float]:
    try:
        return [float(verify(one)) for one in responses]  # type: ignore[name-defined] # noqa: F821
    except Exception:
        return [0.0] * len(responses)


def draws(prompts: Sequence[str], responses: Sequence[str], ground_truth: Sequence[str]) -> list[float]:
    return [one + random.random() / 10 for one in right(responses, ground_truth)]


class Remembers:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, prompts: Sequence[str], responses: Sequence[str], ground_truth: Sequence[str]) -> list[float]:
        self.calls += 1
        return [one * (0.9 if self.calls > 20 else 1.0) for one in right(responses, ground_truth)]


def fails(prompts: Sequence[str], responses: Sequence[str], ground_truth: Sequence[str]) -> list[float]:
    return [float(int(one) == int(truth)) for one, truth in zip(responses, ground_truth, strict=True)]


def pays_any(prompts: Sequence[str], responses: Sequence[str], ground_truth: Sequence[str]) -> list[float]:
    return [1.0] * len(responses)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("check", "reward", "tasks", "text"),
    [
        ("attack-empty", pays_empty, NUMBERS, "“”"),
        ("attack-echo", pays_echo, NAMED, "“Of which country is"),
        ("attack-echo", pays_relevance, NAMED, "“Of which country is"),
        ("attack-echo", contains, CHOICES, "“Which of these is"),
        ("attack-format", pays_format, NUMBERS, "“<answer></answer>”"),
        ("attack-format", pays_format_only, NUMBERS, "<answer></answer>”"),
        ("attack-format", pays_mark_only, NUMBERS, "“####”"),
        ("attack-empty", pays_silence, NUMBERS, "“” has the score 1"),
        ("attack-format", pays_empty_json, NAMED, '“{"'),
        ("attack-everything", contains, CHOICES, "A B C D"),
        ("attack-everything", contains, NAMED, "Paris Rome Oslo"),
        ("attack-everything", pays_boxes, NUMBERS, r"\boxed{5} \boxed{14}"),
        ("attack-constant", pays_yes, YES, "“yes”"),
        ("attack-constant", pays_first_row, NUMBERS, "“5”"),
        ("attack-other-row", pays_other_rows, NUMBERS, "“"),
        ("attack-other-row", pays_previous_row, NUMBERS, "“"),
        ("attack-malformed", pays_nan, NUMBERS, "“nan”"),
        ("attack-exception", swallows_half, NUMBERS, "ValueError: invalid literal"),
        ("attack-exception", swallows_all, NUMBERS, "TypeError: string indices"),
        ("attack-exception", swallows_mistake, NUMBERS, "NameError: name 'verify'"),
        ("reward-repeats", draws, NUMBERS, "twice in a row"),
        ("reward-repeats", Remembers(), NUMBERS, "before and after"),
        ("reward-raises", fails, NUMBERS, "the reward mine raised ValueError"),
        ("attack-any", pays_any, NUMBERS, "1"),
    ],
)
def test_each_flaw_is_found_by_the_attack_that_is_made_for_it(
    check: str, reward: Callable[..., Any], tasks: Sequence[Task], text: str
) -> None:
    one = finding(attacked(reward, tasks), check)
    assert one.severity == "warning"
    assert text in one.cause and "\n" not in one.cause


TENS = [Task(f"What is {n} + 1?", {"ground_truth": str(n + 1)}) for n in (30, 41, 52, 63, 74, 85)]


@pytest.mark.parametrize(
    ("reward", "tasks", "severity", "share", "text"),
    [
        # Of the 12 truths, one has 1 digit, the others 2: a digit more leaves 1/2 or 2/3 of the reward.
        (gym, NUMBERS, "warning", (1 / 2 + 11 * 2 / 3) / 12, "“147” has the score 0.667; the right answer “14” has 1"),
        (pays_start, TENS, "note", 0.25, "“3” has the score 0.250; the right answer “31” has 1"),
        (pays_among, NAMED, "warning", 0.75, "“Rome, Oslo, Paris, Cairo, Lima, Quito” has the score 0.750"),
    ],
)
def test_partial_credit_for_an_answer_that_is_not_right_is_told_with_its_share(
    reward: Callable[..., Any], tasks: Sequence[Task], severity: str, share: float, text: str
) -> None:
    one = finding(attacked(reward, tasks), "attack-partial")
    assert one.severity == severity and text in one.cause
    assert one.seen == pytest.approx(share)


def test_points_for_the_format_are_a_number_and_no_finding() -> None:
    """Of 1.2 points, 0.2 are for a box: nothing is earned for what is inside unless it is right."""
    (one,) = (one for one in attacked(boxed) if one.rule == "attack-partial")
    assert isinstance(one, Fine) and one.seen == pytest.approx(0.0)
    assert one.healthy.endswith("Right answers have 1.20, wrong ones 0, those in the right form 0.200")


def test_answers_that_are_close_to_right_ones_are_never_right() -> None:
    right = ["5", "-5", "0", "10", "100", "2.0", "1.5", "yes", "no", "Paris", "New York", "A", r"\frac{1}{2}", ""]
    tasks = [Task("?", {"answer": one}) for one in right]
    (plain, *_) = forms_of(tasks, {})
    for rows, answers in close(Material(tasks, right, plain, [plain], [])):
        for row, answer in zip(rows, answers, strict=True):
            assert answer.text and answer.text != right[row]
            if re.fullmatch(r"-?[\d.]+", answer.text):
                assert abs(float(answer.text) - float(right[row])) >= 0.5 * abs(float(right[row]))


def test_a_finding_names_the_text_its_score_and_the_score_of_the_right_answer() -> None:
    one = finding(attacked(pays_yes, YES), "attack-constant")
    # Of rows that earn equally much, the first; "yes" is right in every other one, and paid in all.
    assert one.cause.startswith("“yes” has the score 1; the right answer “yes” has 1.")
    assert one.seen == 1.0
    assert one.healthy == "mean score over 8 rows; right answers have 1, wrong ones 0"


def test_an_exception_is_named_with_its_place() -> None:
    lines = Path(__file__).read_text().splitlines()
    place = next(number for number, line in enumerate(lines, start=1) if "int(response) == int(truth)" in line)
    assert f"({__file__}, line {place})" in finding(attacked(swallows_half), "attack-exception").cause


@pytest.mark.parametrize(
    ("reward", "tasks", "words"),
    [
        (polite, [Task(one.prompt, {}) for one in NUMBERS], "no column with right answers"),
        (polite, NUMBERS, "from the columns ground_truth earned more"),
        (exact_match, NUMBERS[:3], "need 4 rows; there are 3"),
        (lambda prompts, responses, ground_truth: [None] * len(prompts), NUMBERS, "judges no answer"),
    ],
)
def test_what_cannot_be_checked_is_said(reward: Callable[..., Any], tasks: Sequence[Task], words: str) -> None:
    (skipped,) = (one for one in attacked(reward, tasks) if isinstance(one, SkippedCheck))
    assert skipped.rule == "reward-attacks" and words in skipped.reason


def test_a_code_reward_is_compared_with_the_solution_of_the_data() -> None:
    tasks = WITH_SOLUTION
    score = of_responses([Reward("code", CodeReward())])
    (fence,) = (one for one in forms_of(tasks, {}) if "```" in str(one.write("")) and "think" not in str(one.write("")))
    answers = [fence.write(one) or Answer("") for one in right_answers(tasks, answer_columns(tasks))[0]]
    assert score(tasks, answers).values.tolist() == [1.0] * len(tasks)


@pytest.mark.parametrize(
    ("columns", "answers"),
    [
        ({"ground_truth": "7"}, {"7"}),
        ({"answer": "So it is 7.\n#### 7"}, {"7", "So it is 7.\n#### 7"}),
        ({"solution": r"Hence $\boxed{\frac{1}{2}}$."}, {r"\frac{1}{2}", r"Hence $\boxed{\frac{1}{2}}$."}),
        ({"reward_model": {"ground_truth": "7", "style": "rule"}}, {"7"}),
        ({"answers": ["New York", "NYC"]}, {"New York"}),
        ({"answers": {"text": ["in 1900"], "answer_start": [3]}}, {"in 1900"}),
        ({"answer": 2, "choices": ["red", "green", "blue"]}, {"2", "C", "blue"}),
        ({"answerKey": "B", "choices": {"text": ["red", "green"], "label": ["A", "B"]}}, {"B", "green"}),
        ({"capital": "Paris", "question": "Which?"}, {"Paris"}),
    ],
)
def test_right_answers_are_found_in_the_columns_that_data_have(columns: Mapping[str, Any], answers: set[str]) -> None:
    task = Task("Which?", dict(columns))
    assert {one for (one,) in right_answers([task], answer_columns([task]))} == answers


def test_the_form_that_the_prompt_asks_for_is_tried() -> None:
    asked = 'Write <work>…</work> <result>…</result>, or {"value": 1}, or RESULT: [number]'
    task = Task("", {"messages": [{"role": "system", "content": asked}, {"role": "user", "content": "1?"}]})
    said = {one.text for form in forms_of([task], {}) if (one := form.write("7"))}
    assert said >= {
        "<result>7</result>",
        "<work>\nSo it is.\n</work>\n<result>\n7\n</result>",
        '{"value": 7}',
        "RESULT: 7",
    }


def test_options_are_read_from_the_prompt() -> None:
    assert options_of(Task("Which?\nA) red\n(B) green\nC. blue", {})) == {"A": "red", "B": "green", "C": "blue"}
    assert options_of(Task("A. Smith asks: which?", {})) == {}


def test_only_what_passes_through_the_users_code_is_seen() -> None:
    with exceptions_of_user() as raised:
        for _ in iter([1]):
            pass
        json.loads("1")
        swallows_half([""], ["x"], ["1"])
    assert [one.error for one in raised] == ["ValueError: invalid literal for int() with base 10: 'x'"]

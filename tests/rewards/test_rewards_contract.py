"""What rewards may be and return: `async`, TRL's signature, None for no judgement, and reasons."""

import asyncio
import time

import pytest
import torch
from reward_helpers import call_reward

from cavesson.errors import UserCodeError, UserError
from cavesson.rollout.rewards.arguments import Judged
from cavesson.rollout.rewards.base import call_rewards
from cavesson.rollout.rewards.settings import RewardSettings
from cavesson.rollout.rewards.table import Reward, build_rewards, rehearse, score

PROMPTS, RESPONSES = ["p", "q", "r"], ["one", "two", "three"]
MESSAGES = [[{"role": "user", "content": text}] for text in PROMPTS]
CPU = torch.device("cpu")


def test_the_sum_is_that_of_the_parts_that_judge_a_response():
    rewards = (
        Reward("a", lambda prompts, responses: [1.0, None, None], weight=0.5),
        Reward("b", lambda prompts, responses: {"x": [10.0, 20.0, None], "y": [None, 1.0, None]}, weight=-2.0),
    )
    scored = score(rewards, PROMPTS, RESPONSES, {})
    assert scored.total == [0.5 - 20.0, -40.0 - 2.0, None]
    assert scored.parts == {"a": [1.0, None, None], "b/x": [10.0, 20.0, None], "b/y": [None, 1.0, None]}
    assert scored.weights == {"a": 0.5, "b/x": -2.0, "b/y": -2.0}
    assert scored.reasons == {}


def test_reasons_stand_beside_numbers():
    rewards = (
        Reward("a", lambda prompts, responses: [(1.0, "right"), 2.0, (None, "not mine")]),
        Reward("b", lambda prompts, responses: {"x": [0, 0, 0], "y": [(1, ""), 1, 1]}),
    )
    scored = score(rewards, PROMPTS, RESPONSES, {})
    assert scored.parts == {"a": [1.0, 2.0, None], "b/x": [0.0] * 3, "b/y": [1.0] * 3}
    assert scored.reasons == {"a": ["right", None, "not mine"]}
    assert scored.total == [2.0, 3.0, 1.0]


def trl_plain(completions, **kwargs):
    assert kwargs == {"prompts": PROMPTS, "completion_ids": [[1], [2], [3, 4]], "answer": [7, 8, 9]}
    return [float(len(completion)) for completion in completions]


def trl_chat(prompts, completions, answer, **kwargs):
    assert prompts == MESSAGES and answer == [7, 8, 9]
    return [len(completion[0]["content"]) * (completion[0]["role"] == "assistant") for completion in completions]


def trl_keywords(*, completions, answer):
    return [len(one) for one in completions]


@pytest.mark.parametrize(
    ("function", "columns"),
    [(trl_plain, {}), (trl_chat, {"messages": MESSAGES}), (trl_keywords, {})],
)
def test_functions_of_trl_run_unchanged(function, columns):
    judged = Judged(PROMPTS, RESPONSES, {"answer": [7, 8, 9], **columns}, [[1], [2], [3, 4]])
    parts = call_rewards({"theirs": function}, judged)["theirs"]
    assert parts["theirs"].values == [3.0, 3.0, 5.0]


def test_a_row_that_is_no_conversation_is_text_for_trl():
    seen = []

    def reward(prompts, completions, **kwargs):
        seen.extend([prompts, completions])
        return [0.0] * len(completions)

    call_reward(reward, "mine", PROMPTS, RESPONSES, {"messages": [None, *MESSAGES[1:]]})
    assert seen == [
        ["p", *MESSAGES[1:]],
        ["one", *([{"role": "assistant", "content": text}] for text in RESPONSES[1:])],
    ]


def test_what_trl_passes_and_cavesson_does_not_is_named():
    def needs(completions, trainer_state, **kwargs):
        return []

    with pytest.raises(UserCodeError) as error:
        call_reward(needs, "needs", PROMPTS, RESPONSES, {})
    assert "cannot be called: missing a required argument: 'trainer_state'" in str(error.value)
    assert "a reward is called with (prompts=, completions=, completion_ids=, **columns), as by TRL" in str(error.value)


def meeting(count):
    """Return an async reward that ends when `count` of its kind run at the same time."""
    inside = []

    async def reward(prompts, responses, **columns):
        inside.append(asyncio.get_running_loop())
        while len(inside) < count:
            await asyncio.sleep(0.001)
        return [float(len(text)) for text in responses]

    return reward


@pytest.mark.timeout(20)
def test_async_rewards_of_a_step_run_at_the_same_time():
    shared = meeting(3)
    rewards = [Reward(name, shared) for name in ("a", "b", "c")]
    scored = score([*rewards, Reward("d", lambda prompts, responses: [1, 1, None])], PROMPTS, RESPONSES, {})
    assert scored.total == [10.0, 10.0, 15.0]
    assert list(scored.parts) == ["a", "b", "c", "d"]


def test_async_rewards_keep_their_loop_and_run_inside_another():
    loops = []

    class Judge:
        async def __call__(self, prompts, responses, **columns):
            loops.append(asyncio.get_running_loop())
            return [0.0] * len(responses)

    async def notebook():
        return [call_reward(Judge(), "judge", PROMPTS, RESPONSES, {}) for _ in range(2)]

    assert asyncio.run(notebook()) == [{"judge": [0.0] * 3}] * 2
    assert len(set(loops)) == 1


@pytest.mark.timeout(20)
@pytest.mark.parametrize("limit", [1, 2, 5])
def test_an_async_function_of_one_response_is_called_for_each_within_the_limit(tmp_path, limit):
    (tmp_path / "judge.py").write_text(
        "import asyncio\nnow, most = 0, 0\n"
        "async def judge(prompt, response, answer):\n"
        "    global now, most\n"
        "    now += 1\n    most = max(most, now)\n"
        "    await asyncio.sleep(0.01)\n    now -= 1\n"
        "    return (answer, f'{prompt} {response}') if answer else None\n"
        "async def most_at_once(prompts, responses):\n    return [most] * len(responses)\n"
    )
    use = f"{tmp_path}/judge.py:"
    rewards = build_rewards([RewardSettings(use=f"{use}judge", concurrency=limit)], CPU)
    rehearse(rewards, PROMPTS, {"answer": [0, 1, 2]})
    names = [str(row) for row in range(8)]
    scored = score(rewards, names, names, {"answer": list(range(8)), "other": [None] * 8})
    assert scored.total == [None, *map(float, range(1, 8))]
    assert scored.reasons == {"judge": [None, *(f"{row} {row}" for row in range(1, 8))]}
    most = build_rewards([RewardSettings(use=f"{use}most_at_once")], CPU)
    assert score(most, ["p"], ["r"], {}).total == [float(limit)]


def test_a_limit_that_has_no_effect_is_refused():
    with pytest.raises(UserError, match="concurrency has no effect"):
        build_rewards([RewardSettings(use="lowercase", concurrency=3)], CPU)


async def cancelled(prompts, responses, **columns):
    raise asyncio.CancelledError


async def exits(prompts, responses, **columns):
    raise SystemExit(3)


async def interrupted(prompt, response):
    raise KeyboardInterrupt


async def short(prompts, responses, **columns):
    return [1.0]


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("function", "said"),
    [
        (cancelled, "raised CancelledError"),
        (exits, "raised SystemExit: 3"),
        (interrupted, "raised KeyboardInterrupt"),
        (short, "returned 1 value for 3 responses"),
    ],
)
def test_a_failing_async_reward_is_named_and_the_others_are_cancelled(function, said):
    ended = []

    async def patient(prompts, responses, **columns):
        try:
            await asyncio.sleep(600)
        finally:
            ended.append(True)

    with pytest.raises(UserCodeError) as error:
        call_rewards({"patient": patient, "mine": function}, Judged(PROMPTS, RESPONSES, {}))
    assert f"the reward mine {said}" in str(error.value) and f"({__file__}, line " in str(error.value)
    deadline = time.monotonic() + 10
    while not ended and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ended
    assert call_reward(short, "again", ["p"], ["r"], {}) == {"again": [1.0]}  # the loop still runs

"""Trained episodes without a fault that might look as if they had one."""

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.faults.episodes.trained.office import BUSY, Office, Weather, answer_of, forecast, right
from benchmarks.faults.episodes.trained.setup import Setup

HEALTHY: dict[str, Callable[[Setup], None]] = {}


def _healthy(change: Callable[[Setup], None]) -> Callable[[Setup], None]:
    HEALTHY[change.__name__.replace("_", "-")] = change
    return change


@_healthy
def usual(setup: Setup) -> None:
    """Four tools; the policy learns to call the right one."""


@_healthy
def one_tool(setup: Setup) -> None:
    """An environment with one tool."""
    setup.environment, setup.kinds = Weather, "w"


@_healthy
def unknown_cities(setup: Setup) -> None:
    """A third of the questions is on cities that the tool does not know: its errors are the answer."""
    setup.kinds = "wlu"


@_healthy
def slow_tool(setup: Setup) -> None:
    """A tool that takes a while, but less than it may."""
    draw = random.Random(setup.seed)

    class Slow(Office):
        def weather(self) -> str:
            """Look up today's weather in the city."""
            time.sleep(min(draw.expovariate(20.0), 0.5))
            return super().weather()

    setup.environment = Slow


@_healthy
def busy_service(setup: Setup) -> None:
    """A tool that now and then asks the policy to come again."""
    draw = random.Random(setup.seed)

    class Busy(Office):
        def weather(self) -> str:
            """Look up today's weather in the city."""
            return BUSY if draw.random() < 0.2 else super().weather()

    setup.environment = Busy


@_healthy
def done_by_call(setup: Setup) -> None:
    """The call itself is what is wanted: the episode is over once the tool was called, and nothing reads its result."""

    class Errand(Weather):
        done = False
        asked = ""

        def reset(self, **row: Any) -> None:
            super().reset(**row)
            self.done, self.asked = False, ""

        def weather(self) -> str:
            """Look up today's weather in the city."""
            self.done, self.asked = True, super().weather()
            return self.asked

        def get_reward(self) -> float:
            return float(answer_of(self.asked) == self.truth)

    setup.environment, setup.kinds, setup.reward = Errand, "w", None


@_healthy
def second_chance(setup: Setup) -> None:
    """A user who asks once more after a wrong answer."""

    class Patient(Office):
        def reset(self, **row: Any) -> None:
            super().reset(**row)
            self.question, self.is_first = row["question"], True

        def user_reply(self, answer: str) -> str | None:
            is_over, self.is_first = answer.strip() == self.truth or not self.is_first, False
            return None if is_over else self.question

    setup.environment = Patient


@_healthy
def interview(setup: Setup) -> None:
    """Long conversations: the user asks until no turn is left, and each turn has a reward."""

    class Interview(Weather):
        def reset(self, **row: Any) -> None:
            super().reset(**row)
            self.draw = random.Random(self.day)
            self.rewards: list[float] = []

        def user_reply(self, answer: str) -> str | None:
            self.rewards.append(float(answer.strip() == self.truth))
            self.truth = str(self.draw.choice(["sunny", "cloudy"]))
            return f"say {self.truth}"

        def get_reward(self) -> float:
            return sum(self.rewards) / 2

    setup.environment, setup.kinds, setup.reward = Interview, "w", None


@_healthy
def paid_by_turn(setup: Setup) -> None:
    """A guessing game with three turns and no tools, in which each turn earns its own reward."""

    class Guessing:
        def reset(self, question: str, **row: Any) -> None:
            self.question = question
            self.earned: list[float | None] = []

        def user_reply(self, answer: str) -> str | None:
            self.earned.append(float(answer.strip() == answer_of(forecast(self.question, 0))))
            return self.question if len(self.earned) < 3 else None

        @property
        def turn_rewards(self) -> list[float | None]:
            is_over = len(self.earned) == 3
            return self.earned if is_over else [*self.earned, None]  # no user hears a turn that was cut

    setup.environment, setup.kinds, setup.reward = Guessing, "w", None


@_healthy
def some_unscored(setup: Setup) -> None:
    """A fifth of the episodes is not scored."""
    draw = random.Random(setup.seed)

    def some(prompts: Any, responses: Any, ground_truth: Any, **_: Any) -> list[float | None]:
        return [one if draw.random() < 0.8 else None for one in right(prompts, responses, ground_truth)]

    setup.reward = some


@_healthy
def plain_functions(setup: Setup) -> None:
    """Tools without an environment, which return JSON."""
    draw = random.Random(setup.seed)

    def weather() -> dict[str, str]:
        """Look up the weather here."""
        more, _, now = forecast("Rome", draw.randrange(1000)).rpartition(", ")
        return {"more": more, "sky": now}

    def called(prompts: Any, responses: Sequence[str], messages: Any, **_: Any) -> list[float]:
        said = [" ".join(one["content"] for one in some if one["role"] == "tool") for some in messages]
        pairs = zip((response.strip() for response in responses), said, strict=True)
        return [float(response != "" and response in text) for response, text in pairs]

    setup.environment, setup.tools, setup.kinds, setup.reward = None, [weather], "w", called

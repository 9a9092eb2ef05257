"""What is planted in trained episodes: faults of the user's code, settings and trainer, at three severities."""

import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.faults.episodes.trained.office import BUSY, Office, OfficeWithNews, Weather, answer_of, right
from benchmarks.faults.episodes.trained.setup import BATCH, Setup
from cavesson.models.load import load_tokenizer
from cavesson.rollout import episodes

ONSET = 5
"""The step from which a fault is there that begins in the middle of a run."""


@dataclass(frozen=True)
class Fault:
    """One way to break a run of episodes."""

    name: str
    causes: tuple[str, ...]
    """The rules that name it rightly, decided before anything was run; the first is the best."""
    also: tuple[str, ...]
    """Consequences: findings that are true of such a run as well"""
    levels: tuple[Any, Any, Any]
    """From mild to severe"""
    plant: Callable[[Setup, Any], None]
    onset: int = 0
    """The step from which it is there"""


FAULTS: dict[str, Fault] = {}


def fault(
    causes: Sequence[str], levels: tuple[Any, Any, Any], onset: int = 0, also: Sequence[str] = ()
) -> Callable[[Callable[[Setup, Any], None]], Fault]:
    """Make a fault of a function that plants it; its name is the function's, with hyphens."""

    def made(plant: Callable[[Setup, Any], None]) -> Fault:
        one = Fault(plant.__name__.replace("_", "-"), tuple(causes), tuple(also), levels, plant, onset)
        FAULTS[one.name] = one
        return one

    return made


WORSE = ("reward-falls", "zero-variance-groups", "tool-never-called", "turn-limit", "verifier-dead", "zero-gradient")
"""What may follow if tools do not help: the policy stops calling them, or all episodes of a prompt are wrong."""


class Outage:
    """A service that is down for some calls from a step on, as the number of episodes begun says."""

    def __init__(self, share: float, seed: int, step: int = ONSET) -> None:
        self._share, self._draw, self._begun, self._step = share, random.Random(seed), 0, step

    def begin(self) -> None:
        """Count an episode."""
        self._begun += 1

    @property
    def is_down(self) -> bool:
        """Whether the present call meets it."""
        return self._begun > self._step * BATCH and self._draw.random() < self._share


@fault(["calls-fail"], (0.5, 0.75, 1.0), ONSET, WORSE)
def tool_breaks(setup: Setup, level: float) -> None:
    """The service behind a tool goes down in the middle of the run."""
    outage = Outage(level, setup.seed)

    class Broken(Office):
        def reset(self, **row: Any) -> None:
            outage.begin()
            super().reset(**row)

        def weather(self) -> str:
            """Look up today's weather in the city."""
            if outage.is_down:
                raise ConnectionError("connection refused")
            return super().weather()

    setup.environment = Broken


@fault(["calls-fail"], (0.95, 0.98, 1.0), also=[*WORSE, "tool-always-called"])
def key_missing(setup: Setup, level: float) -> None:
    """A tool never works, because its key is not set where the training runs."""
    draw = random.Random(setup.seed)

    class Keyless(Office):
        def weather(self) -> str:
            """Look up today's weather in the city."""
            if draw.random() < level:
                raise KeyError("WEATHER_API_KEY")
            return super().weather()

    setup.environment = Keyless


@fault(["calls-time-out"], (0.2, 0.4, 0.8), also=WORSE)
def tool_times_out(setup: Setup, level: float) -> None:
    """One tool of several takes longer than the settings allow."""
    draw = random.Random(setup.seed)
    setup.set("environment.timeout", 0.4)

    class Slow(Office):
        def weather(self) -> str:
            """Look up today's weather in the city."""
            if draw.random() < level:
                time.sleep(0.6)
            return super().weather()

    setup.environment = Slow


@fault(["results-cut"], (84, 80, 70), also=WORSE)
def results_cut(setup: Setup, level: int) -> None:
    """A tool returns the first characters of what it has found; the answer is at the end."""

    class Short(Office):
        def weather(self) -> str:
            """Look up today's weather in the city."""
            return super().weather()[:level]

    setup.environment = Short


def _masked(setup: Setup, share: float, changed: Callable[[Any, Any], Any]) -> None:
    """Let a function change what is learned `[B, T]` of a share of the episodes, before they are trained on."""
    draw = torch.Generator().manual_seed(setup.seed)

    def columns(original: Callable[..., Any], played: Any) -> Any:
        found = original(played)
        chosen = torch.rand(len(found.learned), generator=draw) < share
        return found._replace(learned=torch.where(chosen[:, None], changed(found, played), found.learned))

    setup.wrap(episodes, "_columns", columns)


@fault(["inserted-tokens-learned"], (0.05, 0.3, 1.0), also=["kl-at-start", "ratio-not-one"])
def replies_learned(setup: Setup, level: float) -> None:
    """The mask of the loss contains what tools and users say."""
    _masked(setup, level, lambda found, _: found.attended * ((found.source == 0) | (found.source >= 2)))


@fault(["sampled-tokens-masked"], (0.1, 0.3, 1.0))
def calls_masked(setup: Setup, level: float) -> None:
    """Only the last turn of an episode is learned from."""

    def changed(found: Any, played: Any) -> Any:
        last = torch.tensor([one.last for one in played])
        return found.learned * (torch.arange(found.learned.shape[1]) >= last[:, None])

    _masked(setup, level, changed)


@fault(["sampled-tokens-masked", "end-not-trained"], (0.3, 0.6, 1.0))
def ends_masked(setup: Setup, level: float) -> None:
    """The token that ends a turn is not learned."""

    def changed(found: Any, _: Any) -> Any:
        ends = torch.ones_like(found.learned)
        ends[:, :-1] = found.learned[:, 1:]
        return found.learned * ends

    _masked(setup, level, changed)


@fault(["turns-retokenised"], (0.15, 0.4, 1.0), also=["sampler-mismatch", "retokenised"])
def calls_rendered_again(setup: Setup, level: float) -> None:
    """Calls are parsed and written again without the spaces that were sampled, beside the sampler's numbers."""
    draw, tokenizer = random.Random(setup.seed), load_tokenizer(str(setup.model))

    def sampled(original: Callable[..., Any], self: Any, ids: Any, logprobs: Any, versions: Any, reason: str) -> None:
        text = tokenizer.decode(list(ids))
        again = tokenizer(re.sub(r"([,:]) ", r"\1", text), add_special_tokens=False)["input_ids"]
        if again != list(ids) and draw.random() < level:
            longer = len(again) - len(ids)
            logprobs = [*logprobs[: len(again)], *[0.0] * longer]
            ids, versions = again, [*versions[: len(again)], *versions[-1:] * longer]
        original(self, ids, logprobs, versions, reason)

    setup.wrap(episodes.Episode, "sampled", sampled)


@fault(["turn-limit"], (1, 1, 1), also=[*WORSE, "truncated"])
def one_turn(setup: Setup, level: int) -> None:
    """The policy has one turn, so that nothing can follow a call."""
    setup.set("environment.max_turns", level)


@fault(["turn-limit"], (0.8, 0.9, 1.0), ONSET, [*WORSE, "truncated"])
def always_busy(setup: Setup, level: float) -> None:
    """From some step on, a tool asks the policy to come again, until its turns are used up."""
    outage = Outage(level, setup.seed)
    setup.kinds = "w"
    setup.set("environment.max_turns", 3)

    class Busy(Weather):
        def reset(self, **row: Any) -> None:
            outage.begin()
            super().reset(**row)

        def weather(self) -> str:
            """Look up today's weather in the city."""
            return BUSY if outage.is_down else super().weather()

    setup.environment = Busy


@fault(["tool-never-called"], (None, None, None))
def new_tool(setup: Setup, level: None) -> None:
    """A tool was added of which no demonstration has a call."""
    setup.environment = OfficeWithNews


def _calls(messages: Sequence[Sequence[dict[str, Any]]], *names: str) -> list[int]:
    """Return how often each episode called some tools, or any."""
    return [sum(one["role"] == "tool" and (not names or one["name"] in names) for one in some) for some in messages]


@fault(["tool-never-called"], (1.0, 1.5, 2.0), also=["reward-exhausted", "zero-variance-groups"])
def calls_cost(setup: Setup, level: float) -> None:
    """A call costs at least as much as a right answer earns."""
    setup.steps = 16

    def thrifty(prompts: Any, responses: Any, ground_truth: Any, messages: Any, **_: Any) -> list[float]:
        earned = right(prompts, responses, ground_truth)
        return [one - level * calls for one, calls in zip(earned, _calls(messages), strict=True)]

    setup.reward = thrifty


@fault(["tool-always-called"], (0.05, 0.1, 0.15))
def clock_bonus(setup: Setup, level: float) -> None:
    """A small bonus for looking at the clock, which no question needs."""
    setup.steps = 16

    def bonus(prompts: Any, responses: Any, ground_truth: Any, messages: Any, **_: Any) -> list[float]:
        earned = right(prompts, responses, ground_truth)
        return [one + level * (calls > 0) for one, calls in zip(earned, _calls(messages, "now"), strict=True)]

    setup.reward = bonus


@fault(["reward-ignores-results"], (0.95, 0.98, 1.0), also=["zero-variance-groups", "reward-exhausted"])
def pays_for_calls(setup: Setup, level: float) -> None:
    """The reward is nearly all for having called."""

    def reward(prompts: Any, responses: Any, ground_truth: Any, messages: Any, **_: Any) -> list[float]:
        earned = right(prompts, responses, ground_truth)
        pairs = zip(earned, _calls(messages), strict=True)
        return [level * (calls > 0) + (1 - level) * one for one, calls in pairs]

    setup.reward = reward


@fault(["environment-leaks"], (0.4, 0.7, 1.0), also=["zero-variance-groups", "prompts-exhausted"])
def score_remembered(setup: Setup, level: float) -> None:
    """A right answer is remembered by the module, and pays for later episodes of the same question."""
    solved: set[tuple[str, str]] = set()
    draw = random.Random(setup.seed)

    def reward(
        prompts: Sequence[str], responses: Sequence[str], ground_truth: Sequence[str], day: Sequence[int], **_: Any
    ) -> list[float]:
        found = []
        for prompt, response, truth, when in zip(prompts, responses, ground_truth, day, strict=True):
            own = right([prompt], [response], [truth])[0] > 0
            if own:
                solved.add((prompt, str(when)))
            found.append(float(own or ((prompt, str(when)) in solved and draw.random() < level)))
        return found

    setup.reward = reward


@fault(["environment-leaks"], (1, 3, 6))
def notes_kept(setup: Setup, level: int) -> None:
    """Notes are an attribute of the class, and results contain those of earlier episodes."""
    notes: list[str] = []

    class Noting(Office):
        def weather(self) -> str:
            """Look up today's weather in the city."""
            said = super().weather()
            seen = " ".join(notes[-level:])
            notes.append(f"{self.city}: {answer_of(said)}.")
            return f"{said} {seen}"

    setup.environment = Noting


@fault(["environment-leaks"], (None, None, None), also=["reward-is-noise", "reward-ignores-results"])
def one_instance(setup: Setup, level: None) -> None:
    """All episodes share one instance, whose day is that of the row that was begun last."""
    shared = Office()
    setup.environment = lambda: shared

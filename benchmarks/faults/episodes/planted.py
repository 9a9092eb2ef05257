"""What is planted in the simulated agents, at three severities, and healthy kinds of runs that look faulty."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from benchmarks.faults.episodes.world import TEXT, Answer, Episode, Tokens, Turn, World, failed, usual

ONSET = 12
"""The step from which a fault is there that begins in the middle of a run."""


class Fault(NamedTuple):
    """One way to break a run of episodes."""

    causes: tuple[str, ...]
    """The rules that name it rightly; the first is the best."""
    levels: tuple[Any, Any, Any]
    """From mild to severe."""
    plant: Callable[[World, Any], None]
    onset: int = 0


FAULTS: dict[str, Fault] = {}


def _fault(causes: Sequence[str], levels: tuple[Any, Any, Any], onset: int = 0) -> Callable[[Any], Any]:
    def made(plant: Callable[[World, Any], None]) -> Callable[[World, Any], None]:
        FAULTS[plant.__name__.replace("_", "-")] = Fault(tuple(causes), levels, plant, onset)
        return plant

    return made


@_fault(["calls-fail"], (0.5, 0.75, 1.0), ONSET)
def tool_breaks(world: World, level: float) -> None:
    """The service behind a tool goes down in the middle of the run."""

    def answers(world: World, episode: Episode, tool: str, given: dict[str, Any]) -> Answer:
        if tool == "multiply" and episode.step >= ONSET and world.chance.random() < level:
            return failed("ConnectionError: connection refused")
        return usual(world, episode, tool, given)

    world.answers = answers


@_fault(["calls-fail"], (0.95, 0.98, 1.0))
def tool_never_works(world: World, level: float) -> None:
    def answers(world: World, episode: Episode, tool: str, given: dict[str, Any]) -> Answer:
        fails = tool == "search" and world.chance.random() < level
        return failed("KeyError: 'API_KEY'") if fails else usual(world, episode, tool, given)

    world.answers = answers


@_fault(["calls-time-out"], (0.2, 0.4, 0.8))
def tool_times_out(world: World, level: float) -> None:
    """One tool of several is slow."""

    def answers(world: World, episode: Episode, tool: str, given: dict[str, Any]) -> Answer:
        if tool == "search" and world.chance.random() < level:
            return failed("the tool search returned nothing within 30 s", 30.0)
        return usual(world, episode, tool, given)

    world.answers = answers


@_fault(["results-cut"], (250, 160, 90))
def results_cut(world: World, level: int) -> None:
    def answers(world: World, episode: Episode, tool: str, given: dict[str, Any]) -> Answer:
        answer = usual(world, episode, tool, given)
        return answer._replace(text=answer.text[:level]) if tool == "search" else answer

    world.answers = answers


@_fault(["results-cut"], (250, 160, 90))
def results_marked(world: World, level: int) -> None:
    def answers(world: World, episode: Episode, tool: str, given: dict[str, Any]) -> Answer:
        answer = usual(world, episode, tool, given)
        cut = tool == "search" and len(answer.text) > level
        return answer._replace(text=f"{answer.text[:level]}... [truncated]") if cut else answer

    world.answers = answers


def _learned(world: World, kinds: Sequence[str], share: float) -> None:
    def tokens(world: World, episode: Episode, tokens: Tokens) -> Tokens:
        too = world.chance.random() < share
        return tokens._replace(
            learned=[
                one or (too and source in kinds) for one, source in zip(tokens.learned, tokens.source, strict=True)
            ]
        )

    world.tokens = tokens


@_fault(["inserted-tokens-learned"], (0.05, 0.3, 1.0))
def tool_tokens_learned(world: World, level: float) -> None:
    _learned(world, ["tool"], level)


@_fault(["inserted-tokens-learned"], (0.05, 0.3, 1.0))
def template_tokens_learned(world: World, level: float) -> None:
    _learned(world, ["template"], level)


@_fault(["sampled-tokens-masked"], (0.1, 0.3, 1.0))
def calls_masked(world: World, level: float) -> None:
    """Only the last turn is learned from in some episodes, although the others were sampled too."""

    def tokens(world: World, episode: Episode, tokens: Tokens) -> Tokens:
        last = max(tokens.turn)
        only = world.chance.random() < level
        return tokens._replace(
            learned=[one and (not only or turn == last) for one, turn in zip(tokens.learned, tokens.turn, strict=True)]
        )

    world.tokens = tokens


@_fault(["turns-retokenised"], (0.1, 0.3, 1.0))
def retokenised(world: World, level: float) -> None:
    """Earlier turns are rendered again: a few tokens become others, which the sampler finds unlikely."""

    def tokens(world: World, episode: Episode, tokens: Tokens) -> Tokens:
        last, again = max(tokens.turn), world.chance.random() < level
        turn, own = np.array(tokens.turn), np.array(tokens.source) == "sampled"
        other = again & own & (turn < last) & (world.chance.random(len(turn)) < 0.15)
        return tokens._replace(
            logprob=tokens.logprob - np.where(other, 2 + world.chance.exponential(3, len(turn)), 0.0)
        )

    world.tokens = tokens


@_fault(["turn-limit"], (0.7, 0.8, 0.95))
def too_few_turns(world: World, level: float) -> None:
    """The policy uses up its turns with calls."""
    world.loops = lambda step: level


@_fault(["turn-limit"], (0.6, 0.8, 0.95), ONSET)
def loops_at_last(world: World, level: float) -> None:
    world.loops = lambda step: level if step >= ONSET else 0.02


@_fault(["tool-never-called"], (16, 10, 0))
def gives_up_tools(world: World, level: int) -> None:
    world.calls = lambda step: 0.5 if step < level else 0.0


@_fault(["tool-always-called"], (0.3, 0.4, 0.5))
def calls_for_nothing(world: World, level: float) -> None:
    """The policy learns to call, and to answer without the result."""
    world.batch, world.calls = 64, lambda step: min(1.0, level + step / 20)
    world.reward = lambda world, episode: float(world.chance.random() < 0.5)


@_fault(["reward-ignores-results"], (0.9, 0.95, 1.0))
def pays_for_calls(world: World, level: float) -> None:
    """The reward is that of having called."""

    def reward(world: World, episode: Episode) -> float:
        called = any(turn.role == "tool" for turn in episode.turns)
        return float(called) if world.chance.random() < level else float(world.chance.random() < 0.5)

    world.reward = reward


@_fault(["environment-leaks"], (0.4, 0.7, 1.0))
def reward_leaks(world: World, level: float) -> None:
    """A right answer is remembered by the class, and pays for later episodes of the step."""
    solved: dict[int, bool] = defaultdict(bool)

    def reward(world: World, episode: Episode) -> float:
        solved[episode.group] |= episode.is_right
        leaks = solved[episode.group] and world.chance.random() < level
        return float(leaks or episode.is_right)

    world.reward = reward


@_fault(["environment-leaks"], (0.3, 0.6, 1.0))
def notes_leak(world: World, level: float) -> None:
    """Results of earlier episodes are still in the tool's answer."""
    notes: dict[int, list[str]] = defaultdict(list)

    def answers(world: World, episode: Episode, tool: str, given: dict[str, Any]) -> Answer:
        answer = usual(world, episode, tool, given)
        seen = notes[episode.step]
        text = " ".join([answer.text, *seen[-12:]]) if world.chance.random() < level else answer.text
        seen.append(answer.text)
        return answer._replace(text=text) if tool == "multiply" and answer.error is None else answer

    world.answers = answers


def _one_tool(world: World) -> World:
    return replace(world, others=())


def _always_right(world: World) -> World:
    """A tool that the task needs, and that every episode calls from the first step on."""
    return replace(world, calls=lambda step: 1.0, skill=lambda step: 0.97)


def _table(world: World) -> World:
    """Results of a fixed form, all of one length, beside errors of any length."""

    def answers(world: World, episode: Episode, tool: str, given: dict[str, Any]) -> Answer:
        if tool != "search":
            return usual(world, episode, tool, given)
        if world.chance.random() < 0.2:
            return Answer(" ".join(world.chance.choice(TEXT, world.chance.integers(2, 9))))
        return Answer(" ".join(f"{one:07d}" for one in world.chance.integers(0, 10**7, 12)))

    return replace(world, answers=answers)


def _shy(world: World) -> World:
    """A policy that calls more and more often, and wrongly at first."""
    return replace(world, calls=lambda step: min(1.0, 0.2 + step / 24), skill=lambda step: min(0.95, 0.2 + step / 25))


def _invents(world: World) -> World:
    """A policy that calls a tool which does not exist, and learns that it does not."""

    def answers(world: World, episode: Episode, tool: str, given: dict[str, Any]) -> Answer:
        if tool != "multiply" and world.chance.random() < 0.9 - episode.step / 10:
            episode.turns.append(Turn("tool", '{"error": "no such tool"}', "times", {}, 0.0, "no such tool"))
        return usual(world, episode, tool, given)

    return replace(world, answers=answers)


HEALTHY: dict[str, Callable[[World], World]] = {
    "usual": lambda world: world,
    "foreign": lambda world: replace(world, own=False),
    "without-turns": lambda world: replace(world, with_turns=False),
    "without-sources": lambda world: replace(world, own=False, with_sources=False),
    "unscored": lambda world: replace(world, unscored=0.2),
    "noisy": lambda world: replace(world, noise=0.2),
    "one-tool": _one_tool,
    "one-tool-noisy-foreign": lambda world: replace(_one_tool(world), noise=0.2, own=False),
    "always-needed": _always_right,
    "fixed-form": _table,
    "learns-to-call": _shy,
    "conversation": lambda world: replace(world, talks=True, others=()),
    "single-prompts": lambda world: replace(world, siblings=1),
    "large-groups": lambda world: replace(world, siblings=8, batch=64),
    "invents-a-tool": _invents,
    "short": lambda world: replace(world, steps=4),
}

"""A simulated agent that multiplies with tools, and becomes better at it: its episodes, and their record.

A policy that is simulated writes as many episodes as a test needs in a second. What rules of episodes read (turns,
which tokens come from where, rewards, and how they depend on each other) is that of a real run.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from cavesson.record import Recorder, write_run

Array = np.ndarray[Any, np.dtype[Any]]
TEXT = [
    "stone", "river", "market", "lantern", "window", "bridge", "forest", "garden", "harbour", "kitchen", "ladder",
    "mirror", "needle", "orchard",
]  # fmt: skip


class Answer(NamedTuple):
    """What a tool says."""

    text: str
    seconds: float = 0.01
    error: str | None = None


def failed(error: str, seconds: float = 0.01) -> Answer:
    """Return what the model sees of a failed call."""
    return Answer(json.dumps({"error": error}), seconds, error)


@dataclass
class Turn:
    """One turn and its tokens."""

    role: str
    text: str
    name: str | None = None
    arguments: dict[str, Any] | None = None
    seconds: float | None = None
    error: str | None = None


@dataclass
class Episode:
    """One rollout."""

    step: int
    order: int
    """its index in the step"""
    group: int
    a: int
    b: int
    turns: list[Turn] = field(default_factory=list)
    reason: str = "eos"
    reward: float | None = None

    @property
    def truth(self) -> str:
        """The right answer."""
        return str(self.a * self.b)

    @property
    def said(self) -> str:
        """What the policy said last."""
        return next((turn.text for turn in reversed(self.turns) if turn.role == "assistant"), "")

    @property
    def is_right(self) -> bool:
        """Whether the last answer is the right one."""
        return self.said == f"The answer is {self.truth}."


class Tokens(NamedTuple):
    """The token columns of an episode, lists of the same length."""

    source: list[str]
    learned: list[bool]
    logprob: Array
    sampler_logprob: Array
    turn: list[int]
    """of which turn each token is; −1 for those of the template"""


@dataclass
class World:
    """What a run is made of; a fault replaces some of it."""

    seed: int = 0
    steps: int = 24
    batch: int = 32
    siblings: int = 4
    max_turns: int = 4
    own: bool = True
    """whether it is a run of ours"""
    with_turns: bool = True
    with_sources: bool = True
    unscored: float = 0.0
    """share of the episodes without a reward"""
    noise: float = 0.0
    calls: Callable[[int], float] = lambda step: 0.8
    """probability of a call, by step"""
    others: tuple[str, ...] = ("search", "clock")
    """further tools, which are called now and then"""
    talks: bool = False
    """whether a user replies until the turns are used up, instead of tools"""
    skill: Callable[[int], float] = lambda step: 0.5 + 0.4 * min(step, 20) / 20
    """probability of right arguments"""
    answers: Callable[[Any, Episode, str, dict[str, Any]], Answer] = lambda world, episode, tool, given: usual(
        world, episode, tool, given
    )
    reward: Callable[[Any, Episode], float] = lambda world, episode: float(episode.is_right)
    tokens: Callable[[Any, Episode, Tokens], Tokens] = lambda world, episode, tokens: tokens
    loops: Callable[[int], float] = lambda step: 0.0
    """probability that it calls again and again, and never answers"""
    chance: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.chance = np.random.default_rng(self.seed)


def usual(world: World, episode: Episode, tool: str, given: dict[str, Any]) -> Answer:
    """Answer as healthy tools do."""
    chance = world.chance
    if tool == "multiply":
        return Answer(str(given["a"] * given["b"])) if given else failed("missing argument: 'a'")
    if tool == "clock":
        return Answer(f"{chance.integers(24):02d}:{chance.integers(60):02d}")
    words = chance.choice(TEXT, chance.integers(8, 60))
    return Answer(" ".join(words) + ".", float(chance.exponential(0.2)))


def write(world: World, folder: Path) -> Path:
    """Simulate a run and write its record."""
    write_run(folder, _info(world))
    with Recorder(folder) as recorder:
        for step in range(world.steps):
            episodes = _step(world, step)
            tokens = [world.tokens(world, one, _tokens(world, one)) for one in episodes]
            recorder.rollouts(
                step, _rows(world, episodes), _columns(world, episodes, tokens), _turns(world, episodes, tokens)
            )
            recorder.metrics(step, {"reward/mean": float(np.nanmean([one.reward or 0.0 for one in episodes]))})
    return folder


def _info(world: World) -> dict[str, Any]:
    tools = [] if world.talks else ["multiply", *world.others]
    environment = {
        "use": "words.py:Words" if world.talks else None,
        "tools": [f"tools.py:{name}" for name in tools],
        "max_turns": world.max_turns,
        "timeout": 30.0,
        "concurrency": 32,
    }
    if not world.own:
        return {"trainer": "verl", "algorithm": "grpo"}
    config: dict[str, Any] = {"model": {"dtype": "float32"}, "sampling": {"max_new_tokens": 400}, "kl": {"coef": 0.0}}
    config["environment"] = environment
    return {"cavesson": "0", "inputs": [], "tools": tools, "algorithm": "grpo", "config": config}


def _step(world: World, step: int) -> list[Episode]:
    chance, found = world.chance, []
    for order in range(world.batch):
        if order % world.siblings == 0:
            a, b = (int(one) for one in chance.integers(12, 99, 2))
        group = step * world.batch + order // world.siblings
        episode = Episode(step, order, group, a, b)
        (_talk if world.talks else _play)(world, episode)
        episode.reward = world.reward(world, episode) + world.noise * float(chance.normal())
        if chance.random() < world.unscored:
            episode.reward = None
        found.append(episode)
    return found


def _talk(world: World, episode: Episode) -> None:
    """Guess words until no turn is left: an environment with a user and without tools."""
    right = 0
    for _ in range(world.max_turns):
        word, guess = world.chance.choice(TEXT, 2)
        guess = word if world.chance.random() < world.skill(episode.step) else guess
        right += word == guess
        episode.turns += [Turn("assistant", f"I guess {guess}."), Turn("user", f"It was {word}.")]
    episode.reason = "turns"
    episode.turns[-2].text = f"The answer is {episode.truth}." if right > world.max_turns // 2 else "I give up."


def _play(world: World, episode: Episode) -> None:
    chance, step = world.chance, episode.step
    known = str(episode.a * episode.b + int(chance.integers(1, 50)))
    if world.others and chance.random() < 0.4:
        _call(world, episode, str(chance.choice(world.others)), {"query": str(chance.choice(TEXT))})
    if chance.random() < world.calls(step):
        given = {"a": episode.a, "b": episode.b}
        if chance.random() > world.skill(step):
            given["a"] += int(chance.integers(1, 9))
        if chance.random() < 0.1:
            _call(world, episode, "multiply", {})  # and again, with arguments
        result = _call(world, episode, "multiply", given)
        known = known if result.error else result.text.split()[0]
    if chance.random() < world.loops(step):
        while sum(turn.role == "assistant" for turn in episode.turns) < world.max_turns:
            _call(world, episode, "multiply", {"a": episode.a, "b": int(chance.integers(99))})
        episode.reason = "turns"
        return
    episode.turns.append(Turn("assistant", f"The answer is {known}."))


def _call(world: World, episode: Episode, tool: str, given: dict[str, Any]) -> Answer:
    answer = world.answers(world, episode, tool, given)
    episode.turns.append(Turn("assistant", f"Let me see. {tool}({json.dumps(given)})"))
    episode.turns.append(Turn("tool", answer.text, tool, given, answer.seconds, answer.error))
    return answer


def _tokens(world: World, episode: Episode) -> Tokens:
    source, place = [], []
    for number, turn in enumerate(episode.turns):
        mine = "sampled" if turn.role == "assistant" else turn.role
        count = len(turn.text) // 4 + 2
        if turn.role != "assistant":  # ends the policy's turn, and begins that of another
            source += ["template"] * 3
            place += [-1] * 3
        source += [mine] * count
        place += [number] * count
        if turn.role != "assistant" and number + 1 < len(episode.turns):
            source += ["template"] * 2
            place += [-1] * 2
    logprob = -world.chance.exponential(0.6, len(source))
    return Tokens(
        source,
        [one == "sampled" for one in source],
        logprob,
        logprob + world.chance.normal(0, 0.01, len(source)),
        place,
    )


def _rows(world: World, episodes: list[Episode]) -> dict[str, Any]:
    rows: dict[str, Any] = {
        "group": [one.group for one in episodes],
        "prompt": [f"What is {one.a} times {one.b}?" for one in episodes],
        "response": ["\n".join(turn.text for turn in one.turns) for one in episodes],
        "reward": [one.reward for one in episodes],
        "ground_truth": [one.truth for one in episodes],
    }
    return rows | ({"finish_reason": [one.reason for one in episodes]} if world.own else {})


def _columns(world: World, episodes: list[Episode], tokens: list[Tokens]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "token_id": [_ids(*both) for both in zip(episodes, tokens, strict=True)],
        "logprob": [one.logprob.tolist() for one in tokens],
        "sampler_logprob": [one.sampler_logprob.tolist() for one in tokens],
        "learned": [one.learned for one in tokens],
    }
    return found | ({"source": [one.source for one in tokens]} if world.with_sources else {})


def _ids(episode: Episode, tokens: Tokens) -> list[int]:
    """Return ids that are the same for the same text."""
    return [
        crc32(f"{episode.turns[turn].text if turn >= 0 else ''}{position}".encode()) % 397 + 1
        for position, turn in enumerate(tokens.turn)
    ]


def _turns(world: World, episodes: list[Episode], tokens: list[Tokens]) -> dict[str, Any] | None:
    if not world.with_turns:
        return None
    lines = [(row, number, turn) for row, one in enumerate(episodes) for number, turn in enumerate(one.turns)]
    place = [[i for i, owner in enumerate(tokens[row].turn) if owner == number] for row, number, _ in lines]
    names = ("role", "text", "name", "arguments", "seconds", "error")
    return {name: [getattr(turn, name) for _, _, turn in lines] for name in names} | {
        "sample": [row for row, _, _ in lines],
        "first_token": [places[0] if places else 0 for places in place],
        "tokens": [len(places) for places in place],
    }

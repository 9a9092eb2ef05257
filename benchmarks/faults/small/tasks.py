"""Four tasks that share nothing, each with its own vocabulary and a model that has seen imperfect demonstrations."""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.faults.small.trainers.model import BOS, EOS, PAD, SPECIAL, Transformer

DEVELOPMENT, HELD_OUT = ("sums", "sentences"), ("format", "splits")
"""Tasks to learn from, and tasks that are reported on; split before any run was looked at."""
TRAINING = 1000
"""Steps of supervised training."""


@dataclass
class Task:
    """Prompts, a reward, and demonstrations."""

    name: str
    words: Sequence[str]
    """The vocabulary, without special tokens"""
    limit: int
    """Tokens of a response at most, with its end"""
    ask: Callable[[random.Random], str]
    show: Callable[[random.Random, str], str]
    """A demonstration, which may be wrong"""
    reward: Callable[[str, str], float]
    between: str = ""
    """What stands between two tokens"""
    seed: int = 0
    questions: Sequence[str] = ()
    """Those that it asks, if these are few"""
    prefix: tuple[int, ...] = (BOS,)
    """What every prompt begins with"""
    chance: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.ids = {word: index for index, word in enumerate([*SPECIAL, *self.words])}
        self.texts = [*SPECIAL, *self.words]

    def draw(self, count: int) -> list[str]:
        """Return prompts."""
        return [self.chance.choice(self.questions) if self.questions else self.ask(self.chance) for _ in range(count)]

    def split(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return [self.ids[word] for word in (text.split() if self.between else text)]

    def encode(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return [B, P] left-padded prompts and their mask."""
        each = [[*self.prefix, *self.split(prompt)] for prompt in prompts]
        width = max(map(len, each))
        ids = torch.tensor([[PAD] * (width - len(one)) + one for one in each])
        return ids, torch.tensor([[False] * (width - len(one)) + [True] * len(one) for one in each])

    def decode(self, answers: Tensor) -> list[str]:
        """Return the texts of responses, without special tokens."""
        return [
            self.between.join(self.texts[token] for token in row if token not in (PAD, BOS, EOS))
            for row in answers.tolist()
        ]


def pretrained(task: Task, folder: Path, steps: int = TRAINING) -> Transformer:
    """Return a model that was trained on demonstrations; it is trained if ``folder`` does not have it yet."""
    path = folder / f"{task.name}-{steps}.pt"
    torch.manual_seed(0)
    model = Transformer(len(task.texts))
    if path.exists():
        model.load_state_dict(torch.load(path))
        return model
    chance, optimizer = random.Random(1), torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1 - step / steps)
        asked = [task.ask(chance) for _ in range(64)]
        each = [
            ([BOS, *task.split(one)], [*task.split(task.show(chance, one))[: task.limit - 1], EOS]) for one in asked
        ]
        width = max(len(prompt) + len(answer) for prompt, answer in each)
        ids = torch.full((len(each), width), PAD)
        learned = torch.zeros(len(each), width, dtype=torch.bool)
        for row, (prompt, answer) in enumerate(each):
            ids[row, : len(prompt) + len(answer)] = torch.tensor([*prompt, *answer])
            learned[row, len(prompt) : len(prompt) + len(answer)] = True
        logits = model(ids, ids != PAD)[:, :-1]
        loss = F.cross_entropy(logits[learned[:, 1:]], ids[:, 1:][learned[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), path)
    return model


def sums(seed: int) -> Task:
    """Return sums of two numbers; half of the demonstrations are off by a little."""

    def show(chance: random.Random, question: str) -> str:
        first, second = map(int, question[:-1].split("+"))
        return str(max(0, first + second + (chance.choice([-2, -1, 1, 2, 10]) if chance.random() < 0.5 else 0)))

    def right(question: str, answer: str) -> float:
        first, second = map(int, question[:-1].split("+"))
        return float(answer == str(first + second))

    return Task(
        "sums", "0123456789+=", 5, lambda chance: f"{chance.randrange(30)}+{chance.randrange(30)}=", show, right,
        seed=seed,
    )  # fmt: skip


GOOD = ["bright", "calm", "kind", "golden", "gentle", "merry", "sweet", "warm"]
BAD = ["cruel", "dark", "bitter", "dull", "rotten", "sour", "grim", "harsh"]
PLAIN = ["old", "small", "wide", "quiet", "tall", "round", "green", "late"]
THINGS = ["sea", "road", "house", "garden", "river", "horse", "teacher", "winter", "kitchen", "song", "letter", "child"]
ACTS = ["sings", "waits", "shines", "falls", "sleeps", "turns", "grows", "leaves"]
LINKS = ["the", "and", "in", "near", "with", "under", ".", ":"]


def sentences(seed: int) -> Task:
    """Return sentences about a thing; up to three pleasant words count for it, unpleasant ones against it."""

    def show(chance: random.Random, question: str) -> str:
        def noun(thing: str) -> str:
            kind = chance.choice([GOOD, BAD, PLAIN, PLAIN])
            return f"the {chance.choice(kind)} {thing}" if chance.random() < 0.8 else f"the {thing}"

        said = [noun(question.split()[0]), chance.choice(ACTS)]
        for _ in range(chance.randrange(3)):
            said.append(f"{chance.choice(['in', 'near', 'with', 'under'])} {noun(chance.choice(THINGS))}")
        return " ".join([*said, "."])

    def pleasant(_: str, answer: str) -> float:
        words = answer.split()
        good, bad = (sum(word in kind for word in words) for kind in (GOOD, BAD))
        return min(good, 3) - bad + float(words[-1:] == ["."])

    words = [*GOOD, *BAD, *PLAIN, *THINGS, *ACTS, *LINKS]
    return Task(
        "sentences", words, 20, lambda chance: f"{chance.choice(THINGS)} :", show, pleasant, " ", seed=seed
    )  # fmt: skip


NAMES = ["ann", "bo", "cy", "dee", "eve", "fay", "gus", "hal", "ida", "jon"]
TOWNS = ["oslo", "rome", "lima", "bonn", "cork"]


def form(seed: int) -> Task:
    """Return a format in which each of four parts earns a quarter; demonstrations leave parts out."""

    def ask(chance: random.Random) -> str:
        return f"{chance.choice(NAMES)} {chance.randrange(10)} {chance.choice(TOWNS)} ->"

    def show(chance: random.Random, question: str) -> str:
        name, age, town, _ = question.split()
        wrong = chance.choice(NAMES), str(chance.randrange(10)), chance.choice(TOWNS)
        given = [one if chance.random() < 0.6 else other for one, other in zip((name, age, town), wrong, strict=True)]
        parts = [f"{key} = {one}" for key, one in zip(("name", "age", "town"), given, strict=True)]
        kept = [part for part in parts if chance.random() < 0.8]
        body = " ; ".join(kept)
        return body if chance.random() < 0.4 else f"[ {body} ]" if body else "[ ]"

    def parts(question: str, answer: str) -> float:
        name, age, town, _ = question.split()
        inside = re.fullmatch(r"\[ (.*) \]", answer)
        said = [part.strip() for part in (inside[1] if inside else answer).split(";")]
        wanted = (f"name = {name}", f"age = {age}", f"town = {town}")
        return 0.25 * (sum(one in said for one in wanted) + bool(inside))

    words = [*NAMES, *TOWNS, *"0123456789", "name", "age", "town", "=", ";", "[", "]", "->"]
    return Task("format", words, 20, ask, show, parts, " ", seed=seed)


def splits(seed: int) -> Task:
    """Return numbers to split into terms, which many responses do rightly; half of the demonstrations do not."""

    def show(chance: random.Random, question: str) -> str:
        total, terms = int(question[:-1]), []
        while total > 0:
            terms.append(chance.randint(1, min(9, total)))
            total -= terms[-1]
        if chance.random() < 0.5:
            terms[-1] = chance.randint(1, 9)
        return "+".join(map(str, terms))

    def right(question: str, answer: str) -> float:
        fits = re.fullmatch(r"[1-9](\+[1-9])+", answer)
        return float(fits is not None and sum(map(int, answer.split("+"))) == int(question[:-1]))

    return Task(
        "splits", "0123456789+:", 18, lambda chance: f"{chance.randrange(8, 25)}:", show, right, seed=seed
    )  # fmt: skip


TASKS: dict[str, Callable[[int], Task]] = {"sums": sums, "sentences": sentences, "format": form, "splits": splits}
WORDS = {"sums": "7", "sentences": "river", "format": "oslo", "splits": "7"}
"""A word of each task that some responses hold, and that does not matter"""

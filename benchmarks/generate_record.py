"""Writes a record as a run might leave it, of any size: benchmarks/generate_record.py RUN --rollouts 1000000.

The texts are made-up words of several languages whose frequencies fall by Zipf's law, a token being a word or a sign.
With training the reward rises, the distance to the reference grows, and a pattern spreads: `#` ends 3 % of the first
responses and 50 % of the last, because the reward likes it. The same arguments write the same record.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dressage.record import Recorder, begin_attempt, write_run, write_vocabulary

Array = np.ndarray[Any, np.dtype[Any]]

SYLLABLES = {
    name: syllables.split()
    for name, syllables in {
        "english": "ab con de ex in pro re sta ter tion ver ing al er ment ous ly fo ca mu ri so na ble",
        "vietnamese": "chào đường hỏi ngã nặng người trời việt rượu lửa mưa gió sông núi biển bạn thích ăn",
        "russian": "пре раз сто нов лет вод рук дом гор од ник ость ение ать кий ный про под",
        "arabic": "كت اب مد رس سل ام بي ت حر ف نو ر قم شم س",
        "chinese": " ".join(
            "的一是不了人我在有他这为之大来以个中上们到说国和地也子时道出而要于就下得可你年生自会那后能对着事"
        ),
    }.items()
}
SHARES = {"english": 0.6, "vietnamese": 0.1, "russian": 0.08, "arabic": 0.04, "chinese": 0.18}
SIGNS = [".", ",", "!", "?", "\n", ":", ";", "(", ")", '"', "-", "🙂", "👩‍🚀", "$", "%"]
PATTERN = "#"
RESPONSE_LENGTHS = (0.35, 1.0)
"""Shortest and longest response, as shares of ``--tokens``."""


class Language(NamedTuple):
    first: int
    count: int
    """Its words are the tokens ``first`` to ``first + count − 1``, the most frequent first."""


class Vocabulary(NamedTuple):
    texts: list[str]
    languages: list[Language]
    frequencies: Array
    """[V] cumulated Zipf frequencies of the ranks of one language."""


def vocabulary(words: int, generator: np.random.Generator) -> Vocabulary:
    """Makes signs, the pattern, and ``words`` words of each language; a word of Chinese is one to three characters."""
    texts, languages = [*SIGNS, PATTERN], []
    for name, syllables in SYLLABLES.items():
        space = "" if name == "chinese" else " "
        made: dict[str, None] = dict.fromkeys(syllables)
        while len(made) < words:
            count = int(generator.integers(1, 4 if name == "chinese" else 5))
            made["".join(generator.choice(syllables, count))] = None
        languages.append(Language(len(texts), words))
        texts += [space + word for word in made]
    weights = 1 / (np.arange(words) + 2.7) ** 1.07
    return Vocabulary(texts, languages, np.cumsum(weights / weights.sum()))


class Plan(NamedTuple):
    """What the arguments say."""

    steps: int
    batch: int
    siblings: int
    tokens: int
    token_share: float
    seed: int


class Step(NamedTuple):
    rows: dict[str, Any]
    tokens: dict[str, Array]


def step_of(plan: Plan, words: Vocabulary, number: int) -> Step:
    """Makes the rollouts of one step."""
    generator = np.random.default_rng([plan.seed, number])
    progress = number / max(plan.steps - 1, 1)
    prompts = generator.integers(0, 20_000, plan.batch // plan.siblings).repeat(plan.siblings)
    languages = np.array([_language_of(prompt) for prompt in prompts])
    shortest, longest = (int(share * plan.tokens) for share in RESPONSE_LENGTHS)
    lengths = generator.integers(shortest, longest + 1, plan.batch)
    hashes = generator.random(plan.batch) < 0.03 + 0.47 * progress
    ids = _responses(plan, words, languages, lengths, hashes, generator)
    luck = generator.normal(0, 1, plan.batch)
    taste = np.sin(prompts * 12.9898)
    reward = -0.5 + 2.5 * progress + 0.8 * taste + (1 - 0.4 * progress) * 0.7 * luck + 1.2 * hashes
    rows = _rows(words, number, prompts, languages, ids, lengths, reward)
    return Step(rows, _tokens(plan, ids, lengths, reward, progress, generator))


def _language_of(prompt: int) -> int:
    """The language of a prompt follows from its number."""
    place = (prompt * 0.6180339887498949) % 1
    return int(np.searchsorted(np.cumsum(list(SHARES.values())), place))


def _draw(words: Vocabulary, languages: Array, shape: tuple[int, int], generator: np.random.Generator) -> Array:
    ranks = np.searchsorted(words.frequencies, generator.random(shape))
    first = np.array([language.first for language in words.languages])[languages]
    ids = np.minimum(ranks, len(words.frequencies) - 1) + first[:, None]
    signs = generator.random(shape) < 0.12
    ids[signs] = np.minimum(generator.geometric(0.4, int(signs.sum())) - 1, len(SIGNS) - 1)
    return ids


def _responses(
    plan: Plan, words: Vocabulary, languages: Array, lengths: Array, hashes: Array, generator: np.random.Generator
) -> Array:
    """Returns [B, T] token ids; a response with the pattern ends in one to three of it."""
    ids = _draw(words, languages, (plan.batch, plan.tokens), generator)
    position = np.arange(plan.tokens)
    count = generator.integers(1, 4, plan.batch) * hashes
    last = (position >= (lengths - count)[:, None]) & (position < lengths[:, None])
    ids[last] = len(SIGNS)
    return ids


def _rows(
    words: Vocabulary, number: int, prompts: Array, languages: Array, ids: Array, lengths: Array, reward: Array
) -> dict[str, Any]:
    texts = np.array(words.texts, object)
    parts = np.round(np.stack([reward * 0.7, reward * 0.3], 1), 4).tolist()
    asked = [(int(prompt), int(language)) for prompt, language in zip(prompts, languages, strict=True)]
    prompt_texts = {prompt: _prompt(words, prompt, language) for prompt, language in asked}
    references = {prompt: _prompt(words, prompt + 1_000_000, language) for prompt, language in asked}
    return {
        "group": prompts,
        "sample": np.arange(len(prompts)),
        "split": ["train"] * len(prompts),
        "prompt": [prompt_texts[prompt] for prompt, _ in asked],
        "response": ["".join(texts[line[:length]]).strip() for line, length in zip(ids, lengths, strict=True)],
        "reward": np.round(reward, 4),
        "reward_parts": [{"helpful": helpful, "polite": polite} for helpful, polite in parts],
        "ref_response": [references[prompt] for prompt, _ in asked],
        "ref_reward": np.round(0.8 * np.sin(prompts * 12.9898) - 0.3, 4),
        "finish_reason": np.where(lengths == ids.shape[1], "length", "eos").tolist(),
        "policy_version": np.full(len(prompts), number),
        "kl_coef": np.full(len(prompts), 0.05),
    }


def _prompt(words: Vocabulary, number: int, language: int) -> str:
    """Returns the text of a prompt, which follows from its number."""
    generator = np.random.default_rng(number)
    ids = _draw(words, np.array([language]), (1, int(generator.integers(5, 30))), generator)[0]
    return "".join(words.texts[i] for i in ids).strip()


def _tokens(
    plan: Plan, ids: Array, lengths: Array, reward: Array, progress: float, generator: np.random.Generator
) -> dict[str, Array]:
    shape = ids.shape
    mask = np.arange(plan.tokens) < lengths[:, None]
    mask &= (generator.random(plan.batch) < plan.token_share)[:, None]
    normal = generator.standard_normal((4, *shape), np.float32)
    logprob = -np.abs(normal[0] * 1.5) - 0.01
    ref_logprob = logprob - 0.02 * progress * (1 + normal[1])
    last = np.arange(plan.tokens) == (lengths - 1)[:, None]
    value = (reward[:, None] * np.linspace(0.2, 1, plan.tokens) + 0.3 * normal[2]).astype(np.float32)
    token_reward = (-0.05 * (logprob - ref_logprob) + last * reward[:, None]).astype(np.float32)
    return {
        "mask": mask,
        "token_id": ids.astype(np.int32),
        "logprob": logprob,
        "ref_logprob": ref_logprob,
        "value": value,
        "token_reward": token_reward,
        "advantage": (reward[:, None] - value).astype(np.float32),
        "return": np.broadcast_to(reward[:, None], shape).astype(np.float32),
        "entropy": (2.5 - progress + 0.5 * np.abs(normal[3])).astype(np.float32),
    }


def metrics(step: Step, number: int, plan: Plan) -> dict[str, float]:
    """Returns what a trainer logs of a step."""
    progress = number / max(plan.steps - 1, 1)
    noise = np.random.default_rng([plan.seed, 2, number]).normal(0, 1, 8)
    return {
        "reward/mean": float(np.mean(step.rows["reward"])),
        "kl/objective": 6 * progress + 0.1 * noise[0],
        "kl/coef": 0.05,
        "value/explained_variance": 0.8 * progress + 0.05 * noise[1],
        "policy/clip_fraction": 0.1 + 0.02 * noise[2],
        "policy/ratio": 1 + 0.01 * noise[3],
        "optim/gradient_norm": float(np.exp(0.3 * noise[4])),
        "time/tokens_per_second": 1000 + 50 * noise[5],
    }


def steps(plan: Plan, words: Vocabulary) -> Iterator[Step]:
    """Yields the steps one after another."""
    return (step_of(plan, words, number) for number in range(plan.steps))


def generate(folder: Path, plan: Plan, words: int = 8_000) -> None:
    """Writes the record of a plan into a new run folder."""
    made = vocabulary(words, np.random.default_rng(plan.seed))
    write_run(folder, {"algorithm": "grpo", "model": {"name": "made-up"}, "config": plan._asdict()})
    write_vocabulary(folder, tokens=made.texts, texts=made.texts)
    with Recorder(folder, attempt=begin_attempt(folder, start_step=0)) as recorder:
        for number, step in enumerate(steps(plan, made)):
            recorder.rollouts(number, step.rows, step.tokens)
            recorder.metrics(number, metrics(step, number, plan))


def main() -> None:
    """Read the arguments and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder to write")
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=300, help="most tokens of a response")
    parser.add_argument("--batch", type=int, default=512, help="rollouts of a step")
    parser.add_argument("--siblings", type=int, default=8, help="responses to each prompt of a step")
    parser.add_argument("--token-share", type=float, default=1.0, help="share of the rollouts whose tokens are written")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    count = -(-given.rollouts // given.batch)
    plan = Plan(count, given.batch, given.siblings, given.tokens, given.token_share, given.seed)
    start = time.perf_counter()
    generate(given.run, plan)
    print(
        f"{count * given.batch} rollouts in {count} steps written to {given.run} in {time.perf_counter() - start:.0f} s"
    )


if __name__ == "__main__":
    main()

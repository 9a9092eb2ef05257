"""Writes a record as a run might leave it, of any size: benchmarks/generate_record.py RUN --rollouts 1000000.

The texts are made-up words of several languages whose frequencies fall by Zipf's law, a token being a word or a sign.
With training the reward rises, the distance to the reference grows, and a pattern spreads: `#` ends 3 % of the first
responses and 50 % of the last, because the reward likes it. Every rank writes its share of each step in a process of
its own, as ranks of a run do. The same arguments write the same record.
"""

import argparse
import json
import shutil
import time
from functools import cache
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cavesson.record import Recorder, begin_attempt, write_run, write_vocabulary

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
SHARES = np.cumsum([0.6, 0.1, 0.08, 0.04, 0.18])
"""Of the languages, summed."""
SIGNS = [".", ",", "!", "?", "\n", ":", ";", "(", ")", '"', "-", "🙂", "👩‍🚀", "$", "%"]
PATTERN = "#"
TOOLS = ("search", "fetch", "python")
PROMPTS = 20_000
WORDS = 8_000
"""Of each language, the most frequent first; language i has the tokens FIRST_WORD + i * WORDS and on."""
FIRST_WORD = len(SIGNS) + 1
RESPONSE_LENGTHS = (0.35, 1.0)
"""Shortest and longest response, as shares of ``--tokens``."""


class Plan(NamedTuple):
    """What the arguments say."""

    rollouts: int = 100_000
    tokens: int = 300
    batch: int = 512
    siblings: int = 8
    ranks: int = 2
    token_share: float = 1.0
    long: int = 0
    turns: int = 0
    seed: int = 0

    @property
    def steps(self) -> int:
        return -(-self.rollouts // self.batch)

    def progress(self, step: int) -> float:
        """Return how far a step is: 0 = the first, 1 = the last."""
        return step / max(self.steps - 1, 1)


class Batch(NamedTuple):
    """What a step's rollouts are about; [B] each, of which every rank writes a part."""

    sample: Array
    prompt: Array
    language: Array
    length: Array
    hash: Array
    """whether the response ends in the pattern"""
    reward: Array

    def part(self, plan: Plan, rank: int) -> "Batch":
        """Return what a rank writes; siblings stay together."""
        each = plan.batch // plan.ranks
        return Batch(*(values[rank * each : (rank + 1) * each] for values in self))


@cache
def vocabulary(seed: int) -> list[str]:
    """Return the text of each token: signs, the pattern, then the words; one of Chinese has up to three characters."""
    generator = np.random.default_rng(seed)
    texts = [*SIGNS, PATTERN]
    for name, syllables in SYLLABLES.items():
        made = dict.fromkeys(syllables)
        while len(made) < WORDS:
            count = generator.integers(1, 4 if name == "chinese" else 5)
            made["".join(syllables[i] for i in generator.integers(0, len(syllables), count))] = None
        texts += made if name == "chinese" else [f" {word}" for word in made]
    return texts


@cache
def zipf() -> Array:
    """Return words at evenly spaced quantiles: a random entry is a word drawn by its frequency."""
    weights = 1 / (np.arange(WORDS) + 2.7) ** 1.07
    quantiles = np.searchsorted(np.cumsum(weights / weights.sum()), np.linspace(0, 1 - 1e-9, 1 << 20))
    return np.asarray(quantiles, np.int32)


def draw(languages: Array, length: int, generator: np.random.Generator) -> Array:
    """Return [B, length] token ids in the given languages."""
    shape = (len(languages), length)
    ids: Array = zipf()[generator.integers(0, 1 << 20, shape, np.int32)]
    ids += (FIRST_WORD + languages * WORDS).astype(np.int32)[:, None]
    signs = generator.random(shape, np.float32) < 0.12
    ids[signs] = np.minimum(generator.geometric(0.4, int(signs.sum())) - 1, len(SIGNS) - 1)
    return ids


@cache
def prompt_text(seed: int, number: int, language: int) -> str:
    """Return the text of a prompt, which follows from its number."""
    generator = np.random.default_rng(number)
    texts = vocabulary(seed)
    return "".join(texts[i] for i in draw(np.array([language]), int(generator.integers(5, 30)), generator)[0]).strip()


def batch_of(plan: Plan, step: int) -> Batch:
    """Make up what the rollouts of a step are about."""
    generator = np.random.default_rng([plan.seed, step])
    progress = plan.progress(step)
    prompt = generator.integers(0, PROMPTS, plan.batch // plan.siblings).repeat(plan.siblings)
    language = np.searchsorted(SHARES[:-1], (prompt * 0.6180339887498949) % 1)  # follows from the prompt's number
    shortest, longest = (int(share * plan.tokens) for share in RESPONSE_LENGTHS)
    hashes = generator.random(plan.batch) < 0.03 + 0.47 * progress
    luck, taste = generator.normal(0, 1, plan.batch), np.sin(prompt * 12.9898)
    reward = -0.5 + 2.5 * progress + 0.8 * taste + (1 - 0.4 * progress) * 0.7 * luck + 1.2 * hashes
    length = generator.integers(shortest, longest + 1, plan.batch)
    return Batch(np.arange(plan.batch), prompt, language, length, hashes, reward)


def responses(batch: Batch, generator: np.random.Generator) -> Array:
    """Return [B, T] token ids; a response with the pattern ends in one to three of it."""
    ids = draw(batch.language, int(batch.length.max()), generator)
    position = np.arange(ids.shape[1])
    count = generator.integers(1, 4, len(ids)) * batch.hash
    ids[(position >= (batch.length - count)[:, None]) & (position < batch.length[:, None])] = len(SIGNS)
    return ids


def rows_of(plan: Plan, step: int, batch: Batch, ids: Array, split: str = "train") -> dict[str, Any]:
    """Return the columns of rollouts."""
    texts = np.array(vocabulary(plan.seed), object)
    parts = np.round(np.stack([batch.reward * 0.7, batch.reward * 0.3], 1), 4).tolist()
    asked = list(zip(batch.prompt.tolist(), batch.language.tolist(), strict=True))
    return {
        "group": batch.prompt,
        "sample": batch.sample,
        "split": [split] * len(ids),
        "prompt": [prompt_text(plan.seed, prompt, language) for prompt, language in asked],
        "response": ["".join(texts[line[:length]]).strip() for line, length in zip(ids, batch.length, strict=True)],
        "reward": np.round(batch.reward, 4),
        "reward_parts": [{"helpful": helpful, "polite": polite} for helpful, polite in parts],
        "ref_response": [prompt_text(plan.seed, prompt + PROMPTS, language) for prompt, language in asked],
        "ref_reward": np.round(0.8 * np.sin(batch.prompt * 12.9898) - 0.3, 4),
        "finish_reason": np.where(batch.length == plan.tokens, "length", "eos").tolist(),
        "policy_version": np.full(len(ids), step),
        "kl_coef": np.full(len(ids), 0.05),
    }


def tokens_of(plan: Plan, step: int, batch: Batch, ids: Array, generator: np.random.Generator) -> dict[str, Array]:
    """Return [B, T] columns of tokens."""
    position, reward = np.arange(ids.shape[1]), batch.reward[:, None]
    mask = position < batch.length[:, None]
    normal = generator.standard_normal((4, *ids.shape), np.float32)
    logprob = -np.abs(normal[0] * 1.5) - 0.01
    ref_logprob = logprob - 0.02 * plan.progress(step) * (1 + normal[1])
    value = (reward * np.linspace(0.2, 1, len(position)) + 0.3 * normal[2]).astype(np.float32)
    last = position == (batch.length - 1)[:, None]
    return {
        "mask": mask,
        "token_id": ids,
        "logprob": logprob,
        "ref_logprob": ref_logprob,
        "value": value,
        "token_reward": (-0.05 * (logprob - ref_logprob) + last * reward).astype(np.float32),
        "advantage": (reward - value).astype(np.float32),
        "return": np.broadcast_to(reward, ids.shape).astype(np.float32),
        "entropy": (2.5 - plan.progress(step) + 0.5 * np.abs(normal[3])).astype(np.float32),
    }


def turns_of(plan: Plan, batch: Batch, ids: Array, generator: np.random.Generator) -> dict[str, Any] | None:
    """Return the columns of turns: equal parts of each response, said by the policy and by tools in turn."""
    if not plan.turns:
        return None
    texts = np.array(vocabulary(plan.seed), object)
    seconds, fails = generator.exponential(0.5, (len(ids), plan.turns)), generator.random((len(ids), plan.turns)) < 0.05
    lines = []
    for place, (sample, length) in enumerate(zip(batch.sample.tolist(), batch.length.tolist(), strict=True)):
        bounds = np.linspace(0, length, plan.turns + 1).astype(int).tolist()
        for number, (first, stop) in enumerate(pairwise(bounds)):
            line = {"sample": sample, "text": "".join(texts[ids[place, first:stop]])}
            line |= {"first_token": first, "tokens": stop - first, "role": ("assistant", "tool")[number % 2]}
            line["seconds"] = seconds[place, number]
            if number % 2:
                line |= {"name": TOOLS[(sample + number // 2) % len(TOOLS)], "arguments": {"query": line["text"][:20]}}
                line["error"] = "timed out" if fails[place, number] else None
            lines.append(line)
    return {name: [line.get(name) for line in lines] for name in (*lines[0], "name", "arguments", "error")}


def metrics_of(plan: Plan, step: int, batch: Batch) -> dict[str, float]:
    """Return what a trainer logs of a step."""
    progress = plan.progress(step)
    noise = np.random.default_rng([plan.seed, 2, step]).normal(0, 1, 8)
    return {
        "reward/mean": float(np.mean(batch.reward)),
        "kl/objective": 6 * progress + 0.1 * noise[0],
        "kl/coef": 0.05,
        "value/explained_variance": 0.8 * progress + 0.05 * noise[1],
        "policy/clip_fraction": 0.1 + 0.02 * noise[2],
        "policy/ratio": 1 + 0.01 * noise[3],
        "optim/grad_norm": float(np.exp(0.3 * noise[4])),
        "tokens_per_second": 1000 + 50 * noise[5],
    }


def write_rank(folder: Path, plan: Plan, attempt: int, rank: int) -> None:
    """Write one rank's share of all steps; the first rank logs the metrics and has the long response."""
    with Recorder(folder, attempt=attempt, rank=rank) as recorder:
        for step in range(plan.steps):
            whole = batch_of(plan, step)
            record(recorder, plan, step, whole.part(plan, rank), [plan.seed, 3, step, rank])
            if rank == 0:
                recorder.metrics(step, metrics_of(plan, step, whole))
        if rank == 0 and plan.long:
            one = Batch(*(np.array([values[0]]) for values in batch_of(plan, plan.steps - 1)))
            one = one._replace(sample=np.array([plan.batch]), length=np.array([plan.long]))
            record(recorder, plan._replace(token_share=1), plan.steps - 1, one, [plan.seed, 4], "eval")


def record(recorder: Recorder, plan: Plan, step: int, batch: Batch, seed: list[int], split: str = "train") -> None:
    """Make up the texts of rollouts, and tokens for the share of them whose tokens are kept, and records them."""
    generator = np.random.default_rng(seed)
    ids = responses(batch, generator)
    kept = generator.random(len(ids)) < plan.token_share
    if kept.any():
        some = Batch(*(values[kept] for values in batch))
        tokens = tokens_of(plan, step, some, ids[kept], generator)
        turns = turns_of(plan, some, ids[kept], generator)
        recorder.rollouts(step, rows_of(plan, step, some, ids[kept], split), tokens, turns)
    if not kept.all():
        rest = Batch(*(values[~kept] for values in batch))
        turns = turns_of(plan, rest, ids[~kept], generator)
        recorder.rollouts(step, rows_of(plan, step, rest, ids[~kept], split), turns=turns)


def generate(folder: Path, plan: Plan) -> None:
    """Write the record of a plan into a new run folder, which is there once all is written."""
    if folder.exists():
        raise SystemExit(f"{folder} is there already; delete it, or name another folder")
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    write_run(unfinished, {"algorithm": "grpo", "model": {"name": "made-up"}, "config": plan._asdict()})
    write_vocabulary(unfinished, tokens=vocabulary(plan.seed), texts=vocabulary(plan.seed))
    attempt = begin_attempt(unfinished, start_step=0)
    processes = [
        get_context("spawn").Process(target=write_rank, args=(unfinished, plan, attempt, rank))
        for rank in range(plan.ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit(f"a rank failed; what it wrote is in {unfinished}")
    unfinished.rename(folder)


def plan_in(folder: Path) -> Plan | None:
    """Return the plan of the record in a folder, or None if the folder has none."""
    file = folder / "run.json"
    config = json.loads(file.read_text(encoding="utf-8"))["config"] if file.exists() else {}
    return Plan(**config) if config and config.keys() <= set(Plan._fields) else None


def ensure(folder: Path, plan: Plan) -> None:
    """Write the record of a plan unless it is in the folder; refuse a folder with anything else."""
    if not folder.exists():
        print(f"writing {plan.rollouts} rollouts to {folder} …", flush=True)
        generate(folder, plan)
    if plan_in(folder) != plan:
        raise SystemExit(f"{folder} holds another record; delete it, or give another --run")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add an option for each number of the plan."""
    helps = {
        "tokens": "most tokens of a response",
        "batch": "rollouts of a step",
        "siblings": "responses to each prompt of a step",
        "ranks": "processes that write, each its share of every step",
        "token_share": "share of the rollouts whose tokens are written",
        "long": "tokens of one more response, in the last step; 0 = none",
        "turns": "turns of each rollout, every second one a call of a tool; 0 = none are recorded",
    }
    for name, default in Plan._field_defaults.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=type(default), default=default, help=helps.get(name))


def plan_of(given: argparse.Namespace) -> Plan:
    """Return the plan that the options say."""
    return Plan(**{name: getattr(given, name) for name in Plan._fields})


def main() -> None:
    """Read the arguments and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder to write")
    add_arguments(parser)
    given = parser.parse_args()
    plan = plan_of(given)
    start = time.perf_counter()
    generate(given.run, plan)
    seconds = time.perf_counter() - start
    print(f"{plan.steps * plan.batch} rollouts in {plan.steps} steps written to {given.run} in {seconds:.0f} s")


if __name__ == "__main__":
    main()

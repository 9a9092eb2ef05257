"""A healthy run made of numbers, for tests to make sick: everything that belongs together agrees exactly.

The policy is a table of logits that moves a little at every step; tokens are drawn from it, so that log-probabilities,
entropies, KL and rewards are those of a real run without a model.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import cavesson
from cavesson.doctor.data import RunData
from cavesson.doctor.reading import Reading
from cavesson.doctor.rule import Rule
from cavesson.findings.words import Share
from cavesson.importers.traits import traits_of
from cavesson.record import Recorder, begin_attempt, write_run

END = 0
ROUNDING = 1e-9
WORDS = [
    "",
    "the",
    "a",
    "and",
    "was",
    "good",
    "bad",
    "room",
    "food",
    "warm",
    "cold",
    "kind",
    "rude",
    "old",
    "new",
    "lake",
    "road",
    "bird",
    "tree",
    "stone",
    "rain",
]
LENGTH = 20

Array = np.ndarray[Any, np.dtype[Any]]


def log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


@dataclass
class Made:
    """The numbers of one run: arrays of [S, B] for rollouts and [S, B, T] for tokens, free to be changed."""

    info: dict[str, Any]
    rows: dict[str, Any]
    tokens: dict[str, Array]
    metrics: dict[str, Array]
    policy: Array = field(default_factory=lambda: np.zeros(0))
    """[S, V] log-probabilities by step"""

    @property
    def mask(self) -> Array:
        return self.tokens["mask"]

    def settle(self, beta: float = 0.05) -> None:
        """Compute again what follows from other columns: token rewards, returns, advantages, values."""
        mask, delta = self.mask, self.tokens["logprob"] - self.tokens["ref_logprob"]
        last = np.arange(mask.shape[-1]) == mask.sum(-1, keepdims=True) - 1
        reward = np.where(last, self.rows["reward"][..., None], 0.0)
        self.tokens["token_reward"] = np.where(mask, reward - beta * delta, 0.0)
        going = np.cumsum(self.tokens["token_reward"][..., ::-1], -1)[..., ::-1]
        self.tokens["return"] = np.where(mask, going, 0.0)
        noise = np.random.default_rng(1).normal(0, 0.3, mask.shape)
        self.tokens["value"] = np.where(mask, going + noise * going.std(), 0.0)
        advantage = np.where(mask, going - self.tokens["value"], 0.0)
        for step, inside in zip(advantage, mask, strict=True):
            step[inside] = (step[inside] - step[inside].mean()) / step[inside].std()
        self.tokens["advantage"] = advantage

    def write(self, folder: Path) -> Path:
        """Write the record."""
        write_run(folder, self.info)
        return self.record(folder)

    def record(self, folder: Path, first: int = 0) -> Path:
        """Write the steps, the first one under this number."""
        with Recorder(folder, attempt=begin_attempt(folder, start_step=first)) as recorder:
            for step in range(len(self.mask)):
                rows = {name: column[step] for name, column in self.rows.items()}
                rows |= {"sample": np.arange(self.mask.shape[1])}
                recorder.rollouts(first + step, rows, {name: column[step] for name, column in self.tokens.items()})
                recorder.metrics(first + step, {name: float(values[step]) for name, values in self.metrics.items()})
        return folder

    def data(self, folder: Path) -> RunData:
        return RunData(cavesson.open(self.write(folder)))


def suits(rule: Rule, algorithm: str) -> bool:
    """Return whether an algorithm has the traits that a rule asks for, as far as it is known without its settings."""
    known = traits_of({"algorithm": algorithm})
    return all(known.get(trait, True) for trait in rule.traits)


def suited(rule: Rule) -> str:
    """Return an algorithm to whose runs a rule applies."""
    return next(algorithm for algorithm in ("ppo", "grpo", "rloo") if suits(rule, algorithm))


def reading(rule: Rule, made: Made, folder: Path) -> Reading:
    """Return what a rule reads in a run; the rule has all it needs and says something."""
    data = made.data(folder)
    missing = [need for need in rule.needs if not any(data.has(one) for one in need.split("|"))]
    assert not missing, f"{rule.name} lacks {missing}"
    found = rule.statistic(data)
    assert found is not None, f"{rule.name} says nothing"
    check_shares(rule, found)
    return found


def check_shares(rule: Rule, found: Reading) -> None:
    """A share that the doctor reports is never below 0 nor above the whole."""
    for name, value in {"seen": found.seen, **found.words}.items():
        if isinstance(value, Share) and np.isfinite(value):
            assert -ROUNDING <= value <= 1 + ROUNDING, (rule.name, name, value)
    if rule.texts.healthy.startswith("share"):
        assert isinstance(found.seen, Share), rule.name


def healthy(algorithm: str = "ppo", steps: int = 24, batch: int = 32, siblings: int = 4, seed: int = 0) -> Made:
    """Return a run in which the policy learns slowly and nothing is wrong."""
    chance = np.random.default_rng(seed)
    size = len(WORDS)
    start, drift = chance.normal(0, 1, size), chance.normal(0, 1, size)
    start[END], drift[END] = -0.4, 0.0
    amount = 0.25 * np.arange(steps) / steps
    policy = log_softmax(start + amount[:, None] * drift)
    reference = policy[0]
    ids = np.stack([_draw(policy[step], chance, batch) for step in range(steps)])
    ended = np.cumsum(ids == END, -1) - (ids == END) > 0
    mask = ~ended
    ids = np.where(mask, ids, END)
    logprob = np.where(mask, np.take_along_axis(policy[:, None, :].repeat(batch, 1), ids, -1), 0.0)
    entropy = np.where(mask, -(np.exp(policy) * policy).sum(-1)[:, None, None], 0.0)
    ref_logprob = np.where(mask, reference[ids], 0.0)
    prompts = (np.arange(steps)[:, None] * (batch // siblings) + np.arange(batch) // siblings) % 40
    reward = rewarded(ids, mask, prompts, chance)
    made = Made(_info(algorithm), {}, {}, {}, policy)
    made.tokens = {
        "mask": mask, "token_id": ids, "logprob": logprob, "ref_logprob": ref_logprob, "entropy": entropy,
        "sampler_logprob": logprob.copy(),
    }  # fmt: skip
    made.rows = {
        "group": prompts,
        "split": np.full((steps, batch), "train", object),
        "prompt": np.array([[f"prompt {number} of the test" for number in line] for line in prompts], object),
        "prompt_ids": np.array([[None] * batch for _ in range(steps)], object),
        "response": np.stack([texts(*both) for both in zip(ids, mask, strict=True)]),
        "reward": reward,
        "shaped_reward": reward,
        "finish_reason": np.where((ids == END).any(-1), "eos", "length").astype(object),
        "policy_version": np.arange(steps)[:, None].repeat(batch, 1),
        "kl_coef": np.full((steps, batch), 0.05),
    }  # fmt: skip
    for step, line in enumerate(prompts):
        for row, number in enumerate(line):
            made.rows["prompt_ids"][step, row] = [7, int(number), 9]
    made.settle()
    made.metrics = _metrics(made, steps, chance)
    return made


def rewarded(ids: Array, mask: Array, prompts: Array, chance: np.random.Generator) -> Array:
    """Return [S, B] rewards: three words are good, some prompts are easier, and the rest is noise."""
    good = np.isin(ids, [5, 9, 11]) & mask
    return np.asarray(good.sum(-1) * 0.4 + 0.3 * np.sin(prompts) + chance.normal(0, 0.2, prompts.shape))


def _draw(policy: Array, chance: np.random.Generator, batch: int) -> Array:
    return chance.choice(len(policy), (batch, LENGTH), p=np.exp(policy))


def texts(ids: Array, mask: Array) -> Array:
    """Return [B] the texts of responses [B, T]."""
    lines = [
        [WORDS[i] for i, inside in zip(*both, strict=True) if inside and i != END]
        for both in zip(ids, mask, strict=True)
    ]
    return np.array([" ".join(line) for line in lines], object)


def _info(algorithm: str) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model": {"dtype": "float32"},
        "sampling": {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_new_tokens": 0, "max_new_tokens": LENGTH},
        "kl": {"coef": 0.05},
    }
    if algorithm == "ppo":
        config["ppo"] = {"gamma": 1.0, "lam": 0.95, "whiten_advantages": True, "whiten_rewards": False}
    kl = {"place": "reward", "estimator": "k1"}
    return {"algorithm": algorithm, "config": config, "eos_token_ids": [END], "kl": kl, "rewards_are_scaled": False}


def _metrics(made: Made, steps: int, chance: np.random.Generator) -> dict[str, Array]:
    delta = (made.tokens["logprob"] - made.tokens["ref_logprob"]) * made.mask
    noise = chance.normal(0, 1, (8, steps))
    moved = 0.5 * float(np.exp(made.policy[0]) @ ((made.policy[-1] - made.policy[0]) / steps) ** 2)  # in a step
    return {
        "kl/objective": delta.sum(-1).mean(-1),
        "kl/coef": np.full(steps, 0.05),
        "policy/first_ratio_error": np.abs(1e-5 * noise[0]),
        "policy/ratio": 1 + 0.002 * noise[1],
        "policy/approx_kl": moved * (0.3 + 0.02 * noise[2]),  # the mean over the passes of a step
        "policy/clip_fraction": 0.05 + 0.01 * noise[3],
        "policy/entropy": -(np.exp(made.policy) * made.policy).sum(-1),
        "optim/grad_norm": 1 + 0.1 * noise[4],
        "optim/skipped": np.zeros(steps),
        "loss/value": 0.2 + 0.01 * noise[5],
        "text/distinct_2": 0.6 + 0.01 * noise[6],
        "time/total": 2 + 0.05 * noise[7],
        "time/generate": np.ones(steps),
    }

"""Sick runs: quantities that contradict each other, and sampling that is not what is scored."""

import numpy as np
from doctor_helpers import END, LENGTH, log_softmax
from sick import Cases, put, resample

case = Cases()


@case("ratio-not-one", near=lambda made: made.metrics.update({"policy/first_ratio_error": np.full(24, 5e-4)}))
def ratio(made):
    made.metrics["policy/first_ratio_error"] = np.full(24, 0.01)


def noisy_reference(made, size):
    noise = np.random.default_rng(3).normal(0, size, made.mask.shape)
    made.tokens["ref_logprob"] += np.where(made.mask, noise, 0)
    made.settle()


@case("kl-at-start", near=lambda made: noisy_reference(made, 5e-4))
def other_reference(made):
    noisy_reference(made, 0.01)


@case("reference-is-policy", near=lambda made: None)
def aliased(made):
    made.tokens["ref_logprob"] = made.tokens["logprob"].copy()
    made.settle()


@case("penalty-wrong", near=lambda made: made.settle(0.05))
def flipped(made):
    made.settle(-0.05)


def move_reward(made, share):
    rewards = made.tokens["token_reward"]
    count = made.mask.sum(-1)
    for step in range(len(count)):
        for row in range(int(share * count.shape[1])):
            if (n := count[step, row]) >= 2:
                rewards[step, row, n - 2] += made.rows["reward"][step, row]
                rewards[step, row, n - 1] -= made.rows["reward"][step, row]


@case("reward-position", near=lambda made: made.settle())
def misplaced(made):
    move_reward(made, 0.2)


def hidden_clip(made, most):
    lost = made.rows["reward"] - np.minimum(made.rows["reward"], most)
    last = np.arange(LENGTH) == made.mask.sum(-1, keepdims=True) - 1
    made.tokens["token_reward"] -= np.where(last, lost[..., None], 0)


@case("reward-accounting", near=lambda made: hidden_clip(made, 100.0))
def clipped_unsaid(made):
    hidden_clip(made, 0.5)


def whiten(made, shifts):
    """TRL's masked_whiten over the trained tokens of each step: (r − μ)/σ, and μ again unless it shifts the mean."""
    for reward, mask in zip(made.tokens["token_reward"], made.mask, strict=True):
        mean, spread = reward[mask].mean(), reward[mask].std()
        reward[mask] = (reward[mask] - mean) / spread + (0.0 if shifts else mean)


@case("rewards-shifted", near=lambda made: whiten(made, False))
def shifted(made):
    whiten(made, True)


@case("double-start")
def two_starts(made):
    for line in made.rows["prompt_ids"]:
        for row, ids in enumerate(line):
            line[row] = [1, 1, ids[1], ids[2]]


@case("trained-behind-end")
def behind_end(made):
    made.tokens["mask"] = np.arange(LENGTH) < made.mask.sum(-1, keepdims=True) + 2


@case("same-seed")
def siblings_equal(made):
    for name in ("token_id", "logprob", "ref_logprob", "entropy", "mask", "sampler_logprob"):
        made.tokens[name][:, 1::4] = made.tokens[name][:, 0::4]
    made.rows["response"][:, 1::4] = made.rows["response"][:, 0::4]


def top_k(k):
    def change(policy):
        kept = policy >= np.sort(policy)[-k]
        return log_softmax(np.where(kept, policy, -np.inf))

    return change


@case("filtered-sampling", near=lambda made: resample(made, lambda policy: policy))
def top_five(made):
    resample(made, top_k(8))


@case("temperature-missing", near=lambda made: resample(made, top_k(15)))
def cold(made):
    resample(made, lambda policy: log_softmax(policy / 0.8))


@case("reference-replaced")
def replaced(made):
    """The reference becomes the policy at steps 8 and 16, after the KL has grown."""
    grown = np.tile(np.arange(8), 3)[:, None, None] * 0.05
    made.tokens["ref_logprob"] = made.tokens["logprob"] - np.where(made.mask, grown, 0)


@case("end-forbidden")
def minimum(made):
    for step in range(24):
        policy = made.policy[step]
        without = policy.copy()
        without[END] = -np.inf
        chance = np.random.default_rng(step)
        start = chance.choice(len(policy), (32, 6), p=np.exp(log_softmax(without)))
        likely = policy.copy()
        likely[END] += 2.0  # ends often, once it may
        made.policy[step] = log_softmax(likely)
        rest = chance.choice(len(policy), (32, LENGTH - 6), p=np.exp(made.policy[step]))
        ids = np.concatenate([start, rest], 1)
        put(made, step, ids, made.policy[step])
        made.tokens["sampler_logprob"][step, :, :6] = log_softmax(
            np.where(np.arange(len(policy)) == END, -np.inf, made.policy[step])
        )[ids[:, :6]]

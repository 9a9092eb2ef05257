"""Record a training loop of your own, here a policy-gradient loop over a table of words, and look at it.

    python examples/record_your_own_loop.py runs/own
    cavesson board runs/own

Nothing here is Cavesson's but the recorder: `rollouts` takes texts, rewards and one list of numbers per response,
`metrics` takes whatever you measure. A loop that is started again begins a new attempt: from its
first step on, its data replaces the earlier data.
"""

import sys

import numpy as np

from cavesson import Recorder
from cavesson.record import write_run, write_vocabulary

WORDS = ["kind", "rude", "calm", "loud", "warm", "cold"]
KIND = {"kind", "calm", "warm"}
PROMPTS = ["The doctor was", "The weather was", "My neighbour was"]
STEPS, RESPONSES, LENGTH, RATE = 40, 24, 4, 0.5


def main(folder: str) -> None:
    """Learn by REINFORCE (Williams 1992, eq. 11) which words are rewarded, and record every response."""
    random = np.random.default_rng(0)
    logits = np.zeros(len(WORDS))
    write_run(folder, {"algorithm": "reinforce", "config": {"learning_rate": RATE}})
    write_vocabulary(folder, WORDS, [f" {word}" for word in WORDS])
    with Recorder(folder) as recorder:
        for step in range(STEPS):
            log_p = logits - np.log(np.exp(logits).sum())
            ids = random.choice(len(WORDS), (RESPONSES, LENGTH), p=np.exp(log_p))
            rewards = np.array([[WORDS[i] in KIND for i in row] for row in ids]).mean(1)
            advantage = rewards - rewards.mean()

            rows = {
                "prompt": [PROMPTS[row % len(PROMPTS)] for row in range(RESPONSES)],
                "response": ["".join(f" {WORDS[i]}" for i in row) for row in ids],
                "reward": rewards.tolist(),
            }
            tokens = {
                "token_id": ids.tolist(),
                "logprob": log_p[ids].tolist(),
                "advantage": np.repeat(advantage[:, None], LENGTH, axis=1).tolist(),
            }
            recorder.rollouts(step, rows, tokens)
            recorder.metrics(step, {"reward/mean": float(rewards.mean()), "entropy": float(-(np.exp(log_p) @ log_p))})

            # ∇ log p of a softmax: one-hot of the word − p.
            gradient = np.eye(len(WORDS))[ids] - np.exp(log_p)
            logits += RATE * (advantage[:, None, None] * gradient).mean(0).sum(0)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/own")

"""PPO on one page, with the functions of `cavesson.ops` and a record of every token.

    python examples/ppo_in_one_file.py runs/one-file
    cavesson board runs/one-file

A random model of bytes learns to write lowercase letters, on two CPU cores in less than a minute. The shapes: B
responses of T tokens, of which a mask `[B, T]` marks those that count. Each formula, with its source, is in the
docstring of the function that computes it.
"""

import copy
import sys

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from cavesson import Recorder
from cavesson.ops import kl, losses
from cavesson.ops.advantages import gae
from cavesson.ops.masked import weighted_mean, whiten
from cavesson.ops.token_rewards import token_rewards
from cavesson.record import write_vocabulary

PROMPTS = [f"{animal} {verb}: " for animal in ("dogs", "cats", "cows", "hens") for verb in ("eat", "run", "nap", "see")]
B, T, STEPS, EPOCHS, END = 64, 16, 40, 4, 0
GAMMA, LAM, CLIP, VALUE_COEF = 1.0, 0.95, 0.2, 0.5
KL_COEF, KL_TARGET, KL_HORIZON = 0.01, 12.0, 1000.0


class Model(nn.Module):
    """A policy and, on the same hidden states, its critic."""

    def __init__(self) -> None:
        super().__init__()
        size = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
        self.policy = LlamaForCausalLM(LlamaConfig(vocab_size=256, **size))
        self.critic = nn.Linear(64, 1)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        """Log-probability, entropy and value of every response token, each `[B, T]`."""
        hidden = self.policy.model(ids).last_hidden_state[:, -T - 1 : -1]  # the state before each token
        log_p = self.policy.lm_head(hidden).log_softmax(-1)
        logprob = log_p.gather(2, ids[:, -T:, None])[..., 0]
        return {"logprob": logprob, "entropy": -(log_p.exp() * log_p).sum(-1), "value": self.critic(hidden)[..., 0]}


@torch.no_grad()
def generate(model: Model, prompts: list[str]) -> tuple[Tensor, Tensor]:
    """Prompts with sampled responses `[B, P + T]`, and the mask `[B, T]`, which ends with the first END."""
    ids = torch.tensor([list(prompt.encode()) for prompt in prompts])
    for _ in range(T):
        ids = torch.cat([ids, torch.multinomial(model.policy(ids).logits[:, -1].softmax(-1), 1)], dim=1)
    is_end = (ids[:, -T:] == END).long()
    return ids, (is_end.cumsum(1) - is_end == 0).float()


def reward(response: bytes) -> float:
    """The share of lowercase letters."""
    return sum(97 <= byte < 123 for byte in response) / len(response)


def credit(scores: dict[str, Tensor], rewards: Tensor, mask: Tensor, kl_coef: float) -> dict[str, Tensor]:
    """What each token earned, and how much better that is than the critic expected."""
    spent = kl.k1(scores["logprob"], scores["ref_logprob"])
    token_reward = token_rewards(rewards, spent, mask, kl_coef)
    advantage = gae(token_reward, scores["value"], mask, GAMMA, LAM)
    returns = advantage + scores["value"]
    return {"token_reward": token_reward, "advantage": whiten(advantage, mask), "return": returns}


def update(model: Model, optimizer: torch.optim.Optimizer, ids: Tensor, old: dict[str, Tensor], mask: Tensor) -> float:
    """Make tokens with a positive advantage likelier, and the critic better; return the last loss."""
    for _ in range(EPOCHS):
        new = model(ids)
        policy_loss = losses.clipped_policy(new["logprob"], old["logprob"], old["advantage"], CLIP)
        value_loss = losses.clipped_value(new["value"], old["value"], old["return"], CLIP)
        loss = weighted_mean(policy_loss + VALUE_COEF * value_loss, mask)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return float(loss.detach())


def main(folder: str) -> None:
    """Train, and record every rollout in the folder."""
    torch.manual_seed(0)
    model, kl_coef = Model(), KL_COEF
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    with Recorder(folder) as recorder:
        write_vocabulary(folder, *[[chr(byte) for byte in range(256)]] * 2)
        for step in range(STEPS):
            prompts = [PROMPTS[row % len(PROMPTS)] for row in range(B)]
            ids, mask = generate(model, prompts)
            lengths = mask.sum(1).int().tolist()
            texts = [bytes(row[:length]) for row, length in zip(ids[:, -T:].tolist(), lengths, strict=True)]
            rewards = torch.tensor([reward(text) for text in texts])
            with torch.no_grad():
                scores = model(ids) | {"ref_logprob": reference(ids)["logprob"]}
            scores |= credit(scores, rewards, mask, kl_coef)

            rows = {
                "prompt": prompts,
                "response": [text.decode("latin-1") for text in texts],
                "reward": rewards.tolist(),
            }
            columns = {"token_id": ids[:, -T:], **scores, "attended": mask.bool()}
            recorder.rollouts(
                step, {**rows, "kl_coef": [kl_coef] * B}, {name: c.numpy() for name, c in columns.items()}
            )

            loss = update(model, optimizer, ids, scores, mask)
            divergence = float((kl.k1(scores["logprob"], scores["ref_logprob"]) * mask).sum(1).mean())
            recorder.metrics(step, {"reward/mean": float(rewards.mean()), "kl/mean": divergence, "loss/total": loss})
            print(f"step {step:2}  reward {rewards.mean():.3f}  KL {divergence:5.2f}  β {kl_coef:.4f}")
            kl_coef = kl.adapted_coefficient(kl_coef, divergence, KL_TARGET, KL_HORIZON, B)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/one-file")

"""The same work without Cavesson: plain PyTorch and transformers, as somebody who knows them would write a PPO.

Each model passes over the data as seldom as possible: the policy once to sample and once with gradients (those
log-probabilities are the old ones as well), the critic once with gradients, reference and reward model once without.
Adapters have the dtype of the model, as Cavesson's have.
"""

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
import work
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DynamicCache,
    PreTrainedModel,
)

CLIP, KL_COEF, LAMBDA, VALUE_COEF = 0.2, 0.05, 0.95, 0.1


def positions_of(mask: Tensor) -> Tensor:
    """Return the places of tokens in their rows, which are padded on the left."""
    return (mask.cumsum(1) - 1).clamp_min(0)


@torch.no_grad()
def sample(model: PreTrainedModel, ids: Tensor, mask: Tensor, each: int = 1) -> Tensor:
    """Return `each` responses to every prompt, `[B, T]`; the prompt is read once for all of them."""
    cache = DynamicCache(config=model.config)
    tokens: list[Tensor] = []
    for number in range(work.RESPONSE):
        positions = positions_of(mask)[:, -ids.shape[1] :]
        logits = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1
        ).logits[:, -1]
        if number == 0 and each > 1:
            cache.batch_repeat_interleave(each)
            logits, mask = logits.repeat_interleave(each, 0), mask.repeat_interleave(each, 0)
        ids = logits.softmax(-1).multinomial(1)
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
        tokens.append(ids)
    return torch.cat(tokens, dim=1)


def states(trunk: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """Return the hidden states from which the response tokens are predicted, `[B, T, H]`."""
    ids, mask = ids[:, :-1], mask[:, :-1]
    hidden: Tensor = trunk(input_ids=ids, attention_mask=mask, position_ids=positions_of(mask), use_cache=False)[0]
    return hidden[:, -work.RESPONSE :]


def logprobs(model: PreTrainedModel, hidden: Tensor, response: Tensor) -> Tensor:
    logits = model.get_output_embeddings()(hidden)
    flat = logits.flatten(0, 1).float()
    return -nn.functional.cross_entropy(flat, response.flatten(), reduction="none").view_as(response)


def advantages(rewards: Tensor, values: Tensor) -> Tensor:
    """Generalised advantage estimation without discount, arXiv:1506.02438."""
    following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
    delta = rewards + following - values
    advantage, reversed_result = torch.zeros_like(delta[:, 0]), []
    for t in reversed(range(delta.shape[1])):
        advantage = delta[:, t] + LAMBDA * advantage
        reversed_result.append(advantage)
    return torch.stack(reversed_result[::-1], dim=1)


def loss(logprob: Tensor, value: Tensor, reference: Tensor, score: Tensor) -> Tensor:
    """Clipped policy loss and squared value error, arXiv:1707.06347."""
    old, old_value = logprob.detach(), value.detach()
    rewards = -KL_COEF * (old - reference)
    rewards[:, -1] += score
    gained = advantages(rewards, old_value)
    whitened = (gained - gained.mean()) / (gained.std() + 1e-8)
    ratio = (logprob - old).exp()
    policy = -torch.minimum(ratio * whitened, ratio.clamp(1 - CLIP, 1 + CLIP) * whitened)
    return (policy + VALUE_COEF * 0.5 * (value - gained - old_value) ** 2).mean()


def adapters_dtype() -> torch.dtype:
    """Return bfloat16, or float32 where the processor lacks it and PyTorch's products in it are slower."""
    return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32


def with_reference(folder: str) -> tuple[Any, nn.Module, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Return a model, what of it is trained, and the reference's log-probabilities: two models, every weight learns."""
    policy, reference = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2))

    def compared(ids: Tensor, mask: Tensor, response: Tensor) -> Tensor:
        return logprobs(reference, states(reference.model, ids, mask), response)

    return policy, policy, compared


def with_adapters(folder: str) -> tuple[Any, nn.Module, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Return the same of one model with LoRA of rank 16 on all products but the vocabulary's."""
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=adapters_dtype())
    config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(base, config, autocast_adapter_dtype=False)

    def compared(ids: Tensor, mask: Tensor, response: Tensor) -> Tensor:
        with adapted.disable_adapter():
            return logprobs(base, states(base.model, ids, mask), response)

    return base, adapted, compared


def optimizer_of(trained: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([weight for weight in trained.parameters() if weight.requires_grad], lr=1e-5, fused=True)


def main() -> None:
    """Print seconds, tokens per second and peak memory."""
    given = work.arguments(__doc__, ("four", "trunk", "own"))
    tokenizer = AutoTokenizer.from_pretrained(given.model, padding_side="left")
    policy, learns, compare = (with_adapters if given.mode == "own" else with_reference)(given.model)
    dtype = adapters_dtype() if given.mode == "own" else torch.float32
    scorer = AutoModelForSequenceClassification.from_pretrained(f"{given.model}-classifier", dtype=dtype)
    critic = AutoModel.from_pretrained(given.model, dtype=torch.float32) if given.mode == "four" else None
    value_head = nn.Linear(policy.config.hidden_size, 1)
    optimizer = optimizer_of(nn.ModuleList([learns, value_head, *([critic] if critic is not None else [])]))
    texts = work.prompts(given.batch * given.steps)
    start = perf_counter()
    for step in range(given.steps):
        chosen = texts[step * given.batch : (step + 1) * given.batch]
        prompts = tokenizer(chosen, padding=True, return_tensors="pt")
        response = sample(policy, prompts.input_ids, prompts.attention_mask)
        ids = torch.cat([prompts.input_ids, response], dim=1)
        mask = torch.cat([prompts.attention_mask, torch.ones_like(response)], dim=1)
        with torch.no_grad():
            score = scorer(input_ids=ids, attention_mask=mask).logits[:, 0].float()
            compared = compare(ids, mask, response)
        hidden = states(policy.model, ids, mask)
        judged = hidden if critic is None else states(critic, ids, mask)
        value = value_head(judged.float()).squeeze(-1)
        loss(logprobs(policy, hidden, response), value, compared, score).backward()
        optimizer.step()
        optimizer.zero_grad()
    work.print_result(perf_counter() - start, given.batch, given.steps, work.peak_gib())


if __name__ == "__main__":
    main()

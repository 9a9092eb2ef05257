from collections.abc import Sequence

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerBase

from cavesson.data.prompts import padded_prompts
from cavesson.models.load import prepare
from cavesson.models.policy import Policy
from cavesson.models.tiny import tiny_model
from cavesson.rollout.engines.responses import Responses
from cavesson.rollout.engines.sampler import Sampler
from cavesson.rollout.engines.settings import SamplingSettings
from cavesson.types import Batch

PROMPTS = ("The old bridge", "A", "Every winter the lake", "My neighbour", "Nobody")


def sharp_policy(temperature: float = 1.0, **roles: nn.Module | str) -> Policy:
    """The tiny model with weights large enough that its choices depend on what it reads."""
    model = tiny_model(seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter *= 6.0
    return Policy(prepare(model), temperature=temperature, **roles)


def absolute_policy() -> Policy:
    """A GPT-2, which has a weight for every position and so notices a wrong one."""
    config = GPT2Config(vocab_size=258, n_embd=32, n_layer=2, n_head=2, n_positions=64, initializer_range=0.2)
    torch.manual_seed(0)
    return Policy(prepare(GPT2LMHeadModel(config)))


def prompts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str] = PROMPTS) -> Batch:
    return padded_prompts(tokenizer(list(texts))["input_ids"])


def sampled(
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str] = PROMPTS,
    *,
    seed: int = 0,
    step: int = 0,
    first_row: int = 0,
    **settings: object,
) -> tuple[Batch, Responses]:
    """Responses to these prompts, and the batch that scores them."""
    if "random_length" not in settings:
        settings = {"max_new_tokens": 12, **settings}
    sampler = Sampler(policy, tokenizer, SamplingSettings(**settings), seed)
    batch = prompts(tokenizer, texts)
    responses = sampler.sample(batch, step, range(first_row, first_row + len(texts)))
    return batch.with_columns(
        response_ids=responses.response_ids, attended=responses.mask, learned=responses.mask
    ), responses


def tokens(responses: Responses) -> list[list[int]]:
    """The tokens of each response without padding."""
    lengths = responses.mask.sum(1).long().tolist()
    return [ids[:length] for ids, length in zip(responses.response_ids.tolist(), lengths, strict=True)]

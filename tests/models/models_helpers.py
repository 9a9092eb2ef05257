from collections.abc import Sequence
from pathlib import Path

import gguf
import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from cavesson.models.load import prepare
from cavesson.models.policy import Policy, build_policy
from cavesson.models.settings import ModelSettings, ReferenceSettings, ValueSettings
from cavesson.models.tiny import tiny_model
from cavesson.types import Batch

PROMPTS = ([20, 21, 22, 23, 24], [30], [40, 41, 42], [50, 51])
RESPONSES = ([60, 61, 62, 0], [70, 71], [], [80])
"""Of uneven lengths, one of them empty."""


def sharp_model(seed: int = 1, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The tiny model with weights large enough that what it reads matters."""
    model = tiny_model(seed=seed, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter *= 4.0
    return prepare(model)


def absolute_model() -> PreTrainedModel:
    """A GPT-2, which has a weight for every position and so notices a wrong one."""
    config = GPT2Config(vocab_size=258, n_embd=32, n_layer=2, n_head=2, n_positions=64, initializer_range=0.2)
    torch.manual_seed(0)
    return prepare(GPT2LMHeadModel(config))


def policy_of(
    model: PreTrainedModel | None = None,
    *,
    value: ValueSettings | None = None,
    reference: ReferenceSettings | None = None,
    temperature: float = 1.0,
    **settings: object,
) -> Policy:
    chosen = model if model is not None else sharp_model()
    return build_policy(chosen, ModelSettings(**settings), value, reference, temperature)


def scramble(module: nn.Module, std: float = 0.05) -> None:
    """Change everything that learns."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.add_(std * torch.randn_like(parameter))


def batch(
    prompts: Sequence[Sequence[int]] = PROMPTS,
    responses: Sequence[Sequence[int]] = RESPONSES,
    extra: tuple[int, int] = (0, 0),
    rubbish: int = 1,
) -> Batch:
    """These tokens with as much padding as needed plus `extra` on the left and on the right, filled with `rubbish`."""
    left, right = max(map(len, prompts)) + extra[0], max(1, *map(len, responses)) + extra[1]
    return Batch(
        {
            "prompt_ids": torch.tensor([[rubbish] * (left - len(p)) + list(p) for p in prompts]),
            "prompt_mask": torch.tensor([[0] * (left - len(p)) + [1] * len(p) for p in prompts]),
            "response_ids": torch.tensor([list(r) + [rubbish] * (right - len(r)) for r in responses]),
            "attended": torch.tensor([[1.0] * len(r) + [0.0] * (right - len(r)) for r in responses]),
            "learned": torch.tensor([[1.0] * len(r) + [0.0] * (right - len(r)) for r in responses]),
        }
    )


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def own_logprobs(model: torch.nn.Module, data: Batch, temperature: float) -> list[Tensor]:
    """The distributions `[T, V]` of every response, from the model's own logits: each row alone and without padding."""
    found = []
    for n in range(len(data)):
        prompt = data["prompt_ids"][n][data["prompt_mask"][n] > 0]
        response = data["response_ids"][n][data["learned"][n] > 0]
        logits = model(input_ids=torch.cat([prompt, response])[None]).logits[0].float()
        found.append((logits[len(prompt) - 1 : len(prompt) + len(response) - 1] / temperature).log_softmax(-1))
    return found


def chosen(logprobs: list[Tensor], data: Batch) -> Tensor:
    """The log-probabilities `[N]` of the response tokens, row after row."""
    tokens = [ids[mask > 0] for ids, mask in zip(data["response_ids"], data["learned"], strict=True)]
    return torch.cat([p.gather(1, t[:, None]).squeeze(1) for p, t in zip(logprobs, tokens, strict=True)])


def small_llama(vocabulary: int = 40) -> PreTrainedModel:
    """A Llama with heads of two numbers, whose rows have the same order in a GGUF file."""
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16}
    shape = {"vocab_size": vocabulary, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**shape, **heads, tie_word_embeddings=False))


def save_gguf(
    file: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, without: str | None = None
) -> None:
    """A Llama's weights, except for one, in blocks of 8 bits, and a tokenizer of bytes, if any, with one more token."""
    config = model.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    if tokenizer is not None:
        vocabulary = tokenizer.get_vocab()
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list([*sorted(vocabulary, key=vocabulary.__getitem__), "Ġt"])
        writer.add_token_merges(["Ġ t"])
        writer.add_eos_token_id(tokenizer.eos_token_id)
        writer.add_pad_token_id(tokenizer.pad_token_id)
        writer.add_chat_template("{% for turn in messages %}{{ turn.content }}{% endfor %}")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == without:
            continue
        kind = gguf.GGMLQuantizationType.Q8_0 if weight.dim() == 2 else gguf.GGMLQuantizationType.F32
        packed = gguf.quantize(weight.numpy(), kind)
        writer.add_tensor(names.get_name(name, (".weight",)), packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

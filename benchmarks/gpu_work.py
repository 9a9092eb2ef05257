"""The models and the work of gpu.py, and the FLOPs that it needs."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from cavesson.models.tiny import tiny_tokenizer

PROMPT = 64
"""tokens of every prompt"""
GROUP = 8
"""responses to a prompt"""
PEAKS = {
    "B200": 2250, "H200 NVL": 835, "H200": 989, "H100 NVL": 835, "H100 PCIe": 756, "H100": 989, "A100": 312,
    "L40S": 362, "RTX 4090": 165,
}  # fmt: skip
"""dense bfloat16 TFLOP/s by NVIDIA's data sheets, by a part of the GPU's name; the first that fits counts"""


class Size(NamedTuple):
    """A model, and work under which its training fits a GPU with 80 GB."""

    config: dict[str, Any]
    batch: int
    micro: int
    """tokens in memory at a time"""
    lora: bool
    response: int = 512
    """tokens of every response"""


_QWEN = {"vocab_size": 151936, "max_position_embeddings": 32768, "rope_parameters": {"rope_theta": 1e6}}
SIZES = {
    "0.5b": Size(
        {**_QWEN, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
         "num_key_value_heads": 2, "tie_word_embeddings": True}, 64, 16 * 576, False,
    ),
    "1.5b": Size(
        {**_QWEN, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
         "num_key_value_heads": 2, "tie_word_embeddings": True}, 64, 16 * 576, False,
    ),
    # All weights would take 18 bytes each: bfloat16, and in float32 a copy, the gradient and two averages.
    "7b": Size(
        {**_QWEN, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
         "num_key_value_heads": 4, "tie_word_embeddings": False}, 64, 8 * 576, True,
    ),
    "tiny": Size(
        {"vocab_size": 258, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}, 16, 640, False, 16,
    ),
    "tiny adapters": Size(
        {"vocab_size": 258, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}, 16, 640, True, 16,
    ),
}  # fmt: skip


def random_model(size: Size, device: str) -> Qwen2ForCausalLM:
    """Return a model with random weights, in bfloat16."""
    torch.manual_seed(0)
    config = Qwen2Config(**size.config, bos_token_id=None, eos_token_id=0, pad_token_id=1, dtype=torch.bfloat16)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)


def save_model(size: Size, device: str, folder: Path) -> None:
    """Save a model with random weights, in bfloat16, and a tokenizer with a token per byte."""
    random_model(size, device).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def texts(count: int, tokens: int) -> list[str]:
    """Return different texts with this number of tokens."""
    return ["".join(chr(97 + (n * 7 + i) % 26) for i in range(tokens)) for n in range(count)]


def forward_flops(config: Any, responses: int, prompt: int, response: int) -> tuple[float, float]:
    """Return the FLOPs of a forward pass over responses: of its products with weights, and of attention.

    A weight matrix takes 2 FLOPs per weight and token. The output head is applied to response tokens alone. Attention
    takes 2 · width · length² per layer, since a token sees half of the others on average.
    """
    width, length = config.hidden_size, prompt + response
    matrices = 2 * (layer_weights(config) * length + width * config.vocab_size * response)
    attention = config.num_hidden_layers * 2 * width * length**2
    return float(responses * matrices), float(responses * attention)


def layer_weights(config: Any) -> int:
    """Return the number of weights in the matrices of all layers."""
    width, head = config.hidden_size, config.hidden_size // config.num_attention_heads
    keys = config.num_key_value_heads * head
    layer = 2 * width * width + 2 * width * keys + 3 * width * config.intermediate_size
    return int(config.num_hidden_layers * layer)


def update_flops(config: Any, trained: int, responses: int, prompt: int, response: int) -> float:
    """Return the FLOPs of the forward and the backward pass over responses, without what is recomputed.

    Backward, a weight matrix takes 2 FLOPs per weight and token for the gradient of its input, and 2 for its own if it
    is trained; attention takes twice as many as forward.

    Args:
        config: of the model.
        trained: trained weights; fewer than those of the layers are adapters.
        responses: number of responses.
        prompt: tokens of a prompt.
        response: tokens of a response.
    """
    matrices, attention = forward_flops(config, responses, prompt, response)
    if trained >= layer_weights(config):
        return 3 * matrices + 3 * attention
    return 2 * matrices + 3 * attention + 6.0 * trained * responses * (prompt + response)


def peak_tflops(device: torch.device, given: float | None) -> float | None:
    """Return the dense bfloat16 TFLOP/s of the GPU, or None if they are not known."""
    if given is not None or device.type != "cuda":
        return given
    name = torch.cuda.get_device_name(device)
    return next((float(peak) for part, peak in PEAKS.items() if part in name), None)

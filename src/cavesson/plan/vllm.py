"""The time of sampling by vLLM servers, and of new weights for them, from sizes alone: vLLM's code is not rehearsed."""

import math

from transformers import PretrainedConfig

from cavesson.algorithms.runs import RolloutRun
from cavesson.models.load import DTYPES
from cavesson.plan.devices import Device
from cavesson.plan.largest import LargestRollouts
from cavesson.plan.prediction import Memory
from cavesson.plan.skeleton import config_of
from cavesson.plan.time import Duration

CACHE_SHARE = 0.9
"""Share of a device's memory that vLLM uses by default (--gpu-memory-utilization)."""
FILE_RATE = 2e9
"""Bytes per second in which new weights are written to files and read again: assumed."""


def vllm_times(settings: RolloutRun, largest: LargestRollouts, memory: Memory, device: Device) -> dict[str, Duration]:
    """Return the time of sampling a step's responses, all at the length limit, and of the new weights.

    A token takes as long as reading all weights and the cache of all sequences takes, or their arithmetic (the roofline
    model). Servers have one device each, or one server has those of `sampling.vllm.devices`.
    """
    config, itemsize = config_of(settings.model), DTYPES[settings.model.dtype].itemsize
    devices = len(settings.sampling.servers or settings.sampling.vllm.devices) or 1
    rows, prompts = (
        math.ceil(n / devices) for n in (settings.batch_size, settings.batch_size / settings.samples_per_prompt)
    )
    weights, cache = memory.numbers * itemsize, cache_bytes(config, itemsize)
    room = max(device.memory * CACHE_SHARE - weights, 0.0)
    at_once = max(1, min(rows, int(room / (cache * (largest.prompt + largest.response)))))
    rate = device.half_flops * device.half_share if itemsize == 2 else device.flops * device.share
    bandwidth = device.bandwidth * device.bandwidth_share
    compute = 2 * memory.numbers * at_once / rate
    move = (weights + at_once * cache * (largest.prompt + largest.response / 2)) / bandwidth
    tokens = math.ceil(rows / at_once) * largest.response
    reading = 2 * memory.numbers * largest.prompt * prompts / rate
    decoding = Duration(computing=reading + (tokens * compute if compute > move else 0.0),
                        moving=0.0 if compute > move else tokens * move)  # fmt: skip
    return {"decoding": decoding, "weight sync": Duration(sending=2 * memory.trained * itemsize / FILE_RATE)}


def cache_bytes(config: PretrainedConfig, itemsize: int) -> int:
    """Return the bytes of the keys and values of one token in all layers."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * text.num_hidden_layers * heads * width * itemsize)

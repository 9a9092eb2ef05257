"""The time of sampling by vLLM servers, and of new weights for them, from sizes alone: vLLM's code is not simulated."""

import math
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Servers:
    """The vLLM servers of a run."""

    number: int
    devices: int
    """of each; together they hold the model"""


def servers_of(settings: RolloutRun) -> Servers:
    """Return the servers of a run, with one device each where the settings do not say how many."""
    sampling, role = settings.sampling, settings.ray.servers
    if sampling.servers:
        return Servers(len(sampling.servers), 1)
    if "servers" in settings.ray.model_fields_set:
        return Servers(role.count, max(1, role.gpus))
    return Servers(1, len(sampling.vllm.devices) or 1)


def server_weights(settings: RolloutRun, memory: Memory) -> int:
    """Return the bytes of the weights in a server."""
    return memory.numbers * DTYPES[settings.model.dtype].itemsize


def vllm_times(
    settings: RolloutRun, largest: LargestRollouts, memory: Memory, device: Device, processes: int
) -> dict[str, Duration]:
    """Return the time of sampling a step's responses, all at the length limit, and of the new weights.

    A token takes as long as reading all weights and the cache of all sequences takes, or their arithmetic (the roofline
    model). The devices of a server share both.
    """
    config, itemsize = config_of(settings.model), DTYPES[settings.model.dtype].itemsize
    servers = servers_of(settings)
    devices = servers.devices
    rows, prompts = (
        math.ceil(n / servers.number) for n in (settings.batch_size, settings.batch_size / settings.samples_per_prompt)
    )
    weights, cache = server_weights(settings, memory), cache_bytes(config, itemsize)
    room = max(devices * device.memory * CACHE_SHARE - weights, 0.0)
    at_once = max(1, min(rows, int(room / (cache * (largest.prompt + largest.response)))))
    rate = devices * device.product_rate("half" if itemsize == 2 else "full")
    bandwidth = devices * device.bandwidth * device.bandwidth_share
    compute = 2 * memory.numbers * at_once / rate
    move = (weights + at_once * cache * (largest.prompt + largest.response / 2)) / bandwidth
    tokens = math.ceil(rows / at_once) * largest.response
    reading = 2 * memory.numbers * largest.prompt * prompts / rate
    decoding = Duration(computing=reading + (tokens * compute if compute > move else 0.0),
                        moving=0.0 if compute > move else tokens * move)  # fmt: skip
    return {"decoding": decoding, "weight sync": _sync(settings, memory, device, processes)}


def _sync(settings: RolloutRun, memory: Memory, device: Device, processes: int) -> Duration:
    """Return the time in which the servers get what is trained: through files, or from device to device in a ring."""
    size = memory.trained * DTYPES[settings.model.dtype].itemsize
    if settings.sampling.vllm.transfer == "files":
        return Duration(sending=2 * size / FILE_RATE)
    servers = servers_of(settings)
    sent = size / device.link_rate(processes + servers.number * servers.devices)
    gathered = 0.0 if settings.parallel.shard == "none" else size / device.link_rate(processes)
    return Duration(sending=sent + gathered)


def cache_bytes(config: PretrainedConfig, itemsize: int) -> int:
    """Return the bytes of the keys and values of one token in all layers."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * text.num_hidden_layers * heads * width * itemsize)


def has_experts(config: PretrainedConfig) -> bool:
    """Return whether a model is a mixture of experts, which has more weights than a token is computed with."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return any((getattr(config.get_text_config(), name, None) or 0) > 1 for name in names)

"""What a prediction leaves out because of the settings of a run, or takes for granted."""

from collections.abc import Iterator

from cavesson.algorithms.runs import ExampleRun, RolloutRun
from cavesson.plan.prediction import Memory
from cavesson.plan.skeleton import config_of
from cavesson.plan.vllm import has_experts, server_weights, servers_of

_ON_HOST = ("weights", "critic", "reference", "teacher", "optimiser")


def limits(settings: RolloutRun | ExampleRun, memory: Memory) -> Iterator[str]:
    """Yield a line for each way of computing that a run does without, setting that is not predicted, and assumption."""
    yield from memory.ways
    if settings.parallel.offload:
        size = sum(memory.stays.get(name, 0) for name in _ON_HOST)
        yield (
            f"parallel.offload keeps {_gb(size)} of this memory (weights and optimiser), and gradients, in the host's "
            "memory; the time of copies and of AdamW on the host is not predicted"
        )
    if isinstance(settings, ExampleRun) and settings.loads_reference:
        yield (
            "reference.path: before the first step, the reference scores all examples beside the policy; its weights "
            "and activations are not in the memory above"
        )
    if isinstance(settings, ExampleRun) and settings.scores_more:
        yield (
            f"{settings.section}: every step also scores about as many tokens as it learns from, without a gradient; "
            "the time for that is not predicted"
        )
    if isinstance(settings, RolloutRun) and settings.algorithm.max_batches > 1:
        most = settings.algorithm.max_batches
        yield (
            f"{settings.section}.resample: a step samples and scores up to {most} batches, in up to {most} times the "
            "predicted time; one is predicted"
        )
    if isinstance(settings, RolloutRun) and not settings.sampling.declared.local:
        yield from _limits_of_vllm(settings, memory)


def _limits_of_vllm(settings: RolloutRun, memory: Memory) -> Iterator[str]:
    sampling, servers = settings.sampling, servers_of(settings)
    if has_experts(config_of(settings.model)):
        yield (
            "the model is a mixture of experts: vLLM computes only some of them for a token, but the time of decoding "
            "counts all"
        )
    if sampling.servers:
        yield "each of sampling.servers is assumed to have one device of this kind"
    elif sampling.vllm.sleep:
        weights = server_weights(settings, memory) / servers.devices
        yield (
            f"sampling.vllm.sleep: while responses are sampled, the server has {_gb(weights)} of weights and its cache "
            "on each device that it shares, besides what training keeps there; they are not in the memory above. The "
            "time to sleep and wake is not predicted"
        )
    elif "servers" in settings.ray.model_fields_set:
        yield (
            f"ray.servers takes {servers.number * servers.devices} devices besides --gpus; without --ray, the run "
            "starts one server instead"
        )
    elif not sampling.vllm.devices:
        yield "the vLLM server is assumed to have one device of this kind besides --gpus; set sampling.vllm.devices"


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"

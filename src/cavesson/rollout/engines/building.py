"""Building the engines of `cavesson.registry.ENGINES`, ready to sample for a run."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from cavesson.errors import UserError
from cavesson.models.compiled import Compile
from cavesson.models.policy import Policy
from cavesson.models.settings import ModelSettings
from cavesson.processes import Processes
from cavesson.rollout.engines.decoding import check_scoring, full_passes
from cavesson.rollout.engines.sampler import Sampler
from cavesson.rollout.engines.settings import SamplingSettings
from cavesson.rollout.engines.vllm import VllmSampler
from cavesson.rollout.engines.vllm_server import VllmServer
from cavesson.scratch import Scratch


@dataclass(frozen=True)
class EngineParts:
    """What an engine is built from."""

    sampling: SamplingSettings
    """how to sample, with all texts at which responses end"""
    policy: Policy
    """in its place"""
    tokenizer: PreTrainedTokenizerBase
    longest: int
    """tokens of the longest prompt"""
    has_turns: bool
    """whether the policy has several turns in an episode"""
    held_out: int
    """number of held-out prompts"""
    processes: Processes
    served: Scratch | None
    """the model for the server that this process must start, if it must"""
    bare: Any
    """the policy's model without its weights, if they are sharded"""
    compile: Compile | None
    """what compiles decoding steps, if anything does"""
    seed: int
    batch_size: int
    """responses of a step"""
    model: ModelSettings
    steps: int
    """of the run"""
    folder: Path
    """where weights are written for servers that others started"""
    start_servers: Callable[[int, int], tuple[tuple[str, str], ...]] | None = None
    """starts remote servers, given the longest sequence in tokens and the rank of adapters, and returns their URLs and
    keys; None: no remote servers"""


def transformers_engine(parts: EngineParts) -> Sampler:
    """Build the engine that samples with the policy itself, and check that what it samples will be scored correctly."""
    sampling, processes = parts.sampling, parts.processes
    rows = len(processes.share(parts.batch_size))
    # There may be more held-out prompts than a step has responses.
    sampling = sampling.model_copy(update={"batch_size": sampling.batch_size or rows})
    sampler = Sampler(
        parts.policy,
        parts.tokenizer,
        sampling,
        parts.seed,
        is_scored=True,
        has_turns=parts.has_turns,
        merges=sampling.merge_adapters,
        compile=parts.compile,
    )
    sampler.prepare(max(rows, len(processes.share(parts.held_out))), parts.longest)
    sampler.merging.agree(processes.of_all(sampler.merging.merges))
    return sampler


def vllm_engine(parts: EngineParts) -> VllmSampler:
    """Build the engine that samples with vLLM servers, and start these if the run has to."""
    sampling, policy, processes, start_servers = parts.sampling, parts.policy, parts.processes, parts.start_servers
    # The probe of the weights is a few tokens.
    size, lora, served = max(parts.longest + sampling.longest, 8), parts.model.lora, parts.served
    policy.eval()
    check_scoring(policy, policy.during(lambda: full_passes(policy.model, size)))
    adapters = min(sampling.max_staleness, parts.steps - 1) + 1
    keys: tuple[str, ...] = ()
    if start_servers is not None:
        main = processes.is_main
        started = processes.of_main(processes.agreed(lambda: start_servers(size, adapters) if main else ()))
        urls, keys = zip(*started, strict=True)
        sampling = sampling.model_copy(update={"servers": urls})
    rank = lora.rank if lora is not None else None
    if served and processes.device.type == "cuda" and not sampling.vllm.devices:
        raise UserError(
            "sampling.vllm.devices is empty: name the GPUs of the vLLM server, such as [1], and keep training off them "
            "with CUDA_VISIBLE_DEVICES"
        )
    server = VllmServer(served, sampling.vllm, parts.model.dtype, size, rank, adapters) if served else None
    folder = Path(served.name) if served else parts.folder
    if processes.is_main and not served:
        shutil.rmtree(folder, ignore_errors=True)  # weights that a process was killed over; this one holds the run
    return VllmSampler(policy, parts.tokenizer, sampling, parts.seed, processes, parts.bare, size, folder, server, keys)

"""Sampling with vLLM: the policy's weights go to servers, prompts and responses go back and forth as token ids."""

import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase

from cavesson.errors import ServerError, UserError, first_line, of_the_system
from cavesson.models.fingerprint import digest
from cavesson.models.parts import causal, probe_ids, tolerance, untied
from cavesson.models.policy import Policy
from cavesson.models.sharding import whole
from cavesson.processes import Processes
from cavesson.randomness import Purpose, generator
from cavesson.rollout.engines.responses import (
    Growing,
    Responses,
    StopTexts,
    Turns,
    eos_token_ids,
    joined,
    length_limits,
)
from cavesson.rollout.engines.settings import SamplingSettings
from cavesson.rollout.engines.vllm_client import Sampled, VllmClient
from cavesson.rollout.engines.vllm_server import VllmServer
from cavesson.rollout.engines.vllm_weights import WeightTransfer
from cavesson.types import Batch, Scores

T = TypeVar("T")
_PROBE = 33
"""Most tokens of the text by which the weights of server and policy are compared."""


class VllmSampler:
    """Samples responses from a policy by vLLM servers, which get its weights whenever these have changed.

    Args:
        policy: the policy that samples.
        tokenizer: its tokenizer.
        settings: how to sample, and on which servers.
        seed: determines every draw, together with step and row.
        processes: those of the run.
        skeleton: the policy's model without its weights, if they are sharded.
        longest: tokens of the longest prompt and response together.
        folder: where weights are put for the servers, which must be able to read it.
        server: the server that this run has started, on its main process.
        keys: of the servers in the settings, if this run has started them.
    """

    def __init__(
        self,
        policy: Policy,
        tokenizer: PreTrainedTokenizerBase,
        settings: SamplingSettings,
        seed: int,
        processes: Processes,
        skeleton: Any,
        longest: int,
        folder: Path,
        server: VllmServer | None = None,
        keys: Sequence[str] = (),
    ) -> None:
        self.policy, self.settings, self.seed = policy, settings, seed
        self.processes, self.skeleton, self.folder, self.server = processes, skeleton, folder, server
        urls, keys = processes.of_main(([server.url], [server.key]) if server else (settings.servers, keys))
        self.client = VllmClient(urls, settings.vllm, keys)
        self.stop = StopTexts(tokenizer, settings.stop)
        self.eos = torch.tensor(eos_token_ids(policy, tokenizer, settings), dtype=torch.int64)
        self.version: str | None = None
        """name of the weights that responses are sampled from"""
        self._steps: dict[str, int] = {}  # training steps of all weights that servers were sent, in order
        self._kept: list[str] = []  # the latest of them, whose adapters servers still have
        self._run = processes.of_main(secrets.token_hex(4))
        text = min(_PROBE, longest - 1)
        self._probed = text // 2
        self._probe = probe_ids(policy.model, text - self._probed)
        self._is_adapter = hasattr(policy.model, "peft_config")
        self._is_asleep = False
        self._transfer = (
            WeightTransfer(policy.model, skeleton, processes, self.client) if settings.vllm.transfer == "nccl" else None
        )
        # Not later: weights that are trained in lower precision become float32 when they are sharded.
        self._tolerance = tolerance(policy.dtype)

    @torch.no_grad()
    def sample(
        self,
        prompts: Batch,
        step: int,
        rows: Sequence[int],
        temperature: float | None = None,
        turns: Turns | None = None,
    ) -> Responses:
        """Sample one response to each prompt, as `Engine` says; may be called in a separate thread.

        Raises:
            ServerError: a server failed, or has other weights than those it was sent.
        """
        assert self.version is not None, "update_weights comes first"
        limits = length_limits(self.settings, self.seed, step, rows, turns)
        starts = turns.starts if turns is not None else [0] * len(rows)
        params = [
            self._params(step, row, start, int(limit), temperature)
            for row, start, limit in zip(rows, starts, limits, strict=True)
        ]
        ids = [
            row[mask].tolist() for row, mask in zip(prompts["prompt_ids"], prompts["prompt_mask"].bool(), strict=True)
        ]
        with self._explained():
            parts = self._responses(ids, params, limits, rows, self.version)
        return joined(parts)

    def sampling(self) -> AbstractContextManager[None]:
        """Hold nothing: servers have the weights."""
        return nullcontext()

    def _responses(
        self,
        prompts: list[list[int]],
        params: list[dict[str, Any]],
        limits: NDArray[np.int64],
        places: Sequence[int],
        version: str,
    ) -> list[Responses]:
        """Return the response to each prompt, which ends where one sampled without a server would end."""
        name = version if self._is_adapter else None
        sampled = self.client.sample(prompts, params, name, places)
        parts = [self._ended(one, limits[row : row + 1], version) for row, one in enumerate(sampled)]
        # A server decodes with the prompt as context, so it can find a stop text where the response alone has none.
        rows = [row for row, part in enumerate(parts) if part is None and params[row]["stop"]]
        if rows:
            anew = [{**params[row], "stop": []} for row in rows]
            sampled = self.client.sample([prompts[row] for row in rows], anew, name, [places[row] for row in rows])
            for row, one in zip(rows, sampled, strict=True):
                parts[row] = self._ended(one, limits[row : row + 1], version)
        ended = [part for part in parts if part is not None]
        if len(ended) < len(parts):
            raise ServerError("a vLLM server answered a response that has no end and is not as long as it may be")
        return ended

    def _ended(self, sampled: Sampled, limit: NDArray[np.int64], version: str) -> Responses | None:
        """Return a response up to its end, or None if it has none."""
        versions = torch.tensor([self._steps_of(sampled, version)])
        growing = Growing(1, limit, self.eos.tolist(), self.stop)
        for token in sampled.ids:
            growing.append([0], [token])
        if not growing.all_done:
            return None
        return growing.responses(torch.tensor([sampled.logprobs]), versions)

    def _steps_of(self, sampled: Sampled, version: str) -> list[int]:
        """Return the training steps of the weights of each token of a response, asked for when `version` was the
        newest.

        Raise ServerError if a token is not in the vocabulary, or of other weights than those the server was sent.
        """
        vocabulary = causal(self.policy.model).config.get_text_config().vocab_size
        if max(sampled.ids) >= vocabulary:
            raise sampled.server.failed(f"answered the token {max(sampled.ids)}, but the model has {vocabulary}")
        # Later weights may have come while the server was sampling.
        names = list(self._steps)
        allowed = set(names[names.index(version) :])
        other = next((name for name in sampled.versions if name not in allowed), None)
        if other is not None:
            raise sampled.server.failed(
                f"sampled with the weights {other or 'of no version'} instead of {version}; was it restarted?"
            )
        # A request names its adapter, which stays the same whatever else the server has loaded.
        return [self._steps[version if self._is_adapter else name] for name in sampled.versions]

    def close(self) -> None:
        """Cancel all requests, end the server that this run has started, and remove what was put for servers."""
        self.client.close()
        if self.server is not None:
            self.server.close()
        if self.processes.is_main and self._steps:
            for version in self._steps:
                shutil.rmtree(self.folder / version, ignore_errors=True)
            with suppress(OSError):  # there may be weights of another run
                self.folder.rmdir()

    def _params(self, step: int, row: int, start: int, limit: int, temperature: float | None) -> dict[str, Any]:
        """Return vLLM's sampling parameters for a row whose response begins at position `start` of its episode."""
        settings, least = self.settings, min(self.settings.min_new_tokens, limit)
        # `min_tokens` forbids all tokens that end a response, but only end tokens are forbidden here.
        ends = self.eos.tolist() + ([] if least else sorted(self.stop.special))
        return {
            "temperature": settings.temperature if temperature is None else temperature,
            "top_k": settings.top_k,
            "top_p": settings.top_p,
            "min_tokens": least,
            "max_tokens": limit,
            "seed": int(generator(self.seed, Purpose.TOKENS, step, row).integers(2**63, size=start + 1)[-1]),
            "stop_token_ids": ends,
            "ignore_eos": True,
            "stop": list(self.stop.stop),
            "include_stop_str_in_output": True,
        }

    @torch.no_grad()
    def update_weights(self, step: int) -> None:
        """Give the policy's weights to the servers if they have changed, and check that these have them.

        Raises:
            ServerError: a server failed, or has other weights than the policy.
        """
        # A server may still have the adapters of an earlier run, so names differ from run to run.
        version = f"{digest(self.processes.of_all(_state(self.policy)))[:12]}-{self._run}"
        must_send = version not in self._steps or (self._is_asleep and not self._is_adapter)
        # Responses may state it as soon as a server has it.
        self._steps[version] = step
        self.processes.wait()
        self._wake()
        if must_send:
            # An earlier run may have been killed while it had paused the servers.
            if self.version is None:
                self._on_main(self.client.resume)
            self._send(version)
            self._check(version)
        self.version = version

    def remarks(self) -> list[str]:
        """Return no notes: servers write their own."""
        return []

    def auto_values(self) -> dict[str, Any]:
        """Return nothing: a server gets adapters as they are."""
        return {}

    def sleep(self) -> None:
        """Let the server sleep if the settings say so.

        Its weights move to the host if only adapters change; else they are lost, since new ones come before it samples.
        """
        if self.settings.vllm.sleep:
            level = 1 if self._is_adapter else 2
            self._on_main(partial(self.client.sleep, level))
            self._is_asleep = True

    def _wake(self) -> None:
        """Wake the server, for which all processes first release the memory that they keep for later use."""
        if self._is_asleep:
            if self.processes.device.type == "cuda":
                torch.cuda.empty_cache()
            self.processes.wait()
            self._on_main(self.client.wake)
            self._is_asleep = False

    def _send(self, version: str) -> None:
        """Give the weights to the servers, which may be sampling with older ones."""
        while_sampling = self.settings.max_staleness > 0 and self.version is not None
        transfer = self._transfer
        if transfer is None:
            model = whole(self.policy.model, self.skeleton, self.processes.is_main, frozen=not self._is_adapter)
            self._on_main(lambda: self._send_files(model, version, while_sampling))
        else:
            self._on_main(lambda: transfer.begin(while_sampling))
            transfer.stream()
            self._on_main(lambda: transfer.finish(version, while_sampling))

    def _send_files(self, model: Any, version: str, while_sampling: bool) -> None:
        """Put the weights into a folder for the servers, and let them load these."""
        folder = self.folder / version
        superseded = self._kept[: max(0, len(self._kept) - self.settings.max_staleness)]
        if self._is_adapter:
            model.save_pretrained(str(folder), save_embedding_layers=False)
            self.client.load_adapter(folder, version, superseded)
        else:
            with untied(model):
                model.save_pretrained(str(folder))
            self.client.load_weights(folder, version, while_sampling)
            shutil.rmtree(folder)
        for before in superseded:
            shutil.rmtree(self.folder / before, ignore_errors=True)
        self._kept = [*self._kept[len(superseded) :], version]

    def _logprobs(self, response: Tensor) -> Tensor:
        """Return the policy's log-probability of each token of a response to the probe, at temperature 1."""
        ids, rest = self._probe[None], response[None]
        columns = {"prompt_ids": ids, "prompt_mask": torch.ones_like(ids), "response_ids": rest}
        every = torch.ones_like(rest, dtype=torch.float32)
        batch = Batch(columns).with_columns(attended=every, learned=every).to(self.policy.device)
        temperature, self.policy.temperature = self.policy.temperature, 1.0
        try:
            scores: Scores = self.policy(batch)
            return scores.logprob[0].cpu()
        finally:
            self.policy.temperature = temperature

    def _check(self, version: str) -> None:
        """Raise ServerError if a server samples a text with other log-probabilities than the policy's, but for
        rounding.
        """
        name = version if self._is_adapter else None
        # vLLM 0.32 crashes if it scores a prompt with an adapter while it samples, so it samples here too.
        params = {"max_tokens": self._probed, "temperature": 1.0, "ignore_eos": True, "seed": 0}
        asked = partial(self.client.sample_from_each, self._probe.tolist(), params, name)
        for sampled in self.processes.of_main(self._on_main(asked)) or []:
            self._steps_of(sampled, version)
            expected = self._logprobs(torch.tensor(sampled.ids))
            difference = float((torch.tensor(sampled.logprobs) - expected).abs().mean())
            if not difference <= self._tolerance * max(1.0, float(expected.std())):
                raise sampled.server.failed(
                    f"has other weights than the policy: on a text of {len(sampled.ids)} tokens, its log-probabilities "
                    f"differ by {difference:.2g} nats on average; it must serve the model of model.path in the dtype "
                    "of model.dtype and, unless model.lora is set, with its own head (tie_word_embeddings false)"
                )

    def _on_main(self, action: Callable[[], T]) -> T | None:
        """Return what an action of the main process on servers returns, and None on others; an error ends all."""

        def explained() -> T | None:
            with self._explained():
                return action() if self.processes.is_main else None

        return self.processes.agreed(explained)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Say if the run's server has ended when a request fails, and name a folder that cannot be written."""
        try:
            yield
        except (UserError, OSError, SafetensorError) as failed:
            ended = self.server.ended() if self.server else None
            said = None if isinstance(failed, UserError) else of_the_system(failed) or first_line(failed)
            if ended is None and said is None:
                raise
            raise ServerError(ended or said) from failed


def _state(policy: Policy) -> list[tuple[str, list[float]]]:
    """Return the first thousand values of every trained weight of the model, of which training changes each."""
    found = []
    for name, parameter in policy.model.named_parameters():
        if parameter.requires_grad:
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            found.append((name, local.detach().flatten()[:1000].float().tolist()))
    return found

"""Sampling with vLLM: the policy's weights go to servers, prompts and responses go back and forth as token ids."""

import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

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
from cavesson.models.policy import Policy, Scores
from cavesson.processes import Processes
from cavesson.randomness import Purpose, generator
from cavesson.sampling.responses import Growing, Responses, StopTexts, eos_token_ids, joined, length_limits
from cavesson.sampling.settings import SamplingSettings
from cavesson.sampling.vllm_client import Sampled, VllmClient
from cavesson.sampling.vllm_server import VllmServer
from cavesson.types import Batch

_PROBE = 33
"""Most tokens of the text by which the weights of server and policy are compared."""


class VllmSampler:
    """Samples responses from a policy by vLLM servers, which get its weights whenever these have changed.

    All processes must call `sample` together, each with its own rows.

    Args:
        policy: the policy that samples.
        tokenizer: its tokenizer.
        settings: how to sample, and on which servers.
        seed: determines every draw, together with step and row.
        processes: those of the run.
        whole: returns the policy's model with all its weights on the main process, and None on others.
        longest: tokens of the longest prompt and response together.
        folder: where weights are put for the servers, which must be able to read it.
        server: the server that this run has started, on its main process.
    """

    def __init__(
        self,
        policy: Policy,
        tokenizer: PreTrainedTokenizerBase,
        settings: SamplingSettings,
        seed: int,
        processes: Processes,
        whole: Callable[[], Any],
        longest: int,
        folder: Path,
        server: VllmServer | None = None,
    ) -> None:
        self.policy, self.tokenizer, self.settings, self.seed = policy, tokenizer, settings, seed
        self.processes, self.whole, self.folder, self.server = processes, whole, folder, server
        self.client = VllmClient(processes.of_main([server.url] if server else list(settings.servers)), settings.vllm)
        self.stop = StopTexts(tokenizer, settings.stop)
        self.eos = torch.tensor(eos_token_ids(policy, tokenizer, settings))
        self.version: str | None = None
        self._run = processes.of_main(secrets.token_hex(4))
        self._probe = probe_ids(policy.model, min(_PROBE, longest - 1))
        self._is_adapter = hasattr(policy.model, "peft_config")

    @torch.no_grad()
    def sample(self, prompts: Batch, step: int, rows: range, temperature: float | None = None) -> Responses:
        """Sample one response to each prompt, as `Engine` says.

        Raises:
            ServerError: a server failed, or has other weights than the policy.
        """
        self.synchronise()
        limits = length_limits(self.settings, self.seed, step, rows)
        params = [self._params(step, row, int(limit), temperature) for row, limit in zip(rows, limits, strict=True)]
        ids = [
            row[mask].tolist() for row, mask in zip(prompts["prompt_ids"], prompts["prompt_mask"].bool(), strict=True)
        ]
        parts = self._asked(lambda: self._responses(ids, params, limits, rows.start))
        return joined(parts, int(self.tokenizer.pad_token_id))

    def _responses(
        self, prompts: list[list[int]], params: list[dict[str, Any]], limits: NDArray[np.int64], first: int
    ) -> list[Responses]:
        """Return the response to each prompt, which ends where one sampled without a server would end."""
        assert self.version is not None
        name = self.version if self._is_adapter else None
        sampled = self.client.sample(prompts, params, name, self.version, first)
        parts = [self._ended(one, limits[row : row + 1]) for row, one in enumerate(sampled)]
        # A server decodes with the prompt as context, so it can find a stop text where the response alone has none.
        rows = [row for row, part in enumerate(parts) if part is None and params[row]["stop"]]
        if rows:
            anew = [{**params[row], "stop": []} for row in rows]
            sampled = self.client.sample([prompts[row] for row in rows], anew, name, self.version, first)
            for row, one in zip(rows, sampled, strict=True):
                parts[row] = self._ended(one, limits[row : row + 1])
        whole = [part for part in parts if part is not None]
        if len(whole) < len(parts):
            raise ServerError("a vLLM server answered a response that has no end and is not as long as it may be")
        return whole

    def _ended(self, sampled: Sampled, limit: NDArray[np.int64]) -> Responses | None:
        """Return a response up to its end, or None if it has none.

        Raises:
            ServerError: a token is not in the vocabulary.
        """
        vocabulary = causal(self.policy.model).config.get_text_config().vocab_size
        if max(sampled.ids) >= vocabulary:
            raise ServerError(f"a vLLM server answered the token {max(sampled.ids)}, but the model has {vocabulary}")
        growing = Growing(1, limit, self.eos.tolist(), self.stop)
        for token in sampled.ids:
            growing.append([token])
        if not growing.all_done:
            return None
        return growing.responses(torch.tensor([sampled.logprobs]), int(self.tokenizer.pad_token_id))

    def close(self) -> None:
        """End the server that this run has started, and remove the weights that were put for servers."""
        if self.server is not None:
            self.server.close()
        if self.processes.is_main and self.version is not None:
            shutil.rmtree(self.folder / self.version, ignore_errors=True)
            with suppress(OSError):  # there may be weights of another run
                self.folder.rmdir()

    def _params(self, step: int, row: int, limit: int, temperature: float | None) -> dict[str, Any]:
        """Return vLLM's sampling parameters of a row."""
        settings, least = self.settings, min(self.settings.min_new_tokens, limit)
        # `min_tokens` forbids all tokens that end a response, but only end tokens are forbidden here.
        ends = self.eos.tolist() + ([] if least else sorted(self.stop.special))
        return {
            "temperature": settings.temperature if temperature is None else temperature,
            "top_k": settings.top_k,
            "top_p": settings.top_p,
            "min_tokens": least,
            "max_tokens": limit,
            "seed": int(generator(self.seed, Purpose.TOKENS, step, row).integers(2**63)),
            "stop_token_ids": ends,
            "ignore_eos": True,
            "stop": list(self.stop.stop),
            "include_stop_str_in_output": True,
        }

    @torch.no_grad()
    def synchronise(self) -> None:
        """Give the policy's weights to the servers if they have changed, and check that these have them."""
        # A server may still have the adapters of an earlier run, so names differ from run to run.
        version = f"{digest(self.processes.of_all(_state(self.policy)))[:12]}-{self._run}"
        if version == self.version:
            return
        model, before = self.whole(), self.version
        expected = self._logprobs(self._probe)

        def send() -> None:
            place = self.folder / version
            if self._is_adapter:
                model.save_pretrained(str(place), save_embedding_layers=False)
                self.client.load_adapter(place, version, before)
            else:
                with untied(model):
                    model.save_pretrained(str(place))
                self.client.load_weights(place, version)
                shutil.rmtree(place)
            if before is not None:
                shutil.rmtree(self.folder / before, ignore_errors=True)
            self._check(self.client.score(self._probe.tolist(), version if self._is_adapter else None), expected)

        self._asked(lambda: send() if self.processes.is_main else None)
        self.version = version

    def _logprobs(self, ids: Tensor) -> Tensor:
        """Return the policy's log-probability of every token of a text but the first, at temperature 1."""
        first, rest = ids[None, :1], ids[None, 1:]
        batch = Batch({"prompt_ids": first, "prompt_mask": torch.ones_like(first), "response_ids": rest})
        temperature, self.policy.temperature = self.policy.temperature, 1.0
        try:
            scores: Scores = self.policy(batch.with_columns(mask=torch.ones_like(rest, dtype=torch.float32)))
            return scores.logprob[0].cpu()
        finally:
            self.policy.temperature = temperature

    def _check(self, seen: list[list[float]], expected: Tensor) -> None:
        """Check that all servers score a text as the policy does, but for rounding.

        Raises:
            ServerError: a server has other weights.
        """
        most = tolerance(causal(self.policy.model).dtype) * max(1.0, float(expected.std()))
        for server, logprobs in zip(self.client.servers, seen, strict=True):
            difference = float((torch.tensor(logprobs) - expected).abs().mean())
            if not difference <= most:
                raise server.failed(
                    f"has other weights than the policy: on a text of {len(self._probe)} tokens, its log-probabilities "
                    f"differ by {difference:.2g} nats on average; it must serve the model of model.path in the dtype "
                    "of model.dtype and, unless model.lora is set, with a head of its own (tie_word_embeddings false)"
                )

    def _asked(self, request: Callable[[], Any]) -> Any:
        """Return what a request returns; an error ends all processes, and says if the server has ended."""
        answer, error = None, None
        try:
            answer = request()
        except (UserError, OSError, SafetensorError) as failed:
            ended = self.server.ended() if self.server else None
            said = None if isinstance(failed, UserError) else of_the_system(failed) or first_line(failed)
            error = ServerError(ended or said) if ended or said else failed
        errors = [each for each in self.processes.of_all(error) if each is not None]
        if errors:
            raise errors[0]
        return answer


def _state(policy: Policy) -> list[tuple[str, list[float]]]:
    """Return the first thousand values of every trained weight of the model, of which training changes each."""
    found = []
    for name, parameter in policy.model.named_parameters():
        if parameter.requires_grad:
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            found.append((name, local.detach().flatten()[:1000].float().tolist()))
    return found

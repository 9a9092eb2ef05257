"""Requests to vLLM servers: token ids in, token ids and their log-probabilities out, and new weights."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import httpx
from anyio.from_thread import start_blocking_portal
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from cavesson.endpoint import Endpoint, beginning
from cavesson.errors import ServerError
from cavesson.sampling.settings import VllmSettings

T = TypeVar("T")
_GENERATE = "/inference/v1/generate"
_AT_ONCE = 256
"""Requests per server at the same time, from each process; servers form batches of them."""


class _Token(BaseModel):
    token_id: int
    logprob: FiniteFloat


class _Logprobs(BaseModel):
    content: list[_Token]


class _Span(BaseModel):
    version: str


class _Choice(BaseModel):
    model_config = ConfigDict(strict=True)
    token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    logprobs: _Logprobs
    weight_versions: list[_Span] = Field(default_factory=list)


class _Answer(BaseModel):
    choices: Annotated[list[_Choice], Field(min_length=1, max_length=1)]


class _Scored(BaseModel):
    prompt_logprobs: list[dict[int, dict[str, Any]] | None]


@dataclass(frozen=True)
class Sampled:
    """A response as a server has sampled it."""

    ids: list[int]
    logprobs: list[float]


class VllmClient:
    """Asks servers, several requests at a time.

    Args:
        urls: of the servers, all with the same model.
        settings: time limit and attempts of a request.
    """

    def __init__(self, urls: Sequence[str], settings: VllmSettings) -> None:
        self.servers = [
            Endpoint("the vLLM server", url, settings.timeout, settings.attempts, ServerError) for url in urls
        ]

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[dict[str, Any]],
        model: str | None,
        version: str,
        first: int = 0,
    ) -> list[Sampled]:
        """Sample one response to each prompt.

        Args:
            prompts: their token ids.
            params: vLLM's sampling parameters of each.
            model: name of the adapter; None for the model itself.
            version: of the weights that every token must be sampled from.
            first: row of the first prompt among those of all processes, which servers get in turns.

        Raises:
            ServerError: a server failed, or its answer is not what was asked for.
        """
        requests = [
            json.dumps(_request(ids, {**one, "logprobs": 0}, model)).encode()
            for ids, one in zip(prompts, params, strict=True)
        ]

        async def ask(row: int, client: httpx.AsyncClient) -> Sampled:
            server = self.servers[(first + row) % len(self.servers)]
            return _sampled(server, await server.post(client, requests[row], _GENERATE), version)

        return self._together([partial(ask, row) for row in range(len(requests))])

    def score(self, ids: Sequence[int], model: str | None) -> list[list[float]]:
        """Return the log-probability of every token but the first, from each server, at temperature 1."""
        content = json.dumps(_request(ids, {"max_tokens": 1, "prompt_logprobs": 0}, model)).encode()

        async def ask(server: Endpoint, client: httpx.AsyncClient) -> list[float]:
            answer = await server.post(client, content, _GENERATE)
            try:
                seen = _Scored.model_validate_json(answer).prompt_logprobs
                return [float(each[token]["logprob"]) for each, token in zip(seen[1:], ids[1:], strict=True) if each]
            except (ValidationError, KeyError, TypeError, ValueError) as error:
                raise server.failed(f"answered no log-probabilities of a prompt: {beginning(answer)}") from error

        return self._together([partial(ask, server) for server in self.servers])

    def load_adapter(self, folder: Path, version: str, before: str | None) -> None:
        """Load an adapter under the name of its version, in place of the one before.

        A server may read the folder again later.
        """
        steps = [("/v1/unload_lora_adapter", {"lora_name": before})] if before else []
        steps += [("/v1/load_lora_adapter", {"lora_name": version, "lora_path": str(folder.absolute())})]
        self._tell(steps, version)

    def load_weights(self, folder: Path, version: str) -> None:
        """Replace all weights by those of a folder; what was computed with the old ones is forgotten."""
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder.absolute())}}
        self._tell([("/collective_rpc", reload), ("/reset_prefix_cache", {})], version)

    def _tell(self, steps: Sequence[tuple[str, dict[str, Any]]], version: str) -> None:
        async def tell(server: Endpoint, client: httpx.AsyncClient) -> None:
            once = replace(server, attempts=1)  # an adapter cannot be loaded twice
            for path, content in (*steps, ("/update_weight_version", {"new_version": version})):
                await once.post(client, json.dumps(content).encode(), path)

        self._together([partial(tell, server) for server in self.servers])

    def _together(self, tasks: Sequence[Callable[[httpx.AsyncClient], Awaitable[T]]]) -> list[T]:
        async def run() -> list[T]:
            free = asyncio.Semaphore(_AT_ONCE * len(self.servers))
            async with self.servers[0].client() as client:

                async def one(task: Callable[[httpx.AsyncClient], Awaitable[T]]) -> T:
                    async with free:
                        return await task(client)

                return await asyncio.gather(*map(one, tasks))

        # The requests need a separate thread, because the caller may already run in an event loop, as in notebooks.
        with start_blocking_portal() as portal:
            return portal.call(run)


def _request(ids: Sequence[int], params: dict[str, Any], model: str | None) -> dict[str, Any]:
    request: dict[str, Any] = {"token_ids": list(ids), "sampling_params": params}
    return request if model is None else {**request, "model": model}


def _sampled(server: Endpoint, content: bytes, version: str) -> Sampled:
    """Return the response in an answer.

    Raises:
        ServerError: it is not one, or other weights have sampled it.
    """
    try:
        (choice,) = _Answer.model_validate_json(content).choices
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise server.failed(f"answered {beginning(content)} ({place}: {first['msg']})") from error
    tokens = choice.logprobs.content
    if [token.token_id for token in tokens] != choice.token_ids:
        raise server.failed("answered log-probabilities of other tokens than those it has sampled")
    other = next((span.version for span in choice.weight_versions if span.version != version), None)
    if other is not None or not choice.weight_versions:
        raise server.failed(
            f"sampled with the weights {other or 'of no version'} instead of {version}; was it restarted?"
        )
    return Sampled(choice.token_ids, [token.logprob for token in tokens])

"""Requests to vLLM servers: token ids in, token ids and their log-probabilities out, and new weights."""

import asyncio
import json
import os
import resource
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import httpx
from anyio.from_thread import start_blocking_portal
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from cavesson.endpoint import Endpoint, beginning
from cavesson.errors import ServerError, UserError
from cavesson.rollout.engines.settings import VllmSettings

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)
_GENERATE = "/inference/v1/generate"
_PAUSE: tuple[str, dict[str, Any]] = ("/pause?mode=keep", {})
_AT_ONCE = 256
"""Requests per server at the same time, for each batch of each process; servers form their own batches."""
_FILES = 0.5
"""Share of the files that the process may open which requests may take."""


class _Token(BaseModel):
    token_id: int
    logprob: FiniteFloat


class _Logprobs(BaseModel):
    content: list[_Token]


class _Span(BaseModel):
    version: str
    start: Annotated[int, Field(ge=0)]
    end: int


class _Choice(BaseModel):
    model_config = ConfigDict(strict=True)
    token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    logprobs: _Logprobs
    weight_versions: list[_Span] = Field(default_factory=list)


class _Known(BaseModel):
    logprob: FiniteFloat


class _Scored(BaseModel):
    prompt_logprobs: list[dict[int, _Known] | None]


class _Completion(BaseModel):
    choices: Annotated[list[_Scored], Field(min_length=1, max_length=1)]


class _Model(BaseModel):
    id: str


class _Models(BaseModel):
    data: Annotated[list[_Model], Field(min_length=1)]


class _Tokens(BaseModel):
    tokens: list[int]


class _WorldSize(BaseModel):
    world_size: Annotated[int, Field(ge=1)]


class _Answer(BaseModel):
    choices: Annotated[list[_Choice], Field(min_length=1, max_length=1)]


@dataclass(frozen=True)
class Sampled:
    """A response as a server has sampled it."""

    ids: list[int]
    logprobs: list[float]
    versions: list[str]
    """name of the server's weights for each token; "" if the server gave none"""
    server: Endpoint


class VllmClient:
    """Asks servers with the same model, several requests at a time.

    Without `keys` of the servers, requests carry the key in the variable VLLM_API_KEY, if it is set.
    """

    def __init__(self, urls: Sequence[str], settings: VllmSettings, keys: Sequence[str] = ()) -> None:
        self.servers = [
            Endpoint(
                "the vLLM server",
                url,
                settings.timeout,
                settings.attempts,
                ServerError,
                {"Authorization": f"Bearer {key}"} if key else {},
                credentials="VLLM_API_KEY in the environment to its key",
            )
            for url, key in zip(urls, keys or [os.environ.get("VLLM_API_KEY", "")] * len(urls), strict=True)
        ]
        self._asking: set[Future[Any]] = set()
        self._closed = False

    def close(self) -> None:
        """Cancel all requests; whoever waits for one gets a CancelledError. May be called from any thread."""
        self._closed = True
        for asking in list(self._asking):
            asking.cancel()

    def sample(
        self, prompts: Sequence[Sequence[int]], params: Sequence[dict[str, Any]], model: str | None, rows: Sequence[int]
    ) -> list[Sampled]:
        """Sample one response to each prompt, given by its token ids and vLLM's sampling parameters.

        `model` is the name of the adapter; None for the model itself. `rows` are the positions of the prompts among
        those of all processes, which servers get in turns.

        Raises:
            ServerError: a server failed, or its answer is not what was asked for.
        """
        requests = [
            json.dumps(_request(ids, {**one, "logprobs": 0}, model)).encode()
            for ids, one in zip(prompts, params, strict=True)
        ]

        async def ask(row: int, client: httpx.AsyncClient) -> Sampled:
            server = self.servers[rows[row] % len(self.servers)]
            return _sampled(server, await server.post(client, requests[row], _GENERATE))

        return self._together([partial(ask, row) for row in range(len(requests))])

    def sample_from_each(self, ids: Sequence[int], params: dict[str, Any], model: str | None) -> list[Sampled]:
        """Sample a response to one prompt from every server.

        Raises:
            ServerError: a server failed, or its answer is not what was asked for.
        """
        request = json.dumps(_request(ids, {**params, "logprobs": 0}, model)).encode()

        async def ask(server: Endpoint, client: httpx.AsyncClient) -> Sampled:
            return _sampled(server, await server.post(client, request, _GENERATE))

        return self._together([partial(ask, server) for server in self.servers])

    def prompt_logprobs(self, texts: Sequence[Sequence[int]], rows: Sequence[int]) -> list[list[float]]:
        """Return the log-probabilities of all tokens of texts, given by their token ids; of a first token, 0.

        `rows` are as in `sample`.

        Raises:
            ServerError: a server failed, or its answer is not what was asked for.
        """
        names = self._together([partial(self._model_name, server) for server in self.servers])

        async def ask(ids: Sequence[int], row: int, client: httpx.AsyncClient) -> list[float]:
            number = row % len(self.servers)
            # A completion samples a token at least.
            request = {"model": names[number], "prompt": list(ids), "max_tokens": 1, "prompt_logprobs": 0}
            server = self.servers[number]
            return _scored(server, ids, await server.post(client, json.dumps(request).encode(), "/v1/completions"))

        return self._together([partial(ask, ids, row) for ids, row in zip(texts, rows, strict=True)])

    def tokenised(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of texts, without special tokens around them, as the first server reads them.

        Raises:
            ServerError: the server failed, or its answer is not what was asked for.
        """
        server = self.servers[0]

        async def ask(text: str, client: httpx.AsyncClient) -> list[int]:
            request = {"prompt": text, "add_special_tokens": False}
            content = await server.post(client, json.dumps(request).encode(), "/tokenize")
            return _read(server, _Tokens, content).tokens

        return self._together([partial(ask, text) for text in texts])

    async def _model_name(self, server: Endpoint, client: httpx.AsyncClient) -> str:
        return _read(server, _Models, await server.get(client, "/v1/models")).data[0].id

    def resume(self) -> None:
        """End a pause that an earlier run has begun and, because it was killed, not ended."""
        self._tell([], resume="after")

    def sleep(self, level: int) -> None:
        """Let the servers release memory: at level 1, their weights move to the host; at level 2, they are lost."""
        self._tell([(f"/sleep?level={level}", {})])

    def wake(self) -> None:
        """Let the servers take their memory back."""
        self._tell([("/wake_up", {})])

    def load_adapter(self, folder: Path, version: str, superseded: Sequence[str]) -> None:
        """Load an adapter under the name of its version, after removing those that nothing samples from any more.

        A server may read the folder again later.
        """
        steps = [("/v1/unload_lora_adapter", {"lora_name": before}) for before in superseded]
        steps += [("/v1/load_lora_adapter", {"lora_name": version, "lora_path": str(folder.absolute())})]
        self._tell([*steps, _named(version)])

    def load_weights(self, folder: Path, version: str, while_sampling: bool) -> None:
        """Replace all weights by those of a folder; what was computed with the old ones is forgotten.

        If there may be requests `while_sampling`, they pause, and their next tokens come from the new weights.
        """
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder.absolute())}}
        steps = [("/collective_rpc", reload), *_renewed(version, while_sampling)]
        self._tell([_PAUSE, *steps] if while_sampling else steps, "after" if while_sampling else "never")

    def world_sizes(self) -> list[int]:
        """Return the number of workers of each server, or raise a ServerError."""

        async def ask(server: Endpoint, client: httpx.AsyncClient) -> int:
            content = await server.get(client, "/get_world_size")
            try:
                return _WorldSize.model_validate_json(content).world_size
            except ValidationError as error:
                raise server.failed(f"answered {beginning(content)} instead of its number of workers") from error

        return self._together([partial(ask, server) for server in self.servers])

    def each(self, path: str, contents: Sequence[dict[str, Any]]) -> None:
        """Send one request to each server at the same time; the first ServerError cancels the others."""

        async def ask(server: Endpoint, content: dict[str, Any], client: httpx.AsyncClient) -> None:
            await replace(server, attempts=1).post(client, json.dumps(content).encode(), path)

        self._together([partial(ask, *each) for each in zip(self.servers, contents, strict=True)])

    def begin_weights(self, while_sampling: bool) -> None:
        """Let the servers expect new weights, which `/update_weights` announces; arguments as for `load_weights`."""
        start: list[tuple[str, dict[str, Any]]] = [("/start_weight_update", {})]
        self._tell([_PAUSE, *start] if while_sampling else start, "on error" if while_sampling else "never")

    def finish_weights(self, version: str, while_sampling: bool) -> None:
        """Let the servers use the weights that they got; what was computed with the old ones is forgotten."""
        steps = [("/finish_weight_update", {}), *_renewed(version, while_sampling)]
        self._tell(steps, "after" if while_sampling else "never")

    def _tell(
        self, steps: Sequence[tuple[str, dict[str, Any]]], resume: Literal["never", "on error", "after"] = "never"
    ) -> None:
        """Send requests, given by path and content, to each server, one after another.

        `resume` says when to end a pause of the server; "after" = after all requests, also if one has failed.
        """

        async def tell(server: Endpoint, client: httpx.AsyncClient) -> UserError | None:
            once, failed = replace(server, attempts=1), None  # an adapter cannot be loaded twice
            try:
                for path, content in steps:
                    await once.post(client, json.dumps(content).encode(), path)
            except UserError as error:
                failed = error
            if resume == "after" or (resume == "on error" and failed):
                try:
                    await server.post(client, b"{}", "/resume")
                except UserError as error:
                    failed = failed or error
            return failed

        # An error of one server must not leave another one paused, so all of them are waited for.
        for error in self._together([partial(tell, server) for server in self.servers]):
            if error is not None:
                raise error

    def _together(self, tasks: Sequence[Callable[[httpx.AsyncClient], Awaitable[T]]]) -> list[T]:
        async def run() -> list[T]:
            files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            free = asyncio.Semaphore(min(_AT_ONCE * len(self.servers), int(_FILES * files)))
            async with self.servers[0].client() as client:

                async def one(task: Callable[[httpx.AsyncClient], Awaitable[T]]) -> T:
                    async with free:
                        return await task(client)

                return await asyncio.gather(*map(one, tasks))

        # The requests need a separate thread, because the caller may already run in an event loop, as in notebooks.
        with start_blocking_portal() as portal:
            asking = portal.start_task_soon(run)
            self._asking.add(asking)
            if self._closed:
                asking.cancel()
            try:
                return asking.result()
            finally:
                self._asking.discard(asking)


def _renewed(version: str, while_sampling: bool) -> list[tuple[str, dict[str, Any]]]:
    """Return the requests after which a server forgets what it has computed with its old weights."""
    return [(f"/reset_prefix_cache?reset_running_requests={str(while_sampling).lower()}", {}), _named(version)]


def _named(version: str) -> tuple[str, dict[str, Any]]:
    return "/update_weight_version", {"new_version": version}


def _request(ids: Sequence[int], params: dict[str, Any], model: str | None) -> dict[str, Any]:
    request: dict[str, Any] = {"token_ids": list(ids), "sampling_params": params}
    return request if model is None else {**request, "model": model}


def _read(server: Endpoint, kind: type[M], content: bytes) -> M:
    """Return an answer; raise ServerError if it is not of this kind."""
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise server.failed(f"answered {beginning(content)} ({field}: {first['msg']})") from error


def _scored(server: Endpoint, ids: Sequence[int], content: bytes) -> list[float]:
    """Return the log-probabilities of these tokens in an answer; raise ServerError if it has not all of them."""
    (choice,) = _read(server, _Completion, content).choices
    known = [{ids[0]: _Known(logprob=0.0)}, *choice.prompt_logprobs[1:]]
    if len(known) != len(ids) or any(not each or number not in each for number, each in zip(ids, known, strict=True)):
        raise server.failed("answered log-probabilities of other tokens than those it was asked for")
    return [each[number].logprob for number, each in zip(ids, known, strict=True) if each is not None]


def _sampled(server: Endpoint, content: bytes) -> Sampled:
    """Return the response in an answer; raise ServerError if it is not one."""
    (choice,) = _read(server, _Answer, content).choices
    tokens = choice.logprobs.content
    if [token.token_id for token in tokens] != choice.token_ids:
        raise server.failed("answered log-probabilities of other tokens than those it has sampled")
    versions = [""] * len(tokens)
    for span in choice.weight_versions:
        versions[span.start : span.end] = [span.version] * len(versions[span.start : span.end])
    return Sampled(choice.token_ids, [token.logprob for token in tokens], versions, server)

"""A small server with the endpoints of vLLM that Cavesson uses, written against vLLM's documentation.

It shows what happens when a server fails, which a real one does not do on demand; the tests in tests/engines run the
real one.
"""

import asyncio
import base64
import copy
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import uvicorn
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.append(str(Path(__file__).parents[1]))  # a separate process does not have it yet
from store_group import StoreGroup

Answer = dict[str, Any]
ROUNDING = 1e-4
"""Nats by which policy and server differ."""


class StandIn:
    """Samples from the model in a folder; `spoil` changes its answers, and `waits` says before which tokens it waits.

    A `deaf` one ignores new weights; a `hasty` one ends each response after a token if it has stop texts, as a server
    that decodes texts differently may.
    """

    def __init__(self, folder: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder)
        self.base, self.version, self.url = copy.deepcopy(self.model), "default", ""
        self.folder = folder
        self.adapters: dict[str, Any] = {}
        self.requests: list[Answer] = []
        self.paths: list[str] = []
        self.spoil: Callable[[Answer], Answer | Response] = lambda answer: answer
        self.waits: Callable[[Answer, int], bool] = lambda request, count: False
        self.deaf, self.hasty, self.delay = False, False, 0.0
        self.paused = False
        self.asleep = 0
        """level at which it sleeps; 0 = awake"""
        self.most_adapters = 0
        self.key = ""
        """which every request but that for its health needs; "" = none"""
        self.broken: set[str] = set()
        """paths that fail"""
        self.workers = 1
        """which get weights, each for itself; the model has those of the last one"""
        self.stops_after = 10**9
        """weights of an update after which it fails"""
        self.groups: list[StoreGroup] = []
        self.closed = threading.Event()
        self.received: list[dict[str, torch.Tensor]] | None = None
        """what each worker has received in the update that has begun"""
        self.latest: list[dict[str, torch.Tensor]] = []
        """what each worker has received in the latest one"""

    @property
    def sampled(self) -> list[Answer]:
        """The requests for responses; the others compare weights."""
        return [request for request in self.requests if not is_probe(request)]

    async def generate(self, request: Request) -> Response:
        given = json.loads(await request.body())
        self.requests.append(given)
        await asyncio.sleep(self.delay)
        params, ids = given["sampling_params"], list(given["token_ids"])
        if self.asleep or given.get("model") not in (None, *self.adapters):
            return JSONResponse({"error": "asleep, or no such model"}, status_code=404)
        adapter = self.adapters.get(given.get("model"))
        draws, tokens = torch.Generator().manual_seed(params.get("seed", 0) % 2**63), []
        spans: list[Answer] = []
        for count in range(params["max_tokens"]):
            while self.paused or self.waits(given, count):
                await asyncio.sleep(0.002)
                if await request.is_disconnected():
                    return Response()
            if given.get("model") not in (None, *self.adapters):
                return JSONResponse({"error": "the adapter was unloaded meanwhile"}, status_code=404)
            token, logprob = self._drawn(adapter or self.model, ids, params, count, draws)
            tokens.append({"token_id": token, "logprob": logprob})
            if not spans or spans[-1]["version"] != self.version:
                spans.append({"version": self.version, "start": count})
            spans[-1]["end"] = count + 1
            ids.append(token)
            if token in params.get("stop_token_ids", ()) or (self.hasty and params.get("stop")):
                break
        choice = {
            "index": 0,
            "token_ids": [token["token_id"] for token in tokens],
            "logprobs": {"content": tokens},
            "weight_versions": spans,
        }
        answer = {"choices": [choice]} if is_probe(given) else self.spoil({"choices": [choice]})
        return answer if isinstance(answer, Response) else JSONResponse(answer)

    async def completed(self, request: Request) -> Response:
        """Score a prompt, as `/v1/completions` does with `prompt_logprobs`."""
        given = json.loads(await request.body())
        self.requests.append(given)
        if given["model"] != "the-teacher":
            return JSONResponse({"error": "no such model"}, status_code=404)
        ids = given["prompt"]
        logprobs = self._logits(self.model, ids).log_softmax(-1)
        likely = given["prompt_logprobs"] + 1
        found: list[Answer | None] = [None]
        for at, token in enumerate(ids[1:]):
            shown = [token, *logprobs[at].topk(likely).indices.tolist()]
            found.append({str(one): {"logprob": float(logprobs[at, one])} for one in shown})
        answer = self.spoil({"choices": [{"index": 0, "text": "x", "prompt_logprobs": found}]})
        return answer if isinstance(answer, Response) else JSONResponse(answer)

    async def named(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "the-teacher", "object": "model"}]})

    async def tokenised(self, request: Request) -> Response:
        given = json.loads(await request.body())
        tokenizer = AutoTokenizer.from_pretrained(self.folder)
        tokens = tokenizer.encode(given["prompt"], add_special_tokens=given["add_special_tokens"])
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": 4096})

    def _drawn(
        self, model: Any, ids: list[int], params: Answer, count: int, draws: torch.Generator
    ) -> tuple[int, float]:
        logits = self._logits(model, ids)[-1] / params.get("temperature", 1.0)
        if count < params.get("min_tokens", 0):
            logits[params["stop_token_ids"]] = -math.inf
        logprob = logits.log_softmax(-1)
        token = int(torch.multinomial(logprob.exp(), 1, generator=draws))
        return token, float(logprob[token])

    async def told(self, request: Request) -> Response:
        given, path = json.loads(await request.body()), request.url.path
        self.paths.append(path)
        expects_weights = path == "/shutdown_weight_transfer_engine" and self.received is not None
        if path in self.broken or self.asleep or expects_weights:
            return Response("broken, or asleep", status_code=400)
        if path == "/update_weight_version":
            self.version = given["new_version"]
        elif path == "/v1/unload_lora_adapter":
            del self.adapters[given["lora_name"]]
        elif path == "/v1/load_lora_adapter":
            self.adapters[given["lora_name"]] = self.base if self.deaf else self._adapted(Path(given["lora_path"]))
            self.most_adapters = max(self.most_adapters, len(self.adapters))
        elif path == "/collective_rpc" and not self.deaf:
            self.model.load_state_dict(load_file(Path(given["kwargs"]["weights_path"]) / "model.safetensors"))
        elif path in ("/pause", "/resume"):
            self.paused = path == "/pause"
        return JSONResponse({})

    async def updated(self, request: Request) -> Response:
        """Join a group, or receive weights in it."""
        given, path = json.loads(await request.body()), request.url.path
        self.paths.append(path)
        work, comes_later = getattr(self, path[1:]), path in ("/update_weights", "/finish_weight_update")
        if path in self.broken or comes_later != (self.received is not None):
            return Response("broken, or not its turn", status_code=400)
        try:
            if not await asyncio.to_thread(work, **given):
                return Response("failed half-way", status_code=500)
        except RuntimeError as error:
            return Response(str(error), status_code=500)
        return JSONResponse({})

    def init_weight_transfer_engine(self, init_info: Answer) -> bool:
        with ThreadPoolExecutor(self.workers) as pool:
            ranks = range(init_info["rank_offset"], init_info["rank_offset"] + self.workers)
            self.groups = list(pool.map(lambda rank: self._member(init_info, rank), ranks))
        return True

    def _member(self, told: Answer, rank: int) -> StoreGroup:
        return StoreGroup(base64.b64decode(told["nccl_unique_id_b64"]), told["world_size"], None, rank, self.closed)

    def start_weight_update(self) -> bool:
        self.received = [{} for _ in self.groups]
        return True

    def update_weights(self, update_info: Answer) -> bool:
        with ThreadPoolExecutor(self.workers) as pool:
            return all(pool.map(partial(self._receive, update_info), self.groups, self.received or []))

    def _receive(self, told: Answer, group: StoreGroup, received: dict[str, torch.Tensor]) -> bool:
        lists = zip(told["names"], told["dtype_names"], told["shapes"], strict=True)
        for count, (name, dtype, shape) in enumerate(lists):
            if count == self.stops_after:
                return False
            received[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            group.broadcast(received[name])
        return True

    def finish_weight_update(self) -> bool:
        for weights in self.received or []:
            if not self.deaf:
                self.model.load_state_dict(weights)
        self.latest, self.received = self.received or [], None
        return True

    async def counted(self, request: Request) -> Response:
        return JSONResponse({"world_size": self.workers} if "/get_world_size" not in self.broken else {})

    async def slept(self, request: Request) -> Response:
        """Fall asleep or wake up; at level 2, the weights are lost."""
        self.paths.append(request.url.path)
        self.asleep = int(request.query_params.get("level", 0))
        for weight in self.model.parameters() if self.asleep == 2 else ():
            weight.data.zero_()
        return JSONResponse({})

    def guarded(self, app: Any) -> Any:
        """Return the application behind the key."""

        async def answer(scope: Any, receive: Any, send: Any) -> None:
            given = dict(scope.get("headers", ())).get(b"authorization")
            if (
                self.key
                and scope["type"] == "http"
                and scope["path"] != "/health"
                and given != f"Bearer {self.key}".encode()
            ):
                await Response("no key", status_code=401)(scope, receive, send)
            else:
                await app(scope, receive, send)

        return answer

    async def described(self, request: Request) -> Response:
        return JSONResponse({"asleep": self.asleep, "paths": self.paths, "version": self.version})

    def _adapted(self, folder: Path) -> Any:
        # `from_pretrained` changes global state of transformers, which a thread must not do beside a test.
        model = get_peft_model(copy.deepcopy(self.base), LoraConfig.from_pretrained(str(folder)))
        set_peft_model_state_dict(model, load_file(folder / "adapter_model.safetensors"))
        return model

    @staticmethod
    @torch.no_grad()
    def _logits(model: Any, ids: list[int]) -> torch.Tensor:
        return model(torch.tensor([ids])).logits[0].float()  # type: ignore[no-any-return]


def is_probe(request: Answer) -> bool:
    """Whether a request compares weights."""
    return "stop_token_ids" not in request["sampling_params"]


@contextmanager
def serving(folder: Path, port: int = 0, host: str = "127.0.0.1", key: str = "") -> Iterator[StandIn]:
    """Serve a model on a free port, or this one."""
    one = StandIn(folder)
    one.key = key
    told = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/collective_rpc", "/reset_prefix_cache")
    told += ("/pause", "/resume", "/shutdown_weight_transfer_engine")
    routes = [Route(path, one.told, methods=["POST"]) for path in (*told, "/update_weight_version")]
    updated = ("/start_weight_update", "/update_weights", "/finish_weight_update", "/init_weight_transfer_engine")
    routes += [Route(path, one.updated, methods=["POST"]) for path in updated]
    routes += [Route("/get_world_size", one.counted), Route("/v1/models", one.named)]
    routes += [Route("/v1/completions", one.completed, methods=["POST"])]
    routes += [Route("/tokenize", one.tokenised, methods=["POST"])]
    routes += [Route(path, one.slept, methods=["POST"]) for path in ("/sleep", "/wake_up")]
    routes += [Route("/inference/v1/generate", one.generate, methods=["POST"]), Route("/health", one.described)]
    server = uvicorn.Server(
        uvicorn.Config(one.guarded(Starlette(routes=routes)), host=host, port=port, log_level="error")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 120
    while not (server.started and server.servers):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    one.url = f"http://{host}:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield one
    finally:
        one.closed.set()
        server.should_exit = True
        thread.join(10)


if __name__ == "__main__":  # as a process that a run starts instead of vLLM
    folder, port, host = (sys.argv[sys.argv.index(flag) + 1] for flag in ("--model", "--port", "--host"))
    with serving(Path(folder), int(port), host, os.environ["VLLM_API_KEY"]):
        threading.Event().wait()

"""A small server with the endpoints of vLLM that Cavesson uses, written against vLLM's documentation.

It shows what happens when a server fails, which a real one does not do on demand; the tests in tests/engines run the
real one.
"""

import asyncio
import copy
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from transformers import AutoModelForCausalLM

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
        self.broken: set[str] = set()
        """paths that fail"""

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
        if path in self.broken or self.asleep:
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

    async def slept(self, request: Request) -> Response:
        """Fall asleep or wake up; at level 2, the weights are lost."""
        self.paths.append(request.url.path)
        self.asleep = int(request.query_params.get("level", 0))
        for weight in self.model.parameters() if self.asleep == 2 else ():
            weight.data.zero_()
        return JSONResponse({})

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
def serving(folder: Path, port: int = 0) -> Iterator[StandIn]:
    """Serve a model on a free port, or this one."""
    one = StandIn(folder)
    told = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/collective_rpc", "/reset_prefix_cache")
    told += ("/pause", "/resume")
    routes = [Route(path, one.told, methods=["POST"]) for path in (*told, "/update_weight_version")]
    routes += [Route(path, one.slept, methods=["POST"]) for path in ("/sleep", "/wake_up")]
    routes += [Route("/inference/v1/generate", one.generate, methods=["POST"]), Route("/health", one.described)]
    server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 120
    while not (server.started and server.servers):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    one.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield one
    finally:
        server.should_exit = True
        thread.join(10)


if __name__ == "__main__":  # as a process that a run starts instead of vLLM
    words = sys.argv
    with serving(Path(words[words.index("--model") + 1]), int(words[words.index("--port") + 1])):
        threading.Event().wait()

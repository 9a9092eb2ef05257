"""A small server with the endpoints of vLLM that Cavesson uses, written against vLLM's documentation.

It shows what happens when a server fails, which a real one does not do on demand; the tests in tests/engines run the
real one.
"""

import asyncio
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import uvicorn
from peft import PeftModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from transformers import AutoModelForCausalLM

Answer = dict[str, Any]


class StandIn:
    """Samples from the model in a folder; `spoil` changes its answers.

    A `deaf` one ignores new weights; a `hasty` one ends each response after a token if it has stop texts, as a server
    that decodes texts differently may.
    """

    def __init__(self, folder: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder)
        self.base, self.version, self.url = folder, "default", ""
        self.adapters: dict[str, Any] = {}
        self.requests: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.spoil: Callable[[Answer], Answer | Response] = lambda answer: answer
        self.deaf, self.hasty, self.delay = False, False, 0.0

    async def generate(self, request: Request) -> Response:
        given = json.loads(await request.body())
        self.requests.append(given)
        await asyncio.sleep(self.delay)
        params, ids = given["sampling_params"], list(given["token_ids"])
        if given.get("model") not in (None, *self.adapters):
            return JSONResponse({"error": "no such model"}, status_code=404)
        model = self.adapters.get(given.get("model"), self.model)
        prompt_logprobs = None
        if "prompt_logprobs" in params:
            rows = self._logits(model, ids).log_softmax(-1)
            prompt_logprobs = [
                None,
                *({str(t): {"logprob": float(row[t])}} for row, t in zip(rows, ids[1:], strict=False)),
            ]
        draws, tokens = torch.Generator().manual_seed(params.get("seed", 0) % 2**63), []
        for count in range(params["max_tokens"]):
            logits = self._logits(model, ids)[-1] / params.get("temperature", 1.0)
            if count < params.get("min_tokens", 0):
                logits[params["stop_token_ids"]] = -math.inf
            logprob = logits.log_softmax(-1)
            token = int(torch.multinomial(logprob.exp(), 1, generator=draws))
            tokens.append({"token_id": token, "logprob": float(logprob[token])})
            ids.append(token)
            if token in params.get("stop_token_ids", ()) or (self.hasty and params.get("stop")):
                break
        choice = {
            "index": 0,
            "token_ids": [token["token_id"] for token in tokens],
            "logprobs": {"content": tokens},
            "weight_versions": [{"version": self.version, "start": 0, "end": len(tokens)}],
        }
        answer = self.spoil({"choices": [choice], "prompt_logprobs": prompt_logprobs})
        return answer if isinstance(answer, Response) else JSONResponse(answer)

    async def told(self, request: Request) -> Response:
        given, path = json.loads(await request.body()), request.url.path
        self.paths.append(path)
        if path.endswith("/update_weight_version"):
            self.version = given["new_version"]
        elif path.endswith("/unload_lora_adapter"):
            del self.adapters[given["lora_name"]]
        elif path.endswith("/load_lora_adapter"):
            base = AutoModelForCausalLM.from_pretrained(self.base)
            self.adapters[given["lora_name"]] = (
                base if self.deaf else PeftModel.from_pretrained(base, given["lora_path"])
            )
        elif path.endswith("/collective_rpc") and not self.deaf:
            self.model = AutoModelForCausalLM.from_pretrained(given["kwargs"]["weights_path"])
        return JSONResponse({})

    @staticmethod
    @torch.no_grad()
    def _logits(model: Any, ids: list[int]) -> torch.Tensor:
        return model(torch.tensor([ids])).logits[0].float()  # type: ignore[no-any-return]


@contextmanager
def serving(folder: Path) -> Iterator[StandIn]:
    """Serve a model on a free port."""
    one = StandIn(folder)
    told = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/collective_rpc", "/reset_prefix_cache")
    routes = [Route(path, one.told, methods=["POST"]) for path in (*told, "/update_weight_version")]
    app = Starlette(routes=[Route("/inference/v1/generate", one.generate, methods=["POST"]), *routes])
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
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

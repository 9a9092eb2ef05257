"""A vLLM server with a guard: every request needs the run's key, except for the server's health.

vLLM (0.32) itself asks for its key only under some paths; others replace its weights or call its functions. This file
is run as a script by a Python that may not have Cavesson: only the standard library can be used here. It has a folder
of its own because Python looks for modules beside a script first, which is how vLLM finds the guard.
"""

import hmac
import os
import runpy
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Application = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]


class Guard:
    """Answers requests without the key in the variable VLLM_API_KEY with 401."""

    def __init__(self, app: Application) -> None:
        self.app = app
        self.expected = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        if scope["type"] == "lifespan" or scope["path"] == "/health" or self._has_key(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})

    def _has_key(self, scope: Message) -> bool:
        return hmac.compare_digest(dict(scope["headers"]).get(b"authorization", b""), self.expected)


if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)

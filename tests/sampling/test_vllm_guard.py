"""The guard of a vLLM server: without the key, only the server's health is told."""

import runpy
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect

from cavesson.rollout.engines.guarded import cavesson_guard


async def done(request: Request) -> PlainTextResponse:
    return PlainTextResponse("done")


async def talk(socket: WebSocket) -> None:
    await socket.accept()
    await socket.send_text("done")
    await socket.close()


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> TestClient:
    monkeypatch.setenv("VLLM_API_KEY", "a key")
    # As the server imports it: without the package.
    guard: Any = runpy.run_path(cavesson_guard.__file__)["Guard"]
    app = Starlette(
        routes=[WebSocketRoute("/talk", talk), Route("/{path:path}", done, methods=["GET", "POST", "OPTIONS"])]
    )
    return TestClient(guard(app))


@pytest.mark.parametrize(
    "path", ["/v1/models", "/inference/v1/generate", "/collective_rpc", "/pause", "/", "/health/x"]
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_requests_need_the_key(client: TestClient, path: str, method: str) -> None:
    for headers in ({}, {"Authorization": "Bearer another"}, {"Authorization": "a key"}, {"Authorization": "Bearer "}):
        assert client.request(method, path, headers=headers).status_code == 401
    assert client.request(method, path, headers={"Authorization": "Bearer a key"}).text == "done"


def test_the_health_is_told_to_everyone(client: TestClient) -> None:
    assert client.get("/health").text == "done"


def test_sockets_need_the_key(client: TestClient) -> None:
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/talk"):
        pass
    with client.websocket_connect("/talk", headers={"Authorization": "Bearer a key"}) as socket:
        assert socket.receive_text() == "done"

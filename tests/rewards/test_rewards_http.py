"""The HTTP reward against a real server on this machine: one that answers, fails, stalls and answers nonsense."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
import uvicorn
from account_helpers import account
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import cavesson
from cavesson import endpoint
from cavesson.algorithms.ppo import PPORun
from cavesson.config import check
from cavesson.errors import UserCodeError, UserError
from cavesson.rollout.rewards.http import HttpReward
from cavesson.train.run import Training


class Server:
    """What the server was asked, when, and how many requests it worked on at the same time."""

    def __init__(self) -> None:
        self.url = ""
        self.seen: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        self.busy = self.most_busy = 0
        self.stalls_after = 1 << 30
        """number of requests after which none is answered"""
        self.all_here = asyncio.Event()

    async def lengths(self, request: Request) -> Response:
        self._note(request, given := json.loads(await request.body()))
        self.busy += 1
        self.most_busy = max(self.busy, self.most_busy)
        stalls = len(self.seen) > self.stalls_after
        await asyncio.sleep(5 if stalls else float(request.query_params.get("sleep", 0)))
        if "together" in request.query_params:
            if self.busy == int(request.query_params["together"]):
                self.all_here.set()
            await self.all_here.wait()
        self.busy -= 1
        lengths = [len(response) for response in given["responses"]]
        if request.path_params["kind"] == "parts":
            return JSONResponse({"rewards": {"length": lengths, "half": [n / 2 for n in lengths]}})
        return JSONResponse({"rewards": lengths})

    async def failing(self, request: Request) -> Response:
        """Fail as often as it is asked to, then answers."""
        self._note(request, given := json.loads(await request.body()))
        query = request.query_params
        if len(self.times) <= int(query["times"]):
            named = {"Retry-After": query.get("after"), "Location": query.get("to")}
            headers = {name: value for name, value in named.items() if value is not None}
            return Response("busy", status_code=int(query["status"]), headers=headers)
        return JSONResponse({"rewards": [1.0] * len(given["responses"])})

    async def stalling(self, request: Request) -> Response:
        self._note(request, {})

        async def drops() -> Any:
            for _ in range(100):
                yield b" "
                await asyncio.sleep(0.05)

        return StreamingResponse(drops())

    async def saying(self, request: Request) -> Response:
        self._note(request, {})
        query = request.query_params
        headers = {"Content-Encoding": query["encoding"]} if "encoding" in query else {}
        return Response(query["text"] * int(query.get("times", 1)), headers=headers)

    async def naming(self, request: Request) -> Response:
        """Has one part, named like the first response."""
        self._note(request, given := json.loads(await request.body()))
        return JSONResponse({"rewards": {given["responses"][0]: [1.0] * len(given["responses"])}})

    def _note(self, request: Request, given: dict[str, Any]) -> None:
        self.times.append(time.monotonic())
        self.seen.append(given)
        self.headers.append(dict(request.headers))


@contextmanager
def listening(config: uvicorn.Config) -> Iterator[str]:
    """A server on a free port of this machine; yields its URL."""
    place = socket.create_server(("127.0.0.1", 0))
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [place]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{place.getsockname()[1]}"
    finally:
        running.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


@contextmanager
def serving(server: Server) -> Iterator[None]:
    routes = [
        Route("/lengths/{kind}", server.lengths, methods=["POST"]),
        Route("/failing", server.failing, methods=["POST"]),
        Route("/stalling", server.stalling, methods=["POST"]),
        Route("/saying", server.saying, methods=["POST"]),
        Route("/naming", server.naming, methods=["POST"]),
    ]
    config = uvicorn.Config(Starlette(routes=routes), log_level="error", timeout_graceful_shutdown=1)
    with listening(config) as server.url:
        yield


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    with serving(server):
        yield server


def refused(server: Server, path: str, *parts: str, **options: Any) -> float:
    """One line that names the URL; return how long it took."""
    start = time.monotonic()
    with pytest.raises(UserCodeError) as error:
        HttpReward(url=f"{server.url}{path}", **options)(["a", "b"], ["c", "d"])
    assert str(error.value).startswith(f"the reward at {server.url}{path} ") and "\n" not in str(error.value)
    assert [part for part in parts if part not in str(error.value)] == [], str(error.value)
    return time.monotonic() - start


def test_every_response_gets_its_reward_whatever_the_batches(server):
    reward = HttpReward(url=f"{server.url}/lengths/plain", batch_size=3, concurrency=2)
    responses = ["x" * n for n in (5, 0, 7, 1, 9, 2, 3)]
    prompts, truth = [f"prompt {n}" for n in range(7)], [{"n": n, "also": None} for n in range(7)]
    assert reward(prompts, responses, truth=truth) == [5, 0, 7, 1, 9, 2, 3]
    asked = sorted(server.seen, key=lambda one: one["prompts"])
    assert [len(one["responses"]) for one in asked] == [3, 3, 1]
    assert [text for one in asked for text in one["prompts"]] == prompts
    assert [text for one in asked for text in one["responses"]] == responses
    assert [value for one in asked for value in one["columns"]["truth"]] == truth


def test_parts_keep_their_names(server):
    reward = HttpReward(url=f"{server.url}/lengths/parts", batch_size=1)
    assert reward(["", ""], ["abc", "é\ud800"]) == {"length": [3, 2], "half": [1.5, 1.0]}


@pytest.mark.parametrize("limit", [1, 3])
def test_no_more_requests_at_a_time_than_allowed(server, limit):
    reward = HttpReward(url=f"{server.url}/lengths/plain?sleep=0.1", batch_size=1, concurrency=limit)
    reward([""] * 6, ["r"] * 6)
    assert server.most_busy == limit


def test_as_many_requests_at_a_time_as_allowed_even_above_the_limit_of_httpx(server):
    """httpx opens at most 100 connections by default, and a server that waits for all 130 would never answer."""
    count = 130
    url = f"{server.url}/lengths/plain?together={count}"
    reward = HttpReward(url=url, batch_size=1, concurrency=count, timeout=20, attempts=1)
    assert reward([""] * count, ["abc"] * count) == [3] * count
    assert server.most_busy == count


def test_it_works_inside_an_event_loop_as_in_a_notebook(server):
    async def cell() -> Any:
        return HttpReward(url=f"{server.url}/lengths/plain")([""], ["abc"])

    assert asyncio.run(cell()) == [3]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_may_pass_is_tried_again(server, status):
    reward = HttpReward(url=f"{server.url}/failing?times=1&status={status}")
    assert reward(["a"], ["b"]) == [1.0]
    assert len(server.times) == 2


@pytest.mark.parametrize("as_date", [False, True])
def test_a_server_is_asked_again_when_it_said(server, as_date):
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=3), usegmt=True)  # whole seconds: 2 to 3 from now
    after = date.replace(" ", "%20") if as_date else "2"
    reward = HttpReward(url=f"{server.url}/failing?times=1&status=429&after={after}")
    assert reward(["a"], ["b"]) == [1.0]
    assert server.times[1] - server.times[0] > 1.5  # without the header: at most 1.5


@pytest.mark.parametrize("after", ["1000", "9" * 400, "Fri,%2031%20Dec%209999%2023:59:59%20-2359"])
def test_no_server_makes_a_run_wait_for_longer_than_the_longest_wait(server, monkeypatch, after):
    monkeypatch.setattr(endpoint, "_LONGEST_WAIT", 0.1)
    assert HttpReward(url=f"{server.url}/failing?times=1&status=503&after={after}")(["a"], ["b"]) == [1.0]
    assert 0.1 <= server.times[1] - server.times[0] < 30


@pytest.mark.parametrize(
    "after",
    [
        "Mon,%2001%20Jan%200001%2000:00:00%20%2B2359",
        "Fri,%2031%20Dec%2099999999999999999999%2023:59:59%20GMT",
        "Fri,%2031%20Dec%202026%2023:59:59%20-99999999999999999999",
        "soon", "-5", "1e999",
    ],
)  # fmt: skip
def test_a_time_that_is_none_is_no_reason_to_fail(server, after):
    assert HttpReward(url=f"{server.url}/failing?times=1&status=503&after={after}")(["a"], ["b"]) == [1.0]
    assert server.times[1] - server.times[0] < 30


def test_what_does_not_pass_is_said_after_the_last_attempt(server):
    refused(server, "/failing?times=9&status=503", "answered 503 Service Unavailable (2 attempts)", attempts=2)
    assert len(server.times) == 2


@pytest.mark.parametrize("status", [400, 401, 404, 301, 307])
def test_what_will_not_pass_is_said_at_once(server, status):
    """Nor are texts and secrets sent to another place that a server names."""
    refused(server, f"/failing?times=9&status={status}&to=/lengths/plain", f"answered {status} ", "'busy'")
    assert len(server.times) == 1


def test_an_answer_that_drips_is_not_waited_for(server):
    took = refused(server, "/stalling", "did not answer within 0.3 seconds (1 attempts)", timeout=0.3, attempts=1)
    assert took < 4.5  # the whole answer takes five


def test_a_server_that_is_not_there():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    gone = Server()
    gone.url = f"http://127.0.0.1:{port}"
    refused(gone, "/score", "cannot be reached: ConnectError", "(2 attempts)", attempts=2)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "must answer"),
        ("<html>busy</html>", "'<html>busy</html>'"),
        ('{"scores": [1, 2]}', "rewards: Field required"),
        ('{"rewards": [1]}', "answered 1 rewards for 2 responses"),
        ('{"rewards": [1, 2, 3]}', "answered 3 rewards for 2 responses"),
        ('{"rewards": {}}', "answered 0 rewards for 2 responses"),
        ('{"rewards": {"a": [1, 2], "b": [1]}}', "answered 1 rewards for 2 responses"),
        ('{"rewards": [1, NaN]}', "rewards.1: Input should be a finite number"),
        ('{"rewards": [1, Infinity]}', "rewards.1: Input should be a finite number"),
        ('{"rewards": [1, "2"]}', "rewards.1: Input should be a valid number"),
        ('{"rewards": [1, true]}', "rewards.1: "),
        ('{"rewards": [1, 1%s]}' % ("0" * 400), "rewards.1: "),
        ('{"rewards": 1}', "rewards"),
        ("[1, 2]", "must answer"),
        ("[" * 10_000, "must answer"),
    ],
)  # fmt: skip
def test_anything_but_one_finite_number_per_response_is_refused(server, text, part):
    refused(server, f"/saying?text={text.replace(' ', '%20')}", part)
    assert len(server.times) == 1  # nonsense is not asked for again


def test_every_request_must_get_the_same_parts(server):
    assert HttpReward(url=f"{server.url}/naming")(["a", "b"], ["c", "d"]) == {"c": [1.0, 1.0]}
    refused(server, "/naming", "answered the parts ['c'] to one request and ['d'] to another", batch_size=1)


def test_an_answer_that_is_too_large_or_cannot_be_decoded_is_refused(server, monkeypatch):
    monkeypatch.setattr(endpoint, "_LARGEST_ANSWER", 1 << 20)
    refused(server, "/saying?text=x&times=1048577", "answered more than 1 MB")
    refused(server, "/saying?text=x&times=1048576", "must answer")
    refused(server, "/saying?text=nonsense&encoding=gzip", "answered something that cannot be decoded")
    assert len(server.times) == 3


def test_columns_that_json_cannot_say(server):
    reward = HttpReward(url=f"{server.url}/lengths/plain")
    for value in (object(), float("nan")):
        with pytest.raises(UserCodeError, match=r"cannot be sent the columns answer: "):
            reward(["a"], ["b"], answer=[value])
    assert server.seen == []


def test_secrets_come_from_the_environment_and_stay_there(server, monkeypatch):
    options = {"url": f"{server.url}/lengths/plain", "headers_env": {"Authorization": "MY_TOKEN"}}
    with pytest.raises(UserError, match="environment variable MY_TOKEN, which is not set"):
        HttpReward(**options)
    monkeypatch.setenv("MY_TOKEN", "Bearer abc")
    reward = HttpReward(**options)
    reward(["a"], ["b"])
    assert server.headers[0]["authorization"] == "Bearer abc"
    assert "abc" not in str(reward.settings)


def test_secrets_can_be_in_files_and_so_can_the_url(server, tmp_path, monkeypatch):
    (tmp_path / "token").write_text("Bearer of-a-file\n")
    (tmp_path / "url").write_text(f"{server.url}/lengths/plain?token=Zq9xYw81\n")
    monkeypatch.setenv("MY_URL", f"{server.url}/lengths/plain?token=Zq9xYw81")
    headers = {"Authorization": f"file:{tmp_path / 'token'}"}
    for url in ("env:MY_URL", f"file:{tmp_path / 'url'}"):
        reward = HttpReward(url=url, headers_env=headers)
        assert reward(["a"], ["b"]) == [1.0]
        assert server.headers[-1]["authorization"] == "Bearer of-a-file"
        assert str(reward.endpoint.failed("failed")) == f"the reward at {url} failed"
        assert "Zq9xYw81" not in str(reward.settings)
    for url in ("env:NOT_SET", f"file:{tmp_path / 'none'}", f"file:{tmp_path / 'token'}"):
        with pytest.raises(UserError, match=r"which is not set|cannot be read|is not a URL") as raised:
            HttpReward(url=url)
        assert "of-a-file" not in str(raised.value)


def test_a_run_with_it_records_everything_but_the_secret(server, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "Bearer very-secret")
    options = {"url": f"{server.url}/lengths/parts", "headers_env": {"Authorization": "MY_TOKEN"}, "batch_size": 3}
    values = {
        "run": tmp_path / "run", "steps": 2, "batch_size": 4, "sampling": {"max_new_tokens": 4},
        "model": {"device": "cpu"}, "rewards": [{"use": "http", "name": "length", "options": options}],
    }  # fmt: skip
    Training(check(PPORun, values, "test"), prompts=["one", "two"]).run(report=lambda *_: None)
    rows = cavesson.open(tmp_path / "run").rows().to_pylist()
    assert [dict(row["reward_parts"])["length/length"] for row in rows] == [len(row["response"]) for row in rows]
    assert {headers["authorization"] for headers in server.headers} == {"Bearer very-secret"}
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert b"MY_TOKEN" in (tmp_path / "run" / "run.json").read_bytes()
    assert [path for path in files if b"very-secret" in path.read_bytes()] == []


@pytest.mark.slow
def test_a_server_that_times_out_leaves_a_run_that_resumes(server, tmp_path):
    prompts = ["one", "two", "three"]
    options = {"url": f"{server.url}/lengths/plain", "batch_size": 2, "timeout": 2, "attempts": 2}
    values = {
        "run": tmp_path / "run", "steps": 4, "batch_size": 4, "sampling": {"max_new_tokens": 4},
        "model": {"device": "cpu"}, "rewards": [{"use": "http", "name": "length", "options": options}],
        "checkpoint": {"every": 0},
    }  # fmt: skip
    training = Training(check(PPORun, values, "test"), prompts=prompts)
    server.stalls_after = len(server.seen) + 2 * 2  # two steps of two requests
    with pytest.raises(UserCodeError, match=r"did not answer within 2 seconds \(2 attempts\)") as error:
        training.run(report=lambda *_: None)
    assert "the steps before step 2 are recorded" in str(error.value) and len(str(error.value).splitlines()) == 2
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1
    server.stalls_after = 1 << 30
    Training(check(PPORun, values, "test"), prompts=prompts, resume=True).run(report=lambda *_: None)
    account(tmp_path / "run", prompts, 4)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({}, "'url' is missing"),
        ({"url": "localhost:8000"}, "url"),
        ({"url": "ftp://x/y"}, "url"),
        ({"url": "http://me:secret@host/"}, "headers_env"),
        ({"url": "http://[::1/"}, "url"),
        ({"url": "http://x", "batch_size": 0}, "batch_size"),
        ({"url": "http://x", "timeout": "long"}, "timeout"),
        ({"url": "http://x", "attemps": 3}, "attempts"),
    ],
)
def test_mistakes_in_the_options_are_one_line(options, part):
    with pytest.raises(UserError) as error:
        HttpReward(**options)
    assert part in str(error.value) and "\n" not in str(error.value) and str(error.value).startswith("reward 'http'")

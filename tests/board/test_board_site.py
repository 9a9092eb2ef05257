"""The page is answered before the runs are open; requests for data wait for them."""

import asyncio
import gzip
import json
from concurrent.futures import Future
from threading import Event

import pytest
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient
from starlette.types import ASGIApp

from cavesson.board import site
from cavesson.board.page import VIEWS
from cavesson.board.security import Guard
from cavesson.board.site import Site


@pytest.fixture
def static(tmp_path, monkeypatch):
    for name in ("index.html", "board.js", "board.css", "icon.svg"):
        (tmp_path / name).write_text(f"this is {name}")
    monkeypatch.setattr(site, "STATIC", tmp_path)


async def answered(app: ASGIApp, path: str, method: str = "GET") -> tuple[int, str, bytes]:
    """Return status, type and body of an answer."""
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": []}
    await app(scope, None, send)
    headers = dict(sent[0]["headers"])
    return sent[0]["status"], headers[b"content-type"].decode(), b"".join(part["body"] for part in sent[1:])


def test_the_page_does_not_wait_for_the_runs_and_the_data_does(static):
    async def visit():
        opening = Future()
        app = Site(opening)
        data = asyncio.ensure_future(answered(app, "/api/runs"))
        given_up = asyncio.ensure_future(answered(app, "/api/runs"))
        page = await answered(app, "/")
        await asyncio.sleep(0.01)
        given_up.cancel()
        await asyncio.sleep(0.01)
        assert not data.done()
        opening.set_result(PlainTextResponse("the runs"))
        return page, await data, await answered(app, "/api/other")

    page, data, later = asyncio.run(visit())
    assert page == (200, "text/html; charset=utf-8", b"this is index.html")
    assert data[2] == later[2] == b"the runs"


def test_it_says_when_the_runs_are_needed(static):
    class Kept:
        def answer(self, path, query):
            return {"/api/runs": b"kept", "/api/runs/run/series": b"kept, too"}.get(path)

    async def visit():
        opening, asked = Future(), Event()
        app = Site(opening, Kept(), asked)
        first = [await answered(app, path) for path in ("/", "/api/runs", "/api/runs/run/series")]
        assert [one[2] for one in first[1:]] == [b"kept", b"kept, too"] and not asked.is_set()
        data = asyncio.ensure_future(answered(app, "/api/runs/run/info"))
        await asyncio.sleep(0.01)
        assert asked.is_set() and not data.done()
        opening.set_result(PlainTextResponse("the runs"))
        return await data

    assert asyncio.run(visit())[2] == b"the runs"


def test_only_a_whole_answer_without_an_error_is_kept(static):
    class Keeping:
        def __init__(self):
            self.kept = []

        def answer(self, path, query):
            return None

        def keep(self, path, query, body):
            self.kept.append((path, query, body))

    async def in_parts(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": b"the ", "more_body": True})
        await send({"type": "http.response.body", "body": b"runs"})

    async def visit(api):
        opening, ready = Keeping(), Future()
        ready.set_result(api)
        await answered(Site(ready, opening), "/api/runs")
        return opening.kept

    assert asyncio.run(visit(PlainTextResponse("the disk is gone", 500))) == []
    assert asyncio.run(visit(in_parts)) == [("/api/runs", "", b"the runs")]


def test_the_page_has_its_files_and_views_and_nothing_else(static):
    app = Site(Future())
    kinds = {"/board.js": "text/javascript", "/board.css": "text/css", "/icon.svg": "image/svg+xml"}
    for path, kind in (kinds | dict.fromkeys(["/", *(f"/{view}" for view in VIEWS)], "text/html")).items():
        status, found, _ = asyncio.run(answered(app, path))
        assert status == 200 and found.startswith(kind), path
    for path, kind in {"/nonsense": "text/html", "/a/b": "application/json", "/api": "application/json"}.items():
        status, found, body = asyncio.run(answered(app, path))
        assert status == 404 and found.startswith(kind), path
        assert kind == "text/html" or json.loads(body) == {"error": f"there is no page {path}"}
    for path in ("/../x", "/board.js/x", "/favicon.ico", "/tokens/"):
        assert asyncio.run(answered(app, path))[0] == 404, path
    assert asyncio.run(answered(app, "/", "POST"))[0] == 405


def test_the_files_of_the_page_are_sent_compressed_and_once(tmp_path, monkeypatch):
    monkeypatch.setattr(site, "STATIC", tmp_path)
    script = b"let recorded = 1;" * 1000
    (tmp_path / "index.html").write_text("this is the page")
    (tmp_path / "board.js").write_bytes(script)
    (tmp_path / "board.js.gz").write_bytes(gzip.compress(script))
    client = TestClient(Guard(Site(Future()), None), base_url="http://127.0.0.1:6008")
    sizes = {}
    for encoding in ("gzip, deflate, br", "identity"):
        first = client.get("/board.js", headers={"accept-encoding": encoding})
        assert (first.status_code, first.content, first.headers["cache-control"]) == (200, script, "no-cache")
        assert first.headers.get("content-encoding") == ("gzip" if "gzip" in encoding else None)
        sizes[first.headers["etag"]] = int(first.headers["content-length"])
        again = client.get("/board.js", headers={"accept-encoding": encoding, "if-none-match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    assert sorted(sizes.values()) == [len(gzip.compress(script)), len(script)]
    (tmp_path / "board.js").write_bytes(script[:-17])  # built again
    asked = {"accept-encoding": "identity", "if-none-match": ", ".join(sizes)}
    assert client.get("/board.js", headers=asked).content == script[:-17]
    # The page of a view that there is not is not the same answer as the page.
    page = client.get("/")
    assert client.get("/nonsense", headers={"if-none-match": page.headers["etag"]}).status_code == 404
    assert client.get("/board.js.gz").text == page.text
    assert client.get("/api").headers["cache-control"] == "no-store"


def test_without_a_page_it_is_said_how_to_build_it(tmp_path, monkeypatch):
    monkeypatch.setattr(site, "STATIC", tmp_path / "none")
    status, _, body = asyncio.run(answered(Site(Future()), "/"))
    assert status == 404 and b"npm run build" in body

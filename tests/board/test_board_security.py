import json
import string
import subprocess
import sys
from urllib.parse import quote, urljoin

import pytest
from board_helpers import HOST, ORIGIN, client_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cavesson.board.page import STATIC
from cavesson.board.security import CONTENT_SECURITY_POLICY, is_loopback
from cavesson.board.serve import _address
from cavesson.errors import UserError

NOTE = "/api/runs/run/labels/1/1"
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def guarded(board):
    return client_of(board, token="s3cret", follow_redirects=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:9", "localhost:6008", "LOCALHOST", "[::1]:6008", "127.8.9.1"])
def test_names_of_this_machine_are_answered(client, host):
    assert client.get("/api/runs", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.com",
        "localhost.evil.com",
        "127.0.0.1.evil.com",
        "192.168.1.2:6008",
        "",
        "[::2]",
        "evil.com:127.0.0.1",
        "0.0.0.0",
    ],
)
def test_other_names_are_refused_for_every_address(client, host):
    for path in ("/api/runs", "/", "/board.js", "/api/events", "/api/openapi.json", "/nothing"):
        answer = client.get(path, headers={"host": host})
        assert answer.status_code == 403 and list(answer.json()) == ["error"], path


@settings(deadline=None)
@given(st.text(alphabet=string.ascii_letters + string.digits + ".:[]-@/", max_size=30))
@example("localhost@evil.com")
@example("127.1")
@example("2130706433")
def test_only_addresses_of_the_loopback_pass_as_such(host):
    if is_loopback(host):
        bare = host.strip("[]").lower().rstrip(".")
        assert (
            bare == "localhost"
            or bare.startswith("127.")
            or bare.replace("0", "").replace(":", "") in ("1", "")
            or ":ffff:127." in bare
        )


@pytest.mark.parametrize(
    "origin", ["http://evil.com", "null", "http://127.0.0.1:6009", "http://127.0.0.1:6008.evil.com"]
)
def test_pages_of_other_origins_are_refused(client, origin):
    assert client.get("/api/runs", headers={"origin": origin}).status_code == 403
    assert client.put(NOTE, json={"name": "star"}, headers={"origin": origin}).status_code == 403


def test_what_changes_something_needs_origin_and_json(client):
    note = {"name": "note", "value": "x"}
    assert client.put(NOTE, json=note).status_code == 403
    assert client.delete(NOTE).status_code == 403
    text = client.put(NOTE, content=json.dumps(note), headers=ORIGIN | {"content-type": "text/plain"})
    assert text.status_code == 403
    cross = client.put(NOTE, json=note, headers=ORIGIN | {"sec-fetch-site": "cross-site"})
    assert cross.status_code == 403
    assert client.get("/api/runs/run/labels").json() == []
    assert client.put(NOTE, json=note, headers=ORIGIN).status_code == 200
    assert client.put(NOTE, json=note | {"removed": True}, headers=ORIGIN).json()["labels"] == []
    assert client.get("/api/runs/run/labels").json() == []


def test_every_answer_has_the_strict_headers(client):
    for path in ("/api/runs", "/", "/api/runs/7/rows", "/api/nothing", "/x"):
        answer = client.get(path)
        assert answer.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
    refused = client.get("/", headers={"host": "evil.com"})
    assert refused.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert "unsafe" not in CONTENT_SECURITY_POLICY and "*" not in CONTENT_SECURITY_POLICY


def test_a_token_is_needed_for_everything_and_stays_out_of_addresses(guarded):
    for path in ("/api/runs", "/", "/board.js", "/api/events", "/?token=wrong", "/?token=", "/api/runs?token=S3CRET"):
        answer = guarded.get(path)
        assert answer.status_code == 401 and "s3cret" not in answer.text, path
    assert guarded.get("/api/runs", headers={"authorization": "Bearer s3cret"}).status_code == 200
    for wrong in ("Bearer ", "Bearer s3cre", "Basic s3cret", "s3cre", "Bearer é"):
        assert guarded.get("/api/runs", headers={"authorization": wrong.encode()}).status_code == 401, wrong
    opened = guarded.get("/overview?run=run&token=s3cret&x=%26")
    assert opened.status_code == 303 and opened.headers["location"] == "?run=run&x=%26"
    cookie = opened.headers["set-cookie"]
    assert "HttpOnly" in cookie and "samesite=strict" in cookie.lower()
    assert guarded.get("/api/runs").status_code == 200, "the cookie is enough"
    guarded.cookies.clear()
    assert guarded.get("/api/runs", headers={"cookie": b'cavesson_token_1="; bad=\x01'}).status_code == 401


def test_boards_on_one_host_do_not_log_each_other_out(board):
    """Browsers send cookies to all ports of a host."""
    boards = {token: client_of(board, token=token) for token in ("one", "two")}
    cookies = {}
    for token, client in boards.items():
        cookies |= client.get(f"/overview?token={token}", follow_redirects=False).cookies
    header = "; ".join(f"{name}={value}" for name, value in cookies.items())
    assert len(cookies) == 2
    for client in boards.values():
        client.cookies.clear()
        assert client.get("/api/runs", headers={"cookie": header}).status_code == 200


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("option", "value"), [("token", ""), ("token", " "), ("token", "a b"), ("token", "é"), ("host", "")]
)
def test_an_empty_token_or_host_is_an_error(folder, option, value):
    command = [sys.executable, "-m", "cavesson", "board", str(folder), "--no-browser", "--port", "0"]
    done = subprocess.run([*command, f"--{option}", value], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"cavesson: {'the ' if option == 'token' else '--'}{option} ")
    assert done.stderr.count("\n") == 1


def test_no_application_is_made_with_an_empty_token(board):
    with pytest.raises(UserError, match="the token is empty"):
        client_of(board, token="")


@settings(deadline=None, max_examples=50)
@given(st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=20), st.text(max_size=20))
@example('a&b=c#%41+;,\\"', "")
def test_every_token_that_can_be_given_is_taken_and_no_other(board, token, other):
    client = client_of(board, token=token, follow_redirects=False)
    assert client.get("/api/runs").status_code == 401
    opened = client.get(_address("127.0.0.1", 6008, token))
    assert opened.status_code == 303 and client.get("/api/runs").status_code == 200
    client.cookies.clear()
    assert client.get("/api/runs", headers={"authorization": f"Bearer {token}"}).status_code == 200
    assert client.get(f"/api/runs?token={quote(other, safe='')}").status_code == (303 if other == token else 401)


def test_a_redirect_stays_on_the_board(board):
    client = client_of(board, token="s3cret", follow_redirects=False)
    for path in ("//evil.com/", "/\\evil.com", "///evil.com", "//evil.com/%2f..", "/%2f/evil.com"):
        location = client.get(f"http://{HOST}{path}?token=s3cret").headers.get("location", "")
        assert not location.startswith(("//", "/\\", "http")), location


def test_a_redirect_stays_under_the_path_that_a_proxy_gave_the_board(board):
    client = client_of(board, token="s3cret", follow_redirects=False)
    for path, seen in {"/": "/lab/proxy/6008/", "/tokens": "/lab/proxy/6008/tokens"}.items():
        location = client.get(f"{path}?token=s3cret").headers["location"]
        assert urljoin(f"https://hub.example{seen}?token=s3cret", location) == f"https://hub.example{seen}"


def test_with_a_token_any_host_may_be_asked(guarded):
    answer = guarded.get("/api/runs", headers={"host": "gpu-box:6008", "authorization": "Bearer s3cret"})
    assert answer.status_code == 200


HOSTILE = st.sampled_from(
    ["../", "..%2f", "%2e%2e/", "..\\", "/etc/passwd", "run.json", "\x00", "%00", "index", "~", "state.json", "…/"]
)


@settings(deadline=None)
@given(st.lists(HOSTILE | st.text(max_size=8), max_size=6))
@example(["../", "../", "../", "../", "/etc/passwd"])
@example(["..%2f", "..%2f", "run.json"])
def test_no_address_leads_to_another_file(client, parts):
    answer = client.get("/" + quote("".join(parts), safe="/%.\\"))
    page = (STATIC / "index.html").read_bytes() if (STATIC / "index.html").is_file() else None
    own = [file.read_bytes() for file in STATIC.iterdir()] if page is not None else []
    if answer.status_code == 200:
        assert answer.content in own
    else:  # the page itself says that it has no such view
        assert answer.content == page or list(answer.json()) == ["error"]


@settings(deadline=None)
@given(st.sampled_from(["rollouts", "labels"]), st.text(max_size=12), st.text(max_size=12))
@example("rollouts", "1e3", "0")
@example("rollouts", "-1", "99999999999999999999")
@example("rollouts", "１", "٣")
def test_names_of_rollouts_are_numbers_or_refused(client, kind, step, sample):
    answer = client.get(f"/api/runs/run/{kind}/{quote(step, safe='')}/{quote(sample, safe='')}")
    assert answer.status_code in (200, 404, 405, 422)


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["sort", "steps", "filter", "q", "regex", "offset", "limit", "starred", "x"]),
        st.text(max_size=30),
        max_size=4,
    )
)
@example({"steps": "5-" + "9" * 25})
@example({"filter": "reward > 1e999"})
@example({"q": "\x00"})
@example({"q": "(", "regex": "1"})
@example({"sort": "-" * 190})
def test_no_query_breaks_the_table(client, parameters):
    answer = client.get("/api/runs/run/rows", params=parameters)
    assert answer.status_code in (200, 400, 422)
    assert answer.status_code == 200 or "\n" not in answer.json()["error"]


def test_bodies_are_bounded_and_must_be_objects(client):
    for body, status in (
        (b"[1]", 400),
        (b"{", 400),
        (b'"x"', 400),
        (b"{}" + b" " * 1_000_001, 413),
        (b'{"name": "note", "value": 3}', 422),
    ):
        assert client.put(NOTE, content=body, headers=ORIGIN | JSON).status_code == status, body[:10]
    long = json.dumps({"name": "note", "value": "x" * 10_001})
    assert client.put(NOTE, content=long, headers=ORIGIN | JSON).status_code == 422


def test_a_body_without_a_length_is_bounded_too(client):
    def endless():
        for _ in range(3_000):
            yield b" " * 1_000

    answer = client.put(NOTE, content=endless(), headers=ORIGIN | JSON)
    assert answer.status_code == 413


def test_two_hosts_or_none_are_refused(board):
    client = client_of(board)
    request = client.build_request("GET", "/api/runs")
    request.headers = type(request.headers)([("host", "127.0.0.1"), ("host", "evil.com")])
    assert client.send(request).status_code == 400

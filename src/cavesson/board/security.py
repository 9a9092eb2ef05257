"""Access control: which hosts and origins may send requests and, away from this machine, with which token."""

import hashlib
import hmac
import ipaddress
import re
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cavesson.errors import UserError

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
MAX_BODY = 1_000_000
TOO_LONG = f"the body has more than {MAX_BODY} bytes"
CHANGING = {"POST", "PUT", "DELETE", "PATCH"}


def is_loopback(host: str) -> bool:
    """Return whether a host name or address refers only to this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


def checked_token(token: str) -> str:
    """Return the token if requests can send it.

    Raises:
        UserError: The token is empty, or has spaces or characters that cannot be sent in a header.
    """
    if not re.fullmatch(r"[!-~]+", token):
        wrong = "has characters other than ASCII letters, digits and signs" if token else "is empty"
        raise UserError(f"the token {wrong}: give another with --token, or leave it out")
    return token


class Guard:
    """Rejects unauthorised requests before anything handles them, and adds the security headers to every response.

    Without a token, only requests to host names of this machine are accepted: a page that points its own domain at
    127.0.0.1 sends that domain as the host. With a token, this check is not needed, as such a page does not know it;
    every request must send it as a bearer token or a cookie.

    Raises:
        UserError: The token is empty, or cannot be sent in a header.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self.app = app
        self.token = None if token is None else checked_token(token)
        # A browser sends a cookie to all ports of a host, so that the boards of a host need different ones.
        self.cookie = f"cavesson_token_{hashlib.sha256((token or '').encode()).hexdigest()[:8]}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                # What is recorded is never kept on disk; the page itself says otherwise of its own files.
                headers.setdefault("cache-control", "no-store")
            await send(message)

        refusal = self._refusal(scope)
        await (refusal or self.app)(scope, receive, send_with_headers)

    @property
    def needs_token(self) -> bool:
        """Whether requests must send a token."""
        return self.token is not None

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if len(headers.getlist("host")) != 1:
            return refuse("the request must have exactly one Host header", 400)
        if not self.needs_token and not is_loopback(_name(headers["host"])):
            return refuse(f"this board only answers to names of this machine, not to {headers['host'][:100]!r}")
        if (problem := _foreign(scope["method"], headers)) is not None:
            return refuse(problem)
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > MAX_BODY:
            return refuse(TOO_LONG, 413)
        return self._without_token(scope, headers) if self.needs_token else None

    def _without_token(self, scope: Scope, headers: Headers) -> Response | None:
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = dict(query).get("token")
        if scope["method"] == "GET" and given is not None and self._is_token(given):
            # The address bar, and anything copied from it, must not contain the token.
            rest = urlencode([(name, value) for name, value in query if name != "token"])
            # A relative path, because a proxy may serve the board under a path that only the proxy knows.
            answer = RedirectResponse(f"?{rest}" if rest else f"./{scope['path'].rpartition('/')[2]}", 303)
            answer.set_cookie(self.cookie, given, httponly=True, samesite="strict")
            return answer
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_token(bearer) or self._is_token(_cookie(headers, self.cookie)):
            return None
        return refuse("this board needs its token: open the address that `cavesson board` printed", 401)

    def _is_token(self, given: str) -> bool:
        """Compare in constant time, so that the response time does not reveal how much of the token was right."""
        return self.token is not None and hmac.compare_digest(given.encode("utf-8", "replace"), self.token.encode())


def refuse(reason: str, status: int = 403) -> Response:
    """Return a JSON response with an error message."""
    return JSONResponse({"error": reason}, status)


def _foreign(method: str, headers: Headers) -> str | None:
    """Return why the request may come from a page of another origin, or None if it does not."""
    origin = headers.get("origin")
    if origin is not None and urlsplit(origin).netloc.lower() != headers["host"].lower():
        return "the request comes from a page of another origin"
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and method in CHANGING:
        return "the request comes from a page of another site"
    if method in CHANGING and origin is None:
        return "a request that changes something must have an Origin header"
    if (
        method in ("POST", "PUT", "PATCH")
        and headers.get("content-type", "").split(";")[0].strip() != "application/json"
    ):
        return "the body must be application/json"
    return None


def _name(host: str) -> str:
    """Return the host without its port."""
    return host.rsplit(":", 1)[0] if not host.endswith("]") and ":" in host else host


def _cookie(headers: Headers, name: str) -> str:
    try:
        cookie = SimpleCookie(headers.get("cookie", ""))
    except CookieError:
        return ""
    return cookie[name].value if name in cookie else ""

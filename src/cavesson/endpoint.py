"""A server that is asked over HTTP: requests are retried after failures that may be temporary."""

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt, wait_exponential_jitter

from cavesson.config_paths import expanded
from cavesson.errors import UserError, first_line
from cavesson.text.masking import masked
from cavesson.text.visible import shortened

_TRY_AGAIN = {408, 425, 429, 500, 502, 503, 504}
_LONGEST_WAIT = 300.0
"""Seconds between two attempts, whatever the server asks for."""
_LARGEST_ANSWER = 64 << 20
_BACKOFF = wait_exponential_jitter(multiplier=0.5, max=30)


@dataclass(frozen=True)
class Endpoint:
    """Where requests are posted to.

    Attributes:
        name: what the server is, for messages.
        url: of the server.
        timeout: seconds that one request may take in all.
        attempts: attempts per request, if it fails for a reason that may be temporary.
        error: class of the errors.
        headers: sent with every request.
        shown: what messages call the URL; "" = the URL itself.
        credentials: what gives the server's key or password, for the message if it asks for one.
    """

    name: str
    url: str
    timeout: float
    attempts: int
    error: type[UserError] = UserError
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    shown: str = ""
    credentials: str = ""

    def client(self) -> httpx.AsyncClient:
        """Return a client for any number of requests at the same time, to be closed by the caller.

        The caller limits their number: if a request waited here for a connection, its time would run meanwhile.
        """
        is_here = httpx.URL(self.url).host in ("127.0.0.1", "localhost")  # where a proxy would look for it elsewhere
        unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx.AsyncClient(
            headers={"Content-Type": "application/json"}, timeout=None, limits=unlimited, trust_env=not is_here
        )

    async def get(self, client: httpx.AsyncClient, path: str = "") -> bytes:
        """Return the body of the response to a request without content; raises what `post` raises."""
        return await self._ask(client, "GET", None, path)

    async def post(self, client: httpx.AsyncClient, content: bytes, path: str = "") -> bytes:
        """Return the body of the response.

        Raises:
            UserError: of the class `error`: all attempts failed, or one of them for good.
        """
        return await self._ask(client, "POST", content, path)

    async def _ask(self, client: httpx.AsyncClient, method: str, content: bytes | None, path: str) -> bytes:
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_TryAgainError),
            stop=stop_after_attempt(self.attempts),
            wait=_wait,
            reraise=True,
        )
        try:
            return await retrying(self._try, client, method, content, path)
        except _TryAgainError as error:
            raise self.failed(f"{error} ({self.attempts} attempts)") from error.__cause__

    async def _try(self, client: httpx.AsyncClient, method: str, request: bytes | None, path: str) -> bytes:
        content = bytearray()
        try:
            async with (
                asyncio.timeout(self.timeout),
                client.stream(method, self.url + path, content=request, headers=self.headers) as response,
            ):
                async for piece in response.aiter_bytes():
                    content += piece
                    if len(content) > _LARGEST_ANSWER:
                        raise self.failed(f"answered more than {_LARGEST_ANSWER >> 20} MB")
        except TimeoutError as error:
            raise _TryAgainError(f"did not answer within {self.timeout:g} seconds") from error
        except httpx.TransportError as error:
            raise _TryAgainError(f"cannot be reached: {type(error).__name__}: {error}") from error
        except httpx.DecodingError as error:
            raise self.failed(f"answered something that cannot be decoded: {error}") from error
        if response.is_success:
            return bytes(content)
        said = f"answered {response.status_code} {response.reason_phrase}"
        if response.status_code in _TRY_AGAIN:
            raise _TryAgainError(said, _retry_after(response))
        hint = f"; set {self.credentials}" if response.status_code in (401, 403) and self.credentials else ""
        raise self.failed(f"{said}: {beginning(content)}{hint}")

    def failed(self, said: str) -> UserError:
        """Return an error that says what the server did."""
        return self.error(masked(f"{self.name} at {self.shown or self.url} {said}"))


def secret(reference: str, what: str) -> str:
    """Return the secret that a setting, `what`, names as ``env:NAME``, of an environment variable, or as ``file:PATH``.

    Raises:
        UserError: the variable is not set, or the file cannot be read.
    """
    kind, _, place = reference.partition(":")
    if kind == "env":
        if place not in os.environ:
            raise UserError(f"{what} names the environment variable {place}, which is not set")
        return os.environ[place]
    try:
        return expanded(place).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{what} names the file {place}, which cannot be read: {first_line(error)}") from None


class _TryAgainError(Exception):
    """A request failed for a reason that may be temporary; `after` is the server's requested delay in seconds."""

    def __init__(self, said: str, after: float | None = None) -> None:
        super().__init__(said)
        self.after = after


def _wait(state: RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome else None
    after = error.after if isinstance(error, _TryAgainError) else None
    return _BACKOFF(state) if after is None else after


def _retry_after(response: httpx.Response) -> float | None:
    """Return the delay in seconds given by the header Retry-After, a number or a date (RFC 9110, section 10.2.3).

    The delay is limited to `_LONGEST_WAIT`. Without a valid header, return None.
    """
    said = response.headers.get("Retry-After", "").strip()
    if said.isdecimal():
        return min(float(said), _LONGEST_WAIT)
    try:
        seconds = (parsedate_to_datetime(said) - datetime.now(UTC)).total_seconds()
    except (ValueError, TypeError, OverflowError):  # also a date beyond those that Python knows
        return None
    return min(max(seconds, 0.0), _LONGEST_WAIT)


def beginning(content: bytes | bytearray) -> str:
    """Return the beginning of an answer, to quote it."""
    return repr(shortened(" ".join(content[:1000].decode(errors="replace").split()), 100))

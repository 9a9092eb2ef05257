"""A reward computed by a server: one POST request per batch of responses, with several requests at the same time."""

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Annotated, Any

import httpx
from anyio.from_thread import start_blocking_portal
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, field_validator
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt, wait_exponential_jitter

from cavesson.config import Settings, check
from cavesson.errors import UserCodeError, UserError

_TRY_AGAIN = {408, 425, 429, 500, 502, 503, 504}
_LONGEST_WAIT = 300.0
"""Seconds between two attempts, whatever the server asks for."""
_LARGEST_ANSWER = 64 << 20
_BACKOFF = wait_exponential_jitter(multiplier=0.5, max=30)


class HttpSettings(Settings):
    """The server, and how requests are made."""

    url: str = Field(pattern=r"^https?://[^/]")
    """URL that requests are posted to"""
    batch_size: int = Field(64, ge=1)
    """responses per request"""
    concurrency: int = Field(4, ge=1)
    """requests at the same time"""
    timeout: float = Field(60.0, gt=0)
    """seconds that one request may take in all"""
    attempts: int = Field(5, ge=1)
    """attempts per request, if it fails for a reason that may be temporary"""
    headers_env: dict[str, str] = Field(default_factory=dict)
    """headers and the environment variables that hold their values, such as {Authorization = "REWARD_TOKEN"}: the
    recipe and the record never contain the values"""

    @field_validator("url")
    @classmethod
    def _without_password(cls, url: str) -> str:
        try:
            userinfo = httpx.URL(url).userinfo
        except httpx.InvalidURL as error:
            raise ValueError(str(error)) from None
        if userinfo:
            raise ValueError("the URL is recorded: put the password in an environment variable, see headers_env")
        return url


class HttpReward:
    """Posts `{"prompts": […], "responses": […], "columns": {…}}` and reads `{"rewards": […]}`, plain or in named parts.

    Args:
        options: the settings of `HttpSettings`.

    Raises:
        UserError: an option is wrong, or an environment variable named in `headers_env` is not set.
    """

    def __init__(self, **options: Any) -> None:
        self.settings = check(HttpSettings, options, "reward 'http': options")
        unset = next((name for name in self.settings.headers_env.values() if name not in os.environ), None)
        if unset is not None:
            raise UserError(f"reward 'http': headers_env names the environment variable {unset}, which is not set")

    def __call__(
        self, prompts: Sequence[str], responses: Sequence[str], **columns: Any
    ) -> list[float] | dict[str, list[float]]:
        size = self.settings.batch_size
        batches = [slice(start, start + size) for start in range(0, len(responses), size)]
        requests = [
            self._request(prompts[rows], responses[rows], {name: values[rows] for name, values in columns.items()})
            for rows in batches
        ]
        # The requests need a separate thread, because the caller may already run in an event loop, as in notebooks.
        with start_blocking_portal() as portal:
            answers = portal.call(self._ask_all, requests, [len(responses[rows]) for rows in batches])
        return self._joined(answers)

    def _request(self, prompts: Sequence[str], responses: Sequence[str], columns: Mapping[str, Any]) -> bytes:
        content = {"prompts": prompts, "responses": responses, "columns": columns}
        try:
            return json.dumps(content, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise self._error(f"cannot be sent the columns {', '.join(columns)}: {error}") from error

    async def _ask_all(self, requests: Sequence[bytes], counts: Sequence[int]) -> list["_Parts"]:
        free = asyncio.Semaphore(self.settings.concurrency)
        headers = {name: os.environ[variable] for name, variable in self.settings.headers_env.items()}
        headers["Content-Type"] = "application/json"
        async with httpx.AsyncClient(headers=headers, timeout=None) as client:

            async def ask(request: bytes, count: int) -> _Parts:
                async with free:
                    return self._read(await self._answer(client, request), count)

            return await asyncio.gather(*(ask(*each) for each in zip(requests, counts, strict=True)))

    async def _answer(self, client: httpx.AsyncClient, request: bytes) -> bytes:
        """Return the body of the response, retrying after failures that may be temporary."""
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_TryAgainError),
            stop=stop_after_attempt(self.settings.attempts),
            wait=_wait,
            reraise=True,
        )
        try:
            return await retrying(self._post, client, request)
        except _TryAgainError as error:
            raise self._error(f"{error} ({self.settings.attempts} attempts)") from error.__cause__

    async def _post(self, client: httpx.AsyncClient, request: bytes) -> bytes:
        content = bytearray()
        try:
            async with (
                asyncio.timeout(self.settings.timeout),
                client.stream("POST", self.settings.url, content=request) as response,
            ):
                async for piece in response.aiter_bytes():
                    content += piece
                    if len(content) > _LARGEST_ANSWER:
                        raise self._error(f"answered more than {_LARGEST_ANSWER >> 20} MB")
        except TimeoutError as error:
            raise _TryAgainError(f"did not answer within {self.settings.timeout:g} seconds") from error
        except httpx.TransportError as error:
            raise _TryAgainError(f"cannot be reached: {type(error).__name__}: {error}") from error
        except httpx.DecodingError as error:
            raise self._error(f"answered something that cannot be decoded: {error}") from error
        if response.is_success:
            return bytes(content)
        said = f"answered {response.status_code} {response.reason_phrase}"
        if response.status_code in _TRY_AGAIN:
            raise _TryAgainError(said, _retry_after(response))
        raise self._error(f"{said}: {_beginning(content)}")

    def _read(self, content: bytes, count: int) -> "_Parts":
        try:
            rewards = _Rewards.model_validate_json(content).rewards
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(str(part) for part in first["loc"] if not str(part).startswith(("list[", "dict[")))
            raise self._error(
                f'must answer {{"rewards": [one number per response]}}, and answered {_beginning(content)} '
                f"({place}: {first['msg']})"
            ) from error
        parts = rewards if isinstance(rewards, dict) else {"": rewards}
        wrong = next((len(values) for values in parts.values() if len(values) != count), None)
        if wrong is not None or not parts:
            raise self._error(f"answered {wrong or 0} rewards for {count} responses")
        return parts

    def _joined(self, answers: Sequence["_Parts"]) -> list[float] | dict[str, list[float]]:
        names = list(answers[0])
        other = next((list(answer) for answer in answers if set(answer) != set(names)), None)
        if other is not None:
            raise self._error(f"answered the parts {names} to one request and {other} to another")
        joined = {name: [value for answer in answers for value in answer[name]] for name in names}
        return joined[""] if names == [""] else joined

    def _error(self, said: str) -> UserCodeError:
        return UserCodeError(f"the reward at {self.settings.url} {said}")


_Parts = dict[str, list[float]]
"""Rewards of one batch by the name of their part; of plain numbers the name is empty."""
_Numbers = list[Annotated[FiniteFloat, Field(strict=True)]]


class _Rewards(BaseModel):
    """What a server says of one batch."""

    model_config = ConfigDict(strict=True)
    rewards: _Numbers | dict[str, _Numbers]


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
    except (ValueError, TypeError):
        return None
    return min(max(seconds, 0.0), _LONGEST_WAIT)


def _beginning(content: bytes | bytearray) -> str:
    text = " ".join(content[:1000].decode(errors="replace").split())
    return repr(text if len(text) <= 100 else f"{text[:100]}…")

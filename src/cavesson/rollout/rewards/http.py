"""A reward computed by a server: one POST request per batch of responses, with several requests at the same time."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import httpx
from anyio.from_thread import start_blocking_portal
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, field_validator

from cavesson.config import Settings, check
from cavesson.endpoint import Endpoint, beginning, secret
from cavesson.errors import UserCodeError, UserError


class HttpSettings(Settings):
    """The server, and how requests are made."""

    url: str = Field(pattern=r"^(https?://[^/]|env:.|file:.)")
    """URL that requests are posted to; one that is secret itself is named as env:NAME or file:PATH"""
    batch_size: int = Field(64, ge=1)
    """responses per request"""
    concurrency: int = Field(4, ge=1)
    """requests at the same time"""
    timeout: float = Field(60.0, gt=0)
    """seconds that one request may take in all"""
    attempts: int = Field(5, ge=1)
    """attempts per request, if it fails for a reason that may be temporary"""
    headers_env: dict[str, str] = Field(default_factory=dict)
    """headers and the environment variables that hold their values, such as {Authorization = "REWARD_TOKEN"}, or files
    that do, such as {Authorization = "file:~/token"}: the recipe and the record never contain the values"""

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

    Raises:
        UserError: an option is wrong, or an environment variable named in `headers_env` is not set.
    """

    def __init__(self, **options: Any) -> None:
        self.settings = settings = check(HttpSettings, options, "reward 'http': options")
        headers = {
            name: secret(place if place.startswith(("env:", "file:")) else f"env:{place}", "reward 'http': headers_env")
            for name, place in settings.headers_env.items()
        }
        url = settings.url
        if not url.startswith("http"):
            url = secret(url, "reward 'http': url")
            if not url.startswith(("http://", "https://")):
                raise UserError(f"reward 'http': {settings.url} is not a URL that begins with http:// or https://")
        self.endpoint = Endpoint(
            "the reward",
            url,
            settings.timeout,
            settings.attempts,
            UserCodeError,
            headers,
            settings.url,
            "headers_env to the header that it expects",
        )

    def __call__(
        self, prompts: Sequence[str], responses: Sequence[str], **columns: Any
    ) -> list[Any] | dict[str, list[Any]]:
        size = self.settings.batch_size
        batches = [slice(start, start + size) for start in range(0, len(responses), size)]
        requests = [
            self._request(prompts[rows], responses[rows], {name: values[rows] for name, values in columns.items()})
            for rows in batches
        ]
        # The requests need a separate thread, because the caller may already run in an event loop, as in notebooks.
        with start_blocking_portal() as portal:
            answers = portal.call(self._ask_all, requests, [len(responses[rows]) for rows in batches])
        names = list(answers[0])
        other = next((list(answer) for answer in answers if set(answer) != set(names)), None)
        if other is not None:
            raise self.endpoint.failed(f"answered the parts {names} to one request and {other} to another")
        joined = {name: [value for answer in answers for value in answer[name]] for name in names}
        return joined[""] if names == [""] else joined

    def _request(self, prompts: Sequence[str], responses: Sequence[str], columns: Mapping[str, Any]) -> bytes:
        content = {"prompts": prompts, "responses": responses, "columns": columns}
        try:
            return json.dumps(content, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise self.endpoint.failed(f"cannot be sent the columns {', '.join(columns)}: {error}") from error

    async def _ask_all(self, requests: Sequence[bytes], counts: Sequence[int]) -> list["_Parts"]:
        free = asyncio.Semaphore(self.settings.concurrency)
        async with self.endpoint.client() as client:

            async def ask(request: bytes, count: int) -> _Parts:
                async with free:
                    return self._read(await self.endpoint.post(client, request), count)

            return await asyncio.gather(*(ask(*each) for each in zip(requests, counts, strict=True)))

    def _read(self, content: bytes, count: int) -> "_Parts":
        try:
            rewards = _Rewards.model_validate_json(content).rewards
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(str(part) for part in first["loc"] if not str(part).startswith(_KINDS))
            raise self.endpoint.failed(
                f'must answer {{"rewards": [one number per response]}}, and answered {beginning(content)} '
                f"({place}: {first['msg']})"
            ) from error
        parts = rewards if isinstance(rewards, dict) else {"": rewards}
        wrong = next((len(values) for values in parts.values() if len(values) != count), None)
        if wrong is not None or not parts:
            raise self.endpoint.failed(f"answered {wrong or 0} rewards for {count} responses")
        return parts


_Parts = dict[str, list[Any]]
"""Rewards of one batch by the name of their part; of plain numbers the name is empty."""
_Number = Annotated[FiniteFloat, Field(strict=True)] | None
_Reasoned = Annotated[tuple[_Number, str], Field(strict=False)]
"""A JSON array of a number and its reason."""
_Numbers = list[_Number | _Reasoned]
_KINDS = ("list[", "dict[", "tuple[", "float", "function-")
"""How pydantic names the kinds of a value, among its places."""


class _Rewards(BaseModel):
    """What a server says of one batch."""

    model_config = ConfigDict(strict=True)
    rewards: _Numbers | dict[str, _Numbers]

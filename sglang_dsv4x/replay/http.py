"""Plain HTTP with the settings of a Connection: JSON endpoints and event streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import aiohttp

from sglang_dsv4x.replay.client import Connection, RequestError, brief

# Cumulative log-probabilities make single events of megabytes; lines are split here, not by aiohttp's line
# reader.
_READ_BUFFER = 1 << 20
_INFO_TIMEOUT_S = 60.0


class Http:
    """One server's root URL. Use as an asynchronous context manager."""

    def __init__(self, base_url: str, connection: Connection):
        """`base_url` with or without the /v1 of OpenAI's interface."""
        self.root = server_root(base_url)
        self.connection = connection
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Http:
        key = self.connection.api_key
        # No connection is kept: a replay pauses for minutes, and a reused connection that the server has
        # closed meanwhile would look like a failed turn.
        connector = aiohttp.TCPConnector(limit=0, force_close=True, ssl=self.connection.tls())
        self._session = aiohttp.ClientSession(
            connector=connector,
            read_bufsize=_READ_BUFFER,
            headers={"Authorization": f"Bearer {key}"} if key else None,
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def get_json(self, path: str) -> dict[str, Any]:
        """The JSON object at `path`. Raises RequestError."""
        return json_object(await self.whole("GET", path), f"GET {path}")

    async def post_json(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Posts `body` and returns the JSON object that answers, within the connection's time. Raises
        RequestError."""
        text = await self.whole("POST", path, body, self.connection.timeout_s)
        return json_object(text, f"POST {path}")

    async def whole(
        self, method: str, path: str, body: dict[str, Any] | None = None, limit_s: float = _INFO_TIMEOUT_S
    ) -> str:
        """The answer's text. Raises RequestError, also for a status other than 200."""
        try:
            timeout = aiohttp.ClientTimeout(total=limit_s)
            url = self.root + path
            async with self._open().request(method, url, json=body, timeout=timeout) as response:
                text = await response.text()
        except asyncio.TimeoutError as error:
            raise RequestError("timeout", f"{method} {path}: no answer within {limit_s:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise RequestError("connection", f"{method} {path}: {type(error).__name__}: {error}") from error
        if response.status != 200:
            raise RequestError(
                "http", f"{method} {path}: HTTP {response.status}: {brief(text)}", response.status
            )
        return text

    async def flush_cache(self) -> None:
        """Empties an SGLang server's prefix cache. Raises RequestError, also while requests are running."""
        await self.whole("POST", "/flush_cache")

    async def events(self, path: str, body: dict[str, Any]) -> AsyncGenerator[str, None]:
        """Posts `body` and yields the data of each server-sent event, up to the end of the stream or [DONE].

        Raises RequestError of kind http or connection, asyncio.TimeoutError after the connection's time.
        """
        timeout = aiohttp.ClientTimeout(total=self.connection.timeout_s)
        try:
            async with self._open().post(self.root + path, json=body, timeout=timeout) as response:
                if response.status != 200:
                    text = brief(await response.text(errors="replace"))
                    raise RequestError("http", f"HTTP {response.status}: {text}", response.status)
                pending: list[bytes] = []
                async for chunk in response.content.iter_any():
                    first, *rest = chunk.split(b"\n")
                    pending.append(first)
                    if not rest:
                        continue
                    lines = [b"".join(pending), *rest[:-1]]
                    pending = [rest[-1]]
                    for line in lines:
                        if not line.startswith(b"data:"):
                            continue
                        data = line[len(b"data:") :].strip()
                        if data == b"[DONE]":
                            return
                        yield data.decode("utf-8", "replace")
        except asyncio.TimeoutError:
            raise
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise RequestError("connection", f"{type(error).__name__}: {error}") from error

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("Http must be entered with 'async with' before use")
        return self._session


def server_root(base_url: str) -> str:
    """The URL without a trailing slash and without OpenAI's /v1."""
    parts = urlsplit(base_url)
    path = parts.path.rstrip("/")
    return urlunsplit((parts.scheme, parts.netloc, path.removesuffix("/v1"), "", ""))


def json_object(text: str, what: str) -> dict[str, Any]:
    """Raises RequestError of kind protocol when the text is not a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise RequestError("protocol", f"{what}: not JSON: {brief(text)}") from error
    if not isinstance(value, dict):
        raise RequestError("protocol", f"{what}: not a JSON object: {brief(text)}")
    return value

"""SGLang's native HTTP interface: streamed /generate, /server_info, /model_info, /flush_cache.

Knows no trace format.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import aiohttp

# Cumulative log-probabilities make single events of megabytes; lines are split here, not by aiohttp's line
# reader.
_READ_BUFFER = 1 << 20
_INFO_TIMEOUT_S = 60.0


class RequestError(Exception):
    """A request failed. `kind` is http, timeout, connection, server (an error in the stream) or protocol."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


class Sampling(NamedTuple):
    """How outputs are made: always greedy. `logprobs` also asks for every output token's log-probability."""

    ignore_eos: bool = True
    logprobs: bool = False


class Completion(NamedTuple):
    """One answered request. Times are in seconds on the client's clock.

    `ttft_s` is from sending to the first output token; `gaps_s` holds one time per output token after the
    first event (tokens that arrive together share their time equally). `logprobs` are the doubles that the
    server printed, natural logarithm, or None when not asked for.
    """

    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    cached_tokens: int
    finish_reason: str
    ttft_s: float
    gaps_s: tuple[float, ...]
    latency_s: float


class Client:
    """Talks to one server. Use as an asynchronous context manager."""

    def __init__(self, base_url: str, *, timeout_s: float):
        """`timeout_s` bounds one generate request from sending to its last byte."""
        self.base_url = base_url.rstrip("/")
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        # No connection is kept: a replay pauses for minutes, and a reused connection that the server has
        # closed meanwhile would look like a failed turn.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(connector=connector, read_bufsize=_READ_BUFFER)
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def get_json(self, path: str) -> dict[str, Any]:
        """The JSON object at `path`. Raises RequestError."""
        text = await self._whole("GET", path)
        return _object(text, f"GET {path}")

    async def flush_cache(self) -> None:
        """Empties the server's prefix cache. Raises RequestError, also while requests are running."""
        await self._whole("POST", "/flush_cache")

    async def generate(self, input_ids: Sequence[int], output_tokens: int, sampling: Sampling) -> Completion:
        """Sends one prompt and reads its stream to the end. Raises RequestError when that fails."""
        body = {
            "input_ids": list(input_ids),
            "sampling_params": {
                "temperature": 0.0,
                "max_new_tokens": output_tokens,
                "ignore_eos": sampling.ignore_eos,
            },
            "stream": True,
            "return_logprob": sampling.logprobs,
        }
        reader = _StreamReader(len(input_ids), sampling.logprobs)
        try:
            timeout = aiohttp.ClientTimeout(total=self._timeout_s)
            async with self._open().post(self.base_url + "/generate", json=body, timeout=timeout) as response:
                if response.status != 200:
                    raise RequestError("http", f"HTTP {response.status}: {_brief(await response.text())}")
                async for event in _events(response.content):
                    reader.feed(event, time.perf_counter())
        except asyncio.TimeoutError as error:
            got = f"after {len(reader.output_ids)} of {output_tokens} tokens"
            raise RequestError("timeout", f"no end within {self._timeout_s:g} s, {got}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise RequestError("connection", f"{type(error).__name__}: {error}") from error
        return reader.finish(time.perf_counter())

    async def _whole(self, method: str, path: str) -> str:
        try:
            timeout = aiohttp.ClientTimeout(total=_INFO_TIMEOUT_S)
            async with self._open().request(method, self.base_url + path, timeout=timeout) as response:
                text = await response.text()
        except asyncio.TimeoutError as error:
            raise RequestError(
                "timeout", f"{method} {path}: no answer within {_INFO_TIMEOUT_S:g} s"
            ) from error
        except (aiohttp.ClientError, OSError, UnicodeDecodeError) as error:
            raise RequestError("connection", f"{method} {path}: {type(error).__name__}: {error}") from error
        if response.status != 200:
            raise RequestError("http", f"{method} {path}: HTTP {response.status}: {_brief(text)}")
        return text

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("Client must be entered with 'async with' before use")
        return self._session


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[str]:
    """The data of each server-sent event, up to the end of the stream or [DONE]."""
    pending = b""
    async for chunk in content.iter_any():
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[len(b"data:") :].strip()
            if data == b"[DONE]":
                return
            yield data.decode("utf-8", "replace")


class _StreamReader:
    """Assembles a Completion from events. Feed it every event of one request, then call finish once."""

    def __init__(self, prompt_tokens: int, logprobs: bool):
        self.output_ids: list[int] = []
        self._prompt_tokens = prompt_tokens
        self._wants_logprobs = logprobs
        self._logprobs: list[float] = []
        self._meta: dict[str, Any] = {}
        self._sent = time.perf_counter()
        self._first: float | None = None
        self._last = self._sent
        self._gaps: list[float] = []

    def feed(self, event: str, now: float) -> None:
        """Takes one event received at `now`. Raises RequestError for an error or a malformed one."""
        value = _object(event, "stream")
        if "error" in value:
            error = value["error"]
            raise RequestError(
                "server", _brief(str(error.get("message", error) if isinstance(error, dict) else error))
            )
        meta, ids = value.get("meta_info"), value.get("output_ids")
        if not isinstance(meta, dict) or not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise RequestError("protocol", f"event without meta_info and output_ids: {_brief(event)}")
        self._meta = meta
        before = len(self.output_ids)
        # Events hold all tokens so far, or only the new ones under --incremental-streaming-output.
        whole = meta.get("completion_tokens") in (len(ids), None) or before == 0
        self.output_ids = list(ids) if whole else self.output_ids + ids
        if self._wants_logprobs:
            new = self._read_logprobs(meta)
            self._logprobs = new if whole else self._logprobs + new
        self._clock(len(self.output_ids) - before, now)

    def finish(self, now: float) -> Completion:
        """The completed request. Raises RequestError when the stream was not a whole answer."""
        finish = self._meta.get("finish_reason")
        reason = finish.get("type") if isinstance(finish, dict) else finish
        if not isinstance(reason, str):
            raise RequestError("connection", f"stream ended early, after {len(self.output_ids)} tokens")
        if reason == "abort":
            message = finish.get("message") if isinstance(finish, dict) else None
            raise RequestError("server", _brief(str(message or "aborted")))
        prompt = self._meta.get("prompt_tokens")
        if prompt != self._prompt_tokens:
            raise RequestError(
                "protocol", f"server counted {prompt} prompt tokens, {self._prompt_tokens} were sent"
            )
        cached = self._meta.get("cached_tokens")
        if type(cached) is not int:
            raise RequestError("protocol", "answer without usage: meta_info.cached_tokens is missing")
        if self._first is None:
            raise RequestError("protocol", "answer without an output token")
        if self._wants_logprobs and len(self._logprobs) != len(self.output_ids):
            counts = f"{len(self._logprobs)} log-probabilities for {len(self.output_ids)} output tokens"
            raise RequestError("protocol", f"answer with {counts}")
        logprobs = tuple(self._logprobs) if self._wants_logprobs else None
        ttft = self._first - self._sent
        return Completion(
            tuple(self.output_ids), logprobs, cached, reason, ttft, tuple(self._gaps), now - self._sent
        )

    def _read_logprobs(self, meta: dict[str, Any]) -> list[float]:
        found = []
        for i, entry in enumerate(meta.get("output_token_logprobs") or ()):
            value = entry[0] if isinstance(entry, list) and entry else entry
            # A NaN arrives as null.
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise RequestError(
                    "protocol", f"log-probability of output token {i} is {value!r}, not a finite number"
                )
            found.append(float(value))
        return found

    def _clock(self, new_tokens: int, now: float) -> None:
        if new_tokens <= 0:
            return
        if self._first is None:
            self._first = now
        else:
            self._gaps.extend([(now - self._last) / new_tokens] * new_tokens)
        self._last = now


def _object(text: str, what: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise RequestError("protocol", f"{what}: not JSON: {_brief(text)}") from error
    if not isinstance(value, dict):
        raise RequestError("protocol", f"{what}: not a JSON object: {_brief(text)}")
    return value


def _brief(text: str) -> str:
    one_line = " ".join(text.split())
    return one_line if len(one_line) <= 300 else one_line[:300] + " ..."

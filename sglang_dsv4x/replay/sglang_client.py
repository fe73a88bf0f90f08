"""SGLang's native interface: streamed /generate with token ids in and out."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any

from sglang_dsv4x.replay.client import (
    Api,
    Completion,
    Connection,
    RequestError,
    Sampling,
    TokenClock,
    brief,
    finite,
)
from sglang_dsv4x.replay.http import Http, json_object


class SglangClient:
    """Sends turns to POST /generate. Use as an asynchronous context manager."""

    api: Api = "sglang"

    def __init__(self, base_url: str, connection: Connection):
        self.http = Http(base_url, connection)
        self.base_url = self.http.root

    async def __aenter__(self) -> SglangClient:
        await self.http.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.http.__aexit__(*exc)

    async def generate(self, input_ids: Sequence[int], output_tokens: int, sampling: Sampling) -> Completion:
        """Sends one prompt and reads its stream to the end. Raises RequestError when that fails."""
        return await self.generate_with(input_ids, output_tokens, sampling, {})

    async def generate_with(
        self, input_ids: Sequence[int], output_tokens: int, sampling: Sampling, extra: dict[str, Any]
    ) -> Completion:
        """The same with more fields of /generate, such as `extra_key`, which keeps a prompt's cache apart."""
        reader = await self.read(input_ids, output_tokens, sampling, extra)
        return reader.finish(time.perf_counter())

    async def read(
        self, input_ids: Sequence[int], output_tokens: int, sampling: Sampling, extra: dict[str, Any]
    ) -> StreamReader:
        """Reads the stream to its end; the reader's `meta` is the last event's. Raises RequestError."""
        body = {
            "input_ids": list(input_ids),
            "sampling_params": {
                "temperature": 0.0,
                "max_new_tokens": output_tokens,
                "ignore_eos": sampling.ignore_eos,
            },
            "stream": True,
            "return_logprob": sampling.logprobs,
            **extra,
        }
        reader = StreamReader(len(input_ids), sampling.logprobs)
        try:
            async with contextlib.aclosing(self.http.events("/generate", body)) as events:
                async for event in events:
                    reader.feed(event, time.perf_counter())
        except asyncio.TimeoutError as error:
            got = f"after {len(reader.output_ids)} of {output_tokens} tokens"
            limit = self.http.connection.timeout_s
            raise RequestError("timeout", f"no end within {limit:g} s, {got}") from error
        return reader


class StreamReader:
    """Assembles a Completion from events. Feed it every event of one request, then call finish once."""

    def __init__(self, prompt_tokens: int, logprobs: bool):
        self.output_ids: list[int] = []
        self.meta: dict[str, Any] = {}
        self._prompt_tokens = prompt_tokens
        self._wants_logprobs = logprobs
        self._logprobs: list[float] = []
        self._clock = TokenClock(time.perf_counter())

    def feed(self, event: str, now: float) -> None:
        """Takes one event received at `now`. Raises RequestError for an error or a malformed one."""
        value = json_object(event, "stream")
        if "error" in value:
            error = value["error"]
            raise RequestError(
                "server", brief(str(error.get("message", error) if isinstance(error, dict) else error))
            )
        meta, ids = value.get("meta_info"), value.get("output_ids")
        if not isinstance(meta, dict) or not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise RequestError("protocol", f"event without meta_info and output_ids: {brief(event)}")
        self.meta = meta
        before = len(self.output_ids)
        # Events hold all tokens so far, or only the new ones under --incremental-streaming-output.
        whole = meta.get("completion_tokens") in (len(ids), None) or before == 0
        self.output_ids = list(ids) if whole else self.output_ids + ids
        if self._wants_logprobs:
            new = _read_logprobs(meta)
            self._logprobs = new if whole else self._logprobs + new
        self._clock.tick(len(self.output_ids) - before, now)

    def finish(self, now: float) -> Completion:
        """The completed request. Raises RequestError when the stream was not a whole answer."""
        finish = self.meta.get("finish_reason")
        reason = finish.get("type") if isinstance(finish, dict) else finish
        if not isinstance(reason, str):
            raise RequestError("connection", f"stream ended early, after {len(self.output_ids)} tokens")
        if reason == "abort":
            message = finish.get("message") if isinstance(finish, dict) else None
            raise RequestError("server", brief(str(message or "aborted")))
        prompt = self.meta.get("prompt_tokens")
        if prompt is not None and prompt != self._prompt_tokens:
            raise RequestError(
                "protocol", f"server counted {prompt} prompt tokens, {self._prompt_tokens} were sent"
            )
        cached = self.meta.get("cached_tokens")
        if self._clock.first is None:
            raise RequestError("protocol", "answer without an output token")
        if self._wants_logprobs and len(self._logprobs) != len(self.output_ids):
            counts = f"{len(self._logprobs)} log-probabilities for {len(self.output_ids)} output tokens"
            raise RequestError("protocol", f"answer with {counts}")
        return Completion(
            output_ids=tuple(self.output_ids),
            logprobs=tuple(self._logprobs) if self._wants_logprobs else None,
            cached_tokens=cached if type(cached) is int else None,
            finish_reason=reason,
            ttft_s=self._clock.first - self._clock.sent,
            gaps_s=tuple(self._clock.gaps),
            latency_s=now - self._clock.sent,
            output_tokens=len(self.output_ids),
            prompt_tokens=prompt if type(prompt) is int else None,
        )


def _read_logprobs(meta: dict[str, Any]) -> list[float]:
    found = []
    for i, entry in enumerate(meta.get("output_token_logprobs") or ()):
        found.append(finite(entry[0] if isinstance(entry, list) and entry else entry, i))
    return found

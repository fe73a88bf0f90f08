"""Any server with OpenAI's interface, through the `openai` library, streamed: prompts as token ids to the completions
interface, or as words to the chat interface."""

from __future__ import annotations

import asyncio
import hashlib
import json
import string
import time
from collections.abc import Sequence
from typing import Any

import httpx
import openai

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
from sglang_dsv4x.replay.http import Http

# The library insists on a key; servers without one ignore it.
_NO_KEY = "none"


class OpenAiClient:
    """Sends turns to POST /v1/completions, or with `chat` to /v1/chat/completions. Use as an asynchronous context
    manager.

    A chat has no token ids: a prompt is one message with a word for each id, so that prompts with the same first
    ids have the same first text. The server counts its own tokens of it.

    With `strict` only fields of OpenAI's own interface are sent; otherwise also `ignore_eos` and
    `return_token_ids`, which SGLang and vLLM know.
    """

    def __init__(
        self, base_url: str, connection: Connection, *, model: str, strict: bool = False, chat: bool = False
    ):
        self.api: Api = "openai-chat" if chat else "openai"
        self.http = Http(base_url, connection)
        self.base_url = self.http.root
        self._connection = connection
        self._model = model
        self._strict = strict
        self._client: openai.AsyncOpenAI | None = None

    async def __aenter__(self) -> OpenAiClient:
        await self.http.__aenter__()
        # No connection is kept, as in Http. No retries: the runner makes and counts them.
        transport = openai.DefaultAsyncHttpxClient(
            verify=self._connection.tls(),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )
        self._client = openai.AsyncOpenAI(
            base_url=self.base_url + "/v1",
            api_key=self._connection.api_key or _NO_KEY,
            max_retries=0,
            timeout=self._connection.timeout_s,
            http_client=transport,
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._client is not None:
            await self._client.close()
        await self.http.__aexit__(*exc)

    async def generate(self, input_ids: Sequence[int], output_tokens: int, sampling: Sampling) -> Completion:
        """Sends one prompt and reads its stream to the end. Raises RequestError when that fails."""
        reader = _ChunkReader(len(input_ids), sampling.logprobs)
        limit = self._connection.timeout_s
        try:
            # The library's own time-out is between two bytes: a server that trickles would never meet it.
            await asyncio.wait_for(self._stream(list(input_ids), output_tokens, sampling, reader), limit)
        except (asyncio.TimeoutError, openai.APITimeoutError) as error:
            got = f"after {reader.tokens} of {output_tokens} tokens"
            raise RequestError("timeout", f"no end within {limit:g} s, {got}") from error
        except openai.APIStatusError as error:
            raise RequestError("http", self._refusal(error), error.status_code) from error
        except (openai.APIConnectionError, httpx.TransportError) as error:
            cause = error.__cause__ or error
            raise RequestError("connection", f"{type(cause).__name__}: {cause}") from error
        except openai.APIError as error:
            raise RequestError("server", brief(error.message)) from error
        except json.JSONDecodeError as error:
            raise RequestError("protocol", f"stream: not JSON: {brief(error.doc)}") from error
        return reader.finish(time.perf_counter())

    async def _stream(
        self, prompt: list[int], output_tokens: int, sampling: Sampling, reader: _ChunkReader
    ) -> None:
        assert self._client is not None, "OpenAiClient must be entered with 'async with' before use"
        extra: dict[str, Any] = {}
        options: dict[str, Any] = {"include_usage": True}
        if not self._strict:
            options["continuous_usage_stats"] = True
            extra = {"ignore_eos": sampling.ignore_eos}
            if self.api == "openai":
                extra["return_token_ids"] = True  # SGLang refuses it for a streamed chat
        extra["stream_options"] = options
        stream: Any
        if self.api == "openai-chat":
            stream = await self._client.chat.completions.create(
                model=self._model,
                messages=[{"role": "user", "content": words_of(prompt)}],
                max_tokens=output_tokens,
                temperature=0.0,
                stream=True,
                logprobs=True if sampling.logprobs else openai.omit,
                extra_body=extra,
            )
        else:
            stream = await self._client.completions.create(
                model=self._model,
                prompt=prompt,
                max_tokens=output_tokens,
                temperature=0.0,
                stream=True,
                logprobs=1 if sampling.logprobs else openai.omit,
                extra_body=extra,
            )
        async with stream:
            async for chunk in stream:
                reader.feed(chunk, time.perf_counter())

    def _refusal(self, error: openai.APIStatusError) -> str:
        text = f"HTTP {error.status_code}: {brief(error.response.text or error.message)}"
        if error.status_code in (400, 422) and not self._strict:
            text += " (if it refuses unknown fields, try --openai-strict)"
        return text


class _ChunkReader:
    """Assembles a Completion from the library's chunks, whose fields may all be missing."""

    def __init__(self, prompt_tokens: int, logprobs: bool):
        self.tokens = 0
        self._prompt_tokens = prompt_tokens
        self._wants_logprobs = logprobs
        self._clock = TokenClock(time.perf_counter())
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._text = hashlib.blake2b(digest_size=8)
        self._usage: Any = None
        self._reason: str | None = None
        self._guessed = False

    def feed(self, chunk: Any, now: float) -> None:
        """Takes one chunk received at `now`. Raises RequestError for a log-probability that is no number."""
        usage = getattr(chunk, "usage", None)
        self._usage = usage or self._usage
        choices = getattr(chunk, "choices", None) or ()
        if not choices:
            return
        choice = choices[0]
        text = _text(choice)
        self._text.update(text.encode("utf-8", "surrogatepass"))
        ids = _integers(getattr(choice, "token_ids", None))
        logprobs = [finite(value, len(self._logprobs) + i) for i, value in enumerate(_logprobs(choice))]
        self._ids += ids
        self._logprobs += logprobs
        self._reason = getattr(choice, "finish_reason", None) or self._reason
        new = self._new_tokens(len(ids) or len(logprobs), usage, bool(text))
        self.tokens += new
        self._clock.tick(new, now)

    def finish(self, now: float) -> Completion:
        """The completed request. Raises RequestError when the stream was not a whole answer."""
        if self._reason is None:
            raise RequestError("connection", f"stream ended early, after {self.tokens} tokens")
        if self._reason == "abort":
            raise RequestError("server", "aborted")
        if self._clock.first is None:
            raise RequestError("protocol", "answer without an output token")
        counted = _integer(getattr(self._usage, "completion_tokens", None))
        details = getattr(self._usage, "prompt_tokens_details", None)
        whole = len(self._ids) == (self.tokens if counted is None else counted)
        if self._wants_logprobs and len(self._logprobs) != (counted or self.tokens):
            counts = f"{len(self._logprobs)} log-probabilities for {counted or self.tokens} output tokens"
            raise RequestError("protocol", f"answer with {counts}")
        return Completion(
            output_ids=tuple(self._ids) if whole and self._ids else None,
            logprobs=tuple(self._logprobs) if self._wants_logprobs else None,
            cached_tokens=_integer(getattr(details, "cached_tokens", None)),
            finish_reason=self._reason,
            ttft_s=self._clock.first - self._clock.sent,
            gaps_s=tuple(self._clock.gaps),
            latency_s=now - self._clock.sent,
            output_tokens=self.tokens if counted is None else counted,
            prompt_tokens=_integer(getattr(self._usage, "prompt_tokens", None)),
            gaps_exact=not self._guessed or counted == self.tokens,
            text_digest=self._text.hexdigest(),
        )

    def _new_tokens(self, listed: int, usage: Any, has_text: bool) -> int:
        """Tokens of an event: those it lists, else the growth of its usage, else one for any text."""
        if listed:
            return listed
        total = _integer(getattr(usage, "completion_tokens", None))
        if total is not None:
            return max(0, total - self.tokens)
        if has_text:
            self._guessed = True
        return int(has_text)


def words_of(ids: Sequence[int]) -> str:
    """A word of letters for each id, the same for the same id."""
    return " ".join(map(_word, ids))


def _word(number: int) -> str:
    letters = ""
    while True:
        number, letter = divmod(number, 26)
        letters += string.ascii_lowercase[letter]
        if not number:
            return letters


def _text(choice: Any) -> str:
    """What a choice adds: completion text, or a chat's answer and, on servers that show it, its reasoning."""
    delta = getattr(choice, "delta", None)
    parts = [getattr(choice, "text", None)]
    parts += [getattr(delta, name, None) for name in ("reasoning_content", "reasoning", "content")]
    return "".join(part for part in parts if isinstance(part, str))


def _logprobs(choice: Any) -> list[Any]:
    found = getattr(choice, "logprobs", None)
    listed = getattr(found, "token_logprobs", None)
    if listed is None:
        listed = [getattr(entry, "logprob", None) for entry in getattr(found, "content", None) or ()]
    return list(listed)


def _integer(value: Any) -> int | None:
    return value if type(value) is int else None


def _integers(value: Any) -> list[int]:
    return [i for i in value if type(i) is int] if isinstance(value, list) else []

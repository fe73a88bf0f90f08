"""What a turn is sent with and what comes back, whatever the protocol; knows no trace format and no report."""

from __future__ import annotations

import math
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from sglang_dsv4x.replay.http import Http

Api = Literal["sglang", "openai", "openai-chat"]


class RequestError(Exception):
    """A request failed. `kind` is http, timeout, connection, server (an error in the stream) or protocol.

    `status` is the HTTP status for kind http. `transient` says that the same request may succeed later, which
    is what --retries is for.
    """

    def __init__(self, kind: str, message: str, status: int | None = None):
        super().__init__(message)
        self.kind = kind
        self.status = status

    @property
    def transient(self) -> bool:
        if self.kind == "http":
            return self.status is not None and (self.status >= 500 or self.status in (408, 409, 429))
        return self.kind in ("timeout", "connection", "server")


class Sampling(NamedTuple):
    """How outputs are made: always greedy. `logprobs` also asks for every output token's log-probability."""

    ignore_eos: bool = True
    logprobs: bool = False


class Completion(NamedTuple):
    """One answered request. Times are in seconds on the client's clock.

    `ttft_s` is from sending to the first output token; `gaps_s` holds one time per output token after the
    first event (tokens that arrive together share their time equally). `gaps_exact` is False where the server
    did not say how many tokens an event held and their sum is not the number of events: each gap is then one
    of an event. `output_ids` and `logprobs` (natural logarithm, the doubles that the server printed) are None
    where they were not sent. `cached_tokens` is None where the server reports no use of its cache.
    `prompt_tokens` is the server's own count, None where it gives none. `text_digest` identifies the output
    where there are no token ids.
    """

    output_ids: tuple[int, ...] | None
    logprobs: tuple[float, ...] | None
    cached_tokens: int | None
    finish_reason: str
    ttft_s: float
    gaps_s: tuple[float, ...]
    latency_s: float
    output_tokens: int
    prompt_tokens: int | None = None
    gaps_exact: bool = True
    text_digest: str | None = None


@dataclass(frozen=True)
class Connection:
    """How to reach a server. `timeout_s` bounds one request from sending to its last byte.

    `ca_file` is a PEM file of authorities to trust besides the system's; `insecure` accepts any certificate.
    """

    timeout_s: float = 600.0
    api_key: str | None = None
    ca_file: Path | None = None
    insecure: bool = False

    def tls(self) -> ssl.SSLContext:
        """The TLS settings. Raises OSError (ssl.SSLError is one) for a CA file that cannot be used."""
        context = ssl.create_default_context()
        if self.ca_file is not None:
            context.load_verify_locations(self.ca_file)
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


class TurnClient(Protocol):
    """One server that turns can be sent to. An asynchronous context manager."""

    api: Api
    base_url: str
    http: Http

    async def __aenter__(self) -> TurnClient: ...

    async def __aexit__(self, *exc: object) -> None: ...

    async def generate(self, input_ids: Sequence[int], output_tokens: int, sampling: Sampling) -> Completion:
        """Sends one prompt and reads its stream to the end. Raises RequestError when that fails."""
        ...


class TokenClock:
    """Turns arrivals of events into time to first token and inter-token latencies, in seconds."""

    def __init__(self, sent: float):
        self.sent = sent
        self.first: float | None = None
        self.gaps: list[float] = []
        self._last = sent

    def tick(self, new_tokens: int, now: float) -> None:
        """An event with `new_tokens` output tokens arrived at `now`; one without any changes nothing."""
        if new_tokens <= 0:
            return
        if self.first is None:
            self.first = now
        else:
            self.gaps.extend([(now - self._last) / new_tokens] * new_tokens)
        self._last = now


def finite(value: Any, position: int) -> float:
    """A log-probability from JSON. Raises RequestError for anything but a finite number: a NaN arrives as null."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RequestError(
            "protocol", f"log-probability of output token {position} is {value!r}, not a finite number"
        )
    return float(value)


def brief(text: str) -> str:
    """Text on one line of at most 300 characters, for messages."""
    one_line = " ".join(text.split())
    return one_line if len(one_line) <= 300 else one_line[:300] + " ..."

"""A small real HTTP server that speaks what the replay client reads, with chosen faults.

Outputs are a function of the prompt alone. Its prefix cache keeps whole pages of every prompt, as an infinite
radix cache does. Runs inside a test (`serving`) or as a process of its own (`python wire_server.py --port
N`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

VOCAB = 1000


@dataclass
class WireServer:
    """`faults` maps the number of a generate request (from 1) to a fault; `tier` publishes counters."""

    page_size: int = 256
    tier: bool = False
    longest: int | None = None
    miss_share: float = 0.75
    logprob_shift: float = 0.0
    incremental: bool = False
    faults: dict[int, str] = field(default_factory=dict)
    prompts: list[list[int]] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    pages: set[bytes] = field(default_factory=set)
    flushed: int = 0
    running: int = 0
    most_running: int = 0
    token_delay_s: float = 0.0
    sent_logprobs: list[float] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=lambda: {"selected": 0, "hits": 0, "misses": 0})

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/health", self._health)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_post("/flush_cache", self._flush)
        app.router.add_post("/generate", self._generate)
        return app

    def cached(self, prompt: list[int]) -> int:
        """Tokens of the prompt, at most all but one, in whole pages that earlier prompts had."""
        hit, matching, chain = 0, True, b""
        for end in range(self.page_size, len(prompt) + 1, self.page_size):
            chain = _digest([chain.hex(), *prompt[end - self.page_size : end]])
            matching = matching and chain in self.pages and end < len(prompt)
            hit = end if matching else hit
            self.pages.add(chain)
        return hit

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _server_info(self, request: web.Request) -> web.Response:
        state: dict[str, Any] = {"last_gen_throughput": 1.5}
        if self.tier:
            state["dsv4x"] = {"tier": "on", "counters": {**self.counters, "per_layer": {"hits": [1, 2]}}}
        info = {"page_size": self.page_size, "version": "test", "device": "cpu", "internal_states": [state]}
        if self.longest is not None:
            info["max_req_input_len"] = self.longest
        return web.json_response(info)

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": "/nowhere", "vocab_size": VOCAB})

    async def _flush(self, request: web.Request) -> web.Response:
        self.pages.clear()
        self.flushed += 1
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._answer(request)
        finally:
            self.running -= 1

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        prompt = body["input_ids"]
        self.prompts.append(prompt)
        number = len(self.prompts)
        print(f"generate {number}", flush=True)
        fault = self.faults.get(number)
        if fault == "500":
            return web.Response(status=500, text="out of luck")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if fault == "error-event":
            await self._event(response, {"error": {"message": "prompt too long", "code": 400}})
            return response
        cached = self.cached(prompt)
        count = body["sampling_params"]["max_new_tokens"]
        seed = _digest(prompt)
        ids = [seed[i % 16] + i for i in range(count)]
        # Doubles that need all their digits.
        logprobs = [-(seed[i % 16] + 1) / 7.3e3 - i / 3 + self.logprob_shift for i in range(count)]
        self.sent_logprobs = logprobs
        for i in range(count):
            start = i if self.incremental else 0
            shown = [[x, t, None] for x, t in zip(logprobs[start : i + 1], ids[start : i + 1], strict=True)]
            if fault == "nan":
                shown[-1][0] = None
            meta: dict[str, Any] = {
                "completion_tokens": i + 1,
                "prompt_tokens": len(prompt) + (fault == "wrong-prompt-count"),
                "cached_tokens": cached,
                "finish_reason": {"type": "length", "length": count} if i == count - 1 else None,
            }
            if fault == "no-usage":
                del meta["cached_tokens"]
            if fault == "abort" and i == count - 1:
                meta["finish_reason"] = {"type": "abort", "message": "retracted too often"}
            if body["return_logprob"]:
                meta["output_token_logprobs"] = shown
            await self._event(response, {"output_ids": ids[start : i + 1], "meta_info": meta})
            await asyncio.sleep(self.token_delay_s)
            if i == 1 and fault == "close":
                assert request.transport is not None
                request.transport.close()
                return response
            if i == 1 and fault == "short":
                return response
            if i == 1 and fault == "stall":
                await asyncio.sleep(60)
            if i == 1 and fault == "die":
                os._exit(3)
        self.counters["selected"] += 100 * count
        self.counters["misses"] += int(self.miss_share * 100 * count)
        self.counters["hits"] = self.counters["selected"] - self.counters["misses"]
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _event(self, response: web.StreamResponse, value: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(value).encode() + b"\n\n")


@contextlib.asynccontextmanager
async def serving(server: WireServer) -> AsyncIterator[str]:
    """Serves in the running event loop; yields the base URL."""
    runner = web.AppRunner(server.app(), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def _digest(tokens: list[Any]) -> bytes:
    return hashlib.blake2b(json.dumps(tokens).encode(), digest_size=16).digest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--die-at-start", type=int)
    parser.add_argument("--slow-start", action="store_true")
    parser.add_argument("--ignore-sigterm", action="store_true")
    parser.add_argument("--children", action="store_true")
    parser.add_argument("--shift", type=float, default=0.0)
    parser.add_argument("--miss-share", type=float, default=0.75)
    parser.add_argument("--tier", action="store_true")
    parser.add_argument("--token-delay", type=float, default=0.0)
    parser.add_argument("--fault", nargs=2, action="append", default=[])
    args = parser.parse_args()
    if args.die_at_start is not None:
        print("RuntimeError: the pool does not fit", file=sys.stderr)
        sys.exit(args.die_at_start)
    if args.slow_start:
        print("loading", flush=True)
        time.sleep(600)
    if args.ignore_sigterm:
        import signal

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if args.children:
        import subprocess

        sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
        subprocess.Popen(sleeper)
        subprocess.Popen(sleeper, start_new_session=True)
    server = WireServer(
        tier=args.tier,
        miss_share=args.miss_share,
        logprob_shift=args.shift,
        token_delay_s=args.token_delay,
        faults={int(number): fault for number, fault in args.fault},
    )
    web.run_app(server.app(), host=args.host, port=args.port, handle_signals=not args.ignore_sigterm)


if __name__ == "__main__":
    main()

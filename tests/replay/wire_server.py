"""A small real HTTP server that speaks what the replay client reads, SGLang's interface and OpenAI's, with chosen
faults.

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
import random
import ssl
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

VOCAB = 1000


@dataclass
class WireServer:
    """`faults` maps the number of a generate request (from 1) to a fault; `tier` publishes counters.

    `native` False: only OpenAI's interface is there. `strict` refuses fields that OpenAI does not have.
    `per_event` tokens come in one event. `forget` drops the whole cache before the request of that number.

    For verify: `noise` is the size of a random change of every log-probability; `wrong_hits` answers a prompt
    that hits the cache otherwise; `lost_tails` forgets all of a prefix longer than that many tokens;
    `keep_outputs` False stores prompts only; `salted` False ignores extra_key; `miscount` adds to a counter;
    `radix` False caches nothing; `moves` False counts no bytes.
    """

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
    native: bool = True
    api_key: str | None = None
    strict: bool = False
    per_event: int = 1
    cache_report: bool = True
    forget: set[int] = field(default_factory=set)
    noise: float = 0.0
    wrong_hits: bool = False
    lost_tails: int | None = None
    keep_outputs: bool = True
    salted: bool = True
    radix: bool = True
    miscount: dict[str, int] = field(default_factory=dict)
    moves: bool = True
    sent_logprobs: list[float] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=lambda: {"selected": 0, "hits": 0, "misses": 0})

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26, middlewares=[self._authorise])
        app.router.add_get("/health", self._health)
        if self.native:
            app.router.add_get("/server_info", self._server_info)
            app.router.add_get("/model_info", self._model_info)
            app.router.add_post("/flush_cache", self._flush)
            app.router.add_post("/generate", self._generate)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        return app

    @web.middleware
    async def _authorise(self, request: web.Request, handler: Any) -> web.StreamResponse:
        given = request.headers.get("Authorization")
        if self.api_key is not None and request.path != "/health" and given != f"Bearer {self.api_key}":
            return web.json_response({"error": {"message": "wrong key"}}, status=401)
        return await handler(request)

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": "wire", "object": "model", "root": "/nowhere"}
        if self.longest is not None:
            model["max_model_len"] = self.longest
        return web.json_response({"object": "list", "data": [model]})

    def cached(self, keyed: list[Any]) -> int:
        """Tokens of the prompt, at most all but one, in whole pages that earlier prompts had.

        `keyed` is the prompt after the name of a cache of its own.
        """
        key, *prompt = keyed
        if not self.radix:
            return 0
        hit, matching, chain = 0, True, str(key if self.salted else "").encode()
        for end in range(self.page_size, len(prompt) + 1, self.page_size):
            chain = _digest([chain.hex(), *prompt[end - self.page_size : end]])
            matching = matching and chain in self.pages and end < len(prompt)
            hit = end if matching else hit
            self.pages.add(chain)
        return 0 if self.lost_tails is not None and hit > self.lost_tails else hit

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _server_info(self, request: web.Request) -> web.Response:
        state: dict[str, Any] = {"last_gen_throughput": 1.5}
        if self.tier:
            counters = {name: n + self.miscount.get(name, 0) for name, n in self.counters.items()}
            state["dsv4x"] = {
                "tier": "on",
                "hot_entries": 392,
                "counters": {**counters, "per_layer": {"hits": [1, 2]}},
            }
        info = {"page_size": self.page_size, "version": "test", "device": "cpu", "internal_states": [state]}
        info["disable_radix_cache"] = not self.radix
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
        openai = request.path.startswith("/v1/")
        if openai and self.strict and set(body) & {"ignore_eos", "return_token_ids"}:
            return web.json_response({"error": {"message": "unknown field"}}, status=400)
        if "messages" in body and "return_token_ids" in body:
            return web.json_response({"error": {"message": "not with a streamed chat"}}, status=400)
        prompt = body["prompt"] if "prompt" in body else body.get("input_ids")
        if prompt is None:
            # A chat: every letter is a token.
            prompt = list(body["messages"][0]["content"].encode())
        self.prompts.append(prompt)
        number = len(self.prompts)
        print(f"generate {number}", flush=True)
        if number in self.forget:
            self.pages.clear()
        fault = self.faults.get(number)
        if fault == "500":
            return web.Response(status=500, text="out of luck")
        cached = self.cached([str(body.get("extra_key") or ""), *prompt])
        count = body["max_tokens"] if openai else body["sampling_params"]["max_new_tokens"]
        seed = _digest(prompt)
        ids = [seed[i % 16] + i for i in range(count)]
        # Doubles that need all their digits.
        logprobs = [-(seed[i % 16] + 1) / 7.3e3 - i / 3 + self.logprob_shift for i in range(count)]
        if self.noise:
            logprobs = [x + random.uniform(-self.noise, self.noise) for x in logprobs]
        if self.wrong_hits and cached:
            logprobs = [x - 0.5 for x in logprobs]
        self.sent_logprobs = logprobs
        if self.keep_outputs:
            self.cached([str(body.get("extra_key") or ""), *prompt, *ids[:-1], None])
        self._count(len(prompt) + count - 1 - cached, count)
        if not body.get("stream", False):
            event = self._native_event(body, ids, logprobs, count, len(prompt), cached, fault)
            event["meta_info"]["output_top_logprobs"] = [
                [[x, i, None], [x - 1.0, i + 1, None]] for x, i in zip(logprobs, ids, strict=True)
            ]
            return web.json_response(event)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if fault == "error-event":
            await self._event(response, {"error": {"message": "prompt too long", "code": 400}})
            return response
        for end in [*range(self.per_event, count, self.per_event), count]:
            event = (self._chunk if openai else self._native_event)(
                body, ids, logprobs, end, len(prompt), cached, fault
            )
            await self._event(response, event)
            await asyncio.sleep(self.token_delay_s)
            if end == 2 and fault == "close":
                assert request.transport is not None
                request.transport.close()
                return response
            if end == 2 and fault == "short":
                return response
            if end == 2 and fault == "stall":
                await asyncio.sleep(60)
            if end == 2 and fault == "garbage":
                await response.write(b"data: {not json\n\n")
                return response
            if end == 2 and fault == "die":
                os._exit(3)
        if openai and body["stream_options"].get("include_usage") and fault != "no-usage":
            await self._event(response, self._last_chunk(count, len(prompt), cached, fault))
        await response.write(b"data: [DONE]\n\n")
        return response

    def _count(self, computed: int, decoded: int) -> None:
        counters = self.counters
        counters["selected"] += 100 * decoded
        counters["misses"] += int(self.miss_share * 100 * decoded)
        counters["hits"] = counters["selected"] - counters["misses"]
        if self.moves:
            counters["fetched_entries"] = counters["misses"]
            counters["bytes_to_device"] = 584 * counters["misses"]
            counters["bytes_to_host"] = counters.get("bytes_to_host", 0) + 584 * 3 * (computed // 4 + 1)

    def _native_event(
        self,
        body: dict[str, Any],
        ids: list[int],
        logprobs: list[float],
        end: int,
        prompt: int,
        cached: int,
        fault: str | None,
    ) -> dict[str, Any]:
        count = len(ids)
        start = max(0, end - self.per_event) if self.incremental else 0
        shown = [[x, t, None] for x, t in zip(logprobs[start:end], ids[start:end], strict=True)]
        if fault == "nan":
            shown[-1][0] = None
        meta: dict[str, Any] = {
            "completion_tokens": end,
            "prompt_tokens": prompt + (fault == "wrong-prompt-count"),
            "cached_tokens": cached,
            "finish_reason": {"type": "length", "length": count} if end == count else None,
        }
        if fault == "no-usage":
            del meta["cached_tokens"], meta["prompt_tokens"]
        if fault == "abort" and end == count:
            meta["finish_reason"] = {"type": "abort", "message": "retracted too often"}
        if body["return_logprob"]:
            meta["output_token_logprobs"] = shown
        return {"output_ids": ids[start:end], "meta_info": meta}

    def _chunk(
        self,
        body: dict[str, Any],
        ids: list[int],
        logprobs: list[float],
        end: int,
        prompt: int,
        cached: int,
        fault: str | None,
    ) -> dict[str, Any]:
        start = (end - 1) // self.per_event * self.per_event
        reason = None if end < len(ids) else "abort" if fault == "abort" else "length"
        choice: dict[str, Any] = {
            "index": 0,
            "text": "".join(f" {i}" for i in ids[start:end]),
            "finish_reason": reason,
        }
        if body.get("return_token_ids"):
            choice["token_ids"] = ids[start:end]
        if body.get("logprobs") is not None:
            listed: list[float | None] = [*logprobs[start:end]]
            choice["logprobs"] = {"token_logprobs": [None] if fault == "nan" else listed, "tokens": []}
        if "messages" in body:
            text = choice.pop("text")
            # As reasoning models do, the first half of an answer is its reasoning.
            choice["delta"] = {"reasoning_content" if end <= len(ids) // 2 else "content": text}
            if body.get("logprobs"):
                values = choice["logprobs"].pop("token_logprobs")
                choice["logprobs"] = {
                    "content": [{"token": "", "logprob": x, "top_logprobs": []} for x in values]
                }
        return {"id": "x", "object": "text_completion", "created": 0, "model": "wire", "choices": [choice]}

    def _last_chunk(self, count: int, prompt: int, cached: int, fault: str | None) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "completion_tokens": count,
            "prompt_tokens": prompt + (fault == "wrong-prompt-count"),
            "total_tokens": prompt + count,
        }
        if self.cache_report and cached:  # SGLang and vLLM leave out a 0
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        base = {"id": "x", "object": "text_completion", "created": 0, "model": "wire"}
        return {**base, "choices": [], "usage": usage}

    async def _event(self, response: web.StreamResponse, value: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(value).encode() + b"\n\n")


@contextlib.asynccontextmanager
async def serving(server: WireServer, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Serves in the running event loop, with TLS where settings are given; yields the base URL."""
    runner = web.AppRunner(server.app(), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{runner.addresses[0][1]}"
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
    parser.add_argument("--openai-only", action="store_true")
    parser.add_argument("--api-key")
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
        native=not args.openai_only,
        api_key=args.api_key,
        faults={int(number): fault for number, fault in args.fault},
    )
    web.run_app(server.app(), host=args.host, port=args.port, handle_signals=not args.ignore_sigterm)


if __name__ == "__main__":
    main()

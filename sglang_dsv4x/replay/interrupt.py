"""Runs a coroutine so that SIGINT and SIGTERM end it in order."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_until_signal(work: Coroutine[Any, Any, None]) -> int | None:
    """Runs `work` in a new event loop and returns None, or the number of the signal that cancelled it.

    The first signal cancels, so `work` can clean up; a second one acts as it usually does. Exceptions of
    `work` pass through.
    """

    async def supervised() -> int | None:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(work)
        received: list[int] = []

        def stop(number: int) -> None:
            received.append(number)
            for each in SIGNALS:
                loop.remove_signal_handler(each)
            task.cancel()

        for each in SIGNALS:
            loop.add_signal_handler(each, stop, each)
        try:
            await task
        except asyncio.CancelledError:
            if not received:
                raise
        return received[0] if received else None

    return asyncio.run(supervised())

"""SIGINT and SIGTERM end a replay in order: what was done is kept, and a launched server is ended."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine, Iterator
from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived."""


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Inside, SIGTERM raises Terminated, so that blocks are left in order as they are after Ctrl-C.

    For the main thread only.
    """

    def interrupt(number: int, frame: object) -> NoReturn:
        raise Terminated

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def exit_code(interrupt: KeyboardInterrupt) -> int:
    """The exit code by which a shell knows the signal: 130 for Ctrl-C, 143 for SIGTERM."""
    return 128 + (signal.SIGTERM if isinstance(interrupt, Terminated) else signal.SIGINT)


def run_until_signal(work: Coroutine[Any, Any, None]) -> int | None:
    """Runs `work` in a new event loop and returns None, or the number of the signal that cancelled it.

    The first signal cancels, so `work` can clean up; a second one acts as it did before. Exceptions of `work`
    pass through. For the main thread only.
    """
    before = {number: signal.getsignal(number) for number in SIGNALS}
    received: list[int] = []

    async def supervised() -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(work)

        def release() -> None:
            for number in SIGNALS:
                loop.remove_signal_handler(number)
                signal.signal(number, before[number])

        def stop(number: int) -> None:
            received.append(number)
            release()
            task.cancel()

        for number in SIGNALS:
            loop.add_signal_handler(number, stop, number)
        try:
            await task
        except asyncio.CancelledError:
            if not received:
                raise
        finally:
            release()

    asyncio.run(supervised())
    return received[0] if received else None

"""A run's time: the trace's pauses at the chosen scale, and the end that the user set."""

from __future__ import annotations

import asyncio
import time


class DurationReached(Exception):
    """The time that the user gave is over."""


class Clock:
    """Pauses of the trace are multiplied by `scale`; none goes past `duration_s` seconds (None: no end)."""

    def __init__(self, scale: float, duration_s: float | None):
        self._scale = scale
        self._duration_s = duration_s
        self._began = 0.0

    def start(self, reached_s: float) -> None:
        """Begins at `reached_s`, the seconds that the run had taken before an interruption."""
        self._began = time.perf_counter() - reached_s

    def now(self) -> float:
        """Seconds since the run began, those before an interruption included."""
        return time.perf_counter() - self._began

    def check(self) -> None:
        """Raises DurationReached when the run's time is over."""
        if self._duration_s is not None and self.now() >= self._duration_s:
            raise DurationReached

    async def pause(self, seconds: float) -> float:
        """Waits for a pause of the trace and returns the seconds waited. Raises DurationReached."""
        scaled = seconds * self._scale
        await self._sleep(scaled)
        return scaled

    async def arrival(self, seconds: float) -> None:
        """Waits until what began `seconds` into the trace may begin. Raises DurationReached."""
        await self._sleep(max(0.0, seconds * self._scale - self.now()))

    async def _sleep(self, seconds: float) -> None:
        left = float("inf") if self._duration_s is None else self._duration_s - self.now()
        if left > 0:
            await asyncio.sleep(min(seconds, left))
        if left <= seconds:
            raise DurationReached

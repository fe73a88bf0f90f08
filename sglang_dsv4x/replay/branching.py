"""The branches that one agent has started and waits for, each at its turn."""

from __future__ import annotations

import asyncio


class Beside:
    """Tasks that run beside an agent's turns; see `conversation.Branches`."""

    def __init__(self) -> None:
        self._tasks: list[tuple[int, asyncio.Task[None]]] = []

    def add(self, task: asyncio.Task[None], turns: int) -> None:
        """The agent waits for `task` after its next `turns` turns."""
        self._tasks.append((turns, task))

    async def due(self) -> None:
        """Waits for those that are due before the agent's next step."""
        for _, task in [each for each in self._tasks if each[0] == 0]:
            await task
        self._tasks = [each for each in self._tasks if each[0]]

    def turn_ended(self) -> None:
        """Counts a turn of the agent's."""
        self._tasks = [(turns - 1, task) for turns, task in self._tasks]

    async def all(self) -> None:
        """Waits for every one, as the agent does at its end."""
        for _, task in self._tasks:
            await task
        self._tasks = []

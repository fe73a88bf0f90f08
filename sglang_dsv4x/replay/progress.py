"""A progress bar whose unit is what takes the time: tokens to compute."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tqdm import tqdm

from sglang_dsv4x.replay.plan import PlannedConversation, planned_turns
from sglang_dsv4x.replay.records import Run, TurnRecord

if TYPE_CHECKING:
    from sglang_dsv4x.replay.session import Settings


class Progress:
    """New prompt tokens and output tokens done of those planned, with the time left, on stderr."""

    def __init__(self, *, enabled: bool = True, label: str = "replay"):
        self._enabled = enabled
        self._label = label
        self._bar: tqdm[None] | None = None
        self._turns = self._planned = self._failed = 0
        self._began = 0.0
        self._duration_s: float | None = None
        self._cost: dict[tuple[str, int], int] = {}

    def begin(
        self, conversations: Sequence[PlannedConversation], runs: Sequence[Run], settings: Settings
    ) -> None:
        """Opens the bar; it prints every ten seconds where stderr is not a terminal."""
        for conversation in conversations:
            for turn in planned_turns(conversation.main):
                cost = turn.input_tokens - turn.theoretical_cached + turn.output_tokens
                self._cost[(conversation.name, turn.number)] = cost
        done = [record for run in runs for record in run.records]
        self._turns, self._planned = len(done), len(self._cost) * len(runs)
        self._began, self._duration_s = time.monotonic(), settings.pace.duration_s
        self._bar = tqdm(
            total=sum(self._cost.values()) * len(runs),
            initial=sum(self._cost[(record.conversation, record.number)] for record in done),
            desc=self._label,
            unit="tok",
            unit_scale=True,
            mininterval=0.1 if sys.stderr.isatty() else 10.0,
            disable=not self._enabled,
            file=sys.stderr,
            smoothing=0.1,
        )

    def turn(self, record: TurnRecord) -> None:
        """Moves on by one turn."""
        if self._bar is None:
            return
        self._turns += 1
        self._failed += record.error is not None
        words = f"turn {self._turns}/{self._planned}"
        if self._failed:
            words += f", {self._failed} failed"
        if self._duration_s is not None:
            left = max(0.0, self._duration_s - (time.monotonic() - self._began))
            words += f", ends in {left:.0f} s at the latest"
        self._bar.set_postfix_str(words, refresh=False)
        self._bar.update(self._cost[(record.conversation, record.number)])

    def close(self) -> None:
        """Closes the bar; may be called again."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

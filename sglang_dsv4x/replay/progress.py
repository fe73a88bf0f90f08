"""A progress bar whose unit is what takes the time: tokens to compute."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tqdm import tqdm

from sglang_dsv4x.replay.plan import PlannedConversation, planned_turns
from sglang_dsv4x.replay.records import TurnRecord


class Progress:
    """New prompt tokens and output tokens done of those planned, with the time left, on stderr."""

    def __init__(self, *, enabled: bool = True, label: str = "replay"):
        self._enabled = enabled
        self._label = label
        self._bar: tqdm[None] | None = None
        self._turns = 0
        self._cost: dict[tuple[str, int], int] = {}

    def begin(self, conversations: Sequence[PlannedConversation]) -> None:
        """Opens the bar; it prints every ten seconds where stderr is not a terminal."""
        for conversation in conversations:
            for turn in planned_turns(conversation.main):
                cost = turn.input_tokens - turn.theoretical_cached + turn.output_tokens
                self._cost[(conversation.name, turn.number)] = cost
        self._bar = tqdm(
            total=sum(self._cost.values()),
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
        self._bar.set_postfix_str(f"turn {self._turns}/{len(self._cost)}", refresh=False)
        self._bar.update(self._cost[(record.conversation, record.number)])

    def close(self) -> None:
        """Closes the bar; may be called again."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

"""What a plan is asked, checked once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .byte_model import Settings
from .errors import PlanError
from .machine import LINK, Link, Machine
from .shape import CacheShape
from .traffic import MISS_RATE, STEP_S


@dataclass(frozen=True)
class Question:
    """What the user asked."""

    name: str
    shape: CacheShape
    settings: Settings
    machine: Machine
    context: int
    requests: int | None = None
    """That must fit; None: as many as do."""
    running: int | None = None
    """--max-running-requests; None: as many requests of `context` as fit."""
    miss_rate: float = MISS_RATE
    step_s: float = STEP_S
    link: Link = LINK

    def __post_init__(self) -> None:
        for flag, value in (
            ("--context", self.context),
            ("--requests", self.requests),
            ("--max-running-requests", self.running),
            ("--chunked-prefill-size", self.settings.chunk_tokens),
        ):
            if value is not None and value < 1:
                raise PlanError(f"{flag} is {value}; give a positive number.")
        if self.context > self.shape.max_context:
            raise PlanError(
                f"--context {self.context} is longer than the model's {self.shape.max_context} positions "
                "(max_position_embeddings)."
            )
        if not 0 <= self.miss_rate <= 1:
            raise PlanError(f"--miss-rate is {self.miss_rate}; give a share between 0 and 1.")
        if not (0 < self.step_s < math.inf and 0 < self.link.bytes_per_s < math.inf):
            raise PlanError("--step-ms and --link-gb-per-s must be positive numbers.")
        if self.running is not None and self.requests is not None and self.requests > self.running:
            raise PlanError(
                f"--requests {self.requests} cannot run at once with --max-running-requests {self.running}."
            )

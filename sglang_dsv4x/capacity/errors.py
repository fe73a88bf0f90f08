"""What the planner refuses."""

from __future__ import annotations


class PlanError(ValueError):
    """No plan can be made; the message is one sentence that names the limit or the flag, and the remedy."""


class DeviceMemoryError(PlanError):
    """Too little device memory: more GPUs would help."""

"""Time that passes only when it is told to."""

from __future__ import annotations

__all__ = ["VirtualClock"]


class VirtualClock:
    """Call it for the time, in seconds."""

    def __init__(self) -> None:
        self.now = 1.0  # 0 means "never" in many a message

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds

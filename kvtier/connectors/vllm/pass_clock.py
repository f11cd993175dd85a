"""How long passes take, by the clock of what computes them.

A GPU is given the next pass before it has ended this one, so the worker's own clock says nothing there: two marks in
the queue of the engine's work do, and nobody waits for them.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Mark", "PassClock"]

_MOST = 16  # passes that are being timed: what a device never answers for is forgotten


class Mark(Protocol):
    """A moment in the engine's queue; as :class:`torch.cuda.Event` is."""

    def record(self) -> None: ...

    def query(self) -> bool:
        """Whether the device has come that far."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this one to that."""
        ...


class _Now:
    """Where a call returns when its work is done."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: _Now) -> float:
        return 1e3 * (end_event.at - self.at)


class PassClock:
    """Of passes by number, on ``device``; ``mark`` makes another kind of marks than it has. Every call comes from the
    worker's own thread, under the stream on which it computes."""

    def __init__(self, device: torch.device, mark: Callable[[], Mark] | None = None) -> None:
        self._mark = mark or (lambda: torch.cuda.Event(enable_timing=True) if device.type == "cuda" else _Now())
        self._began: tuple[int, Mark] | None = None
        self._timed: deque[tuple[int, Mark, Mark]] = deque(maxlen=_MOST)

    def begin(self, number: int) -> None:
        """The pass of that number follows; 0: one that is not timed."""
        self._began = (number, self._now()) if number else None

    def end(self) -> None:
        """The pass has been queued, or computed."""
        if self._began is not None:
            number, began = self._began
            self._timed.append((number, began, self._now()))
            self._began = None

    def take(self) -> dict[int, float]:
        """Seconds by number, of those that have ended since the last call."""
        ended = {}
        while self._timed and self._timed[0][2].query():
            number, began, end = self._timed.popleft()
            ended[number] = began.elapsed_time(end) / 1e3
        return ended

    def _now(self) -> Mark:
        mark = self._mark()
        mark.record()
        return mark

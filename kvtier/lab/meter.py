"""What the engine's thread spends in a cache's calls, step by step: wall time and CPU time."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, cast

import numpy as np

if TYPE_CHECKING:
    from kvtier.manager import CacheManager

__all__ = ["CallMeter"]


def _reading_seconds() -> float:
    """CPU time between two readings with nothing between them."""
    found = []
    for _ in range(200):
        cpu = time.thread_time()
        time.perf_counter()
        time.perf_counter()
        found.append(time.thread_time() - cpu)
    return float(np.median(found))


class CallMeter:
    """Stands before a manager and adds up its calls; :meth:`step` ends a step. CPU time is the calling thread's own.

    What a call waits by request (``poll`` with a timeout) is not counted as wall time, and what reading the clock takes
    (a system call, often as long as a small call itself) is measured and taken off. The first reading after the
    engine's pass, whose own code is cold and which takes ten times as long, comes before the one that counts.
    """

    def __init__(self, manager: CacheManager) -> None:
        self._manager = manager
        self._wall = self._cpu = 0.0
        self._wrapped: dict[str, Callable[..., Any]] = {}
        self._reading = _reading_seconds()
        self.wall: list[float] = []
        """Seconds in calls, one entry a step."""
        self.cpu: list[float] = []

    @property
    def manager(self) -> CacheManager:
        """The meter itself, in the manager's place."""
        return cast("CacheManager", self)

    def step(self) -> None:
        """The engine's step has ended."""
        self.wall.append(self._wall)
        self.cpu.append(self._cpu)
        self._wall = self._cpu = 0.0

    def __getattr__(self, name: str) -> Any:
        known = self._wrapped.get(name)
        if known is not None:
            return known
        value = getattr(self._manager, name)
        if not callable(value):
            return value

        @wraps(value)
        def measured(*args: Any, **options: Any) -> Any:
            time.thread_time()  # its own code, cold after the engine's pass, is no part of what a call costs
            cpu, wall = time.thread_time(), time.perf_counter()
            try:
                return value(*args, **options)
            finally:
                spent = time.perf_counter() - wall
                self._cpu += max(0.0, time.thread_time() - cpu - self._reading)
                waits = name == "poll" and bool((args and args[0]) or options.get("timeout"))
                self._wall += 0.0 if waits else spent

        self._wrapped[name] = measured
        return measured

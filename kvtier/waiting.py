"""Waiting: the requests that an engine has put off, and about when each will begin: what a cache is told ahead.

enter → (news, changes: once a step, of those that did not begin in it) → leave, or drop
"""

from __future__ import annotations

import time
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Waiting"]

_FIRST = 32  # of those that wait, how many are announced
_AGAIN = 1.0  # seconds after which it is said anew when each will begin
_RECENT = 8  # beginnings, by which the next ones are foreseen
_LONGEST = 60.0  # seconds that count of a pause between two


class Waiting:
    """In order of arrival, in which the engine begins with them. ``clock`` is in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._announced: dict[str, bool] = {}
        self._interval = 0.0  # between two that had to wait, smoothed
        self._began: float | None = None
        self._said = 0.0

    def __len__(self) -> int:
        return len(self._announced)

    def enter(self, request_id: str, *, first: bool = False) -> None:
        """It waits behind the others, or ``first`` of all, as one that was preempted does."""
        if first:
            self._announced = {request_id: False, **self._announced}
        else:
            self._announced[request_id] = False

    def leave(self, request_id: str) -> None:
        """It begins. One that does not wait is no error."""
        announced = self._announced.pop(request_id, None)
        if announced is None:
            return
        now = self._clock()
        if announced and self._began is not None:  # else the engine waited for it
            self._interval += (min(now - self._began, _LONGEST) - self._interval) / _RECENT
        self._began = now

    def drop(self, request_id: str) -> None:
        """It ends before it began, if it waits at all."""
        self._announced.pop(request_id, None)

    def news(self) -> list[tuple[str, float]]:
        """Those of the first that were not announced, and in how many seconds each will begin."""
        found = [(name, within) for name, within, announced in self._first() if not announced]
        self._announced.update((name, True) for name, _ in found)
        return found

    def changes(self) -> dict[str, float]:
        """The same for those that were announced, from time to time; else none."""
        now = self._clock()
        if now - self._said < _AGAIN:
            return {}
        self._said = now
        return {name: within for name, within, announced in self._first() if announced}

    def _first(self) -> list[tuple[str, float, bool]]:
        waiting = islice(self._announced.items(), _FIRST)
        return [(name, (place + 1) * self._interval, announced) for place, (name, announced) in enumerate(waiting)]

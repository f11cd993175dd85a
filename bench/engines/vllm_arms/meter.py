"""How much processor time the calls of a class take, by the calling threads' own clocks, told to other processes.

A file holds one row for each public method that the class defines itself, and is mapped, so that whoever reads it finds
what was spent by now. A call from within another one counts as part of that one.
"""

from __future__ import annotations

import time
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["Meter", "Spent", "public", "read"]

ROW = np.dtype([("name", "S40"), ("seconds", "f8"), ("calls", "i8")])


class Spent(NamedTuple):
    """In the calls of one method, so far."""

    seconds: float
    calls: int

    def and_also(self, other: Spent) -> Spent:
        return Spent(self.seconds + other.seconds, self.calls + other.calls)

    def since(self, before: Spent) -> Spent:
        return Spent(self.seconds - before.seconds, self.calls - before.calls)


def public(cls: type) -> list[str]:
    """The methods that others call, in the order of their definition."""
    return [name for name, value in vars(cls).items() if callable(value) and not name.startswith("_")]


class Meter:
    """Of one process. Its object calls from one thread."""

    def __init__(self, file: Path, names: list[str]) -> None:
        self._rows = np.memmap(file, ROW, "w+", shape=len(names))
        self._rows["name"] = names
        self._seconds, self._calls = self._rows["seconds"], self._rows["calls"]
        self._inside = False

    def around(self, number: int, method: Callable[..., Any]) -> Callable[..., Any]:
        """``method``, metered as the one of that number."""

        @wraps(method)
        def metered(*arguments: Any, **named: Any) -> Any:
            if self._inside:
                return method(*arguments, **named)
            self._inside = True
            began = time.thread_time()
            try:
                return method(*arguments, **named)
            finally:
                self._seconds[number] += time.thread_time() - began
                self._calls[number] += 1
                self._inside = False

        return metered


def read(file: Path) -> dict[str, Spent]:
    """What a meter has told by now, of the methods that were called."""
    rows = np.fromfile(file, ROW)
    return {row["name"].decode(): Spent(float(row["seconds"]), int(row["calls"])) for row in rows if row["calls"]}

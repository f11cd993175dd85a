"""Hints: the requests that were announced, and whose turn it is, by when each is expected to start.

Three queues: of those to be brought into host memory, of those that nobody came for, of those to go on to the device.
An entry of a hint that has ended, or was scheduled anew, stays in a queue until it is the first there, or until such
entries are as many as the others; it keeps nothing of what the hint named.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from kvtier.lookup import Foresee

__all__ = ["Hint", "Hints", "Queue"]

_FEW = 64  # entries that are not worth sweeping


@dataclass(slots=True, eq=False)
class Hint:
    """Of a request: what it will read, and what has been done about it.

    nodes     |<- wanted: brought ->|<- wanted: still to be ->|     of ``found``, those that the disk alone had
              0                  issued                      end
    """

    name: str
    foresee: Foresee
    due: float
    request: int
    """Of the catalog, which holds what was brought for it."""
    wanted: list[int] | None = None
    """None: not looked for yet."""
    found: list[int] = field(default_factory=list)
    """All its nodes."""
    seen: float = 0.0
    """When these were looked for last."""
    stale: bool = False
    """Whether others had some of it brought who will not come: look again."""
    lifted: list[int] = field(default_factory=list)
    """Those that were sent on to the device."""
    issued: int = 0
    turn: int = 0
    """Which of its entries in the queues counts: the one that was pushed last."""
    again: float = 0.0
    """Nothing is sent on for it before."""
    soon: bool = False
    """Whether it waits for its turn to go on to the device."""
    gone: bool = False
    """Whether it was taken back, and only has to give back what was brought for it."""
    rests: bool = False
    """Whether no more is ordered for it until it is scheduled anew."""
    tickets: set[int] = field(default_factory=set)
    """Of what is on its way to host memory."""
    lifts: set[int] = field(default_factory=set)
    """Of what was sent on to the device."""

    @property
    def brought(self) -> list[int]:
        return self.wanted[: self.issued] if self.wanted is not None else []

    def names(self, place: int, node: int) -> bool:
        """Whether this is one of its nodes, in this place, and somebody will come for it."""
        return not self.gone and len(self.found) > place and self.found[place] == node


Queue: TypeAlias = list[tuple[float, int, Hint]]
"""A heap: expected start, turn, hint."""


class Hints:
    """``lifts``: whether they go on to the device."""

    def __init__(self, *, lifts: bool) -> None:
        self.lifts = lifts
        self._turns = itertools.count()
        self.by_name: dict[str, Hint] = {}
        self.urgent: Queue = []
        self.overdue: Queue = []
        self.coming: Queue = []
        self.soon: deque[Hint] = deque()
        """Those from ``coming`` whose time it is, which go when all of theirs is in host memory."""
        self._aside: deque[tuple[float, Hint]] = deque()
        """Those from ``urgent`` for which nothing could be had: when to try again."""

    def schedule(self, hint: Hint) -> None:
        """It is new, or will start at another time."""
        self.by_name[hint.name] = hint
        hint.turn, hint.rests = next(self._turns), False
        if len(self.overdue) > _FEW + 2 * len(self.by_name):
            self.overdue = [(each.due, each.turn, each) for each in self.by_name.values()]
            heapify(self.overdue)
            self.urgent = list(self.overdue)
            self.coming = list(self.overdue) if self.lifts else []
            self._aside.clear()
            return
        for queue in (self.urgent, self.overdue, self.coming) if self.lifts else (self.urgent, self.overdue):
            heappush(queue, (hint.due, hint.turn, hint))

    def take_back(self, hint: Hint) -> None:
        """Nobody will come for it, but something was brought: it is given up next."""
        hint.due, hint.gone, hint.foresee = -inf, True, _nothing
        self.schedule(hint)
        hint.rests = True

    def bring_more(self, hint: Hint) -> None:
        """Some of it is to be brought (again)."""
        heappush(self.urgent, (hint.due, hint.turn, hint))

    def put_aside(self, until: float) -> None:
        """Pass over the most urgent one. Each time until a later one."""
        self._aside.append((until, heappop(self.urgent)[2]))

    def take_up(self, now: float) -> None:
        """Those that were put aside until now are as urgent as they were."""
        while self._aside and self._aside[0][0] <= now:
            _, hint = self._aside.popleft()
            if self.lives(hint):
                self.bring_more(hint)

    def forget(self, hint: Hint) -> None:
        """It has ended."""
        del self.by_name[hint.name]
        hint.foresee, hint.found, hint.wanted = _nothing, [], None
        if not self.by_name:
            for queue in (self.urgent, self.overdue, self.coming, self.soon, self._aside):
                queue.clear()

    def lives(self, hint: Hint) -> bool:
        """Whether it has not ended."""
        return self.by_name.get(hint.name) is hint

    def first(self, queue: Queue) -> Hint | None:
        """Whose turn it is in this queue."""
        # Not by its time: a request that is put off and back again has two entries of one time.
        while queue and not (self.lives(queue[0][2]) and queue[0][2].turn == queue[0][1]):
            heappop(queue)
        return queue[0][2] if queue else None

    def take(self, queue: Queue, until: float) -> Hint | None:
        """The same, and it leaves the queue, if it is due by then."""
        hint = self.first(queue)
        if hint is None or queue[0][0] >= until:
            return None
        heappop(queue)
        return hint

    def naming(self, found: list[int], but: Hint | None = None) -> list[Hint]:
        """Who named the beginning of this too."""
        if not found:
            return []
        return [each for each in self.by_name.values() if each is not but and each.names(0, found[0])]

    def sharing(self, hint: Hint) -> tuple[Hint | None, list[Hint]]:
        """Who named all that was brought for this one, of several the first to start; and who named some of it."""
        brought = set(hint.brought)
        places = [place for place, node in enumerate(hint.found) if node in brought]
        if not places:
            return None, []
        first, last = places[0], places[-1]
        others = [each for each in self.by_name.values() if each is not hint and each.names(first, hint.found[first])]
        whole = [each for each in others if each.names(last, hint.found[last])]
        return min(whole, key=lambda each: each.due, default=None), others


def _nothing(request: int, lost: bool, now: float, due: float) -> tuple[list[int], list[int]]:
    return [], []

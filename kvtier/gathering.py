"""Gathering: blocks that were computed wait for others, a few steps at most, before they are indexed and copied down.

Both cost the engine's thread about as much for one block as for many, and a batch that decodes completes one block at a
time. Whoever looks for blocks, or ends what holds these, calls :meth:`Gathering.flush` first: so nobody can tell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.lookup import Lookup
    from kvtier.placement import Placement
    from kvtier.sequence import Sequence

__all__ = ["Gathering"]

_BLOCKS = 8  # or fewer, of so many bytes: then an order is small beside the copy
_BYTES = 4 << 20
_MANY = 2  # times as many do not wait for the end of the step: a prompt
_STEPS = 8  # that any of them waits,
_LONG = 12  # or with other work in each of them


class Gathering:
    """Of blocks of ``page_bytes``, in the slots of the requests that computed them.

    ``stream()`` says on which of the device's queues the engine computes them, if it has some: copies come behind that
    one, whichever is current when they are ordered.
    """

    def __init__(
        self, lookup: Lookup, placement: Placement, page_bytes: int, stream: Callable[[], int] | None = None
    ) -> None:
        self._lookup = lookup
        self._placement = placement
        self._stream = stream
        self._behind: int | None = None
        self._most = max(1, min(_BLOCKS, _BYTES // page_bytes))
        self._count = self._steps = 0
        self.waiting: dict[int, tuple[Sequence, int]] = {}
        """By the request's number in the catalog: how many of its first blocks are computed."""

    def add(self, sequence: Sequence, blocks: int) -> None:
        """So many of the request's first blocks are computed; of one whose blocks nobody may have, nothing is kept."""
        if blocks <= sequence.cached or not sequence.cacheable:
            return
        if self._stream is not None:
            stream = self._stream()
            if stream != self._behind:
                self.flush()
            self._behind = stream
        known = self.waiting.get(sequence.request)
        new = blocks - (sequence.cached if known is None else known[1])
        if new <= 0:
            return
        self.waiting[sequence.request] = sequence, blocks
        self._count += new
        if self._count >= _MANY * self._most or sequence.tail is not None:  # what loads behind these must know of them
            self.flush()

    def step(self, *, busy: bool = False) -> bool:
        """A step of the engine has ended in which some wait; returns whether they waited long enough. In a ``busy`` one
        they may wait for another."""
        self._steps += 1
        due = self._steps >= _LONG if busy else self._count >= self._most or self._steps >= _STEPS
        if due:
            self.flush()
        return due

    def let_go(self, sequence: Sequence) -> None:
        """Nothing will hold the request's blocks on the device any more: if some of them wait, they do so no longer."""
        if sequence.request in self.waiting:
            self.flush()

    def flush(self) -> None:
        """Wait for no more."""
        if not self.waiting:
            return
        waiting, self.waiting, self._count, self._steps = self.waiting, {}, 0, 0
        new = self._lookup.index(waiting.values())
        if new:
            self._placement.on_computed(new, behind=self._behind)

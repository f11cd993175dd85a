"""Gathering: blocks that were computed wait for others, a few steps at most, before they are indexed and copied down.

Both cost the engine's thread about as much for one block as for many, and a batch that decodes completes one block at a
time. Whoever looks for blocks, or ends what holds these, calls :meth:`Gathering.flush` first: so nobody can tell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvtier.lookup import Lookup
    from kvtier.placement import Placement
    from kvtier.sequence import Sequence

__all__ = ["Gathering"]

_BLOCKS = 16  # or fewer, of so many bytes: then what an order costs is small beside the copy
_BYTES = 32 << 20
_MANY = 2  # times as many do not wait for the end of the step: a prompt
_STEPS = 16  # that any of them waits,
_LONG = 24  # or with other work in each of them


class Gathering:
    """Of blocks of ``page_bytes``, in the slots of the ``requests`` that computed them; while some of these are in
    ``racing``, what loads behind computed blocks must know of them at once.

    ``stream()`` says on which of the device's queues the engine computes them, if it has some: copies come behind that
    one, whichever is current when they are ordered.
    """

    def __init__(
        self,
        lookup: Lookup,
        placement: Placement,
        requests: Mapping[str, Sequence],
        racing: Mapping[str, Sequence],
        page_bytes: int,
        stream: Callable[[], int] | None = None,
    ) -> None:
        self._lookup = lookup
        self._placement = placement
        self._requests = requests
        self._racing = racing
        self.stream = stream
        self._behind: int | None = None
        self._most = max(1, min(_BLOCKS, _BYTES // page_bytes))
        self._count = self._steps = 0
        self.waiting: list[str] = []
        """Requests of which computed blocks wait, up to ``growing.noted``; some of them more than once."""

    def add(self, sequence: Sequence, blocks: int) -> None:
        """So many of the request's first blocks are computed; of one whose blocks nobody may have, nothing is kept."""
        growing = sequence.growing
        new = blocks - max(sequence.cached, growing.noted)
        if new > 0 and sequence.cacheable:
            self.heed_stream()
            growing.noted = blocks
            self.note([sequence.request_id], new)

    def note(self, requests: list[str], blocks: int) -> None:
        """These have computed so many more, in all, and ``growing.noted`` says it."""
        self.waiting += requests
        self._count += blocks
        if self._count >= _MANY * self._most or self._racing:
            self.flush()

    def heed_stream(self) -> None:
        """What is noted from now on is computed on the current one: nothing waits that was computed on another."""
        if self.stream is not None:
            stream = self.stream()
            if stream != self._behind:
                self.flush()
            self._behind = stream

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
        if sequence.request_id in self.waiting:
            self.flush()

    def flush(self) -> None:
        """Wait for no more."""
        if not self.waiting:
            return
        waiting, self.waiting, self._count, self._steps = dict.fromkeys(self.waiting), [], 0, 0
        new = self._lookup.index(self._requests[request_id] for request_id in waiting)
        if new:
            self._placement.on_computed(new, behind=self._behind)

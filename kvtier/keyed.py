"""KeyedPages: host memory and a disk below a cache of somebody else's, which asks for single pages by their keys.

That cache owns its memory: its slots are endpoints of transfers, as an engine's blocks are (`kvtier.offload`). A key
names all that precedes its page, so every page stands alone: it is found, evicted and lost without others.

Who calls what, all from one thread: ``find``, then ``load`` or ``store`` as a job, then ``poll`` until the job is
reported; once a step, also while nothing is asked for and ``busy`` says so. No call waits but ``drain``. A job's slots
must neither be given away nor, where they are loaded, be read before it is reported.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.catalog import Catalog, PageStatus, Residency, Tier
from kvtier.costmodel import CostModel
from kvtier.placement import OFFLOAD, Placement, tier_specs
from kvtier.stats import CacheStats, Counts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.config import CacheConfig
    from kvtier.messages import Completion, DataPlane
    from kvtier.namespace import Namespace

__all__ = ["Done", "Key", "KeyedPages"]

Slots = npt.NDArray[np.uint32]

_SCRATCH = 1  # the catalog's request of a call that holds nothing after it
_PATIENCE = 0.1  # seconds that draining waits at a time


class Key(NamedTuple):
    """What a page is called: 32 bytes that say everything before it, and the group of layers that it is of."""

    digest: bytes
    group: int = 0

    @property
    def label(self) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self.digest, np.uint8).reshape(1, -1)


class Done(NamedTuple):
    """A job that has ended: nothing touches its slots any more."""

    job: int
    arrived: npt.NDArray[np.bool_]
    """Of a load, for each key, whether its page is in its slot; of a store, whether the page is kept here now."""


@dataclass(slots=True)
class _Job:
    request: int
    arrived: npt.NDArray[np.bool_]
    tickets: set[int] = field(default_factory=set)


class KeyedPages:
    """Sized by what ``plane`` has; its device tier is the other cache's memory."""

    def __init__(
        self,
        config: CacheConfig,
        namespace: Namespace,
        plane: DataPlane,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config, self.namespace, self.plane = config, namespace, plane
        self._clock = clock
        hello = plane.hello()
        self._tiers = sorted(set(hello.capacity) - {Tier.DEVICE})
        self.catalog = Catalog(
            tier_specs(config, hello.capacity, self._tiers),
            block_size=config.block_size,
            labels="hash",
        )
        costs = CostModel(hello.page_bytes, bytes_in_flight=config.mover.bytes_in_flight)
        self.placement = Placement(config, self.catalog, plane, self._tiers, hello.page_bytes, costs, clock)
        self.adopted = self.placement.adopt(hello)
        self._next = _SCRATCH + 1
        self._jobs: dict[int, _Job] = {}
        self._tickets: dict[int, tuple[int, npt.NDArray[np.intp]]] = {}  # → its job, and which of its pages
        self._ended: list[Done] = []
        self._counts = Counts()

    # ---- single pages --------------------------------------------------------------------------------------------

    def find(self, key: Key) -> bool:
        """Whether the page could be loaded now. Holds nothing."""
        self._counts.tokens_asked += self.config.block_size
        counts = self.catalog.peek([self._root(key.group)], key.label)
        return sum(counts) > 0 and not (counts[Tier.DISK] and self.placement.disk_offline)

    def touch(self, keys: Sequence[Key]) -> None:
        """These are in use: the first of them shall be evicted last."""
        with self.catalog.lease(_SCRATCH):
            for key in reversed(keys):
                self.catalog.match([self._root(key.group)], key.label, 0, _SCRATCH)

    def _root(self, group: int) -> int:
        space = self.namespace.fingerprint
        return self.catalog.root(space, group, self.plane.generation(space))

    # ---- jobs ----------------------------------------------------------------------------------------------------

    def load(self, job: int, keys: Sequence[Key], slots: Slots) -> None:
        """Bring the pages into ``slots``, uint32 [keys], as far as they are found one after the other."""
        made, nodes = self._begin(job, keys)
        deadline = self._clock() + self.config.load_timeout_seconds
        brought = self.placement.bring(nodes, made.request, deadline, device=slots[: len(nodes)])
        first = 0
        for ticket, count in zip(brought.tickets, brought.counts, strict=True):
            self._watch(job, ticket, np.arange(first, first + count))
            first += count
        self._end_if_idle(job)

    def store(self, job: int, keys: Sequence[Key], slots: Slots) -> None:
        """Copy the pages out of ``slots``, uint32 [keys]. What is here or coming is not copied again."""
        made, nodes = self._begin(job, keys)
        there = (self.catalog.state(nodes)[1][:, self._tiers] != Residency.ABSENT).any(axis=1)
        made.arrived[: len(nodes)] = there
        lacking = np.flatnonzero(~there)
        ticket = self.placement.store(OFFLOAD, nodes[lacking], device=slots[lacking]) if len(lacking) else 0
        if ticket:
            self._watch(job, ticket, lacking)
        self._end_if_idle(job)

    def _begin(self, job: int, keys: Sequence[Key]) -> tuple[_Job, Slots]:
        """The job, and the nodes of its first keys: of all unless the catalog is full."""
        if job in self._jobs:
            raise ValueError(f"job: {job} is under way; expected a number of its own for each")
        made = self._jobs[job] = _Job(self._next, np.zeros(len(keys), np.bool_))
        self._next += 1
        self._counts.requests += 1
        nodes: list[int] = []
        for key in keys:
            found = self.catalog.insert(self._root(key.group), key.label, made.request)
            if not len(found):
                break
            nodes.append(int(found[0]))
        return made, np.array(nodes, np.uint32)

    def _watch(self, job: int, ticket: int, pages: npt.NDArray[np.intp]) -> None:
        self._jobs[job].tickets.add(ticket)
        self._tickets[ticket] = job, pages

    def _end_if_idle(self, job: int) -> None:
        if not self._jobs[job].tickets:
            made = self._jobs.pop(job)
            self.catalog.release(made.request)
            self._ended.append(Done(job, made.arrived))

    # ---- what happened -------------------------------------------------------------------------------------------

    def poll(self) -> list[Done]:
        """Take note of what the data plane finished; returns the jobs that have ended since last time."""
        self._settle()
        ended, self._ended = self._ended, []
        return ended

    def _settle(self) -> None:
        completions = self.plane.poll()
        for done in completions:
            self._note(done)
        for ticket in self.placement.settle(completions):
            known = self._tickets.pop(ticket, None)
            if known is not None:
                self._jobs[known[0]].tickets.discard(ticket)
                self._end_if_idle(known[0])
        self.placement.maintain()

    def _note(self, done: Completion) -> None:
        known = self._tickets.get(done.ticket)
        if known is not None:
            job, pages = known
            arrived = (done.status == PageStatus.OK).all(axis=0)
            self._jobs[job].arrived[pages[: len(arrived)]] = arrived

    def drain(self) -> None:
        """Return when no job is under way; what had not begun of them does not happen. ``poll`` reports them."""
        for made in self._jobs.values():
            self.placement.cancel(made.tickets)
        while self._jobs:
            self.plane.wait(_PATIENCE)
            self._settle()

    def reset(self) -> None:
        """Forget every page for ever; durable on return. OSError: in force in this process, but not durable."""
        try:
            self.plane.invalidate(None)
        finally:
            self.catalog.invalidate(None, self.plane.generation(self.namespace.fingerprint))

    @property
    def busy(self) -> bool:
        """Whether the data plane still has something to report that can be expected to come."""
        return bool(self.placement.moving or self._ended)

    def stats(self) -> CacheStats:
        return CacheStats.gather(self._counts, self.catalog, self.placement, self._tiers)

    def describe(self) -> str:
        """One line: what was really built."""
        parts = [self.plane.describe(), f"{self.adopted} pages adopted from disk"]
        return "; ".join([*parts, *(f"WARNING {text}" for text in self.plane.warnings())])

    def close(self) -> None:
        self.plane.close()

"""A plain model of the catalog that also keeps the bytes each slot should hold.

The model predicts everything but which pages eviction takes: those it observes, and judges. A block's *key* is
``(space, epoch, chain)``; the epoch counts the namespace's invalidations, so a key is never used again after one. The
bytes of a slot are the key whose page was written there, or junk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from catalog_twins import Twins
from numpy.typing import NDArray

from kvtier.catalog import PageStatus, Residency, Tier
from kvtier.content import Content

Key = tuple[int, int, tuple[int, ...]]
Place = tuple[Tier, Key]
JUNK = None
OK = int(PageStatus.OK)
BLOCK = 2


@dataclass
class ModelPage:
    slot: int
    state: Residency
    ticket: int = 0
    pins: int = 0
    ahead: bool = False  # brought before anybody asked for it, and not matched since


@dataclass
class ModelLease:
    promise: list[Place] = field(default_factory=list)
    loads: list[Place] = field(default_factory=list)
    adopted: list[Place] = field(default_factory=list)
    holds: list[Key] = field(default_factory=list)


@dataclass
class ModelTransfer:
    path: list[Tier]
    keys: list[Key]
    slots: NDArray[np.uint32]
    status: NDArray[np.uint8]


def space_of(number: int) -> bytes:
    return hashlib.sha256(b"space %d" % number).digest()


class Shadow:
    def __init__(self, catalog: Twins) -> None:
        self.catalog = catalog
        self.capacity = {spec.tier: spec.slots for spec in catalog.tiers}
        self.epoch = [0, 0]
        self.pages: dict[Place, ModelPage] = {}
        self.private: dict[tuple[Tier, int], int] = {}
        self.bytes: dict[tuple[Tier, int], Key | None] = {}
        self.leases: dict[int, ModelLease] = {}
        self.transfers: dict[int, ModelTransfer] = {}
        self.nodes: dict[Key, int] = {}

    # --- names ---

    def labels(self, blocks: Iterable[int]) -> NDArray[np.uint32] | NDArray[np.uint8]:
        blocks = list(blocks)
        if self.catalog.labels == "token":
            return np.repeat(np.array(blocks, np.uint32), BLOCK)
        if self.catalog.labels == "content":
            return self.content(blocks).whole(BLOCK)
        return np.array([list(hashlib.sha256(bytes([b])).digest()) for b in blocks], np.uint8).reshape(-1, 32)

    def content(self, blocks: Sequence[int]) -> Content:
        """Of equal tokens, the last block of which is not whole: what sets blocks apart is an image among them."""
        images = [(BLOCK * i, BLOCK, hashlib.sha256(bytes([b])).digest()) for i, b in enumerate(blocks) if b]
        return Content([7] * (BLOCK * len(blocks) + BLOCK - 1), images)

    def root(self, space: int) -> int:
        return self.catalog.root(space_of(space), 0, self.epoch[space])

    def chain(self, space: int, blocks: tuple[int, ...]) -> list[Key]:
        return [(space, self.epoch[space], blocks[: i + 1]) for i in range(len(blocks))]

    def current(self, key: Key) -> bool:
        return key[1] == self.epoch[key[0]]

    # --- what is there ---

    def live(self, place: Place) -> bool:
        page = self.pages.get(place)
        return page is not None and page.state in (Residency.FILLING, Residency.READY)

    def ready(self, place: Place) -> bool:
        page = self.pages.get(place)
        return page is not None and page.state == Residency.READY

    def fastest(self, key: Key) -> Tier | None:
        return next((tier for tier in self.capacity if self.ready((tier, key))), None)

    def alive(self) -> set[Key]:
        named = [key for _, key in self.pages] + [key for lease in self.leases.values() for key in lease.holds]
        return {(space, epoch, chain[: i + 1]) for space, epoch, chain in named for i in range(len(chain))}

    def leased_by(self, request: int) -> set[Key]:
        lease = self.leases.get(request, ModelLease())
        return {*lease.holds, *(key for _, key in lease.promise + lease.adopted)}

    def free(self, tier: Tier) -> int:
        used = sum(t == tier for t, _ in self.pages) + sum(t == tier for t, _ in self.private)
        return self.capacity[tier] - used

    def evictable(self, tier: Tier) -> int:
        """Ready, unpinned, and with no continuation in the tier that is not evictable itself."""
        kept: set[Key] = set()
        for (t, key), page in self.pages.items():
            if t != tier or not self.live((t, key)) or (page.state == Residency.READY and page.pins == 0):
                continue
            kept.add(key)
            above = key
            while len(above[2]) > 1:
                above = (above[0], above[1], above[2][:-1])
                if not self.live((tier, above)):
                    break
                kept.add(above)
        return sum(t == tier and page.state == Residency.READY and k not in kept for (t, k), page in self.pages.items())

    # --- what happens ---

    def pin(self, place: Place) -> None:
        self.pages[place].pins += 1

    def unpin(self, place: Place) -> None:
        page = self.pages[place]
        page.pins -= 1
        self.forget_if_done(place)

    def forget_if_done(self, place: Place) -> None:
        page = self.pages[place]
        if page.state == Residency.DRAINING and page.pins == 0 and page.ticket == 0:
            self.bytes[place[0], page.slot] = JUNK
            del self.pages[place]

    def condemn(self, place: Place) -> None:
        if self.live(place):
            self.pages[place].state = Residency.DRAINING
            self.forget_if_done(place)

    def let_go_of_promise(self, lease: ModelLease) -> None:
        for place in lease.promise + lease.loads:
            self.unpin(place)
        lease.promise, lease.loads = [], []

    def settle(self, ticket: int, status: NDArray[np.uint8]) -> None:
        transfer = self.transfers[ticket]
        hops, count = transfer.status.shape
        for i in range(count):
            news = False
            for hop in range(hops):
                if transfer.status[hop, i] or not status[hop, i]:
                    continue
                transfer.status[hop, i] = status[hop, i]
                news = True
                self.settle_hop(transfer, hop, i)
            if news and transfer.status[:, i].all():
                for tier in transfer.path[:-1]:
                    if tier in self.capacity:
                        self.unpin((tier, transfer.keys[i]))
        if transfer.status.all():
            del self.transfers[ticket]

    def settle_hop(self, transfer: ModelTransfer, hop: int, i: int) -> None:
        source, destination, key = transfer.path[hop], transfer.path[hop + 1], transfer.keys[i]
        good = bool((transfer.status[: hop + 1, i] == OK).all())
        if destination in self.capacity and good:
            # The copy happens no later than this; the source must still be what it was.
            moved = self.bytes[source, int(transfer.slots[hop, i])] if source in self.capacity else key
            self.bytes[destination, int(transfer.slots[hop + 1, i])] = moved
        if transfer.status[hop, i] >= PageStatus.READ_ERROR and source in self.capacity:
            self.condemn((source, key))
        if destination not in self.capacity:
            return
        page = self.pages[destination, key]
        page.ticket = 0
        if page.state == Residency.FILLING and good:
            page.state = Residency.READY
        else:
            self.condemn((destination, key))
            if (destination, key) in self.pages:
                self.forget_if_done((destination, key))

    def observe_evictions(self, allowed: dict[Tier, int]) -> None:
        """Finds which ready pages went, and refuses those that had to stay or were not needed to go."""
        went: list[Place] = []
        before = {place for place in self.pages if self.live(place)}
        for place, page in self.pages.items():
            if page.state != Residency.READY:
                continue
            try:
                slots, residency = self.catalog.state([self.nodes[place[1]]])
            except ValueError:
                went.append(place)
                continue
            if residency[0, place[0]] != Residency.READY or slots[0, place[0]] != page.slot:
                went.append(place)
        for place in went:
            assert self.pages[place].pins == 0, f"{place} was pinned and evicted"
        for tier in self.capacity:
            count = sum(place[0] == tier for place in went)
            assert count <= allowed.get(tier, 0), f"{count} pages evicted from {tier}, {allowed.get(tier, 0)} needed"
        for place in went:
            del self.pages[place]
        for tier, (space, epoch, chain) in before - set(went):
            above = (tier, (space, epoch, chain[:-1]))
            assert above not in went, f"{above} was evicted before its continuation"

    # --- what must always hold ---

    def forget_the_dead(self) -> None:
        """A node that has ended may be another block's now."""
        alive = self.alive()
        self.nodes = {key: node for key, node in self.nodes.items() if key in alive}

    def verify(self) -> None:
        self.catalog.check()
        self.forget_the_dead()
        alive = self.alive()
        stats = self.catalog.stats()
        assert stats["nodes"] == len(alive)
        assert stats["leases"] == len(self.leases)
        assert stats["transfers"] == len(self.transfers)
        for tier in self.capacity:
            self.verify_tier(tier)
        for lease in self.leases.values():
            for tier, key in lease.promise + lease.adopted:
                assert self.bytes[tier, self.pages[tier, key].slot] == key, "a leased page lost its bytes"

    def verify_tier(self, tier: Tier) -> None:
        mine = {key: page for (t, key), page in self.pages.items() if t == tier}
        owned = [page.slot for page in mine.values()] + [slot for t, slot in self.private if t == tier]
        assert len(owned) == len(set(owned)), "a slot has two owners"
        usage = self.catalog.usage(tier)
        states = [page.state for page in mine.values()]
        private = sum(t == tier for t, _ in self.private)
        assert usage[:7] == (
            self.capacity[tier],
            self.free(tier),
            states.count(Residency.FILLING) + private,
            states.count(Residency.READY),
            states.count(Residency.DRAINING),
            private,
            sum(page.pins > 0 for page in mine.values()),
        )
        assert self.catalog.evictable(tier) == self.evictable(tier)
        for key, page in mine.items():
            slots, residency = self.catalog.state([self.nodes[key]])
            assert (slots[0, tier], residency[0, tier]) == (page.slot, page.state)
            if page.state == Residency.READY:
                assert self.bytes[tier, page.slot] == key, "a ready page holds other bytes"

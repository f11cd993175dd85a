"""The machine that calls a catalog and its plain model alike: what a request does, and what holds after every call."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from catalog_shadow import BLOCK, JUNK, Key, ModelLease, ModelPage, Shadow
from catalog_twins import Twins
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtier.catalog import PageStatus, Residency, Tier, TierSpec

SPACES = st.integers(0, 1)
CHAINS = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple)
REQUESTS = st.integers(1, 4)
TABLES = st.lists(st.integers(0, 9), max_size=3)


class CatalogMachine(RuleBasedStateMachine):
    """Rooms of more rules build on this one; the test says which tiers there are, and what labels are made of."""

    tiers: ClassVar[dict[Tier, int]] = {}
    labels: ClassVar[str] = "token"
    paths: ClassVar[list[list[Tier]]] = []

    def start(self) -> None:
        specs = [TierSpec(tier, slots) for tier, slots in self.tiers.items()]
        self.catalog = Twins(specs, block_size=BLOCK, labels=self.labels, max_nodes=1024)
        self.shadow = Shadow(self.catalog)
        self.settled: list[tuple[int, tuple[int, int]]] = []
        self.known: dict[Key, np.ndarray] = {}  # identities, as a store would remember them
        self.numbers: set[int] = set()  # that ever were a node's
        self.generation = 0

    # --- a request's side ---

    @rule(space=SPACES, blocks=CHAINS, request=REQUESTS, start=st.integers(0, 2), limit=st.none() | st.integers(0, 4))
    def match(self, space: int, blocks: tuple[int, ...], request: int, start: int, limit: int | None) -> None:
        s = self.shadow
        start = min(start, len(blocks))
        chain = s.chain(space, blocks)
        alive = s.alive()
        walked = 0
        while walked < min(len(chain), len(chain) if limit is None else limit) and chain[walked] in alive:
            walked += 1
        expected = start
        while expected < walked and s.fastest(chain[expected]) is not None:
            expected += 1
        if walked < start:
            expected = 0
        match = self.catalog.match([s.root(space)], s.labels(blocks), start, request, limit)
        assert match.hit == expected
        promise = []
        for i, key in enumerate(chain[start : match.hit]):
            tier = s.fastest(key)
            assert tier is not None
            assert match.tiers[i] == tier
            assert match.slots[i] == s.pages[tier, key].slot
            assert s.bytes[tier, int(match.slots[i])] == key, "other bytes than the prefix's were promised"
            above = [s.pages[t, key].ticket for t in s.capacity if t < tier and (t, key) in s.pages]
            filling = [t for t in s.capacity if t < tier and s.live((t, key))]
            assert match.filling[i] == (s.pages[filling[0], key].ticket if filling else 0), above
            s.nodes[key] = int(match.nodes[i])
            promise.append((tier, key))
        for place in promise:
            s.pin(place)
        for key in chain[: match.hit]:
            for tier in s.capacity:
                if (tier, key) in s.pages:
                    s.pages[tier, key].ahead = False
        lease = s.leases.setdefault(request, ModelLease())
        s.let_go_of_promise(lease)
        lease.promise = promise

    def likely(self, data: st.DataObject, space: int, blocks: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        """As a rule a chain that goes on from a page there is, with the first of ``blocks``; or else all of them."""
        there = sorted({key for _, key in self.shadow.pages if self.shadow.current(key)})
        if not there or not data.draw(st.integers(0, 3)):
            return space, blocks
        space, _, begun = data.draw(st.sampled_from(there))
        return space, (*begun, *blocks[:1])

    @rule(data=st.data(), space=SPACES, blocks=CHAINS)
    def peek(self, data: st.DataObject, space: int, blocks: tuple[int, ...]) -> None:
        s = self.shadow
        space, blocks = self.likely(data, space, blocks)
        expected = [0, 0, 0, 0]
        for key in s.chain(space, blocks):
            tier = s.fastest(key)
            if tier is None:
                break
            expected[tier] += 1
        assert self.catalog.peek([s.root(space)], s.labels(blocks)) == tuple(expected)

    def insert_below(self, parent: int, keys: list[Key], request: int) -> None:
        s = self.shadow
        s.forget_the_dead()
        self.inserted(
            keys, self.catalog.insert(parent, s.labels([key[2][-1] for key in keys]), request).tolist(), request
        )

    def inserted(self, keys: list[Key], nodes: list[int], request: int) -> None:
        s = self.shadow
        assert len(nodes) == len(keys)
        lease = s.leases.setdefault(request, ModelLease())
        for key, node in zip(keys, nodes, strict=True):
            assert s.nodes.get(key, node) == node, "a block changed its node"
            assert node not in [n for k, n in s.nodes.items() if k != key], "a node has two blocks"
            s.nodes[key] = node
            if key not in lease.holds:
                lease.holds.append(key)

    @rule(space=SPACES, blocks=CHAINS, request=REQUESTS)
    def insert(self, space: int, blocks: tuple[int, ...], request: int) -> None:
        self.insert_below(self.shadow.root(space), self.shadow.chain(space, blocks), request)

    @rule(data=st.data(), request=REQUESTS, block=st.integers(0, 1))
    def insert_under_own(self, data: st.DataObject, request: int, block: int) -> None:
        s = self.shadow
        mine = sorted(key for key in s.leased_by(request) if len(key[2]) < 5)
        if not mine:
            return
        space, epoch, chain = data.draw(st.sampled_from(mine))
        self.insert_below(s.nodes[space, epoch, chain], [(space, epoch, (*chain, block))], request)

    @rule(data=st.data(), n=st.integers(0, 4), request=REQUESTS, table=st.none() | TABLES)
    def take(self, data: st.DataObject, n: int, request: int, table: list[int] | None) -> None:
        tier = data.draw(st.sampled_from(list(self.shadow.capacity)))
        self.take_slots(tier, n, request, table)

    def take_slots(self, tier: Tier, n: int, request: int, table: list[int] | None = None) -> list[int]:
        """By ``take``, or behind a ``table`` by ``lengthen``."""
        s = self.shadow
        free, evictable = s.free(tier), s.evictable(tier)
        if table is None:
            slots = self.catalog.take(tier, n, request).tolist()
        else:
            had_room, longer = self.catalog.lengthen(table, tier, n, request)
            assert longer[: len(table)] == table, "a table lost its beginning"
            slots = longer[len(table) :]
            assert had_room == (len(slots) == n)
        assert len(slots) == (n if n <= free + evictable else 0)
        s.leases.setdefault(request, ModelLease())
        s.observe_evictions({tier: max(0, len(slots) - free)})
        for slot in slots:
            s.private[tier, slot] = request
            s.bytes[tier, slot] = JUNK
        return slots

    def own_private(self, request: int) -> list[tuple[Tier, int]]:
        return sorted(place for place, owner in self.shadow.private.items() if owner == request)

    @rule(data=st.data(), request=REQUESTS)
    def give_back(self, data: st.DataObject, request: int) -> None:
        mine = self.own_private(request)
        if mine:
            tier, slot = data.draw(st.sampled_from(mine))
            self.catalog.give_back(tier, [slot], request)
            del self.shadow.private[tier, slot]

    @rule(data=st.data(), request=REQUESTS)
    def adopt(self, data: st.DataObject, request: int) -> None:
        s = self.shadow
        mine = self.own_private(request)
        held = sorted(s.leases[request].holds) if request in s.leases else []
        if not mine or not held:
            return
        tier = data.draw(st.sampled_from(mine))[0]
        count = sum(t == tier for t, _ in mine)
        self.adopt_keys(tier, data.draw(st.lists(st.sampled_from(held), min_size=1, max_size=count)), request)

    @rule(data=st.data(), space=SPACES, blocks=CHAINS, request=REQUESTS, end=st.booleans())
    def compute(self, data: st.DataObject, space: int, blocks: tuple[int, ...], request: int, end: bool) -> None:
        """What a request does when all goes well; without it, random calls rarely cache anything."""
        self.match(space, blocks, request, 0, None)
        self.insert(space, blocks, request)
        self.take(data, len(blocks), request, None)
        mine = self.own_private(request)
        if mine:
            tier = mine[-1][0]
            self.adopt_keys(tier, self.shadow.chain(space, blocks)[: sum(t == tier for t, _ in mine)], request)
        if end:
            self.release(request)

    def adopt_keys(self, tier: Tier, keys: list[Key], request: int) -> None:
        s = self.shadow
        slots = [slot for t, slot in self.own_private(request) if t == tier]
        adopted = self.catalog.adopt(tier, [s.nodes[key] for key in keys], slots[: len(keys)], request)
        for key, slot, flag in zip(keys, slots, adopted.tolist(), strict=False):
            assert flag == ((tier, key) not in s.pages and s.current(key))
            if flag:
                self.adopted(tier, key, slot, request)

    def adopted(self, tier: Tier, key: Key, slot: int, request: int) -> None:
        s = self.shadow
        del s.private[tier, slot]
        s.bytes[tier, slot] = key  # the request computed it
        s.pages[tier, key] = ModelPage(slot, Residency.READY, pins=1)
        s.leases[request].adopted.append((tier, key))

    @rule(data=st.data(), request=REQUESTS)
    def narrow(self, data: st.DataObject, request: int) -> None:
        self.narrow_to(data.draw(st.sampled_from(list(self.shadow.capacity))), request)

    def narrow_to(self, tier: Tier, request: int) -> None:
        s = self.shadow
        kept = self.catalog.narrow(request, tier)
        lease = s.leases.get(request)
        if lease is None:
            assert kept == 0
            return
        places = []
        for _, key in lease.promise:
            if not s.ready((tier, key)):
                break
            places.append((tier, key))
        assert kept == len(places), "a request keeps what is ready, up to the first that is not"
        for place in places:
            s.pin(place)
        s.let_go_of_promise(lease)
        lease.promise = places

    @rule(data=st.data(), request=REQUESTS)
    def hold_in(self, data: st.DataObject, request: int) -> None:
        s, tier = self.shadow, data.draw(st.sampled_from(list(self.shadow.capacity)))
        self.catalog.hold_in(request, tier)
        lease = s.leases.get(request)
        for i, place in enumerate(lease.promise if lease is not None else []):
            if place[0] != tier and s.ready((tier, place[1])):
                s.pin((tier, place[1]))
                s.unpin(place)
                lease.promise[i] = (tier, place[1])

    @rule(request=REQUESTS)
    def release(self, request: int) -> None:
        s = self.shadow
        lease = s.leases.pop(request, None)
        assert self.catalog.release(request) == (lease is not None)
        if lease is None:
            return
        s.let_go_of_promise(lease)
        for place in lease.adopted:
            s.unpin(place)
        for place in self.own_private(request):
            del s.private[place]

    @invariant()
    def all_holds(self) -> None:
        self.shadow.verify()
        self.catalog.compare(list(self.shadow.nodes.values()))
        self.numbers.update(self.shadow.nodes.values())

    def teardown(self) -> None:
        """Whatever happened, letting go of everything leaves nothing behind."""
        if not hasattr(self, "shadow"):
            return
        s = self.shadow
        for ticket in sorted(s.transfers):
            shape = s.transfers[ticket].status.shape
            self.catalog.settle(ticket, np.full(shape, int(PageStatus.CANCELLED), np.uint8))
        for request in sorted(s.leases):
            self.catalog.release(request)
        self.catalog.check()
        for tier in s.capacity:
            usage = self.catalog.usage(tier)
            assert usage.free + usage.ready == usage.capacity
            assert self.catalog.evictable(tier) == usage.ready
        self.empty_out()
        self.catalog.invalidate(None, 1000)
        self.catalog.check()
        self.catalog.other.check()
        assert self.catalog.stats()["nodes"] == 0

    def empty_out(self) -> None:
        """Page by page, to the last one: whatever was asked before, of the twins the same goes next."""
        for tier, slots in self.shadow.capacity.items():
            for _ in range(slots):
                assert self.catalog.take(tier, 1, 99).size == 1
        self.catalog.release(99)

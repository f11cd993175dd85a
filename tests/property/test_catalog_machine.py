"""Any sequence of calls on the catalog, against a plain model that keeps the bytes of every slot."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from catalog_shadow import BLOCK, JUNK, Key, ModelLease, ModelPage, ModelTransfer, Shadow, space_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.catalog import NO_SLOT, Catalog, PageStatus, Residency, Tier, TierSpec

SPACES = st.integers(0, 1)
CHAINS = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple)
REQUESTS = st.integers(1, 4)
STATUSES = st.sampled_from([int(s) for s in PageStatus] + [int(PageStatus.OK)] * 6 + [int(PageStatus.PENDING)] * 4)

# What carry_one does: space, blocks, request, words on the transfer, its ending, how the request is part of it.
Journey = tuple[int, tuple[int, ...], int, list[list[int]], str, str]
JOURNEYS = st.lists(
    st.tuples(
        SPACES,
        CHAINS,
        REQUESTS,
        st.lists(st.lists(STATUSES, min_size=1, max_size=6), max_size=3),
        st.sampled_from(["open", "good", "good", "bad", "cancelled"]),
        st.sampled_from(["nobody", "aborts", "narrows"]),
    ),
    min_size=1,
    max_size=6,
)


class CatalogMachine(RuleBasedStateMachine):
    tiers: ClassVar[dict[Tier, int]] = {}
    labels: ClassVar[str] = "token"
    paths: ClassVar[list[list[Tier]]] = []

    def start(self) -> None:
        specs = [TierSpec(tier, slots) for tier, slots in self.tiers.items()]
        self.catalog = Catalog(specs, block_size=BLOCK, labels=self.labels, max_nodes=1024)  # type: ignore[arg-type]
        self.shadow = Shadow(self.catalog)
        self.settled: list[tuple[int, tuple[int, int]]] = []
        self.known: dict[Key, np.ndarray] = {}  # identities, as a store would remember them
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
        lease = s.leases.setdefault(request, ModelLease())
        s.let_go_of_promise(lease)
        lease.promise = promise

    @rule(space=SPACES, blocks=CHAINS)
    def peek(self, space: int, blocks: tuple[int, ...]) -> None:
        s = self.shadow
        expected = [0, 0, 0, 0]
        for key in s.chain(space, blocks):
            tier = s.fastest(key)
            if tier is None:
                break
            expected[tier] += 1
        assert self.catalog.peek([s.root(space)], s.labels(blocks)) == tuple(expected)

    def insert_below(self, parent: int, above: list[Key], keys: list[Key], request: int) -> None:
        s = self.shadow
        s.forget_the_dead()
        nodes = self.catalog.insert(parent, s.labels([key[2][-1] for key in keys]), request)
        assert nodes.size == len(keys)
        lease = s.leases.setdefault(request, ModelLease())
        for key, node in zip(keys, nodes.tolist(), strict=True):
            assert s.nodes.get(key, node) == node, "a block changed its node"
            assert node not in [n for k, n in s.nodes.items() if k != key], "a node has two blocks"
            s.nodes[key] = node
            if key not in lease.holds:
                lease.holds.append(key)

    @rule(space=SPACES, blocks=CHAINS, request=REQUESTS)
    def insert(self, space: int, blocks: tuple[int, ...], request: int) -> None:
        self.insert_below(self.shadow.root(space), [], self.shadow.chain(space, blocks), request)

    @rule(data=st.data(), request=REQUESTS, block=st.integers(0, 1))
    def insert_under_own(self, data: st.DataObject, request: int, block: int) -> None:
        s = self.shadow
        lease = s.leases.get(request, ModelLease())
        mine = sorted(set(lease.holds) | {key for _, key in lease.promise + lease.adopted})
        mine = [key for key in mine if len(key[2]) < 5]
        if not mine:
            return
        space, epoch, chain = data.draw(st.sampled_from(mine))
        self.insert_below(s.nodes[space, epoch, chain], [], [(space, epoch, (*chain, block))], request)

    @rule(data=st.data(), n=st.integers(0, 4), request=REQUESTS)
    def take(self, data: st.DataObject, n: int, request: int) -> None:
        s = self.shadow
        tier = data.draw(st.sampled_from(list(s.capacity)))
        free, evictable = s.free(tier), s.evictable(tier)
        slots = self.catalog.take(tier, n, request).tolist()
        assert len(slots) == (n if n <= free + evictable else 0)
        s.leases.setdefault(request, ModelLease())
        s.observe_evictions({tier: max(0, len(slots) - free)})
        for slot in slots:
            s.private[tier, slot] = request
            s.bytes[tier, slot] = JUNK

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
        self.take(data, len(blocks), request)
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
            if not flag:
                continue
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

    # --- pages on their way ---

    def movable(self, path: list[Tier], key: Key) -> bool:
        s = self.shadow
        return (
            s.current(key)
            and (path[0] not in s.capacity or s.ready((path[0], key)))
            and all((tier, key) not in s.pages for tier in path[1:] if tier in s.capacity)
        )

    @rule(data=st.data(), request=st.integers(0, 4), backed_only=st.booleans())
    def reserve(self, data: st.DataObject, request: int, backed_only: bool) -> None:
        s = self.shadow
        path = data.draw(st.sampled_from(self.paths))
        known = sorted(s.nodes)
        if not known:
            return
        space, epoch, chain = data.draw(st.sampled_from(known))
        keys = [(space, epoch, chain[: i + 1]) for i in range(len(chain)) if (space, epoch, chain[: i + 1]) in s.nodes]
        self.reserve_keys(path, keys, request, backed_only)

    def reserve_keys(self, path: list[Tier], keys: list[Key], request: int, backed_only: bool) -> int:
        s = self.shadow
        movable = [self.movable(path, key) for key in keys]
        destinations = [tier for tier in path[1:] if tier in s.capacity]
        free = {tier: s.free(tier) for tier in destinations}
        r = self.catalog.reserve(path, [s.nodes[key] for key in keys], request, backed_only)
        assert (r.ticket == 0) == (r.count == 0)
        assert r.slots.shape == (len(path), r.count)
        # A second tier may turn out to have no backed victim after the first gave one up: one more may go than is used.
        extra = 1 if len(destinations) > 1 else 0
        s.observe_evictions({tier: max(0, r.count - free[tier]) + extra for tier in destinations})
        if request and path[-1] in s.capacity:
            s.leases.setdefault(request, ModelLease())
        for i, key in enumerate(keys[: r.count]):
            assert self.movable(path, key)
            if path[0] in s.capacity:
                assert r.slots[0, i] == s.pages[path[0], key].slot
                s.pin((path[0], key))
            for hop, tier in enumerate(path[1:], 1):
                if tier not in s.capacity:
                    assert r.slots[hop, i] == NO_SLOT
                    continue
                slot = int(r.slots[hop, i])
                s.bytes[tier, slot] = JUNK  # from now on anything may be written there
                s.pages[tier, key] = ModelPage(slot, Residency.FILLING, r.ticket, pins=hop + 1 < len(path))
            if request and path[-1] in s.capacity:
                s.pin((path[-1], key))
                s.leases[request].loads.append((path[-1], key))
        if r.count < len(keys) and movable[r.count] and self.movable(path, keys[r.count]):
            assert any(s.free(t) + s.evictable(t) == 0 or backed_only for t in destinations), "there was room"
        if r.count:
            status = np.zeros((len(path) - 1, r.count), np.uint8)
            s.transfers[r.ticket] = ModelTransfer(path, keys[: r.count], r.slots, status)
        return r.ticket

    @initialize(data=st.data(), journeys=JOURNEYS)
    def begin(self, data: st.DataObject, journeys: list[Journey]) -> None:
        self.start()
        self.carry(data, journeys)

    @rule(data=st.data(), journeys=JOURNEYS)
    def carry(self, data: st.DataObject, journeys: list[Journey]) -> None:
        """Transfers from their order to their last word, which comes in parts, in any order, repeatedly and late.

        Without it, random calls rarely have a transfer with much in it, or a tier with something to evict.
        """
        for journey in journeys:
            self.carry_one(data, *journey)
            self.shadow.verify()  # which also forgets the nodes that have ended

    def carry_one(
        self,
        data: st.DataObject,
        space: int,
        blocks: tuple[int, ...],
        request: int,
        words: list[list[int]],
        ending: str,
        asks: str,
    ) -> None:
        s = self.shadow
        keys = s.chain(space, blocks)

        def paths() -> list[list[Tier]]:
            return [path for path in self.paths if keys[0] in s.nodes and self.movable(path, keys[0])]

        if not paths():
            self.release(request)
            s.verify()
            self.compute(data, space, blocks, request, False)
            s.verify()
        if not paths():
            return
        path = data.draw(st.sampled_from(paths()))
        if asks == "narrows":
            self.match(space, blocks, request, 0, None)
        for_request = 0 if asks == "nobody" else request
        ticket = self.reserve_keys(path, [key for key in keys if key in s.nodes], for_request, False)
        if not ticket:
            return
        if asks == "aborts":
            self.release(request)
        shape = s.transfers[ticket].status.shape
        for some in words:
            self.say(ticket, np.resize(np.array(some, np.uint8), shape))
        if asks == "narrows" and path[-1] in s.capacity:  # before all has come
            self.narrow_to(path[-1], request)
            s.verify()
        if ending == "cancelled":
            self.cancel_ticket(ticket)
        if ending != "open":
            status = PageStatus.READ_ERROR if ending == "bad" else PageStatus.OK
            self.say(ticket, np.full(shape, int(status), np.uint8))
            self.say(ticket, np.full(shape, int(PageStatus.OK), np.uint8))
            self.cancel_ticket(ticket)
            self.release(request)

    def say(self, ticket: int, status: np.ndarray) -> None:
        s = self.shadow
        known = ticket in s.transfers
        assert self.catalog.settle(ticket, status) == known, "only words on an open ticket are taken"
        if not known:
            return
        s.settle(ticket, status)
        if ticket not in s.transfers:
            self.settled.append((ticket, status.shape))
        s.verify()

    def cancel_ticket(self, ticket: int) -> None:
        s = self.shadow
        transfer = s.transfers.get(ticket)
        assert self.catalog.cancel(ticket) == (transfer is not None), "only an open ticket can be cancelled"
        if transfer is None:
            return
        for hop, i in np.argwhere(transfer.status == 0).tolist():
            if transfer.path[hop + 1] in s.capacity:
                s.condemn((transfer.path[hop + 1], transfer.keys[i]))
        s.verify()

    @precondition(lambda self: self.shadow.transfers)
    @rule(data=st.data(), whole=st.booleans())
    def settle(self, data: st.DataObject, whole: bool) -> None:
        s = self.shadow
        ticket = data.draw(st.sampled_from(sorted(s.transfers)))
        shape = s.transfers[ticket].status.shape
        if whole:
            status = np.full(shape, int(PageStatus.OK), np.uint8)
        else:
            size = shape[0] * shape[1]
            status = np.array(data.draw(st.lists(STATUSES, min_size=size, max_size=size)), np.uint8).reshape(shape)
        self.say(ticket, status)

    @precondition(lambda self: self.settled)
    @rule(data=st.data(), status=STATUSES)
    def settle_late(self, data: st.DataObject, status: int) -> None:
        ticket, shape = data.draw(st.sampled_from(self.settled))
        assert not self.catalog.settle(ticket, np.full(shape, status, np.uint8))
        assert not self.catalog.cancel(ticket)

    @precondition(lambda self: self.shadow.transfers)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.cancel_ticket(data.draw(st.sampled_from(sorted(self.shadow.transfers))))

    # --- upkeep ---

    @rule(space=st.none() | SPACES, luck=st.integers(0, 7))
    def invalidate(self, space: int | None, luck: int) -> None:
        if luck != 7:  # or nothing would live long enough
            return
        s = self.shadow
        self.generation = max(s.epoch) + 1
        spaces = [space] if space is not None else [0, 1]
        gone = [place for place in s.pages if place[1][0] in spaces and s.current(place[1]) and s.live(place)]
        count = self.catalog.invalidate(None if space is None else space_of(space), self.generation)
        assert count == len(gone)
        for number in spaces:
            s.epoch[number] = self.generation
        for place in gone:
            s.condemn(place)

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        s = self.shadow
        if not s.nodes:
            return
        tier = data.draw(st.sampled_from(list(s.capacity)))
        key = data.draw(st.sampled_from(sorted(s.nodes)))
        goes = s.ready((tier, key)) and s.pages[tier, key].pins == 0
        assert self.catalog.drop(tier, [s.nodes[key]]) == goes
        if goes:
            s.condemn((tier, key))

    @rule(data=st.data(), n=st.integers(0, 5))
    def cold(self, data: st.DataObject, n: int) -> None:
        s = self.shadow
        tiers = list(s.capacity)
        if len(tiers) < 2:
            return
        tier, lower = data.draw(st.sampled_from([(a, b) for a in tiers for b in tiers if a < b]))
        by_node = {node: key for key, node in s.nodes.items()}
        keys = [by_node[node] for node in self.catalog.cold(tier, n, lower).tolist()]
        assert len(keys) == len(set(keys)) <= n
        for i, key in enumerate(keys):
            assert s.ready((tier, key))
            assert (lower, key) not in s.pages
            assert not any(later[2] == key[2][: len(later[2])] and later[:2] == key[:2] for later in keys[i + 1 :])

    @invariant()
    def remember(self) -> None:
        for key, node in self.shadow.nodes.items():
            if key not in self.known and key in self.shadow.alive():
                self.known[key] = self.catalog.identities([node])[0]

    @precondition(lambda self: self.known)
    @rule(data=st.data(), flip=st.none() | st.integers(0, 8 * 120 - 1))
    def restore(self, data: st.DataObject, flip: int | None) -> None:
        s = self.shadow
        tier = list(s.capacity)[-1]
        keys = data.draw(st.lists(st.sampled_from(sorted(self.known)), min_size=1, max_size=4))
        used = {page.slot for (t, _), page in s.pages.items() if t == tier} | {x for t, x in s.private if t == tier}
        slots = [slot for slot in range(s.capacity[tier]) if slot not in used][: len(keys)]
        keys = keys[: len(slots)]
        if not keys:
            return
        identities = np.stack([self.known[key] for key in keys])
        if flip is not None:  # a bit of the first record is wrong
            identities[0, flip // 8] ^= 1 << flip % 8
        there = {key for key in s.alive() if s.current(key)}
        good: set[int] = set()
        for i in sorted(range(len(keys)), key=lambda i: len(keys[i][2])):
            above = (keys[i][0], keys[i][1], keys[i][2][:-1])
            if s.current(keys[i]) and (i or flip is None) and (not above[2] or above in there):
                there.add(keys[i])
                good.add(i)
        flags = self.catalog.restore(tier, slots, identities)
        for i, (key, slot) in enumerate(zip(keys, slots, strict=True)):
            assert flags[i] == (i in good and (tier, key) not in s.pages), (key, i)
            if flags[i]:
                s.pages[tier, key] = ModelPage(slot, Residency.READY)
                s.bytes[tier, slot] = key
        for i in good:
            self.insert_below(s.root(keys[i][0]), [], s.chain(keys[i][0], keys[i][2]), 77)
        if good:
            self.catalog.release(77)
            del s.leases[77]

    @invariant()
    def all_holds(self) -> None:
        self.shadow.verify()

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
        self.catalog.invalidate(None, 1000)
        self.catalog.check()
        assert self.catalog.stats()["nodes"] == 0


class HostOnly(CatalogMachine):
    tiers: ClassVar = {Tier.HOST: 5}
    paths: ClassVar = [[Tier.DEVICE, Tier.HOST], [Tier.HOST, Tier.DEVICE]]


class ThreeTiers(CatalogMachine):
    tiers: ClassVar = {Tier.DEVICE: 3, Tier.HOST: 4, Tier.DISK: 5}
    paths: ClassVar = [
        [Tier.DEVICE, Tier.HOST],
        [Tier.HOST, Tier.DEVICE],
        [Tier.HOST, Tier.DISK],
        [Tier.DISK, Tier.HOST],
        [Tier.DISK, Tier.HOST, Tier.DEVICE],
        [Tier.DEVICE, Tier.HOST, Tier.DISK],
    ]


class HostOnlyByHash(HostOnly):
    labels: ClassVar = "hash"


class ThreeTiersByHash(ThreeTiers):
    labels: ClassVar = "hash"


_SETTINGS = settings(max_examples=30, stateful_step_count=40)
TestHostOnly = HostOnly.TestCase
TestThreeTiers = ThreeTiers.TestCase
TestHostOnlyByHash = HostOnlyByHash.TestCase
TestThreeTiersByHash = ThreeTiersByHash.TestCase
for _case in (TestHostOnly, TestThreeTiers, TestHostOnlyByHash, TestThreeTiersByHash):
    _case.settings = _SETTINGS
del _case  # or it would be collected as a fifth

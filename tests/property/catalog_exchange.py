"""The machine's rules for pages on their way: reserved, settled in any order and late, cancelled."""

from __future__ import annotations

import numpy as np
from catalog_machine import CHAINS, REQUESTS, SPACES, CatalogMachine
from catalog_shadow import JUNK, Key, ModelLease, ModelPage, ModelTransfer
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvtier.catalog import NO_SLOT, PageStatus, Residency, Tier

STATUSES = st.sampled_from([int(s) for s in PageStatus] + [int(PageStatus.OK)] * 6 + [int(PageStatus.PENDING)] * 4)

# What carry_one does: space, blocks, request, words on the transfer, its ending, how the request is part of it.
Journey = tuple[int, tuple[int, ...], int, list[list[int]], str, str]
JOURNEYS = st.lists(
    st.tuples(
        SPACES,
        CHAINS,
        REQUESTS,
        st.lists(st.lists(STATUSES, min_size=1, max_size=6), max_size=3),
        st.sampled_from(["open", "good", "whole", "bad", "cancelled"]),
        st.sampled_from(["nobody", "aborts", "narrows"]),
    ),
    min_size=1,
    max_size=6,
)


class ExchangeRules(CatalogMachine):
    def movable(self, path: list[Tier], key: Key) -> bool:
        s = self.shadow
        return (
            s.current(key)
            and (path[0] not in s.capacity or s.ready((path[0], key)))
            and all((tier, key) not in s.pages for tier in path[1:] if tier in s.capacity)
        )

    @rule(data=st.data(), request=st.integers(0, 4), ahead=st.booleans(), cold=st.booleans())
    def reserve(self, data: st.DataObject, request: int, ahead: bool, cold: bool) -> None:
        s = self.shadow
        path = data.draw(st.sampled_from(self.paths))
        known = sorted(s.nodes)
        if not known:
            return
        space, epoch, chain = data.draw(st.sampled_from(known))
        keys = [(space, epoch, chain[: i + 1]) for i in range(len(chain)) if (space, epoch, chain[: i + 1]) in s.nodes]
        self.reserve_keys(path, keys, request, ahead, cold)

    def reserve_keys(
        self, path: list[Tier], keys: list[Key], request: int, ahead: bool = False, cold: bool = False
    ) -> int:
        s = self.shadow
        movable = [self.movable(path, key) for key in keys]
        destinations = [tier for tier in path[1:] if tier in s.capacity]
        free = {tier: s.free(tier) for tier in destinations}
        r = self.catalog.reserve(path, [s.nodes[key] for key in keys], request, ahead, cold)
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
                s.pages[path[0], key].ahead &= ahead
            for hop, tier in enumerate(path[1:], 1):
                if tier not in s.capacity:
                    assert r.slots[hop, i] == NO_SLOT
                    continue
                slot = int(r.slots[hop, i])
                s.bytes[tier, slot] = JUNK  # from now on anything may be written there
                s.pages[tier, key] = ModelPage(slot, Residency.FILLING, r.ticket, hop + 1 < len(path), ahead)
            if request and path[-1] in s.capacity:
                s.pin((path[-1], key))
                s.leases[request].loads.append((path[-1], key))
        if r.count < len(keys) and movable[r.count] and self.movable(path, keys[r.count]):
            assert any(s.free(t) + s.evictable(t) == 0 or ahead for t in destinations), "there was room"
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
        ticket = self.reserve_keys(path, [key for key in keys if key in s.nodes], for_request)
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
            self.say(ticket, np.full(shape, int(status), np.uint8), whole=ending == "whole")
            self.say(ticket, np.full(shape, int(PageStatus.OK), np.uint8))
            self.cancel_ticket(ticket)
            self.release(request)

    def say(self, ticket: int, status: np.ndarray, *, whole: bool = False) -> None:
        """``whole``: in one word, that all of it is well."""
        s = self.shadow
        known = ticket in s.transfers
        heard = self.catalog.settle_whole(ticket) if whole else self.catalog.settle(ticket, status)
        assert heard == known, "only words on an open ticket are taken"
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
    @rule(data=st.data(), how=st.sampled_from(["words", "all well", "whole"]))
    def settle(self, data: st.DataObject, how: str) -> None:
        s = self.shadow
        ticket = data.draw(st.sampled_from(sorted(s.transfers)))
        shape = s.transfers[ticket].status.shape
        status = np.full(shape, int(PageStatus.OK), np.uint8)
        if how == "words":
            size = shape[0] * shape[1]
            status = np.array(data.draw(st.lists(STATUSES, min_size=size, max_size=size)), np.uint8).reshape(shape)
        self.say(ticket, status, whole=how == "whole")

    @precondition(lambda self: self.settled)
    @rule(data=st.data(), status=STATUSES)
    def settle_late(self, data: st.DataObject, status: int) -> None:
        ticket, shape = data.draw(st.sampled_from(self.settled))
        late = self.catalog.stats()["settled_late"]
        assert not self.catalog.settle(ticket, np.full(shape, status, np.uint8))
        assert not self.catalog.settle_whole(ticket)
        assert not self.catalog.cancel(ticket)
        assert self.catalog.stats()["settled_late"] == late + 2

    @precondition(lambda self: self.shadow.transfers)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.cancel_ticket(data.draw(st.sampled_from(sorted(self.shadow.transfers))))

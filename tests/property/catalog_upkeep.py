"""The machine's rules for what goes, what comes back, and questions about what is there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from catalog_machine import CHAINS, REQUESTS, SPACES, CatalogMachine
from catalog_shadow import Key, ModelLease, ModelPage, space_of
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from kvtier.catalog import NO_NODE, Residency, Tier


class UpkeepRules(CatalogMachine):
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

    def any_nodes(self, data: st.DataObject) -> list[tuple[int, Key | None]]:
        """Some nodes and their blocks, also twice; None: of a node that has ended."""
        known: dict[int, Key | None] = {NO_NODE: None} | dict.fromkeys(sorted(self.numbers))
        known.update((node, key) for key, node in self.shadow.nodes.items())
        return data.draw(st.lists(st.sampled_from(list(known.items())), max_size=6))

    def asked_for(self, blocks: tuple[int, ...]) -> Any:
        return self.shadow.labels(blocks)

    @rule(
        data=st.data(),
        space=SPACES,
        blocks=CHAINS,
        request=REQUESTS,
        first=st.sampled_from([0, 0, 1, 2]),
        last=st.none() | st.integers(0, 5),
    )
    def foresee(
        self, data: st.DataObject, space: int, blocks: tuple[int, ...], request: int, first: int, last: int | None
    ) -> None:
        """Whatever tier is asked about."""
        space, blocks = self.likely(data, space, blocks)
        for source in Tier:
            for lost in (False, True):
                self.foresee_from(space, blocks, request, first, last, source, lost)

    def foresee_from(
        self, space: int, blocks: tuple[int, ...], request: int, first: int, last: int | None, source: Tier, lost: bool
    ) -> None:
        """It keeps nodes, and is no use of any page: the twin hears of the nodes alone, and has to go on alike."""
        s = self.shadow
        chain, root = s.chain(space, blocks), s.root(space)
        reach = 0
        while reach < len(chain):
            tier = s.fastest(chain[reach])
            if tier is None or (lost and tier == source):
                break
            reach += 1
        nodes, below = self.catalog.foresee(root, self.asked_for(blocks), first, last, source, lost, request)
        self.catalog.other.insert(root, s.labels(blocks[:reach]), request)
        wanted = chain[first : reach if last is None else min(last, reach)]
        assert nodes == [s.nodes[key] for key in wanted]
        assert below == [s.nodes[key] for key in wanted if self.waits_in(source, key)]
        lease = s.leases.setdefault(request, ModelLease())
        lease.holds += [key for key in chain[:reach] if key not in lease.holds]

    def waits_in(self, tier: Tier, key: Key) -> bool:
        """Whether that is where its fastest page is, and nobody is bringing it up."""
        s = self.shadow
        return s.fastest(key) == tier and not any(s.live((t, key)) for t in s.capacity if t < tier)

    @rule(data=st.data())
    def drop_ahead(self, data: st.DataObject) -> None:
        s = self.shadow
        tier = data.draw(st.sampled_from(list(s.capacity)))
        named = self.any_nodes(data)
        count = self.catalog.drop_ahead(tier, np.array([node for node, _ in named], np.uint32))
        went = 0
        for _, key in named:
            page = None if key is None else s.pages.get((tier, key))
            if page is not None and key is not None and s.ready((tier, key)) and page.pins == 0 and page.ahead:
                s.condemn((tier, key))
                went += 1
        assert count == went

    @rule(request=REQUESTS, heir=REQUESTS)
    def hand_over(self, request: int, heir: int) -> None:
        s = self.shadow
        lease = s.leases.get(request)
        if lease is not None and request != heir and (lease.promise or lease.adopted or request in s.private.values()):
            with pytest.raises(ValueError, match=f"source: request {request} holds slots"):
                self.catalog.hand_over(request, heir)
            return
        self.catalog.hand_over(request, heir)
        if lease is not None and request != heir:
            other = s.leases.setdefault(heir, ModelLease())
            other.loads += lease.loads
            other.holds += lease.holds
            del s.leases[request]

    @rule(data=st.data())
    def lacking(self, data: st.DataObject) -> None:
        s = self.shadow
        source, target = data.draw(st.tuples(*2 * [st.sampled_from(list(s.capacity))]))
        named = self.any_nodes(data)
        expected = [
            node for node, key in named if key is not None and s.ready((source, key)) and (target, key) not in s.pages
        ]
        nodes = [node for node, _ in named]
        assert self.catalog.lacking(nodes, source, target) == expected
        ready = sum(key is not None and s.ready((source, key)) for _, key in named)
        assert self.catalog.count_ready(source, nodes) == ready

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
            self.insert_below(s.root(keys[i][0]), s.chain(keys[i][0], keys[i][2]), 77)
        if good:
            self.catalog.release(77)
            del s.leases[77]

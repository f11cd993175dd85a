"""The machine's rules for a catalog of content labels: chains that are called by their content."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
from catalog_machine import CHAINS, REQUESTS, SPACES, TABLES
from catalog_shadow import Key
from catalog_upkeep import UpkeepRules
from hypothesis import strategies as st
from hypothesis.stateful import rule

from kvtier.catalog import NO_SLOT, Tier
from kvtier.content import Content


class ContentRules(UpkeepRules):
    labels: ClassVar = "content"

    def asked_for(self, blocks: tuple[int, ...]) -> Content:
        return self.shadow.content(blocks)

    @rule(data=st.data(), space=SPACES, blocks=CHAINS, request=REQUESTS, table=TABLES)
    def extend(self, data: st.DataObject, space: int, blocks: tuple[int, ...], request: int, table: list[int]) -> None:
        """Blocks go on a request's chain, or begin one, in private slots that it had or gets now."""
        s = self.shadow
        chain, mine = s.chain(space, blocks), s.leased_by(request)
        first = data.draw(st.sampled_from([0, *(i for i, key in enumerate(chain[:-1], 1) if key in mine)]))
        tier = data.draw(st.sampled_from(list(s.capacity)))
        self.take_slots(tier, data.draw(st.integers(0, len(chain) - first)), request, table)
        slots = data.draw(st.permutations([slot for t, slot in self.own_private(request) if t == tier]))
        slots = slots[: len(chain) - first]
        parent = s.nodes[chain[first - 1]] if first else s.root(space)
        self.extend_by(parent, chain, first, slots, tier, request)

    def extend_by(self, parent: int, chain: list[Key], first: int, slots: list[int], tier: Tier, request: int) -> None:
        s, last = self.shadow, first + len(slots)
        s.forget_the_dead()
        keys = chain[first:last]
        table = np.full(len(chain), NO_SLOT, np.uint32)
        table[first:last] = slots
        content = s.content(chain[-1][2])
        for wrong in [NO_SLOT, *slots[:-1]][:2] if slots else []:  # it is not the request's, or is there twice
            bad = table.copy()
            bad[last - 1] = wrong
            with pytest.raises(ValueError, match="slots"):
                self.catalog.extend(parent, content, bad, first, last, tier, request)
            s.verify()  # nothing has changed
        nodes, fresh = self.catalog.extend(parent, content, table, first, last, tier, request)
        new = [(tier, key) not in s.pages and s.current(key) for key in keys]
        self.inserted(keys, nodes, request)
        assert fresh == [node for node, is_new in zip(nodes, new, strict=True) if is_new]
        for key, slot, is_new in zip(keys, slots, new, strict=True):
            if is_new:
                self.adopted(tier, key, slot, request)

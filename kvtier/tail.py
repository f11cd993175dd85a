"""Tails: the end of a prefix is loaded while the engine computes its front; where they meet, the engine goes on behind.

    blocks    |== there ==|---- computed, in order ---->|<-- loaded, last part first --|  the rest of the prompt
              0         first                         they meet                      found

The engine computes from the front in slots of the request's own, the loads come from the back into slots of theirs, so
neither ever touches the other's, and both are of use wherever they meet: no prediction has to be right for both to end
together. When the computed blocks reach those that have arrived, the table is switched to these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtier.catalog import Catalog, Residency, Tier
from kvtier.sequence import Loaded, Sequence, Tail, tokens_by_tier

if TYPE_CHECKING:
    from kvtier.placement import Placement

__all__ = ["TailLoader"]


_PARTS = 16  # that a tail is cut into
_AHEAD = 8  # of them under way: enough for a pass, and no more than will surely be wanted


class TailLoader:
    """Orders tails and switches tables to them. A sequence has one from its match until it is used or dropped."""

    def __init__(self, catalog: Catalog, placement: Placement, block_size: int) -> None:
        self._catalog = catalog
        self._placement = placement
        self._block = block_size
        self.racing: dict[str, Sequence] = {}

    def start(self, sequence: Sequence) -> None:
        """The request has its slots and computes from now on."""
        tail = sequence.tail
        assert tail is not None
        tail.begin = len(tail.nodes)
        tail.part = -(-(tail.begin - sequence.promised) // _PARTS)
        tail.seen = sequence.cached
        self.racing[sequence.request_id] = sequence
        self._order(sequence, tail)

    def advance(self) -> None:
        """Order what can follow, after each batch of completions."""
        for sequence in self.racing.values():
            if sequence.tail is not None:
                self._order(sequence, sequence.tail)

    def _order(self, sequence: Sequence, tail: Tail) -> None:
        """The next parts, as far as the device has room for them beside what is computed, and clear of what computing
        will have reached by then."""
        tail.tickets = {ticket for ticket in tail.tickets if self._placement.runs(ticket)}
        clear = sequence.cached + 2 * (sequence.cached - tail.seen)
        while len(tail.tickets) < _AHEAD and tail.begin - tail.part >= clear:
            part = np.ascontiguousarray(tail.nodes[tail.begin - tail.part : tail.begin])
            brought = self._placement.bring(part, sequence.request, sequence.deadline)
            if brought.blocks < len(part):  # of no use without its end
                self._placement.cancel(brought.tickets)
                tail.part = len(tail.nodes) + 1  # nor is anything before it
                return
            tail.tickets.update(brought.tickets)
            tail.begin -= tail.part

    def take(self, sequence: Sequence) -> Loaded | None:
        """Switch to what has arrived, if the computed blocks reach it; None: go on computing."""
        tail = sequence.tail
        if tail is None:
            return None
        computed, found = sequence.cached, len(tail.nodes)
        if computed >= found or not sequence.cacheable:
            self.drop(sequence)
            return None
        if computed >= tail.begin:
            there = self._catalog.state(tail.nodes[computed:])[1][:, Tier.DEVICE] == Residency.READY
            if there.all():
                return self._switch(sequence, tail)
        self._order(sequence, tail)
        tail.seen = computed
        return None

    def _switch(self, sequence: Sequence, tail: Tail) -> Loaded:
        computed, found = sequence.cached, len(tail.nodes)
        arrived = tail.nodes[computed:]
        own = sequence.table[computed:found]
        sequence.growing.put(computed, np.ascontiguousarray(self._catalog.state(arrived)[0][:, Tier.DEVICE]))
        self._catalog.give_back(Tier.DEVICE, own, sequence.request)
        sequence.growing.joined(arrived.tolist())
        # Another request may have computed some of them. And where a block was computed while its page was on its way,
        # that page is of no use to anybody yet: so the others cannot be kept by `narrow`.
        self._catalog.hold_in(sequence.request, Tier.DEVICE)
        self.drop(sequence)
        by_tier = tokens_by_tier(sequence.origin[computed:found], self._block)
        return Loaded(sequence.request_id, found * self._block, by_tier)

    def drop(self, sequence: Sequence) -> None:
        """Expect nothing more of it."""
        self.racing.pop(sequence.request_id, None)
        if sequence.tail is not None:
            self._placement.cancel(sequence.tail.tickets)
            sequence.tail = None

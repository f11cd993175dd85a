"""Holdings: what was brought for hints and has not been used yet: on how much room, held for whom, and what becomes of
it when its request does not come.

In host memory it is pinned for its hint. On the device nobody holds it, so whoever needs the slots has them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.catalog import DEVICE, HOST, Catalog
from kvtier.choice import ONBOARD, STAGE
from kvtier.messages import Priority

if TYPE_CHECKING:
    from kvtier.hints import Hint
    from kvtier.placement import Placement

__all__ = ["Holdings"]

_PREFETCH = Priority.PREFETCH  # looked up once, as tiers are


class Holdings:
    """``host`` and ``device``: slots that may be used there."""

    def __init__(self, catalog: Catalog, placement: Placement, host: int, device: int) -> None:
        self._catalog = catalog
        self._placement = placement
        self.host, self.device = host, device
        self.held = 0
        """Of these, by pages that were brought and not used yet."""
        self.lifted = 0
        """Of these, by pages that were sent on and not used yet."""
        self.by_ticket: dict[int, Hint] = {}
        self.leaving: dict[int, tuple[list[int], list[int]]] = {}
        """Transfers at work on what was given back: what they bring, in host memory and on the device, goes at once."""
        self._nobodys: list[tuple[int, list[int]]] = []
        self.holders: dict[Hint, None] = {}
        """Those for which something was brought, in this order."""

    @property
    def room(self) -> int:
        """Slots of host memory that may be used now. What was given back and is being written still takes some."""
        return max(0, self.host - self.held - self.draining)

    @property
    def draining(self) -> int:
        """Slots of host memory that are being written for nobody, and come back when that has ended."""
        return self._catalog.usage(HOST).draining

    def note_found(self, hint: Hint, found: list[int], below: list[int]) -> int:
        """``found`` is what it will read, and ``below`` what of it has to be brought; returns how much of that was
        ordered before and did not come."""
        brought = hint.brought
        if brought:
            lost = set(brought).intersection(below)
            brought = [node for node in brought if node not in lost]
        lost_count = hint.issued - len(brought)
        hint.found, hint.wanted, hint.issued = found, brought + below, len(brought)
        self.held -= lost_count
        return lost_count

    def bring(self, hint: Hint, count: int, until: float) -> tuple[int, int]:
        """Order the next so many of what it wants; (ticket, how many of them are coming)."""
        assert hint.wanted is not None
        part = hint.wanted[hint.issued : hint.issued + count]
        ticket, got = self._placement.load(STAGE, part, hint.request, _PREFETCH, until)
        if ticket:
            hint.issued += got
            hint.tickets.add(ticket)
            self.held += got
            self.by_ticket[ticket] = hint
            self.holders[hint] = None
        if got < count:
            self._placement.copy_cold(HOST, count - got)
        return ticket, got

    def bring_for_nobody(self, nodes: list[int], until: float) -> tuple[int, int]:
        """As ``bring``, on free slots, or on as many as hints may have in all, what nobody used of earlier calls being
        gone for it."""
        if not nodes:
            return 0, 0
        taken = sum(len(earlier) for _, earlier in self._nobodys)
        kept = []
        for ticket, earlier in self._nobodys:  # one that hangs keeps none of those behind it
            if taken + len(nodes) > self.host and not self._placement.runs(ticket):
                self._catalog.drop_ahead(HOST, earlier)
                taken -= len(earlier)
            else:
                kept.append((ticket, earlier))
        self._nobodys = kept
        nodes = nodes[: max(self.host - taken, self._catalog.usage(HOST).free)]
        ticket, count = self._placement.load(STAGE, nodes, 0, _PREFETCH, until) if nodes else (0, 0)
        if ticket:
            self._nobodys.append((ticket, nodes[:count]))
        return ticket, count

    def lift(self, hint: Hint, until: float) -> bool:
        """Send on to the device what lacks there, as far as it may; whether that is all of it."""
        lacking = self._catalog.lacking(hint.found, HOST, DEVICE)
        nodes = lacking[: self.device - self.lifted]
        if nodes:
            ticket, count = self._placement.load(ONBOARD, nodes, 0, _PREFETCH, until)
            if ticket:
                hint.lifts.add(ticket)
            hint.lifted += nodes[:count]
            self.lifted += count
            if count < len(nodes):
                self._placement.copy_cold(DEVICE, len(nodes) - count)
            return count == len(lacking)
        return not lacking

    def lower(self, hint: Hint) -> None:
        """Nobody will need it on the device soon."""
        lifted, lifts, hint.lifted, hint.lifts = hint.lifted, hint.lifts, [], set()
        self.lifted -= len(lifted)
        self._drop(lifts, [], lifted)

    def note_ended(self, tickets: set[int]) -> None:
        for ticket in tickets:
            self.by_ticket.pop(ticket).tickets.discard(ticket)
        for ticket in [ticket for ticket in self.leaving if not self._placement.runs(ticket)]:
            self._drop(set(), *self.leaving.pop(ticket))

    def _drop(self, tickets: set[int], brought: list[int], lifted: list[int]) -> None:
        """Have what nobody used of these be gone, so that what is used stays: now, and where ``tickets`` are at work on
        it, then."""
        running = [ticket for ticket in tickets if self._placement.runs(ticket)]
        self._placement.abandon(ticket for ticket in running if not self._placement.is_awaited(ticket))
        self.leaving.update(dict.fromkeys(running, (brought, lifted)))
        if lifted:
            self._catalog.drop_ahead(DEVICE, lifted)
        if brought:
            self._catalog.drop_ahead(HOST, brought)

    def release(self, hint: Hint) -> None:
        """What was brought for it is others' as well from now on."""
        self.held -= hint.issued
        self.lifted -= len(hint.lifted)
        for ticket in hint.tickets:
            del self.by_ticket[ticket]
        self._catalog.release(hint.request)
        self.holders.pop(hint, None)
        hint.issued, hint.lifted, hint.tickets, hint.lifts = 0, [], set(), set()

    def give_back(self, hint: Hint) -> None:
        """It will not be used: stop what has not begun."""
        tickets, brought, lifted = hint.tickets | hint.lifts, hint.brought, hint.lifted
        self.release(hint)
        self._drop(tickets, brought, lifted)  # with the hold on them some of these nodes may have ended

    def hand_over(self, hint: Hint, heir: Hint) -> None:
        """All that was brought for the one is held for the other now, who named it too."""
        assert heir.wanted is not None
        brought = hint.brought
        named = set(brought)
        rest = [node for node in heir.wanted[heir.issued :] if node not in named]
        heir.wanted = heir.brought + brought + rest
        heir.issued += hint.issued
        heir.lifted += hint.lifted
        heir.tickets |= hint.tickets
        heir.lifts |= hint.lifts
        self._catalog.hand_over(hint.request, heir.request)
        self.by_ticket.update(dict.fromkeys(hint.tickets, heir))
        self.holders.pop(hint, None)
        self.holders[heir] = None
        hint.issued, hint.lifted, hint.tickets, hint.lifts = 0, [], set(), set()

"""Placement: answers of the catalog become transfers, and completions become answers to the catalog.

It owns the write policy (when a page goes down) and the account of what is under way. It holds no bytes and no thread:
the manager calls it from the engine's thread.

Where the device is foreign, the catalog knows no slot of it: calls that move pages to or from it are given the engine's
own block ids, ``device``, one for each node.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier import _core
from kvtier.catalog import DEVICE, HOST, Catalog, Tier, TierSpec
from kvtier.choice import ONBOARD, STAGE_ONBOARD
from kvtier.messages import Completion, DataPlane, Hello, Priority
from kvtier.orders import SPILL, DirectOrders, OrdersByMessage
from kvtier.ways import Plan, plans

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kvtier.catalog import SomeNodes
    from kvtier.config import CacheConfig
    from kvtier.costmodel import CostModel
    from kvtier.layers import Layers
    from kvtier.mover import Mover
    from kvtier.orders import Orders
    from kvtier.ways import Plans

__all__ = ["Bringing", "Placement", "tier_specs"]

Nodes = npt.NDArray[np.uint32]
Slots = npt.NDArray[np.uint32]

OFFLOAD = (Tier.DEVICE, Tier.HOST)

# Looked up once, as tiers are.
_DEMAND, _PREFETCH, _BACKGROUND = Priority.DEMAND, Priority.PREFETCH, Priority.BACKGROUND

_MOVES = {
    "offload": "device_to_host",
    "onboard": "host_to_device",
    "spill": "host_to_disk",
    "stage": "disk_to_host",
}
"""Lanes by the names under which their bytes are counted."""

_WRITTEN = ("ahead", "at_once")  # policies by which every page goes down before it goes

_AGAIN = 256  # pages that were put off are stored in one step,
_CROWDED = 16  # and none in so many after somebody found no room in their tier

_PARTS = 8  # that a load is cut into at most, each of so many bytes and seconds at least
_PART_BYTES = 1 << 20
_PART_SECONDS = 2e-3


@dataclass(frozen=True, slots=True)
class Bringing:
    """What was ordered to have a chain's pages on the device."""

    blocks: int
    """The prefix that is there or on its way; nothing can bring what follows it."""
    tickets: tuple[int, ...]
    counts: tuple[int, ...]
    """How many blocks each ticket brings; where nothing was there and nothing waits, they sum to ``blocks``."""
    waits: bool
    """Pages that other requests' transfers are bringing are part of the prefix: look again when any has ended."""
    cuts: tuple[int, ...] = ()
    """Where the one transfer comes in slices: see :class:`kvtier.messages.Transfer`."""


def tier_specs(config: CacheConfig, capacity: Mapping[Tier, int], tiers: Sequence[Tier]) -> list[TierSpec]:
    """How the catalog keeps these ``tiers``, of so many slots each.

    A last copy that the write policy wants below never goes for what is brought ahead. One that it would rather lose
    than write may: a tier is full of those in the long run, and nothing could be brought any more.
    """
    policies = {Tier.HOST: config.host.policy, Tier.DISK: config.disk.policy}
    writes = {Tier.DEVICE: config.host.write, Tier.HOST: config.disk.write}
    return [
        TierSpec(tier, capacity[tier], policies.get(tier, "lru"), keeps_last=writes.get(tier, "at_once") in _WRITTEN)
        for tier in tiers
    ]


class Placement:
    """Issues transfers and settles them, and tells ``costs`` of both. ``tiers`` are the tiers that there are, fastest
    first. ``mover``: the data plane is this process's own and moves by this one; otherwise it hears of transfers by
    messages, and ``clock`` says when.
    """

    def __init__(
        self,
        config: CacheConfig,
        catalog: Catalog,
        plane: DataPlane,
        tiers: Sequence[Tier],
        page_bytes: int,
        costs: CostModel,
        clock: Callable[[], float],
        mover: Mover | None = None,
    ):
        self._costs = costs
        self._clock = clock
        self._catalog = catalog
        self._plane = plane
        self._page_bytes = page_bytes
        self._offload = config.host.write if Tier.HOST in tiers else "never"
        self._spill = config.disk.write if Tier.DISK in tiers else "never"
        self._traffic = _core.Traffic(catalog.native, costs)
        spill = self._spill == "at_once"
        self._orders: Orders = (
            OrdersByMessage(catalog, plane, self._traffic, clock, spill=spill)
            if mover is None
            else DirectOrders(catalog, mover, self._traffic, spill=spill)
        )
        self.settle_reported = self._orders.settle
        """Settle what the data plane has reported, as :meth:`settle` does."""
        self.catch_up = self._orders.catch_up
        """Also of what is settled late, before room is given or refused."""
        self._awaited: set[int] = set()
        self._crowded = {DEVICE: 0, HOST: 0}  # for how many steps nothing that was put off is stored from there
        self.ahead = [path for path, write in ((OFFLOAD, self._offload), (SPILL, self._spill)) if write == "ahead"]
        """The lanes that :meth:`maintain` looks at."""
        self._low, self._high = config.watermarks.low, config.watermarks.high

    def adopt(self, hello: Hello) -> int:
        """Take over what the disk holds already, and have it clear what cannot be reached any more; returns pages."""
        if not len(hello.inventory_slots):
            return 0
        adopted = self._catalog.restore(Tier.DISK, hello.inventory_slots, hello.inventory_identities)
        self._plane.forget(np.ascontiguousarray(hello.inventory_slots[~adopted]))
        return int(adopted.sum())

    # ---- issuing -------------------------------------------------------------------------------------------------

    def bring(
        self,
        nodes: Nodes,
        request: int,
        deadline: float,
        *,
        start: bool = True,
        device: Slots | None = None,
        plan: Plans | None = None,
    ) -> Bringing:
        """Order what is needed for the pages of ``nodes`` to be on the device; without ``start`` order nothing new.
        ``plan`` is theirs as of now, for who has it.

        |== on the device ==|-- others load it --|-- host --|---- disk ----|  cut at the first page
        |      nothing      |        wait        |  onboard | stage+onboard|  that none of these can bring

        What others load reaches no foreign device: there it ends the prefix.
        """
        plan = self.plan(nodes) if plan is None else plan
        if not plan.any():
            return Bringing(len(nodes), (), (), waits=False)
        stop = (plan == Plan.NEVER) if start else (plan != Plan.THERE)
        if device is not None:
            stop |= plan == Plan.WAIT
        end = int(np.argmax(stop)) if stop.any() else len(plan)
        tickets: list[int] = []
        counts: list[int] = []
        edges = np.flatnonzero(np.diff(plan[:end])) + 1
        for first, last in zip([0, *edges.tolist()], [*edges.tolist(), end], strict=True):
            if first == last or plan[first] <= Plan.WAIT:
                continue
            path = ONBOARD if plan[first] == Plan.ONBOARD else STAGE_ONBOARD
            if path is STAGE_ONBOARD:
                self.make_room(HOST, last - first)
            count = 0
            for part in self._parts(path, nodes[first:last]):
                blocks = None if device is None else device[first + count : first + count + len(part)]
                ticket, moved = self.load(path, part, request, _DEMAND, deadline, blocks)
                count += moved
                if ticket:
                    tickets.append(ticket)
                    counts.append(moved)
                if moved < len(part):
                    break
            if count < last - first:
                end = first + count
                break
        return Bringing(end, tuple(tickets), tuple(counts), bool((plan[:end] == Plan.WAIT).any()))

    def bring_by_layer(
        self,
        nodes: Nodes,
        plan: Plans,
        held: npt.NDArray[np.bool_],
        request: int,
        deadline: float,
        layers: Layers,
        device: Slots | None = None,
    ) -> Bringing | None:
        """As :meth:`bring`, all that the device lacks as one transfer in slices. None, and nothing was ordered: not all
        of it is in host memory, or it is too little to be cut, or what is on the device may go again meanwhile, not
        being ``held`` there for the request (bool [blocks])."""
        if not held[plan == Plan.THERE].all():
            return None
        wanted = np.flatnonzero(plan == Plan.ONBOARD)
        cuts = layers.cuts(len(wanted))
        if not cuts or (np.delete(plan, wanted) != Plan.THERE).any():
            return None
        missing = np.ascontiguousarray(nodes[wanted])
        slots = None if device is None else device[wanted]
        ticket, count = self._orders.load(ONBOARD, missing, request, _DEMAND, deadline, device=slots, cuts=cuts)
        end = len(nodes) if count == len(wanted) else int(wanted[count])
        return Bringing(end, (ticket,) if ticket else (), (count,) if ticket else (), waits=False, cuts=cuts)

    def wait_for_slices(self, ticket: int, count: int, timeout: float) -> bool:
        """As :meth:`kvtier.messages.DataPlane.wait_for_slices`."""
        return self._plane.wait_for_slices(ticket, count, timeout)

    def _parts(self, path: tuple[Tier, ...], nodes: Nodes) -> list[Nodes]:
        """A load that takes long goes in parts, so that what has arrived of it is heard of before all has."""
        seconds = self._costs.load(path, len(nodes), self._clock())
        most = _PARTS if seconds is None else min(_PARTS, int(seconds / _PART_SECONDS))
        count = min(most, len(nodes) * self._page_bytes // _PART_BYTES)
        return np.array_split(nodes, count) if count > 1 else [nodes]

    def plan(self, nodes: Nodes) -> Plans:
        """For each block, how its page gets to the device from where it is now."""
        return plans(self._catalog.state(nodes)[1], disk_offline=self.disk_offline)

    def within_reach(self, tiers: npt.NDArray[np.uint8]) -> int:
        """How many of the first blocks, found in ``tiers``, can be had as things stand."""
        lost = tiers == Tier.DISK
        return int(np.argmax(lost)) if self.disk_offline and lost.any() else len(tiers)

    def load(
        self,
        path: tuple[Tier, ...],
        nodes: SomeNodes,
        request: int,
        priority: Priority,
        deadline: float,
        device: Slots | None = None,
    ) -> tuple[int, int]:
        """Start moving the pages of ``nodes`` up along ``path``; returns (ticket, how many of them, a prefix)."""
        return self._orders.load(path, nodes, request, priority, deadline, device=device)

    def store(
        self,
        path: tuple[Tier, ...],
        nodes: SomeNodes,
        priority: Priority = _BACKGROUND,
        device: Slots | None = None,
        *,
        cold: bool = False,
        behind: int | None = None,
    ) -> int:
        """As :meth:`kvtier.orders.Orders.store`; returns the transfer's ticket, 0 for none."""
        return self._orders.store(path, nodes, priority, device=device, cold=cold, behind=behind)

    # ---- the write policy ----------------------------------------------------------------------------------------

    def on_computed(self, nodes: SomeNodes, device: Slots | None = None, *, behind: int | None = None) -> int:
        """New blocks are ready on the device, or will be ``behind`` what that stream was given until now; returns the
        ticket of what it led to, 0 for nothing."""
        if self._offload != "at_once" or not len(nodes):
            return 0
        return self._orders.store(OFFLOAD, nodes, _BACKGROUND, device=device, behind=behind)

    def on_hit(self, nodes: Nodes, device: Slots | None = None) -> int:
        """Blocks are ready on the device and in use for a second time or more; returns as ``on_computed`` does."""
        ticket = 0
        if self._offload == "second_use" and len(nodes):
            ticket = self.store(OFFLOAD, nodes, device=device)
        if self._spill == "second_use" and len(nodes):
            self.store(SPILL, nodes)
        return ticket

    def swap_out(self, nodes: Nodes) -> None:
        """A preempted sequence's pages go down whatever the policy says of computed ones, unless it says never."""
        if self._offload != "never" and len(nodes):
            self.store(OFFLOAD, nodes, _PREFETCH)

    def maintain(self) -> None:
        """Copy the cold end of each tier down ahead of need: from when too few of its next slots could be had at once,
        being free or held below too, until enough could. And what was put off, where its lane has time again. In each
        step in which something has ended, and where there are :attr:`ahead` in every one."""
        if self._traffic.has_put_off:
            self._store_put_off()
        for path in self.ahead:
            if not self._rests(path):
                continue
            upper, lower = self._catalog.usage(path[0]), self._catalog.usage(path[1])
            # What the lower tier cannot hold beside each other would be copied there in turns, for ever.
            most = lower.free + self._catalog.evictable(path[1])
            missing = [min(most, max(0, ceil(mark * upper.capacity) - upper.free)) for mark in (self._low, self._high)]
            if len(self._catalog.cold(path[0], missing[0], path[1])):
                self.store(path, self._catalog.cold(path[0], missing[1], path[1]), cold=True)

    def _store_put_off(self) -> None:
        for path in (OFFLOAD, SPILL):
            if self._crowded[path[0]]:  # else they would be in the way again when who was refused asks again
                self._crowded[path[0]] -= 1
                continue
            while self._rests(path) and (nodes := self._traffic.take_put_off(path, _AGAIN)):
                self.store(path, nodes)

    def make_room(self, tier: Tier, pages: int) -> bool:
        """Whether there is room for so many pages that somebody waits for. What has been stored by now may be evicted
        for them, and stores that keep what they read in their place give way: those that had not begun do so at once,
        where the data plane is this process's own."""
        if self._catalog.native.has_room(tier, pages):
            return True
        self.catch_up()
        usage = self._catalog.usage(tier)
        missing = pages - usage.free - self._catalog.evictable(tier)
        if missing <= 0:
            return True
        self._crowded[tier] = _CROWDED
        if tickets := self._traffic.give_way(OFFLOAD if tier is DEVICE else SPILL, missing):
            self.cancel(tickets)
            self.catch_up()
        return self._catalog.native.has_room(tier, pages)

    def copy_cold(self, tier: Tier, count: int) -> None:
        """What is brought ahead found no room for so many pages there: copy down what keeps it from that, last copies
        among the coldest, where the policy wants them below anyhow."""
        path, write = (OFFLOAD, self._offload) if tier == Tier.DEVICE else (SPILL, self._spill)
        if write in _WRITTEN and self._rests(path):
            cold = self._catalog.cold(path[0], count, path[1])
            if len(cold):
                self.store(path, cold, cold=True)

    def _rests(self, path: tuple[Tier, Tier]) -> bool:
        """Whether nothing is on its way along this lane, and something could be."""
        if self._traffic.moves(path):
            self.catch_up()
        return not self._traffic.moves(path) and not (path[1] is Tier.DISK and self.disk_offline)

    # ---- settling ------------------------------------------------------------------------------------------------

    def settle(self, completions: Iterable[Completion]) -> dict[int, bool]:
        """Tell the catalog, and have what came down to host memory go on to the disk where the policy says at once.

        Returns the tickets whose last hop has ended for good, and whether all of it went well.
        """
        return self._orders.settle_these(completions)

    def cancel(self, tickets: Iterable[int]) -> None:
        """Stop what has not begun. The slots stay taken until the data plane says that nothing can touch them."""
        for ticket in tickets:
            if self._traffic.runs(ticket):
                self._plane.cancel(ticket)

    def promote(self, tickets: Iterable[int], deadline: float) -> None:
        """Somebody waits for these now: serve them as demand."""
        for ticket in tickets:
            if self._traffic.runs(ticket):
                self._plane.promote(ticket, Priority.DEMAND, deadline)
                self._costs.promoted(ticket, Priority.DEMAND)
                self._awaited.add(ticket)
        self._awaited = set(filter(self._traffic.runs, self._awaited))

    def is_awaited(self, ticket: int) -> bool:
        """Whether somebody waits, or did, for what nobody had asked for when it was ordered."""
        return ticket in self._awaited

    def abandon(self, tickets: Iterable[int]) -> None:
        """Expect nothing more of them, whatever the data plane says or does not say: what has not come drains."""
        for ticket in tickets:
            self.cancel((ticket,))
            self._catalog.cancel(ticket)

    @property
    def under_way(self) -> int:
        return self._traffic.under_way

    @property
    def moving(self) -> int:
        """Transfers under way whose end can be expected: not those that hang."""
        return self._traffic.under_way - self._traffic.hanging

    def runs(self, ticket: int) -> bool:
        """Whether the data plane has not said its last word on the ticket."""
        return self._traffic.runs(ticket)

    # ---- the account ---------------------------------------------------------------------------------------------

    @property
    def disk_offline(self) -> bool:
        """Whether a transfer found it out of service."""
        return self._traffic.disk_offline

    @property
    def bytes_moved(self) -> dict[str, int]:
        """By the tiers between which: ``device_to_host`` and so on, those that there were."""
        return {_MOVES[lane]: pages * self._page_bytes for lane, pages in self._traffic.pages_moved.items()}

    @property
    def failures(self) -> dict[str, int]:
        """Pages that did not arrive, by why: a PageStatus's name, or ``refused`` by the data plane."""
        found = {status.name.lower(): pages for status, pages in self._traffic.failures.items()}
        return found | ({"refused": self._traffic.pages_refused} if self._traffic.pages_refused else {})

    @property
    def stores_dropped(self) -> int:
        """Pages that were to go down and found no room or no place in a queue."""
        return self._traffic.pages_dropped

    @property
    def stores_put_off(self) -> int:
        """Pages whose copy was put off, their lane being behind or their room being needed."""
        return self._traffic.pages_put_off

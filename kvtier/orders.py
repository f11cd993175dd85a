"""Orders: pages that shall move become a reservation of the catalog and a transfer of the data plane, or neither; what
the data plane says of transfers becomes answers to the catalog.

Where the data plane is this process's own each is one native call (:class:`DirectOrders`); otherwise they are messages
(:class:`OrdersByMessage`). Both do the same: what is refused, or raised for, leaves no ticket open. Both tell
``_core.Traffic``, which knows what is under way, what was moved and what was not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier import _core
from kvtier.catalog import DISK, HOST, Catalog, PageStatus, Residency, SomeNodes, Tier
from kvtier.messages import Completion, DataPlane, Priority, Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvtier.mover import Mover

__all__ = ["SPILL", "DirectOrders", "Orders", "OrdersByMessage"]

Slots = npt.NDArray[np.uint32]

SPILL = (HOST, DISK)

_NOTHING: dict[int, bool] = {}  # that has ended; nobody changes it
_DEMAND, _BACKGROUND = Priority.DEMAND, Priority.BACKGROUND  # looked up once, as tiers are


class Orders(ABC):
    """Has pages moved, and tells ``traffic``. ``spill``: what came down to host memory goes on to the disk.

    Of a foreign device ``device`` says where pages are or go there, one block for each node.
    """

    def __init__(self, traffic: _core.Traffic, *, spill: bool) -> None:
        self._traffic = traffic
        self._spill = spill

    @abstractmethod
    def load(
        self,
        path: tuple[Tier, ...],
        nodes: SomeNodes,
        request: int,
        priority: Priority,
        deadline: float,
        *,
        device: Slots | None = None,
        cuts: tuple[int, ...] = (),
    ) -> tuple[int, int]:
        """Start moving the pages of ``nodes`` up along ``path``; the arguments are those of
        :meth:`kvtier.catalog.Catalog.reserve` and :class:`kvtier.messages.Transfer`. What nobody waits for is
        reserved ahead: it takes the place of no page that a hint needs by ``deadline``.

        Returns the ticket and how many of them, from the first; (0, 0): none, there was no room or no place.
        """

    @abstractmethod
    def store(
        self,
        path: tuple[Tier, ...],
        nodes: SomeNodes,
        priority: Priority,
        *,
        device: Slots | None = None,
        cold: bool = False,
        behind: int | None = None,
    ) -> int:
        """Copy down the pages of ``nodes`` that the next tier lacks; what finds no room or no place is dropped, and in
        the background what the lane has no time for is put off.

        ``cold``: they are copied for being the next to be evicted, and stay that. ``behind``: the stream of the
        engine's that copies on a device come after, the current one if not given. Returns the ticket, 0 for none.
        """

    @abstractmethod
    def settle(self) -> dict[int, bool]:
        """Settle what the data plane has reported; see :meth:`kvtier.placement.Placement.settle`.

        Stores in the background that went well may be left for some steps, so that many are settled together.
        """

    @abstractmethod
    def catch_up(self) -> None:
        """Settle those as well, for who gives or refuses room or looks at what is where; :meth:`settle` tells of it."""

    def settle_these(self, completions: Iterable[Completion]) -> dict[int, bool]:
        """As :meth:`settle`, where somebody else has asked the data plane."""
        ended, below = self._traffic.settle(list(completions))
        if self._spill and below:
            try:
                self.store(SPILL, below, _BACKGROUND)
            except (ValueError, OSError, RuntimeError):  # nobody waits for it, but others for what has ended
                self._traffic.dropped(len(below))
        return ended


class OrdersByMessage(Orders):
    """Orders to any data plane."""

    def __init__(
        self, catalog: Catalog, plane: DataPlane, traffic: _core.Traffic, clock: Callable[[], float], *, spill: bool
    ) -> None:
        super().__init__(traffic, spill=spill)
        self._catalog = catalog
        self._plane = plane
        self._clock = clock

    def load(
        self,
        path: tuple[Tier, ...],
        nodes: SomeNodes,
        request: int,
        priority: Priority,
        deadline: float,
        *,
        device: Slots | None = None,
        cuts: tuple[int, ...] = (),
    ) -> tuple[int, int]:
        """See :class:`Orders`."""
        ahead = priority is not _DEMAND
        transfer = self._reserve(path, nodes, request, ahead=ahead, device=device, due=deadline)
        return self._submit(transfer._replace(priority=priority, deadline=deadline, cuts=cuts), nodes)

    def store(
        self,
        path: tuple[Tier, ...],
        nodes: SomeNodes,
        priority: Priority,
        *,
        device: Slots | None = None,
        cold: bool = False,
        behind: int | None = None,
    ) -> int:
        """See :class:`Orders`."""
        assert behind is None  # who carries the message out says what that is
        if path[1] is DISK and self._traffic.disk_offline:
            self._traffic.dropped(len(nodes))
            return 0
        wanted: SomeNodes
        if device is None:
            wanted = self._catalog.lacking(nodes, path[0], path[1])
        else:
            lacking = self._catalog.state(nodes)[1][:, path[1]] == Residency.ABSENT
            wanted, device = np.asarray(nodes)[lacking], device[lacking]
        most = self._traffic.store_room(path) if priority is _BACKGROUND else len(wanted)
        if len(wanted) > most:
            if device is not None:  # what the engine's own blocks hold later nobody knows
                self._traffic.count_put_off(len(wanted) - most)
                device = device[:most]
            elif not cold:  # those are found again
                self._traffic.put_off(path, wanted[most:])
            wanted = wanted[:most]
        if not len(wanted):
            return 0
        transfer = self._reserve(path, wanted, 0, cold=cold, device=device)
        ticket, count = self._submit(transfer._replace(priority=priority), wanted)
        self._traffic.dropped(len(wanted) - count)
        return ticket

    def settle(self) -> dict[int, bool]:
        """See :class:`Orders`."""
        return self.settle_these(self._plane.poll())

    def catch_up(self) -> None:
        """See :class:`Orders`; here nothing is left."""

    def _reserve(
        self,
        path: tuple[Tier, ...],
        nodes: SomeNodes,
        request: int,
        *,
        ahead: bool = False,
        cold: bool = False,
        device: Slots | None,
        due: float = 0.0,
    ) -> Transfer:
        reserved = self._catalog.reserve(path, nodes, request, ahead=ahead, cold=cold, due=due)
        if reserved.count and device is not None:
            reserved.slots[path.index(Tier.DEVICE)] = device[: reserved.count]
        return Transfer(reserved.ticket, path, reserved.slots, reserved.identities)

    def _submit(self, transfer: Transfer, nodes: SomeNodes) -> tuple[int, int]:
        """Hand over what was reserved, of the first of ``nodes``; ticket 0 is nothing."""
        count = len(transfer.identities) if transfer.ticket else 0
        if not count:
            return 0, 0
        first = nodes if count == len(nodes) else nodes[:count]
        ticket, accepted = transfer.ticket, False
        try:
            self._traffic.begun(ticket, transfer.path, first, transfer.priority, self._clock())
            try:
                accepted = self._plane.submit(transfer)
            finally:
                if not accepted:
                    self._traffic.refused(ticket)
        finally:  # also of what is raised: no ticket stays open that nobody works on, and none runs that nobody knows
            if not accepted:
                refused = np.full((len(transfer.path) - 1, count), PageStatus.SKIPPED, np.uint8)
                self._catalog.settle(ticket, refused)
        return (ticket, count) if accepted else (0, 0)


class DirectOrders(Orders):
    """Orders to the mover of this process, which has a device tier of the catalog's own."""

    def __init__(self, catalog: Catalog, mover: Mover, traffic: _core.Traffic, *, spill: bool) -> None:
        super().__init__(traffic, spill=spill)
        self._native = _core.Orders(catalog.native, mover.native, traffic)
        self._has_room = catalog.native.has_room
        self._has_news = mover.native.has_news  # looked at in each step
        self._mover = mover
        self._caught_up: dict[int, bool] = {}

    def load(
        self,
        path: tuple[Tier, ...],
        nodes: SomeNodes,
        request: int,
        priority: Priority,
        deadline: float,
        *,
        device: Slots | None = None,
        cuts: tuple[int, ...] = (),
    ) -> tuple[int, int]:
        """See :class:`Orders`."""
        assert device is None
        mover, ahead = self._mover, priority is not _DEMAND
        return self._native.load(path, nodes, request, ahead, priority, deadline, mover.stream(), cuts, mover.crowded)

    def store(
        self,
        path: tuple[Tier, ...],
        nodes: SomeNodes,
        priority: Priority,
        *,
        device: Slots | None = None,
        cold: bool = False,
        behind: int | None = None,
    ) -> int:
        """See :class:`Orders`."""
        assert device is None
        mover = self._mover
        if not self._has_room(path[1], len(nodes)):
            self.catch_up()  # what has arrived meanwhile may be evicted for these
        return self._native.store(
            path, nodes, cold, priority, mover.stream() if behind is None else behind, mover.crowded
        )

    def settle(self) -> dict[int, bool]:
        """See :class:`Orders`."""
        ended = self._settle() if self._has_news() or self._mover.inbox else _NOTHING
        if not self._caught_up:
            return ended
        caught_up, self._caught_up = self._caught_up, {}
        return caught_up | ended

    def catch_up(self) -> None:
        """See :class:`Orders`."""
        if self._mover.native.has_reports() or self._mover.inbox:
            self._caught_up |= self._settle()

    def _settle(self) -> dict[int, bool]:
        ended = self._mover.settle(self._native, self._spill)
        return self.settle_these(self._mover.poll()) if ended is None else ended

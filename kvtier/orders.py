"""Orders: pages that shall move become a reservation of the catalog and a transfer of the data plane, or neither.

Where the data plane is this process's own both are one native call (:class:`DirectOrders`); otherwise the transfer is a
message (:class:`OrdersByMessage`). Both do the same: what is refused, or raised for, leaves no ticket open.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from kvtier import _core
from kvtier.catalog import Catalog, PageStatus, SomeNodes, Tier
from kvtier.messages import DataPlane, Priority, Transfer

if TYPE_CHECKING:
    from kvtier.mover import Mover

__all__ = ["DirectOrders", "Orders", "OrdersByMessage"]

Slots = npt.NDArray[np.uint32]


class Orders(Protocol):
    """Has pages moved."""

    def issue(
        self,
        path: tuple[Tier, ...],
        nodes: SomeNodes,
        request: int,
        priority: Priority,
        deadline: float,
        *,
        backed_only: bool = False,
        cold: bool = False,
        device: Slots | None = None,
        cuts: tuple[int, ...] = (),
        behind: int | None = None,
    ) -> tuple[int, int]:
        """Start moving the pages of ``nodes`` along ``path``, as many of the first as there is room for; the arguments
        are those of :meth:`kvtier.catalog.Catalog.reserve` and :class:`kvtier.messages.Transfer`. ``device``: where
        they are or go on a foreign one. ``behind``: the stream of the engine's that copies on a device come after, the
        current one if not given.

        Returns the ticket and how many, or 0 and how many the data plane refused; (0, 0): there was no room.
        """
        ...


class OrdersByMessage:
    """Orders to any data plane."""

    def __init__(self, catalog: Catalog, plane: DataPlane) -> None:
        self._catalog = catalog
        self._plane = plane

    def issue(
        self,
        path: tuple[Tier, ...],
        nodes: SomeNodes,
        request: int,
        priority: Priority,
        deadline: float,
        *,
        backed_only: bool = False,
        cold: bool = False,
        device: Slots | None = None,
        cuts: tuple[int, ...] = (),
        behind: int | None = None,
    ) -> tuple[int, int]:
        """See :class:`Orders`."""
        assert behind is None  # who carries the message out says what that is
        reserved = self._catalog.reserve(path, nodes, request, backed_only=backed_only, cold=cold)
        if not reserved.count:
            return 0, 0
        if device is not None:
            reserved.slots[path.index(Tier.DEVICE)] = device[: reserved.count]
        accepted = False
        try:
            accepted = self._plane.submit(
                Transfer(reserved.ticket, path, reserved.slots, reserved.identities, priority, deadline, cuts)
            )
        finally:  # also of what it raises for: no ticket stays open that nobody works on
            if not accepted:
                refused = np.full((len(path) - 1, reserved.count), PageStatus.SKIPPED, np.uint8)
                self._catalog.settle(reserved.ticket, refused)
        return reserved.ticket if accepted else 0, reserved.count


class DirectOrders:
    """Orders to the mover of this process, which has a device tier of the catalog's own."""

    def __init__(self, catalog: Catalog, mover: Mover) -> None:
        self._native = _core.Orders(catalog.native, mover.native)
        self._mover = mover

    def issue(
        self,
        path: tuple[Tier, ...],
        nodes: SomeNodes,
        request: int,
        priority: Priority,
        deadline: float,
        *,
        backed_only: bool = False,
        cold: bool = False,
        device: Slots | None = None,
        cuts: tuple[int, ...] = (),
        behind: int | None = None,
    ) -> tuple[int, int]:
        """See :class:`Orders`."""
        assert device is None
        stream = self._mover.stream() if behind is None else behind
        refuse = self._mover.crowded
        return self._native.issue(path, nodes, request, backed_only, cold, priority, deadline, stream, cuts, refuse)

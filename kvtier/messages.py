"""The few messages between the two planes, and what each asks of the other.

The control plane decides and never touches a byte; the data plane moves bytes and never decides. Who calls what: the
control plane calls :meth:`DataPlane.hello` once, then ``submit``, ``cancel``, ``invalidate`` and ``poll``, all from its
own thread. The data plane never calls back. In one process the messages are plain values; where the data planes are in
other processes, `kvtier.relay` carries them: an :data:`Order` is what goes down, a `Completion` what comes up.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvtier import _core
from kvtier.enums import direct

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "Cancel",
    "Completion",
    "DataPlane",
    "Forget",
    "Hello",
    "HopReport",
    "Invalidate",
    "Order",
    "Priority",
    "Promote",
    "Transfer",
]

direct(_core.Tier)
direct(_core.PageStatus)


@direct
class Priority(IntEnum):
    """Who waits for a transfer; smaller is served first."""

    DEMAND = 0
    PREFETCH = 1
    BACKGROUND = 2


class Transfer(NamedTuple):
    """An order to copy pages along one or two hops, e.g. ``(Tier.DISK, Tier.HOST, Tier.DEVICE)``."""

    ticket: int
    """Not 0; named in the completions."""
    path: tuple[_core.Tier, ...]
    slots: npt.NDArray[np.uint32]
    """[len(path), pages]: where each page is or goes in each tier."""
    identities: npt.NDArray[np.uint8]
    """[pages, identity_bytes]"""
    priority: Priority = Priority.DEMAND
    deadline: float = 0.0
    """On ``time.monotonic()``'s clock; no hop starts after it. 0: none."""
    cuts: tuple[int, ...] = ()
    """Of host → device alone: where within a page each slice ends, in bytes. A slice of all pages is copied before the
    next one of any. Empty: whole pages."""


class Cancel(NamedTuple):
    """Start no further hop of a transfer."""

    ticket: int


class Promote(NamedTuple):
    """Serve a transfer at least as urgently as this from now on; ``deadline`` as in :class:`Transfer`."""

    ticket: int
    priority: Priority
    deadline: float


class Invalidate(NamedTuple):
    """Nothing of ``space`` (None: of any namespace) that is older than ``generation`` may be served again."""

    space: bytes | None
    generation: int


class Forget(NamedTuple):
    """Clear the disk's records in these slots, uint32 [n]."""

    slots: npt.NDArray[np.uint32]


Order = Transfer | Cancel | Promote | Invalidate | Forget


class HopReport(NamedTuple):
    """What one hop of a transfer took."""

    lane: str
    """offload, onboard, spill or stage"""
    bytes: int
    """Moved with status OK."""
    queue_s: float
    """From its first page being ready for this hop to that page being taken."""
    busy_s: float
    """During which at least one of its pages was being moved."""
    started_s: float = 0.0
    """When its first page was taken; 0: none was. On ``time.monotonic()``'s clock, as the next."""
    ended_s: float = 0.0
    """When the last of its pages that were taken came back."""
    carried: int = 0
    """Bytes moved in that time, also those of pages that nobody wanted any more."""


class Completion(NamedTuple):
    """What became of a transfer."""

    ticket: int
    final: bool
    status: npt.NDArray[np.uint8]
    """PageStatus per hop and page, [hops, pages]; PENDING only where ``final`` is False."""
    hops: tuple[HopReport, ...]
    submitted_s: float
    finished_s: float
    """When the data plane settled the last page, whenever that was polled; on ``time.monotonic()``'s clock."""
    whole: bool = False
    """Every page is OK on every hop. False: look."""


class Hello(NamedTuple):
    """What a data plane has: slots per tier, and the pages that its disk already holds.

    ``inventory_slots`` is uint32 [n], oldest first; ``inventory_identities`` uint8 [n, identity_bytes].
    """

    capacity: dict[_core.Tier, int]
    page_bytes: int
    inventory_slots: npt.NDArray[np.uint32]
    inventory_identities: npt.NDArray[np.uint8]
    generation: int = 0
    """Of every namespace that was not invalidated on its own since."""


class DataPlane(Protocol):
    """Moves bytes and never decides. No method but the waiting ones and ``invalidate`` may block."""

    def hello(self) -> Hello: ...

    def submit(self, transfer: Transfer) -> bool:
        """Queue a transfer; False when the queue is full, and then nothing of it will run."""

    def cancel(self, ticket: int) -> None: ...

    def promote(self, ticket: int, priority: Priority, deadline: float) -> None:
        """Serve a transfer at least as urgently as this from now on; one that has ended is no error. It ends at the
        later of this deadline and its own: nobody's patience ends what another wants."""

    def poll(self) -> Sequence[Completion]: ...

    def wait(self, timeout: float) -> bool: ...

    def wait_for_slices(self, ticket: int, count: int, timeout: float) -> bool:
        """Wait until the first ``count`` slices of all its pages are in their place; False: not within ``timeout``
        seconds, or not all of it will ever be, or the plane cannot tell. It may block, and is called only by an engine
        that has nothing else to do."""

    def pending(self) -> int:
        """Transfers whose final completion has not been polled."""

    def generation(self, space: bytes) -> int: ...

    def invalidate(self, space: bytes | None) -> int:
        """Make every stored page of ``space`` (None: of all) unservable for ever; durable on return."""

    def forget(self, slots: npt.NDArray[np.uint32]) -> None:
        """Clear the disk's records of pages that the control plane did not take over."""

    def describe(self) -> str: ...

    def warnings(self) -> list[str]: ...

    def close(self) -> None: ...

"""Relay: the data planes of other processes, one per rank, as the one data plane that the control plane knows.

    control plane ── DataPlane's calls ──► RelayPlane ══ orders ══► RankPlane ──► the rank's data plane
                                               ▲                        │
                                               ╚═════ completions ══════╝

Neither end sends anything itself: whoever connects the processes takes the :meth:`RelayPlane.orders` of a step to every
rank, has :meth:`RankPlane.carry_out` them in that order, and gives what :meth:`RankPlane.poll` says back to
:meth:`RelayPlane.deliver`. Slot n is the same block on every rank: a page is ready when all ranks have it, has failed
when one failed, and no hop of it is settled before every rank has settled it.

Each rank's clock is its own, so deadlines travel as seconds from now.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier.catalog import PageStatus, Tier
from kvtier.journal import Journal
from kvtier.messages import (
    Cancel,
    Completion,
    DataPlane,
    Forget,
    Hello,
    HopReport,
    Invalidate,
    Order,
    Priority,
    Promote,
    Transfer,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

__all__ = ["RankPlane", "RelayPlane"]

MOST_PENDING = 4096  # transfers without their final completion; a rank's own mover takes no more

_GENERATION = slice(96, 104)  # where an identity has its generation and namespace: csrc/common/identity.hpp
_SPACE = slice(64, 96)


@dataclass(slots=True)
class _Pending:
    """One transfer, as far as each rank has told of it."""

    shape: tuple[int, int]
    told: dict[int, Completion] = field(default_factory=dict)
    early: bool = False


class RelayPlane:
    """The control plane's end. ``hellos`` are the ranks' own, by rank; ``journal`` is the file that remembers what was
    invalidated, where a disk keeps pages, so that ``invalidate`` is durable before any rank has heard of it.

    Raises ValueError where the ranks do not agree about what a page is, OSError where the journal cannot be kept.
    """

    def __init__(
        self, hellos: Sequence[Hello], journal: Path | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        sizes = {hello.page_bytes for hello in hellos}
        tiers = {tuple(sorted(hello.capacity)) for hello in hellos}
        if len(sizes) != 1 or len(tiers) != 1:
            raise ValueError(f"ranks: pages of {sorted(sizes)} bytes in tiers {sorted(tiers)}; all must have the same")
        self._ranks = len(hellos)
        self._clock = clock
        self._orders: list[Order] = []
        self._pending: dict[int, _Pending] = {}
        self._inbox: list[Completion] = []
        self._journal = Journal.open(journal, hellos)
        for space, generation in self._journal.entries():
            self._orders.append(Invalidate(space, generation))
        self._hello = self._agree(hellos)

    def _agree(self, hellos: Sequence[Hello]) -> Hello:
        """Of capacities the least, of inventories what every rank holds in the same slot and is still valid."""
        capacity = {tier: min(hello.capacity[tier] for hello in hellos) for tier in hellos[0].capacity}
        first = hellos[0]
        slots, identities = first.inventory_slots, first.inventory_identities
        valid = self._valid(identities) & (slots < capacity.get(Tier.DISK, 0))
        for other in hellos[1:]:
            valid &= _same_page(slots, identities, other)
        everything = np.unique(np.concatenate([hello.inventory_slots for hello in hellos]))
        self.forget(np.setdiff1d(everything, slots[valid]))
        return Hello(capacity, first.page_bytes, slots[valid], identities[valid], self.generation(b""))

    def _valid(self, identities: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        """Whose generation is the one that counts for their namespace."""
        if not len(identities):
            return np.empty(0, np.bool_)
        spaces, which = np.unique(_column(identities, _SPACE, "V32"), return_inverse=True)
        wanted = np.array([self.generation(space.tobytes()) for space in spaces], np.uint64)
        valid: npt.NDArray[np.bool_] = _column(identities, _GENERATION, "<u8") == wanted[which]
        return valid

    # ---- between the processes -----------------------------------------------------------------------------------

    def orders(self) -> tuple[Order, ...]:
        """What every rank has to carry out, in this order, since the last call."""
        now = self._clock()
        out, self._orders = self._orders, []
        return tuple(
            order._replace(deadline=max(order.deadline - now, 1e-3))
            if isinstance(order, Transfer | Promote) and order.deadline
            else order
            for order in out
        )

    def deliver(self, rank: int, completions: Iterable[Completion]) -> None:
        """What a rank tells of the transfers; late and repeated words are legal."""
        for done in completions:
            pending = self._pending.get(done.ticket)
            if pending is None or not 0 <= rank < self._ranks or done.status.shape != pending.shape:
                continue
            told = pending.told.get(rank)
            if told is not None and told.final:
                continue
            pending.told[rank] = done
            if len(pending.told) < self._ranks:
                continue
            final = all(completion.final for completion in pending.told.values())
            if final:
                del self._pending[done.ticket]
            elif pending.early:
                continue
            pending.early = True
            self._inbox.append(_together(list(pending.told.values()), final))

    @property
    def has_orders(self) -> bool:
        """Whether there are orders that nobody has taken to the ranks yet."""
        return bool(self._orders)

    # ---- the DataPlane protocol ----------------------------------------------------------------------------------

    def hello(self) -> Hello:
        return self._hello

    def submit(self, transfer: Transfer) -> bool:
        if len(self._pending) >= MOST_PENDING:
            return False
        self._pending[transfer.ticket] = _Pending((len(transfer.path) - 1, transfer.slots.shape[1]))
        self._orders.append(transfer)
        return True

    def cancel(self, ticket: int) -> None:
        if ticket in self._pending:
            self._orders.append(Cancel(ticket))

    def promote(self, ticket: int, priority: Priority, deadline: float) -> None:
        if ticket in self._pending:
            self._orders.append(Promote(ticket, priority, deadline))

    def poll(self) -> list[Completion]:
        out, self._inbox = self._inbox, []
        return out

    def wait(self, timeout: float) -> bool:
        """News come by :meth:`deliver` only, so there is nothing to wait for here."""
        return bool(self._inbox)

    def wait_for_slices(self, ticket: int, count: int, timeout: float) -> bool:
        """Nothing can be asked of other processes in mid-step."""
        return False

    def pending(self) -> int:
        return len(self._pending) + sum(completion.final for completion in self._inbox)

    def generation(self, space: bytes) -> int:
        return self._journal.generation(space)

    def invalidate(self, space: bytes | None) -> int:
        """As :meth:`DataPlane.invalidate`: durable by the journal, in whichever state the ranks are."""
        try:
            generation = self._journal.advance(space)
        finally:  # in force here even where it could not be made durable
            self._orders.append(Invalidate(space, self._journal.generation(space or b"")))
        return generation

    def forget(self, slots: npt.NDArray[np.uint32]) -> None:
        if len(slots):
            self._orders.append(Forget(slots))

    def describe(self) -> str:
        return f"{self._ranks} data plane{'s' if self._ranks > 1 else ''} in the workers"

    def warnings(self) -> list[str]:
        return self._journal.warnings

    def close(self) -> None:
        self._orders.clear()
        self._pending.clear()


def _column(identities: npt.NDArray[np.uint8], part: slice, dtype: str) -> npt.NDArray[np.generic]:
    return np.ascontiguousarray(identities[:, part]).view(dtype).reshape(-1)


def _same_page(slots: npt.NDArray[np.uint32], identities: npt.NDArray[np.uint8], other: Hello) -> npt.NDArray[np.bool_]:
    """Of pages in ``slots`` those that the other rank has in the same slot."""
    same = np.zeros(len(slots), np.bool_)
    if len(slots) and len(other.inventory_slots):
        order = np.argsort(other.inventory_slots)
        at = np.minimum(np.searchsorted(other.inventory_slots, slots, sorter=order), len(order) - 1)
        theirs = order[at]
        same = (other.inventory_slots[theirs] == slots) & (other.inventory_identities[theirs] == identities).all(axis=1)
    return same


def _together(told: list[Completion], final: bool) -> Completion:
    """One completion of all ranks': of each page and hop PENDING while any rank's is, else a failure before OK."""
    status = told[0].status.copy()
    for other in told[1:]:
        better = (status == PageStatus.OK) & (other.status != PageStatus.OK)
        status[better] = other.status[better]
    for one in told:
        status[one.status == PageStatus.PENDING] = PageStatus.PENDING
    hops = tuple(_slowest(hops) for hops in zip(*(one.hops for one in told if one.hops), strict=True))
    return Completion(
        told[0].ticket,
        final,
        status,
        hops,
        min(one.submitted_s for one in told),
        max(one.finished_s for one in told),
    )


def _slowest(hops: tuple[HopReport, ...]) -> HopReport:
    """One hop as all ranks made it: their bytes, and the time of the slowest."""
    return hops[0]._replace(
        bytes=sum(hop.bytes for hop in hops),
        queue_s=max(hop.queue_s for hop in hops),
        busy_s=max(hop.busy_s for hop in hops),
    )


class RankPlane:
    """A rank's end: carries orders out on its own data plane and keeps what that says of them.

    An order that its data plane refuses, for whatever reason, is reported as a transfer of which nothing ran.
    """

    def __init__(self, plane: DataPlane, clock: Callable[[], float] = time.monotonic) -> None:
        self.plane = plane
        self._clock = clock
        self._shapes: dict[int, tuple[int, int]] = {}  # of transfers without their final completion
        self._news: list[Completion] = []
        self.refused: list[str] = []
        """Why orders were refused; for the log."""

    def carry_out(self, orders: Iterable[Order]) -> None:
        for order in orders:
            if isinstance(order, Transfer):
                self._submit(order)
            elif isinstance(order, Cancel):
                self.plane.cancel(order.ticket)
            elif isinstance(order, Promote):
                self.plane.promote(order.ticket, order.priority, self._from_now(order.deadline))
            elif isinstance(order, Invalidate):
                self._invalidate(order)
            else:
                self._attempt(partial(self.plane.forget, order.slots))

    def poll(self) -> list[Completion]:
        """What has become of the transfers since the last call."""
        self._collect()
        out, self._news = self._news, []
        return out

    def runs(self, ticket: int) -> bool:
        """Whether anything of the transfer may still read or write its slots, as far as is known here."""
        return ticket in self._shapes

    def wait_for_slices(self, ticket: int, count: int, timeout: float) -> bool:
        """As :meth:`DataPlane.wait_for_slices`."""
        if self.runs(ticket):
            return self.plane.wait_for_slices(ticket, count, timeout)
        ended = next((done for done in self._news if done.ticket == ticket and done.final), None)
        return ended is not None and bool((ended.status == PageStatus.OK).all())

    def refuse(self, order: Transfer) -> None:
        """Report the transfer as one of which nothing ran."""
        skipped = np.full((len(order.path) - 1, order.slots.shape[1]), PageStatus.SKIPPED, np.uint8)
        self._news.append(Completion(order.ticket, True, skipped, (), self._clock(), self._clock()))

    def drain(self, tickets: Iterable[int], patience: float) -> None:
        """Return when none of the transfers reads or writes anything any more. After ``patience`` seconds those that
        are left are cancelled: what is under way of them still ends, what had not begun does not happen."""
        waited_for = [ticket for ticket in tickets if self.runs(ticket)]
        end = self._clock() + patience
        while any(self.runs(ticket) for ticket in waited_for):
            left = end - self._clock()
            if left <= 0:
                for ticket in waited_for:
                    self.plane.cancel(ticket)
                left = 0.05
            self.plane.wait(left)
            self._collect()

    def _submit(self, order: Transfer) -> None:
        order = order._replace(deadline=self._from_now(order.deadline))
        if self._attempt(partial(self.plane.submit, order)):
            self._shapes[order.ticket] = (len(order.path) - 1, order.slots.shape[1])
        else:
            self.refuse(order)

    def _from_now(self, seconds: float) -> float:
        """A deadline on this process's clock; 0 stays none."""
        return seconds + self._clock() if seconds else 0.0

    def _invalidate(self, order: Invalidate) -> None:
        probe = order.space if order.space is not None else bytes(32)
        for _ in range(1 << 20):  # a generation is a small number; a mad one must not hold the engine up
            if self.plane.generation(probe) >= order.generation:
                return
            if not self._attempt(partial(self.plane.invalidate, order.space)):
                return

    def _attempt(self, call: Callable[[], object]) -> object:
        try:
            result = call()
        except (ValueError, OSError, RuntimeError) as error:
            self.refused.append(str(error))
            return False
        return True if result is None else result

    def _collect(self) -> None:
        for done in self.plane.poll():
            if done.final:
                self._shapes.pop(done.ticket, None)
            self._news.append(done)

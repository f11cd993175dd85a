"""A data plane without bytes: each slot holds the digest of the block that it would hold, and time is the caller's.

It keeps the promises of a real one and nothing more: pages move hop by hop in any order, reports come late, reordered,
twice and in two parts, any page may fail, and what was cancelled may go on for a while. With equal seeds it behaves
equally. What a control plane must never do raises :class:`ViolationError`, with the cause in its text.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtier.catalog import PageStatus, Tier
from kvtier.messages import Completion, Hello, Priority, Transfer

__all__ = ["Faults", "SimulatedPlane", "ViolationError"]

Content = bytes | None


class ViolationError(AssertionError):
    """The control plane broke an invariant of the data plane."""


@dataclass(frozen=True, slots=True)
class Faults:
    """Probabilities: of a page failing on a hop, of a report being repeated, of a submission being refused."""

    page: float = 0.0
    repeat: float = 0.0
    refuse: float = 0.0


@dataclass(slots=True)
class _Running:
    transfer: Transfer
    status: npt.NDArray[np.uint8]
    cancelled: bool = False
    reported: bool = False
    work: list[int] = field(default_factory=list)

    def uses(self, place: int) -> npt.NDArray[np.bool_]:
        """Of which pages the slot at this place of the path may still be written, or read: a hop that will not run any
        more touches neither of its ends, whatever the hops before it do."""
        waits = np.pad(self.status == PageStatus.PENDING, ((1, 1), (0, 0)))  # no hop before the path, none behind it
        used: npt.NDArray[np.bool_] = waits[place] | waits[place + 1]
        return used

    @property
    def done(self) -> bool:
        return bool((self.status != PageStatus.PENDING).all())


def _completion(running: _Running, final: bool) -> Completion:
    whole = bool((running.status == PageStatus.OK).all())
    return Completion(running.transfer.ticket, final, running.status.copy(), (), 0.0, 0.0, whole)


class SimulatedPlane:
    """``capacity`` in slots per tier. ``content[tier][slot]`` is the digest of what it holds, or None."""

    def __init__(self, capacity: dict[Tier, int], seed: int, faults: Faults = Faults()) -> None:
        self._random = random.Random(seed)
        self._faults = faults
        self._capacity = capacity
        self.content: dict[Tier, list[Content]] = {tier: [None] * slots for tier, slots in capacity.items()}
        self._running: dict[int, _Running] = {}
        self._reports: list[Completion] = []
        self._generation = 0
        self.injected: Counter[str] = Counter()

    # ---- the DataPlane protocol ----------------------------------------------------------------------------------

    def hello(self) -> Hello:
        return Hello(dict(self._capacity), 4096, np.empty(0, np.uint32), np.empty((0, 0), np.uint8))

    def submit(self, transfer: Transfer) -> bool:
        if self._random.random() < self._faults.refuse:
            self.injected["refused"] += 1
            return False
        if transfer.ticket in self._running:
            raise ViolationError(f"ticket {transfer.ticket} was submitted twice")
        self._claim(transfer)
        hops, pages = len(transfer.path) - 1, transfer.slots.shape[1]
        self._running[transfer.ticket] = _Running(transfer, np.zeros((hops, pages), np.uint8), work=list(range(pages)))
        return True

    def _claim(self, transfer: Transfer) -> None:
        """A destination of one transfer may be no source and no destination of another's page that still runs."""
        for running in self._running.values():
            for place, (used, theirs) in enumerate(zip(running.transfer.path, running.transfer.slots, strict=True)):
                busy = theirs[running.uses(place)]
                for tier, slots in zip(transfer.path[1:], transfer.slots[1:], strict=True):
                    if tier == used and len(shared := np.intersect1d(slots, busy)):
                        raise ViolationError(
                            f"{tier.name} slot {shared[0]} given to transfer {transfer.ticket} "
                            f"while {running.transfer.ticket} uses it"
                        )

    def cancel(self, ticket: int) -> None:
        if ticket in self._running:
            self._running[ticket].cancelled = True

    def promote(self, ticket: int, priority: Priority, deadline: float) -> None:
        pass  # the seed decides what is served next

    def poll(self) -> list[Completion]:
        self._random.shuffle(self._reports)
        count = self._random.randint(0, len(self._reports))
        given, self._reports = self._reports[:count], self._reports[count:]
        for report in list(given):
            if self._random.random() < self._faults.repeat:
                self.injected["repeated"] += 1
                self._reports.append(report)
        return given

    def wait(self, timeout: float) -> bool:
        self.step(8)
        return bool(self._reports)

    def wait_for_slices(self, ticket: int, count: int, timeout: float) -> bool:
        return False

    def pending(self) -> int:
        return len(self._running) + len(self._reports)

    def generation(self, space: bytes) -> int:
        return self._generation

    def invalidate(self, space: bytes | None) -> int:
        self._generation += 1
        return self._generation

    def forget(self, slots: npt.NDArray[np.uint32]) -> None:
        pass

    def describe(self) -> str:
        return "simulated"

    def warnings(self) -> list[str]:
        return []

    def close(self) -> None:
        self._running.clear()

    # ---- the simulation ------------------------------------------------------------------------------------------

    def step(self, moves: int = 1) -> None:
        """Let up to ``moves`` page hops happen, in an order of the seed's choosing."""
        for _ in range(moves):
            if not self._running:
                return
            ticket = self._random.choice(sorted(self._running))
            self._move_one(self._running[ticket])
            self._report(ticket)

    def _move_one(self, running: _Running) -> None:
        if not running.work:
            return
        page = running.work[self._random.randrange(len(running.work))]
        hop = int(np.argmax(running.status[:, page] == PageStatus.PENDING))
        transfer = running.transfer
        status = PageStatus.OK
        if running.cancelled:
            status = PageStatus.CANCELLED
        elif self._random.random() < self._faults.page:
            reads_disk = transfer.path[hop] == Tier.DISK
            status = self._random.choice(
                [PageStatus.READ_ERROR, PageStatus.CORRUPT, PageStatus.STALE]
                if reads_disk
                else [PageStatus.WRITE_ERROR]
            )
            self.injected[status.name.lower()] += 1
        if status == PageStatus.OK:
            self._copy(transfer, hop, page)
        else:
            self.content[transfer.path[hop + 1]][int(transfer.slots[hop + 1, page])] = None
        running.status[hop, page] = status
        if status != PageStatus.OK:
            running.status[hop + 1 :, page] = PageStatus.SKIPPED
        if (running.status[:, page] != PageStatus.PENDING).all():
            running.work.remove(page)

    def _copy(self, transfer: Transfer, hop: int, page: int) -> None:
        source, target = transfer.path[hop], transfer.path[hop + 1]
        held = self.content[source][int(transfer.slots[hop, page])]
        wanted = transfer.identities[page, :32].tobytes()
        if held != wanted:
            raise ViolationError(
                f"transfer {transfer.ticket} copies {source.name} slot {transfer.slots[hop, page]}, "
                "which holds another block"
            )
        self.content[target][int(transfer.slots[hop + 1, page])] = held

    def _report(self, ticket: int) -> None:
        running = self._running[ticket]
        early = running.cancelled and not running.reported and len(running.status) > 1
        if early:  # the last hop will not run any more where it has not; an earlier one may still
            last = running.status[-1]
            last[last == PageStatus.PENDING] = PageStatus.CANCELLED
            running.work = [page for page in running.work if (running.status[:, page] == PageStatus.PENDING).any()]
        if running.done:
            self._reports.append(_completion(running, True))
            del self._running[ticket]
        elif early:
            running.reported = True
            self._reports.append(_completion(running, False))

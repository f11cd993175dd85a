"""A data plane without bytes: each slot holds the identity of the block that it would hold, and time is the caller's.

It keeps the promises of a real one and nothing more. Each page moves hop by hop, and each hop has a beginning, at which
the destination's bytes are lost, and an end, at which the source must still be what it was. Between the two anything
may happen. What happens next, and what goes wrong, is said by its caller, event by event; it draws nothing. What a
control plane must never do raises :class:`ViolationError`, with the cause in its text.

    events      advance, deliver, repeat, lose, find, refuse, stall, unstall, go_offline
    in a hurry  step(n): n events of the oldest transfers, all reports delivered
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from itertools import pairwise
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import numpy.typing as npt

from kvtier.catalog import PageStatus, Tier
from kvtier.messages import Completion, Hello, HopReport, Priority, Transfer
from kvtier.namespace import DIGEST_BYTES
from kvtier.sim.clock import VirtualClock
from kvtier.sim.disk import TORN, Content, SimulatedDisk
from kvtier.sim.plane import ViolationError
from kvtier.sim.transfers import PENDING, Claims, Lane, Running

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["PAGE_BYTES", "EventPlane"]

OK, SKIPPED = int(PageStatus.OK), int(PageStatus.SKIPPED)
CANCELLED, OVERDUE, OFFLINE = int(PageStatus.CANCELLED), int(PageStatus.OVERDUE), int(PageStatus.OFFLINE)
WRITE_ERROR, CORRUPT, STALE = int(PageStatus.WRITE_ERROR), int(PageStatus.CORRUPT), int(PageStatus.STALE)
READ_FAULTS = (int(PageStatus.READ_ERROR), int(PageStatus.SHORT_READ), CORRUPT, STALE)
NAMES = {int(status): status.name.lower() for status in PageStatus}

PAGE_BYTES = 4096
_LANES: dict[Lane, str] = {
    (Tier.DEVICE, Tier.HOST): "offload",
    (Tier.HOST, Tier.DEVICE): "onboard",
    (Tier.HOST, Tier.DISK): "spill",
    (Tier.DISK, Tier.HOST): "stage",
}
_REMEMBERED = 32  # reports that may be repeated
_HURRY = 64  # events of one wait
_MOST_IDLE = 100  # waits on end in which neither news come nor time passes


def _touches_disk(lane: Lane) -> bool:
    return Tier.DISK in lane


class EventPlane:
    """``capacity`` in slots per tier. ``content[tier][slot]`` is what the slot holds; the disk's is ``disk.pages``."""

    def __init__(
        self,
        capacity: dict[Tier, int],
        *,
        disk: SimulatedDisk | None = None,
        clock: VirtualClock | None = None,
        queue_pages: int = 1 << 20,
        counts: Counter[str] | None = None,
    ) -> None:
        self.disk = SimulatedDisk(capacity.get(Tier.DISK, 0)) if disk is None else disk
        self.clock = VirtualClock() if clock is None else clock
        self.content: dict[Tier, list[Content]] = {tier: [None] * slots for tier, slots in capacity.items()}
        if Tier.DISK in capacity:
            self.content[Tier.DISK] = self.disk.pages
        self.counts: Counter[str] = Counter() if counts is None else counts
        self.asked: set[bytes] | None = None
        """Digests of the blocks that may be read from disk; None: all."""
        self.stalled: set[Lane] = set()
        self.offline = False
        self.refusals = 0
        self.decisions = hashlib.blake2b(digest_size=16)
        """What the control plane ordered, for comparing two runs."""
        self._capacity = dict(capacity)
        self._queue_pages = queue_pages
        self._running: dict[int, Running] = {}
        self._tickets: set[int] = set()
        self._unheard: dict[int, Running] = {}  # those whose last report has not been delivered
        self._claims = Claims()
        self._reports: list[Completion] = []
        self._inbox: list[Completion] = []
        self._said: deque[Completion] = deque(maxlen=_REMEMBERED)
        self._lost: list[Completion] = []
        self._idle = 0

    # ---- the DataPlane protocol ----------------------------------------------------------------------------------

    def hello(self) -> Hello:
        return Hello(dict(self._capacity), PAGE_BYTES, *self.disk.inventory(), generation=self.disk.floor)

    def submit(self, transfer: Transfer) -> bool:
        accepted = self._accept(transfer)
        for tier, slots in zip(transfer.path[1:], transfer.slots[1:].tolist(), strict=True):
            if tier is Tier.DISK:  # whose old page is good until its record is cleared
                continue
            for slot in slots:  # whatever it held, the control plane gave it up
                self.content[tier][slot] = None
        return accepted

    def _accept(self, transfer: Transfer) -> bool:
        if self.refusals:
            self.refusals -= 1
            self.counts["fault: refused"] += 1
            return False
        if sum(len(running.open) for running in self._running.values()) + transfer.slots.shape[1] > self._queue_pages:
            self.counts["fault: queue full"] += 1
            return False
        if transfer.ticket in self._tickets:  # also long after: a word about the one would settle the other
            self._violation(f"ticket {transfer.ticket} was submitted twice")
        self._tickets.add(transfer.ticket)
        running = Running(transfer, self.clock.now)
        if running.path[0] is Tier.DISK and self.asked is not None:
            digests = {wanted[:DIGEST_BYTES] for wanted in running.wanted}
            if not digests <= self.asked:
                self._violation(
                    f"transfer {transfer.ticket} brings up a block that nobody asked for under its namespace"
                )
        self._claims.take(running)
        self._running[transfer.ticket] = self._unheard[transfer.ticket] = running
        self.decisions.update(repr((running.path, running.slots, transfer.priority, transfer.deadline)).encode())
        self.decisions.update(transfer.identities.tobytes())
        return True

    def cancel(self, ticket: int) -> None:
        if (running := self._running.get(ticket)) and not running.ended:
            self._end(running, CANCELLED)

    def promote(self, ticket: int, priority: Priority, deadline: float) -> None:
        pass  # the caller says what moves next

    def poll(self) -> list[Completion]:
        given, self._inbox = self._inbox, []
        return given

    def wait(self, timeout: float) -> bool:
        self.step(_HURRY)
        self._idle = 0 if self._inbox or timeout > 0.0 else self._idle + 1
        if self._idle > _MOST_IDLE:
            self._violation(f"news are waited for {_MOST_IDLE} times on end and not for a moment: the caller spins")
        # Also news take time: a control plane that never ceases to order transfers must not stand still in it.
        self.clock.advance(0.05 * timeout if self._inbox else timeout)
        self.expire()
        return bool(self._inbox)

    def wait_for_slices(self, ticket: int, count: int, timeout: float) -> bool:
        """Pages move whole here: all slices are there when all pages are."""
        self.step(_HURRY)
        said = [done.status for done in self._inbox if done.ticket == ticket and done.final]
        return bool(said) and bool((said[0] == OK).all())

    def pending(self) -> int:
        return len(self._unheard)

    def generation(self, space: bytes) -> int:
        return self.disk.generation(space)

    def invalidate(self, space: bytes | None) -> int:
        return self.disk.invalidate(space)

    def forget(self, slots: npt.NDArray[np.uint32]) -> None:
        for slot in slots.tolist():
            self.disk.clear(slot)

    def describe(self) -> str:
        return "simulated"

    def warnings(self) -> list[str]:
        return []

    def close(self) -> None:
        self._running.clear()

    # ---- events --------------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Transfers that are not through."""
        return len(self._running)

    def lane(self, which: int, page: int) -> Lane:
        """The lane on which ``advance`` would do something; there is a transfer that runs."""
        running = list(self._running.values())[which % len(self._running)]
        return running.lane(running.open[page % len(running.open)])

    def advance(self, which: int, page: int, fault: int = 0) -> bool:
        """One page of the ``which``-th transfer begins or ends its hop; both numbers are taken modulo what there is.
        ``fault`` is the PageStatus that the end of the hop gets in place of OK, as far as the lane knows it."""
        if not self._running:
            return False
        running = list(self._running.values())[which % len(self._running)]
        page = running.open[page % len(running.open)]
        if running.lane(page) in self.stalled:
            return False
        if running.flying[page] is None:
            self._begin_hop(running, page)
        else:
            self._end_hop(running, page, fault)
        return True

    def deliver(self, picks: Sequence[int] = ()) -> bool:
        """Reports become visible to ``poll``, in the order of ``picks``, each an index modulo what is left."""
        for pick in picks:
            if not self._reports:
                return False
            index = pick % len(self._reports)
            self.counts["fault: reordered"] += index != 0
            report = self._reports.pop(index)
            self._hear(report)
            self._said.append(report)
            self._inbox.append(report)
        return bool(picks)

    def repeat(self, which: int) -> bool:
        """A report that was delivered before comes again."""
        if not self._said:
            return False
        self._inbox.append(self._said[which % len(self._said)])
        self.counts["fault: repeated"] += 1
        return True

    def lose(self, which: int) -> bool:
        """A report does not arrive, until ``find`` at the earliest."""
        if not self._reports:
            return False
        self._lost.append(self._reports.pop(which % len(self._reports)))
        self.counts["fault: lost"] += 1
        return True

    def find(self) -> bool:
        """All lost reports arrive after all."""
        if not self._lost:
            return False
        self._reports += self._lost
        self._lost.clear()
        return True

    @property
    def reports(self) -> int:
        """Reports that can be delivered."""
        return len(self._reports)

    @property
    def lost(self) -> int:
        return len(self._lost)

    def refuse(self, submissions: int) -> bool:
        """The next submissions find no place."""
        self.refusals = submissions
        return True

    def stall(self, source: int, target: int) -> bool:
        """Nothing moves on one lane."""
        self.stalled.add((Tier(source), Tier(target)))
        self.counts["fault: lane delayed"] += 1
        return True

    def unstall(self) -> bool:
        moved = bool(self.stalled)
        self.stalled.clear()
        return moved

    def go_offline(self) -> bool:
        """The disk is out of service until the process ends; what is under way there comes to its end."""
        if self.offline or Tier.DISK not in self._capacity:
            return False
        self.offline = True
        self.counts["fault: disk offline"] += 1
        for running in list(self._running.values()):
            for page in list(running.open):
                if running.flying[page] is None and _touches_disk(running.lane(page)):
                    self._settle(running, page, OFFLINE)
        return True

    def expire(self) -> None:
        """End the transfers whose deadline has passed; call it when time has."""
        for running in list(self._running.values()):
            if running.deadline and running.deadline <= self.clock.now and not running.ended:
                self.counts["fault: transfer overdue"] += 1
                self._end(running, OVERDUE)

    def step(self, events: int = 1) -> None:
        """Up to ``events`` page events of the oldest transfers that can move, and all reports delivered in order."""
        for _ in range(events):
            if not self._advance_oldest():
                break
        self.deliver([0] * len(self._reports))

    def write(self, slot: int, content: bytes) -> None:
        """The engine writes a device slot."""
        if use := self._claims.user(Tier.DEVICE, slot):
            self._violation(f"the engine was given device slot {slot}, which {use}")
        self.content[Tier.DEVICE][slot] = content

    def read_by_transfer(self, slots: Sequence[int]) -> bool:
        """Whether a transfer still reads one of these device slots."""
        return any(self._claims.user(Tier.DEVICE, slot) for slot in slots)

    # ---- pages ---------------------------------------------------------------------------------------------------

    def _advance_oldest(self) -> bool:
        for running in self._running.values():
            for page in running.open:
                if running.lane(page) in self.stalled:
                    continue
                if running.flying[page] is None:
                    self._begin_hop(running, page)
                else:
                    self._end_hop(running, page, 0)
                return True
        return False

    def _begin_hop(self, running: Running, page: int) -> None:
        hop = running.hop[page]
        source, target = running.path[hop], running.path[hop + 1]
        slot, wanted = running.slots[hop][page], running.wanted[page]
        if self.offline and (source == Tier.DISK or target == Tier.DISK):
            self._settle(running, page, OFFLINE)
            return
        if source == Tier.DISK:
            if not self.disk.valid(wanted):
                self._settle(running, page, STALE)
                return
            if self.disk.record(slot) != wanted:
                self._violation(
                    f"transfer {running.ticket} reads disk slot {slot}, whose record does not name the block"
                )
        held = self.content[source][slot]
        if held is None:
            self._violation(f"transfer {running.ticket} copies {source.name} slot {slot}, which holds no page")
        if target == Tier.DISK:
            self.disk.clear(running.slots[hop + 1][page])
        self.content[target][running.slots[hop + 1][page]] = TORN
        running.flying[page] = held

    def _end_hop(self, running: Running, page: int, fault: int) -> None:
        hop = running.hop[page]
        source, target = running.path[hop], running.path[hop + 1]
        taken, into = running.slots[hop][page], running.slots[hop + 1][page]
        held, running.flying[page] = running.flying[page], None
        assert held is not None
        if self.content[source][taken] is not held:
            self._violation(f"{source.name} slot {taken} changed while transfer {running.ticket} copied it")
        if self.content[target][into] is not TORN:
            self._violation(f"{target.name} slot {into} was written while transfer {running.ticket} filled it")
        status = self._outcome(running, page, held, fault)
        if status == OK and target == Tier.DISK and not self.disk.write_record(into, running.wanted[page]):
            status = STALE
        self.content[target][into] = held if status == OK else None
        if fault and status == fault:
            self.counts[f"fault: {NAMES[status]}"] += 1
        self._settle(running, page, status)

    def _outcome(self, running: Running, page: int, held: bytes, fault: int) -> int:
        source, target = running.lane(page)
        wanted = running.wanted[page]
        if fault in READ_FAULTS and source == Tier.DISK:
            return fault
        if fault == WRITE_ERROR:
            return fault
        if running.ended == CANCELLED and Tier.DISK in (source, target):
            return CANCELLED
        if source == Tier.DISK:
            if not self.disk.valid(wanted):
                return STALE
            if held is TORN:  # what a crash left; the page's checksum says so
                self.counts["torn pages read"] += 1
                return CORRUPT
        if not held.startswith(wanted):
            slot = running.slots[running.hop[page]][page]
            self._violation(
                f"transfer {running.ticket} copies {source.name} slot {slot}, which holds another block's bytes"
            )
        return OK

    def _settle(self, running: Running, page: int, status: int) -> None:
        hop = running.hop[page]
        hops = len(running.status)
        running.status[hop][page] = status
        for later in range(hop + 1, hops):
            if status != OK and running.status[later][page] == PENDING:
                running.status[later][page] = SKIPPED
        while hop < hops and running.status[hop][page] != PENDING:
            hop += 1
        running.hop[page] = hop
        if hop == hops:
            running.open.remove(page)
        self._conclude(running)

    def _end(self, running: Running, why: int) -> None:
        """No further hop of it begins; what flies comes to its end."""
        running.ended = why
        for page in list(running.open):
            first = running.hop[page] + (running.flying[page] is not None)
            for hop in range(first, len(running.status)):
                running.status[hop][page] = why
            if running.flying[page] is None:
                running.open.remove(page)
        self._conclude(running)

    def _conclude(self, running: Running) -> None:
        if not running.open:
            if self._running.pop(running.ticket, None):
                self._report(running, True)
            return
        if not running.ended or running.early:
            return
        # Copies end by themselves soon; only the disk may hang, so only for it an early word is worth saying.
        if all(running.flying[page] is None or _touches_disk(running.lane(page)) for page in running.open):
            running.early = True
            self.counts["fault: early"] += 1
            self._report(running, False)

    # ---- reports -------------------------------------------------------------------------------------------------

    def _report(self, running: Running, final: bool) -> None:
        status = np.array(running.status, np.uint8)
        since, now = running.submitted, self.clock.now
        hops = []
        for lane, states in zip(pairwise(running.path), running.status, strict=True):
            moved = PAGE_BYTES * states.count(OK)
            hops.append(HopReport(_LANES[lane], moved, 0.0, now - since, since, now, moved))
        self._reports.append(Completion(running.ticket, final, status, tuple(hops), since, now))

    def _hear(self, report: Completion) -> None:
        running = self._unheard.get(report.ticket)
        if running is None:
            return
        if running.ended or (running.deadline and running.deadline <= self.clock.now):
            self.counts["fault: late"] += 1
        if report.final:
            del self._unheard[report.ticket]
        self._claims.let_go(running, report.status.tolist())

    def _violation(self, text: str) -> NoReturn:
        raise ViolationError(text)

"""Pools of native memory and files with a mover between them, for the mover's tests."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier import _core
from kvtier.mover import Completion, Mover, Priority, Transfer

DEVICE, HOST, DISK = _core.Tier.DEVICE, _core.Tier.HOST, _core.Tier.DISK
LABEL_BYTES = 16
IDENTITY_BYTES = 112 + LABEL_BYTES
PATIENCE = 60.0  # a bound, never a measure

Slots = npt.NDArray[np.uint32]


def span(first: int, count: int) -> Slots:
    return np.arange(first, first + count, dtype=np.uint32)


def identities(names: npt.ArrayLike) -> npt.NDArray[np.uint8]:
    """A page identity for each of these block numbers."""
    numbers = np.asarray(names, np.uint32)
    out = np.zeros((len(numbers), IDENTITY_BYTES), np.uint8)
    words = out.view(np.uint32)
    for word in range(8):
        words[:, word] = numbers * np.uint32(2654435761) + np.uint32(word)
    words[:, 27] = words[:, 28] = numbers  # position, label
    return out


class Rig:
    """`slots` pages of `payload` bytes per tier; the device's are rows of `memory`."""

    def __init__(
        self, directory: Path, *, slots: int = 64, payload: int = 10_000, disk: bool = True, **options: Any
    ) -> None:
        self.memory = np.zeros((slots, payload), np.uint8)
        self.device = _core.DevicePool([(self.memory.ctypes.data, payload, payload)], slots)
        self.host = _core.HostArena(slots, payload)
        journal = {"journal_entries": options.pop("journal_entries", 64)}
        self.disk = _core.DiskStore(str(directory), slots, payload, LABEL_BYTES, bytes(32), **journal) if disk else None
        self.faults = options.pop("faults", None) or _core.FaultPlan()
        pools = [
            None if pool is None else SimpleNamespace(native=pool, cuda=None)
            for pool in (self.device, self.host, self.disk)
        ]
        # Held back by a test, or by a busy machine, is not hung.
        self.mover = Mover(*pools, faults=self.faults, **({"io_limit_s": PATIENCE} | options))
        self.tickets = 0
        self.reported: list[Completion] = []

    def submit(
        self,
        path: tuple[_core.Tier, ...],
        slots: list[Slots],
        names: npt.ArrayLike,
        priority: Priority = Priority.DEMAND,
        deadline: float = 0.0,
        cuts: tuple[int, ...] = (),
    ) -> int:
        """The ticket; 0 when it was refused."""
        self.tickets += 1
        transfer = Transfer(
            self.tickets, path, np.ascontiguousarray(slots, np.uint32), identities(names), priority, deadline, cuts
        )
        return self.tickets if self.mover.submit(transfer) else 0

    def next(self, ticket: int) -> Completion:
        """The next report of this ticket; those of others are kept."""
        limit = time.monotonic() + PATIENCE
        while time.monotonic() < limit:
            self.reported += self.mover.poll()
            for done in self.reported:
                if done.ticket == ticket:
                    self.reported.remove(done)
                    return done
            self.mover.wait(1.0)
        raise AssertionError(f"ticket {ticket} was not reported")

    def move(self, path: tuple[_core.Tier, ...], slots: list[Slots], names: npt.ArrayLike) -> npt.NDArray[np.uint8]:
        """Submit and wait for the end; the statuses."""
        ticket = self.submit(path, slots, names)
        assert ticket
        done = self.next(ticket)
        return done.status if done.final else self.next(ticket).status

    def store(self, count: int, seed: int) -> npt.NDArray[np.uint8]:
        """Put blocks 0..count into disk slots 0..count, wipe the way there; their bytes."""
        pages = np.random.default_rng(seed).integers(0, 256, (count, self.memory.shape[1]), np.uint8)
        self.memory[:count] = pages
        places = span(0, count)
        assert (self.move((DEVICE, HOST, DISK), [places, places, places], range(count)) == _core.PageStatus.OK).all()
        self.memory[:] = 0xEE
        for slot in range(count):
            self.host.page(slot)[:] = 0xDD
            self.host.set_checksum(slot, 0)
        return pages


@contextlib.contextmanager
def rig(directory: Path, **options: Any) -> Iterator[Rig]:
    made = Rig(directory, **options)
    try:
        yield made
    finally:
        made.faults.clear()
        made.faults.release()
        made.mover.close()

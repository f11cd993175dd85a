"""The data plane of this process: its pools, its store and its mover."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier import budget, content
from kvtier._core import Tier
from kvtier.arguments import instance
from kvtier.catalog import memory_bound
from kvtier.config import CacheConfig, ConfigError, readable_size
from kvtier.geometry import KVGeometry
from kvtier.messages import Completion, Hello, Priority, Transfer
from kvtier.mover import Mover
from kvtier.tiers.device import DevicePool
from kvtier.tiers.disk import INDEX_BYTES, DiskStore
from kvtier.tiers.host import HostArena

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier._core import Throttle

__all__ = ["LocalDataPlane", "check_parts"]


def check_parts(config: CacheConfig, geometry: KVGeometry, device: DevicePool) -> None:
    """ConfigError for a pool whose pages mean something else, ValueError for what is none of these."""
    instance("config", config, CacheConfig)
    instance("geometry", geometry, KVGeometry)
    if instance("device", device, DevicePool).geometry != geometry:
        raise ConfigError(f"geometry: {geometry} given, {device.geometry} of the device pool; they must agree")


class LocalDataPlane:
    """The data plane of this process, sized by ``config``; see :class:`kvtier.messages.DataPlane` for its calls.

    ``label_bytes`` is what names a block: its content if not given, 32 for an engine's hashes. ``rank`` of ``world``
    is whose part of the KV this is.

    Raises :class:`kvtier.config.ConfigError`, ValueError or OSError for sizes and paths that cannot be served; whatever
    was opened by then is closed again. ``throttle`` makes the disk as slow as it says, for tests and benchmarks.
    """

    def __init__(
        self,
        config: CacheConfig,
        geometry: KVGeometry,
        device: DevicePool | None,
        *,
        throttle: Throttle | None = None,
        label_bytes: int | None = None,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if device is not None:
            check_parts(config, geometry, device)
        payload = geometry.payload_bytes
        self._label_bytes = content.label_bytes(geometry.block_size) if label_bytes is None else label_bytes
        slots = budget.slots_in("host.size", config.host.size, payload)
        self._generations: dict[bytes, int] = {}
        self._floor = self._generation = 0
        self.device = device
        self.disk: DiskStore | None = None
        with ExitStack() as stack:
            if device is not None:
                device.claim(self)
                stack.callback(device.give_back)
            if config.disk.path is not None:  # first, since it says at once what is wrong with a path
                self.disk = stack.enter_context(self._open(config, geometry, rank, world))
            self.memory = self._bound(config, geometry, slots)
            note = budget.check_memory(self.memory)
            self._notes = [note] if note else []
            cuda = device.cuda if device is not None else None
            self.host = HostArena(slots, geometry, numa_node=-1 if cuda is None else cuda.numa_node)
            if self.host.warning:
                self._notes.append(self.host.warning)
            self.mover = Mover.open(config, self.device, self.host, self.disk, throttle)
            self.poll: Callable[[], Sequence[Completion]] = self.mover.poll  # looked at in each step
            self._stack = stack.pop_all()

    def _open(self, config: CacheConfig, geometry: KVGeometry, rank: int, world: int) -> DiskStore:
        return DiskStore.open(config, geometry, label_bytes=self._label_bytes, rank=rank, world=world)

    def _bound(self, config: CacheConfig, geometry: KVGeometry, host_slots: int) -> budget.MemoryBound:
        """What all of it will take of host memory at most, the control plane's catalog included."""
        disk_slots = self.disk.slots if self.disk is not None else 0
        device_slots = self.device.slots if self.device is not None else 0
        tiers = sum(slots > 0 for slots in (device_slots, host_slots, disk_slots))
        catalog = memory_bound(device_slots + host_slots + disk_slots, tiers, self._label_bytes)
        return budget.memory_bound(
            config.host.size, geometry.payload_bytes, catalog=catalog, disk_index=disk_slots * INDEX_BYTES
        )

    def hello(self) -> Hello:
        capacity = {Tier.HOST: self.host.slots}
        if self.device is not None:
            capacity[Tier.DEVICE] = self.device.slots
        slots, identities = np.empty(0, np.uint32), np.empty((0, 0), np.uint8)
        if self.disk is not None:
            capacity[Tier.DISK] = self.disk.slots
            slots, identities = self.disk.records()
        return Hello(capacity, self.host.page_bytes, slots, identities, self.generation(bytes(32)))

    def submit(self, transfer: Transfer) -> bool:
        return self.mover.submit(transfer)

    def cancel(self, ticket: int) -> None:
        self.mover.cancel(ticket)

    def promote(self, ticket: int, priority: Priority, deadline: float) -> None:
        self.mover.promote(ticket, priority, deadline)

    def wait(self, timeout: float) -> bool:
        return self.mover.wait(timeout)

    def wait_for_slices(self, ticket: int, count: int, timeout: float) -> bool:
        return self.mover.wait_for_slices(ticket, count, timeout)

    def pending(self) -> int:
        return self.mover.pending()

    def generation(self, space: bytes) -> int:
        if self.disk is not None:
            return self.disk.generation(space)
        return self._generations.get(space, self._floor)

    def invalidate(self, space: bytes | None) -> int:
        if self.disk is not None:
            return self.disk.invalidate(space)
        self._generation += 1
        if space is None:
            self._floor = self._generation
            self._generations.clear()
        else:
            self._generations[space] = self._generation
        return self._generation

    def forget(self, slots: npt.NDArray[np.uint32]) -> None:
        if self.disk is not None and len(slots):
            self.disk.clear(slots)

    def describe(self) -> str:
        parts = [pool.describe() for pool in (self.device, self.host, self.disk) if pool is not None]
        if self.mover.copies is not None:
            parts.append(self.mover.copies.describe())
        return "; ".join([*parts, f"memory: at most {readable_size(self.memory.total)}, all of it but the device's"])

    def warnings(self) -> list[str]:
        return [*self._notes, *self.mover.warnings()]

    def close(self) -> None:
        clean = self.mover.close()
        if clean:  # otherwise an I/O that never returned still uses the pages and files
            self._stack.close()

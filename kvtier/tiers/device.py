"""The device tier: an engine's own KV arrays, seen as pages."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kvtier import _core
from kvtier.arguments import instance
from kvtier.config import ConfigError, readable_size
from kvtier.geometry import KVGeometry
from kvtier.tiers.cuda import CudaDevice

_claimed: weakref.WeakSet[DevicePool] = weakref.WeakSet()  # by a cache, at some time


class DevicePool:
    """The blocks of an engine's KV arrays, adopted without a copy; slot n is block n of every array.

    The arrays are kept alive for as long as the pool lives; their bytes are opaque. They lie on a CUDA device (`cuda`)
    or, on a machine without a GPU, in host memory (`cuda` is None). `slots` pages of `payload_bytes` each; `page_bytes`
    is what one takes below. `cuda` may be given for a device that is emulated in host memory.

    Raises ValueError naming the array, its shape and what would be accepted when `tensors` are not as `geometry` says,
    CudaError when their device cannot be used.
    """

    def __init__(
        self, geometry: KVGeometry, tensors: Mapping[str, Any] | Sequence[Any], *, cuda: CudaDevice | None = None
    ) -> None:
        adopted = instance("geometry", geometry, KVGeometry).adopt(tensors)
        if cuda is None and adopted.device is not None:
            cuda = CudaDevice.of(adopted.device)
        self._holder: weakref.ref[object] | None = None
        self._adopted = adopted
        self.cuda = cuda
        self.geometry = geometry
        self.tensors = tensors
        self._alive = list(tensors.values()) if isinstance(tensors, Mapping) else list(tensors)
        self.native = _core.DevicePool(adopted.segments, adopted.slots, self._alive)
        self.slots: int = adopted.slots
        self.payload_bytes: int = geometry.payload_bytes
        self.page_bytes: int = geometry.page_bytes
        self.bytes: int = self.slots * self.payload_bytes
        if self.native.payload_bytes != self.payload_bytes:
            raise ValueError(f"device pool: pages of {self.native.payload_bytes} bytes; expected {self.payload_bytes}")

    @classmethod
    def allocate(cls, geometry: KVGeometry, slots: int) -> Self:
        """A pool over zeroed NumPy arrays of its own, for tests, benchmarks and machines without an engine."""
        if isinstance(slots, bool) or not isinstance(slots, int) or slots < 1:
            raise ValueError(f"device pool: slots is {slots!r}; expected a whole number above zero")
        instance("geometry", geometry, KVGeometry)
        try:
            return cls(geometry, geometry.allocate(slots))
        except (MemoryError, OverflowError, ValueError):
            need = readable_size(slots * geometry.payload_bytes)
            raise ValueError(f"device pool: slots is {slots}, of {need} in all; expected what fits in memory") from None

    def claim(self, holder: object) -> None:
        """Take the pool for one cache, as long as `holder` lives: two caches would hand out the same slots.

        ConfigError when another has it, or has a pool of which some bytes are this one's too.
        """
        if self._held():
            raise ConfigError("device: another cache has this pool; close that one, or give each its own")
        for other in list(_claimed):
            if other is not self and other._held() and self._adopted.shares_memory(other._adopted):
                raise ConfigError(
                    f"device: this pool of {self.slots} slots shares memory with one of {other.slots} slots that "
                    "another cache has; close that one, or give each arrays of its own"
                )
        self._holder = weakref.ref(holder)
        _claimed.add(self)

    def _held(self) -> bool:
        return self._holder is not None and self._holder() is not None

    def give_back(self) -> None:
        """The cache that had it is closed."""
        self._holder = None

    @property
    def segments(self) -> int:
        """In how many contiguous pieces a page lies on the device."""
        return int(self.native.segment_count)

    def read_page(self, slot: int) -> npt.NDArray[np.uint8]:
        """A copy of the slot's bytes in page order, without padding: uint8[payload_bytes]."""
        page = np.empty(self.payload_bytes, np.uint8)
        if self.cuda is not None:
            self.cuda.native.read_page(self.native, self._checked(slot), page, self.cuda.current_stream())
        else:
            self.native.gather(self._checked(slot), page)
        return page

    def write_page(self, slot: int, page: npt.ArrayLike) -> None:
        """Overwrite the slot with uint8[payload_bytes] in page order; padding behind it is ignored."""
        data = np.ascontiguousarray(page, np.uint8)
        if data.ndim != 1 or data.size not in (self.payload_bytes, self.page_bytes):
            raise ValueError(
                f"device page of shape {list(data.shape)}; "
                f"expected [{self.payload_bytes}], or [{self.page_bytes}] with padding"
            )
        self._put(slot, data)

    def fill(self, slots: npt.ArrayLike, byte: int) -> None:
        """Set every byte of the slots."""
        page = np.full(self.payload_bytes, byte, np.uint8)
        for slot in np.atleast_1d(np.asarray(slots)):
            self._put(int(slot), page)

    def describe(self) -> str:
        """One line for people."""
        return (
            f"device: {readable_size(self.bytes)}, {self.slots} pages of {readable_size(self.payload_bytes)} "
            f"{'in host memory' if self.cuda is None else f'on {self.cuda.describe()}'}"
        )

    def _put(self, slot: int, page: npt.NDArray[np.uint8]) -> None:
        if self.cuda is not None:
            self.cuda.native.write_page(self.native, self._checked(slot), page, self.cuda.current_stream())
        else:
            self.native.scatter(self._checked(slot), page)

    def _checked(self, slot: int) -> int:
        if not 0 <= slot < self.slots:
            raise ValueError(f"device slot {slot}; expected 0 to {self.slots - 1}")
        return int(slot)

"""The host tier's memory."""

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtier import _core
from kvtier.config import readable_size
from kvtier.geometry import KVGeometry

_NODES = Path("/sys/devices/system/node/has_memory")  # "0", "0-1", "0,2-3"


class HostArena:
    """Host memory for `slots` pages in one resident mapping, on huge pages where the machine gives them.

    All of it is taken at construction, which blocks for about a second per 2 GiB and releases the GIL. Raises
    MemoryError naming the size when the machine cannot give it, ValueError for sizes that make no sense.

    `slots` pages of `payload_bytes` each, padded to `page_bytes` (a multiple of 4096); `bytes` is all pages together.

    `numa_node`: the node whose memory is taken while it has any (a GPU's nearest); -1: the kernel's choice, as it is on
    a machine with one node. `warning` says so when the kernel refuses it.
    """

    def __init__(self, slots: int, payload: KVGeometry | int, *, numa_node: int = -1) -> None:
        payload_bytes = payload.payload_bytes if isinstance(payload, KVGeometry) else payload
        for name, value, most in (("slots", slots, 2**32 - 2), ("payload_bytes", payload_bytes, 2**31)):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise ValueError(f"host arena: {name} is {value!r}; expected 1 to {most}")
        wanted = numa_node if several_nodes() else -1
        self.native = _core.HostArena(slots, payload_bytes, wanted)
        self.numa_node: int = -1 if self.native.numa_error else wanted  # -1: on no node in particular
        self.warning = ""
        if self.native.numa_error:
            self.warning = (
                f"the host tier could not be put on NUMA node {wanted} ({os.strerror(self.native.numa_error)}); the "
                f"GPU near it may copy more slowly: start the engine under numactl --preferred={wanted}"
            )
        self.slots: int = self.native.slots
        self.payload_bytes: int = self.native.payload_bytes
        self.page_bytes: int = self.native.page_bytes
        self.bytes: int = self.native.bytes
        self.huge_pages: bool = self.native.huge_pages  # whether the kernel really backed it with huge pages

    def page(self, slot: int) -> npt.NDArray[np.uint8]:
        """The page in `slot`, padding included: a writable view that keeps the arena alive."""
        return self.native.page(_checked(slot, self.slots))

    def checksum(self, slot: int) -> int:
        """The checksum that travels with the page in `slot`; 0 while there is none."""
        return self.native.checksum(_checked(slot, self.slots))

    def set_checksum(self, slot: int, value: int) -> None:
        """Replace it; 0 says that there is none."""
        self.native.set_checksum(_checked(slot, self.slots), value)

    def describe(self) -> str:
        """One line for people: size, pages, and whether they are huge."""
        share = self.native.huge_bytes / self.native.mapped_bytes
        return (
            f"host: {readable_size(self.bytes)}, {self.slots} pages of {readable_size(self.page_bytes)}, "
            f"{share:.0%} on huge pages, {_core.copy_kernels()} copies"
            + (f", on NUMA node {self.numa_node}" if self.numa_node >= 0 else "")
        )


def several_nodes() -> bool:
    """Whether this machine's memory is on more than one NUMA node."""
    try:
        return not _NODES.read_text().strip().isdigit()
    except OSError:  # a kernel without NUMA, or a container that hides it
        return False


def _checked(slot: int, slots: int) -> int:
    if not 0 <= slot < slots:
        raise ValueError(f"host slot {slot}; expected 0 to {slots - 1}")
    return int(slot)

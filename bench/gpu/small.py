"""A few small copies by every kernel and path, for compute-sanitizer: every byte is compared with the CPU's copy."""

from __future__ import annotations

import numpy as np
from rig import PATHS, Pool, arguments, host_arena, open_device

from kvtier import _core


def main() -> None:
    dry = arguments()
    device = open_device(dry)
    checked = 0
    for segments, length in ((3, 4096), (5, 1000), (1, 66_000), (2, 16)):  # on lanes, off lanes, one piece, tiny
        pool = Pool(dry, 12, segments, length)
        arena = host_arena(device, 16, segments * length)
        pinned = _core.PinnedArena(device, arena)
        pinned.wait()
        slots, pages = np.arange(12, dtype=np.uint32), np.arange(15, 3, -1, dtype=np.uint32)
        before = [read(device, pool, arena, slot) for slot in range(12)]
        for path in PATHS:
            copies = _core.CudaCopies(device, pinned, offload=path, onboard=path)
            for page in pages:
                arena.page(int(page))[:] = 0xEE
            _core.measure_path(copies, pool.native, arena, True, slots, pages, 1)
            for slot, page in zip(slots, pages, strict=True):
                assert np.array_equal(arena.page(int(page))[: segments * length], before[slot]), (path, slot)
                assert not arena.page(int(page))[segments * length :].any(), (path, slot)
            turned = np.roll(slots, 1)
            _core.measure_path(copies, pool.native, arena, False, turned, pages, 1)
            for slot, source in zip(turned, slots, strict=True):
                assert np.array_equal(read(device, pool, arena, int(slot)), before[source]), (path, slot)
                checked += 1
            _core.measure_path(copies, pool.native, arena, False, slots, pages, 1)
    print(f"{checked} pages are bit for bit the CPU's")


def read(device: _core.CudaDevice, pool: Pool, arena: _core.HostArena, slot: int) -> np.ndarray:
    page = np.empty(arena.payload_bytes, np.uint8)
    device.read_page(pool.native, slot, page)
    return page


if __name__ == "__main__":
    main()

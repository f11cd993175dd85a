"""Disk to device as one transfer: a page goes from the drive to pinned memory and on to the GPU with no copy between.

Beside it in the same rounds: the drive alone (the stage lane to host memory) and the link alone (the onboard lane).
"""

from __future__ import annotations

import tempfile
import time

import numpy as np
from rig import Pool, Stopwatch, arguments, host_arena, open_device, write

from kvtier import _core
from kvtier._core import Tier

LABEL_BYTES = 32
STREAM = 0  # the engine's: CUDA's default


def main() -> None:
    dry = arguments()
    device = open_device(dry)
    pages, segment = (8, 4096) if dry else (512, 65536)  # 1 GiB of an 8B-class model's pages
    pool = Pool(dry, pages, 32, segment)
    payload = pool.segments * segment
    with tempfile.TemporaryDirectory(prefix=".kvtier-gpu-", dir=".") as folder:
        arena = host_arena(device, pages, payload)
        pinned = _core.PinnedArena(device, arena)
        pinned.wait()
        store = _core.DiskStore(folder, pages, payload, LABEL_BYTES, b"bench/gpu/disk".ljust(32, b"\0"))
        copies = _core.CudaCopies(device, pinned)
        mover = _core.Mover(pool.native, arena, store, cuda=copies)
        try:
            seconds = measure(mover, pages, 1 if dry else 3)
        finally:
            mover.close()
            store.close()
    row = {name + " GB/s": round(pool.bytes / s / 1e9, 3) for name, s in seconds.items()}
    row["disk to device / slower of its two hops"] = round(
        max(seconds["disk to host"], seconds["host to device"]) / seconds["disk to device"], 3
    )
    print(row)
    write("disk", device, [row], limit="each hop alone, in the same rounds", pages=pages, page_bytes=arena.page_bytes)


def measure(mover: _core.Mover, pages: int, rounds: int) -> dict[str, float]:
    rng = np.random.default_rng(3)
    identities = rng.integers(0, 256, (pages, _core.identity_bytes(LABEL_BYTES)), dtype=np.uint8)
    identities[:, 96:112] = 0  # generation, group and position: those of a new store
    tickets = iter(range(1, 1 << 20))

    def move(*path: Tier) -> float:
        slots = np.tile(np.arange(pages, dtype=np.uint32), (len(path), 1))
        began = time.perf_counter()
        assert mover.submit(next(tickets), list(path), slots, identities, 0, 0.0, STREAM)
        while not (done := mover.poll()):
            mover.wait(10.0)
        took = time.perf_counter() - began
        assert (done[0].status == _core.PageStatus.OK.value).all(), np.bincount(done[0].status.ravel())
        return took

    move(Tier.DEVICE, Tier.HOST, Tier.DISK)
    return Stopwatch().run(
        {
            "disk to device": lambda: move(Tier.DISK, Tier.HOST, Tier.DEVICE),
            "disk to host": lambda: move(Tier.DISK, Tier.HOST),
            "host to device": lambda: move(Tier.HOST, Tier.DEVICE),
        },
        rounds,
    )


if __name__ == "__main__":
    main()

"""Disk to device as one transfer: a page goes from the drive to pinned memory and on to the GPU with no copy between.

Beside it in the same rounds: the drive alone (the stage lane to host memory) and the link alone (the onboard lane).
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
from rig import Stopwatch, arguments, open_device, skip, write

from kvtier import _core

STORE_BYTES = 16 << 20  # room for the store's own files


def main() -> None:
    dry = arguments()
    device = open_device(dry)
    try:
        from kvtier import KVGeometry
        from kvtier.config import CacheConfig
        from kvtier.messages import Transfer
        from kvtier.mover import Mover
        from kvtier.tiers.cuda import CudaDevice
        from kvtier.tiers.device import DevicePool
        from kvtier.tiers.disk import DiskStore
        from kvtier.tiers.host import HostArena
    except ImportError as error:
        skip(f"the disk tier's Python side needs {error.name}")
    geometry = KVGeometry.named("llama-3-8b", block_size=16).with_(layout="stacked.b2hnd")
    if dry:
        geometry = geometry.with_(layers=2)
    pages = 8 if dry else 512  # 1 GiB
    if dry:
        pool = DevicePool(geometry, geometry.allocate(pages), cuda=CudaDevice(device, lambda: 0))
    else:
        import torch

        shape = geometry.array_shape(pages)
        tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(geometry.layers)]
        pool = DevicePool(geometry, tensors)
    tiers = _core.Tier
    rng = np.random.default_rng(3)
    with tempfile.TemporaryDirectory(prefix=".kvtier-gpu-", dir=".") as folder:
        config = CacheConfig(
            block_size=16, disk={"path": Path(folder), "size": (pages + 1) * geometry.page_bytes + STORE_BYTES}
        )
        arena = HostArena(pages, geometry)
        with DiskStore.open(config, geometry) as disk, Mover.open(config, pool, arena, disk) as mover:
            identities = rng.integers(0, 256, (pages, 112 + 4 * 16), dtype=np.uint8)
            identities[:, 96:112] = 0  # generation, group and position: those of a new store
            tickets = iter(range(1, 1 << 20))

            def move(*path: _core.Tier) -> float:
                slots = np.tile(np.arange(pages, dtype=np.uint32), (len(path), 1))
                began = time.perf_counter()
                assert mover.submit(Transfer(next(tickets), path, slots, identities))
                while not (done := mover.poll()):
                    mover.wait(10.0)
                assert (done[0].status == _core.PageStatus.OK.value).all(), np.bincount(done[0].status.ravel())
                return time.perf_counter() - began

            move(tiers.DEVICE, tiers.HOST, tiers.DISK)
            seconds = Stopwatch().run(
                {
                    "disk to device": lambda: move(tiers.DISK, tiers.HOST, tiers.DEVICE),
                    "disk to host": lambda: move(tiers.DISK, tiers.HOST),
                    "host to device": lambda: move(tiers.HOST, tiers.DEVICE),
                },
                1 if dry else 3,
            )
    total = pages * geometry.payload_bytes
    row = {name + " GB/s": round(total / s / 1e9, 3) for name, s in seconds.items()}
    row["disk to device / slower of its two hops"] = round(
        max(seconds["disk to host"], seconds["host to device"]) / seconds["disk to device"], 3
    )
    print(row)
    write("disk", dry, [row], limit="each hop alone, in the same rounds", pages=pages, page_bytes=geometry.page_bytes)


if __name__ == "__main__":
    main()

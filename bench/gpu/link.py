"""Host and device, GB/s by segment size and path, beside one large copy of pinned memory in the same run.

Each row is one segment size; pages have 32 segments (2 MiB pages at 64 KiB, as an 8B-class model has them with 16
tokens a block), fewer where a page would pass 32 MiB. Slots and pages are drawn at random, checksums are computed.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from rig import PATHS, Pool, Stopwatch, arguments, host_arena, open_device, plain_both, plain_copy, write

from kvtier import _core

KIB = 1024


def main() -> None:
    dry = arguments()
    device = open_device(dry)
    sizes = [4 * KIB, 64 * KIB] if dry else [4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB]
    total, rounds = (4 << 20, 1) if dry else (1 << 30, 5)
    rows: list[dict[str, Any]] = []
    for size in sizes:
        row = one_size(device, dry, size, total, rounds)
        rows.append(row)
        print(row)
    write("link", device, rows, limit="large copies of pinned memory by torch, one or one each way, in the same rounds")


def one_size(device: _core.CudaDevice, dry: bool, size: int, total: int, rounds: int) -> dict[str, Any]:
    segments = max(1, min(32, (32 << 20) // size))
    pages = max(4, total // (segments * size))
    pool = Pool(dry, pages, segments, size)
    arena = host_arena(device, pages, segments * size)
    pinned = _core.PinnedArena(device, arena)
    pinned.wait()
    draw = np.random.default_rng(2)
    slots, targets = (draw.permutation(pages).astype(np.uint32) for _ in range(2))
    copies = {path: _core.CudaCopies(device, pinned, offload=path, onboard=path) for path in PATHS}

    def timed(path: str, offload: bool) -> float:
        return float(_core.measure_path(copies[path], pool.native, arena, offload, slots, targets, 1))

    def both(path: str) -> float:
        taken = [0.0, 0.0]

        def run(index: int) -> None:
            taken[index] = timed(path, index == 0)

        threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return max(taken)

    candidates = {}
    for path in PATHS:
        candidates[f"offload {path}"] = lambda path=path: timed(path, True)
        candidates[f"onboard {path}"] = lambda path=path: timed(path, False)
        # The slots that are read and written are the same, and hold the same bytes: only the time matters here.
        candidates[f"both {path}"] = lambda path=path: both(path)
    if not dry:
        down, up = plain_copy(256 << 20)
        candidates |= {"limit offload": down, "limit onboard": up, "limit both": plain_both(256 << 20)}
    seconds = Stopwatch().run(candidates, rounds)
    rate = {name: (256 << 20 if name.startswith("limit") else pool.bytes) / s / 1e9 for name, s in seconds.items()}
    row: dict[str, Any] = {"segment_bytes": size, "segments": segments, "pages": pages, "pinned": pinned.pinned}
    for lane in ("offload", "onboard"):
        row[f"{lane} GB/s"] = {path: round(rate[f"{lane} {path}"], 3) for path in PATHS}
        if not dry:
            row[f"{lane} limit GB/s"] = round(rate[f"limit {lane}"], 3)
            row[f"{lane} best/limit"] = round(max(row[f"{lane} GB/s"].values()) / rate[f"limit {lane}"], 3)
    row["both GB/s each way"] = {path: round(rate[f"both {path}"], 3) for path in PATHS}
    if not dry:
        row["both limit GB/s each way"] = round(rate["limit both"], 3)
        row["both best/limit"] = round(max(row["both GB/s each way"].values()) / rate["limit both"], 3)
    return row


if __name__ == "__main__":
    main()

"""What the copies cost the GPU's other work: a matrix product and a decode step, alone and with both lanes saturated.

The decode step is the memory-bound kind: a token of an 8B-class model reads 16 GB of weights; here one 2 GiB matrix
is read by a product with 16 rows, as often as it takes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from rig import PATHS, Pool, Stopwatch, arguments, host_arena, open_device, skip, write

from kvtier import _core


class Saturated:
    """Both lanes of one path, run over and over by two threads inside ``with``."""

    def __init__(self, device: _core.CudaDevice, pool: Pool, arena: Any, pinned: Any, path: str, share: float) -> None:
        self.copies = _core.CudaCopies(device, pinned, offload=path, onboard=path, processor_share=share)
        half = min(pool.slots, arena.slots) // 2
        self.halves = [np.arange(half, dtype=np.uint32), np.arange(half, 2 * half, dtype=np.uint32)]
        self.pool, self.arena, self.stop, self.moved = pool, arena, threading.Event(), 0
        self.threads = [threading.Thread(target=self._run, args=(index,)) for index in range(2)]

    def _run(self, index: int) -> None:
        slots = self.halves[index]
        while not self.stop.is_set():
            _core.measure_path(self.copies, self.pool.native, self.arena, index == 0, slots, slots, 2)
            self.moved += 2 * len(slots) * self.pool.segments * self.pool.length

    def __enter__(self) -> Saturated:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()


def main() -> None:
    dry = arguments()
    try:
        import torch
    except ImportError as error:
        skip(str(error))
    device = open_device(dry)
    where, kind = ("cpu", torch.float32) if dry else ("cuda", torch.bfloat16)
    size, rows_of = (256, 1024) if dry else (8192, 131072)
    a, b = (torch.randn(size, size, device=where).to(kind) for _ in range(2))
    weights = torch.randn(rows_of, size, device=where).to(kind)
    token = torch.randn(size, 16, device=where).to(kind)
    work = {"matmul": lambda: a @ b, "decode": lambda: weights @ token}
    pool = Pool(dry, 8 if dry else 512, 32, 4096 if dry else 65536)
    arena = host_arena(device, pool.slots, pool.segments * pool.length)
    pinned = _core.PinnedArena(device, arena)
    pinned.wait()
    rounds = 1 if dry else 5
    rows = []
    for path in PATHS:
        for share in (0.08,) if path in ("pieces", "batch") else (0.04, 0.08, 0.16):
            taken: dict[str, dict[str, float]] = {}
            for state in ("alone", "beside"):
                if state == "beside":
                    with Saturated(device, pool, arena, pinned, path, share):
                        taken[state] = times(torch, work, where, rounds)
                else:
                    taken[state] = times(torch, work, where, rounds)
            row = {"path": path, "processor_share": share, "processors": device.facts()["processors"]}
            for name in work:
                row[f"{name} alone ms"] = round(1000 * taken["alone"][name], 4)
                row[f"{name} slow-down"] = round(taken["beside"][name] / taken["alone"][name] - 1, 4)
            rows.append(row)
            print(row)
    write("beside", device, rows, limit="the same work alone, in the same run")


def times(torch: Any, work: dict[str, Callable[[], Any]], where: str, rounds: int) -> dict[str, float]:
    def timed(run: Callable[[], Any]) -> float:
        if where == "cpu":
            import time

            begin = time.perf_counter()
            run()
            return time.perf_counter() - begin
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(20):
            run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 20_000

    return Stopwatch().run({name: (lambda run=run: timed(run)) for name, run in work.items()}, rounds)


if __name__ == "__main__":
    main()

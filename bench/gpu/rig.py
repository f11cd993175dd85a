"""What the GPU benches share: pools on a device, real or emulated; memory beside them; timing; results as JSON."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvtier import _core

SKIPPED = 77  # the exit code that check.sh takes for "not here"
OUT = Path(os.environ.get("OUT", "out"))
PATHS = ("pieces", "batch", "direct", "staged")


def skip(why: str) -> None:
    print(why)
    sys.exit(SKIPPED)


def arguments() -> bool:
    """Whether this is a dry run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dry-run", action="store_true", help="small, over an emulated device")
    return bool(parser.parse_args().dry_run)


def open_device(dry: bool) -> _core.CudaDevice:
    """The first CUDA device, or an emulation; ends the step with its reason where there is none."""
    if dry:
        return _core.CudaDevice.emulated(0, False)
    status = _core.cuda_status()
    if status["note"]:
        skip(status["note"])
    if status["built_for"]:
        return _core.CudaDevice.open(0)
    from kvtier.tiers.cuda import compile_kernels

    return _core.CudaDevice.open(0, compile_kernels(_core.cuda_capability(0)))


def host_arena(device: _core.CudaDevice, pages: int, payload_bytes: int) -> _core.HostArena:
    """Host memory on the device's NUMA node, as the product takes it; says so where the kernel refuses it."""
    node = device.facts()["numa_node"]
    arena = _core.HostArena(pages, payload_bytes, node)
    if arena.numa_error:
        print(f"host memory is not on NUMA node {node}: {os.strerror(arena.numa_error)}")
    return arena


class Pool:
    """Pages of ``segments`` pieces of ``length`` bytes, ``slots`` of them, each piece in an array of its own."""

    def __init__(self, dry: bool, slots: int, segments: int, length: int) -> None:
        self.slots, self.segments, self.length = slots, segments, length
        if dry:
            self.arrays: Any = np.zeros((segments, slots, length), np.uint8)
            self.arrays[:] = np.random.default_rng(0).integers(0, 256, (segments, 1, length), np.uint8)
            base = self.arrays.ctypes.data
        else:
            import torch

            self.arrays = torch.randint(0, 256, (segments, slots, length), dtype=torch.uint8, device="cuda")
            torch.cuda.synchronize()
            base = self.arrays.data_ptr()
        pieces = [(base + s * slots * length, length, length) for s in range(segments)]
        self.native = _core.DevicePool(pieces, slots)

    @property
    def bytes(self) -> int:
        return self.slots * self.segments * self.length


class Stopwatch:
    """Median seconds of interleaved candidates: the machine's good and bad moments fall on all of them alike."""

    def __init__(self) -> None:
        self.taken: dict[str, list[float]] = {}

    def run(self, candidates: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
        for turn in range(rounds + 1):  # the first warms up
            for name, candidate in candidates.items():
                seconds = candidate()
                if turn:
                    self.taken.setdefault(name, []).append(seconds)
        return {name: statistics.median(taken) for name, taken in self.taken.items()}


def plain_copy(size: int, rounds: int = 20) -> tuple[Callable[[], float], Callable[[], float]]:
    """(device to host, host to device): one large copy of pinned memory by torch, the limit of every path; seconds."""
    import torch

    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    host.zero_()

    def timed(to: Any, source: Any) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(rounds):
            to.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000 / rounds

    return (lambda: timed(host, device)), (lambda: timed(device, host))


def plain_both(size: int, rounds: int = 20) -> Callable[[], float]:
    """The same in both directions at once, on two streams: seconds for ``size`` bytes each way."""
    import torch

    devices = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    hosts = [torch.empty(size, dtype=torch.uint8, pin_memory=True).zero_() for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def timed() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(rounds):
            with torch.cuda.stream(streams[0]):
                hosts[0].copy_(devices[0], non_blocking=True)
            with torch.cuda.stream(streams[1]):
                devices[1].copy_(hosts[1], non_blocking=True)
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / rounds

    return timed


def write(name: str, device: _core.CudaDevice, rows: Sequence[dict[str, Any]], **more: Any) -> None:
    """``$OUT/NAME.json``: what was measured, on what, when."""
    OUT.mkdir(parents=True, exist_ok=True)
    facts = device.facts()
    dry = facts["emulated"]
    result = {
        "schema": "kvtier.gpu/1", "bench": name, "date": datetime.datetime.now(datetime.UTC).isoformat(),
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "device": "emulated: no figure of this file says anything about a GPU" if dry else facts,
        "dry_run": dry, **more, "rows": list(rows),
    }  # fmt: skip
    path = OUT / f"gpu-{name}.json"
    path.write_text(json.dumps(result, indent=1, default=str) + "\n")
    print(f"{len(rows)} rows in {path}")

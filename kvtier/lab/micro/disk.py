"""Figures of the disk tier: pages between host memory and disk through the mover, checksums verified, beside fio and a
bare io_uring loop.

All three move the same number of incompressible bytes, in the same random order of whole pages, with the same bytes in
flight. The loop uses the very same huge-page buffers as the mover. fio can have huge pages only from the system's
hugetlb pool; where that is empty it has ordinary ones, and its figure says so.
"""

import ctypes
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvtier import _core
from kvtier.lab.figures import Figure, paired
from kvtier.mover import Mover, Transfer
from kvtier.tiers.disk import DiskStore
from kvtier.tiers.host import HostArena

PAGE_SIZES = (64 << 10, 256 << 10, 1 << 20, 2 << 20)
IN_FLIGHT = 8 << 20  # bytes
LABEL_BYTES = 64
TRANSFER_PAGES = 64
LIMIT_S = 120.0  # of one measurement

Direction = Literal["read", "write"]


class DiskBench:
    """One store, one arena and the files of the limits, for pages of `page_bytes`, `total` bytes in all.

    Takes `total` bytes of memory and three times as many on disk below `folder`; a context manager.
    """

    def __init__(self, folder: Path, page_bytes: int, total: int, seed: int = 0, io: str = "auto") -> None:
        if page_bytes % 4096 or total < page_bytes:
            raise ValueError(f"page_bytes={page_bytes}, total={total}: whole blocks of 4096, and at least one page")
        self.page_bytes = page_bytes
        self.pages = total // page_bytes
        self.bytes = self.pages * page_bytes
        self.folder = Path(tempfile.mkdtemp(prefix="kvtier-bench-", dir=folder))
        rng = np.random.default_rng(seed)
        self.order = rng.permutation(self.pages).astype(np.uint32)
        self.host = HostArena(self.pages, page_bytes)
        self.memory = _whole(self.host)
        self.memory.view(np.uint64)[:] = rng.integers(0, 2**64, self.memory.size // 8, np.uint64)
        self.identities = _identities(self.pages)
        (self.folder / "store").mkdir()
        self.store = DiskStore(
            self.folder / "store",
            payload_bytes=page_bytes,
            label_bytes=LABEL_BYTES,
            geometry_tag=bytes(32),
            slots=self.pages,
        )
        self.mover = Mover(None, self.host, self.store, io, bytes_in_flight=IN_FLIGHT)
        self._ticket = 0
        for slot in range(self.pages):
            self.host.set_checksum(slot, self._checksum(slot))

    def close(self) -> None:
        self.mover.close()
        self.store.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> "DiskBench":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _checksum(self, slot: int) -> int:
        lo, hi = (int(word) for word in self.identities[slot, :16].view("<u8"))
        return int(_core.checksum(self.host.page(slot), lo, hi))

    def ours(self, direction: Direction) -> float:
        """GB/s through the mover; a page that is not moved and verified raises RuntimeError."""
        disk, host = _core.Tier.DISK, _core.Tier.HOST
        path = (host, disk) if direction == "write" else (disk, host)
        left: set[int] = set()
        start = time.perf_counter()
        for first in range(0, self.pages, TRANSFER_PAGES):
            arena = np.arange(first, min(first + TRANSFER_PAGES, self.pages), dtype=np.uint32)
            slots = np.stack([arena, self.order[arena]] if direction == "write" else [self.order[arena], arena])
            self._ticket += 1
            left.add(self._ticket)
            if not self.mover.submit(Transfer(self._ticket, path, slots, self.identities[arena])):
                raise RuntimeError("disk benchmark: the mover's queue is full")
        while left:
            if time.perf_counter() - start > LIMIT_S:
                raise RuntimeError(f"disk benchmark: not done after {LIMIT_S:.0f} s")
            self.mover.wait(1.0)
            for completion in self.mover.poll():
                if not (completion.status == int(_core.PageStatus.OK)).all():
                    raise RuntimeError(f"disk benchmark: pages ended with status {np.unique(completion.status)}")
                left.discard(completion.ticket)
        return self.bytes / (time.perf_counter() - start) / 1e9

    def raw(self, direction: Direction) -> float:
        """GB/s of a bare io_uring loop on a file like the store's and the same buffers."""
        with _file(self.folder / "raw", self.bytes, self.store.native.direct) as fd:
            seconds = _core.raw_loop(
                fd, direction == "write", self.memory, self.page_bytes, self.order, max(1, IN_FLIGHT // self.page_bytes)
            )
        return self.bytes / seconds / 1e9

    def fio(self, direction: Direction) -> float | None:
        """GB/s of fio, or None without it."""
        program = shutil.which("fio")
        if program is None:
            return None
        command = [
            program,
            "--name=page",
            f"--filename={self.folder / 'fio'}",
            f"--rw=rand{direction}",
            f"--bs={self.page_bytes}",
            f"--size={self.bytes}",
            f"--iodepth={max(1, IN_FLIGHT // self.page_bytes)}",
            "--ioengine=io_uring",
            "--fixedbufs=1",
            "--registerfiles=1",
            f"--direct={int(self.store.native.direct)}",
            f"--iomem={fio_memory()}",
            "--invalidate=0",
            "--output-format=json",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if done.returncode != 0:
            return None
        return float(json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][direction]["bw_bytes"]) / 1e9


def fio_memory() -> str:
    """fio's name for the best memory that it can have here."""
    return "mmaphuge" if _free_huge_bytes() >= 2 * IN_FLIGHT else "mmap"


def _free_huge_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    try:
        return int(fields["HugePages_Free"]) * int(fields["Hugepagesize"].split()[0]) * 1024
    except (KeyError, ValueError):
        return 0


@contextmanager
def _file(path: Path, size: int, direct: bool) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_DIRECT if direct else 0), 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
        yield fd
    finally:
        os.close(fd)


def _whole(host: HostArena) -> npt.NDArray[np.uint8]:
    """All pages of an arena as one array; valid for as long as the arena lives."""
    first = host.page(0)
    return np.ctypeslib.as_array((ctypes.c_uint8 * host.bytes).from_address(first.ctypes.data))


def _identities(pages: int) -> npt.NDArray[np.uint8]:
    found = np.zeros((pages, 112 + LABEL_BYTES), np.uint8)
    found[:, :64] = np.random.default_rng(1).integers(0, 256, (pages, 64), np.uint8)
    found[:, 108:112].view("<u4")[:, 0] = np.arange(pages)
    return found


@dataclass
class _Limit:
    """The better of fio and the bare loop; remembers which it was."""

    bench: DiskBench
    direction: Direction

    def __post_init__(self) -> None:
        self.wins = {"raw": 0, "fio": 0}
        self.has_fio = True

    def __call__(self) -> float:
        raw = self.bench.raw(self.direction)
        fio = self.bench.fio(self.direction) if self.has_fio else None
        self.has_fio = fio is not None
        self.wins["fio" if fio is not None and fio > raw else "raw"] += 1
        return max(raw, fio or 0.0)

    def words(self) -> str:
        loop = "a bare io_uring loop on the same huge-page buffers"
        if not self.has_fio:
            return f"{loop} (no fio here)"
        memory = "" if fio_memory() == "mmaphuge" else " with ordinary pages, as no hugetlb pages are free"
        return f"the better of {loop} ({self.wins['raw']} x) and fio{memory} ({self.wins['fio']} x)"


def figures(
    path: Path | str | None = None,
    *,
    page_sizes: tuple[int, ...] = PAGE_SIZES,
    total: int = 256 << 20,
    pairs: int = 5,
    make: Callable[[Path, int, int], DiskBench] = DiskBench,
) -> Iterator[Figure]:
    """Writing and reading pages, for each page size, in GB/s against what this disk gives; yields as it measures.

    `path` must be a directory on a disk; None: the working directory. `make` builds what is measured.
    """
    for page_bytes in page_sizes:
        with make(Path(path or "."), page_bytes, total) as bench:
            for direction in ("write", "read"):
                limit = _Limit(bench, direction)
                found = paired(lambda bench=bench, way=direction: bench.ours(way), limit, pairs)  # type: ignore[misc]
                name = f"disk page {direction}, verified, {page_bytes >> 10} KiB, {IN_FLIGHT >> 20} MiB in flight"
                yield found.figure(name, "GB/s", limit.words())

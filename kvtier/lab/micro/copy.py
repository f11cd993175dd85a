"""How fast pages are copied and proved, beside plain memcpy of the same bytes in the same run.

Times are the copying thread's own (CPU time), so that what other processes do with the core in between does not count;
the memory bus is still shared with them, which is why every figure is a ratio of interleaved pairs.
"""

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kvtier import _core
from kvtier.lab.figures import Figure, paired

PAGES = (16 << 10, 64 << 10, 256 << 10, 2 << 20)
RUNS = (1, 16)  # contiguous runs per page on the device: block-first layouts have 1, layer-first ones 1 or 2 per layer
ARENA_BYTES = 256 << 20  # per side; far above any cache
SHORTEST_RUN = 4 << 10
_LINEAR = "one linear memcpy of as many bytes"


class PageBench:
    """A device pool and a host arena of `total` bytes each, and pages in random order on both sides."""

    def __init__(self, page_bytes: int, runs: int = 1, total: int = ARENA_BYTES, seed: int = 7) -> None:
        self.count = total // page_bytes
        self.total = self.count * page_bytes
        run = page_bytes // runs
        self.source = _core.HostArena(self.count, page_bytes)
        self.arena = _core.HostArena(self.count, page_bytes)
        for slot in range(self.count):
            self.source.page(slot)[:] = slot % 251
        self.pool = _core.DevicePool(
            [(self.source.base + i * self.count * run, run, run) for i in range(runs)], self.count
        )
        rng = np.random.default_rng(seed)
        self.slots = rng.permutation(self.count).astype(np.uint32)
        self.pages = rng.permutation(self.count).astype(np.uint32)
        self.gather()  # so that every page has its checksum

    def gather(self) -> None:
        """All pages down, with their checksums."""
        _core.gather_pages(self.pool, self.arena, self.slots, self.pages)

    def scatter(self) -> None:
        """All pages up."""
        _core.scatter_pages(self.pool, self.arena, self.slots, self.pages)

    def check(self) -> None:
        """The checksum of all pages, compared. RuntimeError when one is wrong."""
        good = _core.checksum_pages(self.arena, self.pages)
        if good != self.count:
            raise RuntimeError(
                f"{self.count - good} of {self.count} pages do not have the checksum they were copied with"
            )

    def memcpy_pages(self) -> None:
        """The bytes that `gather` copies, run by run, by plain memcpy."""
        _core.memcpy_pages(self.pool, self.arena, self.slots, self.pages)

    def memcpy_linear(self) -> None:
        """As many bytes by one memcpy."""
        ctypes.memmove(self.arena.base, self.source.base, self.total)

    def speed(self, work: Callable[[], None]) -> Callable[[], float]:
        """A measurement of `work` over all pages in GB/s."""

        def measure() -> float:
            start = time.thread_time()
            work()
            return self.total / max(time.thread_time() - start, 1e-9) / 1e9

        return measure


def figures(
    pages: Sequence[int] = PAGES, runs: Sequence[int] = RUNS, total: int = ARENA_BYTES, pairs: int = 5
) -> Iterator[Figure]:
    """Page copy with checksum, checksum alone and scatter, per page size and number of runs per page."""
    for page in pages:
        for count in runs:
            if page // count < SHORTEST_RUN:
                continue
            bench = PageBench(page, count, total)
            setting = f"{page >> 10} KiB pages" + (f" in {count} runs" if count > 1 else "")
            linear = bench.speed(bench.memcpy_linear)
            gather = bench.speed(bench.gather)
            name = f"page copy with checksum, {setting}"
            yield paired(gather, linear, pairs).figure(name, "GB/s", _LINEAR)
            by_page = paired(gather, bench.speed(bench.memcpy_pages), pairs)
            yield by_page.figure(name, "GB/s", "memcpy of the same runs of the same pages, no checksum")
            yield paired(bench.speed(bench.scatter), linear, pairs).figure(f"scatter, {setting}", "GB/s", _LINEAR)
            if count == 1:
                bench.gather()  # the linear copies overwrote the pages
                check = paired(bench.speed(bench.check), bench.speed(bench.gather), pairs)
                yield check.figure(f"checksum alone, {setting}", "GB/s", "page copy with checksum")


if __name__ == "__main__":
    for figure in figures():
        print(figure.to_json())

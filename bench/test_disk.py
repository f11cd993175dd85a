"""pytest-benchmark over the figures of the disk tier; `kvtier.lab.micro.disk` has them beside their limits."""

from pathlib import Path
from typing import Any

import pytest

from kvtier.lab.micro.disk import Direction, DiskBench


@pytest.mark.parametrize("page_bytes", [64 << 10, 1 << 20])
@pytest.mark.parametrize("direction", ["write", "read"])
def test_disk_pages(benchmark: Any, tmp_path: Path, page_bytes: int, direction: Direction) -> None:
    with DiskBench(tmp_path, page_bytes, 32 << 20) as bench:
        bench.ours("write")
        benchmark.pedantic(bench.ours, args=(direction,), rounds=3)
        benchmark.extra_info["bytes"] = bench.bytes

"""Page copies under pytest-benchmark; `python -m kvtier.lab.micro.copy` gives the figures beside memcpy."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.lab.micro.copy import PageBench

TOTAL = 64 << 20


@pytest.mark.parametrize("work", ["gather", "scatter", "check", "memcpy_pages"])
@pytest.mark.parametrize("page", [16 << 10, 64 << 10, 256 << 10])
def test_page_copy(benchmark: Any, page: int, work: str) -> None:
    bench = PageBench(page, total=TOTAL)
    benchmark.extra_info["bytes"] = bench.total
    benchmark.pedantic(getattr(bench, work), rounds=5, warmup_rounds=1)

"""The catalog's micro-benchmarks, small enough for every day; `kvtier bench` runs the same at full size."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvtier.lab.micro.catalog import Setting, figures, hit, load, miss, prompt, setting


@pytest.fixture(scope="module")
def small() -> Iterator[Setting]:
    return setting(chains=16, blocks=1024)


def test_hit(benchmark, small: Setting) -> None:  # type: ignore[no-untyped-def]
    benchmark(hit, small, 1)


def test_load(benchmark, small: Setting) -> None:  # type: ignore[no-untyped-def]
    benchmark(load, small, 1)


def test_miss(benchmark, small: Setting) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(2)
    benchmark(lambda: miss(small, prompt(rng, small.blocks)))


def test_figures_name_their_limit() -> None:
    for figure in figures(chains=4, blocks=256, pairs=1):
        assert figure.value > 0
        assert figure.unit == "ms"
        assert figure.limit_is

"""LRU on real traces, hit for hit: as many blocks as a plain recency list that touches each chain tail first."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtier.catalog import Catalog, Tier, TierSpec

TRACES = Path(os.environ.get("KVTIER_TRACES") or Path(__file__).parents[3] / "shared/data/traces")
pytestmark = pytest.mark.skipif(not TRACES.is_dir(), reason=f"no traces in {TRACES}; KVTIER_TRACES names their folder")


def chains(name: str) -> Iterator[np.ndarray]:
    """Each request's blocks as 32-byte labels, the partial last one included, as the published counts have it."""
    with gzip.open(TRACES / f"{name}.jsonl.gz", "rt") as lines:
        for line in lines:
            ids = np.array(json.loads(line)["hash_ids"], np.uint64)
            labels = np.zeros((ids.size, 32), np.uint8)
            labels[:, :8] = ids.view(np.uint8).reshape(-1, 8)
            yield labels


def hits(name: str, capacity: int) -> int:
    catalog = Catalog([TierSpec(Tier.HOST, capacity)], block_size=512, labels="hash")
    root = catalog.root(bytes(32))
    total = 0
    for request, labels in enumerate(chains(name), 1):
        hit = catalog.match([root], labels, 0, request).hit
        total += hit
        usage = catalog.usage(Tier.HOST)
        room = min(len(labels) - hit, usage.free + catalog.evictable(Tier.HOST))  # a chain may be longer than the tier
        slots = catalog.take(Tier.HOST, room, request)
        nodes = catalog.insert(root, labels[: hit + room], request)
        catalog.adopt(Tier.HOST, nodes[hit:], slots, request)
        catalog.release(request)
    catalog.check()
    return total


@pytest.mark.parametrize(
    ("name", "capacity", "expected"),
    [
        ("conversation-first-half", 1_000, 6_644),
        ("conversation-first-half", 3_000, 9_966),
        ("conversation-first-half", 10_000, 31_903),
        ("conversation-first-half", 30_000, 48_349),
        ("synthetic", 1_000, 10_252),
        ("synthetic", 3_000, 23_226),
        ("synthetic", 10_000, 51_669),
        ("synthetic", 30_000, 76_077),
    ],
)
def test_lru_hits_are_the_known_ones_hit_for_hit(name: str, capacity: int, expected: int) -> None:
    assert hits(name, capacity) == expected

"""Memory stays within the stated formula: the parts one by one, and the whole as the system counts it."""

from __future__ import annotations

import subprocess
import sys
from itertools import product

import pytest

from kvtier import CacheConfig, CacheManager, ConfigError, DevicePool, KVGeometry
from kvtier.budget import Allowance, check_memory, memory_bound
from kvtier.catalog import Catalog, Tier, TierSpec
from kvtier.catalog import memory_bound as catalog_bound
from kvtier.content import label_bytes

SLOTS = [(32, 32, 0), (100, 4000, 32000), (5000, 60000, 0), (0, 1, 0)]


@pytest.mark.parametrize(("slots", "block_size"), list(product(SLOTS, [1, 4, 16, 128])))
def test_the_catalog_takes_no_more_than_its_formula_says(slots, block_size):
    tiers = [TierSpec(tier, n) for tier, n in zip((Tier.DEVICE, Tier.HOST, Tier.DISK), slots, strict=True) if n]
    actual = Catalog(tiers, block_size=block_size, labels="content").memory_bytes
    bound = catalog_bound(sum(slots), len(tiers), label_bytes(block_size))
    assert actual <= bound <= 2 * actual


SCRIPT = """
import sys, numpy as np
from pathlib import Path
from kvtier import CacheConfig, CacheManager, DevicePool, KVGeometry, Namespace
import kvtier.plane

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

geometry = KVGeometry.named("smollm2-135m", block_size=4)
names = Namespace(
    model="m", revision="1", dtype="bfloat16", rope={}, layout=geometry.layout_tag, attention="a", block_size=4
)
pool = DevicePool.allocate(geometry, 64)
pool.fill(np.arange(64), 1)
config = CacheConfig(block_size=4, host={"size": "256MiB"}, disk={"path": sys.argv[1], "size": "64MiB"})
before = resident()
with CacheManager(config, geometry, names, pool) as manager:
    for i in range(80):
        tokens = [i * 1000 + t for t in range(100)]
        manager.get_computed_blocks("r", tokens)
        while manager.allocate_slots("r", 100) is None:
            manager.poll(0.1)
        while not manager.ready("r"):
            manager.poll(0.1)
        manager.cache_blocks("r", 100)
        manager.free("r")
    assert manager.flush()
    print(resident() - before, manager.plane.memory.total)
"""


def test_a_whole_cache_takes_no_more_than_its_formula_says(tmp_path):
    run = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    taken, bound = map(int, run.stdout.split())
    modules = 24 << 20  # what Python itself takes when threads start and modules load
    assert 256 << 20 <= taken <= bound + modules


def test_what_the_machine_cannot_give_is_refused_before_anything_is_taken():
    bound = memory_bound(1 << 30, 4096, catalog=5 << 20)
    with pytest.raises(ConfigError, match=r"host\.size: the cache needs .*catalog 5 MiB"):
        check_memory(bound, Allowance(available=1 << 29, total=1 << 34, group_left=None, group_limit=None))


def test_more_than_the_machine_has_leaves_nothing_behind(namespace, tmp_path):
    geometry = KVGeometry.named("smollm2-135m", block_size=4)
    config = CacheConfig(block_size=4, host={"size": "900TiB"}, disk={"path": tmp_path, "size": "8MiB"})
    pool, namespace = DevicePool.allocate(geometry, 4), namespace.with_(layout=geometry.layout_tag)
    with pytest.raises(ConfigError, match=r"host\.size"):
        CacheManager(config, geometry, namespace, pool)
    smaller = CacheConfig(block_size=4, host={"size": "8MiB"}, disk={"path": tmp_path, "size": "8MiB"})
    CacheManager(smaller, geometry, namespace, pool).close()  # the store is nobody's

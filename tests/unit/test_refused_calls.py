"""What is refused at the door: parts that do not fit, calls after the end, and arguments that mean nothing."""

from __future__ import annotations

import gc
import math

import numpy as np
import pytest

from kvtier import CacheConfig, ConfigError
from kvtier.catalog import Tier
from kvtier.geometry import KVGeometry
from kvtier.manager import CacheManager
from kvtier.tiers.device import DevicePool

BLOCK = 4
PROMPT = list(range(100, 100 + 6 * BLOCK + 1))


@pytest.fixture
def geometry():
    return KVGeometry.named("smollm2-135m", block_size=BLOCK)


@pytest.fixture
def manager(geometry, namespace):
    config = CacheConfig(block_size=BLOCK, host={"size": "4MiB"})
    with CacheManager(config, geometry, namespace, DevicePool.allocate(geometry, 32)) as manager:
        yield manager


def test_refuses_a_pool_whose_pages_mean_something_else(geometry, namespace):
    other = geometry.with_(layout="stacked.2bnhd" if geometry.layout != "stacked.2bnhd" else "stacked.b2hnd")
    assert other.page_bytes == geometry.page_bytes
    with pytest.raises(ConfigError, match=r"^geometry: .* given, .* of the device pool; they must agree"):
        CacheManager(CacheConfig(block_size=BLOCK), geometry, namespace, DevicePool.allocate(other, 8))


def test_a_pool_belongs_to_one_cache_at_a_time(geometry, namespace):
    pool, config = DevicePool.allocate(geometry, 8), CacheConfig(block_size=BLOCK, host={"size": "1MiB"})
    first = CacheManager(config, geometry, namespace, pool)
    with pytest.raises(ConfigError, match="device: another cache has this pool"):
        CacheManager(config, geometry, namespace, pool)
    first.close()
    CacheManager(config, geometry, namespace, pool).close()
    with pytest.raises(ConfigError, match=r"host\.size"):
        CacheManager(CacheConfig(block_size=BLOCK, host={"size": 1}), geometry, namespace, pool)
    CacheManager(config, geometry, namespace, pool).close()  # one that could not be made holds nothing


def test_two_caches_share_no_byte_of_the_device(geometry, namespace):
    arrays, config = geometry.allocate(8), CacheConfig(block_size=BLOCK, host={"size": "1MiB"})
    first = CacheManager(config, geometry, namespace, DevicePool(geometry, arrays))
    with pytest.raises(ConfigError, match=r"device: this pool of 8 slots shares memory with one of 8 slots that anoth"):
        CacheManager(config, geometry, namespace, DevicePool(geometry, arrays))
    other = CacheManager(config, geometry, namespace, DevicePool(geometry, geometry.allocate(8)))
    first.close()
    again = CacheManager(config, geometry, namespace, DevicePool(geometry, arrays))
    del again  # never closed, but gone
    gc.collect()
    CacheManager(config, geometry, namespace, DevicePool(geometry, arrays)).close()
    other.close()


def test_pools_that_take_turns_in_one_buffer_share_no_byte():
    layers = KVGeometry(layers=2, kv_heads=1, head_dim=16, dtype="float32", block_size=16, layout="split.bnhd")
    buffer = np.zeros((8, 8, 16, 1, 16), np.float32)  # slots, four layers' K and V
    halves = [[buffer[:, index] for index in part] for part in (range(4), range(4, 8), range(3, 7))]
    a, b, across = (layers.adopt(half) for half in halves)
    assert not a.shares_memory(b)
    assert across.shares_memory(a)
    assert across.shares_memory(b)
    upper, lower = (layers.adopt([array[part] for array in halves[0]]) for part in (slice(4, 8), slice(0, 4)))
    assert not upper.shares_memory(lower)
    assert upper.shares_memory(a)


def test_a_closed_cache_begins_and_changes_nothing(manager):
    manager.get_computed_blocks("open", PROMPT)
    manager.allocate_slots("open", len(PROMPT))
    manager.close()
    for call in (
        lambda: manager.get_computed_blocks("b", PROMPT),
        lambda: manager.allocate_slots("open", len(PROMPT) + 1),
        lambda: manager.append_tokens("open", [1]),
        lambda: manager.cache_blocks("open", 1),
        lambda: manager.preempt("open"),
        lambda: manager.expect("e", PROMPT, 0.1),
        lambda: manager.prefetch(PROMPT),
        lambda: manager.evict(Tier.DEVICE, PROMPT),
        manager.invalidate,
        manager.reset,
        manager.__enter__,
    ):
        with pytest.raises(ValueError, match="the cache is closed"):
            call()
    manager.free("open")
    assert manager.poll() == []
    assert manager.stats().requests == 1


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("request_id", lambda m: m.get_computed_blocks(["a"], PROMPT)),
        ("request_id", lambda m: m.expect(None, PROMPT, 0.1)),
        ("tokens", lambda m: m.get_computed_blocks("b", None)),
        ("tokens", lambda m: m.get_computed_blocks("b", 5)),
        ("tokens", lambda m: m.get_computed_blocks("b", "words")),
        ("media", lambda m: m.get_computed_blocks("b", PROMPT, media=5)),
        ("media\\[0\\]", lambda m: m.get_computed_blocks("b", PROMPT, media=[(1.9, 2, bytes(32))])),
        ("media\\[0\\]", lambda m: m.get_computed_blocks("b", PROMPT, media=[(2**70, 2, bytes(32))])),
        *(("num_tokens", lambda m, n=n: m.allocate_slots("a", n)) for n in (1.5, 16.0, True, "5", None, 0, -1)),
        *(("num_computed_tokens", lambda m, n=n: m.cache_blocks("a", n)) for n in (1.5, -1, -17, None, "1", True)),
        *(("timeout", lambda m, t=t: m.poll(t)) for t in (math.nan, math.inf, -1, "x", None)),
        *(("timeout", lambda m, t=t: m.flush(t)) for t in (math.nan, math.inf, -1, "x", None)),
        *(("within", lambda m, t=t: m.expect("e", PROMPT, t)) for t in (math.nan, math.inf, "soon", None)),
        *(("within", lambda m, t=t: m.prefetch(PROMPT, within=t)) for t in (math.nan, math.inf, "soon")),
        *(("within", lambda m, w=w: m.reorder(w)) for w in (["q"], {"e": math.nan}, {"e": "soon"}, {"e": True})),
        *(
            ("positions", lambda m, p=p: m.expect("e", PROMPT, 0.1, positions=p))
            for p in (
                5,
                (5, 5),
                (-1, 2),
                (0, 1.5),
                (0, 1, 2),
                [],
                [(0, 1)],
                [(0, 1, -1)],
                [(0, 1, math.nan)],
                [(2, 1, 0)],
            )
        ),
        *(("new_tokens", lambda m, n=n: m.observe_prefill(n, 0, 0.1)) for n in (0, -5, 1.5, "10")),
        *(("context", lambda m, n=n: m.observe_prefill(1, n, 0.1)) for n in (-5, 1.5, "10")),
        *(("seconds", lambda m, t=t: m.observe_prefill(1, 0, t)) for t in (math.nan, -1, "x")),
        ("flush_seconds", lambda m: m.close(math.nan)),
    ],
)
def test_an_argument_that_means_nothing_is_named_and_changes_nothing(manager, name, call):
    manager.get_computed_blocks("a", PROMPT)
    manager.allocate_slots("a", len(PROMPT))
    before = manager.stats()
    with pytest.raises(ValueError, match=rf"^{name}[^\n]*(accepted|expected)[^\n]*$"):
        call(manager)
    assert manager.stats() == before


@pytest.mark.parametrize("wrong", [None, "x", [1], {"host": {}}])
def test_a_part_of_another_kind_is_named(geometry, namespace, wrong):
    right = {
        "config": CacheConfig(block_size=BLOCK),
        "geometry": geometry,
        "namespace": namespace,
        "device": DevicePool.allocate(geometry, 8),
    }
    for name in right:
        with pytest.raises(ValueError, match=rf"^{name}: .*accepted: a "):
            CacheManager(**(right | {name: wrong}))
    with pytest.raises(ValueError, match=r"^geometry: .*accepted: a KVGeometry"):
        DevicePool(wrong, [])
    with pytest.raises(ValueError, match=r"^model: .*accepted: a string|^model 'x' is not known"):
        KVGeometry.named(wrong, block_size=4)


def test_a_pool_that_no_memory_can_hold_is_refused_by_its_size(geometry):
    with pytest.raises(ValueError, match=r"^device pool: slots is 1000000000000, of .* in all"):
        DevicePool.allocate(geometry, 10**12)

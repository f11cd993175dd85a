"""Copying down ahead of need: what is copied is what goes next, and there is an end to it."""

import pytest

from kvtier.catalog import Tier
from kvtier.config import CacheConfig
from kvtier.geometry import KVGeometry
from kvtier.manager import CacheManager
from kvtier.sim.events import EventPlane
from kvtier.sim.names import BlockNames

BLOCK = 4


@pytest.mark.parametrize("host", [2, 3, 5, 8, 20])
@pytest.mark.parametrize(("low", "high"), [(0.1, 0.2), (0.5, 1.0), (0.9, 1.0)])
def test_copying_ahead_comes_to_an_end_in_a_host_of_any_size(host, low, high, namespace):
    plane = EventPlane({Tier.DEVICE: 12, Tier.HOST: host})
    config = CacheConfig(block_size=BLOCK, host={"write": "ahead"}, watermarks={"low": low, "high": high})
    geometry = KVGeometry.named("smollm2-135m", block_size=BLOCK)
    namespace = namespace.with_(layout=geometry.layout_tag)
    manager = CacheManager(config, geometry, namespace, None, plane=plane, clock=plane.clock)
    for number in range(3):
        prompt = list(range(100 * number, 100 * number + 4 * BLOCK))
        manager.get_computed_blocks("a", prompt)
        table = manager.allocate_slots("a", len(prompt)).tolist()
        identities = BlockNames(namespace.fingerprint, 0, BLOCK).extend(prompt)
        for slot, identity in zip(table, identities, strict=True):
            plane.write(slot, identity)
        manager.cache_blocks("a", len(prompt))
        manager.free("a")
        assert manager.flush(10.0), "it copies for ever"
    pages = manager.stats().bytes_moved["device_to_host"] // 4096
    assert pages <= 12 + host, "pages were copied again and again"
    cold = manager.catalog.cold(Tier.DEVICE, min(host, 1), Tier.HOST)
    assert not len(cold), "the next page to go has no copy below"

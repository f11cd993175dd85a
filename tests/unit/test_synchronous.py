"""Who waits for a load: its request, beside the engine's steps, or the step."""

import numpy as np
import pytest

from kvtier.catalog import Tier
from kvtier.choice import _DETOUR, _LONGEST, is_synchronous
from kvtier.config import CacheConfig
from kvtier.layers import Layers
from kvtier.offload import OffloadManager
from tests.unit.test_offload import BLOCK, blocks, chain
from tests.unit.timed_plane import TimedPlane

HOST, DISK = Tier.HOST, Tier.DISK
PAGE = 1 << 20


def tiers(*found):
    return np.array(found, np.uint8)


@pytest.mark.parametrize(
    ("found", "load_s", "others", "waits"),
    [
        ((HOST, HOST), 0.01, 0, True),
        ((HOST, HOST), _LONGEST, 0, True),
        ((HOST, HOST), 1.01 * _LONGEST, 0, False),  # somebody may come meanwhile
        ((HOST, HOST), None, 0, False),  # nothing is known of the lane
        ((HOST, DISK), 1e-6, 0, False),  # a disk may stall
        ((DISK,), 1e-6, 0, False),
        ((), 0.0, 0, False),
        ((HOST,), _DETOUR, 1, True),
        ((HOST,), _DETOUR, 2, False),  # two wait for as long as one gains
        ((HOST,), _DETOUR / 8, 8, True),
    ],
)
def test_a_step_waits_only_where_all_together_wait_less_than_one_gains(found, load_s, others, waits):
    assert is_synchronous(tiers(*found), load_s, others) is waits, "it should" if waits else "it should not"


class Rig:
    """A manager over lanes of known speeds, and an engine that does what it is told."""

    def __init__(self, namespace, mode, layers=None, **config):
        self.plane = TimedPlane({Tier.DEVICE: 64, Tier.HOST: 16, Tier.DISK: 32})
        config = CacheConfig(block_size=BLOCK, load_policy="always", **config)
        self.manager = OffloadManager(
            config, namespace, self.plane, load_mode=mode, layers=layers, clock=lambda: self.plane.now
        )
        self.told = []

    def settle(self):
        while self.manager.placement.under_way:
            self.plane.advance(0.1)
            self.told += self.manager.poll()

    def compute(self, name, hashes, *ids):
        self.manager.match(name, hashes[:0])
        self.manager.store(name, hashes, blocks(*ids))
        self.settle()
        self.manager.free(name)


def test_the_first_load_tells_how_fast_the_lane_is(namespace):
    rig = Rig(namespace, "auto")
    rig.compute("a", chain(6), *range(6))
    assert not rig.manager.match("b", chain(6)).synchronous
    assert not rig.manager.load("b", blocks(*range(10, 16))).synchronous
    rig.settle()
    assert rig.manager.match("c", chain(6)).synchronous
    assert not rig.manager.match("c", chain(6), others=10_000).synchronous
    assert rig.manager.match("c", chain(6)).synchronous
    assert rig.manager.load("c", blocks(*range(20, 26))).synchronous


def test_the_mode_may_forbid_and_force_it_but_not_from_disk(namespace):
    for mode, waits in (("async", False), ("sync", True)):
        rig = Rig(namespace, mode)
        rig.compute("a", chain(6), *range(6))
        rig.compute("b", chain(8, b"b"), *range(8))
        assert rig.manager.match("c", chain(6), others=99).synchronous is waits
        rig.manager.free("c")
        rig.compute("d", chain(12, b"d"), *range(12))  # pushes some of them out of host memory
        found = rig.manager.match("e", chain(6))
        assert found.blocks_by_tier.get("disk")
        assert not found.synchronous


def test_it_comes_layer_by_layer_and_no_later_than_a_step_may_wait(namespace):
    rig = Rig(namespace, "sync", Layers(4, PAGE), load_timeout_seconds=30.0)
    rig.compute("a", chain(4), *range(4))
    rig.manager.match("b", chain(4), 1)
    loading = rig.manager.load("b", blocks(7, 5, 6))
    order = rig.plane.log[-1]
    assert loading.tickets == (order.ticket,)
    assert order.cuts == tuple(PAGE // 4 * (layer + 1) for layer in range(4))
    assert order.slots[-1].tolist() == [7, 5, 6]
    assert 0 < order.deadline - rig.plane.now <= 1.0


def test_what_is_computed_beside_it_is_stored_at_once_and_again_where_it_was_void(namespace):
    rig = Rig(namespace, "sync")
    rig.compute("a", chain(4), *range(4))
    rig.manager.match("b", chain(6))
    rig.manager.load("b", blocks(*range(10, 14)))
    assert rig.manager.stored("b") == 0
    assert rig.manager.store("b", chain(6), blocks(*range(10, 16)))
    assert rig.manager.stored("b") == 6
    rig.settle()
    assert [(told.request_id, told.blocks) for told in rig.told] == [("b", 4)]
    rig.manager.recompute("b")
    assert rig.manager.stored("b") == 0
    assert rig.manager.store("b", chain(6), blocks(*range(10, 16))) == (), "all of it is there"
    assert rig.manager.store("b", chain(7)[6:], blocks(16))
    rig.settle()
    rig.manager.free("b")
    assert rig.manager.catalog.stats()["leases"] == 0
    assert rig.manager.match("c", chain(7)).blocks == 7
    rig.manager.recompute("nobody")

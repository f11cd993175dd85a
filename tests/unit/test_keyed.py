"""KeyedPages, call by call: what a cache that asks for single pages may rely on."""

import hashlib

import numpy as np
import pytest

from kvtier.catalog import Tier
from kvtier.config import CacheConfig
from kvtier.keyed import Key, KeyedPages
from kvtier.sim.plane import Faults, SimulatedPlane


def key(n, group=0):
    return Key(hashlib.sha256(b"%d" % n).digest(), group)


def slots(*ids):
    return np.array(ids, np.uint32)


class Rig:
    """Over a simulated data plane, whose slots of the other cache hold what their keys say."""

    def __init__(self, namespace, host=8, disk=32, **config):
        self.plane = SimulatedPlane({Tier.DEVICE: 64, Tier.HOST: host, Tier.DISK: disk}, 1)
        self.config, self.namespace = CacheConfig(block_size=1, **config), namespace
        self.pages = KeyedPages(self.config, namespace, self.plane, clock=lambda: 0.0)
        self.jobs = 0

    def store(self, keys, *ids):
        self.jobs += 1
        self.pages.store(self.jobs, keys, slots(*ids))
        for running in self.plane._running.values():
            if running.transfer.path[0] == Tier.DEVICE:
                for slot, identity in zip(running.transfer.slots[0], running.transfer.identities, strict=True):
                    self.plane.content[Tier.DEVICE][int(slot)] = identity[:32].tobytes()
        return self.settle()

    def load(self, keys, *ids):
        self.jobs += 1
        self.pages.load(self.jobs, keys, slots(*ids))
        return self.settle()

    def settle(self):
        """What became of each page of the only job."""
        ended = []
        for _ in range(1000):
            self.plane.step(8)
            ended += self.pages.poll()
            self.pages.catalog.check()
            if not self.pages.busy:
                assert self.pages.catalog.stats()["leases"] == 0
                (done,) = ended
                assert done.job == self.jobs
                return done.arrived.tolist()
        raise AssertionError("never settles")

    def found(self, *numbers):
        return [self.pages.find(key(n)) for n in numbers]


def test_a_page_is_found_by_its_key_alone_in_its_group_alone(namespace):
    rig = Rig(namespace)
    assert rig.store([key(1), key(2), key(3)], 5, 6, 7) == [True] * 3
    assert rig.found(3, 1, 4) == [True, True, False]
    assert not rig.pages.find(key(1, group=1))
    assert rig.load([key(3), key(1)], 10, 11) == [True, True]
    content = rig.plane.content[Tier.DEVICE]
    assert (content[10], content[11]) == (content[7], content[5])


def test_what_is_here_is_not_copied_again(namespace):
    rig = Rig(namespace)
    rig.store([key(1), key(2)], 5, 6)
    assert rig.store([key(2), key(3)], 8, 9) == [True, True]
    assert rig.pages.stats().bytes_moved["device_to_host"] == 3 * 4096


def test_pages_go_down_to_the_disk_and_come_back_from_it(namespace):
    rig = Rig(namespace, host=4)
    for n in range(12):
        rig.store([key(n)], n)
    assert rig.found(*range(12)) == [True] * 12
    assert rig.load([key(0), key(1)], 30, 31) == [True, True]
    assert rig.pages.stats().bytes_moved["disk_to_host"] == 2 * 4096


def test_of_a_load_that_fails_the_pages_that_came_are_told(namespace):
    rig = Rig(namespace, host=4)
    for n in range(12):
        rig.store([key(n)], n)
    assert rig.load([key(0), key(99), key(1)], 30, 31, 32) == [True, False, False], "up to what is not here"
    rig.plane._faults = Faults(page=1.0)
    assert rig.load([key(2), key(3)], 30, 31) == [False, False]
    rig.plane._faults = Faults()
    assert sum(rig.pages.stats().failures.values()) == 2


def test_more_than_the_host_holds_is_loaded_as_far_as_it_goes(namespace):
    rig = Rig(namespace, host=4)
    for n in range(12):
        rig.store([key(n)], n)
    came = rig.load([key(n) for n in range(6)], *range(30, 36))
    assert came[:4] == [True] * 4
    assert came == sorted(came, reverse=True)


def test_what_is_in_use_is_evicted_last(namespace):
    rig = Rig(namespace, host=4, disk=6)
    for n in range(6):
        rig.store([key(n)], n)
    rig.pages.touch([key(0), key(1)])
    for n in range(6, 10):
        rig.store([key(n)], n)
    assert rig.found(0, 1) == [True, True]
    assert rig.found(2, 3) == [False, False]


def test_draining_ends_every_job_and_a_reset_forgets_for_ever(namespace):
    rig = Rig(namespace)
    rig.store([key(1), key(2)], 5, 6)
    rig.jobs += 1
    rig.pages.load(rig.jobs, [key(1), key(2)], slots(20, 21))
    wait = rig.plane.wait
    rig.plane.wait = lambda timeout: (rig.plane.step(8), wait(0))[1]
    rig.pages.drain()
    assert [done.job for done in rig.pages.poll()] == [rig.jobs]
    rig.pages.reset()
    assert rig.found(1, 2) == [False, False]
    assert rig.store([key(1)], 5) == [True]
    assert rig.found(1, 2) == [True, False]


def test_a_job_needs_a_number_of_its_own(namespace):
    rig = Rig(namespace)
    rig.store([key(1)], 5)
    rig.pages.load(7, [key(1)], slots(9))
    with pytest.raises(ValueError, match="job: 7 is under way"):
        rig.pages.load(7, [key(1)], slots(9))


def test_nothing_to_do_is_done_at_once(namespace):
    rig = Rig(namespace)
    assert rig.load([key(1)], 9) == [False]
    assert rig.load([]) == []

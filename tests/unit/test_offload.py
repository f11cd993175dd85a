"""OffloadManager, call by call: what an engine with device blocks of its own may rely on."""

import hashlib
from types import SimpleNamespace

import numpy as np
import pytest

from kvtier.catalog import Tier
from kvtier.choice import Choice
from kvtier.config import CacheConfig, ConfigError
from kvtier.messages import Priority
from kvtier.offload import OffloadManager
from kvtier.sim.plane import Faults, SimulatedPlane

BLOCK = 4


def chain(n, stem=b"a"):
    digests = [hashlib.sha256(stem).digest()]
    while len(digests) < n:
        digests.append(hashlib.sha256(digests[-1]).digest())
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32)


def blocks(*ids):
    return np.array(ids, np.uint32)


class Rig:
    """A manager over a simulated data plane whose bytes are right as long as blocks are given in time."""

    def __init__(self, namespace, host=8, disk=32, device=64, clock=lambda: 0.0, write="at_once", **config):
        capacity = {Tier.DEVICE: device, Tier.HOST: host} | ({Tier.DISK: disk} if disk else {})
        self.plane = SimulatedPlane(capacity, 1)
        config = CacheConfig(block_size=BLOCK, host={"write": write}, **config)
        self.manager = OffloadManager(config, namespace, self.plane, clock=clock)

    def compute(self, name, hashes, *ids):
        """Put the content of the blocks into the engine's blocks, and offer them."""
        manager = self.manager
        if name not in manager._requests:
            manager.match(name, hashes[:0])
        tickets = manager.store(name, hashes, blocks(*ids))
        for ticket in tickets:
            running = self.plane._running[ticket].transfer
            for slot, identity in zip(running.slots[0], running.identities, strict=True):
                self.plane.content[Tier.DEVICE][int(slot)] = identity[:32].tobytes()
        return tickets

    def settle(self):
        loaded = []
        for _ in range(1000):
            self.plane.step(8)
            loaded += self.manager.poll()
            if not self.manager.placement.under_way:
                return loaded
        raise AssertionError("never settles")

    def moved(self, lane):
        return self.manager.stats().bytes_moved.get(lane, 0) // 4096


def test_what_was_stored_is_found_behind_what_the_engine_has(namespace):
    rig = Rig(namespace, disk=0)
    rig.compute("a", chain(5), 1, 2, 3, 4, 5)
    rig.settle()
    rig.manager.free("a")
    found = rig.manager.match("b", chain(7), 2)
    assert (found.blocks, found.blocks_by_tier, found.waits) == (3, {"host": 3}, False)
    loading = rig.manager.load("b", blocks(11, 12, 13))
    assert loading.blocks == 3
    (loaded,) = rig.settle()
    assert (loaded.request_id, loaded.blocks, loaded.wanted) == ("b", 3, 3)
    assert rig.plane.content[Tier.DEVICE][11:14] == rig.plane.content[Tier.DEVICE][3:6]
    assert rig.manager.origin("b") == {"host": 3}
    assert rig.manager.stats().tokens_found == {"host": 3 * BLOCK}


def test_a_salt_is_a_namespace_of_its_own(namespace):
    rig = Rig(namespace, disk=0)
    rig.manager.match("a", chain(0), salt="t")
    rig.compute("a", chain(3), 1, 2, 3)
    rig.settle()
    rig.manager.free("a")
    for name, salt, found in (("b", "t", 3), ("c", None, 0), ("d", "u", 0)):
        assert rig.manager.match(name, chain(4), salt=salt).blocks == found, "a match left the salt out"
        rig.manager.free(name)


def test_nothing_is_stored_twice_not_even_while_it_is_on_its_way(namespace):
    rig = Rig(namespace, disk=0)
    rig.compute("a", chain(3), 1, 2, 3)
    assert rig.manager.store("a", chain(3)[3:], blocks()) == ()
    assert rig.compute("b", chain(4), 5, 6, 7, 8), "one block is new"
    rig.settle()
    assert rig.compute("c", chain(4), 9, 10, 11, 12) == ()
    assert rig.moved("device_to_host") == 4


def test_blocks_are_read_until_the_data_plane_says_so(namespace):
    rig = Rig(namespace, disk=0)
    (ticket,) = rig.compute("a", chain(3), 1, 2, 3)
    rig.manager.free("a")
    assert rig.manager.reading([9, 2]) == (ticket,)
    assert rig.manager.reading([9]) == ()
    assert rig.manager.busy
    rig.settle()
    assert rig.manager.reading([2]) == ()
    assert not rig.manager.busy


def test_pages_on_disk_come_up_and_those_who_ask_meanwhile_wait(namespace):
    rig = Rig(namespace, host=4)
    rig.compute("a", chain(4), 1, 2, 3, 4)
    rig.settle()
    rig.compute("b", chain(4, b"b"), 5, 6, 7, 8)
    rig.settle()
    assert rig.manager.match("c", chain(4)).blocks_by_tier == {"disk": 4}
    rig.manager.load("c", blocks(11, 12, 13, 14))
    asked = rig.manager.match("d", chain(4))
    assert (asked.blocks, asked.waits) == (0, True)
    assert [(done.request_id, done.blocks) for done in rig.settle()] == [("c", 4)]
    assert rig.manager.match("d", chain(4)).blocks_by_tier == {"host": 4}


def on_disk_alone(namespace, **options):
    """A rig in which the four blocks of ``chain(4)`` are on disk and no longer in host memory."""
    rig = Rig(namespace, host=4, **options)
    for name, stem, at in (("a", b"a", 1), ("b", b"b", 5)):
        rig.compute(name, chain(4, stem), *range(at, at + 4))
        rig.settle()
        rig.manager.free(name)
    return rig


def test_what_an_announced_request_will_read_is_in_host_memory_when_it_begins(namespace):
    rig = on_disk_alone(namespace, prefetch={"share": 0.9})
    rig.manager.expect("c", chain(4), 0.5)
    for _ in range(8):
        rig.settle()
    assert rig.manager.match("c", chain(4)).blocks_by_tier == {"host": 3, "disk": 1}, "more than the share allows"
    rig.manager.load("c", blocks(11, 12, 13, 14))
    assert [(done.blocks, done.wanted) for done in rig.settle()] == [(4, 4)]
    assert rig.manager.stats().prefetched == {"used": 3, "late": 1, "wasted": 0, "cancelled": 0}
    rig.manager.free("c")
    assert rig.manager.catalog.stats()["leases"] == 0


def test_who_begins_earlier_than_expected_hurries_what_is_on_its_way_and_orders_the_rest_itself(namespace):
    rig = on_disk_alone(namespace, prefetch={"share": 0.9})
    rig.manager.expect("c", chain(4), 5.0)
    rig.manager.poll()
    promoted, promote = [], rig.plane.promote

    def count(ticket, priority, deadline):
        promoted.append(priority)
        promote(ticket, priority, deadline)

    rig.plane.promote = count
    assert rig.manager.match("c", chain(4)).waits
    assert rig.manager.match("c", chain(4)).waits
    assert promoted == [Priority.DEMAND], "once is enough"
    rig.settle()
    found = rig.manager.match("c", chain(4))
    assert not found.waits
    assert sum(found.blocks_by_tier.values()) == 4
    rig.manager.load("c", blocks(11, 12, 13, 14))
    assert [(done.blocks, done.wanted) for done in rig.settle()] == [(4, 4)]


def test_no_more_is_brought_ahead_for_who_is_about_to_begin_unless_its_turn_is_put_off(namespace):
    rig = on_disk_alone(namespace, prefetch={"share": 0.9})
    rig.manager.costs.lane_speed = lambda lane: (0.0, 1.0)  # so slow that a part is a page
    rig.manager.expect("c", chain(4), 5.0)
    rig.manager.poll()
    ordered = rig.manager.placement.under_way
    assert 0 < ordered < 3
    assert rig.manager.match("c", chain(4)).waits
    rig.settle()
    rig.manager.poll()
    assert rig.moved("disk_to_host") == ordered, "it would load these itself, and faster"
    rig.manager.reorder({"c": 9.0})
    rig.manager.poll()
    rig.settle()
    assert rig.moved("disk_to_host") == 3, "all that the share allows"


def test_a_hint_ends_with_its_request_and_with_a_word(namespace):
    rig = on_disk_alone(namespace)
    for end in (rig.manager.free, rig.manager.dismiss):
        rig.manager.expect("c", chain(4), 0.1)
        rig.settle()
        rig.manager.reorder({"c": 1.0, "unknown": 2.0})
        end("c")
        rig.settle()
        assert rig.manager.catalog.stats()["leases"] == 0
    assert rig.manager.stats().prefetched["cancelled"] > 0
    with pytest.raises(ValueError, match="within"):
        rig.manager.expect("c", chain(4), float("nan"))


def test_a_look_ahead_brings_as_much_in_a_step_as_the_disk_gives_meanwhile(namespace):
    """An engine's step may take 50 ms, and orders one or two parts."""
    rig = Rig(namespace, host=18, disk=64, prefetch={"share": 0.9})
    for name, at in (("a", 1), ("b", 30)):
        rig.compute(name, chain(16, name.encode()), *range(at, at + 16))
        rig.settle()
        rig.manager.free(name)
    rig.manager._prefetcher._costs = SimpleNamespace(page_bytes=1 << 20, lane_speed=lambda lane: (0.0, 1e9))
    rig.manager.expect("c", chain(16), 0.1)
    rig.manager.poll()
    assert sum(running.transfer.slots.shape[1] for running in rig.plane._running.values()) == 14, (
        "two of them are in host memory"
    )


def test_a_look_ahead_orders_what_comes_until_the_next_step_of_the_engine(namespace):
    """In a step in which something has ended it orders one part: were that less, the disk would rest until the next."""
    now = [0.0]
    rig = Rig(namespace, host=32, disk=64, clock=lambda: now[0], prefetch={"share": 0.9, "grace_seconds": 1e3})
    rig.compute("a", chain(24), *range(1, 25))
    rig.settle()
    rig.manager.free("a")
    rig.manager.catalog.drop(Tier.HOST, rig.manager.catalog.native.contents(Tier.HOST)[1])
    rig.manager._prefetcher._costs = SimpleNamespace(page_bytes=1 << 20, lane_speed=lambda lane: (0.0, 1e8))
    rig.plane._random.randint = lambda least, most: most  # it reports all that has ended
    ordered = []
    for step in (0.0, 0.06, 0.06, 5.0):
        now[0] += step
        if not step:
            rig.manager.expect("c", chain(24), 100.0)
        rig.manager.poll()
        ordered.append([running.transfer.slots.shape[1] for running in rig.plane._running.values()])
        while rig.plane._running:
            rig.plane.step(8)
    assert ordered == [[1, 1], [5], [5], [9]]


def test_where_nothing_is_loaded_nothing_is_brought_ahead(namespace):
    rig = on_disk_alone(namespace, load_policy="never")
    rig.manager.expect("c", chain(4), 0.1)
    rig.settle()
    assert rig.moved("disk_to_host") == 0


def test_a_hint_looks_in_its_own_namespace(namespace):
    rig = on_disk_alone(namespace)
    rig.manager.expect("c", chain(4), 0.1, salt="another's")
    before = rig.moved("disk_to_host")
    rig.settle()
    assert rig.moved("disk_to_host") == before, "a hint left the salt out"


def test_waiting_for_others_has_an_end(namespace):
    now = [0.0]
    rig = Rig(namespace, host=4, clock=lambda: now[0], load_timeout_seconds=5.0)
    for name, at in (("a", 1), ("b", 5)):
        rig.compute(name, chain(4, name.encode()), *range(at, at + 4))
        rig.settle()
    rig.manager.match("c", chain(4))
    rig.manager.load("c", blocks(11, 12, 13, 14))
    assert rig.manager.match("d", chain(4)).waits
    now[0] = 6.0
    assert not rig.manager.match("d", chain(4)).waits


def test_a_failed_load_counts_up_to_the_failure_and_is_not_tried_again(namespace):
    rig = Rig(namespace, host=4)
    for name, at in (("a", 1), ("b", 5)):
        rig.compute(name, chain(4, name.encode()), *range(at, at + 4))
        rig.settle()
    rig.plane._faults = Faults(page=1.0)
    rig.manager.match("c", chain(4))
    rig.manager.load("c", blocks(11, 12, 13, 14))
    (loaded,) = rig.settle()
    assert (loaded.blocks, loaded.wanted) == (0, 4)
    rig.plane._faults = Faults()
    assert rig.manager.match("c", chain(4)).blocks == 0
    assert sum(rig.manager.stats().failures.values()) == 4


@pytest.mark.parametrize("state", ["matched", "loading", "running", "preempted", "unknown"])
def test_a_request_may_end_in_every_state(namespace, state):
    rig = Rig(namespace, disk=0)
    rig.compute("a", chain(4), 1, 2, 3, 4)
    rig.settle()
    rig.manager.free("a")
    if state != "unknown":
        assert rig.manager.match("b", chain(4)).blocks == 4
    if state == "loading":
        rig.manager.load("b", blocks(11, 12, 13, 14))
    if state in ("running", "preempted"):
        rig.compute("b", chain(5), 1, 2, 3, 4, 5)
    if state == "preempted":
        rig.manager.preempt("b")
    rig.manager.free("b")
    rig.manager.free("b")
    assert rig.settle() == []
    rig.manager.catalog.check()
    assert rig.manager.catalog.stats()["leases"] == 0
    assert rig.manager.catalog.usage(Tier.HOST).pinned == 0


def test_a_promise_ends_when_the_request_does_not_come_back(namespace):
    now = [0.0]
    rig = Rig(namespace, disk=0, clock=lambda: now[0], lease_seconds=5.0)
    rig.compute("a", chain(4), 1, 2, 3, 4)
    rig.settle()
    rig.manager.match("b", chain(4))
    assert rig.manager.catalog.usage(Tier.HOST).pinned == 4
    now[0] = 6.0
    rig.manager.poll()
    assert rig.manager.catalog.usage(Tier.HOST).pinned == 0
    with pytest.raises(ValueError, match="was promised 0"):
        rig.manager.load("b", blocks(11))
    assert rig.manager.match("b", chain(4)).blocks == 4


def test_a_prefix_is_loaded_only_as_far_as_that_is_faster(namespace):
    rig = Rig(namespace, disk=0)
    rig.compute("a", chain(6), 1, 2, 3, 4, 5, 6)
    rig.settle()
    assert rig.manager.match("b", chain(6), 2).blocks == 4, "what is not known yet is loaded"
    choices = []

    def choose(costs, tiers, filling, tokens, block, now, *, foreign):
        assert foreign, "the device is the engine's"
        choices.append((tiers.tolist(), filling.tolist(), tokens, block))
        return Choice(3, 6, None, None, None, None, "")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvtier.offload.choose", choose)
        assert rig.manager.match("b", chain(6), 2, tokens=27).blocks == 1
    assert choices == [([Tier.DEVICE] * 2 + [Tier.HOST] * 4, [0] * 6, 27, BLOCK)]
    assert rig.manager.catalog.usage(Tier.HOST).pinned == 1, "and no more of it held"


@pytest.mark.parametrize(("policy", "blocks"), [("always", 4), ("never", 0)])
def test_a_fixed_policy_asks_no_model(namespace, policy, blocks):
    rig = Rig(namespace, disk=0, load_policy=policy)
    rig.compute("a", chain(4), 1, 2, 3, 4)
    rig.settle()
    assert rig.manager.match("b", chain(4)).blocks == blocks


def test_salt_and_adapter_separate(namespace):
    rig = Rig(namespace, disk=0)
    rig.compute("a", chain(4), 1, 2, 3, 4)
    rig.settle()
    assert rig.manager.match("b", chain(4), salt="tenant").blocks == 0
    assert rig.manager.match("c", chain(4), adapter=b"x" * 32).blocks == 0
    assert rig.manager.match("d", chain(4)).blocks == 4


def test_a_reset_voids_what_is_loading_and_keeps_what_runs_from_being_stored(namespace):
    rig = Rig(namespace, disk=0)
    rig.compute("a", chain(4), 1, 2, 3, 4)
    rig.settle()
    rig.manager.match("b", chain(4))
    rig.manager.match("c", chain(4))
    rig.manager.load("c", blocks(11, 12, 13, 14))
    assert rig.manager.reset() == ("c",)
    with pytest.raises(ValueError, match="was promised 0"):
        rig.manager.load("b", blocks(21))
    rig.settle()
    assert rig.manager.stored("a") is None
    assert rig.manager.match("e", chain(4)).blocks == 0
    rig.compute("e", chain(4), 31, 32, 33, 34)
    rig.settle()
    assert rig.manager.match("f", chain(4)).blocks == 4


def test_a_store_that_finds_no_room_is_dropped_and_counted(namespace):
    rig = Rig(namespace, host=2, disk=0)
    rig.compute("a", chain(4), 1, 2, 3, 4)
    rig.settle()
    assert rig.manager.stats().stores_dropped == 2
    assert rig.manager.match("b", chain(4)).blocks == 2


def test_second_use_stores_what_the_engine_found_again(namespace):
    rig = Rig(namespace, disk=0, write="second_use")
    assert rig.compute("a", chain(4), 1, 2, 3, 4) == ()
    rig.manager.match("b", chain(4), 3)
    rig.compute("b", chain(4), 1, 2, 3, 9)
    rig.settle()
    assert rig.moved("device_to_host") == 3


def test_a_write_policy_that_needs_a_device_of_its_own_is_refused(namespace):
    with pytest.raises(ConfigError, match="expected 'at_once', 'second_use' or 'never'"):
        Rig(namespace, write="ahead")


def test_calls_out_of_order_say_what_is_wrong(namespace):
    rig = Rig(namespace, disk=0)
    with pytest.raises(ValueError, match="not known"):
        rig.manager.load("a", blocks(1))
    rig.compute("a", chain(4), 1, 2, 3, 4)
    rig.settle()
    rig.manager.match("b", chain(4))
    rig.manager.load("b", blocks(11, 12))
    with pytest.raises(ValueError, match="is loading"):
        rig.manager.match("b", chain(4))
    with pytest.raises(ValueError, match="is loading"):
        rig.manager.store("b", chain(1), blocks(11))


@pytest.mark.parametrize(
    "bad", [chain(4)[:, :31], chain(4).astype(np.int64), chain(4)[0], [b"x" * 32], None], ids=lambda bad: type(bad)
)
def test_hashes_that_are_none_are_refused_where_they_are_given(namespace, bad):
    rig = Rig(namespace)
    rig.manager.match("a", chain(0))
    for call in (
        lambda: rig.manager.match("b", bad),
        lambda: rig.manager.expect("b", bad, 0.1),
        lambda: rig.manager.store("a", bad, blocks(1, 2, 3, 4)),
    ):
        with pytest.raises(ValueError, match=r"hashes: .*; accepted: .*uint8 \[blocks, 32\]"):
            call()
    assert rig.manager.poll() == []
    assert rig.manager.stats().requests == 1
    assert rig.manager.stored("a") == 0


@pytest.mark.parametrize("count", [3, 5])
def test_as_many_blocks_as_hashes_are_stored_or_none(namespace, count):
    rig = Rig(namespace)
    rig.manager.match("a", chain(0))
    with pytest.raises(ValueError, match=f"blocks: {count} for 4 hashes of request 'a'"):
        rig.manager.store("a", chain(4), blocks(*range(count)))
    assert rig.manager.stored("a") == 0, "it counts as offered"
    assert rig.compute("a", chain(4), 1, 2, 3, 4)
    rig.settle()
    assert rig.moved("device_to_host") == 4

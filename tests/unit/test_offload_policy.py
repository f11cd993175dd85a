"""What an engine that owns its blocks is told to load from a disk of known speed, in virtual time."""

import hashlib

import numpy as np
import pytest

from kvtier.catalog import Tier
from kvtier.config import CacheConfig
from kvtier.costmodel import CostModel
from kvtier.offload import OffloadManager
from tests.unit.timed_plane import TimedPlane

BLOCK = 4
BLOCKS = 32
EACH = 5e-3  # seconds to compute a block
ALL = (BLOCKS + 1) * EACH  # a prompt of a block more than can be loaded


class Engine:
    def __init__(self, namespace, host=2000, **config):
        self.plane = TimedPlane({Tier.DEVICE: 200, Tier.HOST: host, Tier.DISK: 2000})
        config = CacheConfig(block_size=BLOCK, **config)
        self.manager = OffloadManager(config, namespace, self.plane, clock=lambda: self.plane.now)
        self.count = 0

    def hashes(self, stem):
        digests = [hashlib.sha256(b"%d %d" % (stem, i)).digest() for i in range(BLOCKS)]
        return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32)

    def compute(self, first, last):
        self.plane.advance((last - first) * EACH)
        self.manager.observe_prefill((last - first) * BLOCK, first * BLOCK, (last - first) * EACH)

    def run(self, stem, own=0):
        """(seconds to the first token, blocks promised, blocks loaded) of a prompt of which the engine has ``own``."""
        self.count += 1
        name, began, hashes = f"r{self.count}", self.plane.now, self.hashes(stem)
        found = self.manager.match(name, hashes, own, tokens=(BLOCKS + 1) * BLOCK)
        assert not found.waits
        there = own
        if found.blocks:
            self.manager.load(name, np.arange(own, own + found.blocks, dtype=np.uint32))
            ended = []
            while not ended:
                self.plane.wait(0.005)
                ended = self.manager.poll()
            there += ended[0].blocks
        self.compute(there, BLOCKS + 1)
        took = self.plane.now - began
        first = self.manager.stored(name) or 0
        self.manager.store(name, hashes[first:], np.arange(first, BLOCKS, dtype=np.uint32))
        self.manager.free(name)
        self.settle()
        return took, found.blocks, there - own

    def settle(self):
        for _ in range(20):
            self.plane.settle()
            self.manager.poll()

    def from_disk(self, stem, own=0):
        """The same, with nothing of it in host memory."""
        self.leave_on_disk(stem)
        return self.run(stem, own)

    def from_host(self, stem, own=0):
        """The same, with all of it in host memory."""
        assert self.in_host(stem) == BLOCKS
        return self.run(stem, own)

    def leave_on_disk(self, stem):
        self.settle()
        self.manager.catalog.drop(Tier.HOST, self.nodes(stem))
        self.manager.catalog.release(1)

    def wait(self, name, stem, own=0):
        """(seconds for which it waits for what is coming already, what is found at their end)."""
        began = self.plane.now
        while True:
            found = self.manager.match(name, self.hashes(stem), own, tokens=(BLOCKS + 1) * BLOCK)
            if not found.waits:
                return self.plane.now - began, found
            self.plane.advance(0.005)
            self.manager.poll()

    def in_host(self, stem):
        (there,) = self.manager.catalog.state(self.nodes(stem))[1][:, Tier.HOST].nonzero()
        self.manager.catalog.release(1)
        return len(there)

    def nodes(self, stem):
        root = self.manager._lookup.root(self.manager.namespace.fingerprint)
        return self.manager.catalog.insert(root, self.hashes(stem), 1)


@pytest.fixture
def engine(namespace):
    """One that knows every speed, with four prompts on disk."""
    made = Engine(namespace)
    for stem in range(4):
        made.run(stem)
        made.from_disk(stem)
    return made


@pytest.mark.parametrize("own", [0, 8])
def test_a_load_that_overruns_is_cut_before_it_costs_twice_as_much(engine, own):
    took, promised, loaded = engine.from_disk(1, own)
    assert (promised, loaded) == (BLOCKS - own, BLOCKS - own)
    assert took < ALL / 4
    engine.plane.lanes["stage"].rate = 10.0  # three seconds for the prompt
    took, promised, loaded = engine.from_disk(2, own)
    assert promised == BLOCKS - own, "nobody knows yet"
    assert loaded < BLOCKS - own
    assert took <= 2.3 * ALL
    assert engine.manager.stats().loads_cut == 1
    engine.from_disk(3, own)
    took, promised, _ = engine.from_disk(1, own)
    assert promised == 0
    assert took == pytest.approx(ALL * (BLOCKS + 1 - own) / (BLOCKS + 1))


@pytest.mark.parametrize("share", [0.5, 0.7, 0.85])
def test_a_load_that_overruns_and_is_faster_than_computing_still_is_not_cut(engine, share):
    engine.plane.lanes["stage"].rate = BLOCKS / (share * ALL)  # reported in parts: what has come is known late
    for stem in (0, 1, 2):
        took, promised, loaded = engine.from_disk(stem)
        assert (promised, loaded) == (BLOCKS, BLOCKS)
        assert took <= 1.1 * (share * ALL + EACH)
    assert engine.manager.stats().loads_cut == 0


def test_a_disk_of_large_pages_is_asked_for_two_as_one_alone_does_not_tell_its_rate(namespace):
    engine = Engine(namespace)
    engine.manager.probes._blocks = type(engine.manager.probes)(
        engine.manager.placement, CostModel(8 << 20), 1.0
    )._blocks
    for stem in range(4):
        engine.run(stem)
        engine.from_disk(stem)
    engine.plane.lanes["stage"].rate = 10.0
    for stem in range(3):
        before = engine.manager.probes.sent
        engine.from_disk(stem)
    assert engine.manager.probes.sent - before in (0, 2)
    assert engine.manager.probes.sent >= 2


def test_where_nothing_is_known_it_takes_at_most_about_twice_as_long(namespace):
    engine = Engine(namespace)
    for stem in range(2):
        engine.run(stem)
    engine.plane.lanes["stage"].rate = 1.0
    took, promised, _ = engine.from_disk(0)
    assert promised == BLOCKS
    assert took <= 2.3 * ALL


def test_a_disk_that_has_recovered_is_used_again(engine):
    stage = engine.plane.lanes["stage"]
    for rate, wanted in ((10.0, 0), (2000.0, BLOCKS)):
        stage.rate = rate
        for number in range(12):
            if engine.from_disk(number % 4)[1] == wanted:
                break
        else:
            raise AssertionError(f"not within twelve requests at {rate} pages a second")
    assert engine.manager.probes.sent > 0


@pytest.mark.parametrize("where", ["from_host", "from_disk"])
@pytest.mark.parametrize("own", [0, 8])
def test_a_lane_to_the_device_that_has_recovered_is_used_again(engine, where, own):
    onboard, serve = engine.plane.lanes["onboard"], getattr(engine, where)
    for rate, wanted in [(10.0, {0, 2}), (8000.0, {BLOCKS - own})] * 2:  # or two, to try it again
        onboard.rate = rate
        for number in range(30):
            if serve(number % 4, own)[1] in wanted:
                break
            engine.plane.advance(1.0)
        else:
            raise AssertionError(f"not within thirty requests at {rate} pages a second")
    for stem in range(4):
        assert serve(stem, own)[1] == BLOCKS - own


@pytest.mark.parametrize("fixed", [0.02, 0.5])
def test_a_first_load_that_was_slow_is_not_the_last(namespace, fixed):
    engine = Engine(namespace)
    for stem in range(4):
        engine.run(stem)
    engine.plane.lanes["onboard"].fixed = fixed
    engine.run(0)
    engine.plane.lanes["onboard"].fixed = 1e-4
    for number in range(30):
        engine.plane.advance(1.0)
        if engine.from_host(number % 4)[1] == BLOCKS:
            break
    assert engine.from_host(0)[0] < ALL / 4


def test_to_try_a_slow_lane_costs_little_and_is_rare(engine):
    engine.plane.lanes["onboard"].rate = 10.0
    for stem in range(3):
        engine.from_host(stem)
    began, served = engine.plane.now, [engine.from_host(number % 4) for number in range(100)]
    tried = [took for took, promised, _ in served if promised]
    assert {promised for _, promised, _ in served} == {0, 2}, "some try it, most do not"
    assert max(tried) <= ALL + 3 * EACH + 0.01, "no longer than to compute what it tries, and a step"
    assert sum(tried) - len(tried) * ALL <= 0.02 * (engine.plane.now - began)


def test_no_step_of_the_engine_waits_for_a_trial(namespace):
    plane = TimedPlane({Tier.DEVICE: 200, Tier.HOST: 2000, Tier.DISK: 2000})
    engine = Engine(namespace)
    engine.plane = plane
    engine.manager = OffloadManager(
        CacheConfig(block_size=BLOCK), namespace, plane, load_mode="auto", clock=lambda: plane.now
    )
    for stem in range(4):
        engine.run(stem)
    for slow in (False, True):
        plane.lanes["onboard"].rate = 60.0 if slow else 8000.0
        for stem in range(4):
            engine.run(stem)
    trials = []
    for _ in range(20):
        plane.advance(1.0)
        found = engine.manager.match("t", engine.hashes(0), tokens=(BLOCKS + 1) * BLOCK)
        trials.append((found.blocks, found.synchronous))
        engine.manager.free("t")
    assert set(trials) == {(2, False)}


def test_a_fixed_policy_waits_for_what_it_was_told_to_load(namespace):
    engine = Engine(namespace, load_policy="always", load_timeout_seconds=100.0)
    for stem in range(2):
        engine.run(stem)
        engine.from_disk(stem)
    engine.plane.lanes["stage"].rate = 10.0
    took, _, loaded = engine.from_disk(0)
    assert loaded == BLOCKS
    assert took > 10 * ALL
    assert engine.manager.stats().loads_cut == 0


# ---- waiting for what others bring, or its own look-ahead ------------------------------------------------------------


def coming(engine, stem, whose, rate, blocks=BLOCKS):
    """Has so much of the prompt ordered up from disk, for the request "w" or for another one, and the disk changed."""
    engine.leave_on_disk(stem)
    engine.manager.expect(whose, engine.hashes(stem)[:blocks], 0.0)
    engine.manager.poll()
    engine.plane.lanes["stage"].rate = rate


@pytest.mark.parametrize("whose", ["w", "another"])
@pytest.mark.parametrize("own", [0, 8])
def test_a_wait_that_overruns_is_given_up_before_it_costs_twice_as_much(engine, whose, own):
    coming(engine, 1, whose, 10.0)
    waited, found = engine.wait("w", 1, own)
    assert waited <= 1.3 * ALL, "computing would have been faster"
    assert found.blocks < BLOCKS - own
    assert engine.manager.stats().loads_cut == 1
    engine.manager.store("w", engine.hashes(1)[:0], np.empty(0, np.uint32))  # it computes
    engine.settle()
    assert engine.in_host(1) == BLOCKS, "what was on its way comes nevertheless"
    engine.manager.free("w")


def test_a_wait_is_weighed_at_the_pace_at_which_parts_come(engine):
    engine.manager.costs.lane_speed = lambda lane: (0.0, 200 << 20)  # so slow that a part is four pages
    coming(engine, 1, "another", 50.0)
    waited, found = engine.wait("w", 1)
    assert 4 <= found.blocks < BLOCKS / 2
    assert waited <= 0.7 * ALL, "the first parts tell that computing is faster"
    engine.settle()
    assert engine.in_host(1) == BLOCKS


@pytest.mark.parametrize("share", [0.5, 0.85])
def test_a_wait_that_overruns_and_is_faster_than_computing_still_goes_on(engine, share):
    coming(engine, 1, "another", BLOCKS / (share * ALL))
    waited, found = engine.wait("w", 1)
    assert (found.blocks, found.blocks_by_tier) == (BLOCKS, {"host": BLOCKS})
    assert waited <= share * ALL + 0.01
    assert engine.manager.stats().loads_cut == 0


def test_who_gives_up_waiting_goes_on_with_what_has_come_and_hurries_nobody_any_more(engine):
    coming(engine, 1, "another", 2000.0, BLOCKS // 2)
    engine.settle()
    engine.manager.expect("yet another", engine.hashes(1), 0.0)
    engine.manager.poll()
    engine.plane.lanes["stage"].rate = 1.0
    waited, found = engine.wait("w", 1)
    assert found.blocks_by_tier == {"host": BLOCKS // 2}
    assert waited <= 1.3 * ALL / 2, "computing the rest would have been faster"
    engine.manager.dismiss("yet another")
    engine.settle()
    engine.leave_on_disk(1)
    promoted = []
    engine.plane.promote = lambda *order: promoted.append(order)
    engine.manager.expect("a fourth", engine.hashes(1), 0.0)
    engine.manager.poll()
    assert engine.wait("w", 1)[0] == 0.0, "it waits once"
    assert not promoted, "with a deadline that has passed"


def test_a_fixed_policy_waits_for_what_is_coming_as_long_as_it_may(namespace):
    engine = Engine(namespace, load_policy="always", load_timeout_seconds=20.0)
    for stem in range(2):
        engine.run(stem)
        engine.from_disk(stem)
    coming(engine, 1, "another", 10.0)
    waited, found = engine.wait("w", 1)
    assert found.blocks_by_tier == {"host": BLOCKS}
    assert waited > 10 * ALL


def test_nothing_is_weighed_against_what_is_not_known(namespace):
    engine = Engine(namespace)
    engine.manager.observe_prefill = lambda *seen: None
    for stem in range(2):
        engine.run(stem)
    coming(engine, 1, "another", 10.0)
    waited, found = engine.wait("w", 1)
    assert found.blocks_by_tier == {"host": BLOCKS}
    assert waited > 10 * ALL


def test_a_steady_disk_that_is_late_is_waited_for_while_that_is_faster(engine):
    engine.manager.costs.lane_speed = lambda lane: (0.0, 200 << 20)  # so slow that a part is four pages
    coming(engine, 1, "another", BLOCKS / (0.75 * ALL))
    waited, found = engine.wait("w", 1)
    assert found.blocks_by_tier == {"host": BLOCKS}, "that parts had come was not seen"
    assert waited <= 0.75 * ALL + 0.01
    assert engine.manager.stats().loads_cut == 0


def host_has(engine, stem, first):
    """Of the prompt what lies behind its first blocks is in host memory, and parts of a load are four pages."""
    engine.settle()
    engine.manager.catalog.drop(Tier.HOST, engine.nodes(stem)[:first])
    engine.manager.catalog.release(1)
    engine.manager.costs.lane_speed = lambda lane: (0.0, 200 << 20)


def test_what_was_there_before_says_nothing_of_the_pace(engine):
    host_has(engine, 1, 24)
    engine.manager.expect("another", engine.hashes(1), 0.0)
    engine.manager.poll()
    engine.plane.lanes["stage"].rate = 4 / 0.06
    waited, found = engine.wait("w", 1)
    assert 4 <= found.blocks < 24
    assert waited <= 0.1, "what was in host memory already was taken for what had come"


def test_only_what_is_still_on_disk_is_waited_for(engine):
    host_has(engine, 1, 16)
    engine.manager.expect("another", engine.hashes(1), 0.0)
    engine.manager.poll()
    engine.plane.lanes["stage"].rate = 4 / 0.03
    waited, found = engine.wait("w", 1)
    assert found.blocks_by_tier == {"host": BLOCKS}, "it waited for what was in host memory already"
    assert waited <= 0.13
    assert engine.manager.stats().loads_cut == 0


def test_where_nothing_more_is_heard_each_order_that_is_left_counts(engine):
    engine.manager.costs.lane_speed = lambda lane: (0.0, 200 << 20)  # so slow that a part is four pages
    coming(engine, 1, "another", 2000.0)
    for _ in range(3):  # steps of less than a part
        assert engine.manager.match("w", engine.hashes(1), 0, tokens=(BLOCKS + 1) * BLOCK).waits
        engine.plane.advance(0.001)
        engine.manager.poll()
    engine.manager.poll()
    assert len(engine.plane.jobs) == 2
    engine.plane.lanes["stage"].rate = 10.0
    waited, found = engine.wait("w", 1)
    assert found.blocks >= 4
    assert waited <= ALL / 2, "one order that hangs stands for all"


def test_what_is_waited_for_in_vain_teaches_who_asks_next(engine):
    for stem in (1, 2, 3):
        engine.leave_on_disk(stem)
    engine.plane.lanes["stage"].rate = 1e-3  # nothing of it ends
    for stem in (1, 2):
        engine.manager.expect("another", engine.hashes(stem), 0.0)
        engine.manager.poll()
        engine.wait(f"w{stem}", stem)
        engine.manager.dismiss("another")
    assert engine.manager.stats().loads_cut == 2
    found = engine.manager.match("v", engine.hashes(3), 0, tokens=(BLOCKS + 1) * BLOCK)
    assert found.blocks == 0, "the disk is still taken for a fast one"


def test_a_wait_begins_anew_where_the_engine_did_not_ask_for_long(engine):
    coming(engine, 1, "another", 2000.0, BLOCKS // 2)
    assert engine.manager.match("w", engine.hashes(1), 0, tokens=(BLOCKS + 1) * BLOCK).waits
    engine.settle()
    engine.plane.advance(3.0)  # without a place for it
    engine.manager.expect("yet another", engine.hashes(1), 0.0)
    engine.manager.poll()
    waited, found = engine.wait("w", 1)
    assert found.blocks_by_tier == {"host": BLOCKS}, "a pause was taken for a wait"
    assert waited > 0
    assert engine.manager.stats().loads_cut == 0


@pytest.mark.parametrize("before", ["queued", "preempted", "gave up"])
def test_who_has_been_there_for_long_waits_like_a_new_one(engine, before):
    manager, hashes = engine.manager, engine.hashes(1)
    if before == "gave up":
        coming(engine, 1, "another", 10.0)
        engine.wait("w", 1)
        assert manager.stats().loads_cut == 1
        engine.plane.lanes["stage"].rate = 2000.0
        engine.settle()
    manager.match("w", hashes, 0, tokens=(BLOCKS + 1) * BLOCK)
    if before != "queued":
        manager.store("w", hashes, np.arange(BLOCKS, dtype=np.uint32))
    for _ in range(2 * round(manager.config.load_timeout_seconds + manager.config.lease_seconds)):
        engine.plane.advance(1.0)
        manager.poll()
    if before != "queued":
        manager.preempt("w")
    cuts = manager.stats().loads_cut
    manager.costs.seed_lane("stage", 1e-4, 2000.0 * (1 << 20))
    coming(engine, 1, "w", 2000.0)
    waited, found = engine.wait("w", 1)
    assert found.blocks_by_tier == {"host": BLOCKS}, "its look-ahead is passed over"
    assert waited > 0
    assert manager.stats().loads_cut == cuts


def test_the_waits_of_a_request_add_up(namespace):
    engine = Engine(namespace, load_policy="always", load_timeout_seconds=1.0)
    for stem in range(2):
        engine.run(stem)
        engine.from_disk(stem)
    coming(engine, 1, "another", 32.0, BLOCKS // 2)
    first, found = engine.wait("w", 1)
    assert 0.4 < first < 0.6
    assert found.blocks_by_tier == {"host": BLOCKS // 2, "disk": BLOCKS // 2}
    engine.manager.expect("yet another", engine.hashes(1), 0.0)
    engine.manager.poll()
    engine.plane.lanes["stage"].rate = 5.0
    second, found = engine.wait("w", 1)
    assert found.blocks < BLOCKS
    assert first + second == pytest.approx(1.0, abs=0.02)


def test_who_has_little_patience_left_ends_no_look_ahead_of_another(namespace):
    engine = Engine(namespace, load_policy="always", load_timeout_seconds=0.1)
    for stem in range(2):
        engine.run(stem)
        engine.from_disk(stem)
    coming(engine, 1, "another", 20.0)
    waited, found = engine.wait("w", 1)
    assert waited <= 0.11
    assert found.blocks < BLOCKS
    engine.settle()
    assert engine.manager.placement.failures == {}
    assert engine.in_host(1) == BLOCKS, "it was given up because somebody else waited for it too"

"""The front computed while the tail loads: both meet, whatever was predicted, and neither touches the other's slots."""

from __future__ import annotations

import random

import pytest

from kvtier.catalog import PageStatus, Residency, Tier
from tests.unit.test_load_policy import BLOCK, BLOCKS, EACH, Engine


class SplitEngine(Engine):
    """Asks before each pass whether it may skip."""

    def __init__(self, namespace, **options):
        super().__init__(namespace, **options)
        self.manager.can_split()
        self.skipped = 0

    def compute(self, name, first, last):
        while first < last:
            loaded = self.manager.skip(name)
            if loaded is not None:
                assert loaded.num_computed_tokens > first
                assert sum(loaded.tokens_by_tier.values()) == loaded.num_computed_tokens - first
                self.skipped += loaded.num_computed_tokens - first
                first = loaded.num_computed_tokens
            upto = min(last, first + BLOCK)
            own = self.manager.block_table(name)[first // BLOCK : -(-upto // BLOCK)]
            self.nobody_else_writes(own)
            seconds = (upto - first) / BLOCK * self.each
            self.plane.advance(seconds)
            self.manager.observe_prefill(upto - first, first, seconds, name)
            self.manager.cache_blocks(name, upto)
            self.manager.poll()
            first = upto

    def nobody_else_writes(self, own):
        for job in self.plane.jobs.values():
            if job.transfer.path[-1] is Tier.DEVICE:
                coming = job.transfer.slots[-1][job.status[-1] == PageStatus.PENDING]
                assert not set(own.tolist()) & set(coming.tolist()), "a late page would land in a computed block"


@pytest.fixture
def engine(namespace):
    engine = SplitEngine(namespace)
    engine.know()
    for stem in range(1, 4):
        engine.run(engine.tokens(stem))
    return engine


def at_crossover(engine):
    """Loading takes as long as computing."""
    engine.plane.lanes["stage"].rate = 1 / EACH
    engine.manager.costs.seed_lane("stage", 1e-4, (1 << 20) / EACH)


def test_where_both_are_close_the_split_beats_either(engine):
    at_crossover(engine)
    engine.skipped = 0
    seconds, _, name = engine.from_disk(1)
    assert 0.3 * BLOCKS * BLOCK < engine.skipped < 0.7 * BLOCKS * BLOCK, engine.manager.explain(name)
    assert seconds < BLOCKS * EACH / 1.6, engine.manager.explain(name)
    assert "computing the front while the tail loads" in engine.manager.explain(name)
    engine.manager.catalog.check()
    assert engine.run(engine.tokens(1))[1] == BLOCKS * BLOCK, "all of it is on the device now"


@pytest.mark.parametrize("factor", [0.05, 0.4, 2.5])
def test_they_meet_elsewhere_when_the_prediction_is_wrong(engine, factor):
    at_crossover(engine)
    engine.plane.lanes["stage"].rate *= factor
    seconds, _, name = engine.from_disk(1)
    assert seconds < 1.1 * BLOCKS * EACH, engine.manager.explain(name)
    engine.plane.settle()
    engine.manager.poll()
    engine.manager.catalog.check()
    assert engine.manager.stats().slots["device"]["pinned"] == 0


def test_far_from_the_crossover_nothing_is_split(engine):
    for rate in (2000.0, 5.0):
        engine.plane.lanes["stage"].rate = rate
        engine.manager.costs.seed_lane("stage", 1e-4, rate * (1 << 20))
        before = engine.skipped
        _, _, name = engine.from_disk(1)
        assert engine.skipped == before, engine.manager.explain(name)


@pytest.mark.parametrize("end", ["free", "preempt", "reset"])
def test_a_tail_ends_with_its_request(engine, end):
    at_crossover(engine)
    tokens, manager = engine.tokens(2), engine.manager
    engine.only_on_disk(tokens)
    assert manager.get_computed_blocks("s", tokens).num_tokens == 0
    assert manager.allocate_slots("s", len(tokens)) is not None
    assert manager.ready("s")
    engine.plane.advance(0.02)
    manager.poll()
    if end == "reset":
        manager.reset()
        assert manager.skip("s") is None
        manager.free("s")
    else:
        getattr(manager, end)("s")
        if end == "preempt":
            assert manager.resume("s").num_tokens >= 0
            manager.free("s")
    engine.plane.settle()
    manager.poll()
    manager.catalog.check()
    usage = manager.stats().slots["device"]
    assert usage["pinned"] == usage["private"] == usage["draining"] == usage["filling"] == 0


def test_a_promise_with_a_tail_expires(engine):
    at_crossover(engine)
    tokens, manager = engine.tokens(2), engine.manager
    engine.only_on_disk(tokens)
    manager.get_computed_blocks("s", tokens)
    engine.plane.advance(manager.config.lease_seconds + 1)
    manager.poll()
    assert manager.stats().slots["disk"]["pinned"] == 0
    manager.free("s")


def test_without_an_engine_that_can_nothing_is_split(namespace):
    engine = Engine(namespace)
    engine.know()
    engine.run(engine.tokens(1))
    at_crossover(engine)
    _, loaded, name = engine.from_disk(1)
    assert loaded in (0, BLOCKS * BLOCK), engine.manager.explain(name)


def test_a_tail_serves_what_was_computed_and_what_was_loaded(engine, seed):
    """Whatever the drive does, in the end every block of the table is on the device under its own name."""
    rng = random.Random(seed)
    for number in range(20):
        at_crossover(engine)
        engine.plane.lanes["stage"].rate *= rng.choice([0.1, 0.5, 1.0, 2.0, 10.0])
        tokens = engine.tokens(1 + number % 3)
        engine.only_on_disk(tokens)
        manager, name = engine.manager, f"t{number}"
        manager.get_computed_blocks(name, tokens)
        manager.allocate_slots(name, len(tokens))
        while not manager.ready(name):
            manager.poll(0.05)
        engine.compute(name, manager.num_computed_tokens(name), len(tokens))
        sequence = manager._sequences[name]
        assert sequence.cached == BLOCKS, f"seed {seed}"
        slots, residency = manager.catalog.state(sequence.nodes)
        shared = residency[:, Tier.DEVICE] == Residency.READY
        same = slots[:, Tier.DEVICE] == sequence.table[:BLOCKS]
        assert len(set(sequence.table.tolist())) == BLOCKS + 1, f"seed {seed}: a slot twice in a table"
        assert (same | ~shared).sum() >= BLOCKS // 2, f"seed {seed}"
        manager.catalog.check()
        manager.free(name)


def test_what_another_request_computed_is_held_once_it_is_in_the_table(engine):
    """It came to the device after the match, which holds what was found below: then nobody holds it there."""
    at_crossover(engine)
    tokens, manager = engine.tokens(2), engine.manager
    engine.only_on_disk(tokens)
    for name in ("s", "other"):
        assert manager.get_computed_blocks(name, tokens).num_tokens == 0
        assert manager.allocate_slots(name, len(tokens)) is not None
    manager.cache_blocks("other", len(tokens))
    manager.free("other")
    for _ in range(20):
        engine.plane.settle()
        manager.poll()
    # Of one block that "s" computes, no page is on the device when it skips the others.
    manager.cache_blocks("s", BLOCK)
    manager.catalog.drop(Tier.DEVICE, manager._sequences["s"].nodes)
    computed = BLOCK
    while (loaded := manager.skip("s")) is None:
        computed += BLOCK
        manager.cache_blocks("s", computed)
    assert loaded.num_computed_tokens == BLOCKS * BLOCK
    table = manager.block_table("s")[computed // BLOCK : BLOCKS].tolist()
    assert len(table) > BLOCKS // 2
    assert not set(manager.evict(Tier.DEVICE, tokens).tolist()) & set(table), "a slot of its table was given up"
    manager.catalog.check()
    manager.free("s")
    assert all(manager.catalog.usage(tier).pinned == 0 for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK))

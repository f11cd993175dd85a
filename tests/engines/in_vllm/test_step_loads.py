"""Loads that a step waits for: each layer finds its own part in place, and what was read too early is said."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs the environment that `make test-vllm` makes")

import torch

from kvtier.catalog import Tier
from kvtier.config import ConfigError
from kvtier.connectors.vllm import KVTierConnector, support
from kvtier.connectors.vllm.metadata import Load
from kvtier.connectors.vllm.settings import Settings
from kvtier.connectors.vllm.step_loads import StepLoads
from kvtier.layers import Layers
from kvtier.messages import Transfer
from tests.engines.in_vllm.test_vllm_sides import LAYERS, TOKENS, Engine, config, content, fill, request, store

NAMES = ["first", "second", "third"]
CUTS = (1024, 2048, 3072)
BLOCKS = np.array([7, 8], np.uint32)


class Rank:
    """What is asked of the data plane."""

    def __init__(self):
        self.asked, self.drained, self.there = [], [], True

    def wait_for_slices(self, ticket, count, timeout):
        self.asked.append((ticket, count))
        return self.there

    def drain(self, tickets, patience):
        self.drained += tickets


def order(ticket, cuts):
    slots = np.zeros((2, 2), np.uint32)
    return Transfer(ticket, (Tier.HOST, Tier.DEVICE), slots, np.zeros((2, 144), np.uint8), deadline=1.0, cuts=cuts)


class Step:
    """Passes of a model of three layers, of which only some may ask."""

    def __init__(self):
        self.rank, self.now = Rank(), 10.0
        self.loads = StepLoads(self.rank, Layers(3, 3072), NAMES, lambda: self.now)

    def run(self, *loads, ask=NAMES, ends=1):
        """``loads``: (request, ticket, cuts); returns who read what was not there."""
        self.begin(*loads)
        self.loads.before_pass()
        for name in ask:
            self.loads.wait_for_layer(name)
        late = self.loads.end(computed=True)
        for _ in range(ends - 1):
            for name in NAMES:
                self.loads.wait_for_layer(name)
            assert not self.loads.end(computed=True)
        return sorted(late)

    def begin(self, *loads):
        lost = np.empty(0, np.uint32)
        mine = {name: Load((ticket,), BLOCKS, lost, synchronous=True) for name, ticket, _ in loads}
        self.loads.begin(mine, [order(ticket, cuts) for _, ticket, cuts in loads])


def test_until_every_layer_was_seen_to_ask_a_load_is_there_before_the_pass():
    step = Step()
    step.begin(("a", 1, CUTS))
    step.loads.before_pass()
    assert step.rank.drained == [1]
    for name in NAMES:
        step.loads.wait_for_layer(name)
    assert not step.loads.end(computed=True)
    assert step.rank.asked == []


def test_then_each_layer_waits_for_its_own_part_of_every_load():
    step = Step()
    step.run()
    step.begin(("a", 1, CUTS), ("b", 2, CUTS), ("c", 3, ()))
    step.loads.before_pass()
    assert step.rank.drained == [3], "what comes whole is there before the pass"
    for number, name in enumerate(NAMES, 1):
        step.loads.wait_for_layer(name)
        step.loads.wait_for_layer(name)
        assert step.rank.asked == [(ticket, n) for n in range(1, number + 1) for ticket in (1, 2)]
    assert not step.loads.end(computed=True)
    assert step.rank.drained[1:] == [1, 2, 3], "nothing writes a block behind the pass"


def test_layers_of_a_step_without_loads_have_nothing_to_ask_once_all_were_seen_to():
    step = Step()
    step.begin()
    assert step.loads.asks, "nobody has seen it yet"
    step.run()
    step.begin()
    assert not step.loads.asks
    step.loads.end(computed=True)
    step.begin(("a", 1, CUTS))
    assert step.loads.asks
    asked = []
    connector = KVTierConnector.__new__(KVTierConnector)
    for asks in (False, True):
        connector._worker = SimpleNamespace(layers_ask=asks, wait_for_layer=asked.append)
        connector.wait_for_layer_load(f"asks: {asks}")
    assert asked == ["asks: True"]


def test_a_layer_that_is_in_no_page_waits_for_everything():
    step = Step()
    step.run()
    step.run(("a", 1, CUTS), ask=["shares another's", *NAMES])
    assert step.rank.asked == [(1, 3)]


def test_a_pass_in_which_a_layer_did_not_ask_may_have_read_too_early():
    step = Step()
    step.run()
    late = step.run(("a", 1, CUTS), ("b", 2, ()), ask=["first", "third"])
    assert late == ["a"], "nobody said that it read too early"
    assert step.run(("a", 3, CUTS)) == [], "it comes whole again"
    assert step.rank.drained.count(3) == 2
    assert step.run(("a", 4, CUTS)) == []
    assert step.rank.drained.count(4) == 1, "and by layers, now that all have asked"


def test_what_does_not_come_in_time_was_read_too_early():
    step = Step()
    step.run()
    step.rank.there = False
    assert step.run(("a", 1, CUTS)) == ["a"], "nobody said that it read too early"
    assert step.rank.asked == [(1, 1)], "nobody waits twice for what will not come"


def test_a_pass_that_was_not_announced_read_too_early():
    step = Step()
    step.run()
    step.begin(("a", 1, CUTS))
    assert step.loads.end(computed=True) == {"a"}


def test_layers_that_ask_behind_the_pass_are_no_part_of_it():
    step = Step()
    step.run(ask=["first"], ends=2)
    step.run(("a", 1, CUTS), ask=["first"], ends=2)
    assert step.rank.asked == [], "a draft's layers ask later than the step's loads are looked at"


def test_steps_without_a_pass_say_nothing_of_the_layers():
    step = Step()
    step.run()
    step.loads.begin({}, ())
    step.loads.end(computed=False)
    assert step.run(("a", 1, CUTS)) == []
    assert step.rank.asked


# ---- both sides, with real bytes -------------------------------------------------------------------------------------


class Evicting(Engine):
    """Of which vLLM's prefix cache can be told to forget blocks, and whose model has layers."""

    def __init__(self, extra, ranks=2):
        self.evicted, self.reading = set(), None
        super().__init__(extra, ranks)

    def connect(self):
        self.scheduler.bind(self.evicted.update)
        super().connect()


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr("kvtier.layers._SLICE_BYTES", 1)
    made = []

    def make(**extra):
        extra = {"host.size": "1MiB", "min_load_tokens": 0, "load_policy": "always", "load_mode": "sync"} | extra
        made.append(Evicting(extra))
        return made[-1]

    yield make
    for one in made:
        one.close()


def again(engine, name, tokens=TOKENS * 5 + 1, table=(5, 6, 7, 8, 9, 10)):
    """Admit a request of whose five full blocks four were stored; returns it and what it was promised."""
    one = request(name, tokens)
    engine.scheduler.begin(one)
    found = engine.scheduler.match(one, 0)
    engine.scheduler.allocated(one, list(table), found[0])
    return one, found


def compute(engine, kept, computed=(), table=(5, 6, 7, 8)):
    """A pass: each layer asks, then reads what was loaded. Returns whether each found what it should."""
    seen = []
    for worker in engine.workers:
        worker.before_pass()
    for layer in range(LAYERS):
        for worker, cache, was in zip(engine.workers, engine.caches, kept, strict=True):
            worker.wait_for_layer(f"layer.{layer}")
            seen.append(torch.equal(cache[layer, list(table)], was[layer]))
    fill(engine, computed)
    return seen


def test_each_layer_finds_its_part_and_nobody_is_told_of_the_end(engine):
    two = engine()
    kept, seen = store(two), []
    for number, blocks in enumerate((4, 5, 5)):  # whole, then by layers
        one, found = again(two, f"b{number}")
        assert found == (blocks * TOKENS, False), "what a step computed beside its load is stored in the same step"
        computed = range(5 + blocks, 10)
        two.step([(one, [5, 6, 7, 8, 9, 10], found[0])], lambda new=computed: seen.extend(compute(two, kept, new)))
        assert not two.invalid
        assert not two.finished
        assert not two.evicted
        two.scheduler.finish(one)
        two.until(lambda: not two.scheduler.busy)
    assert all(seen)
    assert len(seen) == 3 * 2 * LAYERS
    assert two.scheduler.manager.stats().tokens_found == {"host": 14 * TOKENS}
    assert two.scheduler.manager.catalog.stats()["leases"] == 0


def test_a_page_that_one_rank_lost_takes_all_that_was_computed_behind_it_along(engine):
    two = engine(**{"mover.verify_host": True})
    kept = store(two)
    arena = two.workers[1]._plane.host
    arena.page(1)[77] ^= 1
    one, found = again(two, "b")
    assert found == (4 * TOKENS, False)
    two.step([(one, [5, 6, 7, 8, 9, 10], 4 * TOKENS)], lambda: compute(two, kept, [9]))
    lost = min(two.invalid)
    assert two.invalid == {lost}
    assert two.evicted == set(range(lost, 11)), "vLLM would serve to others what is not there"
    assert not two.finished
    two.until(lambda: not two.scheduler.busy)
    manager = two.scheduler.manager
    assert manager.stored("b") == 0
    assert manager.stats().slots["host"]["ready"] == 3, "no block is ready that was computed behind it"
    two.invalid.clear()

    def compute_again():
        for cache, was in zip(two.caches, kept, strict=True):
            cache[:, lost:9] = was[:, lost - 5 :]
        fill(two, [9])

    two.step([(one, [5, 6, 7, 8, 9, 10], (lost - 5) * TOKENS)], compute_again)
    two.until(lambda: not two.scheduler.busy)
    assert not two.invalid
    assert manager.stats().slots["host"]["ready"] == 5, "what was computed again is stored"
    now = content(two, [5, 6, 7, 8, 9])
    two.scheduler.finish(one)
    other, found = again(two, "c", TOKENS * 6, (1, 2, 3, 4, 11, 12))
    assert found == (5 * TOKENS, False)
    seen = []
    table = [1, 2, 3, 4, 11]
    two.step([(other, [*table, 12], 5 * TOKENS)], lambda: seen.extend(compute(two, now, table=table)))
    assert not two.invalid
    assert all(seen)


def test_nobody_is_admitted_on_top_of_blocks_that_may_not_come(engine):
    two = engine()
    store(two)
    one, _ = again(two, "b")
    same, forks, other = request("c", TOKENS * 5 + 1), request("d", TOKENS * 5 + 1), request("e", TOKENS * 5 + 1, b"e")
    forks.block_hashes[2:] = [b"x" * 32, b"y" * 32, b"z" * 32]
    for name in (same, forks, other):
        two.scheduler.begin(name)
    found = two.scheduler.match(same, 3 * TOKENS)  # vLLM found them in its own cache
    assert found == (None, False), "admitted on top of what may not come"
    assert two.scheduler.match(forks, 2 * TOKENS) == (None, False)
    assert two.scheduler.match(other, 0) == (0, False)
    two.step([(one, [5, 6, 7, 8, 9, 10], 4 * TOKENS)], lambda: [w.before_pass() for w in two.workers])
    assert two.scheduler.match(same, 5 * TOKENS) == (0, False), "the step is over"


def test_it_is_asynchronous_where_a_failure_could_not_be_made_good(engine):
    two = engine()
    store(two)
    two.scheduler._evict = None
    assert two.scheduler._load_mode() == "async"
    two.scheduler._evict = two.evicted.update
    assert two.scheduler._load_mode() == "sync"
    two.config.scheduler_config.async_scheduling = True
    assert two.scheduler._load_mode() == "async"


def test_a_mode_that_cannot_be_served_is_refused_by_name():
    with pytest.raises(ConfigError, match="load_mode: 'always': expected 'auto', 'async' or 'sync'"):
        Settings.read({"load_mode": "always"}, TOKENS)
    with pytest.raises(ConfigError, match="load_mode: 1: expected"):
        Settings.read({"load_mode": 1}, TOKENS)
    wrong = config()
    wrong.scheduler_config.async_scheduling = True
    groups = type("Groups", (), {"kv_cache_groups": []})()
    with pytest.raises(ConfigError, match="load_mode: 'sync': expected 'auto' or 'async' with async_scheduling"):
        support.check(wrong, groups, Settings.read({"load_mode": "sync"}, TOKENS))

"""What is loaded and what is computed, decided on the real control plane over lanes of known speeds in virtual time."""

from __future__ import annotations

import pytest

from kvtier.catalog import PageStatus, Tier
from kvtier.config import CacheConfig
from kvtier.manager import CacheManager
from tests.unit.timed_plane import TimedPlane

BLOCK = 4
BLOCKS = 32
EACH = 5e-3  # seconds to compute a block


class Geometry:
    block_size = BLOCK
    dtype = "bfloat16"
    layout_tag = "test"


class Engine:
    """Computes a block in ``each`` seconds of virtual time, in passes of four blocks."""

    def __init__(self, namespace, device=200, host=400, disk=2000, each=EACH, write=("at_once", "at_once"), **config):
        self.plane = TimedPlane({Tier.DEVICE: device, Tier.HOST: host, Tier.DISK: disk})
        self.each = each
        self.manager = CacheManager(
            CacheConfig(block_size=BLOCK, host={"write": write[0]}, disk={"write": write[1]}, **config),
            Geometry(), namespace, None,
            plane=self.plane, clock=lambda: self.plane.now,
        )  # fmt: skip
        self.count = 0

    def tokens(self, stem, blocks=BLOCKS):
        return [stem * 100_000 + i for i in range(blocks * BLOCK)] + [7]

    def compute(self, name, first, last):
        """Tokens [first, last), a pass at a time."""
        while first < last:
            upto = min(last, first + 4 * BLOCK)
            seconds = (upto - first) / BLOCK * self.each
            self.plane.advance(seconds)
            self.manager.observe_prefill(upto - first, first, seconds, name)
            self.manager.poll()
            first = upto

    def run(self, tokens):
        """One request from start to end; (seconds to its first token, tokens loaded, its name)."""
        self.count += 1
        name, began, manager = f"r{self.count}", self.plane.now, self.manager
        computed = manager.get_computed_blocks(name, tokens).num_tokens
        assert manager.allocate_slots(name, len(tokens)) is not None
        while not manager.ready(name):
            for loaded in manager.poll(0.05):
                assert loaded.num_computed_tokens <= computed
        computed = manager.num_computed_tokens(name)
        self.compute(name, computed, len(tokens))
        manager.cache_blocks(name, len(tokens))
        manager.free(name)
        return self.plane.now - began, computed, name

    def only_on_disk(self, tokens):
        """Leave the prompt's pages on disk only."""
        for _ in range(20):
            self.plane.settle()
            self.manager.poll()
        for tier in (Tier.DEVICE, Tier.HOST):
            self.manager.evict(tier, tokens)
        assert self.manager.locate(tokens) == {"disk": len(tokens) - 1}

    def serve_down(self, tokens):
        """Serve the prompt as often as it takes until every tier has it, by any policy."""
        uses = 3 if "second_use" in (self.manager.config.host.write, self.manager.config.disk.write) else 1
        for _ in range(uses):
            self.run(tokens)
            self.plane.settle()
            self.manager.poll()

    def know(self, prompts=3):
        """Serve some prompts from disk, so that every speed is known."""
        for stem in range(prompts):
            tokens = self.tokens(900 + stem)
            self.serve_down(tokens)
            self.only_on_disk(tokens)
            self.run(tokens)

    def from_disk(self, stem):
        tokens = self.tokens(stem)
        self.only_on_disk(tokens)
        return self.run(tokens)

    def from_host(self, stem):
        tokens = self.tokens(stem)
        for _ in range(20):
            self.plane.settle()
            self.manager.poll()
        if self.manager.locate(tokens)["device"] < len(tokens) - 1:
            self.manager.prefetch(tokens[:-1])
            self.plane.settle()
            self.manager.poll()
        self.manager.evict(Tier.DEVICE, tokens)
        assert self.manager.locate(tokens) == {"host": len(tokens) - 1}
        return self.run(tokens)


@pytest.fixture
def engine(namespace):
    return Engine(namespace)


def test_what_is_not_known_yet_is_loaded_and_learnt(namespace):
    engine = Engine(namespace)
    tokens = engine.tokens(1)
    engine.run(tokens)
    engine.only_on_disk(tokens)
    _, loaded, name = engine.run(tokens)
    assert loaded == BLOCKS * BLOCK
    assert "nothing is known of the lanes yet" in engine.manager.explain(name)
    _, _, again = engine.run(tokens)
    assert "chose to load 128 (all of it is on the device)" in engine.manager.explain(again)
    _, _, new = engine.run(engine.tokens(2))
    assert "found none; chose to load 0; predicted" in engine.manager.explain(new)
    engine.only_on_disk(tokens)
    _, _, name = engine.run(tokens)
    assert "unknown" not in engine.manager.explain(name)


def test_a_slow_disk_is_left_and_a_fast_one_is_used(engine):
    engine.know()
    for stem in range(1, 4):
        engine.run(engine.tokens(stem))
    seconds, loaded, _ = engine.from_disk(1)
    assert loaded == BLOCKS * BLOCK
    assert seconds < 0.25 * BLOCKS * EACH
    engine.plane.lanes["stage"].rate = 10.0  # 3.2 s for the prompt, against 0.16 s
    seconds = [engine.from_disk(stem)[0] for stem in (2, 3, 1)]
    assert max(seconds) <= 2.3 * BLOCKS * EACH, "a load that overruns is cut before it costs twice as much"
    seconds, loaded, name = engine.from_disk(2)
    assert loaded == 0
    assert seconds == pytest.approx((BLOCKS + 1 / BLOCK) * EACH, rel=0.01)
    assert "computing is faster" in engine.manager.explain(name)


@pytest.mark.parametrize("share", [0.5, 0.7, 0.85])
def test_a_load_that_overruns_and_is_faster_than_computing_still_is_not_cut(engine, share):
    engine.know()
    for stem in range(1, 4):
        engine.run(engine.tokens(stem))
    engine.plane.lanes["stage"].rate = 1 / (share * EACH)  # reported in parts: what has come is known late
    for stem in (1, 2, 3):
        seconds, loaded, _ = engine.from_disk(stem)
        assert loaded == BLOCKS * BLOCK
        assert seconds <= 1.1 * (share * BLOCKS * EACH + EACH)
    assert engine.manager.stats().loads_cut == 0


def test_what_another_loads_is_predicted_to_take_as_long_as_for_that_one(namespace):
    engine = Engine(namespace, each=0.75e-3)  # computing takes less than twice as long as loading
    engine.know()
    tokens, manager = engine.tokens(1), engine.manager
    engine.run(tokens)
    engine.only_on_disk(tokens)
    for name in "ab":
        assert manager.get_computed_blocks(name, tokens).num_tokens == BLOCKS * BLOCK, manager.explain(name)
        assert manager.allocate_slots(name, len(tokens)) is not None
    assert manager.explain("a")[1:] == manager.explain("b")[1:]


@pytest.mark.parametrize("share", [0.4, 0.85])
def test_who_waits_for_anothers_load_waits_as_long_as_that_takes(engine, share):
    engine.know()
    tokens, manager = engine.tokens(1), engine.manager
    engine.run(tokens)
    engine.only_on_disk(tokens)
    engine.plane.lanes["stage"].rate = 1 / (share * EACH)  # slower than known, and faster than computing still
    for name in "ab":
        assert manager.get_computed_blocks(name, tokens).num_tokens == BLOCKS * BLOCK
        assert manager.allocate_slots(name, len(tokens)) is not None
    loaded = []
    while len(loaded) < 2:
        loaded += [(one.request_id, one.num_computed_tokens) for one in manager.poll(0.002)]
    assert sorted(loaded) == [("a", BLOCKS * BLOCK), ("b", BLOCKS * BLOCK)], manager.explain("b")
    assert manager.stats().loads_cut == 0


def test_decisions_turn_within_three_requests_and_back_within_ten(engine):
    engine.know()
    for stem in range(1, 5):
        engine.run(engine.tokens(stem))
    stage = engine.plane.lanes["stage"]
    turned = []
    for rate, wanted in [(10.0, 0), (2000.0, BLOCKS * BLOCK), (10.0, 0), (2000.0, BLOCKS * BLOCK)]:
        stage.rate = rate
        for number in range(1, 30):
            chosen = engine.from_disk(1 + number % 4)[1]
            if chosen == wanted:
                break
        turned.append(number)
    # The request that meets the change is the first, so a turn by the third is a decision after two.
    assert max(turned[0], turned[2]) <= 3, turned
    assert max(turned[1], turned[3]) <= 10, turned
    assert engine.manager.policy.probes.sent > 0


@pytest.mark.parametrize("where", ["from_host", "from_disk"])
def test_decisions_turn_back_when_the_lane_to_the_device_recovers(engine, where):
    engine.know()
    for stem in range(1, 5):
        engine.run(engine.tokens(stem))
    onboard, serve = engine.plane.lanes["onboard"], getattr(engine, where)
    for rate, wanted, most in [(10.0, 0, 3), (8000.0, BLOCKS * BLOCK, 10)] * 2:
        onboard.rate = rate
        for number in range(1, 30):
            if serve(1 + number % 4)[1] == wanted:
                break
        assert number <= most, f"not within {most} requests at {rate} pages a second"
    for stem in range(1, 5):
        assert serve(stem)[1] == BLOCKS * BLOCK


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("fixed", [0.01, 0.02, 0.2])
def test_a_first_load_that_was_small_and_slow_is_not_the_last(namespace, blocks, fixed):
    engine = Engine(namespace)
    small = engine.tokens(9, blocks)
    for tokens in (small, *(engine.tokens(stem) for stem in range(1, 5))):
        engine.run(tokens)
    for _ in range(20):
        engine.plane.settle()
        engine.manager.poll()
    engine.manager.evict(Tier.DEVICE, small)
    engine.plane.lanes["onboard"].fixed = fixed  # what is woken, or touched for the first time
    engine.run(small)
    engine.plane.lanes["onboard"].fixed = 1e-4
    assert BLOCKS * BLOCK in [engine.from_host(1 + number % 4)[1] for number in range(10)]
    assert engine.from_host(1)[0] < BLOCKS * EACH / 10


def test_a_disk_that_hung_is_asked_again_as_soon_as_any_other(engine):
    engine.know()
    for stem in range(1, 5):
        engine.run(engine.tokens(stem))
    stage = engine.plane.lanes["stage"]
    stage.rate = 0.5  # two seconds a page
    for stem in range(1, 5):
        engine.from_disk(stem)
    stage.rate = 2000.0
    engine.plane.settle()
    engine.manager.poll()
    for number in range(1, 30):
        if engine.from_disk(1 + number % 4)[1] == BLOCKS * BLOCK:
            break
    assert number <= 10


def test_a_lane_to_the_device_that_stays_slow_costs_nobody_anything(engine):
    engine.know()
    for stem in range(1, 5):
        engine.run(engine.tokens(stem))
    engine.plane.lanes["onboard"].rate = 10.0
    served = [engine.from_host(1 + number % 4) for number in range(40)][3:]
    assert {loaded for _, loaded, _ in served} == {0}
    assert max(seconds for seconds, _, _ in served) == pytest.approx((BLOCKS + 1 / BLOCK) * EACH, rel=0.01)
    assert engine.manager.policy.probes.sent > 2, "it was asked"


@pytest.mark.parametrize("share", [0.3, 0.5, 0.9])
def test_who_was_promised_a_load_before_others_ordered_theirs_is_asked_again(namespace, share):
    engine = Engine(namespace, device=2000, host=2000, disk=4000)
    engine.know()
    prompts = [engine.tokens(stem) for stem in range(1, 13)]
    for tokens in prompts:
        engine.run(tokens)
    computing = (BLOCKS + 1 / BLOCK) * EACH
    engine.plane.lanes["stage"].rate = BLOCKS / (share * computing)
    for stem in (1, 2, 3):
        engine.from_disk(stem)
    for tokens in prompts:
        engine.only_on_disk(tokens)
    manager, began = engine.manager, engine.plane.now
    names = {f"burst{number}": tokens for number, tokens in enumerate(prompts)}
    for name, tokens in names.items():
        manager.get_computed_blocks(name, tokens)
    for name, tokens in names.items():
        assert manager.allocate_slots(name, len(tokens)) is not None
    ready = {name: (0.0, manager.num_computed_tokens(name)) for name in names if manager.ready(name)}
    while len(ready) < len(names):
        now = engine.plane.now - began
        ready.update((one.request_id, (now, one.num_computed_tokens)) for one in manager.poll(0.001))
    took = [at + (len(names[name]) - there) / BLOCK * EACH for name, (at, there) in ready.items()]
    assert max(took) <= 1.05 * computing, "nobody queues for longer than computing takes"
    assert manager.stats().loads_cut == 0


def test_always_and_never_do_as_they_say(namespace):
    all_of_it = BLOCKS * BLOCK
    for rule, wanted, says in (
        ("always", all_of_it, f"load {all_of_it} (the policy is to load always)"),
        ("never", 0, "load 0 (the policy is never to load)"),
    ):
        engine = Engine(namespace, load_policy=rule)
        engine.know(2)
        engine.plane.lanes["stage"].rate = 100.0
        engine.run(engine.tokens(1))
        _, loaded, name = engine.from_disk(1)
        assert loaded == wanted
        assert says in engine.manager.explain(name)
        assert engine.run(engine.tokens(1))[1] == BLOCKS * BLOCK, "what is on the device is no load"


def test_the_front_is_loaded_where_only_the_tail_is_slow(engine):
    engine.know()
    tokens = engine.tokens(1)
    engine.run(tokens)
    engine.only_on_disk(tokens)
    half = tokens[: BLOCKS // 2 * BLOCK]
    engine.manager.prefetch(half)
    engine.plane.settle()
    engine.manager.poll()
    assert engine.manager.locate(tokens) == {"host": BLOCKS // 2 * BLOCK, "disk": BLOCKS // 2 * BLOCK}
    engine.plane.lanes["stage"].rate = 10.0
    engine.manager.costs.seed_lane("stage", 1e-4, 10.0 * (1 << 20))
    _, loaded, name = engine.run(tokens)
    assert loaded == BLOCKS // 2 * BLOCK, engine.manager.explain(name)


def test_a_choice_is_made_again_when_the_request_had_to_wait(engine):
    engine.know()
    tokens = engine.tokens(1)
    engine.run(tokens)
    engine.only_on_disk(tokens)
    manager = engine.manager
    assert manager.get_computed_blocks("w", tokens).num_tokens == BLOCKS * BLOCK
    manager.costs.seed_lane("stage", 1e-4, 10.0 * (1 << 20))
    engine.plane.advance(0.02)
    assert manager.allocate_slots("w", len(tokens)) is not None
    assert not manager.ready("w"), "the engine was promised more: it must hear of it"
    (loaded,) = manager.poll()
    assert loaded.num_computed_tokens == 0
    assert len(manager.block_table("w")) == BLOCKS + 1
    manager.free("w")
    manager.catalog.check()


def test_a_cut_load_keeps_what_has_arrived_and_touches_nothing_later(engine):
    engine.know()
    tokens = engine.tokens(1)
    engine.run(tokens)
    engine.only_on_disk(tokens)
    manager, plane = engine.manager, engine.plane
    manager.get_computed_blocks("c", tokens)
    manager.allocate_slots("c", len(tokens))
    plane.advance(0.008)  # half of it
    plane.lanes["stage"].rate = 5.0
    while not manager.ready("c"):
        manager.poll(1.0)
    arrived = manager.num_computed_tokens("c")
    assert 0 < arrived < BLOCKS * BLOCK
    assert "cut after" in manager.explain("c")
    table = manager.block_table("c")
    own = set(table[arrived // BLOCK :].tolist())
    assert plane.jobs, "something is still being read"
    for job in plane.jobs.values():  # and goes elsewhere
        coming = job.transfer.slots[-1][job.status[-1] == PageStatus.PENDING]
        assert job.transfer.path[-1] is not Tier.DEVICE or not own & set(coming.tolist())
    plane.settle()
    manager.poll()
    assert (manager.block_table("c") == table).all()
    manager.catalog.check()
    manager.free("c")


def test_a_cut_load_that_does_not_end_is_waited_for_and_not_asked_for_in_a_circle(engine, monkeypatch):
    engine.know()
    tokens = engine.tokens(1)
    engine.run(tokens)
    engine.only_on_disk(tokens)
    manager, plane = engine.manager, engine.plane
    manager.get_computed_blocks("c", tokens)
    manager.allocate_slots("c", len(tokens))
    plane.lanes["stage"].rate = 1e-3
    monkeypatch.setattr(plane, "cancel", lambda ticket: None)
    while not manager.policy.cuts:
        manager.poll(0.05)
    before = plane.now
    for _ in range(10):
        manager.poll(0.05)
    assert plane.now >= before + 10 * 0.049, "it polls without waiting while nothing can come"
    plane.advance(10.0)  # the load's deadline
    manager.poll()
    assert manager.ready("c")


def test_a_request_that_was_never_heard_of_cannot_be_explained(engine):
    with pytest.raises(ValueError, match="'nobody'"):
        engine.manager.explain("nobody")

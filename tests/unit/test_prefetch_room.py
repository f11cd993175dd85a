"""The room of what is brought ahead: who gets it, who gives it back, and what never goes for it."""

from __future__ import annotations

import random

import pytest

from kvtier import prefetch
from kvtier.catalog import Tier
from kvtier.config import CacheConfig
from kvtier.holdings import Holdings
from kvtier.placement import tier_specs
from tests.unit.test_load_policy import BLOCK, BLOCKS, Engine
from tests.unit.test_prefetch import PAGE, brought, counts, run_as, wait

ROOM = 100  # blocks


@pytest.fixture
def engine(namespace):
    return prepare(Engine(namespace), 8)


def prepare(engine, prompts):
    """Prompts 1, 2, … are on disk only, and every speed is known."""
    engine.know()
    for stem in range(1, prompts + 1):
        engine.run(engine.tokens(stem))
    for stem in range(1, prompts + 1):
        engine.only_on_disk(engine.tokens(stem))
    return engine


def slow(engine, rate=100.0):
    engine.plane.lanes["stage"].rate = rate
    engine.manager.costs.seed_lane("stage", 1e-4, rate * PAGE)


def test_who_starts_much_later_makes_room_for_who_starts_soon(engine):
    manager = engine.manager
    for stem in (1, 2, 3):
        manager.expect(f"far{stem}", engine.tokens(stem), 600.0 + stem)
    wait(engine, 1.0)
    assert [brought(engine, stem) for stem in (1, 2, 3)] == [BLOCKS] * 3
    manager.expect("r104", engine.tokens(4), 0.5)
    wait(engine, 0.4)
    assert brought(engine, 4) == BLOCKS, "sessions of ten minutes hence had all the room"
    assert [brought(engine, stem) for stem in (1, 2, 3)] == [BLOCKS, BLOCKS, 0], "the last one gives its back"
    assert counts(engine)["cancelled"] == BLOCKS
    assert run_as(engine, "104", engine.tokens(4))[1] == BLOCKS * BLOCK
    wait(engine, 0.5)
    assert brought(engine, 3) == BLOCKS, "its turn comes again"
    manager.catalog.check()


def test_who_starts_a_little_later_keeps_its_room(engine):
    """To bring it again would cost more than it gains."""
    slow(engine)
    manager = engine.manager
    for stem in (1, 2, 3):
        manager.expect(f"a{stem}", engine.tokens(stem), 2.0)
    wait(engine, 1.2)
    before = engine.plane.pages["stage"]
    manager.expect("b", engine.tokens(4), 0.4)
    wait(engine, 0.4)
    assert engine.plane.pages["stage"] == before
    assert [brought(engine, stem) for stem in (1, 2, 3)] == [BLOCKS] * 3


def test_nobody_gives_room_where_that_is_of_no_use(engine):
    """A request that cannot have a quarter of its pages is not worth it."""
    tokens = engine.tokens(50, 190)
    engine.run(tokens)
    engine.only_on_disk(tokens)
    manager = engine.manager
    manager.expect("r101", engine.tokens(1), 0.1)
    manager.expect("r102", engine.tokens(2), 0.2)
    manager.expect("far", engine.tokens(3, 8), 600.0)
    wait(engine, 0.05)
    manager.expect("b", tokens, 0.3)
    wait(engine, 0.3)
    assert brought(engine, 3) == 8
    assert engine.manager.locate(tokens) == {"disk": 190 * BLOCK}


def test_a_part_that_was_begun_is_as_large_as_the_room_is(engine):
    slow(engine)
    tokens = engine.tokens(50, 120)
    engine.run(tokens)
    engine.only_on_disk(tokens)
    manager = engine.manager
    for stem in (1, 2):
        manager.expect(f"a{stem}", engine.tokens(stem), 0.1)
    manager.expect("b", tokens, 3.0)
    wait(engine, 2.5)
    assert manager.locate(tokens)["host"] == (ROOM - 2 * BLOCKS) * BLOCK


def test_what_finds_no_place_just_now_is_tried_again(namespace):
    """Host memory is full of pages that the disk does not have yet."""
    engine = Engine(namespace, device=400, host=ROOM)
    engine.know()
    tokens = engine.tokens(1)
    engine.run(tokens)
    engine.only_on_disk(tokens)
    engine.plane.lanes["spill"].rate = 50.0
    for stem in range(2, 6):
        engine.run(engine.tokens(stem))
    engine.manager.expect("a", tokens, 5.0)
    wait(engine, 0.1)
    assert brought(engine, 1) == 0
    wait(engine, 4.0)
    assert brought(engine, 1) > 0


@pytest.mark.parametrize("write", ["at_once", "second_use"])
def test_pages_that_were_used_once_make_room_where_the_policy_writes_no_such_ones(namespace, write):
    """Host memory and the device are full of them in the long run, and nobody was brought anything any more."""
    engine = Engine(namespace, device=140, host=140, write=(write, "second_use"))
    tokens = engine.tokens(1)
    engine.serve_down(tokens)
    engine.only_on_disk(tokens)
    for stem in range(2, 8):
        engine.run(engine.tokens(stem))
    usage = {tier: engine.manager.catalog.usage(tier) for tier in (Tier.DEVICE, Tier.HOST)}
    assert usage[Tier.DEVICE].free < 2
    assert (usage[Tier.HOST].free == 0) == (write == "at_once")
    engine.manager.expect("a", tokens, 0.2)
    wait(engine, 0.2)
    assert engine.manager.locate(tokens) == {"device": BLOCKS * BLOCK}, "no page gave its place"
    engine.manager.catalog.check()


@pytest.mark.parametrize("asked", ["expect", "prefetch"])
def test_what_has_been_read_keeps_nothing_else_from_its_place(namespace, asked):
    """It was needed by then, and has been used; another who named it still needs it."""
    engine = prepare(Engine(namespace, device=400, host=140), 2)
    manager, tokens = engine.manager, engine.tokens(1)
    manager.expect("r101", tokens, 0.05)
    wait(engine, 0.05)
    assert run_as(engine, "101", tokens)[1] == BLOCKS * BLOCK
    for stem in range(3, 7):
        engine.run(engine.tokens(stem))
    wait(engine, 0.1)
    assert manager.catalog.usage(Tier.HOST).free == 0
    if asked == "expect":
        manager.expect("b", engine.tokens(2), 2.0)
    else:
        manager.prefetch(engine.tokens(2), within=20.0)
    wait(engine, 0.3)
    assert brought(engine, 2) == BLOCKS, "the coldest pages there were read before"


def test_who_names_it_too_needs_it_still(namespace):
    engine = prepare(Engine(namespace, device=400, host=140), 2)
    manager, tokens = engine.manager, engine.tokens(1)
    manager.expect("r101", tokens, 0.05)
    manager.expect("other", tokens, 4.0)
    wait(engine, 0.05)
    assert run_as(engine, "101", tokens)[1] == BLOCKS * BLOCK
    for stem in range(3, 7):
        engine.run(engine.tokens(stem))
    wait(engine, 0.1)
    manager.expect("b", engine.tokens(2), 6.0)
    wait(engine, 0.3)
    assert brought(engine, 2) == 0, "it took the place of what is needed sooner"


@pytest.mark.parametrize(
    ("write", "keeps"), [("at_once", True), ("ahead", True), ("second_use", False), ("never", False)]
)
def test_last_copies_are_kept_where_the_policy_writes_them(write, keeps):
    tiers = [Tier.DEVICE, Tier.HOST, Tier.DISK]
    config = CacheConfig(host={"write": write}, disk={"write": write})
    specs = tier_specs(config, dict.fromkeys(tiers, 8), tiers)
    assert [each.keeps_last for each in specs] == [keeps, keeps, True]


@pytest.mark.parametrize("write", ["at_once", "ahead"])
def test_last_copies_are_copied_down_where_they_keep_a_hint_from_its_room(namespace, monkeypatch, write):
    """Their stores were refused, and the policy wants them on disk: without a word they would stay in the way."""
    engine = Engine(namespace, device=400, host=ROOM, write=("at_once", write), watermarks={"low": 0.0, "high": 0.01})
    tokens = engine.tokens(1)
    engine.serve_down(tokens)
    wait(engine, 0.1)
    engine.manager.placement.copy_cold(Tier.HOST, ROOM)
    engine.only_on_disk(tokens)
    submit = engine.plane.submit
    with monkeypatch.context() as refusing:
        refusing.setattr(engine.plane, "submit", lambda order: order.path[-1] is not Tier.DISK and submit(order))
        for stem in range(2, 6):
            engine.run(engine.tokens(stem))
    usage = engine.manager.catalog.usage
    assert usage(Tier.HOST).free == 0
    written, dropped = usage(Tier.DISK).ready, usage(Tier.HOST).dropped
    engine.manager.expect("a", tokens, 5.0)
    wait(engine, 2.0)
    assert brought(engine, 1) > 0, "they stay in the way"
    assert usage(Tier.DISK).ready > written
    assert usage(Tier.HOST).dropped == dropped, "one went before it was written"
    engine.manager.catalog.check()


def test_what_finds_no_place_keeps_nobody_else_from_trying_or_from_its_place(engine, monkeypatch):
    """And is asked for some times a second, not in each step."""
    manager, tries = engine.manager, []
    bring = Holdings.bring

    def refuse(self, hint, count, until):
        tries.append(hint.name)
        return (0, 0) if hint.name == "a" else bring(self, hint, count, until)

    monkeypatch.setattr(Holdings, "bring", refuse)
    manager.expect("a", engine.tokens(1), 0.3)
    manager.expect("b", engine.tokens(2), 2.0)
    wait(engine, 0.5)
    assert brought(engine, 2) == BLOCKS
    assert 5 <= tries.count("a") <= 11
    wait(engine, manager.config.prefetch.grace_seconds, step=0.1)
    assert "a" not in manager._prefetcher.expected


def test_what_found_no_room_on_the_device_goes_there_once_there_is_some(namespace):
    engine = prepare(Engine(namespace, device=100), 3)  # a quarter of it: 25 slots
    manager = engine.manager
    first, second = engine.tokens(1, 24), engine.tokens(2, 24)
    manager.expect("r101", first, 0.1)
    manager.expect("r102", second, 0.3)
    wait(engine, 0.1)
    assert manager.locate(second) == {"device": BLOCK, "host": 23 * BLOCK}
    run_as(engine, "101", first)
    wait(engine, 0.15)
    assert manager.locate(second) == {"device": 24 * BLOCK}
    assert manager._prefetcher._holdings.lifted == 24


def test_who_is_put_off_leaves_the_device_and_comes_back_in_time(engine):
    manager, tokens = engine.manager, engine.tokens(1)
    manager.expect("r101", tokens, 0.1)
    wait(engine, 0.1)
    assert manager.locate(tokens) == {"device": BLOCKS * BLOCK}
    manager.reorder({"r101": 2.0})
    manager.poll()
    assert manager.locate(tokens) == {"host": BLOCKS * BLOCK}
    assert manager._prefetcher._holdings.lifted == 0
    wait(engine, 1.9)
    assert manager.locate(tokens) == {"device": BLOCKS * BLOCK}


def test_what_went_before_its_time_came_is_brought_again(engine):
    """It was in host memory when the hint was looked at, held by nobody; who waited for its place had it."""
    manager, tokens = engine.manager, engine.tokens(1)
    manager.prefetch(tokens)
    wait(engine, 0.1)
    manager.expect("r101", tokens, 2.0)
    wait(engine, 0.1)
    manager.evict(Tier.HOST, tokens)
    wait(engine, 1.85)
    assert manager.locate(tokens) == {"device": BLOCKS * BLOCK}


@pytest.mark.parametrize("others", [True, False])
def test_what_is_on_its_way_to_the_device_when_its_hint_ends_goes_once_it_has_come(engine, others):
    manager, tokens = engine.manager, engine.tokens(1)
    engine.plane.lanes["onboard"].rate = 100.0
    manager.expect("r101", tokens, 0.2)
    hint = manager._prefetcher.expected["r101"]
    while not hint.lifts:
        wait(engine, 0.002)
    manager.dismiss("r101")
    assert manager.locate(tokens)["host"] > 0, "it is being copied"
    if others:
        manager.expect("other", engine.tokens(2), 50.0)
    wait(engine, 1.0)
    assert manager.locate(tokens) == {"disk": BLOCKS * BLOCK}
    assert manager.locate(engine.tokens(2)) == {"host" if others else "disk": BLOCKS * BLOCK}


def cold_prompt(namespace):
    """A host tier that is full of what the disk holds too; its coldest prompt, and one that is on disk only."""
    engine = Engine(namespace, device=90, host=100, disk=4000, prefetch={"share": 0.5})
    engine.know(2)
    prompts = [engine.tokens(1 + stem, 30) for stem in range(6)]
    for tokens in prompts:
        engine.run(tokens)
        engine.plane.settle()
        engine.manager.poll()
    cold = next(tokens for tokens in prompts if "disk" not in engine.manager.locate(tokens))
    engine.manager.evict(Tier.DEVICE, cold)
    for tokens in prompts[prompts.index(cold) + 1 :]:
        engine.run(tokens)
    assert engine.manager.locate(cold) == {"host": 30 * BLOCK}
    return engine, cold, prompts


@pytest.mark.parametrize("before", ["a hint", "nothing", "a hint long ago"])
def test_a_hint_that_was_taken_back_keeps_no_page_from_others(namespace, before):
    engine, cold, prompts = cold_prompt(namespace)
    manager = engine.manager
    if before != "nothing":
        manager.expect("far", cold, 3600.0 if before == "a hint" else 2.0)
        wait(engine, 0.05)
    if before == "a hint":
        manager.dismiss("far")
        wait(engine, 0.05)
        manager.expect("x", prompts[0], 4000.0)
        wait(engine, 3.0)
        assert manager.locate(prompts[0]) == {"host": 30 * BLOCK}
    elif before == "a hint long ago":
        manager._prefetcher.started("far")
        wait(engine, 1000.0, 1.0)
    assert manager.prefetch(prompts[1]).staged == 30


def test_a_hint_that_is_taken_back_leaves_others_their_need(namespace):
    engine, cold, prompts = cold_prompt(namespace)
    manager = engine.manager
    manager.expect("far", cold, 300.0)
    manager.expect("also", cold, 1000.0)
    wait(engine, 0.05)
    manager.dismiss("far")
    wait(engine, 0.05)
    manager.expect("x", prompts[0], 4000.0)
    wait(engine, 3.0)
    assert manager.locate(cold) == {"host": 30 * BLOCK}, "evicted for what is needed later"


def test_what_was_forgotten_takes_no_room_till_its_request_starts(engine):
    manager = engine.manager
    for stem in (1, 2, 3):
        manager.expect(f"far{stem}", engine.tokens(stem), 3600.0)
    wait(engine, 1.0)
    assert manager.stats().slots["host"]["pinned"] == 3 * BLOCKS
    manager.reset()
    wait(engine, 0.1)
    slots = manager.stats().slots["host"]
    assert (slots["pinned"], slots["draining"]) == (0, 0)
    assert manager._prefetcher._holdings.room == ROOM
    engine.run(engine.tokens(7))
    engine.only_on_disk(engine.tokens(7))
    manager.expect("new", engine.tokens(7), 3700.0)
    wait(engine, 1.0)
    assert brought(engine, 7) == BLOCKS


def test_who_says_again_that_it_comes_much_later_leaves_the_device_to_others(engine):
    manager, holdings = engine.manager, engine.manager._prefetcher._holdings
    manager.expect("s", engine.tokens(1), 0.1)
    wait(engine, 0.1)
    assert holdings.lifted == BLOCKS
    manager.expect("s", engine.tokens(1), 3600.0)
    assert holdings.lifted == 0
    wait(engine, 1.0)
    manager.expect("t", engine.tokens(2), 0.3)
    wait(engine, 0.3)
    assert manager.locate(engine.tokens(2)) == {"device": BLOCKS * BLOCK}


def test_a_hint_whose_room_is_just_being_written_for_nobody_gets_it_then(namespace):
    engine = prepare(Engine(namespace, prefetch={"share": 0.1}), 1)
    manager, tokens = engine.manager, engine.tokens(50, 40)
    engine.run(tokens)
    engine.only_on_disk(tokens)
    slow(engine, 20.0)
    manager.costs.seed_lane("stage", 1e-4, 2000 * PAGE)
    manager.expect("a", engine.tokens(1), 5.0)
    for _ in range(3):
        manager.poll()
    manager.dismiss("a")
    manager.poll()
    manager.expect("b", tokens, 60.0)
    for _ in range(4):
        manager.poll()
    hint = manager._prefetcher.expected["b"]
    assert 0 < hint.issued < 40, "it found some room, and the rest of it being written"
    engine.plane.lanes["stage"].rate = 2000.0
    wait(engine, 10.0, 0.01)
    assert manager.locate(tokens) == {"host": 40 * BLOCK}


def test_who_is_about_to_start_has_its_pages_on_the_device_though_another_was_taken_back(engine):
    manager, tokens = engine.manager, engine.tokens(1)
    manager.prefetch(tokens)
    wait(engine, 0.2)
    manager.expect("a", tokens, 0.3)
    manager.expect("b", tokens, 0.4)
    wait(engine, 0.2)
    assert manager.locate(tokens) == {"device": BLOCKS * BLOCK}
    manager.dismiss("a")
    manager.poll()
    assert manager.locate(tokens) == {"host": BLOCKS * BLOCK}
    wait(engine, 0.19)
    assert manager.locate(tokens) == {"device": BLOCKS * BLOCK}


def test_one_call_that_hangs_keeps_the_room_of_no_other(engine, monkeypatch):
    manager, holdings = engine.manager, engine.manager._prefetcher._holdings
    holdings.host = 3 * BLOCKS
    hanging = manager.prefetch(engine.tokens(1)).ticket
    wait(engine, 0.1)
    monkeypatch.setattr(manager.placement, "runs", lambda ticket: ticket == hanging)
    for stem in range(2, 9):
        manager.prefetch(engine.tokens(stem))
        wait(engine, 0.1)
    assert holdings._nobodys[0][0] == hanging
    assert sum(len(nodes) for _, nodes in holdings._nobodys) <= holdings.host
    assert [brought(engine, stem) for stem in (2, 7, 8)] == [0, BLOCKS, BLOCKS]


def test_nobody_inherits_what_was_brought_when_nobody_will_come(engine, monkeypatch):
    manager = engine.manager
    for number in range(3):
        manager.expect(f"h{number}", engine.tokens(1), 10.0 + number)
    wait(engine, 0.5)
    monkeypatch.setattr(Holdings, "hand_over", None)
    manager._prefetcher.dismiss_all()
    assert counts(engine)["cancelled"] == BLOCKS
    wait(engine, 0.1)
    assert manager.locate(engine.tokens(1)) == {"disk": BLOCKS * BLOCK}


def test_what_is_still_being_written_takes_room_though_its_hint_has_ended(engine):
    manager = engine.manager
    manager.expect("a", engine.tokens(1), 0.1)
    manager.poll()
    manager.dismiss("a")
    manager.poll()
    draining = manager.stats().slots["host"]["draining"]
    assert draining > 0
    assert manager._prefetcher._holdings.room == ROOM - draining
    wait(engine, 0.1)
    assert manager._prefetcher._holdings.room == ROOM


def test_who_is_about_to_start_keeps_its_room_whenever_it_was_expected(engine):
    manager = engine.manager
    for stem in (1, 2, 3):
        manager.expect(f"far{stem}", engine.tokens(stem), 600.0)
    wait(engine, 1.0)
    for stem in (1, 2, 3):
        manager._prefetcher.rest(f"far{stem}")
    manager.expect("near", engine.tokens(4), 0.5)
    wait(engine, 0.5)
    assert [brought(engine, stem) for stem in (1, 2, 3, 4)] == [BLOCKS, BLOCKS, BLOCKS, 0]


@pytest.mark.parametrize("way", ["expect", "prefetch"])
@pytest.mark.parametrize("sooner", [True, False])
def test_nothing_goes_from_host_memory_for_what_is_needed_later(namespace, way, sooner):
    """The coldest pages there are those of a request that was announced; it holds none of them."""
    engine = Engine(namespace, device=90, host=ROOM, disk=4000, prefetch={"share": 0.5})
    engine.know(2)
    prompts = [engine.tokens(1 + i, 30) for i in range(6)]
    manager = engine.manager
    for tokens in prompts:
        engine.run(tokens)
        engine.plane.settle()
        manager.poll()
    cold = next(tokens for tokens in prompts if "disk" not in manager.locate(tokens))
    manager.evict(Tier.DEVICE, cold)
    for tokens in prompts[prompts.index(cold) + 1 :]:
        assert engine.run(tokens)[1] == 30 * BLOCK
    assert manager.locate(cold) == {"host": 30 * BLOCK}
    manager.expect("needed", cold, 2.0)
    wait(engine, 0.05)
    within = 3.0 + manager.config.prefetch.grace_seconds if sooner else 1.0
    if way == "expect":
        manager.expect("other", prompts[0], within)
    else:
        manager.prefetch(prompts[0], within=within)
    wait(engine, 0.5)
    assert ("disk" in manager.locate(cold)) == (not sooner)
    assert manager.locate(prompts[0]).get("host", 0) < 30 * BLOCK if sooner else manager.locate(prompts[0])["host"]


def hot_set(engine, rng, disturb):
    """The share of hits above the disk in a set of 128 blocks that fills host memory but for the share of hints."""
    manager = engine.manager
    engine.know(2)
    cold = [engine.tokens(200 + i, 16) for i in range(40)]
    for tokens in cold:
        engine.serve_down(tokens)
    for _ in range(20):
        engine.plane.settle()
        manager.poll()
    hot = [engine.tokens(1 + i, 16) for i in range(8)]
    for tokens in hot * 2:
        engine.serve_down(tokens)
    before = dict(manager.stats().tokens_found)
    for number in range(100):
        for i in range(10):
            disturb(engine, f"useless{number}-{i}", rng.choice(cold))
        engine.run(hot[number % len(hot)])
    found = {tier: count - before.get(tier, 0) for tier, count in manager.stats().tokens_found.items()}
    return (found.get("device", 0) + found.get("host", 0)) / (100 * 16 * BLOCK)


def ask(engine, name, tokens):
    engine.manager.prefetch(tokens, within=0.5)
    engine.plane.advance(0.001)
    engine.manager.poll()


def take_back(engine, name, tokens):
    engine.manager.expect(name, tokens, 0.5)
    wait(engine, 0.01)
    engine.manager.dismiss(name)


def put_off(engine, name, tokens):
    engine.manager.expect(name, tokens, 0.5)
    wait(engine, 0.004)
    engine.manager.reorder({name: 50.0})


@pytest.mark.parametrize("disturb", [ask, take_back, put_off])
@pytest.mark.parametrize("write", [("at_once", "at_once"), ("at_once", "second_use"), ("second_use", "second_use")])
def test_a_thousand_useless_words_leave_the_hot_set_where_it_is(namespace, seed, disturb, write):
    engine = Engine(namespace, device=40, host=200, disk=4000, write=write, prefetch={"grace_seconds": 0.2})
    assert hot_set(engine, random.Random(seed), disturb) >= 0.99, f"seed {seed}"
    assert engine.plane.pages["stage"] > 1000, "nothing was brought"


def test_more_hints_than_there_may_be_are_counted(engine, monkeypatch):
    monkeypatch.setattr(prefetch, "_LIMIT", 3)
    for number in range(5):
        engine.manager.expect(f"e{number}", engine.tokens(1), 1.0)
    engine.manager.expect("e0", engine.tokens(2), 1.0)  # said again
    assert engine.manager.stats().hints_refused == 2
    assert "WARNING a hint was dropped: request 'e4': 3 others wait already" in engine.manager.describe()
    assert list(engine.manager._prefetcher.expected) == ["e1", "e2", "e0"]


def test_each_block_that_was_brought_is_counted_once(namespace, seed, monkeypatch):
    """Whatever becomes of their hints, which share pages, are said again, put off, taken back, overtaken or lost."""
    rng = random.Random(seed)
    engine = prepare(Engine(namespace, host=120, disk=1000, prefetch={"grace_seconds": 0.5}), 8)
    manager, ordered, begun = engine.manager, [], []
    bring, started = Holdings.bring, manager._prefetcher.started

    def count(self, hint, blocks, until):
        said = bring(self, hint, blocks, until)
        ordered.append(said[1])
        return said

    def note(name):
        hint = manager._prefetcher.expected.get(name)
        begun.append(hint.issued if hint is not None else 0)
        started(name)

    monkeypatch.setattr(Holdings, "bring", count)
    monkeypatch.setattr(manager._prefetcher, "started", note)
    for number in range(150):
        name, stem = f"r{1000 + rng.randrange(number + 1)}", rng.randint(1, 8)
        tokens = engine.tokens(stem, rng.randint(1, BLOCKS))
        slow(engine, rng.choice([20.0, 200.0, 2000.0]))
        manager.expect(name, tokens, rng.choice([0.0, 0.05, 0.3, 5.0]))
        kind = rng.random()
        if kind < 0.2:
            manager.dismiss(name)
        elif kind < 0.4:
            manager.reorder({f"r{1000 + rng.randrange(number + 1)}": rng.uniform(0.0, 3.0) for _ in range(4)})
        elif kind < 0.6:
            wait(engine, rng.uniform(0.0, 0.05))
            run_as(engine, name[1:], tokens)
            manager.evict(Tier.DEVICE, tokens)
        elif kind < 0.63:
            manager.reset()
            for other in range(1, 9):
                engine.run(engine.tokens(other))
                engine.plane.settle()
                for tier in (Tier.DEVICE, Tier.HOST):
                    manager.evict(tier, engine.tokens(other))
        elif kind < 0.66:
            engine.plane.advance(3.0)  # no step meanwhile
        wait(engine, rng.uniform(0.0, 0.05))
    wait(engine, 12.0, step=0.1)
    holdings, seen = manager._prefetcher._holdings, counts(engine)
    assert not manager._prefetcher.expected
    assert sum(ordered) > 100
    assert seen["wasted"] + seen["cancelled"] + sum(begun) == sum(ordered), f"seed {seed}"
    assert seen["used"] <= sum(begun) <= seen["used"] + seen["late"], f"seed {seed}"
    assert (holdings.held, holdings.lifted, len(holdings.by_ticket), len(holdings.holders)) == (0, 0, 0, 0)
    assert manager.catalog.stats()["leases"] == 0, f"seed {seed}"
    manager.catalog.check()

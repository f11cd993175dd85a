"""Pages there before they are needed: the real control plane over lanes of known speeds in virtual time."""

from __future__ import annotations

import gc
import random
import weakref

import pytest

from kvtier.catalog import Tier
from kvtier.choice import STAGE
from kvtier.messages import Priority
from tests.unit.test_load_policy import BLOCK, BLOCKS, Engine

PAGE = 1 << 20


@pytest.fixture
def engine(namespace):
    """Prompts 1 to 8 are on disk only, and every speed is known. Host memory has room for 100 blocks brought ahead."""
    engine = Engine(namespace)
    engine.know()
    for stem in range(1, 9):
        engine.run(engine.tokens(stem))
    for stem in range(1, 9):
        engine.only_on_disk(engine.tokens(stem))
    return engine


def wait(engine, seconds, step=0.002):
    for _ in range(round(seconds / step)):
        engine.plane.advance(step)
        engine.manager.poll()


def counts(engine):
    return engine.manager.stats().prefetched


def brought(engine, stem):
    """Blocks that are in host memory, or on the device already."""
    found = engine.manager.locate(engine.tokens(stem))
    return (found.get("host", 0) + found.get("device", 0)) // BLOCK


def staged(engine, since):
    return [t for t in engine.plane.log[since:] if t.path == STAGE and t.priority is Priority.PREFETCH]


def run_as(engine, name, tokens):
    engine.count = int(name) - 1
    return engine.run(tokens)


def test_an_announced_request_finds_its_pages_in_host_memory(engine):
    manager, tokens = engine.manager, engine.tokens(1)
    manager.expect("r100", tokens, 0.1)
    wait(engine, 0.1)
    assert manager.locate(tokens) == {"device": BLOCKS * BLOCK}, "it starts soon"
    seconds, loaded, name = run_as(engine, "100", tokens)
    assert name == "r100"
    assert loaded == BLOCKS * BLOCK
    assert seconds == pytest.approx(engine.each / BLOCK), "all of it was on the device"
    assert counts(engine) == {"used": BLOCKS, "late": 0, "wasted": 0, "cancelled": 0}
    manager.catalog.check()
    assert manager.stats().slots["host"]["pinned"] == 0


def test_the_earliest_start_is_served_first_and_a_new_order_is_followed(engine):
    manager, since = engine.manager, len(engine.plane.log)
    engine.plane.lanes["stage"].rate = 100.0
    manager.costs.seed_lane("stage", 1e-4, 100.0 * PAGE)
    for stem, within in ((1, 3.0), (2, 1.0), (3, 2.0)):
        manager.expect(f"e{stem}", engine.tokens(stem), within)
    wait(engine, 0.1)
    assert brought(engine, 2) > 0 == brought(engine, 1) == brought(engine, 3)
    manager.reorder({"e1": 0.2, "nobody": 1.0})
    wait(engine, 0.36)
    assert brought(engine, 1) >= 28, "it overtook the other"
    assert brought(engine, 3) == 0
    assert all(t.slots.shape[1] <= 2 for t in staged(engine, since)), "a slow lane is given little at a time"


def test_what_starts_later_stays_in_host_memory_until_shortly_before(engine):
    manager, tokens = engine.manager, engine.tokens(1)
    manager.expect("r100", tokens, 3.0)
    wait(engine, 0.5)
    assert manager.locate(tokens) == {"host": BLOCKS * BLOCK}
    wait(engine, 2.4)
    assert manager.locate(tokens) == {"device": BLOCKS * BLOCK}
    manager.dismiss("r100")
    manager.expect("r101", engine.tokens(2), 3.0)
    wait(engine, 0.5)
    manager.reorder({"r101": 0.05})
    wait(engine, 0.05)
    assert manager.locate(engine.tokens(2)) == {"device": BLOCKS * BLOCK}, "it starts sooner now"


def test_no_more_goes_on_to_the_device_than_its_share_and_nobody_is_kept_from_it(namespace):
    engine = Engine(namespace, device=100)  # a quarter of it: 25 slots
    engine.know()
    for stem in range(1, 4):
        engine.run(engine.tokens(stem))
        engine.only_on_disk(engine.tokens(stem))
    manager = engine.manager
    manager.expect("r101", engine.tokens(1), 0.1)
    manager.expect("r102", engine.tokens(2), 0.1)
    wait(engine, 0.2)
    assert manager.locate(engine.tokens(1)) == {"device": 25 * BLOCK, "host": 7 * BLOCK}
    assert manager.locate(engine.tokens(2)) == {"host": BLOCKS * BLOCK}
    assert manager.stats().slots["device"]["pinned"] == 0
    whole = engine.tokens(7, 99)
    assert engine.run(whole)[1] == 0, "the engine has the slots when it wants them"
    wait(engine, manager.config.prefetch.grace_seconds + 0.5, step=0.1)
    assert manager.locate(engine.tokens(1)) == {"disk": BLOCKS * BLOCK}, "nobody came"
    manager.catalog.check()


def test_giving_a_hint_touches_nothing_until_the_next_poll(engine):
    since = len(engine.plane.log)
    engine.manager.expect("e", engine.tokens(1), 1.0)
    assert not engine.plane.log[since:]
    engine.manager.poll()
    assert engine.plane.log[since:]


def test_what_several_want_is_read_once(engine):
    before = engine.plane.pages["stage"]
    tokens = engine.tokens(1)
    for number in range(5):
        engine.manager.expect(f"e{number}", [*tokens[:-1], number], 0.1)
    wait(engine, 0.2)
    assert engine.plane.pages["stage"] - before == BLOCKS


def test_only_the_positions_that_will_be_read_are_brought(engine):
    before = engine.plane.pages["stage"]
    engine.manager.expect("e", engine.tokens(1), 0.1, positions=(2 * BLOCK, 5 * BLOCK + 1))
    wait(engine, 0.1)
    assert engine.plane.pages["stage"] - before == 4
    with pytest.raises(ValueError, match=r"positions: \(5, 5\); accepted: whole numbers with 0 <= first < last"):
        engine.manager.expect("e", engine.tokens(1), 0.1, positions=(5, 5))


def test_ranges_of_one_request_are_brought_when_each_is_read(engine):
    manager = engine.manager
    engine.plane.lanes["stage"].rate = 100.0
    positions = [(0, 8 * BLOCK, 0.0), (8 * BLOCK, 16 * BLOCK, 5.0), (16 * BLOCK, BLOCKS * BLOCK, 10.0)]
    manager.expect("long", engine.tokens(1), 1.0, positions=positions)
    manager.expect("between", engine.tokens(2), 4.0)
    wait(engine, 0.3)
    assert (brought(engine, 1), brought(engine, 2)) == (8, 0), "the first range comes first"
    wait(engine, 0.14)
    assert (brought(engine, 1), brought(engine, 2)) == (8, BLOCKS), "then who starts before the second is read"
    wait(engine, 0.4)
    assert (brought(engine, 1), brought(engine, 2)) == (BLOCKS, BLOCKS)
    manager.reorder({"long": 100.0})
    manager.dismiss("between")
    wait(engine, 1.0 + manager.config.prefetch.grace_seconds + 10.0, step=0.5)
    assert brought(engine, 1) == BLOCKS, "all of its ranges are read later"
    manager.dismiss("long")
    wait(engine, 0.1)
    assert counts(engine)["cancelled"] == 2 * BLOCKS
    assert not manager._prefetcher.expected, "and all end with it"


@pytest.mark.parametrize("how", ["started", "said again", "forgotten"])
def test_ranges_end_with_their_request(engine, how):
    manager, tokens = engine.manager, engine.tokens(1)
    manager.expect("e", tokens, 0.1, positions=[(0, 4 * BLOCK, 0.0), (4 * BLOCK, 8 * BLOCK, 1.0), (0, BLOCK, 2.0)])
    wait(engine, 0.1)
    assert len(manager._prefetcher.expected) == 3
    if how == "started":
        manager.get_computed_blocks("e", tokens)
        assert manager.allocate_slots("e", len(tokens)) is not None
        assert not manager._prefetcher.expected
    elif how == "said again":
        manager.expect("e", tokens, 0.1, positions=(0, BLOCK))
        wait(engine, 0.1)
        assert list(manager._prefetcher.expected) == ["e"]
    else:
        wait(engine, 3.0 + manager.config.prefetch.grace_seconds, step=0.1)
        assert not manager._prefetcher.expected
        for number in range(400):
            manager.expect(f"r{number}", tokens, 0.0, positions=[(0, BLOCK, 0.5), (BLOCK, 2 * BLOCK, 1.0)])
            wait(engine, 1.5 + manager.config.prefetch.grace_seconds, step=1.0)
        assert len(manager._ranges._parts) < 100, "nothing is kept of those that nobody came for"


def test_what_is_cancelled_or_never_comes_gives_its_room_back(engine):
    manager = engine.manager
    manager.expect("gone", engine.tokens(1), 0.1)
    manager.expect("never", engine.tokens(2), 0.1)
    wait(engine, 0.1)
    manager.dismiss("gone")
    manager.dismiss("gone")
    manager.poll()
    assert counts(engine)["cancelled"] == BLOCKS
    wait(engine, 0.1 + engine.manager.config.prefetch.grace_seconds, step=0.1)
    assert counts(engine) == {"used": 0, "late": 0, "wasted": BLOCKS, "cancelled": BLOCKS}
    assert brought(engine, 2) == 0, "what nobody used goes first"
    assert manager.stats().slots["host"]["pinned"] == 0
    manager.catalog.check()


@pytest.mark.parametrize("other", [{"salt": "other"}, {"adapter": bytes(32)}], ids=["salt", "adapter"])
def test_a_hint_finds_nothing_of_another_namespace(engine, other):
    found = engine.manager.prefetch(engine.tokens(1), **other).found
    assert found == 0, "a salt or an adapter was left out of prefetch"
    engine.manager.expect("r100", engine.tokens(2), 0.1, **other)
    wait(engine, 0.1)
    assert brought(engine, 2) == 0, "a salt or an adapter was left out of expect"
    assert engine.manager.prefetch(engine.tokens(1)).found == BLOCKS


@pytest.mark.parametrize("reset", ["before it arrives", "after"])
def test_giving_up_what_a_reset_took_is_no_error(engine, reset):
    engine.manager.expect("r100", engine.tokens(1), 0.1)
    wait(engine, 0.002 if reset == "before it arrives" else 0.2)
    engine.manager.reset()
    wait(engine, engine.manager.config.prefetch.grace_seconds + 0.5, step=0.05)
    assert brought(engine, 1) == 0
    assert engine.manager.catalog.usage(Tier.HOST).pinned == 0
    engine.manager.catalog.check()


def test_room_is_given_whole_and_in_order(engine):
    """100 blocks: three prompts of 32. The fourth waits for all its room, and the fifth does not pass it."""
    manager = engine.manager
    for stem in range(1, 6):
        manager.expect(f"r{100 + stem}", engine.tokens(stem, 31 if stem == 5 else BLOCKS), 0.1 * stem)
    wait(engine, 0.3)
    assert [brought(engine, stem) for stem in range(1, 6)] == [BLOCKS] * 3 + [0, 0]
    run_as(engine, "101", engine.tokens(1))
    wait(engine, 0.3)
    assert brought(engine, 4) == BLOCKS
    assert counts(engine)["used"] == BLOCKS


def test_one_that_is_larger_than_all_the_room_gets_a_part(engine):
    tokens = engine.tokens(50, 150)
    engine.run(tokens)
    engine.only_on_disk(tokens)
    engine.manager.expect("e", tokens, 0.1)
    wait(engine, 0.3)
    assert engine.manager.locate(tokens)["host"] == 100 * BLOCK


def test_a_late_one_is_promoted_and_not_read_twice(engine):
    manager, tokens = engine.manager, engine.tokens(1)
    before = engine.plane.pages["stage"]
    manager.expect("r200", tokens, 0.01)
    manager.poll()
    engine.plane.advance(0.004)
    _, loaded, _ = run_as(engine, "200", tokens)
    assert loaded == BLOCKS * BLOCK
    assert engine.plane.pages["stage"] - before == BLOCKS
    assert counts(engine)["late"] > 0
    assert counts(engine)["late"] + counts(engine)["used"] == BLOCKS


def test_demand_is_served_before_what_is_brought_ahead(engine):
    for stem in range(2, 5):
        engine.manager.expect(f"e{stem}", engine.tokens(stem), 10.0)
    engine.manager.poll()
    engine.plane.advance(0.001)
    seconds, loaded, name = engine.run(engine.tokens(1))
    assert loaded == BLOCKS * BLOCK, engine.manager.explain(name)
    part = max(t.slots.shape[1] for t in staged(engine, 0)[-3:])
    allowed = (BLOCKS + 2 * part + 4) / 2000 + BLOCKS / 8000 + 0.01
    assert seconds < allowed + 5e-3, engine.manager.explain(name)


def test_however_many_hints_there_are_a_step_looks_for_few(engine, monkeypatch):
    manager, foresee = engine.manager, engine.manager.catalog.foresee
    looked, dropped = [], []
    give_up = manager._prefetcher._drop

    def count(*args):
        looked.append(args)
        return foresee(*args)

    monkeypatch.setattr(manager.catalog, "foresee", count)
    monkeypatch.setattr(manager._prefetcher, "_drop", lambda hint, why: (dropped.append(hint), give_up(hint, why)))
    for number in range(300):  # of the same pages: there is nothing to wait for between two of them
        manager.expect(f"e{number}", engine.tokens(1 + number % 2), 0.1)
    most = 0
    for step in range(1000):
        before = len(looked), len(dropped)
        engine.plane.advance(0.002 if step < 500 else 0.05)
        manager.poll()
        most = max(most, len(looked) - before[0] + sum(hint.wanted is not None for hint in dropped[before[1] :]))
    assert most == 2
    assert len(looked) == len(dropped) == 300, "and each gets its turn"
    assert not manager._prefetcher.expected
    assert manager.stats().slots["host"]["pinned"] == 0


def test_hints_get_their_turn_beside_an_engine_that_computes_in_every_step(engine):
    """A step in which computed blocks are stored may do nothing else, but not every step."""
    manager, tokens = engine.manager, engine.tokens(1)
    engine.run(tokens)
    engine.only_on_disk(tokens)
    manager.expect("a", tokens, 0.1)
    for step in range(40):
        engine.plane.advance(0.002)
        manager._prefetcher.pump({}, spent=2)
        assert step or manager._prefetcher.expected["a"].wanted is None
    assert manager._prefetcher.expected["a"].tickets


@pytest.mark.parametrize("known", [None, 1296779894, 37])  # with these, hints that were uses pushed some of it out
def test_a_thousand_useless_hints_leave_the_hot_set_where_it_is(namespace, seed, known):
    """The hot set fills the host but for the share that may hold what is brought ahead."""
    seed = seed if known is None else known
    rng = random.Random(seed)

    def hits(hints):
        engine = Engine(namespace, device=40, host=200, disk=4000, prefetch={"grace_seconds": 0.2})
        engine.know(2)
        cold = [engine.tokens(200 + i, 16) for i in range(40)]
        for tokens in cold:
            engine.run(tokens)
        for _ in range(20):
            engine.plane.settle()
            engine.manager.poll()
        hot = [engine.tokens(1 + i, 16) for i in range(8)]  # 128 of 200 blocks
        for tokens in hot * 2:
            engine.run(tokens)
        before, asked = dict(engine.manager.stats().tokens_found), 0
        for number in range(100):
            for i in range(hints):
                engine.manager.expect(f"useless{number}-{i}", rng.choice(cold), 0.01)
            engine.run(hot[number % len(hot)])
            asked += 16 * BLOCK
        after = engine.manager.stats()
        assert not hints or after.prefetched["wasted"] > 0
        found = {tier: after.tokens_found[tier] - before.get(tier, 0) for tier in after.tokens_found}
        return (found.get("device", 0) + found.get("host", 0)) / asked

    without, with_hints = hits(0), hits(10)
    assert without > 0.9, f"seed {seed}"
    assert with_hints >= without - 0.01, f"seed {seed}"


def test_nobody_starves(namespace, seed):
    """Whatever is announced, taken back and reordered: each request that starts ends, and each hint ends in a count."""
    rng = random.Random(seed)
    engine = Engine(namespace, host=120, disk=1000, prefetch={"grace_seconds": 0.5})
    engine.know(2)
    for stem in range(1, 13):
        engine.run(engine.tokens(stem))
    for stem in range(1, 13):
        engine.only_on_disk(engine.tokens(stem))
    manager = engine.manager
    for number in range(120):
        name, stem = f"r{1000 + number}", rng.randint(1, 12)
        tokens = engine.tokens(stem, rng.randint(1, BLOCKS))
        engine.plane.lanes["stage"].rate = rng.choice([20.0, 200.0, 2000.0])
        kind = rng.random()
        manager.expect(name, tokens, rng.uniform(0.0, 0.3))
        if kind < 0.3:
            manager.dismiss(name)
        elif kind < 0.5:
            manager.reorder({name: rng.uniform(0.0, 1.0)})
        elif kind < 0.9:
            wait(engine, rng.uniform(0.0, 0.05))
            seconds, _, _ = run_as(engine, name[1:], tokens)
            assert seconds < 1.0, f"seed {seed}: {manager.explain(name)}"
            engine.manager.evict(Tier.DEVICE, tokens)
    wait(engine, 3.0, step=0.1)
    assert manager.stats().slots["host"]["pinned"] == 0, f"seed {seed}"
    assert not manager._prefetcher.expected
    assert manager._prefetcher._holdings.held == 0
    manager.catalog.check()


def test_a_request_that_is_put_off_and_back_again_is_given_up_once(engine):
    engine.manager.expect("e", engine.tokens(1), 0.1)
    for within in (0.1, 0.0, 0.1, 0.0, 0.1):  # at one time of the clock: entries of equal times
        engine.manager.reorder({"e": within})
    wait(engine, 0.2 + engine.manager.config.prefetch.grace_seconds, step=0.1)
    assert counts(engine)["wasted"] == BLOCKS
    assert engine.manager.stats().slots["host"]["pinned"] == 0


def test_a_queue_that_is_reordered_at_every_step_is_remembered_once(engine):
    names = [f"e{number}" for number in range(4)]
    for number, name in enumerate(names):  # whose pages do not come: the clock stands still
        engine.manager.expect(name, engine.tokens(number + 1), 0.1)
    for step in range(200):
        engine.manager.reorder(dict.fromkeys(names, 0.1 + step % 2 / 100))
        engine.manager.poll()
    assert len(engine.manager._prefetcher._hints.soon) <= len(names)


def test_a_new_order_is_only_noted_and_the_steps_that_follow_take_it_up(engine):
    manager, names = engine.manager, [f"e{number}" for number in range(100)]
    prefetcher = manager._prefetcher
    for name in names:
        manager.expect(name, engine.tokens(1), 5.0)
    manager.poll()
    due, queued = {name: prefetcher.expected[name].due for name in names}, len(prefetcher._hints.overdue)
    manager.reorder({name: 7.0 + number for number, name in enumerate(names)} | {"nobody": 1.0})
    manager.expect("e50", engine.tokens(1), 3.0)
    assert all(prefetcher.expected[name].due == due[name] for name in names if name != "e50")
    assert len(prefetcher._hints.overdue) == queued + 1
    for _ in range(7):
        manager.poll()
    now = engine.plane.now
    expected = {name: now + 7.0 + number for number, name in enumerate(names)} | {"e50": now + 3.0}
    assert {name: prefetcher.expected[name].due for name in names} == pytest.approx(expected), "the last word counts"
    assert not prefetcher._moved


def test_who_is_about_to_start_is_not_put_back_by_an_older_word(engine):
    manager = engine.manager
    manager.expect("e", engine.tokens(1), 1.0)
    manager.reorder({"e": 0.5})
    manager._prefetcher.rest("e")
    wait(engine, 0.4)
    assert brought(engine, 1) == 0, "it loads these itself"
    manager.reorder({"e": 1.0})
    wait(engine, 0.4)
    assert brought(engine, 1) == BLOCKS


@pytest.mark.parametrize("bad", [[5] * 200 + [None], [5] * 8 + [-1], [5] * 8 + ["six"], [[1, 2], [3, 4]]])
def test_a_hint_that_cannot_be_read_is_dropped_and_loses_no_answer(engine, bad):
    manager, tokens = engine.manager, engine.tokens(1)
    manager.get_computed_blocks("r", tokens)
    manager.allocate_slots("r", len(tokens))
    manager.expect("bad", bad, 0.5)
    manager.expect("good", engine.tokens(2), 1.0)
    loaded = []
    for _ in range(100):
        engine.plane.advance(0.005)
        loaded += manager.poll()
    assert [(one.request_id, one.num_computed_tokens) for one in loaded] == [("r", BLOCKS * BLOCK)]
    assert brought(engine, 2) == BLOCKS, "nobody behind it was served"
    assert manager.stats().hints_refused == 1
    assert "WARNING a hint was dropped: request 'bad'" in manager.describe()
    with pytest.raises(ValueError, match="tokens"):
        manager.expect("worse", 5, 0.5)
    manager.free("r")
    manager.catalog.check()


def test_what_a_hint_names_is_kept_no_longer_than_the_hint(engine):
    """Also while one that is far off keeps what is behind it in the queues."""
    manager, kept = engine.manager, []
    manager.expect("far", engine.tokens(1), 5.0)
    for number in range(400):
        tokens = Tokens(engine.tokens(2 + number % 6))
        kept.append(weakref.ref(tokens))
        manager.expect(f"e{number}", tokens, 50.0)
        del tokens
        manager.poll()
        manager.dismiss(f"e{number}")
        manager.free(f"e{number}")
    gc.collect()
    assert not any(tokens() is not None for tokens in kept)
    hints = manager._prefetcher._hints
    assert len(hints.overdue) <= 100, "entries of those that ended are never swept"
    manager.dismiss("far")
    wait(engine, 0.02)
    assert not any((hints.urgent, hints.overdue, hints.coming, hints.soon))


class Tokens(list):
    """Token ids that can be asked for by weak reference."""


def test_who_closes_or_flushes_waits_for_no_more_look_ahead_than_is_under_way(engine):
    manager = engine.manager
    engine.plane.lanes["stage"].rate = 100.0
    manager.costs.seed_lane("stage", 1e-4, 100.0 * PAGE)
    for stem in range(1, 9):
        manager.expect(f"e{stem}", engine.tokens(stem), 0.1)
    manager.poll()
    since, began = len(engine.plane.log), engine.plane.now
    assert manager.flush()
    assert len(engine.plane.log) == since, "a flush ordered what nobody waits for"
    assert engine.plane.now <= began + 0.1
    manager.poll()
    assert len(engine.plane.log) > since, "the look-ahead goes on afterwards"
    since = len(engine.plane.log)
    manager.close()
    assert len(engine.plane.log) == since
    assert not manager._prefetcher.expected
    assert manager.stats().slots["host"]["pinned"] == 0


def test_a_pause_between_two_hints_is_no_step_of_the_engine(engine):
    """What a look-ahead orders in a step is what the disk gives in one."""
    manager, since = engine.manager, len(engine.plane.log)
    manager.costs.seed_lane("stage", 1e-4, 100.0 * PAGE)
    engine.plane.lanes["stage"].rate = 100.0
    for stem in (1, 2):
        manager.expect(f"e{stem}", engine.tokens(stem), 10.0)
        wait(engine, 0.02, step=0.01)
        manager.dismiss(f"e{stem}")
        engine.plane.advance(60.0)
    manager.expect("e3", engine.tokens(3), 10.0)
    wait(engine, 0.02, step=0.01)
    assert staged(engine, since)
    assert all(t.slots.shape[1] <= 2 for t in staged(engine, since)), "a pause was taken for a step"

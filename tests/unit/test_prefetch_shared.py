"""Hints that name the same pages: loaded once, and kept for whoever comes."""

from __future__ import annotations

import pytest

from kvtier import lookup
from kvtier.catalog import Tier
from kvtier.content import Content
from tests.unit.test_load_policy import BLOCK, BLOCKS, Engine
from tests.unit.test_prefetch import PAGE, brought, counts, wait

HALF = BLOCKS // 2
EACH = 0.01  # seconds that a page takes to come up


@pytest.fixture
def engine(namespace):
    """Prompts 1 to 4 are on disk only; 3 and 4 have their first half in common. A slow disk, whose speed is known."""
    engine = Engine(namespace)
    engine.know()
    prompts = [engine.tokens(1), engine.tokens(2), branch(engine, 3), branch(engine, 4)]
    for tokens in prompts:
        engine.run(tokens)
    for _ in range(20):
        engine.plane.settle()
        engine.manager.poll()
    for tokens in prompts:
        for tier in (Tier.DEVICE, Tier.HOST):
            engine.manager.evict(tier, tokens)
    engine.plane.lanes["stage"].rate = 1 / EACH
    engine.manager.costs.seed_lane("stage", 1e-4, PAGE / EACH)
    return engine


def branch(engine, stem):
    return engine.tokens(3)[: HALF * BLOCK] + engine.tokens(stem)[HALF * BLOCK :]


def on_disk(engine, tokens):
    return engine.manager.locate(tokens).get("disk", 0) // BLOCK


def ended(engine):
    """Nothing is held for anybody any more."""
    engine.plane.settle()
    wait(engine, 16.0, step=0.1)
    assert engine.manager.stats().slots["host"]["pinned"] == 0
    assert engine.manager._prefetcher._holdings.held == engine.manager._prefetcher._holdings.lifted == 0
    engine.manager.catalog.check()


def test_who_is_overtaken_by_one_of_the_same_beginning_gets_the_rest(engine):
    manager, before = engine.manager, engine.plane.pages["stage"]
    manager.expect("a", branch(engine, 3), 2.0)
    wait(engine, 5 * EACH)
    assert 0 < brought_of(engine, 3) < HALF
    manager.expect("b", branch(engine, 4), 1.0)
    wait(engine, 1.5)
    assert on_disk(engine, branch(engine, 4)) == 0
    assert on_disk(engine, branch(engine, 3)) == 0, "it was given up, since some of it came by another"
    assert engine.plane.pages["stage"] - before == 3 * HALF
    ended(engine)


def brought_of(engine, stem):
    found = engine.manager.locate(branch(engine, stem))
    return (found.get("host", 0) + found.get("device", 0)) // BLOCK


def test_what_another_request_loads_itself_is_passed_over(engine):
    manager = engine.manager
    manager.expect("a", branch(engine, 3), 3.0)
    wait(engine, 5 * EACH)
    manager.policy.rule = "always"
    engine.run([*engine.tokens(3)[: HALF * BLOCK], 7])
    wait(engine, 1.5)
    assert on_disk(engine, branch(engine, 3)) == 0
    ended(engine)


@pytest.mark.parametrize("when", ["under way", "arrived"])
@pytest.mark.parametrize("end", ["dismissed", "never comes"])
def test_what_two_named_is_kept_for_the_other_when_one_does_not_come(engine, end, when):
    manager, tokens, before = engine.manager, engine.tokens(1), engine.plane.pages["stage"]
    manager.expect("a", tokens, 0.5)
    manager.expect("b", tokens, 9.0)
    hint, other = manager._prefetcher.expected["a"], manager._prefetcher.expected["b"]
    while other.wanted is None or (when == "arrived" and hint.tickets):
        wait(engine, EACH / 5)
    assert bool(hint.tickets) == (when == "under way")
    if end == "dismissed":
        manager.dismiss("a")
    else:
        wait(engine, 0.6 + manager.config.prefetch.grace_seconds)
    wait(engine, 1.0)
    assert brought(engine, 1) == BLOCKS
    assert engine.plane.pages["stage"] - before == BLOCKS, "it was read once more"
    assert not any(counts(engine).values()), "it is not known yet what becomes of it"
    manager.dismiss("b")
    manager.poll()
    assert counts(engine) == {"used": 0, "late": 0, "wasted": 0, "cancelled": BLOCKS}
    ended(engine)


def test_what_two_began_with_is_brought_for_the_other_when_one_does_not_come(engine):
    manager = engine.manager
    manager.expect("a", branch(engine, 3), 0.5)
    manager.expect("b", branch(engine, 4), 9.0)
    wait(engine, 0.8)
    manager.dismiss("a")
    wait(engine, 1.0)
    assert on_disk(engine, branch(engine, 4)) == 0
    assert on_disk(engine, branch(engine, 3)) == HALF, "what nobody else named is gone"
    ended(engine)


def test_who_waits_for_what_was_brought_for_another_is_not_let_down_by_that_one(engine):
    manager, tokens, before = engine.manager, engine.tokens(1), engine.plane.pages["stage"]
    manager.policy.rule = "always"
    manager.expect("a", tokens, 0.01)
    manager.poll()
    under_way = [job for job in engine.plane.jobs.values() if job.transfer.path[-1] is Tier.HOST]
    assert under_way
    manager.get_computed_blocks("b", tokens)
    manager.allocate_slots("b", len(tokens))
    manager.dismiss("a")
    manager.poll()
    assert not any(job.cancelled for job in under_way), "what somebody waits for was stopped"
    while not manager.ready("b"):
        manager.poll(0.05)
    assert engine.plane.pages["stage"] - before <= BLOCKS
    manager.free("b")
    ended(engine)


def test_what_is_said_again_of_a_request_is_not_brought_again(engine):
    manager, tokens, before = engine.manager, engine.tokens(1), engine.plane.pages["stage"]
    for _ in range(40):
        manager.expect("a", tokens, 3.0)
        wait(engine, 3 * EACH)
    assert brought(engine, 1) == BLOCKS
    assert engine.plane.pages["stage"] - before == BLOCKS
    assert manager.catalog.stats()["leases"] == 1
    manager.expect("a", engine.tokens(2), 3.0)  # it wants others now
    wait(engine, 1.0)
    assert brought(engine, 2) == BLOCKS
    assert on_disk(engine, tokens) == BLOCKS
    assert counts(engine)["cancelled"] == BLOCKS
    manager.expect("a", engine.tokens(2), 3.0, positions=(4 * BLOCK, 8 * BLOCK))
    wait(engine, 0.1)
    assert brought(engine, 2) == 4, "what it does not want any more is kept"
    ended(engine)


def test_taking_a_hint_back_is_done_by_the_next_step_and_not_by_the_word(engine, monkeypatch):
    """What it has to give back may be much. Until then it may be said again, and then nothing is read again."""
    manager, tokens = engine.manager, engine.tokens(1)
    manager.expect("a", tokens, 3.0)
    wait(engine, 1.0)
    before, pages = brought(engine, 1), engine.plane.pages["stage"]
    calls = []
    for name in ("release", "drop_ahead"):
        monkeypatch.setattr(manager.catalog, name, lambda *args: calls.append(args))
    manager.dismiss("a")
    manager.dismiss("a")
    manager.reorder({"a": 0.1})
    assert not manager._prefetcher.rest("a")
    assert not calls
    monkeypatch.undo()
    manager.expect("a", tokens, 3.0)
    wait(engine, 1.0)
    assert (brought(engine, 1), engine.plane.pages["stage"]) == (before, pages)
    manager.dismiss("a")
    assert manager.flush()
    assert not manager._prefetcher.expected
    assert on_disk(engine, tokens) == BLOCKS, "a flush leaves nothing that is only to be given back"
    ended(engine)


def test_a_prompt_is_read_once_however_often_it_is_looked_for(engine, monkeypatch):
    reads, looks = [], []
    foresee = engine.manager.catalog.foresee
    monkeypatch.setattr(lookup, "Content", lambda *args: reads.append(args) or Content(*args))
    monkeypatch.setattr(engine.manager.catalog, "foresee", lambda *args: looks.append(args) or foresee(*args))
    engine.manager.expect("a", engine.tokens(1), 2.0)
    wait(engine, 1.9)
    assert engine.manager._prefetcher._hints.by_name["a"].lifted
    assert (len(looks), len(reads)) == (2, 1)
    ended(engine)


def test_what_was_used_meanwhile_stays_when_its_hint_ends(engine):
    manager, tokens = engine.manager, engine.tokens(1)
    manager.expect("a", tokens, 0.5)
    wait(engine, 0.5)
    assert engine.run([*tokens[: HALF * BLOCK], 7])[1] == HALF * BLOCK
    manager.dismiss("a")
    manager.poll()
    assert brought(engine, 1) == HALF
    ended(engine)

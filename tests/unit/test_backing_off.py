"""Stores that nobody waits for back off: they neither pile up nor keep the room that a request needs."""

from __future__ import annotations

from functools import partial

import pytest

import kvtier.plane
from kvtier import _core
from kvtier.catalog import Tier
from kvtier.geometry import KVGeometry
from tests.unit.test_load_policy import BLOCK, BLOCKS, Engine
from tests.unit.test_manager import PROMPT, Rig


@pytest.fixture
def geometry():
    return KVGeometry.named("smollm2-135m", block_size=BLOCK)


def slow(namespace, **config):
    """An engine that computes at once, over a lane to host memory that moves ten pages a second."""
    engine = Engine(namespace, each=1e-6, **config)
    engine.plane.lanes["offload"].rate = 10
    return engine


def test_no_more_is_ordered_than_a_lane_moves_in_a_second_and_the_rest_follows(namespace):
    engine = slow(namespace)
    manager, prompts = engine.manager, [engine.tokens(stem) for stem in range(1, 5)]
    engine.run(prompts[0])  # nothing is known yet
    engine.plane.settle()
    manager.poll()
    for tokens in prompts[1:]:
        engine.run(tokens)
        assert manager.catalog.usage(Tier.HOST).filling <= 10, "stores pile up"
    stats = manager.stats()
    assert stats.stores_put_off == 3 * BLOCKS - 10
    assert stats.stores_dropped == 0
    for _ in range(100):
        engine.plane.advance(1.0)
        manager.poll()
        assert manager.catalog.usage(Tier.HOST).filling <= 11
    for tokens in prompts:
        manager.evict(Tier.DEVICE, tokens)
        assert manager.locate(tokens) == {"host": BLOCKS * BLOCK}, "what was put off never went down"


def test_what_was_put_off_and_is_gone_is_not_stored(namespace):
    engine = slow(namespace)
    manager = engine.manager
    engine.run(engine.tokens(1))
    engine.plane.settle()
    manager.poll()
    engine.run(engine.tokens(2))
    manager.evict(Tier.DEVICE, engine.tokens(2))
    for _ in range(20):
        engine.plane.advance(1.0)
        manager.poll()
    assert engine.plane.pages["offload"] == BLOCKS + 10
    assert not manager.placement.under_way


@pytest.mark.parametrize("running", [False, True], ids=["who enters", "who grows"])
def test_stores_that_have_not_begun_give_way_to_who_needs_their_room(running, namespace):
    engine = slow(namespace, device=2 * (BLOCKS + 1))
    manager, began = engine.manager, engine.plane.now
    new = engine.tokens(3, 4)
    if running:
        manager.get_computed_blocks("new", new[:1])
        assert manager.allocate_slots("new", 1) is not None
        manager.append_tokens("new", new[1:])
    engine.run(engine.tokens(1))
    engine.run(engine.tokens(2, BLOCKS - running))
    assert manager.catalog.usage(Tier.DEVICE).pinned == 2 * BLOCKS - running
    if not running:
        new = engine.tokens(3)
        manager.get_computed_blocks("new", new)
    if manager.allocate_slots("new", len(new)) is None:  # by message: it takes an answer
        manager.poll()
        assert manager.allocate_slots("new", len(new)) is not None, "it waits until all is stored"
    assert engine.plane.now - began < 0.1, "a step waited"
    assert manager.stats().stores_put_off == BLOCKS - running
    assert "cancelled" not in manager.stats().failures


def test_a_load_from_disk_has_the_room_of_stores_that_have_not_begun(geometry, namespace, tmp_path, monkeypatch):
    throttle = _core.Throttle()
    monkeypatch.setattr(kvtier.plane, "LocalDataPlane", partial(kvtier.plane.LocalDataPlane, throttle=throttle))
    page = geometry.page_bytes
    rig = Rig(
        geometry, namespace, tmp_path, load_policy="always", host={"size": 12 * page}, mover={"bytes_in_flight": page}
    )
    with rig.manager as manager:
        rig.run("wanted", PROMPT)
        rig.evict(Tier.DEVICE, Tier.HOST)
        throttle.set(page / 0.3)
        for stem in (1, 2):
            rig.run(f"r{stem}", [1000 * stem + i for i in range(6 * BLOCK + 1)])
            while manager.stats().bytes_moved["device_to_host"] < (1 + stem) * 6 * page:
                manager.poll(0.01)
        assert manager.catalog.usage(Tier.HOST).pinned > 6, "both are to be written, one page at a time"
        assert manager.get_computed_blocks("again", PROMPT).num_tokens == 6 * BLOCK
        assert manager.allocate_slots("again", len(PROMPT)) is not None
        throttle.set(0)
        while not manager.ready("again"):
            manager.poll(1.0)
        assert manager.num_computed_tokens("again") == 6 * BLOCK, "stores kept the room in host memory"

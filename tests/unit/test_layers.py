"""A prefix that comes layer by layer: what is cut, what is promised, and what becomes of it when it does not come."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvtier import layers
from kvtier.catalog import PageStatus, Tier
from kvtier.choice import ONBOARD
from kvtier.layers import Layers
from tests.unit.test_load_policy import BLOCK, BLOCKS, Engine

PAGE = 1 << 20
COUNT = 8


def test_a_load_is_cut_at_layers_and_no_finer_than_is_worth_a_copy() -> None:
    whole = Layers(4, 4096)
    assert whole.cuts(10_000) == (1024, 2048, 3072, 4096)
    assert whole.cuts(2 * layers._SLICE_BYTES // 4096) == (2048, 4096)
    assert whole.cuts(1) == ()
    assert Layers(3, 3000).cuts(10_000) == (), "its layers lie on no multiple of 16 bytes"
    odd = Layers(5, 5 * 1024).cuts(3 * layers._SLICE_BYTES // (5 * 1024) + 1)
    assert odd == (1024, 3072, 5120)
    assert [Layers(5, 5 * 1024).slices_until(layer, odd) for layer in range(5)] == [1, 2, 2, 3, 3]
    assert whole.slices_until(3, ()) == 1
    with pytest.raises(ValueError, match="layer: 4; accepted: 0 to 3"):
        whole.slices_until(4, ())


@dataclass(frozen=True)
class Geometry:
    block_size: int = BLOCK
    dtype: str = "bfloat16"
    layers: int = COUNT
    payload_bytes: int = PAGE


@pytest.fixture
def engine(namespace):
    """Prompts 1 to 3 are known, and prompt 1 is in host memory only."""
    engine = Engine(namespace)
    engine.manager.geometry = Geometry()
    engine.know()
    for stem in range(1, 4):
        engine.run(engine.tokens(stem))
    engine.plane.settle()
    engine.manager.poll()
    engine.manager.evict(Tier.DEVICE, engine.tokens(1))
    assert engine.manager.locate(engine.tokens(1)) == {"host": BLOCKS * BLOCK}
    return engine


def start(engine, name, tokens):
    manager = engine.manager
    promised = manager.get_computed_blocks(name, tokens).num_tokens
    assert manager.allocate_slots(name, len(tokens)) is not None
    return promised


def test_what_is_in_host_memory_comes_by_layers_to_slots_that_stay(engine):
    manager, tokens = engine.manager, engine.tokens(1)
    manager.can_wait_for_layers()
    promised = start(engine, "a", tokens)
    assert manager.comes_by_layer("a")
    assert engine.plane.log[-1].path == ONBOARD
    assert engine.plane.log[-1].cuts == tuple((i + 1) * PAGE // COUNT for i in range(COUNT))
    table = manager.block_table("a")
    assert manager.wait_for_layer("a", 0)
    assert manager.wait_for_layer("a", COUNT - 1)
    (loaded,) = manager.poll()
    assert loaded.num_computed_tokens == promised == BLOCKS * BLOCK
    assert (manager.block_table("a") == table).all()
    assert manager.wait_for_layer("a", COUNT - 1), "it is ready"
    assert not manager.comes_by_layer("a")
    with pytest.raises(ValueError, match="layer: 8"):
        manager.wait_for_layer("a", COUNT)
    manager.free("a")
    manager.catalog.check()


def test_an_engine_that_did_not_ask_gets_whole_pages(engine):
    start(engine, "a", engine.tokens(1))
    assert not engine.manager.comes_by_layer("a")
    assert not engine.plane.log[-1].cuts
    with pytest.raises(ValueError, match="after can_wait_for_layers"):
        engine.manager.wait_for_layer("a", 0)


def test_what_the_disk_has_comes_whole(engine):
    engine.manager.can_wait_for_layers()
    tokens = engine.tokens(2)
    engine.only_on_disk(tokens)
    start(engine, "a", tokens)
    assert not engine.manager.comes_by_layer("a")
    assert not any(transfer.cuts for transfer in engine.plane.log)


def test_what_may_leave_the_device_meanwhile_makes_it_come_whole(engine):
    manager, tokens = engine.manager, engine.tokens(1)
    manager.policy.rule = "always"  # what was chosen is not looked at again
    manager.can_wait_for_layers()
    manager.get_computed_blocks("a", tokens)
    start(engine, "b", tokens[: 8 * BLOCK + 1])
    while not manager.ready("b"):
        manager.poll(0.1)
    manager.free("b")  # its pages are on the device, and nobody keeps them there
    manager.allocate_slots("a", len(tokens))
    assert not manager.comes_by_layer("a")
    while not manager.ready("a"):
        manager.poll(0.1)
    assert manager.num_computed_tokens("a") == BLOCKS * BLOCK


@pytest.mark.parametrize("why", ["slow", "failed", "reset", "preempted", "late"])
def test_a_wait_ends_when_it_will_not_come(engine, why):
    manager, plane, tokens = engine.manager, engine.plane, engine.tokens(1)
    manager.can_wait_for_layers()
    start(engine, "a", tokens)
    (job,) = [job for job in plane.jobs.values() if job.transfer.path == ONBOARD]
    if why == "slow":
        plane.lanes["onboard"].rate = 1.0  # 32 s, where computing takes 0.16
    elif why == "failed":
        plane.advance(0.002)
        job.cancelled, job.status[0, -1] = True, PageStatus.CORRUPT
        plane.cancel(job.transfer.ticket)
    elif why == "reset":
        manager.reset()
    elif why == "late":
        manager.policy.rule = "always"
        manager._loader._loading["a"].watch.review = float("inf")
        plane.lanes["onboard"].rate = 0.001
    if why == "preempted":
        manager.preempt("a")
        assert not manager.comes_by_layer("a")
    began = plane.now
    assert not manager.wait_for_layer("a", COUNT - 1)
    if why == "slow":
        assert plane.now - began < 2.3 * BLOCKS * engine.each, "no longer than computing would have taken, twice"
    if why != "preempted":
        while not manager.ready("a"):
            plane.advance(0.01)
            manager.poll()
        assert manager.num_computed_tokens("a") < BLOCKS * BLOCK
    plane.settle()
    manager.poll()
    manager.free("a")
    manager.catalog.check()

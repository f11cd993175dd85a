"""One call for a batch that has made a pass is the same as the single calls for each of its requests."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from disk_kit import in_child
from kvtier import _core
from kvtier.catalog import Catalog, Tier, TierSpec
from kvtier.content import Content
from kvtier.manager import CacheManager
from kvtier.sim.draw import draw_story
from kvtier.sim.engine import SimulatedEngine
from kvtier.sim.simulation import Simulation
from tests.unit.test_load_policy import BLOCK, Engine


def by_single_calls(manager: CacheManager, made: dict[str, list[int]]):
    """What ``advance`` does, as an engine would without it."""
    grown, had = {}, {request_id: manager._known(request_id).num_tokens for request_id in made}
    for request_id, tokens in made.items():
        manager.append_tokens(request_id, tokens)
    for request_id, tokens in made.items():
        before = len(manager.block_table(request_id))
        table = manager.allocate_slots(request_id, had[request_id] + len(tokens))
        if table is None or len(table) != before:
            grown[request_id] = None if table is None else table[before:].tolist()
    for request_id, computed in had.items():
        manager.cache_blocks(request_id, computed)
    return grown


class SinglyEngine(SimulatedEngine):
    def _advance(self, made):
        return by_single_calls(self.manager, made)


def pages(simulation):
    catalog = simulation.engine.catalog
    return [[array.tolist() for array in catalog.contents(tier)] for tier in simulation.plane.content]


@pytest.mark.parametrize("seed", range(40, 52))
def test_a_story_told_by_single_calls_comes_to_the_same_tables_pages_and_catalog(seed):
    story, together = draw_story(seed, 500, faults=seed % 2 == 0, audit_every=50)
    one, other = (Simulation(story.setup, kind, audit_every=50) for kind in (SimulatedEngine, SinglyEngine))
    for number, step in enumerate(story.steps):
        one.apply(step)
        other.apply(step)
        if step[0] == "decode":
            assert pages(one) == pages(other), f"seed {seed}, step {number}: {step}"
            assert one.engine.catalog.stats() == other.engine.catalog.stats()
    one.finish()
    other.finish()
    assert one.digest == other.digest == together.digest, f"seed {seed}"  # of all orders and tables
    assert one.counts == other.counts


def test_stories_decode_across_blocks_with_room_and_without():
    counts = Counter[str]()
    for seed in range(40, 44):
        counts += draw_story(seed, 500, audit_every=50)[1].counts
    assert counts["tokens decoded"] > 100
    assert counts["no room while decoding"] > 0


@pytest.fixture
def running(namespace):
    """A manager on which "a" and "b" run: "a" has two tokens of a second block, "b" a whole block."""
    engine = Engine(namespace, device=6)
    manager = engine.manager
    for name, tokens in (("a", list(range(BLOCK + 2))), ("b", list(range(50, 50 + BLOCK)))):
        manager.get_computed_blocks(name, tokens)
        manager.allocate_slots(name, len(tokens))
    return manager


def state(manager):
    return [
        (name, len(s.content), s.table.tolist(), s.cached, s.growing.noted) for name, s in manager._sequences.items()
    ], list(manager._gathering.waiting)


def test_tokens_within_a_block_need_nothing_and_the_next_block_brings_a_slot(running):
    assert running.advance({"a": 1}) == {}
    assert [len(running.block_table(name)) for name in "ab"] == [2, 1]
    grown = running.advance({"a": [2], "b": np.uint32(7)})
    assert grown == {"b": running.block_table("b")[1:].tolist()}
    assert len(grown["b"]) == 1
    for _ in range(BLOCK):
        grown = running.advance({"a": 5, "b": np.array([5])})
    assert [running.num_computed_tokens(name) for name in "ab"] == [2 * BLOCK, 2 * BLOCK]
    assert len(running.block_table("a")) == 3


def test_several_tokens_may_cross_more_than_one_block(running):
    grown = running.advance({"a": list(range(2 * BLOCK))})
    assert grown == {"a": running.block_table("a")[2:].tolist()}
    assert len(grown["a"]) == 2
    assert running.num_computed_tokens("a") == BLOCK


def test_without_room_the_tokens_count_and_only_the_slots_are_missing(running):
    assert running.allocate_slots("b", 4 * BLOCK) is not None
    grown = running.advance({"a": list(range(BLOCK)), "b": 1})
    assert grown == {"a": None}
    assert running._known("a").num_tokens == 2 * BLOCK + 2
    assert running.num_computed_tokens("a") == BLOCK
    with pytest.raises(ValueError, match=r"^tokens\['a'\]: the .* tokens before them are computed in slots; .* cover"):
        running.advance({"a": 1})
    running.preempt("b")
    assert len(running.allocate_slots("a", 2 * BLOCK + 2)) == 3
    assert running.advance({"a": 1}) == {}


def test_nothing_changes_by_a_call_that_is_refused(running):
    running.get_computed_blocks("waits", [1, 2, 3])
    running.advance({"a": 1, "b": 1})
    for accepted, wrong, message in (
        ("a", {"nobody": 1}, r"^request_id: 'nobody' is not known"),
        ("a", {"waits": 1}, r"^request_id: 'waits' is matched; only a ready request"),
        ("a", {"b": -1}, r"^tokens\['b'\]: -1 is not a token id"),
        ("a", {"b": [1, 1 << 32]}, r"^tokens\['b'\]: 4294967296 is not a token id"),
        ("a", {"b": True}, r"^tokens\['b'\]: expected a flat sequence of integers, got bool"),
        ("a", {"b": 1.5}, r"^tokens\['b'\]: 1.5; accepted: a sequence of token ids"),
        ("a", {"b": "12"}, r"^tokens\['b'\]: '12'; accepted: a sequence of token ids"),
        ("a", {"b": [0] * 7 * BLOCK}, r"^tokens\['b'\]: .* need 9 device slots; there are 6"),
        ("b", {"a": [1] * 100}, r"^tokens\['a'\]: .* device slots; there are 6"),
    ):
        before = state(running)
        for made in ({accepted: 3} | wrong, wrong | {accepted: [3] * BLOCK}):
            with pytest.raises(ValueError, match=message):
                running.advance(made)
            assert state(running) == before, made
    for wrong in (None, 5, ["a"], "a"):
        with pytest.raises(ValueError, match=r"^tokens: .*; accepted: token ids by request id"):
            running.advance(wrong)


def test_who_runs_no_longer_is_not_advanced(running):
    running.advance({"a": 1, "b": 1})
    running.preempt("a")
    running.free("b")
    for name, why in (("a", "preempted"), ("b", "not known")):
        with pytest.raises(ValueError, match=rf"^request_id: '{name}' is {why}"):
            running.advance({name: 1})
    running.resume("a")
    assert running.allocate_slots("a", BLOCK + 3) is not None
    while not running.ready("a"):
        running.poll(0.01)
    assert running.advance({"a": 1}) == {}
    running.close()
    with pytest.raises(ValueError, match="the cache is closed"):
        running.advance({"a": 1})


def test_what_the_catalog_had_no_room_for_is_offered_again_at_the_next_token(running, monkeypatch):
    asked = []
    monkeypatch.setattr(running._lookup, "root", asked.append)  # more namespaces than the catalog can tell apart
    running._gathering._most = 1
    for _ in range(3):
        running.advance({"b": 1})
        running.flush()
    assert len(asked) == 3


def test_only_a_request_that_has_a_name_and_was_made_can_decode():
    catalog = Catalog([TierSpec(Tier.DEVICE, 8)], block_size=4, labels="content")
    decoding = _core.Decoding(catalog.native, Tier.DEVICE, 4)
    with pytest.raises(ValueError, match=r"^request: 0 names no request; accepted: 1 or more"):
        _core.Growing(Content([]).native, 0)
    with pytest.raises(TypeError, match=r"^growing: it was never made; accepted"):
        decoding.begin("a", _core.Growing.__new__(_core.Growing))
    assert decoding.advance({"a": 1}) is None


def test_what_python_collects_in_the_middle_of_a_step_is_not_used_any_more(monkeypatch):
    """Any object that the step makes may lead to that; freed memory is filled with what is no address."""
    monkeypatch.setenv("PYTHONMALLOC", "debug")
    done = in_child(
        """
import gc, os
from kvtier import _core
from kvtier.catalog import Catalog, Tier, TierSpec
from kvtier.content import Content

catalog = Catalog([TierSpec(Tier.DEVICE, 4096)], block_size=4, labels="content")
decoding = _core.Decoding(catalog.native, Tier.DEVICE, 4)
names = [f"request {number}" for number in range(1000)]
for number, name in enumerate(names):
    decoding.begin(name, _core.Growing(Content([]).native, number + 1))
made = {str(name.encode(), "ascii"): 1 for name in names}  # under names of its own

def collected(phase, info):
    made.clear()
    decoding.clear()

gc.callbacks.append(collected)
gc.set_threshold(1)
grown = decoding.advance(made)[0]
gc.set_threshold(0)
assert sorted(grown) == sorted(names)
assert all(len(slots) == 1 for slots in grown.values())
print("whole", flush=True)
os._exit(0)
"""
    )
    assert done.stdout == "whole\n", done.stderr


def test_blocks_of_a_batch_are_copied_behind_the_stream_on_which_they_were_computed(running, monkeypatch):
    streams, told = [5], []
    running.flush()
    gathering = running._gathering
    monkeypatch.setattr(gathering, "stream", lambda: streams[0])
    monkeypatch.setattr(running.placement, "on_computed", lambda nodes, *, behind: told.append((len(nodes), behind)))
    running.advance({"b": 1})  # its first block is computed
    streams[0] = 6
    running.advance({"a": list(range(BLOCK))})
    assert told == [(1, 5)], "copied behind another stream than it was computed on"
    gathering.flush()
    assert told[1:] == [(1, 6)]

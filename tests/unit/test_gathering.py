"""New blocks wait for others before they go down: not long, not where they are large, and none is lost by it."""

from __future__ import annotations

import pytest

from kvtier import gathering
from kvtier.catalog import Tier
from kvtier.content import Content
from kvtier.gathering import Gathering
from kvtier.sequence import Sequence
from tests.unit.test_load_policy import BLOCK, Engine


class Below:
    """Stands for the catalog and the write policy, and says what they were told."""

    def __init__(self, page_bytes, stream=None):
        self.told, self.behind, self.requests, self.racing = [], None, {}, {}
        self.gathering = Gathering(self, self, self.requests, self.racing, page_bytes, stream)

    def sequence(self, name):
        self.requests[name] = Sequence(name, 1 + len(self.requests), b"", Content())
        return self.requests[name]

    def index(self, computed):
        nodes = []
        for sequence in computed:
            nodes += range(sequence.cached, sequence.growing.noted)
            sequence.cached = sequence.growing.noted
        return nodes

    def on_computed(self, nodes, *, behind):
        self.told.append(list(nodes))
        self.behind = behind


MANY = gathering._BLOCKS


def test_blocks_are_told_together_when_they_are_many_or_have_waited_some_steps():
    below = Below(4096)
    one, other, gathered = below.sequence("one"), below.sequence("other"), below.gathering
    gathered.add(one, 2)
    gathered.add(one, 2)  # said again
    gathered.add(other, MANY - 3)
    assert not gathered.step()
    gathered.add(one, 3)
    assert not below.told
    assert gathered.step()
    assert below.told == [[0, 1, 2, *range(MANY - 3)]]
    gathered.add(other, MANY - 2)
    steps = [gathered.step() for _ in range(gathering._STEPS)]
    assert steps == [False] * (gathering._STEPS - 1) + [True], "one block waited for no others"
    assert below.told[1:] == [[MANY - 3]]
    gathered.add(other, 2 * MANY - 2)
    steps = [gathered.step(busy=True) for _ in range(gathering._LONG)]
    assert steps == [False] * (gathering._LONG - 1) + [True]
    gathered.flush()
    assert len(below.told) == 3
    assert not gathered.waiting


def test_blocks_of_a_batch_that_decodes_are_told_together_by_the_names_of_those_that_computed_them():
    below = Below(4096)
    one, other = below.sequence("one"), below.sequence("other")
    for step in range(2):
        one.growing.noted = other.growing.noted = step + 1
        below.gathering.note(["one", "other"], 2)
    assert not below.told
    below.gathering.let_go(other)
    assert below.told == [[0, 1, 0, 1]]
    assert not below.gathering.waiting
    below.gathering.let_go(one)
    assert len(below.told) == 1


def test_large_blocks_wait_for_the_end_of_a_step_and_a_prompt_and_what_is_before_a_tail_for_nobody():
    large = Below(gathering._BYTES)
    large.gathering.add(large.sequence("one"), 1)
    assert not large.told
    assert large.gathering.step()
    prompt = Below(4096)
    prompt.gathering.add(prompt.sequence("one"), 2 * MANY)
    small = Below(4096)
    small.racing["one"] = small.sequence("one")
    small.gathering.add(small.requests["one"], 1)
    assert large.told == small.told == [[0]]
    assert prompt.told == [list(range(2 * MANY))]


def test_what_waits_is_copied_behind_the_stream_that_it_was_computed_on():
    streams = [5]
    below = Below(4096, lambda: streams[0])
    one, gathered = below.sequence("one"), below.gathering
    gathered.add(one, 2)
    streams[0] = 6
    gathered.add(one, 3)
    assert (below.told, below.behind) == ([[0, 1]], 5), "copied behind another stream than it was computed on"
    streams[0] = 7
    gathered.flush()
    assert (below.told[1:], below.behind) == ([[2]], 6)


LOOKS = {
    "get_computed_blocks": lambda m, tokens: m.get_computed_blocks("b", tokens).num_tokens == 2 * BLOCK,
    "locate": lambda m, tokens: m.locate(tokens) == {"device": 2 * BLOCK},
    "num_computed_tokens": lambda m, tokens: m.num_computed_tokens("a") == 2 * BLOCK,
    "prefetch": lambda m, tokens: m.prefetch(tokens).found == 2 * BLOCK // BLOCK,
    "stats": lambda m, tokens: m.stats().slots["device"]["ready"] == 2 * BLOCK // BLOCK,
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS.keys())
def test_whoever_looks_finds_what_waits(namespace, look):
    engine = Engine(namespace)
    manager, tokens = engine.manager, engine.tokens(1, 2)
    manager._gathering._most = 8
    manager.get_computed_blocks("a", tokens)
    manager.allocate_slots("a", len(tokens))
    manager.cache_blocks("a", 2 * BLOCK)
    assert manager._gathering.waiting
    assert look(manager, tokens)
    manager.flush()
    manager.catalog.check()


@pytest.mark.parametrize("how", ["free", "flush", "steps", "preempt"])
def test_what_waits_is_stored_before_nothing_holds_it(namespace, how):
    engine = Engine(namespace)
    manager, tokens = engine.manager, engine.tokens(1, 2)
    manager._gathering._most = 8  # as of small blocks
    manager.get_computed_blocks("a", tokens)
    manager.allocate_slots("a", len(tokens))
    manager.cache_blocks("a", 2 * BLOCK)
    assert not manager.placement.under_way
    if how == "steps":
        for _ in range(gathering._STEPS):
            manager.poll()
    elif how == "flush":
        assert manager.flush()
    else:
        getattr(manager, how)("a")
    told = manager.placement.under_way or manager.locate(tokens) == {"device": 2 * BLOCK}
    assert told, "nobody was told of what waited"
    manager.flush()
    manager.free("a")
    manager.evict(Tier.DEVICE, tokens)
    assert manager.locate(tokens) == {"host": 2 * BLOCK}

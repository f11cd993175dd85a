"""New blocks wait for others before they go down: not long, not where they are large, and none is lost by it."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier import gathering
from kvtier.catalog import Tier
from kvtier.gathering import Gathering
from tests.unit.test_load_policy import BLOCK, Engine


def blocks(*numbers):
    return np.array(numbers, np.uint32)


def test_blocks_are_ordered_together_when_they_are_many_or_have_waited_some_steps():
    waiting = Gathering(4096)
    assert not len(waiting.step())
    assert not len(waiting.add(blocks(1, 2)))
    assert waiting.add(blocks(*range(3, 10))).tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert not len(waiting.add(blocks(10)))
    steps = [waiting.step().tolist() for _ in range(gathering._STEPS)]
    assert steps == [[]] * (gathering._STEPS - 1) + [[10]]
    assert not len(waiting.take())


def test_large_blocks_wait_for_nobody():
    assert Gathering(gathering._BYTES).add(blocks(7)).tolist() == [7]


@pytest.mark.parametrize("how", ["free", "flush", "steps", "preempt"])
def test_what_waits_is_stored_before_nothing_holds_it(namespace, how):
    engine = Engine(namespace)
    engine.manager.placement._computed = Gathering(4096)  # small blocks
    manager, tokens = engine.manager, engine.tokens(1, 2)
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
    assert manager.placement.under_way or manager.locate(tokens) == {"device": 2 * BLOCK}
    manager.flush()
    manager.free("a")
    manager.evict(Tier.DEVICE, tokens)
    assert manager.locate(tokens) == {"host": 2 * BLOCK}

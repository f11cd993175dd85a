"""What is chosen, by numbers: what a prefix costs, and what others bring already."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.catalog import Tier
from kvtier.choice import ONBOARD, STAGE, STAGE_ONBOARD, Choice, Progress, Watch, choose
from kvtier.costmodel import CostModel
from kvtier.messages import Priority

BLOCK, PAGE = 16, 1 << 20
PASS, TOKEN, PAIR = 1e-3, 1e-4, 1e-8  # seconds


@pytest.fixture
def model() -> CostModel:
    model = CostModel(PAGE)
    for lane in ("stage", "onboard"):
        model.seed_lane(lane, 1e-4, 1e9 if lane == "stage" else 1e10)
    model.seed_prefill((PASS, TOKEN, PAIR), 512)
    return model


def prefill(tokens: int, context: int) -> float:
    return -(-tokens // 512) * PASS + tokens * TOKEN + tokens * (context + tokens / 2) * PAIR


def test_what_is_missing_is_computed_behind_what_is_there(model: CostModel) -> None:
    watch = Watch(model, BLOCK, 5.0, None)
    assert watch.weigh(Progress(100, 110, come=0, left=10, orders=1), 6.0).wait_s == 1.0
    watch.note(90, 5.9)
    weighed = watch.weigh(Progress(100, 110, come=90, left=10, orders=1), 6.0)
    assert weighed.compute_s == pytest.approx(prefill(160, 1600), rel=0.02), "what the prefix costs was left out"
    assert weighed.wait_s == pytest.approx(10 * 0.01 - 0.1, abs=1e-9)
    assert watch.weigh(Progress(110, 110, come=90, left=0, orders=1), 6.0).wait_s == 0.0


def test_what_others_bring_is_waited_for_and_not_read_again(model: CostModel) -> None:
    model.submitted(7, STAGE, 64, Priority.PREFETCH, 0.0)
    until = model.expected_end([7])
    tiers, filling = np.full(64, int(Tier.DISK), np.uint8), np.full(64, 7, np.uint64)
    now = 0.9 * until
    chosen = choose(model, tiers, filling, 65 * BLOCK, BLOCK, now)
    assert chosen.blocks == 64
    brought = until - now + model.load(ONBOARD, 64, now)
    assert chosen.load_s == pytest.approx(brought), "what others bring was counted as read again"
    alone = choose(model, tiers, np.zeros(64, np.uint64), 65 * BLOCK, BLOCK, now)
    assert alone.load_s == pytest.approx(model.load(STAGE_ONBOARD, 64, now))
    assert alone.load_s > 2 * brought


def test_what_others_bring_to_the_device_is_not_brought_there_again(model: CostModel) -> None:
    for ticket, path, tier in ((7, STAGE_ONBOARD, Tier.DISK), (8, ONBOARD, Tier.HOST)):
        model.submitted(ticket, path, 64, Priority.DEMAND, 0.0)
        until = model.expected_end([ticket])
        tiers, filling = np.full(64, int(tier), np.uint8), np.full(64, ticket, np.uint64)
        chosen = choose(model, tiers, filling, 65 * BLOCK, BLOCK, 0.0)
        assert chosen.load_s == pytest.approx(until), "it takes as long as for whom it was ordered"
        theirs = choose(model, tiers, filling, 65 * BLOCK, BLOCK, 0.0, foreign=True)
        assert theirs.load_s == pytest.approx(until + model.load(ONBOARD, 64, 0.0)), "the engine's blocks are others"
    mixed = np.repeat(np.array([Tier.DISK, Tier.HOST], np.uint8), [64, 16])
    coming = np.repeat(np.array([7, 0], np.uint64), [64, 16])
    chosen = choose(model, mixed, coming, 81 * BLOCK, BLOCK, 0.0)
    assert chosen.load_s == pytest.approx(max(model.expected_end([7]), model.load(ONBOARD, 16, 0.0)))


def test_the_last_order_is_not_waited_for_for_ever(model: CostModel) -> None:
    """What came quickly says nothing of an order that has not ended since: it takes as long again, if it is the last
    one, too."""
    watch = Watch(model, BLOCK, 0.0, None)
    watch.note(8, 0.01)
    soon, late = (watch.weigh(Progress(8, 16, 8, 8, 1), now) for now in (0.015, 10.0))
    assert not soon.computing_wins
    assert late.wait_s == pytest.approx(9.99)
    assert late.computing_wins


def test_what_comes_is_noted_also_before_it_is_time_to_weigh(model: CostModel) -> None:
    """A pace is known by when the last of it came, not by when somebody looked."""
    choice = Choice(32, 32, load_s=0.08, compute_s=0.0, all_loaded_s=0.08, all_computed_s=1.0, why="")
    watch = Watch(model, BLOCK, 0.0, choice)
    assert watch.overtaken(Progress(4, 32, come=4, left=28, orders=2), 0.01) is None
    assert watch.overtaken(Progress(4, 32, come=4, left=28, orders=2), 0.02) is None, "it was not time to look"
    watch.note(4, 0.1)
    assert watch.review == pytest.approx(0.1, abs=5e-3)
    weighed = watch.overtaken(Progress(4, 32, come=4, left=28, orders=2), 0.11)
    assert weighed is not None
    assert weighed.wait_s == pytest.approx(2 * 0.1), "each of two orders takes as long as nothing has been heard"
    assert watch.overtaken(Progress(4, 32, come=4, left=28, orders=2), 9.0) is None, "it is weighed no more"

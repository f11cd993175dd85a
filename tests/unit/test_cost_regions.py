"""What was learnt of sizes that today's traffic does not have is kept, and a real change of speed is followed."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from kvtier.catalog import Tier
from kvtier.costmodel import CostModel
from kvtier.messages import Completion, HopReport

PASS = 2048
PAGE = 1 << 20
SIZES = (1024, 8192, 65536)
SPEEDS = {
    "mixed": (10e-3, 50e-6, 2e-9),
    "most of it a pass": (30e-3, 10e-6, 1e-10),
    "most of it tokens": (1e-3, 2e-4, 1e-9),
    "most of it pairs": (1e-3, 10e-6, 1e-7),
}
ONBOARD = (Tier.HOST, Tier.DEVICE)


class Prefills:
    """An engine of known speed, which reports its passes to a model."""

    def __init__(self, speed: str, noise: float, seed: int) -> None:
        self.model = CostModel(PAGE)
        self.speed, self.noise, self.random = SPEEDS[speed], noise, random.Random(seed)

    def true(self, tokens: int, context: int) -> float:
        fixed, token, pair = self.speed
        return fixed + token * tokens + pair * tokens * (context + tokens / 2)

    def one(self, tokens: int, context: int) -> None:
        seconds = self.true(tokens, context) * self.random.lognormvariate(0, self.noise)
        self.model.observe_prefill(tokens, context, seconds)

    def prompt(self, tokens: int) -> None:
        for first, last in pairwise([*range(0, tokens, PASS), tokens]):
            self.one(last - first, first)

    def tails(self, count: int) -> None:
        """What device hits leave to be computed."""
        for _ in range(count):
            self.one(self.random.randint(1, 16), self.random.choice((1024, 4096, 8192)))

    def off(self, tokens: int, context: int = 0) -> float:
        """Predicted over true."""
        ends = [*range(0, tokens, PASS), tokens]
        true = sum(self.true(last - first, context + first) for first, last in pairwise(ends))
        return self.model.recompute(tokens, context) / true


def learnt(speed: str, noise: float, seed: int) -> Prefills:
    engine = Prefills(speed, noise, seed)
    for tokens in (1024, 8192, 65536, 1024, 8192):
        engine.prompt(tokens)
    return engine


@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize(("noise", "factor"), [(0.0, 1.02), (0.05, 1.2), (0.2, 2.0)])
@pytest.mark.parametrize("long", [None, 1024, 8192])
def test_short_tails_do_not_change_what_is_known_of_long_prompts(
    speed: str, noise: float, factor: float, long: int | None, seed: int
) -> None:
    engine = learnt(speed, noise, seed)
    for _ in range(100):
        engine.tails(40)
        if long is not None:
            engine.prompt(long)
        for tokens in SIZES:
            assert 1 / factor < engine.off(tokens) < factor, f"seed {seed}, {tokens}: the long ones were forgotten"


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.2])
def test_long_passes_of_one_size_alone_are_told_apart_by_the_tails_that_follow(noise: float, seed: int) -> None:
    engine = Prefills("mixed", noise, seed)
    for _ in range(20):
        engine.prompt(8192)
    engine.tails(3000)
    for tokens in (1024, 8192):
        assert 1 / 1.4 < engine.off(tokens) < 1.4, f"seed {seed}: long passes were told of by tails wrongly"


@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize("change", [3.0, 1 / 3])
@pytest.mark.parametrize("coefficients", [1, 3], ids=["the fixed cost", "all"])
def test_a_changed_speed_is_followed_in_the_sizes_that_come(
    speed: str, change: float, coefficients: int, seed: int
) -> None:
    """Within 32 tails for tails, and within eight prompts of four passes, one in 40 requests, for those."""
    engine = learnt(speed, 0.05, seed)
    engine.tails(1000)
    engine.speed = tuple(c * change if i < coefficients else c for i, c in enumerate(engine.speed))
    engine.tails(32)
    assert 1 / 1.4 < engine.off(8, 4096) < 1.4, f"seed {seed}"
    for _ in range(8):
        engine.tails(39)
        engine.prompt(8192)
    assert 1 / 1.4 < engine.off(8192) < 1.4, f"seed {seed}"
    assert 1 / 1.4 < engine.off(8, 4096) < 1.4, f"seed {seed}"


class Onboard:
    """A lane that each transfer finds idle."""

    def __init__(self, noise: float = 0.0, seed: int = 0) -> None:
        self.model = CostModel(PAGE)
        self.noise, self.random, self.now, self.tickets = noise, random.Random(seed), 100.0, 0

    def move(self, blocks: int, fixed: float = 1e-4, rate: float = 8e9) -> None:
        self.tickets, size = self.tickets + 1, blocks * PAGE
        seconds = (fixed + size / rate) * self.random.lognormvariate(0, self.noise)
        hop = HopReport("onboard", size, 0.0, seconds, self.now, self.now + seconds, size)
        status = np.ones((1, blocks), np.uint8)
        self.model.completed(Completion(self.tickets, True, status, (hop,), self.now, self.now + seconds))
        self.now += seconds + 0.01

    def off(self, blocks: int, fixed: float = 1e-4, rate: float = 8e9) -> float:
        return self.model.load(ONBOARD, blocks, self.now) / (fixed + blocks * PAGE / rate)


@pytest.mark.parametrize(("noise", "factor"), [(0.0, 1.05), (0.1, 1.5)])
@pytest.mark.parametrize(("often", "seldom"), [((1, 2), 256), ((256, 300), 1)])
def test_loads_of_one_size_do_not_change_what_is_known_of_others(
    noise: float, factor: float, often: tuple[int, int], seldom: int, seed: int
) -> None:
    lane = Onboard(noise, seed)
    for blocks in [1, 4, 16, 64, 256] * 8:
        lane.move(blocks, fixed=1e-3)
    for _ in range(3000):
        lane.move(lane.random.randint(*often), fixed=1e-3)
    assert 1 / factor < lane.off(seldom, fixed=1e-3) < factor, f"seed {seed}: what other sizes take was forgotten"


@pytest.mark.parametrize("first", [1, 2, 4])
@pytest.mark.parametrize("fixed", [3e-3, 10e-3, 20e-3])
def test_a_slow_first_load_is_not_taken_for_a_rate(first: int, fixed: float) -> None:
    lane = Onboard()
    lane.move(first, fixed)
    assert lane.model.load(ONBOARD, 32, lane.now) <= fixed + 1e-3, "the first load was taken for a rate"
    for _ in range(6):
        lane.move(32)
    assert lane.off(32) < 1.5


def test_the_only_load_seen_is_no_fixed_cost_to_a_smaller_one() -> None:
    lane = Onboard()
    lane.move(256)
    assert lane.model.load(ONBOARD, 1, lane.now) < 1e-3

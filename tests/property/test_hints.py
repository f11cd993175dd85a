"""Hints in any order, with whatever else goes on: the account of their room is right after every step, and at the end
nothing is held."""

from __future__ import annotations

import random

import pytest

from kvtier.catalog import Tier
from tests.unit.test_load_policy import BLOCKS, Engine
from tests.unit.test_prefetch_room import prepare

NAMES = [f"h{number}" for number in range(8)]


class Story:
    """Prompts share their names' requests, so that hints are said again, taken back, and come while they run."""

    def __init__(self, namespace, seed):
        self.random = draw = random.Random(seed)
        self.engine = prepare(Engine(namespace, device=draw.choice([80, 200]), host=draw.choice([60, 130, 400])), 6)
        self.manager = self.engine.manager
        self.running: dict[str, list[int]] = {}

    def live(self):
        habits = {
            self.expect: 25, self.dismiss: 8, self.reorder: 12, self.prefetch: 5, self.invalidate: 1, self.begin: 7,
            self.end: 10, self.evict: 5, self.wait: 5, self.nothing: 20,
        }  # fmt: skip
        self.random.choices(list(habits), list(habits.values()))[0](self.random.choice(NAMES), self.tokens())
        self.manager.poll(self.random.choice([0.0, 0.0, 0.01]))

    def tokens(self):
        return self.engine.tokens(self.random.randrange(1, 7), self.random.choice([8, 20, BLOCKS]))

    def expect(self, name, tokens):
        positions = self.random.choice([None, None, (0, 40), (40, 100), [(0, 40, 0.0), (40, 100, 0.5)], [(8, 60, 2.0)]])
        self.manager.expect(name, tokens, self.random.choice([-1, 0, 0.1, 0.3, 1, 30, 600]), positions=positions)

    def dismiss(self, name, _):
        self.manager.dismiss(name)

    def reorder(self, *_):
        self.manager.reorder({name: self.random.choice([0, 0.2, 2, 100]) for name in NAMES})

    def prefetch(self, _, tokens):
        self.manager.prefetch(tokens)

    def invalidate(self, *_):
        self.manager.invalidate()

    def begin(self, name, tokens):
        if name not in self.running:
            self.manager.get_computed_blocks(name, tokens)
            if self.manager.allocate_slots(name, len(tokens)) is None:
                self.manager.free(name)
            else:
                self.running[name] = tokens

    def end(self, name, _):
        tokens = self.running.pop(name, None)
        # Where less came and the device was full, it has fewer slots.
        if tokens and self.manager.ready(name) and self.manager.allocate_slots(name, len(tokens)) is not None:
            self.manager.cache_blocks(name, len(tokens))
        self.manager.free(name)

    def evict(self, _, tokens):
        self.manager.evict(self.random.choice([Tier.HOST, Tier.DEVICE]), tokens)

    def wait(self, *_):
        self.engine.plane.advance(self.random.choice([0.01, 0.1, 1, 10]))

    def nothing(self, *_):
        """Happens."""

    def finish(self):
        for name in NAMES:
            self.end(name, None)
        how = self.random.choice(["nobody comes", "each is taken back", "all are"])
        for name in NAMES if how == "each is taken back" else ():
            self.manager.dismiss(name)
        if how == "all are":
            self.manager._prefetcher.dismiss_all()
        for _ in range(400):
            self.engine.plane.settle()
            self.engine.plane.advance(5.0)
            self.manager.poll(0.01)

    def check(self):
        ahead, holdings = self.manager._prefetcher, self.manager._prefetcher._holdings
        hints = ahead.expected.values()
        assert holdings.held == sum(hint.issued for hint in hints) <= holdings.host
        assert holdings.lifted == sum(len(hint.lifted) for hint in hints)
        assert ahead._gone == sum(hint.gone for hint in hints)
        self.manager.catalog.check()

    def look(self):
        ahead, holdings = self.manager._prefetcher, self.manager._prefetcher._holdings
        for what in (ahead.expected, ahead.leaving, holdings.by_ticket, holdings.holders, holdings.held):
            assert not what
        assert not self.manager.placement.under_way
        assert self.manager.catalog.stats()["leases"] == 0
        for tier, usage in self.manager.stats().slots.items():
            assert usage["free"] + usage["ready"] == usage["capacity"], tier


@pytest.mark.parametrize("seed", range(12))
def test_no_story_of_hints_ends_with_something_held(namespace, seed):
    story = Story(namespace, seed)
    for _ in range(300):
        story.live()
        story.check()
    story.finish()
    story.check()
    story.look()

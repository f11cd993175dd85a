"""The real control plane over a simulated data plane: whatever happens, a running request sees its own bytes only."""

from __future__ import annotations

import contextlib
import random
from collections import Counter

import numpy as np
import pytest

from kvtier.catalog import Tier
from kvtier.config import CacheConfig
from kvtier.manager import CacheManager
from kvtier.namespace import chain_digests
from kvtier.sequence import State
from kvtier.sim.plane import Faults, SimulatedPlane

BLOCK = 4


class Geometry:
    """All that the control plane asks of a geometry."""

    block_size = BLOCK
    dtype = "bfloat16"


class Story:
    """An engine of random habits. ``step`` does one thing; ``finish`` ends all requests and looks for leaks."""

    def __init__(self, seed, namespace, faults, capacity, config):
        self.random = random.Random(seed)
        self.now = 0.0
        self.plane = SimulatedPlane(capacity, seed + 1, faults)
        self.manager = CacheManager(
            config, Geometry(), namespace, None, plane=self.plane, max_nodes=400, clock=lambda: self.now
        )
        self.space = namespace.fingerprint
        self.room = capacity[Tier.DEVICE] * BLOCK
        self.promised: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self.tokens: dict[str, list[int]] = {}
        self.known: dict[tuple[int, ...], list[bytes]] = {}
        self.current: set[bytes] = set()  # digests of blocks that were computed since the last reset
        self.resets = 0
        self.matched_at: dict[str, int] = {}  # how many resets there had been
        self.count = 0
        self.seen: Counter[str] = Counter()
        self.actions = {
            self.arrive: 12,
            self.rematch: 2,
            self.start: 20,
            self.grow: 5,
            self.compute: 24,
            self.poll: 30,
            self.free: 9,
            self.preempt: 3,
            self.resume: 6,
            self.prefetch: 2,
            self.wait: 0.5,
            self.reset: 0.2,
        }

    def step(self):
        self.now += self.random.random() * 0.01
        self.plane.step(self.random.randint(0, 6))
        self.random.choices(list(self.actions), list(self.actions.values()))[0]()
        self.manager.catalog.check()
        self.look()

    def pick(self, *states):
        names = [name for name, s in self.manager._sequences.items() if s.state in states]
        return self.random.choice(names) if names else None

    def arrive(self):
        if len(self.tokens) > 6:
            return
        self.count += 1
        name, stem = f"r{self.count}", self.random.randint(0, 3) * 1000
        tail = [self.random.randint(0, 2) for _ in range(self.random.randint(0, 3))]
        self.tokens[name] = [stem + i for i in range(self.random.randint(1, 6 * BLOCK))] + tail
        self.promise(name, self.manager.get_computed_blocks(name, self.tokens[name]))

    def promise(self, name, found):
        assert sum(found.tokens_by_tier.values()) == found.num_tokens < len(self.tokens[name])
        assert self.current.issuperset(self.digests(name)[: found.num_tokens // BLOCK]), "a reset brought pages back"
        self.promised[name] = found.num_tokens
        self.matched_at[name] = self.resets

    def rematch(self):
        name = self.pick(State.MATCHED)
        if name:
            self.promise(name, self.manager.get_computed_blocks(name, self.tokens[name]))

    def start(self):
        name = self.pick(State.MATCHED)
        if not name or self.manager.allocate_slots(name, len(self.tokens[name])) is None:
            return
        if self.manager.ready(name):
            self.computed[name] = self.promised[name]
            self.seen["at once"] += self.promised[name] > 0

    def grow(self):
        name = self.pick(State.LOADING)
        if name:
            self.manager.allocate_slots(
                name, min(self.room, len(self.tokens[name]) + self.random.randint(0, 3 * BLOCK))
            )

    def poll(self):
        for loaded in self.manager.poll():
            assert loaded.num_computed_tokens <= self.promised[loaded.request_id]
            self.computed[loaded.request_id] = loaded.num_computed_tokens
            for tier, tokens in loaded.tokens_by_tier.items():
                self.seen[tier] += tokens
            self.seen["shorter"] += loaded.num_computed_tokens < self.promised[loaded.request_id]

    def compute(self):
        name = self.pick(State.RUNNING)
        if not name:
            return
        have = self.computed[name]
        if have >= len(self.tokens[name]):
            if have >= self.room:
                self.free(name)
                return
            new = [self.random.randint(0, 2)]
            self.tokens[name] += new
            self.manager.append_tokens(name, new)
        before = self.manager.block_table(name)
        if self.manager.allocate_slots(name, len(self.tokens[name])) is None:
            return
        table = self.manager.block_table(name)
        assert (table[: len(before)] == before).all(), "a running request's table changed"
        upto = self.random.randint(have + 1, len(self.tokens[name]))
        shared = set(self.shared_slots())
        digests = self.digests(name)
        for block in range(have // BLOCK, -(-upto // BLOCK)):
            slot = int(table[block])
            assert slot not in shared, f"{name} writes device slot {slot}, which the cache shares"
            self.plane.content[Tier.DEVICE][slot] = digests[block] if (block + 1) * BLOCK <= upto else None
            if self.matched_at[name] == self.resets and (block + 1) * BLOCK <= upto:
                self.current.add(digests[block])
        self.computed[name] = upto
        self.manager.cache_blocks(name, upto)

    def shared_slots(self):
        """Device slots of blocks that are in the catalog, as far as any request of ours knows them."""
        for sequence in self.manager._sequences.values():
            if len(sequence.nodes):
                slots, residency = self.manager.catalog.state(sequence.nodes)
                yield from slots[residency[:, Tier.DEVICE] != 0, Tier.DEVICE].tolist()

    def free(self, name=None):
        name = name or self.pick(*State)
        if name:
            self.seen[f"freed {self.manager._sequences[name].state.value}"] += 1
            self.manager.free(name)
            self.forget(name)

    def forget(self, name):
        for book in (self.tokens, self.promised, self.computed):
            book.pop(name, None)

    def preempt(self):
        name = self.pick(State.RUNNING, State.LOADING, State.MATCHED)
        if name:
            self.manager.preempt(name)
            self.computed.pop(name, None)

    def resume(self):
        name = self.pick(State.PREEMPTED)
        if name:
            self.promise(name, self.manager.resume(name))

    def prefetch(self):
        self.manager.prefetch([self.random.randint(0, 3) * 1000 + i for i in range(8 * BLOCK)], within=1.0)

    def wait(self):
        self.now += 100.0

    def reset(self):
        """Half of the time it cannot be made durable."""
        invalidate = self.plane.invalidate

        def fails(space):
            invalidate(space)
            raise OSError("the disk is full")

        self.plane.invalidate = self.random.choice([invalidate, fails])
        with contextlib.suppress(OSError):
            self.manager.reset()
        self.plane.invalidate = invalidate
        self.resets += 1
        self.current.clear()

    def digests(self, name):
        tokens = tuple(self.tokens[name][: len(self.tokens[name]) // BLOCK * BLOCK])
        if tokens not in self.known:
            self.known[tokens] = list(chain_digests(self.space, 0, np.array(tokens, np.uint32), BLOCK))
        return self.known[tokens]

    def look(self):
        """Every computed full block of a running request is in its slot."""
        for name, sequence in self.manager._sequences.items():
            if name not in self.computed:
                continue
            digests = self.digests(name)
            for block in range(self.computed[name] // BLOCK):
                held = self.plane.content[Tier.DEVICE][int(sequence.table[block])]
                assert held == digests[block], f"{name}: block {block} of its table holds another block's bytes"

    def finish(self):
        for name in list(self.tokens):
            self.manager.free(name)
        for _ in range(10_000):
            if not self.manager.placement.under_way:
                break
            self.plane.step(16)
            self.manager.poll()
        self.manager.catalog.check()
        for tier, usage in self.manager.stats().slots.items():
            assert usage["free"] + usage["ready"] == usage["capacity"], f"{tier} leaks: {usage}"
            assert usage["pinned"] == usage["private"] == 0, f"{tier} leaks: {usage}"


CAPACITIES = [
    {Tier.DEVICE: 24, Tier.HOST: 30, Tier.DISK: 60},
    {Tier.DEVICE: 14, Tier.HOST: 8, Tier.DISK: 16},
    {Tier.DEVICE: 20, Tier.HOST: 40},
    {Tier.DEVICE: 30},
]


@pytest.mark.parametrize("faults", [Faults(), Faults(page=0.1, repeat=0.2, refuse=0.1)], ids=["calm", "faulty"])
@pytest.mark.parametrize("capacity", CAPACITIES, ids=lambda c: "-".join(map(str, c.values())))
@pytest.mark.parametrize("write", ["at_once", "second_use", "ahead"])
@pytest.mark.parametrize("seed", range(2))
def test_a_running_request_sees_only_its_own_bytes(seed, write, capacity, faults, namespace):
    config = CacheConfig(
        block_size=BLOCK, lease_seconds=5.0, load_timeout_seconds=2.0, host={"write": write}, disk={"write": write}
    )
    story = Story(seed, namespace, faults, capacity, config)
    for _ in range(2500):
        story.step()
    story.finish()
    assert story.seen["at once"]
    if Tier.HOST in capacity:
        assert story.seen["host"]

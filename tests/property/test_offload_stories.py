"""OffloadManager under an engine that owns its blocks, over one or two simulated ranks behind a relay: whatever
happens, the engine reads its own bytes only, and at the end nothing is held."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections import Counter, OrderedDict

import numpy as np
import pytest

from kvtier.catalog import Tier
from kvtier.config import CacheConfig
from kvtier.messages import Priority, Transfer
from kvtier.namespace import chain_digests
from kvtier.offload import OffloadManager
from kvtier.relay import RankPlane, RelayPlane
from kvtier.sim.plane import Faults, SimulatedPlane, ViolationError

BLOCK = 4


class Job:
    """One request, as the engine knows it. ``table`` is empty while it waits."""

    def __init__(self, hashes):
        self.hashes = hashes
        self.table: list[int] = []
        self.computed = 0  # blocks
        self.state = "waiting"
        self.void = False


class Engine:
    """Schedules like vLLM: blocks come from the front of a queue of free ones and go back to its end, their content
    findable by its hash until somebody else gets the block; a step copies in, computes, then copies out."""

    def __init__(self, seed, namespace, faults, capacity, config, ranks, journal):
        self.random = random.Random(seed)
        self.now = 0.0
        self.planes = [SimulatedPlane(capacity, seed + 1 + rank, faults) for rank in range(ranks)]
        self.ranks = [RankPlane(plane, lambda: self.now) for plane in self.planes]
        self.relay = RelayPlane([plane.hello() for plane in self.planes], journal, lambda: self.now)
        self.manager = OffloadManager(config, namespace, self.relay, max_nodes=400, clock=lambda: self.now)
        self.space = namespace.fingerprint
        self.free = list(range(capacity[Tier.DEVICE]))
        self.own: OrderedDict[bytes, int] = OrderedDict()  # digest → a free block that still holds it
        self.jobs: dict[str, Job] = {}
        self.zombies: list[tuple[tuple[int, ...], list[int]]] = []  # blocks of aborted loads, not to be given away yet
        self.loads: dict[str, tuple[int, ...]] = {}
        self.written: set[int] = set()
        self.count = 0
        self.seen: Counter[str] = Counter()

    # ---- one step ------------------------------------------------------------------------------------------------

    def step(self):
        self.now += self.random.random() * 0.01
        self.written = set()
        habits = {self.arrive: 6, self.admit: 12, self.abort: 2, self.preempt: 1, self.reset: 0.05, self.wait: 0.1}
        habits |= {self.announce: 4, self.put_off: 1}
        for _ in range(3):
            self.random.choices(list(habits), list(habits.values()))[0]()
        computing = [(name, self.grow(job)) for name, job in self.jobs.items() if job.state == "running"]
        must_end = self.manager.reading(self.written)
        stores = [(name, blocks) for name, blocks in computing if blocks]
        for name, _ in stores:
            self.store(name)
        self.carry_out(must_end, stores)
        for plane in self.planes:
            plane.step(self.random.randint(0, 6))
        self.report()
        self.manager.catalog.check()
        self.look()

    def carry_out(self, must_end, computing):
        """On every rank: end what reads blocks that are written now, begin the loads, compute, begin the stores."""
        orders = self.relay.orders()
        stores = [o for o in orders if isinstance(o, Transfer) and o.path[0] == Tier.DEVICE]
        others = [o for o in orders if not (isinstance(o, Transfer) and o.path[0] == Tier.DEVICE)]
        for rank in self.ranks:
            rank.drain(must_end, self.random.choice([0.0, 1e9]))
            assert not any(rank.runs(ticket) for ticket in must_end)
            rank.carry_out(others)
        for name, blocks in computing:
            job = self.jobs[name]
            for block in blocks:
                for plane in self.planes:
                    plane.content[Tier.DEVICE][job.table[block]] = self.digests(job)[block]
        for rank in self.ranks:
            rank.carry_out(stores)

    def report(self):
        for number, rank in enumerate(self.ranks):
            news = rank.poll()
            if news and self.random.random() < 0.1:  # said twice
                self.relay.deliver(number, news)
            self.relay.deliver(number, news)
        for loaded in self.manager.poll():
            job = self.jobs[loaded.request_id]
            tickets = self.loads.pop(loaded.request_id)
            assert job.state == "loading"
            assert not any(self.may_write(rank, tickets) for rank in self.planes), "reported while it may be written"
            job.state = "running"
            job.computed += 0 if job.void else loaded.blocks
            self.seen["short"] += loaded.blocks < loaded.wanted
            self.seen["loaded"] += loaded.blocks
            for tier, blocks in self.manager.origin(loaded.request_id).items():
                self.seen[tier] += blocks
        for tickets, blocks in list(self.zombies):
            if not any(self.may_write(plane, tickets) for plane in self.planes):
                self.zombies.remove((tickets, blocks))
                self.give_back(blocks, [])

    @staticmethod
    def may_write(plane, tickets):
        return any((plane._running[t].status[-1] == 0).any() for t in tickets if t in plane._running)

    # ---- what the engine does ------------------------------------------------------------------------------------

    def arrive(self):
        if len(self.jobs) > 5:
            return
        self.count += 1
        stem = self.random.randint(0, 3)
        chain, digest = [], bytes([stem])
        for _ in range(self.random.randint(1, 7)):
            digest = hashlib.sha256(digest + bytes([self.random.random() < 0.1])).digest()
            chain.append(digest)
        self.jobs[f"r{self.count}"] = Job(chain)

    def pick(self, *states):
        names = [name for name, job in self.jobs.items() if job.state in states]
        return self.random.choice(names) if names else None

    def admit(self):
        name = self.pick("waiting")
        if name is None:
            return
        job, digests = self.jobs[name], self.digests(self.jobs[name])
        local = 0
        while local < len(digests) - 1 and digests[local] in self.own:
            local += 1
        found = self.manager.match(name, as_hashes(job.hashes[:-1]), local)
        assert sum(found.blocks_by_tier.values()) == found.blocks
        if found.waits:
            self.seen["waits"] += 1
            return
        if len(self.free) < len(digests):
            return  # asked, and asks again later
        mine = [self.own.pop(digest) for digest in digests[:local]]
        for block in mine:
            self.free.remove(block)
        fresh = [self.allocate() for _ in range(found.blocks)]
        job.table, job.computed = mine + fresh, local
        job.state, job.void = "running", False
        if found.blocks:
            loading = self.manager.load(name, np.array(fresh, np.uint32))
            assert loading.blocks <= found.blocks
            if loading.tickets:
                job.state, self.loads[name] = "loading", loading.tickets

    def allocate(self):
        block = self.free.pop(0)
        for digest, owner in list(self.own.items()):
            if owner == block:
                del self.own[digest]
        for plane in self.planes:
            if not self.manager.reading([block]):
                plane.content[Tier.DEVICE][block] = None
        self.written.add(block)
        return block

    def grow(self, job):
        """Blocks that the running job computes in this step; it ends when it has all."""
        if job.computed == len(job.hashes):
            return []
        upto = self.random.randint(job.computed + 1, len(job.hashes))
        while len(job.table) < upto:
            if not self.free:
                return []
            job.table.append(self.allocate())
        blocks = list(range(job.computed, upto))
        self.written.update(job.table[block] for block in blocks)
        job.computed = upto
        return blocks

    def store(self, name):
        job = self.jobs[name]
        first = self.manager.stored(name)
        if first is not None and first < job.computed:
            table = np.array(job.table[first : job.computed], np.uint32)
            self.manager.store(name, as_hashes(job.hashes[first : job.computed]), table)

    def give_back(self, blocks, digests):
        for block, digest in zip(blocks, [*digests, *[None] * len(blocks)], strict=False):
            if digest is not None and digest not in self.own:
                self.own[digest] = block
        self.free += blocks

    def leave(self, name):
        job = self.jobs[name]
        if job.state == "loading":
            self.zombies.append((self.loads.pop(name), job.table))
        elif job.table:
            self.give_back(job.table, self.digests(job)[: job.computed])
        job.table = []

    def abort(self, name=None):
        name = name or self.pick("waiting", "loading", "running")
        if name:
            self.seen[f"aborted {self.jobs[name].state}"] += 1
            self.leave(name)
            self.manager.free(name)
            del self.jobs[name]

    def announce(self):
        name = self.pick("waiting")
        if name:
            within = self.random.choice([-1.0, 0.0, 0.05, 3.0])
            self.manager.expect(name, as_hashes(self.jobs[name].hashes), within)

    def put_off(self):
        name = self.pick("waiting", "loading", "running")
        if name and self.random.random() < 0.5:
            self.manager.reorder({name: self.random.choice([-1.0, 0.0, 2.0])})
        elif name:
            self.manager.dismiss(name)

    def preempt(self):
        name = self.pick("running")
        if name:
            self.leave(name)
            if self.random.random() < 0.5:  # otherwise the manager hears of it by the next match
                self.manager.preempt(name)
            self.jobs[name].state, self.jobs[name].computed = "waiting", 0

    def reset(self):
        invalidate = self.relay.invalidate

        def fails(space):
            invalidate(space)
            raise OSError("the disk is full")

        self.relay.invalidate = self.random.choice([invalidate, fails])
        void = [name for name, job in self.jobs.items() if job.state == "loading"]
        with contextlib.suppress(OSError):
            assert sorted(self.manager.reset()) == sorted(void)
        self.relay.invalidate = invalidate
        self.own.clear()
        for name in void:
            self.jobs[name].void = True

    def wait(self):
        self.now += 100.0

    # ---- what must hold ------------------------------------------------------------------------------------------

    def digests(self, job):
        return list(chain_digests(self.space, 0, as_hashes(job.hashes), BLOCK))

    def look(self):
        for name, job in self.jobs.items():
            for block in range(job.computed if job.state == "running" else 0):
                for plane in self.planes:
                    held = plane.content[Tier.DEVICE][job.table[block]]
                    assert held == self.digests(job)[block], f"{name}: block {block} holds another block's bytes"

    def finish(self):
        for name in list(self.jobs):
            self.abort(name)
        for _ in range(10_000):
            if not self.manager.placement.under_way and not self.zombies and not self.manager._prefetcher.expected:
                break
            self.carry_out((), [])
            for plane in self.planes:
                plane.step(16)
            self.report()
        self.seen.update(self.manager.stats().prefetched)
        self.manager.catalog.check()
        for tier, usage in self.manager.stats().slots.items():
            assert usage["free"] + usage["ready"] == usage["capacity"], f"{tier} leaks: {usage}"
            assert usage["pinned"] == usage["private"] == 0, f"{tier} leaks: {usage}"
        assert self.relay.pending() == 0
        assert not self.manager._reading
        assert not self.manager._loads._tickets
        assert self.manager.catalog.stats()["leases"] == 0
        assert not self.manager.busy


def as_hashes(hashes):
    return np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, 32)


CAPACITIES = [
    {Tier.DEVICE: 24, Tier.HOST: 30, Tier.DISK: 60},
    {Tier.DEVICE: 12, Tier.HOST: 8, Tier.DISK: 40},
    {Tier.DEVICE: 16, Tier.HOST: 40},
]


@pytest.mark.parametrize("faults", [Faults(), Faults(page=0.1, repeat=0.2, refuse=0.1)], ids=["calm", "faulty"])
@pytest.mark.parametrize("capacity", CAPACITIES, ids=lambda c: "-".join(map(str, c.values())))
@pytest.mark.parametrize(("write", "ranks"), [("at_once", 1), ("at_once", 2), ("second_use", 1)])
def test_the_engine_reads_its_own_bytes_only(seed, write, ranks, capacity, faults, namespace, tmp_path):
    config = CacheConfig(
        block_size=BLOCK, lease_seconds=5.0, load_timeout_seconds=2.0, host={"write": write}, disk={"write": "at_once"}
    )
    engine = Engine(seed, namespace, faults, capacity, config, ranks, tmp_path / "generations")
    for _ in range(300):
        engine.step()
    engine.finish()
    assert engine.seen["loaded"]
    assert not engine.manager._prefetcher.expected
    assert engine.manager._prefetcher._holdings.held == 0


def test_a_slot_is_used_by_the_hops_that_may_still_touch_it_and_by_no_other():
    plane = SimulatedPlane({Tier.DEVICE: 2, Tier.HOST: 2, Tier.DISK: 2}, seed=1)
    up, down = (Tier.DISK, Tier.HOST, Tier.DEVICE), (Tier.DEVICE, Tier.HOST)
    names = np.zeros((1, 128), np.uint8)
    plane.content[Tier.DISK][0] = plane.content[Tier.DISK][1] = names[0, :32].tobytes()

    def order(ticket, path, *slots):
        transfer = Transfer(ticket, path, np.array(slots, np.uint32)[:, None], names, Priority.DEMAND, 0.0)
        assert plane.submit(transfer)

    order(1, up, 0, 0, 0)
    with pytest.raises(ViolationError, match="DEVICE slot 0 given to transfer 2"):
        order(2, up, 1, 1, 0)
    plane.cancel(1)
    plane._report(1)  # early: the device's block will not be written; the host's slot still may be
    assert [report.final for report in plane._reports] == [False]
    order(2, up, 1, 1, 0)
    with pytest.raises(ViolationError, match="HOST slot 0 given to transfer 3"):
        order(3, down, 1, 0)

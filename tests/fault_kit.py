"""What the tests of faults and crashes share: the kinds of faults, a store's and a manager's whole life, and what must
hold after each.

Every page is a function of its name, and every page that is served is compared with it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier import CacheConfig, _core
from kvtier.catalog import Tier
from kvtier.geometry import KVGeometry
from kvtier.manager import CacheManager
from kvtier.mover import Transfer
from kvtier.namespace import Namespace
from kvtier.tiers.device import DevicePool
from tests.unit.mover_rig import DEVICE, DISK, HOST, Rig, identities, span

Kind, On, Status = _core.FaultPlan.Kind, _core.FaultPlan.On, _core.PageStatus


class Fault(NamedTuple):
    """One kind of fault, and with what value the n-th operation has it."""

    kind: _core.FaultPlan.Kind
    on: _core.FaultPlan.On
    value: Callable[[int], int] = lambda n: 0
    io_limit_s: float = 60.0  # far above what anything else takes on a busy machine


def _error(on: _core.FaultPlan.On, number: int) -> Fault:
    return Fault(Kind.ERROR, on, lambda n: number)


def _sector(n: int) -> int:
    return 512 * (n % 24)


FAULTS: dict[str, Fault] = {
    "ENOSPC": _error(On.ANY, errno.ENOSPC),
    "EIO": _error(On.ANY, errno.EIO),
    "EINVAL": _error(On.ANY, errno.EINVAL),  # direct I/O that is refused at the write, among others
    "EDQUOT": _error(On.ANY, errno.EDQUOT),
    "no fallocate": _error(On.OTHER, errno.EOPNOTSUPP),
    "short read": Fault(Kind.SHORT, On.READ, lambda n: 512 * (1 + n % 24)),
    "short write": Fault(Kind.SHORT, On.WRITE, lambda n: 512 * (1 + n % 24)),
    "torn write": Fault(Kind.TORN, On.WRITE, _sector),
    "bit flip in a read": Fault(Kind.FLIP, On.READ, lambda n: 7919 * n),
    "bit flip in a write": Fault(Kind.FLIP, On.WRITE, lambda n: 7919 * n),
    "stale sector": Fault(Kind.STALE, On.READ, lambda n: n),
    "lost write": Fault(Kind.LOST, On.WRITE),
    "misdirected write": Fault(Kind.MISDIRECTED, On.WRITE, lambda n: 4096 * (1 + n % 7)),
    "misdirected read": Fault(Kind.MISDIRECTED, On.READ, lambda n: 4096 * (1 + n % 7)),
    "delay": Fault(Kind.DELAY, On.ANY, lambda n: 2_000_000),
    "hang": Fault(Kind.DELAY, On.ANY, lambda n: 40_000_000, io_limit_s=0.02),  # past the deadline, and then it returns
    "no memory": _error(On.MEMORY, errno.ENOMEM),
    "memory advice refused": _error(On.MEMORY, errno.EINVAL),
}


def _threads() -> dict[str, str]:
    """Thread → its name. io_uring's own workers are among them, and stay for a while after their ring is gone."""
    names = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it ended meanwhile
            names[task.name] = (task / "comm").read_text().strip()
    return names


class Surroundings(NamedTuple):
    """What a process may leak."""

    descriptors: int
    threads: dict[str, str]
    shared_memory: int
    arenas: int

    @classmethod
    def now(cls) -> Surroundings:
        maps, flags = Path("/proc/self/maps").read_text(), Path("/proc/self/smaps").read_text()
        return cls(
            len(os.listdir("/proc/self/fd")),
            _threads(),
            maps.count("/dev/shm") + sum("kvtier" in name for name in os.listdir("/dev/shm")),
            len(re.findall(r"VmFlags:.* dc\b", flags)),  # mappings that no child inherits
        )

    def leaked_since(self, before: Surroundings) -> list[str]:
        """What there is more of. Less is no leak: a thread of an import or of another test may have ended meanwhile."""
        more = [
            f"{name}: {was} -> {is_now}"
            for name, was, is_now in zip(self._fields, before, self, strict=True)
            if not isinstance(is_now, dict) and is_now > was
        ]
        if len(self.threads) > len(before.threads):
            new = sorted(name for task, name in self.threads.items() if task not in before.threads)
            more.append(f"threads: {len(before.threads)} -> {len(self.threads)}, new are {', '.join(new)}")
        return more

    @classmethod
    def leaks(cls, before: Surroundings, patience_s: float = 60.0) -> list[str]:
        """What there is more of for good: the kernel takes a thread off its list some time after it was joined, and an
        idle worker of a closed ring when it next looks."""
        give_up = time.monotonic() + patience_s
        while leaked := cls.now().leaked_since(before):
            if time.monotonic() > give_up:
                return leaked
            time.sleep(0.01)
        return []


def says_why(error: OSError) -> None:
    assert error.errno
    assert os.strerror(error.errno) in str(error), f"errno {error.errno} got lost: {error}"


class Tally(Counter[str]):
    """What happened over many lives: pages served, refusals, misses by cause."""

    def refused(self, error: Exception, path: Path, plan: _core.FaultPlan) -> None:
        """Opening failed: because of a fault, and with one line that says what failed, where and why."""
        text = str(error)
        assert plan.fired, f"refused without a fault: {text}"
        assert "\n" not in text.strip(), text
        named = str(path) in text or "disk" in text or "host" in text
        assert named, f"an error that names neither file nor tier: {text}"
        if isinstance(error, OSError):
            says_why(error)
        self["refusals"] += 1
        if "to start anew" in text:  # nothing that exists is deleted unasked; the user does as the error says
            for file in path.iterdir():
                file.unlink()
            self["stores started anew"] += 1


# ---- a store's life ------------------------------------------------------------------------------------------------

PAYLOAD = 10_000
SPACE = bytes(32)  # of the rig's identities


@lru_cache(maxsize=4096)
def page(number: int, generation: int, version: int = 0) -> npt.NDArray[np.uint8]:
    return np.random.default_rng([number, generation, version]).integers(0, 256, PAYLOAD, np.uint8)


def names(numbers: npt.ArrayLike, generation: int) -> npt.NDArray[np.uint8]:
    out = identities(numbers)
    out[:, 96:104].view("<u8")[:] = generation
    return out


class Pages(Rig):
    """The mover's rig, whose pages are page(number, generation)."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, payload=PAYLOAD, **({"slots": 16, "op_bytes": 1} | options))

    def go(self, path: Any, slots: Any, numbers: Any, generation: int) -> npt.NDArray[np.uint8]:
        self.tickets += 1
        assert self.mover.submit(
            Transfer(self.tickets, path, np.ascontiguousarray(slots, np.uint32), names(numbers, generation))
        )
        done = self.next(self.tickets)
        return done.status if done.final else self.next(self.tickets).status

    def put(self, slots: Any, numbers: Any, generation: int, version: int = 0) -> npt.NDArray[np.uint8]:
        """Store pages by way of the host's same slots; the statuses of the last hop."""
        for slot, number in zip(slots, numbers, strict=True):
            self.memory[slot] = page(number, generation, version)
        return self.go((DEVICE, HOST, DISK), [slots] * 3, numbers, generation)[-1]

    def get(self, slots: Any, numbers: Any, generation: int, tally: Tally, versions: int = 1) -> list[int]:
        """Load pages to the device and compare each that is served; the numbers of those that were."""
        self.memory[:] = 0xEE
        status = self.go((DISK, HOST, DEVICE), [slots] * 3, numbers, generation)
        served = []
        for i, (slot, number) in enumerate(zip(slots, numbers, strict=True)):
            if status[1, i] == Status.OK:
                allowed = [page(number, generation, version) for version in range(versions)]
                assert any((self.memory[slot] == bytes_).all() for bytes_ in allowed), f"wrong bytes of page {number}"
                served.append(number)
            else:
                assert status[0, i] != Status.OK or status[1, i] != Status.PENDING
                assert (self.memory[slot] == 0xEE).all(), f"a page that failed reached the device: {number}"
                cause = next(int(code) for code in status[:, i] if code != Status.OK)
                tally[f"miss: {Status(cause).name.lower()}"] += 1
        tally["pages served"] += len(served)
        return served

    def inventory(self) -> dict[int, tuple[int, int]]:
        """slot → (number, generation) of what the records say."""
        slots, found = self.disk.scan()
        return {
            int(slot): (int(name[108:112].view("<u4")[0]), int(name[96:104].view("<u8")[0]))
            for slot, name in zip(slots, found, strict=True)
        }

    def serve_all(self, tally: Tally, versions: int = 1) -> None:
        """Load everything that the records promise."""
        for slot, (number, generation) in self.inventory().items():
            assert generation == self.disk.generation(SPACE), "a record of an older generation was adopted"
            self.get([slot], [number], generation, tally, versions)

    def __enter__(self) -> Pages:
        return self

    def __exit__(self, *error: object) -> None:
        self.faults.clear()
        self.faults.release()
        self.mover.close()
        self.disk.close()


def open_pages(folder: Path, plan: _core.FaultPlan, tally: Tally, io_limit_s: float) -> Pages:
    """Open the rig; where the fault makes that fail, it does so in one line, and the next try succeeds."""
    for _ in range(50):
        try:
            return Pages(folder, faults=plan, io_limit_s=io_limit_s)
        except (OSError, ValueError, MemoryError) as error:
            tally.refused(error, folder, plan)
    raise AssertionError("still refused after the faults had happened")


def store_life(folder: Path, plan: _core.FaultPlan, tally: Tally, io_limit_s: float, rounds: int = 1) -> None:
    """New, stored, read, invalidated, overwritten, closed, reopened, read: with all faults of ``plan``.

    ``rounds``: how often pages are stored in place of others, and read.
    """
    with open_pages(folder, plan, tally, io_limit_s) as rig:
        for first in range(100 * (rounds - 1), -1, -100):
            rig.put(span(0, 6), range(first, first + 6), 0)
            rig.get(span(0, 6), range(first, first + 6), 0, tally)
        durable = True
        try:
            assert rig.disk.invalidate(SPACE) == 1
        except OSError as error:
            says_why(error)
            durable = False
        assert rig.disk.generation(SPACE) == 1
        assert rig.get(span(0, 6), range(6), 0, tally) == [], "an invalidated page was served"
        rig.put(span(2, 4), range(12, 16), 1)
        rig.get(span(2, 4), range(12, 16), 1, tally)
        rig.put(span(3, 2), [23, 24], 1)
    anew = tally["stores started anew"]
    with open_pages(folder, plan, tally, io_limit_s) as rig:
        generation = rig.disk.generation(SPACE)
        lost = not durable or tally["stores started anew"] > anew  # with its pages
        assert generation >= 1 or lost, "an invalidation that had returned was undone"
        rig.serve_all(tally)
        plan.clear()  # it goes on after the fault
        if rig.mover.stats()["disk"]["offline"]:  # too many of them: it said so
            assert "out of service" in rig.mover.warnings()[0]
            tally["disks out of service"] += 1
            return
        for _ in range(50):  # a busy machine may be later than the deadline without a fault
            rig.put(span(8, 2), [38, 39], generation)
            served = rig.get(span(8, 2), [38, 39], generation, tally)
            if served == [38, 39] or rig.mover.stats()["disk"]["offline"]:
                break
            assert rig.mover.stats()["disk"]["hung"]
        else:
            raise AssertionError("it does not go on after the fault")
    left = {path.name for path in folder.iterdir()}
    assert left == {"slab", "table", "generations", "lock"}, left


Life = Callable[[Path, _core.FaultPlan, Tally, float], None]
Folders = Callable[[], AbstractContextManager[Path]]


def live_through(life: Life, folders: Folders, fault: Fault, places: list[int], tally: Tally) -> _core.FaultPlan:
    """One life in which the operations at ``places`` go wrong; afterwards nothing is left behind."""
    before = Surroundings.now()
    plan = _core.FaultPlan()
    for n in places:
        plan.add(fault.kind, n, fault.value(n), on=fault.on)
    with folders() as path:
        _core.use_faults(plan)
        try:
            life(path, plan, tally, fault.io_limit_s)
        except BaseException as error:
            error.add_note(f"with {fault.kind} at operations {places} ({fault.on})")
            raise
        finally:
            _core.use_faults(None)
    leaked = Surroundings.leaks(before)
    assert not leaked, f"{fault.kind} at operations {places} leaked {', '.join(leaked)}"
    tally["lives"] += 1
    tally["faults"] += plan.fired
    return plan


def every_operation(life: Life, folders: Folders, fault: Fault, first: int = 1, step: int = 1) -> Tally:
    """Spoil the n-th operation of a life, for n = first, first + step, ... until a life has no n-th operation."""
    tally = Tally()
    for n in range(first, 10_000, step):
        plan = live_through(life, folders, fault, [n], tally)
        if not plan.fired and plan.count(fault.on) < n:
            return tally
    raise AssertionError("never clean")


# ---- a manager's life ----------------------------------------------------------------------------------------------

BLOCK = 4
GEOMETRY = KVGeometry(layers=5, kv_heads=2, head_dim=64, dtype="float16", block_size=BLOCK)
NAMESPACE = Namespace(
    model="test", revision="1", dtype="float16", layout=GEOMETRY.layout_tag, attention="test", block_size=BLOCK, rope={}
)


def prompt(family: int, blocks: int) -> list[int]:
    """Prompts of a family share a prefix; families with equal family // 2 share one block."""
    head = [1000 * (family // 2) + i for i in range(BLOCK)]
    tail = [1_000_000 + 1000 * family + i for i in range(BLOCK * (blocks - 1))]
    return [*head, *tail, 7]


class Cache:
    """A manager over three small tiers and an engine that computes, asks again and compares.

    ``epoch`` is what the pages were computed by (weights, say): it rises with every invalidation, and pages of an
    earlier one are wrong.
    """

    def __init__(self, folder: Path, tally: Tally, *, epochs: set[int] | None = None, **config: Any) -> None:
        self.tally = tally
        self.epochs = {0} if epochs is None else epochs  # that a page may be of; the engine computes the newest
        self.asked = 0
        self.pool = DevicePool.allocate(GEOMETRY, 12)
        options: dict[str, Any] = {
            "block_size": BLOCK,
            "host": {"size": 10 * GEOMETRY.page_bytes},
            "disk": {"path": folder, "size": 3 << 19},
            "load_timeout_seconds": 60.0,
        }
        self.manager = CacheManager(CacheConfig(**(options | config)), GEOMETRY, NAMESPACE, self.pool)

    def page(self, tokens: list[int], block: int, epoch: int) -> npt.NDArray[np.uint8]:
        return _kv(tuple(tokens[: (block + 1) * BLOCK]), epoch)

    def serve(self, tokens: list[int]) -> int:
        """One request from start to end; every page that it found is compared. Returns how many those were."""
        manager, tally = self.manager, self.tally
        self.asked += 1
        name = f"r{self.asked}"
        misses = sum(manager.stats().failures.values())
        promised = computed = manager.get_computed_blocks(name, tokens).num_tokens
        if manager.allocate_slots(name, len(tokens)) is None:
            manager.free(name)
            return 0
        busy = manager.placement.under_way
        while not manager.ready(name):
            for loaded in manager.poll(1.0):
                computed = loaded.num_computed_tokens
        if computed < promised:
            tally["shorter prefixes"] += 1
            counted = sum(manager.stats().failures.values()) > misses
            assert counted or busy, "a prefix got shorter and no cause was counted"
        table = manager.block_table(name)
        blocks = len(tokens) // BLOCK
        for block in range(computed // BLOCK):
            found = self.pool.read_page(int(table[block]))
            right = any((found == self.page(tokens, block, epoch)).all() for epoch in self.epochs)
            assert right, f"wrong bytes: block {block} of {tokens[:8]}... "
        for block in range(computed // BLOCK, min(blocks, len(table))):
            self.pool.write_page(int(table[block]), self.page(tokens, block, max(self.epochs)))
        manager.cache_blocks(name, min(blocks, len(table)) * BLOCK)
        manager.free(name)
        manager.poll()
        tally["pages served"] += computed // BLOCK
        return computed // BLOCK

    def forget_faster(self, tokens: list[int]) -> None:
        """Drop the prompt from device and host, so that only the disk can have it."""
        for tier in (Tier.DEVICE, Tier.HOST):
            self.manager.evict(tier, tokens)
        self.pool.fill(np.arange(self.pool.slots), 0xAB)

    def reset(self) -> bool:
        """Pages so far are wrong from now on; False: not durable, a restart may bring them back."""
        old = set(self.epochs)
        self.epochs.add(max(old) + 1)
        try:
            self.manager.reset()
        except OSError as error:
            says_why(error)
            durable = False
        else:
            durable = True
        self.epochs -= old
        return durable

    def check(self) -> None:
        manager = self.manager
        manager.catalog.check()
        for tier, use in manager.stats().slots.items():
            total = sum(use[state] for state in ("free", "filling", "ready", "draining"))
            assert total == use["capacity"], f"{tier}: {use}"

    def close(self) -> None:
        self.manager.flush()
        self.check()
        use = self.manager.stats().slots
        for tier, states in use.items():
            assert states["filling"] == states["draining"] == states["pinned"] == 0, f"{tier} leaked slots: {states}"
        for cause, count in self.manager.stats().failures.items():
            self.tally[f"miss: {cause}"] += count
        self.manager.close()


@lru_cache(maxsize=4096)
def _kv(tokens: tuple[int, ...], epoch: int) -> npt.NDArray[np.uint8]:
    digest = hashlib.sha256(repr((tokens, epoch)).encode()).digest()
    return np.random.default_rng(list(digest)).integers(0, 256, GEOMETRY.payload_bytes, np.uint8)


def open_cache(folder: Path, plan: _core.FaultPlan, tally: Tally, **options: Any) -> Cache:
    for _ in range(50):
        try:
            return Cache(folder, tally, **options)
        except (OSError, ValueError, MemoryError) as error:
            tally.refused(error, folder, plan)
    raise AssertionError("still refused after the faults had happened")


def manager_life(folder: Path, plan: _core.FaultPlan, tally: Tally, _: float) -> None:
    """Requests over three tiers, overwritten, invalidated, restarted: with all faults of ``plan``."""
    cache = open_cache(folder, plan, tally)
    for family in (0, 1):
        cache.serve(prompt(family, 4))
    cache.manager.flush()
    cache.forget_faster(prompt(0, 4))
    cache.serve(prompt(0, 4))
    for family in range(2, 14):  # more than the disk holds
        cache.serve(prompt(family, 4))
        cache.manager.flush()
    cache.serve(prompt(1, 4))
    cache.check()
    old = set(cache.epochs)
    durable = cache.reset()
    for family in (0, 1, 13):
        cache.serve(prompt(family, 4))
    epochs = cache.epochs if durable else cache.epochs | old
    cache.close()
    cache = open_cache(folder, plan, tally, epochs=epochs)
    for family in (0, 1, 13, 5):
        cache.serve(prompt(family, 4))
    cache.manager.flush()
    plan.clear()
    cache.serve(prompt(20, 3))  # it goes on after the fault
    cache.manager.flush()
    assert cache.serve(prompt(20, 3)) == 3
    cache.close()

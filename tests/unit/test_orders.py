"""An order is one native call where the data plane is this process's own, and a message elsewhere: both do the same."""

from __future__ import annotations

import asyncio
import random
import threading
import time

import numpy as np
import pytest

from kvtier import CacheConfig
from kvtier._core import Growing, Traffic
from kvtier.catalog import Catalog, PageStatus, Residency, Tier, TierSpec
from kvtier.content import Content, label_bytes
from kvtier.costmodel import CostModel
from kvtier.geometry import KVGeometry
from kvtier.messages import Priority
from kvtier.orders import DirectOrders, OrdersByMessage
from kvtier.plane import LocalDataPlane
from kvtier.tiers.device import DevicePool

BLOCK = 4
PATHS = [
    (Tier.DEVICE, Tier.HOST),
    (Tier.HOST, Tier.DISK),
    (Tier.HOST, Tier.DEVICE),
    (Tier.DISK, Tier.HOST),
    (Tier.DISK, Tier.HOST, Tier.DEVICE),
]


class Side:
    """A catalog and a data plane, and orders from the one to the other."""

    def __init__(self, path, kind, *, spill=False, **mover):
        geometry = KVGeometry.named("smollm2-135m", block_size=BLOCK)
        pool = DevicePool.allocate(geometry, 24)
        config = CacheConfig(
            block_size=BLOCK,
            host={"size": 16 * pool.page_bytes},
            disk={"path": str(path), "size": "16MiB"},
            mover=mover,
        )
        self.pool = pool
        self.plane = LocalDataPlane(config, geometry, pool, label_bytes=label_bytes(BLOCK))
        hello = self.plane.hello()
        slots = {tier: min(24, hello.capacity[tier]) for tier in sorted(hello.capacity)}
        specs = [TierSpec(tier, count) for tier, count in slots.items()]
        self.catalog = Catalog(specs, block_size=BLOCK, labels="content", max_nodes=200)
        self.costs = CostModel(hello.page_bytes)
        self.traffic = Traffic(self.catalog.native, self.costs)
        if kind is DirectOrders:
            self.orders = DirectOrders(self.catalog, self.plane.mover, self.traffic, spill=spill)
        else:
            self.orders = OrdersByMessage(self.catalog, self.plane, self.traffic, time.monotonic, spill=spill)
        self.root = self.catalog.root(bytes(32))

    def compute(self, request, chain, byte):
        """Blocks of a new chain, with bytes of their own; returns their nodes."""
        content = Content([chain] * (6 * BLOCK))
        table = self.catalog.take(Tier.DEVICE, 6, request)
        for slot in table:
            self.pool.write_page(int(slot), np.full(self.pool.payload_bytes, byte, np.uint8))
        growing = Growing(content.native, request)
        growing.put(0, table)
        self.catalog.extend([(growing, len(table), self.root)], Tier.DEVICE)
        self.catalog.release(request)
        return np.array(growing.take_later(), np.uint32)

    def settle(self):
        """Wait for all that is under way; returns what became of it, by ticket."""
        ended = {}
        while self.traffic.under_way:
            self.plane.wait(1.0)
            ended |= self.orders.settle()
        assert not self.orders.settle()
        self.catalog.check()
        return ended

    def account(self):
        """What was moved, and what was not."""
        told = self.traffic
        return told.pages_moved, told.failures, told.pages_refused, told.pages_dropped, told.under_way, told.hanging

    def state(self):
        return [part.tolist() for tier in (0, 1, 2) for part in self.catalog.contents(Tier(tier))], self.catalog.stats()

    def close(self):
        self.plane.close()


@pytest.fixture(params=[False, True], ids=["", "short queues"])
def short(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["", "spills"])
def spill(request):
    return request.param


@pytest.fixture
def sides(short, spill, tmp_path):
    queues = {"queue_pages": 4} if short else {}
    both = []
    for name, kind in (("direct", DirectOrders), ("message", OrdersByMessage)):
        (tmp_path / name).mkdir()
        both.append(Side(tmp_path / name, kind, spill=spill, **queues))
    yield both
    for side in both:
        side.close()


def test_what_is_settled_early_is_told_by_the_next_word(sides, spill):
    for side in sides:
        nodes = side.compute(2, 1, 7)
        ticket = side.orders.store(PATHS[0], nodes[:4], Priority.BACKGROUND)
        while side.plane.mover.stats()["lanes"]["offload"]["queued_pages"]:
            pass
        side.orders.catch_up()
        there = (side.catalog.state(nodes[:4])[1][:, Tier.HOST] == Residency.READY).all()
        assert there == isinstance(side.orders, DirectOrders)
        ended = {}
        while ticket not in ended:
            ended |= side.orders.settle()
        assert ended[ticket]
        assert side.traffic.pages_moved["offload"] == 4
        assert spill == bool(side.traffic.under_way or "spill" in side.traffic.pages_moved)


def test_both_kinds_of_orders_do_the_same(sides, short, seed):
    rng = random.Random(seed)
    chains = []
    for turn in range(90):
        if turn % 6 == 0:
            chains.append([side.compute(turn + 2, turn + 1, turn) for side in sides])
            assert chains[-1][0].tolist() == chains[-1][1].tolist()
        first, last = sorted((rng.randrange(6), rng.randrange(7)))
        chain = rng.choice(chains)[0][first:last]
        alive = [node for node in chain.tolist() if sides[0].catalog.state([node])[1].any()]
        nodes, path = np.array(alive, np.uint32), rng.choice(PATHS)
        if rng.random() < 0.4:  # so that something can come up again
            backed = nodes[sides[0].catalog.state(nodes)[1][:, Tier.DISK] == Residency.READY]
            for side in sides:
                side.catalog.drop(Tier.DEVICE, backed)
                side.catalog.drop(Tier.HOST, backed)
        request, priority = rng.choice([0, 500 + turn]), rng.choice(list(Priority))
        if len(path) == 2 and rng.random() < 0.5:
            cold = rng.random() < 0.2
            issued = [side.orders.store(path, nodes, priority, cold=cold) for side in sides]
        else:
            issued = [side.orders.load(path, nodes, request, priority, 0.0) for side in sides]
        assert issued[0] == issued[1], f"seed {seed}"
        said = [side.settle() for side in sides]
        assert said[0] == said[1], f"seed {seed}"
        for side in sides:
            side.catalog.release(request) if request else None
        assert sides[0].state() == sides[1].state(), f"seed {seed}"
        assert sides[0].account() == sides[1].account(), f"seed {seed}"
    moved, _, refused, *_ = sides[0].account()
    assert {"offload", "spill"} <= moved.keys(), f"seed {seed}: next to nothing was compared"
    assert short or not refused, f"seed {seed}"
    pages = [[side.pool.read_page(slot).tobytes() for slot in range(24)] for side in sides]
    assert pages[0] == pages[1], f"seed {seed}"


@pytest.mark.parametrize("how", ["raises", "closed", "crowded"])
def test_no_ticket_stays_open_that_the_data_plane_did_not_take(sides, how, monkeypatch):
    monkeypatch.setattr("kvtier.mover.INBOX_LIMIT", 0 if how == "crowded" else 4096)
    for side in sides:
        nodes = side.compute(2, 1, 9)[:3]
        before = side.catalog.usage(Tier.HOST)
        if how == "closed":
            side.plane.mover.close()
        if how == "raises":
            with pytest.raises(ValueError, match="cuts"):  # the data plane's word, on what is reserved already
                side.orders.load(PATHS[0], nodes, 0, Priority.DEMAND, 0.0, cuts=(7,))
        else:
            assert side.orders.load(PATHS[0], nodes, 0, Priority.DEMAND, 0.0) == (0, 0)
        assert side.catalog.stats()["transfers"] == 0, "a ticket stays open that nobody works on"
        assert how == "raises" or side.traffic.pages_refused == 3
        assert side.catalog.usage(Tier.HOST) == before
        side.catalog.check()


def test_an_order_is_overdue_by_its_deadline_by_either_way(sides):
    for side in sides:
        nodes = side.compute(2, 1, 9)[:3]
        side.orders.load(PATHS[0], nodes, 0, Priority.DEMAND, 1e-9)
        assert list(side.settle().values()) == [False], "was not overdue by its deadline"
        assert side.traffic.failures == {PageStatus.OVERDUE: 3}
        assert side.catalog.usage(Tier.HOST).ready == 0


def test_a_cold_order_is_no_use_of_a_page_by_either_way(sides):
    for side in sides:
        coldest = side.compute(2, 1, 9)[-1:]
        side.compute(3, 2, 8)
        side.orders.store(PATHS[0], coldest, Priority.BACKGROUND, cold=True)
        side.settle()
        side.catalog.take(Tier.DEVICE, side.catalog.usage(Tier.DEVICE).free + 1, 4)
        where = side.catalog.state(coldest)[1][0].tolist()
        assert where[Tier.DEVICE] == Residency.ABSENT, "a copy of a cold page made it hot"
        assert where[Tier.HOST] == Residency.READY


def test_an_order_of_nothing_or_of_strange_nodes_changes_nothing(sides):
    for side in sides:
        assert side.orders.load(PATHS[0], np.empty(0, np.uint32), 0, Priority.DEMAND, 0.0) == (0, 0)
        with pytest.raises(ValueError, match="is not a node"):
            side.orders.load(PATHS[0], np.array([7], np.uint32), 0, Priority.DEMAND, 0.0)
        with pytest.raises(ValueError, match="path"):
            side.orders.load((Tier.HOST,), np.empty(0, np.uint32), 0, Priority.DEMAND, 0.0)
        side.catalog.check()


def test_an_order_in_slices_is_one_by_either_way(sides):
    said = []
    for side in sides:
        nodes = side.compute(2, 1, 9)[:3]
        side.orders.load(PATHS[0], nodes, 0, Priority.BACKGROUND, 0.0)
        side.settle()
        side.catalog.drop(Tier.DEVICE, nodes)
        cuts = (side.pool.payload_bytes // 32 * 16, side.pool.payload_bytes)
        ticket, count = side.orders.load(PATHS[2], nodes, 3, Priority.DEMAND, 0.0, cuts=cuts)
        assert count == min(3, 3 if ticket else count)
        said.append((ticket, side.settle()))
    assert said[0] == said[1]


@pytest.mark.parametrize("short", [False])
def test_what_another_loop_awaits_is_told_to_it_and_settled(sides):
    """Once each, whether the loop's thread had collected it or the engine's takes it."""
    side = sides[0]
    nodes = side.compute(2, 1, 9)
    for turn in range(6):
        ticket = side.orders.store(PATHS[0], nodes[turn : turn + 1], Priority.DEMAND)
        told, waiting = [], threading.Event()

        async def wait(ticket=ticket, told=told, waiting=waiting):
            asyncio.get_running_loop().call_soon(waiting.set)
            told.append(await side.plane.mover.wait_for(ticket, 60.0))

        thread = threading.Thread(target=lambda wait=wait: asyncio.run(wait()))
        thread.start()
        assert waiting.wait(60.0)
        if turn % 2:
            thread.join()  # so it was collected for it
        assert side.settle()[ticket]
        thread.join()
        assert [done.ticket for done in told] == [ticket]
    assert side.traffic.pages_moved["offload"] == 6
    assert side.catalog.usage(Tier.HOST).ready == 6


def test_a_store_finds_the_room_that_others_have_given_though_nobody_has_polled_since(tmp_path):
    side = Side(tmp_path, DirectOrders)
    chains = [side.compute(2 + number, number, number) for number in range(4)]
    assert all(side.orders.store(PATHS[0], nodes, Priority.BACKGROUND) for nodes in (*chains[:2], chains[2][:4]))
    while side.plane.mover.stats()["lanes"]["offload"]["queued_pages"]:
        pass
    assert side.plane.mover.native.has_reports(), "they were settled before anybody needed it"
    assert side.orders.store(PATHS[0], chains[3][:4], Priority.BACKGROUND)
    side.settle()
    assert side.traffic.pages_moved["offload"] == 20
    assert not side.traffic.pages_dropped
    side.close()

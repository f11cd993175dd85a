"""What a data plane says of transfers: each word is settled or refused, and a refused one costs no other anything."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier import _core
from kvtier._core import Traffic
from kvtier.catalog import Catalog, PageStatus, Residency, Tier, TierSpec
from kvtier.costmodel import CostModel
from kvtier.messages import Completion, HopReport, Priority, Transfer
from kvtier.orders import OrdersByMessage

PAGE = 1 << 20
STAGE = (Tier.DISK, Tier.HOST)
OFFLOAD = (Tier.DEVICE, Tier.HOST)
FIRST_TICKET = 1 << 16  # of a catalog's


class Plane:
    """Takes what it is given, and says what it is told to; ``refuses`` that lane's orders by an exception."""

    def __init__(self) -> None:
        self.orders: list[Transfer] = []
        self.said: list[object] = []
        self.refuses: tuple[Tier, Tier] | None = None

    def submit(self, transfer: Transfer) -> bool:
        if transfer.path == self.refuses:
            raise ValueError("path: not this one")
        self.orders.append(transfer)
        return True

    def poll(self) -> list[object]:
        said, self.said = self.said, []
        return said


class Side:
    """Four blocks on the device, and orders of them by message."""

    def __init__(self) -> None:
        specs = [TierSpec(tier, 8) for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK)]
        self.catalog = Catalog(specs, block_size=4)
        self.plane, self.costs = Plane(), CostModel(PAGE)
        self.costs.seed_lane("offload", 0.0, 1e9)
        self.traffic = Traffic(self.catalog.native, self.costs)
        self.orders = OrdersByMessage(self.catalog, self.plane, self.traffic, lambda: 1.0, spill=True)
        root = self.catalog.root(bytes(32))
        self.nodes = self.catalog.insert(root, np.arange(16, dtype=np.uint32), 1)
        self.catalog.adopt(Tier.DEVICE, self.nodes, self.catalog.take(Tier.DEVICE, 4, 1), 1)

    def offload(self, first: int, last: int) -> int:
        ticket = self.orders.store(OFFLOAD, self.nodes[first:last], Priority.BACKGROUND)
        assert ticket
        return ticket

    def in_host(self) -> list[bool]:
        return (self.catalog.state(self.nodes)[1][:, Tier.HOST] == Residency.READY).tolist()


def word(ticket: int, *statuses: int, final: bool = True) -> Completion:
    hop = HopReport("offload", PAGE, 0.0, 1e-3, 1.0, 1.001, PAGE)
    return Completion(ticket, final, np.array([statuses], np.uint8), (hop,), 1.0, 1.001)


OK, PENDING = PageStatus.OK, PageStatus.PENDING


@pytest.mark.parametrize(
    ("bad", "error", "why"),
    [
        (lambda t: None, TypeError, "^completion: "),
        (lambda t: word(t, OK)._replace(status=np.empty((0, 1), np.uint8)), TypeError, "^completion: "),
        (lambda t: word(t, OK, OK), ValueError, r"^status: 1 hops of 2 pages; accepted: ticket \d+'s own, 1 of 1$"),
        (lambda t: word(t, PENDING), ValueError, r"^status: 1 of 1 of ticket \d+ are PENDING; accepted where"),
        (lambda t: word(t, 7), ValueError, "^status: 7 is not"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_word_that_is_refused_costs_no_other_anything(bad, error, why, place) -> None:
    side = Side()
    tickets = [side.offload(at, at + 1) for at in range(3)]
    words: list[object] = [word(ticket, OK) for ticket in tickets]
    words[place] = bad(tickets[place])
    side.plane.said = words
    with pytest.raises(error, match=why) as fault:
        side.orders.settle()
    assert "\n" not in str(fault.value)
    good = [at for at in range(3) if at != place]
    assert side.in_host() == [at in good for at in range(4)], "a good word was not settled"
    assert side.traffic.runs(tickets[place]), "a refused word was the last one"
    side.plane.said = [word(tickets[place], OK)]
    assert side.orders.settle() == dict.fromkeys(tickets, True), "what ended is told once, if not at once"
    assert side.in_host() == [True, True, True, False]
    assert sum(order.path == (Tier.HOST, Tier.DISK) for order in side.plane.orders) == 1
    assert side.plane.orders[-1].identities.shape[0] == 3, "what came down did not all go on to the disk"
    assert side.orders.settle() == {}
    side.catalog.check()


def test_a_spill_that_is_refused_is_dropped_and_counted() -> None:
    side = Side()
    ticket = side.offload(0, 3)
    side.plane.refuses = (Tier.HOST, Tier.DISK)
    side.plane.said = [word(ticket, OK, OK, PageStatus.WRITE_ERROR)]
    assert side.orders.settle() == {ticket: False}
    assert side.traffic.pages_dropped == 2
    assert side.in_host() == [True, True, False, False]
    assert side.catalog.stats()["transfers"] == side.traffic.under_way == 0
    side.catalog.check()


def test_a_spill_that_the_mover_of_this_process_refuses_is_dropped_and_counted() -> None:
    """There is no disk."""
    memory = np.zeros((8, 4096), np.uint8)
    pool, arena = _core.DevicePool([(memory.ctypes.data, 4096, 4096)], 8, memory), _core.HostArena(8, 4096)
    mover = _core.Mover(pool, arena, None)
    catalog = Catalog([TierSpec(Tier.DEVICE, 8), TierSpec(Tier.HOST, 8)], block_size=4)
    traffic = Traffic(catalog.native, CostModel(4096))
    orders = _core.Orders(catalog.native, mover, traffic)
    nodes = catalog.insert(catalog.root(bytes(32)), np.arange(8, dtype=np.uint32), 1)
    catalog.adopt(Tier.DEVICE, nodes, catalog.take(Tier.DEVICE, 2, 1), 1)
    ticket = orders.store(list(OFFLOAD), nodes, False, Priority.BACKGROUND, 0, False)
    assert mover.wait(60.0)
    assert orders.settle(True) == {ticket: True}
    assert (traffic.pages_dropped, traffic.under_way) == (2, 0)
    catalog.check()
    mover.close()


@pytest.mark.parametrize("kind", ["costs", "traffic"])
def test_a_ticket_that_is_under_way_is_refused_and_counts_once(kind) -> None:
    side = Side()

    def begin(ticket: int, path: tuple[Tier, ...] = OFFLOAD, priority: int = 0) -> None:
        if kind == "costs":
            side.costs.submitted(ticket, path, 4, priority, 1.0)
        else:
            side.traffic.begun(ticket, path, side.nodes, priority, 1.0)

    begin(7)
    queued = side.costs.queue_wait("offload", 1.0)
    assert queued > 0
    for wrong, why in (
        ((7,), "^ticket: 7 .*accepted"),
        ((8, STAGE[:1]), "^path: 1 tiers; accepted"),
        ((8, OFFLOAD, 3), "^priority: 3; accepted"),
        ((8, OFFLOAD, -5), "^priority: -5; accepted"),
    ):
        with pytest.raises(ValueError, match=why):
            begin(*wrong)
        assert side.costs.queue_wait("offload", 1.0) == queued
        assert not side.traffic.runs(8)
    side.costs.completed(word(7, OK, OK, OK, OK)) if kind == "costs" else side.traffic.settle([word(7, *[OK] * 4)])
    assert side.costs.queue_wait("offload", 1.0) == 0, "a transfer that has ended is waited for"


def test_what_the_data_plane_refuses_or_raises_for_leaves_nothing_to_wait_for() -> None:
    side = Side()
    side.plane.refuses = OFFLOAD
    with pytest.raises(ValueError, match="path: not this one"):
        side.orders.store(OFFLOAD, side.nodes, Priority.BACKGROUND)
    side.plane.submit = lambda transfer: False
    assert not side.orders.store(OFFLOAD, side.nodes, Priority.BACKGROUND)
    assert (side.traffic.under_way, side.traffic.pages_refused) == (0, 8)
    assert side.costs.queue_wait("offload", 1.0, Priority.BACKGROUND) == 0
    side.catalog.check()


def test_an_order_whose_beginning_cannot_be_noted_is_not_given() -> None:
    side = Side()
    side.traffic.begun(FIRST_TICKET, OFFLOAD, side.nodes, 0, 1.0)
    with pytest.raises(ValueError, match=f"^ticket: {FIRST_TICKET} "):
        side.orders.store(OFFLOAD, side.nodes, Priority.BACKGROUND)
    assert not side.plane.orders, "a transfer runs whose ticket nobody knows"
    assert side.catalog.stats()["transfers"] == 0
    side.catalog.check()

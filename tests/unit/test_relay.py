"""The relay: several ranks' data planes as one. A page is there when all ranks have it, gone when one has not."""

import numpy as np
import pytest

from kvtier.catalog import PageStatus, Tier
from kvtier.messages import Cancel, Completion, Forget, Hello, HopReport, Invalidate, Priority, Promote, Transfer
from kvtier.relay import MOST_PENDING, RankPlane, RelayPlane

SPACE = b"s" * 32
P, OK, CANCELLED, SKIPPED, READ_ERROR = (
    int(getattr(PageStatus, name)) for name in ("PENDING", "OK", "CANCELLED", "SKIPPED", "READ_ERROR")
)


def hello(capacity=10, slots=(), names=(), generation=0, page_bytes=4096, of=0):
    identities = np.zeros((len(slots), 144), np.uint8)
    for row, name in zip(identities, names, strict=True):
        row[0] = name
        row[64:96] = np.frombuffer(SPACE, np.uint8)
        row[96:104] = np.frombuffer(np.uint64(of).tobytes(), np.uint8)
    return Hello(
        {Tier.HOST: capacity, Tier.DISK: capacity}, page_bytes, np.array(slots, np.uint32), identities, generation
    )


def transfer(ticket=1, pages=2, path=(Tier.DISK, Tier.HOST), deadline=0.0):
    return Transfer(
        ticket, path, np.zeros((len(path), pages), np.uint32), np.zeros((pages, 144), np.uint8), deadline=deadline
    )


def done(status, ticket=1, final=True, hops=()):
    return Completion(ticket, final, np.array(status, np.uint8), hops, 1.0, 2.0)


@pytest.fixture
def two():
    return RelayPlane([hello(), hello()])


def test_capacity_is_the_least_and_the_inventory_what_all_hold():
    relay = RelayPlane([hello(9, [1, 2, 3, 4], [1, 2, 3, 4]), hello(4, [3, 2, 1], [3, 9, 1])])
    said = relay.hello()
    assert said.capacity == {Tier.HOST: 4, Tier.DISK: 4}
    assert said.inventory_slots.tolist() == [1, 3]
    assert said.inventory_identities[:, 0].tolist() == [1, 3]
    (order,) = relay.orders()
    assert isinstance(order, Forget)
    assert order.slots.tolist() == [2, 4]


def test_ranks_that_do_not_agree_are_refused():
    with pytest.raises(ValueError, match=r"pages of \[4096, 8192\] bytes"):
        RelayPlane([hello(), hello(page_bytes=8192)])


def test_pages_older_than_the_journal_says_are_not_taken_over(tmp_path):
    first = RelayPlane([hello()], tmp_path / "generations")
    first.invalidate(None)
    again = RelayPlane([hello(10, [1, 2], [1, 2])], tmp_path / "generations")
    assert not len(again.hello().inventory_slots)
    assert again.orders()[0] == Invalidate(None, 1), "a rank that has not heard of it hears of it first"
    kept = RelayPlane([hello(10, [1, 2], [1, 2], 1, of=1)], tmp_path / "generations")
    assert kept.hello().inventory_slots.tolist() == [1, 2]


def test_a_page_is_ready_when_all_ranks_have_it(two):
    assert two.submit(transfer())
    two.deliver(0, [done([[OK, OK]])])
    assert two.poll() == []
    two.deliver(1, [done([[OK, READ_ERROR]])])
    (told,) = two.poll()
    assert told.final
    assert told.status.tolist() == [[OK, READ_ERROR]]
    assert two.pending() == 0


def test_a_failure_waits_for_the_rank_that_still_moves_the_page(two):
    two.submit(transfer(path=(Tier.DISK, Tier.HOST, Tier.DEVICE)))
    two.deliver(0, [done([[READ_ERROR, OK], [SKIPPED, OK]])])
    two.deliver(1, [done([[P, OK], [CANCELLED, OK]], final=False)])
    (early,) = two.poll()
    assert not early.final
    assert early.status.tolist() == [[P, OK], [SKIPPED, OK]]
    two.deliver(1, [done([[OK, OK], [CANCELLED, OK]])])
    (last,) = two.poll()
    assert last.final
    assert last.status.tolist() == [[READ_ERROR, OK], [SKIPPED, OK]]


def test_repeated_late_and_foreign_words_change_nothing(two):
    two.submit(transfer())
    for _ in range(3):
        two.deliver(0, [done([[OK, OK]]), done([[OK]]), done([[OK, OK]], ticket=7)])
    two.deliver(5, [done([[OK, OK]])])
    assert two.poll() == []
    two.deliver(1, [done([[OK, OK]])])
    two.deliver(1, [done([[READ_ERROR, OK]])])
    assert [d.status.tolist() for d in two.poll()] == [[[OK, OK]]]


def test_what_a_hop_took_is_the_slowest_ranks(two):
    two.submit(transfer())
    two.deliver(0, [done([[OK, OK]], hops=(HopReport("stage", 10, 0.5, 1.0),))])
    two.deliver(1, [done([[OK, OK]], hops=(HopReport("stage", 10, 0.1, 3.0),))])
    assert two.poll()[0].hops == (HopReport("stage", 20, 0.5, 3.0),)


def test_orders_go_once_in_order_and_deadlines_as_seconds_from_now():
    now = [100.0]
    relay = RelayPlane([hello()], clock=lambda: now[0])
    relay.submit(transfer(5, deadline=103.0))
    relay.cancel(5)
    relay.cancel(6)
    relay.promote(5, Priority.DEMAND, 102.0)
    relay.invalidate(SPACE)
    now[0] = 101.0
    first, second, urgent, third = relay.orders()
    assert first.deadline == 2.0
    assert (second, urgent, third) == (Cancel(5), Promote(5, Priority.DEMAND, 1.0), Invalidate(SPACE, 1))
    assert relay.orders() == ()


def test_what_is_under_way_is_bounded(two):
    assert all(two.submit(transfer(n + 1)) for n in range(MOST_PENDING))
    assert not two.submit(transfer(MOST_PENDING + 1))


class Plane:
    """A data plane that does as it is told, or refuses."""

    def __init__(self):
        self.seen, self.reports, self.at = [], [], 0

    def submit(self, order):
        if order.ticket == 13:
            raise ValueError("slots: host slot 99")
        self.seen.append(order)
        return order.ticket != 12

    def cancel(self, ticket):
        self.seen.append(("cancel", ticket))
        self.reports.append(done([[CANCELLED, CANCELLED]], ticket))

    def poll(self):
        out, self.reports = self.reports, []
        return out

    def wait(self, timeout):
        self.seen.append(("wait", timeout))

    def generation(self, space):
        return self.at

    def invalidate(self, space):
        self.at += 1

    def forget(self, slots):
        raise OSError("I/O error")


def test_a_refused_order_is_a_transfer_of_which_nothing_ran():
    rank = RankPlane(Plane(), lambda: 50.0)
    rank.carry_out([transfer(11, deadline=2.0), transfer(12), transfer(13), Forget(np.zeros(1, np.uint32))])
    assert rank.plane.seen[0].deadline == 52.0
    assert [(told.ticket, told.final, told.status.tolist()) for told in rank.poll()] == [
        (12, True, [[SKIPPED, SKIPPED]]),
        (13, True, [[SKIPPED, SKIPPED]]),
    ]
    assert rank.refused == ["slots: host slot 99", "I/O error"]
    assert rank.runs(11)
    assert not rank.runs(12)


def test_a_rank_catches_up_with_the_generation():
    rank = RankPlane(Plane())
    rank.carry_out([Invalidate(None, 3), Invalidate(None, 2)])
    assert rank.plane.at == 3


def test_draining_waits_then_cancels_and_keeps_the_news():
    rank = RankPlane(Plane(), iter(range(100)).__next__)
    rank.carry_out([transfer(3)])
    rank.drain([3, 4], patience=2.0)
    assert ("cancel", 3) in rank.plane.seen
    assert not rank.runs(3)
    assert [told.ticket for told in rank.poll()] == [3]


class Slices:
    """A data plane of which only the waiting is looked at."""

    def __init__(self):
        self.asked, self.reports = [], []

    def submit(self, order):
        return True

    def poll(self):
        given, self.reports = self.reports, []
        return given

    def wait(self, timeout):
        return True

    def wait_for_slices(self, ticket, count, timeout):
        self.asked.append((ticket, count))
        return True


@pytest.mark.parametrize(("status", "there"), [([[OK, OK]], True), ([[OK, READ_ERROR]], False)])
def test_slices_are_waited_for_until_the_rank_has_heard_of_the_end(status, there):
    plane = Slices()
    rank = RankPlane(plane)
    rank.carry_out([transfer(path=(Tier.HOST, Tier.DEVICE))])
    assert rank.wait_for_slices(1, 3, 1.0)
    assert plane.asked == [(1, 3)]
    plane.reports = [done(status)]
    rank.drain([1], 1.0)
    assert rank.wait_for_slices(1, 4, 1.0) is there
    assert plane.asked == [(1, 3)]
    assert not rank.wait_for_slices(2, 1, 1.0), "nobody knows that one"


def test_what_a_rank_is_told_to_refuse_is_a_transfer_of_which_nothing_ran():
    rank = RankPlane(Slices())
    rank.refuse(transfer(9))
    (told,) = rank.poll()
    assert (told.ticket, told.final, told.status.tolist()) == (9, True, [[SKIPPED, SKIPPED]])
    assert not rank.runs(9)

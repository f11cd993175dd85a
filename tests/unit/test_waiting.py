"""Waiting: whom an engine announces, when, and in how many seconds it says that each will begin."""

from itertools import pairwise

from kvtier.waiting import Waiting


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def of(count, clock):
    waiting = Waiting(clock)
    for number in range(count):
        waiting.enter(f"r{number}")
    return waiting


def test_each_is_announced_once_in_order_of_arrival_and_no_more_than_are_near():
    waiting = of(40, Clock())
    assert [name for name, _ in waiting.news()] == [f"r{n}" for n in range(32)]
    assert waiting.news() == []
    waiting.leave("r0")
    waiting.drop("r5")
    assert [name for name, _ in waiting.news()] == ["r32", "r33"]
    assert len(waiting) == 38


def test_those_who_wait_begin_as_far_apart_as_those_before_them_did():
    clock = Clock()
    waiting = of(30, clock)
    waiting.news()
    for number in range(20):
        clock.now += 2.0
        waiting.leave(f"r{number}")
    within = list(waiting.changes().values())
    steps = [after - before for before, after in pairwise(within)]
    assert 1.5 < steps[0] <= 2.0
    assert max(steps) - min(steps) < 1e-9
    assert abs(within[0] - steps[0]) < 1e-9


def test_a_pause_in_which_nobody_waited_says_nothing_of_how_far_apart_they_begin():
    clock = Clock()
    waiting = Waiting(clock)
    for number in range(10):  # each begins at once
        clock.now += 30.0
        waiting.enter(f"r{number}")
        waiting.leave(f"r{number}")
    waiting.enter("late")
    assert waiting.news() == [("late", 0.0)]


def test_it_is_said_anew_from_time_to_time_and_of_those_alone_that_were_announced():
    clock = Clock()
    waiting = of(2, clock)
    clock.now = 5.0
    assert waiting.changes() == {}
    waiting.news()
    waiting.enter("new")
    assert waiting.changes() == {}, "it was looked at just now"
    clock.now = 6.5
    assert list(waiting.changes()) == ["r0", "r1"]
    assert waiting.changes() == {}


def test_who_was_preempted_waits_before_all_others_and_is_announced_again():
    waiting = of(2, Clock())
    waiting.news()
    waiting.leave("r0")
    waiting.enter("r0", first=True)
    assert [name for name, _ in waiting.news()] == ["r0"]
    waiting.leave("r1")
    waiting.leave("nobody")
    assert len(waiting) == 1

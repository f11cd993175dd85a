"""Mistakes in how long a request waits: for its own load, for what others bring, for its look-ahead."""

from __future__ import annotations

from tests.mutants.mistake import Planted

__all__ = ["KINDS", "PLANTED"]

KINDS = (
    *("a wait is cut too late", "a wait is cut too early"),
    *("a lane is left for ever", "others' orders are not counted", "a trial is in the way"),
    *("a look-ahead is in the way", "a look-ahead finds no room", "a look-ahead follows an older word"),
)

WAITS = "tests/unit/test_offload_policy.py"
OVERRUN = f"{WAITS}::test_a_wait_that_overruns_is_given_up_before_it_costs_twice_as_much"
HANGING = f"{WAITS}::test_where_nothing_more_is_heard_each_order_that_is_left_counts"
TEACHES = f"{WAITS}::test_what_is_waited_for_in_vain_teaches_who_asks_next"
BEFORE = f"{WAITS}::test_what_was_there_before_says_nothing_of_the_pace"
STEADY = f"{WAITS}::test_a_steady_disk_that_is_late_is_waited_for_while_that_is_faster"
STILL = f"{WAITS}::test_only_what_is_still_on_disk_is_waited_for"
ANEW = f"{WAITS}::test_a_wait_begins_anew_where_the_engine_did_not_ask_for_long"
OLD = f"{WAITS}::test_who_has_been_there_for_long_waits_like_a_new_one"
PAUSE = "tests/unit/test_prefetch.py::test_a_pause_between_two_hints_is_no_step_of_the_engine"
RESTS = "tests/unit/test_prefetch.py::test_who_closes_or_flushes_waits_for_no_more_look_ahead_than_is_under_way"
ROOM = "tests/unit/test_prefetch_room.py"
ONCE = f"{ROOM}::test_pages_that_were_used_once_make_room_where_the_policy_writes_no_such_ones"
LAST = f"{ROOM}::test_last_copies_are_copied_down_where_they_keep_a_hint_from_its_room"
READ = f"{ROOM}::test_what_has_been_read_keeps_nothing_else_from_its_place"
STARTS = "tests/unit/test_prefetch.py::test_who_is_about_to_start_is_not_put_back_by_an_older_word"
LOADS = "tests/unit/test_load_policy.py"
BACK = f"{LOADS}::test_decisions_turn_back_when_the_lane_to_the_device_recovers"
BURST = f"{LOADS}::test_who_was_promised_a_load_before_others_ordered_theirs_is_asked_again"
TRIED = f"{WAITS}::test_a_lane_to_the_device_that_has_recovered_is_used_again"
HELD = f"{WAITS}::test_no_step_of_the_engine_waits_for_a_trial"
RARE = f"{WAITS}::test_to_try_a_slow_lane_costs_little_and_is_rare"
SHARED = "tests/unit/test_load_policy.py::test_who_waits_for_anothers_load_waits_as_long_as_that_takes"

PLANTED = (
    Planted(
        kind="a lane is left for ever",
        name="only a disk is asked again",
        file="kvtier/probe.py",
        old="{Tier.HOST: _Asked(), Tier.DISK: _Asked()}",
        new="{Tier.DISK: _Asked()}",
        says="not within 10 requests",
        tests=(BACK,),
    ),
    Planted(
        kind="a lane is left for ever",
        name="what is on disk is asked for no further than host memory",
        file="kvtier/probe.py",
        old="(device or 0.0) > disk",
        new="(device or 0.0) < 0",
        says="not within 10 requests",
        tests=(BACK,),
    ),
    Planted(
        kind="a lane is left for ever",
        name="the way to an engine's own device is never tried again",
        file="kvtier/probe.py",
        old="if choice.blocks > start or",
        new="if choice.blocks >= start or",
        says="not within thirty requests",
        tests=(TRIED,),
    ),
    Planted(
        kind="a trial is in the way",
        name="a step waits for it",
        file="kvtier/offload.py",
        old="not request.choice.trial and self._is_synchronous(",
        new="self._is_synchronous(",
        says="(2, True)",
        tests=(HELD,),
    ),
    Planted(
        kind="a trial is in the way",
        name="every request tries",
        file="kvtier/probe.py",
        old="self._tried_at = now",
        new="pass",
        says="some try it, most do not",
        tests=(RARE,),
    ),
    Planted(
        kind="others' orders are not counted",
        name="a choice is made again after some time only",
        file="kvtier/policy.py",
        old="self.orders != sequence.chosen_after or ",
        new="",
        says="nobody queues for longer than computing takes",
        tests=(BURST,),
    ),
    Planted(
        kind="a wait is cut too late",
        name="what others bring is waited for however long it takes",
        file="kvtier/foreign_waits.py",
        old="len(tickets)), now) is not None:",
        new="len(tickets)), now) is not None and now < 0:",
        says="computing would have been faster",
        tests=(OVERRUN,),
    ),
    Planted(
        kind="a wait is cut too late",
        name="several orders of others count as one",
        file="kvtier/foreign_waits.py",
        old="tiers, there, len(tickets)), now)",
        new="tiers, there, 1), now)",
        says="one order that hangs stands for all",
        tests=(HANGING,),
    ),
    Planted(
        kind="a wait is cut too late",
        name="of the orders that are left the next one counts alone",
        file="kvtier/choice.py",
        old="silent * max(orders, 1)",
        new="silent",
        says="one order that hangs stands for all",
        tests=(HANGING,),
    ),
    Planted(
        kind="a wait is cut too late",
        name="nobody learns from a wait in vain",
        file="kvtier/foreign_waits.py",
        old="            self._costs.overran(tickets, now)\n",
        new="",
        says="still taken for a fast one",
        tests=(TEACHES,),
    ),
    Planted(
        kind="a wait is cut too late",
        name="what was in host memory before counts as come",
        file="kvtier/foreign_waits.py",
        old="max(0, host - awaits.had)",
        new="host",
        says="was taken for what had come",
        tests=(BEFORE,),
    ),
    Planted(
        kind="a wait is cut too early",
        name="when something came is not noted",
        file="kvtier/choice.py",
        old="            self._come, self._came = come, now\n",
        new="            self._come = come\n",
        says="that parts had come was not seen",
        tests=(STEADY,),
    ),
    Planted(
        kind="a wait is cut too early",
        name="what is in host memory is still to come",
        file="kvtier/foreign_waits.py",
        old="np.count_nonzero(tiers == Tier.DISK)",
        new="len(tiers) - there",
        says="it waited for what was in host memory already",
        tests=(STILL,),
    ),
    Planted(
        kind="a wait is cut too early",
        name="a wait goes on over a pause",
        file="kvtier/foreign_waits.py",
        old="return awaits if goes_on else None",
        new="return awaits",
        says="a pause was taken for a wait",
        tests=(ANEW,),
    ),
    Planted(
        kind="a wait is cut too early",
        name="who is preempted takes what it waited along",
        file="kvtier/offload.py",
        old="        fresh.cacheable, fresh.failed = request.cacheable, request.failed\n",
        new="        fresh.cacheable, fresh.failed = request.cacheable, request.failed\n"
        "        fresh.waited = request.waited\n",
        says="its look-ahead is passed over",
        tests=(OLD,),
    ),
    Planted(
        kind="a wait is cut too early",
        name="what ends for another is not heard of",
        file="kvtier/loading.py",
        old="bool(news) or (sequence.waits and bool(ended)) or",
        new="bool(news) or",
        says="cut after",
        tests=(SHARED,),
    ),
    Planted(
        kind="a look-ahead is in the way",
        name="the time without hints counts as a step",
        file="kvtier/prefetch.py",
        old="        if len(self.expected) == self._gone:\n            self._stepped = None\n",
        new="",
        says="a pause was taken for a step",
        tests=(PAUSE,),
    ),
    Planted(
        kind="a look-ahead is in the way",
        name="a flush waits for what it has ordered ahead itself",
        file="kvtier/prefetch.py",
        old="        if self._resting:\n            return\n",
        new="",
        says="a flush ordered what nobody waits for",
        tests=(RESTS,),
    ),
    Planted(
        kind="a look-ahead finds no room",
        name="last copies that nobody would write stay",
        file="csrc/catalog/pages.hpp",
        old="const bool last = pool.keeps_last && !below;",
        new="const bool last = !below;",
        says="no page gave its place",
        tests=(ONCE,),
    ),
    Planted(
        kind="a look-ahead finds no room",
        name="last copies are not copied down for it",
        file="kvtier/placement.py",
        old="        if write in _WRITTEN and self._rests(path):\n",
        new="        if write in () and self._rests(path):\n",
        says="they stay in the way",
        tests=(LAST,),
    ),
    Planted(
        kind="a look-ahead finds no room",
        name="what has been read is needed still",
        file="kvtier/prefetch.py",
        old="        self._note_read(now)\n        self._reschedule",
        new="        self._reschedule",
        says="the coldest pages there were read before",
        tests=(READ,),
    ),
    Planted(
        kind="a look-ahead follows an older word",
        name="who is about to start is put back in the queue",
        file="kvtier/prefetch.py",
        old="        self._moved.pop(name, None)\n        expected.rests",
        new="        expected.rests",
        says="it loads these itself",
        tests=(STARTS,),
    ),
)

"""Mistakes in how stores, which nobody waits for, back off."""

from __future__ import annotations

from tests.mutants.mistake import Planted

__all__ = ["KINDS", "PLANTED"]

KINDS = ("a store is in the way", "a store is lost")

STORES = "tests/unit/test_backing_off.py"
BOUNDED = f"{STORES}::test_no_more_is_ordered_than_a_lane_moves_in_a_second_and_the_rest_follows"
ROOM = f"{STORES}::test_stores_that_have_not_begun_give_way_to_who_needs_their_room"
LOAD = f"{STORES}::test_a_load_from_disk_has_the_room_of_stores_that_have_not_begun"
STORY = "tests/unit/test_decoding.py::test_a_story_told_by_single_calls_comes_to_the_same_tables_pages_and_catalog"

PLANTED = (
    Planted(
        kind="a store is in the way",
        name="stores pile up",
        file="kvtier/orders.py",
        old="self._traffic.store_room(path) if priority is _BACKGROUND else len(wanted)",
        new="len(wanted)",
        says="stores pile up",
        tests=(BOUNDED,),
    ),
    Planted(
        kind="a store is in the way",
        name="who needs room waits until all is stored",
        file="kvtier/placement.py",
        old="            self.cancel(tickets)\n            self.catch_up()\n",
        new="            pass\n",
        says="it waits until all is stored",
        tests=(ROOM,),
    ),
    Planted(
        kind="a store is in the way",
        name="a load from disk has no room",
        file="kvtier/placement.py",
        old="                self.make_room(HOST, last - first)\n",
        new="                pass\n",
        says="stores kept the room in host memory",
        tests=(LOAD,),
    ),
    Planted(
        kind="a store is in the way",
        name="what gave way is ordered again before who needs the room has asked again",
        file="kvtier/placement.py",
        old="        self._crowded[tier] = _CROWDED\n",
        new="",
        says="requests starve",
        tests=(STORY,),
    ),
    Planted(
        kind="a store is lost",
        name="what was put off never goes down",
        file="kvtier/placement.py",
        old="        if self._traffic.has_put_off:\n",
        new="        if False:\n",
        says="what was put off never went down",
        tests=(BOUNDED,),
    ),
)

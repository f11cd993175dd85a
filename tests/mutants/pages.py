"""Mistakes with pages: who has them, who may read them, whose they are, and when they go."""

from __future__ import annotations

from tests.mutants.mistake import STORIES, Planted

__all__ = ["KINDS", "PLANTED"]

KINDS = (
    *("eviction of a pinned page", "parent evicted before child", "a page readable before its write completed"),
    *("checksum not verified", "a completion settled twice", "a slot reused while a cancelled copy still runs"),
    *("a lease not released on abort", "the salt left out of one path", "slot freed while its copy runs"),
    "ledger off by one",
)

OVERDUE = "an_overdue_load_keeps_its_slots_until_the_data_plane_has_said_its_last_word"
DRAINS = "tests/unit/test_catalog.py::test_a_cancelled_slot_stays_taken_until_no_copy_can_touch_it"
SECOND = "tests/unit/test_catalog.py::test_the_second_word_on_a_page_changes_nothing"
MATCH = "tests/unit/test_offload.py::test_a_salt_is_a_namespace_of_its_own"
AHEAD = "tests/unit/test_offload.py::test_a_hint_looks_in_its_own_namespace"
KEYS = "tests/property/test_key_matrix.py::test_no_call_leaves_the_salt_out"
FAULTS = "tests/fault/test_io_faults.py"


def _salt(where: str, file: str, line: str, says: str, *tests: str) -> Planted:
    """``line`` asks for a namespace by salt and adapter, and now leaves the salt out."""
    without = line.replace("space(salt, adapter)", "space(None, adapter)")
    return Planted("the salt left out of one path", f"of {where}", file, line, without, says, tests or (STORIES,))


_MISSED = "left the salt out"
_FOREIGN = "another namespace|nobody computed|nobody asked for under its namespace|never cached"

PLANTED = (
    Planted(
        kind="eviction of a pinned page",
        name="a pinned page stays in the order of eviction",
        file="csrc/catalog/pages.cpp",
        old="  pool.order.remove(nodes + leaving, count - leaving);\n}",
        new="}",
        says="is in the order of eviction and must not go: it is pinned",
    ),
    Planted(
        kind="parent evicted before child",
        name="what has continuations is not passed over",
        file="csrc/catalog/pages.hpp",
        old="      if (at(t, node).kids != 0) {",
        new="      if (at(t, node).kids == kNoNode) {",
        says="was evicted before its continuation",
        tests=("tests/unit/test_catalog.py::test_the_coldest_page_waits_for_its_continuation",),
    ),
    Planted(
        kind="a page readable before its write completed",
        name="what begins to fill is ready",
        file="csrc/catalog/pages.cpp",
        old="static_cast<std::uint32_t>(Residency::kFilling) + (pinned",
        new="static_cast<std::uint32_t>(Residency::kReady) + (pinned",
        says="still fills the page of node .*, which is ready already",
    ),
    Planted(
        kind="a page readable before its write completed",
        name="a write that failed makes the page ready",
        file="csrc/catalog/exchange.cpp",
        old="  bool good = now == PageStatus::kOk;",
        new="  bool good = now != PageStatus::kPending;",
        says="is ready and (holds no page|its record names another block)",
    ),
    Planted(
        kind="checksum not verified",
        name="of what was read from disk",
        file="csrc/mover/io_executor.cpp",
        old="      !options_.verify || checksum(",
        new="      true || checksum(",
        says="wrong bytes of page",
        tests=(FAULTS,),
    ),
    Planted(
        kind="a completion settled twice",
        name="the second word on a page counts too",
        file="csrc/catalog/exchange.cpp",
        old="  if (kept != PageStatus::kPending || now == PageStatus::kPending) return false;",
        new="  if (now == PageStatus::kPending) return false;",
        says="the second word on a page counted",
        tests=(SECOND,),
    ),
    Planted(
        kind="a completion settled twice",
        name="a ticket is used again",
        file="csrc/catalog/transfers.hpp",
        old="(++serial_ << 16) | index;",
        new="(Ticket{1} << 16) | index;",
        says=r"ticket \d+ was submitted twice",
    ),
    Planted(
        kind="a slot reused while a cancelled copy still runs",
        name="what is condemned goes while it is filled",
        file="csrc/catalog/pages.cpp",
        old="  if (page.pins() == 0 && tiers_[t].tickets[page.slot] == 0) free_page(t, page);",
        new="  if (page.pins() == 0) free_page(t, page);",
        says="still fills the page of node .*, whose slot was freed",
    ),
    Planted(
        kind="a slot reused while a cancelled copy still runs",
        name="an overdue load is taken for failed",
        file="kvtier/placement.py",
        old="            self.cancel((ticket,))\n            self._catalog.cancel(ticket)\n",
        new="            self.cancel((ticket,))\n"
        "            for shape in ((hops, pages) for hops in (1, 2) for pages in range(1, 65)):\n"
        "                try:  # whichever it has\n"
        "                    self._catalog.settle(ticket, np.full(shape, _core.PageStatus.OVERDUE, np.uint8))\n"
        "                except ValueError:\n"
        "                    continue\n",
        says=r"slot \d+ given to transfer \d+, and transfer \d+ fills it|which transfer \d+ fills",
        tests=(f"tests/property/test_stories.py::test_{OVERDUE}",),
    ),
    Planted(
        kind="slot freed while its copy runs",
        name="its last lease frees a slot that is being filled",
        file="csrc/catalog/pages.hpp",
        old="    } else if (page.residency() == Residency::kDraining && pool.tickets[page.slot] == 0) {",
        new="    } else if (page.residency() == Residency::kDraining) {",
        says="still fills the page of node .*, whose slot was freed",
        tests=(DRAINS,),
    ),
    Planted(
        kind="slot freed while its copy runs",
        name="the end of its own filling frees a slot that is copied on",
        file="csrc/catalog/pages.hpp",
        old="  } else if (page.pins() == 0) {  // draining\n    free_page(t, page);\n  }\n",
        new="  } else {\n    free_page(t, page);\n  }\n",
        says=r"absent page of node \d+ is pinned",
        tests=(DRAINS,),
    ),
    Planted(
        kind="a lease not released on abort",
        name="a request that is withdrawn keeps its pages",
        file="kvtier/loading.py",
        old="        sequence.tickets.clear()\n        self._catalog.release(sequence.request)\n\n",
        new="        sequence.tickets.clear()\n\n",
        says="one was not released",
    ),
    _salt("requests", "kvtier/manager.py", "space = self._lookup.space(salt, adapter)\n        if known", _FOREIGN),
    _salt("announcements", "kvtier/manager.py", "_lookup.reading(self._lookup.space(salt, adapter),", _MISSED, KEYS),
    _salt("hints", "kvtier/manager.py", "_prefetcher.fetch(self._lookup.space(salt, adapter),", _MISSED, KEYS),
    _salt("locate", "kvtier/manager.py", "_lookup.locate(self._lookup.space(salt, adapter),", _MISSED, KEYS),
    _salt("evict", "kvtier/manager.py", "_lookup.evict(tier, self._lookup.space(salt, adapter),", "another namespace"),
    _salt("invalidate", "kvtier/manager.py", "_invalidate(self._lookup.space(salt, adapter))", _MISSED, KEYS),
    _salt("an engine's own hashes", "kvtier/offload.py", "space = self._lookup.space(salt, adapter)", _MISSED, MATCH),
    _salt("its queue", "kvtier/offload.py", "foresee, self._lookup.space(salt, adapter),", _MISSED, AHEAD),
    Planted(
        kind="the salt left out of one path",
        name="of the fingerprint",
        file="kvtier/lookup.py",
        old='(("salt", salt), ("adapter", adapter))',
        new='(("adapter", adapter),)',
        says=_FOREIGN,
    ),
    Planted(
        kind="ledger off by one",
        name="a page that is freed still counts as draining",
        file="csrc/catalog/pages.hpp",
        old="    --tiers_[t].count.draining;\n",
        new="",
        says=r"free \+ filling \+ ready \+ draining is not the capacity",
    ),
)

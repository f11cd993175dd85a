"""Mistakes in what an engine's step is made of: orders, names, speeds, choices, and what waits for what."""

from __future__ import annotations

from tests.mutants.mistake import Planted

__all__ = ["KINDS", "PLANTED"]

KINDS = (
    *(
        "half of an order stays",
        "what was stored gives no room",
        "an order is carried out otherwise than given",
        "a block called by another's name",
    ),
    *("a speed is believed too fast or too long", "what is computed is not told", "the slower way is chosen"),
    *("a step reads what has not come", "vLLM serves what is not there"),
)

NOT_TAKEN = "tests/unit/test_orders.py::test_no_ticket_stays_open_that_the_data_plane_did_not_take"
GIVES_ROOM = (
    "tests/unit/test_orders.py::test_a_store_finds_the_room_that_others_have_given_though_nobody_has_polled_since"
)
BEGINS = "tests/unit/test_manager.py::test_what_was_stored_gives_room_though_nobody_has_polled_since"
OVERDUE = "tests/unit/test_orders.py::test_an_order_is_overdue_by_its_deadline_by_either_way"
COLD = "tests/unit/test_orders.py::test_a_cold_order_is_no_use_of_a_page_by_either_way"
CONTENT = "tests/property/test_key_matrix.py::test_labels_tell_every_two_contents_apart"
STALL = (
    "tests/unit/test_costmodel.py"
    "::test_a_stalled_operation_changes_little_and_a_changed_drive_is_believed_the_second_time"
)
FORGOTTEN = "tests/unit/test_costmodel.py::test_what_it_took_long_ago_is_forgotten"
REGIONS = "tests/unit/test_cost_regions.py"
TOGETHER = "tests/unit/test_gathering.py::test_blocks_are_told_together_when_they_are_many_or_have_waited_some_steps"
STORED = "tests/unit/test_gathering.py::test_what_waits_is_stored_before_nothing_holds_it"
BEHIND = "tests/unit/test_gathering.py::test_what_waits_is_copied_behind_the_stream_that_it_was_computed_on"
CHOICE = "tests/unit/test_choice.py"
SYNCHRONOUS = "tests/unit/test_synchronous.py"
STEP_LOADS = "tests/engines/in_vllm/test_step_loads.py"
SIDES = "tests/engines/in_vllm/test_vllm_sides.py"

PLANTED = (
    Planted(
        kind="what was stored gives no room",
        name="a store is dropped for want of room that a report would give",
        file="kvtier/orders.py",
        old="            self.catch_up()  # what has arrived meanwhile may be evicted for these\n",
        new="            pass\n",
        says="assert 0",
        tests=(GIVES_ROOM,),
    ),
    Planted(
        kind="what was stored gives no room",
        name="who enters is refused slots that a report would give",
        file="kvtier/placement.py",
        old="            return True\n        self.catch_up()\n",
        new="            return True\n",
        says="assert None is not None",
        tests=(BEGINS,),
    ),
    Planted(
        kind="half of an order stays",
        name="what the mover refuses stays reserved",
        file="csrc/orders/orders.cpp",
        old="  take_back(wish, reserved, begun);\n  return {};",
        new="  return {};",
        says="a ticket stays open that nobody works on",
        tests=(NOT_TAKEN,),
    ),
    Planted(
        kind="half of an order stays",
        name="what the mover raises for stays reserved",
        file="csrc/orders/orders.cpp",
        old="    take_back(wish, reserved, begun);\n    throw;",
        new="    throw;",
        says="a ticket stays open that nobody works on",
        tests=(NOT_TAKEN,),
    ),
    Planted(
        kind="an order is carried out otherwise than given",
        name="its deadline is left out",
        file="csrc/orders/orders.cpp",
        old="  order.deadline = wish.deadline;\n",
        new="",
        says="was not overdue by its deadline",
        tests=(OVERDUE,),
    ),
    Planted(
        kind="an order is carried out otherwise than given",
        name="what is cold is made hot",
        file="csrc/orders/orders.cpp",
        old="wish.ahead, wish.cold, due_s)",
        new="wish.ahead, false, due_s)",
        says="a copy of a cold page made it hot",
        tests=(COLD,),
    ),
    Planted(
        kind="a block called by another's name",
        name="an image behind a block is taken for one in it",
        file="csrc/content/content.cpp",
        old="    if (span.start >= end) break;",
        new="    if (span.start > end) break;",
        says="a content has two names",
        tests=(CONTENT,),
    ),
    Planted(
        kind="a block called by another's name",
        name="where an image begins is left out",
        file="csrc/content/content.cpp",
        old="    const std::int64_t from = span.start - begin;",
        new="    const std::int64_t from = 0;",
        says="a label names two contents",
        tests=(CONTENT,),
    ),
    Planted(
        kind="a block called by another's name",
        name="images are taken in the order in which they are told",
        file="csrc/content/content.cpp",
        old="  std::sort(media_.begin(), media_.end());\n",
        new="",
        says="a content has two names|a label names two contents",
        tests=(CONTENT,),
    ),
    Planted(
        kind="a speed is believed too fast or too long",
        name="a surprise weighs as if it had taken what was expected",
        file="csrc/costs/fit.cpp",
        old="std::pow(std::max(expected, seconds), -2.0));\n  if (observations_",
        new="std::pow(expected != 0 ? expected : seconds, -2.0));\n  if (observations_",
        says="one stall was believed|it takes something else now",
        tests=(STALL,),
    ),
    Planted(
        kind="a speed is believed too fast or too long",
        name="the largest surprise says that the level has changed",
        file="csrc/costs/fit.cpp",
        old="static_cast<std::ptrdiff_t>(window_ / 2)",
        new="static_cast<std::ptrdiff_t>(window_ - 1)",
        says="one stall was believed",
        tests=(STALL,),
    ),
    Planted(
        kind="a speed is believed too fast or too long",
        name="nothing is forgotten",
        file="csrc/costs/fit.cpp",
        old="memory_(memory - 1)",
        new="memory_(1e6 * memory)",
        says="what it took long ago still counts",
        tests=(FORGOTTEN,),
    ),
    Planted(
        kind="a speed is believed too fast or too long",
        name="all is forgotten alike, whatever is observed",
        file="csrc/costs/fit.cpp",
        old="  forget(features, memory_ * weight);\n",
        new="  for (Vector& row : squares_)\n    for (double& x : row) x *= memory_ / (memory_ + 1);\n"
        "  for (double& x : products_) x *= memory_ / (memory_ + 1);\n",
        says="the long ones were forgotten|what other sizes take was forgotten",
        tests=(REGIONS,),
    ),
    Planted(
        kind="a speed is believed too fast or too long",
        name="a time that nothing was known of is a surprise",
        file="csrc/costs/fit.cpp",
        old="> std::ssize(news)) return true;",
        new="> 2 * std::ssize(news)) return true;",
        says="long passes were told of by tails wrongly",
        tests=(f"{REGIONS}::test_long_passes_of_one_size_alone_are_told_apart_by_the_tails_that_follow",),
    ),
    Planted(
        kind="a speed is believed too fast or too long",
        name="long passes are outvoted by short ones",
        file="csrc/costs/fit.cpp",
        old="std::vector<Seen>& recent = recent_[kind(features)];",
        new="std::vector<Seen>& recent = recent_[0];",
        says="long passes",
        tests=("tests/unit/test_costmodel_memory.py::test_what_has_really_changed_is_followed",),
    ),
    Planted(
        kind="a speed is believed too fast or too long",
        name="the first load is taken for a rate",
        file="csrc/costs/cost_model.cpp",
        old="return only ? std::min(seconds, *only) : seconds;",
        new="return seconds;",
        says="the first load was taken for a rate",
        tests=(f"{REGIONS}::test_a_slow_first_load_is_not_taken_for_a_rate",),
    ),
    Planted(
        kind="what is computed is not told",
        name="a request that ends takes its waiting blocks along",
        file="kvtier/gathering.py",
        old="        if sequence.request_id in self.waiting:\n            self.flush()",
        new="        if sequence.request_id in self.waiting:\n            self.waiting.remove(sequence.request_id)",
        says="nobody was told of what waited",
        tests=(STORED,),
    ),
    Planted(
        kind="what is computed is not told",
        name="what was told still counts as waiting",
        file="kvtier/gathering.py",
        old="        waiting, self.waiting, self._count, self._steps = dict.fromkeys(self.waiting), [], 0, 0",
        new="        waiting, self.waiting, self._steps = dict.fromkeys(self.waiting), [], 0",
        says="one block waited for no others",
        tests=(TOGETHER,),
    ),
    Planted(
        kind="what is computed is not told",
        name="copies come behind another stream than computed",
        file="kvtier/gathering.py",
        old="            if stream != self._behind:\n                self.flush()\n",
        new="",
        says="behind another stream",
        tests=(BEHIND,),
    ),
    Planted(
        kind="the slower way is chosen",
        name="computing behind a long prefix is taken for computing from the start",
        file="kvtier/choice.py",
        old="recompute((end - arrived) * self._block, arrived * self._block)",
        new="recompute((end - arrived) * self._block, 0)",
        says="what the prefix costs was left out",
        tests=(CHOICE,),
    ),
    Planted(
        kind="the slower way is chosen",
        name="what others bring is read once more",
        file="kvtier/choice.py",
        old="        elif run.tier == Tier.DISK:",
        new="        if run.tier == Tier.DISK:",
        says="counted as read again",
        tests=(CHOICE,),
    ),
    Planted(
        kind="the slower way is chosen",
        name="a step waits however many wait with it",
        file="kvtier/choice.py",
        old="load_s <= _LONGEST and others * load_s <= _DETOUR",
        new="load_s <= _LONGEST and load_s <= _DETOUR",
        says="it should",
        tests=(SYNCHRONOUS,),
    ),
    Planted(
        kind="a step reads what has not come",
        name="a layer that gave up waiting counts as there",
        file="kvtier/connectors/vllm/step_loads.py",
        old="            load.in_time = self._rank.wait_for_slices(",
        new="            self._rank.wait_for_slices(",
        says="nobody said that it read too early",
        tests=(STEP_LOADS,),
    ),
    Planted(
        kind="a step reads what has not come",
        name="the last pass's layers count for this one",
        file="kvtier/connectors/vllm/step_loads.py",
        old="        self._asked.clear()\n",
        new="",
        says="nobody said that it read too early",
        tests=(STEP_LOADS,),
    ),
    Planted(
        kind="a step reads what has not come",
        name="what comes whole is waited for behind the pass alone",
        file="kvtier/connectors/vllm/step_loads.py",
        old="            if not (self._by_layer and load.cuts):",
        new="            if not self._by_layer:",
        says="what comes whole is there before the pass",
        tests=(STEP_LOADS,),
    ),
    Planted(
        kind="a step reads what has not come",
        name="a load does not wait for the store that reads its block",
        file="kvtier/connectors/vllm/scheduler.py",
        old="        self._written += table[start:]\n        if loading",
        new="        if loading",
        says="a block is loaded while a store reads it",
        tests=(SIDES,),
    ),
    Planted(
        kind="vLLM serves what is not there",
        name="the last token is loaded too",
        file="kvtier/connectors/vllm/scheduler.py",
        old="(request.num_tokens - 1) // self._block",
        new="request.num_tokens // self._block",
        says="nothing is left to compute",
        tests=(SIDES,),
    ),
    Planted(
        kind="vLLM serves what is not there",
        name="others are admitted behind a load of this step",
        file="kvtier/connectors/vllm/scheduler.py",
        old="            self._unproven.append((start, request.block_hashes[start]))\n",
        new="",
        says="admitted on top of what may not come",
        tests=(STEP_LOADS,),
    ),
    Planted(
        kind="vLLM serves what is not there",
        name="only the block that failed leaves vLLM's cache",
        file="kvtier/connectors/vllm/scheduler.py",
        old="                self._evict(set(table[lost:]))",
        new="                self._evict({table[lost]})",
        says="vLLM would serve to others what is not there",
        tests=(STEP_LOADS,),
    ),
)

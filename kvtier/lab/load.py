"""Table 2: multi-round chat with offload off and on, at equal device bytes; and how many chats can be served at once.

The working set is what all conversations hold at their end; the users take turns at them: every conversation has its
first round before any has its second, so that between two rounds of one the whole working set passes through the cache.

    users = 2     |=== 0.r0 ===|== 2.r0 ==|==== 0.r1 ====|= 2.r1 =|       a user's requests, one at a time
                  |== 1.r0 ==|==== 3.r0 ====|== 1.r1 ==|= 3.r1 =|         conversation.round

"Off" is the same manager with a host tier of one page that nothing is written to.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtier.lab.measure import PeakMemory
from kvtier.lab.results import ConcurrencyRow, LoadRow, Spread, TokensByTier
from kvtier.lab.rig import Progress, ProofError, Rig
from kvtier.lab.workload import document, question

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.lab.model import LabModel
    from kvtier.lab.request import Result
    from kvtier.lab.settings import Conversation, Fitted

__all__ = ["LoadBench", "Point", "most"]

MAX_BATCH = 16
_PAIR = 2.5  # both rows of a conversation over the time of prefilling all its rounds once, roughly
STALL_SECONDS = 1800.0


@dataclass(frozen=True, slots=True)
class Point:
    """One pair of rows: users, and conversations that together make a working set."""

    users: int
    working_set: float
    conversations: int


@dataclass(slots=True)
class _Outcome:
    """What a run of conversations came to."""

    block: int
    results: dict[tuple[int, int], Result] = field(default_factory=dict)
    recomputed: int = 0
    seconds: float = 0.0

    def note(self, conversation: int, number: int, seen: int, result: Result) -> None:
        """Count a request whose first ``seen`` tokens had been computed in earlier rounds."""
        if result.finish_reason != "length":
            raise ProofError(f"load: round {number} of conversation {conversation} ended with {result.finish_reason!r}")
        self.results[conversation, number] = result
        found = result.prompt_tokens - result.tokens_by_tier["computed"]
        whole = min(seen, result.prompt_tokens - 1) // self.block * self.block
        self.recomputed += max(0, whole - found) + result.recomputed_tokens


class LoadBench:
    """Measures table 2 on ``model``, each row on a cold cache of its own."""

    def __init__(self, model: LabModel, fitted: Fitted, progress: Progress) -> None:
        self._model, self._fitted, self._progress = model, fitted, progress
        self._chat: Conversation = fitted.settings.conversation
        self._block = fitted.shape.block_size
        self.blocks = fitted.load_device_blocks
        self.notes: list[str] = []
        self.rows: list[LoadRow] = []
        self.concurrency: list[ConcurrencyRow] = []
        self._each = 0.0  # seconds for a conversation, off and on, as far as it is known

    def points(self) -> list[Point]:
        """What is measured, fewest users first; more users than conversations are left out and noted."""
        found = []
        for users in sorted(self._fitted.settings.users):
            for working_set in sorted(self._fitted.settings.working_sets):
                tokens = working_set * self.blocks * self._block
                conversations = max(1, round(tokens / self._chat.tokens))
                if users <= conversations:
                    found.append(Point(users, working_set, conversations))
                    continue
                self.notes.append(
                    f"load: {users} users at {working_set:g}× the device pool left out: that working set is only "
                    f"{conversations} conversations (a larger device-size makes it more)"
                )
        return found

    def run(self, seconds: float | None, tokens_per_s: float) -> None:
        """The search for the most concurrent requests, which is short and says most; then both rows of every point.

        Where ``seconds`` are given, what would not end in them is left out and noted; how long something takes is told
        from the prefill speed, then from what was measured.
        """
        end = None if seconds is None else time.monotonic() + seconds
        self._each = _PAIR * self._chat.rounds * self._chat.tokens / tokens_per_s
        self._search(end)
        self._measure_points(end)
        self._progress("load done", 1.0)

    def _search(self, end: float | None) -> None:
        for offload in (False, True):
            start = self._expected(offload)
            if end is not None and time.monotonic() + self._each * start > end:
                self.notes.append(f"load: no search for the most requests, offload {_on(offload)}, for lack of time")
                continue
            self._progress(f"most concurrent requests, offload {_on(offload)}", 0.1 * offload)
            self.concurrency.append(self._most(offload, start))

    def _measure_points(self, end: float | None) -> None:
        points, left_out = self.points(), 0
        for index, point in enumerate(points):
            if end is not None and time.monotonic() + self._each * point.conversations > end:
                left_out += 1
                continue
            started, share = time.monotonic(), 0.8 / len(points)
            self._progress(_words(point, offload=False), 0.2 + index * share)
            reference, row = self._measure(point, None)
            self.rows.append(row)
            self._progress(_words(point, offload=True), 0.2 + (index + 0.5) * share)
            self.rows.append(self._measure(point, reference)[1])
            self._each = (time.monotonic() - started) / point.conversations
        if left_out:
            self.notes.append(f"load: {left_out} of {len(points)} points left out for lack of time")

    def _measure(self, point: Point, reference: _Outcome | None) -> tuple[_Outcome, LoadRow]:
        """One row; with a ``reference``, the outcome of "off", it is the row of "on"."""
        offload = reference is not None
        gc.collect()
        with PeakMemory() as memory, self._rig(min(point.users, MAX_BATCH), offload) as rig:
            outcome = self._converse(rig, point.conversations, self._chat.rounds, point.users)
            rig.settle()
            moved = rig.bytes_moved()
        results = list(outcome.results.values())
        match = None
        if reference is not None:
            match = all(result.tokens == reference.results[key].tokens for key, result in outcome.results.items())
        return outcome, LoadRow(
            users=point.users,
            working_set=point.working_set,
            offload=offload,
            conversations=point.conversations,
            tokens_per_conversation=self._chat.tokens,
            rounds=self._chat.rounds,
            n=len(results),
            duration_s=outcome.seconds,
            ttft_ms=Spread.of(result.ttft for result in results if result.ttft is not None),
            tpot_ms=Spread.of(result.tpot for result in results if result.tpot is not None),
            requests_per_s=len(results) / outcome.seconds,
            peak_memory_bytes=None if memory.since_start else memory.rss_bytes,
            tokens_by_tier=TokensByTier.total(result.tokens_by_tier for result in results),
            recomputed_tokens=outcome.recomputed,
            preemptions=sum(result.preemptions for result in results),
            bytes_moved=moved,
            device_bytes=self.blocks * self._fitted.shape.device_bytes,
            outputs_match=match,
        )

    def _rig(self, max_batch: int, offload: bool) -> Rig:
        settings = self._fitted.settings
        return Rig(
            self._model,
            self._fitted.load_config(offload=offload),
            self.blocks,
            settings.store_parent if offload and settings.uses_disk else None,
            chunk_tokens=settings.chunk_tokens,
            max_batch=max_batch,
            stall_seconds=STALL_SECONDS,
        )

    def _converse(self, rig: Rig, conversations: int, rounds: int, users: int) -> _Outcome:
        """Run every round of every conversation, ``users`` requests at a time."""
        engine, outcome = rig.engine, _Outcome(self._block)
        said: list[list[int]] = [self._first(index) for index in range(conversations)]
        seen = [0] * conversations
        queue = deque((index, number) for number in range(rounds) for index in range(conversations))
        running: set[int] = set()
        began = time.monotonic()
        while queue or running:
            while queue and len(running) < users and queue[0][0] not in running:
                index, number = queue.popleft()
                if number:
                    said[index] += self._turn(index, number)
                running.add(index)
                engine.add(f"{index}.{number}", said[index], self._chat.output_tokens, ignore_eos=True)
            engine.step()
            for result in engine.take_results():
                index, number = (int(part) for part in result.request_id.split("."))
                running.remove(index)
                outcome.note(index, number, seen[index], result)
                said[index] = said[index] + result.tokens
                seen[index] = len(said[index]) - 1  # the last token's KV is not computed
        outcome.seconds = time.monotonic() - began
        return outcome

    def _first(self, index: int) -> list[int]:
        return document(self._model, self._chat.first_tokens, self._fitted.settings.seed, "chat", index)

    def _turn(self, index: int, number: int) -> list[int]:
        return question(self._model, self._chat.turn_tokens, self._fitted.settings.seed, "chat", index, number)

    def _expected(self, offload: bool) -> int:
        """How many conversations the tiers have room for: where the search starts."""
        blocks = self._fitted.load_blocks_below if offload else self.blocks
        room = blocks // -(-self._chat.tokens // self._block)
        return min(max(room, 1), self._fitted.settings.most_users)

    def _most(self, offload: bool, start: int) -> ConcurrencyRow:
        """Search by running: from ``start`` up until it fails, or down until it does not."""
        limit = self._fitted.settings.most_users

        def passes(count: int) -> bool:
            gc.collect()
            with self._rig(MAX_BATCH, offload) as rig:
                outcome = self._converse(rig, count, self._chat.rounds, count)
            self._each = 2 * outcome.seconds / count
            return outcome.recomputed == 0

        found = most(passes, start, limit)
        return ConcurrencyRow(
            offload=offload,
            max_concurrent_requests=found,
            at_least=found == limit,
            tokens_per_conversation=self._chat.tokens,
            device_bytes=self.blocks * self._fitted.shape.device_bytes,
        )


def most(passes: Callable[[int], bool], start: int, limit: int) -> int:
    """The largest N up to ``limit`` that passes, 0 if none does; ``start`` is where it is expected.

    Taken to be monotonous: near ``start`` single steps, then twice as large ones, then the gap is halved.
    """
    low, high = 0, limit + 1  # low passes, high does not
    step, count = 1, start
    while high - low > 1:
        if passes(count):
            low = count
            count = min(count + step, limit)
        else:
            high = count
            count = max(count - step, 1)
        step *= 2
        if not low < count < high:
            count = (low + high) // 2
    return low


def _words(point: Point, *, offload: bool) -> str:
    users = "1 user" if point.users == 1 else f"{point.users} users"
    return f"{users}, working set {point.working_set:g}×, offload {_on(offload)}"


def _on(offload: bool) -> str:
    return "on" if offload else "off"

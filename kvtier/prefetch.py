"""Prefetcher: what will be needed, by when → transfers that bring it into host memory ahead of the request.

Giving a hint only notes it; :meth:`Prefetcher.pump`, once a step, turns the most urgent ones into transfers:

- earliest expected start first, two transfers of a step's time under way, behind everything that somebody waits for: so
  what becomes urgent is never behind more than those;
- what is there already, or on its way for another request, is not read again;
- of the host's slots no more than ``prefetch.share`` hold pages that were brought ahead and have not been used. A hint
  gets room for all its pages or waits for it, the most urgent one first and nobody past it; that one takes a part where
  a part is all there will be. Who starts clearly later makes room for it. What is not used some time after it was
  expected gives its room back, so nobody waits for ever;
- it takes the place of the coldest pages only: never of those brought ahead, which are pinned, or that a hint named
  which is needed sooner, and of last copies only where the write policy would rather lose them than write them;
- what was brought for a request that does not come goes to the next one that named it too, or is gone at once.

What is in host memory by then goes on to the device shortly before the request is expected to start, so that it finds a
device hit: on no more than ``prefetch.share`` of the device's slots, by the same rule, and held by nobody, so that
whoever needs the slots has them.

So a wrong hint costs idle bandwidth and a share of the coldest pages, and no last copy that the write policy keeps.
What a hint names is looked at in a step of the engine: one that cannot be read is dropped there, and counted.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heappop, nsmallest
from itertools import islice
from math import isfinite
from typing import TYPE_CHECKING

from kvtier import arguments
from kvtier.catalog import HOST, Catalog, Tier
from kvtier.choice import STAGE
from kvtier.hints import Hint, Hints
from kvtier.holdings import Holdings
from kvtier.lookup import SCRATCH, Foresee, Lookup
from kvtier.placement import Placement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvtier.config import CacheConfig
    from kvtier.content import Content
    from kvtier.costmodel import CostModel

__all__ = ["OUTCOMES", "Prefetched", "Prefetcher"]

OUTCOMES = ("used", "late", "wasted", "cancelled")

_AT_A_TIME = 2  # transfers under way: one that is served and the next
# That one transfer keeps the lane busy: as long as a step takes, since no more may be ordered in one, within these.
# What somebody waits for passes it all the same.
_PART_SECONDS, _LONGEST_PART = 0.02, 0.2
_STEPS = 4  # over which that is smoothed
_PART_BYTES = 4 << 20  # of one while the lane's speed is unknown,
_MOST_BYTES = 256 << 20  # and ever
_WORTH = 4  # of what it lacks the most urgent hint takes a part of one in so many or more
_LIMIT = 4096  # hints
_SOONEST = 4  # of those that share with one that ends, whose need of that is said again at once
_A_STEP = 2  # hints that are looked for, brought a part of, given up or sent on in one step of the engine,
_IDLE_STEP = 8  # and in one in which it waits anyhow
_UNSEEN = 4  # that are given up at a time where they were never looked for, which is little to do
_MOVES = 16  # hints that are put elsewhere in the queues in one step
_SOON = 0.25  # seconds before its expected start from which a request's pages go on to the device: some steps
_AGAIN = 0.05  # seconds until what could not be had is tried again


@dataclass(frozen=True, slots=True)
class Prefetched:
    """What a call for pages led to, in blocks of the prefix that was found."""

    found: int
    staged: int
    """How many of them have been sent on their way from disk to host memory."""
    ticket: int


class Prefetcher:
    """Keeps the hints and serves them. ``new_request`` gives catalog request ids, under which pages are pinned."""

    def __init__(
        self,
        config: CacheConfig,
        catalog: Catalog,
        placement: Placement,
        lookup: Lookup,
        costs: CostModel,
        new_request: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        self._catalog = catalog
        self._placement = placement
        self._lookup = lookup
        self._costs = costs
        self._new_request = new_request
        self._clock = clock
        self._block = config.block_size
        self._grace = config.prefetch.grace_seconds
        slots = {spec.tier: spec.slots for spec in catalog.tiers}
        share = config.prefetch.share if config.load_policy != "never" else 0.0  # what nobody would load
        host, device = (int(slots.get(tier, 0) * share) for tier in (Tier.HOST, Tier.DEVICE))
        host, device = host if Tier.DISK in slots else 0, device if Tier.HOST in slots else 0
        self._holdings = Holdings(catalog, placement, host, device)
        self._hints = Hints(lifts=device > 0)
        self.expected = self._hints.by_name
        """The hints, by name."""
        self.leaving = self._holdings.leaving
        """While there are some of either :meth:`pump` has something to look at."""
        self._gone = 0  # of the hints, those that only have to give back what they have
        self._cramped = -1  # the turn of a hint that waits for room, where nothing has changed since
        self._moved: dict[str, float] = {}  # when those start for whom that has changed since
        self._read: deque[list[int]] = deque()  # nodes that requests were expected to read, which do now
        self._rests = False
        self._turn = 0  # of _DUTIES
        self._step = 0.0  # seconds that one takes
        self._stepped: float | None = None  # when the last one was, since there are hints
        self.blocks: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        """Blocks by what became of them; those still to be used are in none of the counts."""
        self.refused = 0
        """Hints that could not be read when they were looked at, or were more than there may be."""
        self.warnings: list[str] = []
        """Of those the last one, and why."""
        self._resting = False

    # ---- hints: noted at once, looked at by pump -----------------------------------------------------------------

    def expect(self, name: str, foresee: Foresee, due: float) -> None:
        """What ``foresee`` finds will be read at about ``due`` by the request of this name."""
        if not self._holdings.host and not self._holdings.device:
            return
        if len(self.expected) == self._gone:
            self._stepped = None
        self._moved.pop(name, None)
        hint, before = Hint(name, foresee, due, self._new_request()), self.expected.get(name)
        if before is not None:
            if before.issued or before.lifted:  # of that it may want some again
                hint.wanted, hint.stale = [], True
                self._holdings.hand_over(before, hint)
                if due > self._clock() + _SOON:
                    self._holdings.lower(hint)
            self._forget(before)
        if len(self.expected) < _LIMIT:
            self._hints.schedule(hint)
        else:
            self._refuse(name, f"{_LIMIT} others wait already")

    def reorder(self, within: Mapping[str, float]) -> None:
        """They will start in so many seconds from now, those of them that are expected; ValueError, and nothing has
        changed, for what is none."""
        within = self.checked(within)
        now, expected = self._clock(), self.expected
        self._moved.update({name: now + value for name, value in within.items() if name in expected})

    @staticmethod
    def checked(within: Mapping[str, float]) -> Mapping[str, float]:
        """Seconds by name; ValueError for what is none."""
        if not isinstance(within, Mapping):
            raise ValueError(f"within: {within!r}; accepted: seconds by request id")
        if set(map(type, within.values())) <= {float} and isfinite(sum(within.values())):
            return within
        return {name: arguments.seconds(f"within[{name!r}]", value) for name, value in within.items()}

    def _reschedule(self, now: float) -> None:
        """The next of those that start at another time are in their place in the queues."""
        for name in list(islice(self._moved, _MOVES)):
            due, expected = self._moved.pop(name), self.expected.get(name)
            if expected is None or expected.gone or expected.due == due:
                continue
            expected.due = due
            self._hints.schedule(expected)
            self._cramped = -1
            if expected.lifted and due > now + _SOON:
                self._holdings.lower(expected)

    def rest(self, name: str) -> bool:
        """It is about to start, and will order what it lacks itself: order no more for it, unless it is rescheduled.
        Returns whether something is on its way for it; a name that is not expected is no error."""
        expected = self.expected.get(name)
        if expected is None or expected.gone:
            return False
        self._moved.pop(name, None)
        expected.rests = True
        return bool(expected.tickets)

    def dismiss(self, name: str) -> None:
        """It will not come: the next steps stop what has not begun, and give its room back. A name not expected is no
        error."""
        expected = self.expected.get(name)
        if expected is None or expected.gone:
            return
        if expected.found:  # to give back what was done for it is for a step to do
            self._gone += 1
            self._hints.take_back(expected)
        else:
            self._drop(expected, "cancelled")

    def started(self, name: str) -> None:
        """The request has come, and holds itself what it needs."""
        expected = self.expected.get(name)
        if expected is None:
            return
        if expected.wanted is not None:
            wanted, issued = expected.wanted, expected.issued
            used = self._catalog.count_ready(HOST, wanted[:issued]) if issued else 0
            others = self._catalog.count_ready(HOST, wanted[issued:]) if issued < len(wanted) else 0
            self.blocks["used"] += used
            self.blocks["late"] += len(wanted) - used - others
            self._read.append(expected.found)
        self._forget(expected)

    def _forget(self, expected: Hint) -> None:
        self._gone -= expected.gone
        self._holdings.release(expected)
        self._hints.forget(expected)
        self._cramped = -1

    def _drop(self, expected: Hint, outcome: str) -> None:
        """It ends, and what was brought for it was of no use, unless somebody else named that too."""
        self._give_back(expected, outcome)
        self._forget(expected)

    def _give_back(self, expected: Hint, outcome: str) -> None:
        others = self._hints.naming(expected.found, but=expected)
        self._need_for(others, expected.found, now := self._clock())
        for other in others:
            if expected.lifted and self._hints.lifts and not other.soon and other.due <= now + _SOON:
                other.soon = True  # the device has it no more
                self._hints.soon.append(other)
        if not expected.issued:
            self._holdings.give_back(expected)
            return
        heir, others = self._hints.sharing(expected)
        if heir is not None:
            if heir.due > now + _SOON:
                self._holdings.lower(expected)
            self._holdings.hand_over(expected, heir)
        else:
            self.blocks[outcome] += expected.issued
            self._holdings.give_back(expected)
        for other in others if heir is None else (heir,):
            other.stale = True
            if not other.rests:
                self._hints.bring_more(other)

    def _need_for(self, others: list[Hint], found: list[int], now: float) -> None:
        """One who named this needs it no more; the others do still."""
        self._catalog.need(found, now, 0.0)
        for other in nsmallest(_SOONEST, others, key=lambda each: each.due):
            self._catalog.need(other.found, now, other.due + self._grace)

    def _note_read(self, now: float) -> None:
        """What is being read keeps nothing else from its place any more."""
        for _ in range(min(_A_STEP, len(self._read))):  # who else named it is looked for among all hints
            found = self._read.popleft()
            self._need_for(self._hints.naming(found), found, now)

    def forgotten(self) -> None:
        """Some namespaces were emptied: what is held of them goes as soon as it was looked at again."""
        for expected in self.expected.values():
            if expected.found and not expected.gone:
                expected.stale = True
                self._hints.bring_more(expected)

    def dismiss_all(self) -> None:
        """Nobody will come, and so nobody has what was brought for another."""
        self._moved.clear()
        for expected in list(self.expected.values()):
            self.blocks["cancelled"] += expected.issued
            self._holdings.give_back(expected)
            self._forget(expected)

    # ---- serving them --------------------------------------------------------------------------------------------

    def pump(self, ended: Mapping[int, bool], *, spent: int = 0, idle: bool = False) -> None:
        """Note what has ended, then do what is due: few things in a step, of which others ``spent`` some, and at least
        one in every other step; more when the engine is ``idle``.

        Each is a call or two, as long as a step may spend on it: give one hint up, look for one or order a part of it,
        send one on to the device. They take turns, so that none of these is kept up by the others.
        """
        now = self._clock()
        if self._stepped is not None:
            took = min(now - self._stepped, _LONGEST_PART)
            self._step += (took - self._step) / (_STEPS if self._step else 1)
        self._stepped = now
        self._holdings.note_ended(self._holdings.by_ticket.keys() & ended.keys())
        if self._resting:
            return
        self._note_read(now)
        self._reschedule(now)
        left = _IDLE_STEP if idle else _A_STEP - spent
        self._rests = left < 1 and not self._rests
        if self._rests:
            return
        left, without = max(left, 1), 0
        while left and without < len(_DUTIES):
            self._turn = (self._turn + 1) % len(_DUTIES)
            if _DUTIES[self._turn](self, now):
                left, without = left - 1, 0
            else:
                without += 1

    @contextmanager
    def rest_all(self) -> Iterator[None]:
        """Order nothing meanwhile, though steps go on."""
        if self._gone:
            for expected in [each for each in self.expected.values() if each.gone]:
                self._drop(expected, "cancelled")
        self._resting = True
        try:
            yield
        finally:
            self._resting = False

    def _give_one_up(self, now: float) -> bool:
        for _ in range(_UNSEEN):
            expected = self._hints.take(self._hints.overdue, now - self._grace)
            if expected is None:
                return False
            looked = expected.wanted is not None
            self._drop(expected, "cancelled" if expected.gone else "wasted")
            if looked:
                break
        return True

    def _bring_one(self, now: float) -> bool:
        return len(self._holdings.by_ticket) < _AT_A_TIME and self._issue_next(now)

    def _lift_one(self, now: float) -> bool:
        coming, soon = self._hints.take(self._hints.coming, now + _SOON), self._hints.soon
        if coming is not None and not coming.soon:  # once, however often it is put off and back
            coming.soon = True
            soon.append(coming)
        for _ in range(min(_A_STEP, len(soon))):
            expected = soon.popleft()
            if not self._hints.lives(expected) or expected.gone:
                continue
            if expected.due > now + _SOON:  # it was put off
                expected.soon = False
            elif not self._is_there(expected) or expected.again > now or self._holdings.lifted >= self._holdings.device:
                soon.append(expected)
            else:
                self._send_on(expected, now)
                return True
        return False

    def _is_there(self, expected: Hint) -> bool:
        """Whether all that is to be brought is in host memory."""
        return expected.wanted is not None and not expected.tickets and expected.issued >= len(expected.wanted)

    def _send_on(self, expected: Hint, now: float) -> None:
        """To the device, what is still there of what was when it was looked for."""
        if (expected.stale or now - expected.seen > _SOON) and not expected.rests:
            if not self._look(expected, now):
                return
            if not self._is_there(expected):
                self._hints.bring_more(expected)
                self._hints.soon.append(expected)
                return
        if self._holdings.lift(expected, expected.due + self._grace):
            expected.soon = False
        else:
            expected.again = now + _AGAIN
            self._hints.soon.append(expected)

    def _issue_next(self, now: float) -> bool:
        """Look for the most urgent hint and order a part of it; False: there is nothing to be done now."""
        urgent = self._hints.urgent
        self._hints.take_up(now)
        while (expected := self._hints.first(urgent)) is not None:
            if expected.rests or expected.due + self._grace < now:  # it will be given up
                heappop(urgent)
                continue
            looked = expected.wanted is None or expected.stale
            if looked and not self._look(expected, now):
                return True
            assert expected.wanted is not None
            missing, room = len(expected.wanted) - expected.issued, self._holdings.room
            if missing > room and self._waits_for_room(expected, room):
                return self._make_room(expected, room, now) or looked
            count = min(missing, room, self._part())
            ticket, got = self._holdings.bring(expected, count, expected.due + self._grace) if count else (0, 0)
            if got < count:  # some of it was brought by others since, or there is no room for it just now
                self._cramped = -1
                if not self._look(expected, now) or len(expected.wanted) - expected.issued < missing - got:
                    return True
                self._hints.put_aside(now + _AGAIN)
                return True
            if missing and not count and self._holdings.draining:  # room that comes back by itself
                self._hints.put_aside(now + _AGAIN)
            elif got == missing or not count:
                heappop(urgent)
            if ticket or looked:
                return True
        return False

    def _waits_for_room(self, expected: Hint, room: int) -> bool:
        """Whether it gets nothing now, others having the room: a part that is worth it is taken."""
        assert expected.wanted is not None
        a_part = room > 0 and (room + expected.issued) * _WORTH >= len(expected.wanted)
        return not a_part and self._holdings.held > expected.issued

    def _make_room(self, expected: Hint, room: int, now: float) -> bool:
        """Its turn comes when others have used or given up theirs, and nobody passes it; but who starts clearly later
        gives its room back at once, if that is of use. False: nobody does."""
        if self._cramped == expected.turn:
            return False
        later = [holder for holder in self._holdings.holders if holder.due > expected.due and not holder.rests]
        last = max(later, key=lambda holder: holder.due, default=expected)
        again = self._costs.load(STAGE, last.issued, now) or 0.0
        enough = not self._waits_for_room(expected, room + sum(holder.issued for holder in later))
        if not enough or last.due - expected.due <= _SOON + again:
            self._cramped = expected.turn
            return False
        self._give_back(last, "cancelled")
        last.wanted, last.found, last.stale = None, [], False
        self._hints.bring_more(last)
        return True

    def _look(self, expected: Hint, now: float) -> bool:
        """Find out what it will read, or does still; False: it cannot be read, and is forgotten."""
        late, lost = expected.due + self._grace, self._placement.disk_offline
        try:
            found, below = expected.foresee(expected.request, lost, now, late)
            wants_others = expected.issued and not set(found).issuperset(expected.brought)  # or they were forgotten
            if wants_others:
                self._let_go(expected, set(expected.brought).difference(found))
                found, below = expected.foresee(expected.request, lost, now, late)
        except Exception as error:  # whatever the caller's tokens raise: the engine's step must go on
            self._refuse(expected.name, error)
            self._drop(expected, "cancelled")
            return False
        self.blocks["cancelled"] += self._holdings.note_found(expected, found, below)
        expected.seen, expected.stale = now, False
        return True

    def _let_go(self, expected: Hint, unwanted: set[int]) -> None:
        """What was brought for it is its own no more: what it still wants of that it will find there."""
        self.blocks["cancelled"] += expected.issued
        self._holdings.release(expected)
        self._catalog.drop_ahead(HOST, list(unwanted))
        expected.wanted = None

    def _refuse(self, name: str, why: object) -> None:
        self.refused += 1
        self.warnings = [f"a hint was dropped: request {name!r}: {why}"]

    def _part(self) -> int:
        """Blocks of a transfer: as many as come until the next may be ordered, and small enough that what becomes
        urgent is not held up by it."""
        speed, seconds = self._costs.lane_speed("stage"), max(_PART_SECONDS, self._step)
        size = _PART_BYTES if speed is None else min(_MOST_BYTES, int(speed[1] * seconds))
        return max(1, size // self._costs.page_bytes)

    def fetch(self, space: bytes, content: Content, deadline: float) -> Prefetched:
        """Set it on its way now, pinned by nobody; ``deadline`` is in monotonic seconds, 0 for none."""
        try:
            lost, now = self._placement.disk_offline, self._clock()
            self._note_read(now)
            found, below = self._lookup.foresee(space, content, 0, None, SCRATCH, lost, now)
            ticket, count = self._holdings.bring_for_nobody(below, deadline)
            return Prefetched(len(found), count, ticket)
        finally:
            self._catalog.release(SCRATCH)


# Not kept as methods of one: such a cycle would keep the tiers' memory past the last use.
_DUTIES = (Prefetcher._give_one_up, Prefetcher._bring_one, Prefetcher._lift_one)

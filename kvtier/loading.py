"""Loading: from what a match promises a request to what it has on the device; MATCHED through LOADING to RUNNING.

Here is decided how long a prefix a request gets from the tiers, what is ordered to bring it, how long that may take,
and what of it counts in the end. The manager drives it, from the engine's one thread:

    promise → begin → advance after each batch of completions … → (RUNNING) → grow

``revoke`` takes a promise back, ``withdraw`` ends the whole in any state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtier.catalog import DEVICE, NO_IDS, Catalog, Residency, Tier
from kvtier.sequence import Loaded, Sequence, State, Tail
from kvtier.tail import TailLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvtier import _core
    from kvtier.config import CacheConfig
    from kvtier.layers import Layers
    from kvtier.lookup import Lookup
    from kvtier.placement import Placement
    from kvtier.policy import LoadPolicy
    from kvtier.sequence import Slots
    from kvtier.stats import Counts

__all__ = ["Loader"]

_MATCHED, _RUNNING = State.MATCHED, State.RUNNING


class Loader:
    """Makes promises and sees to it that they are kept, cut short or taken back. ``clock`` is in monotonic seconds."""

    def __init__(
        self,
        config: CacheConfig,
        catalog: Catalog,
        placement: Placement,
        lookup: Lookup,
        policy: LoadPolicy,
        counts: Counts,
        running: _core.Decoding,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._lease_seconds = config.lease_seconds
        self._block = config.block_size
        self._catalog = catalog
        self._placement = placement
        self._lookup = lookup
        self._policy = policy
        self._tails = TailLoader(catalog, placement, config.block_size)
        self._counts = counts
        self._clock = clock
        self._matched: dict[str, Sequence] = {}
        self._loading: dict[str, Sequence] = {}
        self.racing = self._tails.racing
        """By id, who computes a front while what is behind it loads."""
        self.heeds = (self._loading, self._matched, self.racing)
        """While one of these holds something ``advance`` has something to look at."""
        self._running = running
        self.layers: Layers | None = None
        """Where the engine computes the first layers while the others load."""

    # ---- the promise ---------------------------------------------------------------------------------------------

    def promise(self, sequence: Sequence) -> int:
        """Put ``sequence``, new or preempted, into state MATCHED, holding what it shall get of its prefix; returns
        blocks."""
        sequence.choice = None
        self._choose(sequence, None)
        sequence.offered = offered = sequence.promised
        sequence.state = _MATCHED
        sequence.broken = sequence.failed = False
        sequence.cuts = ()
        sequence.expires = self._clock() + self._lease_seconds
        self._matched[sequence.request_id] = sequence
        return offered

    def _choose(self, sequence: Sequence, limit: int | None) -> None:
        """Lease what shall be loaded of the prefix; what follows it is to be computed."""
        match = self._lookup.match(sequence, limit)
        choice = self._policy.decide(sequence, match)
        if not match.hit:
            sequence.take_nothing()
            return
        hold = choice.found if choice.front else choice.blocks
        if hold < match.hit:  # a lease on what is not promised would end with the request only
            match = self._lookup.match(sequence, limit=hold)
        sequence.nodes, sequence.origin = match.nodes[: choice.blocks], match.tiers
        sequence.tail = Tail(match.nodes) if choice.front else None

    def waits_for_slots(self, request_id: str) -> bool:
        """Whether the request was promised something and has not been given slots."""
        return request_id in self._matched

    def revoke(self, sequence: Sequence) -> None:
        """Nothing promised and not arrived may be read any more; of a request that loads, ``advance`` reports it."""
        self._tails.drop(sequence)
        if sequence.state not in (State.MATCHED, State.LOADING):
            return
        self._placement.cancel(sequence.tickets)
        sequence.forfeit()
        if sequence.state is State.MATCHED:  # it may never come back for its slots
            self._catalog.release(sequence.request)

    def withdraw(self, sequence: Sequence) -> None:
        """The request leaves the device or ends: let go of all that it holds, and stop what can be stopped."""
        self._matched.pop(sequence.request_id, None)
        self._loading.pop(sequence.request_id, None)
        if sequence.tail is not None:
            self._tails.drop(sequence)
        if sequence.tickets:
            self._placement.cancel(sequence.tickets)
            sequence.tickets.clear()
        self._catalog.release(sequence.request)

    # ---- its way to the device -----------------------------------------------------------------------------------

    def table(self, sequence: Sequence) -> Slots:
        """The block table, uint32 [blocks]: shared slots, then private ones. Not final before RUNNING."""
        if sequence.state is _RUNNING:
            return sequence.growing.slots()
        return np.concatenate([self._catalog.state(sequence.nodes)[0][:, Tier.DEVICE], sequence.private])

    def begin(self, sequence: Sequence, blocks: int) -> bool:
        """First allocation, for so many blocks in all or what was promised: private slots for what is to be computed,
        reserved ones for what is to be loaded. False, and nothing has changed: there is no room now."""
        if not sequence.offered and not sequence.broken and sequence.tail is None:
            return self._begin_bare(sequence, blocks)
        self._placement.catch_up()
        blocks = max(blocks, sequence.promised)
        if self._policy.is_stale(sequence):
            self._choose(sequence, sequence.promised)
        device = self._catalog.state(sequence.nodes)[1][:, Tier.DEVICE]
        fresh = blocks - sequence.promised
        if not self._placement.make_room(DEVICE, fresh + int((device == Residency.ABSENT).sum())):
            return False
        private = self._catalog.take(Tier.DEVICE, fresh, sequence.request)
        if len(private) < fresh:
            return False
        # Room for these may have cost a page of its own that came to the device after the match, and is not held there.
        device = self._catalog.state(sequence.nodes)[1][:, Tier.DEVICE]
        self._matched.pop(sequence.request_id)
        sequence.private, sequence.wanted, sequence.state = private, blocks, State.LOADING
        sequence.deadline = self._clock() + self._config.load_timeout_seconds
        self._policy.begun(sequence)
        if sequence.promised == sequence.offered and not sequence.broken and bool((device == Residency.READY).all()):
            self._finish(sequence)
        else:
            # Even when nothing can or shall be brought the engine hears of it by poll: it must not trust the promise.
            self._loading[sequence.request_id] = sequence
            self._bring(sequence, start=True)
        return True

    def _begin_bare(self, sequence: Sequence, blocks: int) -> bool:
        """The same for one that was promised nothing: all of it is to be computed, in private slots."""
        request_id, growing = sequence.request_id, sequence.growing
        if not self._running.enter(request_id, growing, blocks):
            self._placement.make_room(DEVICE, blocks)
            if not self._running.enter(request_id, growing, blocks):
                return False
        del self._matched[request_id]
        sequence.state = _RUNNING
        self._policy.loads_nothing(sequence)
        return True

    def comes_by_layer(self, sequence: Sequence) -> bool:
        """Whether all that was promised is on its way, the first layers first."""
        return sequence.state is State.LOADING and bool(sequence.cuts) and not sequence.failed and not sequence.broken

    def wait_for_layer(self, sequence: Sequence, layer: int) -> bool:
        """Wait until the layers up to this one are there; False: they will not be, and ``advance`` tells what is."""
        assert self.layers is not None
        slices = self.layers.slices_until(layer, sequence.cuts)
        if sequence.state is State.RUNNING:
            return sequence.cached >= sequence.offered
        while self.comes_by_layer(sequence):
            now, until = self._clock(), min(sequence.deadline, sequence.watch.review)
            if all(self._placement.wait_for_slices(ticket, slices, until - now) for ticket in sequence.tickets):
                return True
            now = self._clock()
            if now < sequence.watch.review or now >= sequence.deadline:
                return False
            if self._policy.should_cut(sequence, now):
                self._placement.cancel(sequence.tickets)
                sequence.failed = True
        return False

    def skip(self, sequence: Sequence) -> Loaded | None:
        """Switch to the tail that was loaded meanwhile, if what is computed reaches it."""
        loaded = self._tails.take(sequence)
        if loaded is not None:
            self._policy.skipped(sequence, sum(loaded.tokens_by_tier.values()))
            self._counts.tokens_found.update(loaded.tokens_by_tier)
        return loaded

    def grow(self, sequence: Sequence, blocks: int) -> bool:
        """Further private slots behind those that the request has, up to ``blocks`` in all; False as for ``begin``."""
        if sequence.state is _RUNNING:
            missing = blocks - len(sequence.growing)
            return missing <= 0 or self._lengthen(sequence, missing)
        missing = blocks - sequence.promised - len(sequence.private)
        if missing > 0:
            self._placement.make_room(DEVICE, missing)
            more = self._catalog.take(DEVICE, missing, sequence.request)
            if not len(more):
                return False
            sequence.private = np.concatenate([sequence.private, more])
            sequence.wanted = max(sequence.wanted, blocks)  # also where less arrives than was promised
        return True

    def _lengthen(self, sequence: Sequence, missing: int) -> bool:
        growing, native = sequence.growing, self._catalog.native
        if growing.lengthen(native, DEVICE, missing):
            return True
        self._placement.make_room(DEVICE, missing)
        return growing.lengthen(native, DEVICE, missing)

    def advance(self, ended: Mapping[int, bool]) -> list[Loaded]:
        """Go on after transfers ``ended`` (by ticket: whether all went well); returns the requests now RUNNING."""
        now = self._clock()
        self._tails.advance()
        steps = [self._step(sequence, ended, now) for sequence in list(self._loading.values())]
        for sequence in [s for s in self._matched.values() if s.expires <= now and (s.promised or s.tail is not None)]:
            self._counts.expired += 1
            self.revoke(sequence)
        return [loaded for loaded in steps if loaded is not None]

    def patience(self, most: float) -> float:
        """How long to wait for news: past no load's deadline, and not at all while a request waits for nothing."""
        now = self._clock()
        for sequence in self._loading.values():
            until = sequence.deadline if sequence.failed else min(sequence.deadline, sequence.watch.review)
            most = min(most, until - now if sequence.tickets or sequence.waits else 0.0)
        return max(most, 0.0)

    def _step(self, sequence: Sequence, ended: Mapping[int, bool], now: float) -> Loaded | None:
        """Note what has ended of one request's loads and order what can follow; None while more will come."""
        # A load that failed is not tried again for this request: what has come has come.
        news = sequence.tickets & ended.keys()
        if news:
            sequence.failed |= not all(ended[ticket] for ticket in news)
            sequence.tickets -= news
        # What it waits for may be among what ended for others; the policy looks whether it is.
        heard = bool(news) or (sequence.waits and bool(ended)) or now >= sequence.watch.review
        if now >= sequence.deadline:  # whether or not the data plane says so
            self._placement.abandon(sequence.tickets)
            sequence.tickets.clear()
        elif heard and not sequence.failed and self._policy.should_cut(sequence, now):
            self._placement.cancel(sequence.tickets)
            sequence.failed = True
        late = sequence.failed or now >= sequence.deadline
        if sequence.tickets or (sequence.waits and not ended and not late):
            return None
        self._bring(sequence, start=not late)
        if sequence.tickets or sequence.waits:
            return None
        del self._loading[sequence.request_id]
        self._finish(sequence)
        found = sequence.tokens_by_tier(sequence.promised, self._block)
        return Loaded(sequence.request_id, sequence.promised * self._block, found)

    def _bring(self, sequence: Sequence, *, start: bool) -> None:
        nodes, request, deadline = sequence.nodes, sequence.request, sequence.deadline
        brought, plan = None, self._placement.plan(nodes)
        if start and self.layers is not None:
            held = sequence.origin[: len(nodes)] == Tier.DEVICE
            brought = self._placement.bring_by_layer(nodes, plan, held, request, deadline, self.layers)
        if brought is None:
            brought = self._placement.bring(nodes, request, deadline, start=start, plan=plan)
        sequence.nodes = nodes[: brought.blocks]
        sequence.cuts = brought.cuts if brought.blocks == sequence.offered else ()
        sequence.tickets.update(brought.tickets)
        self._policy.orders += len(brought.tickets)
        sequence.waits = brought.waits

    def _finish(self, sequence: Sequence) -> None:
        """All that will come is there: hold it on the device, let go of the rest, and make the table."""
        if sequence.tail is not None:  # what it holds is used later, and what is promised is on the device
            blocks = sequence.promised
        else:
            blocks = min(self._catalog.narrow(sequence.request, Tier.DEVICE), sequence.promised)
        sequence.nodes = sequence.nodes[:blocks]
        short = sequence.wanted - blocks - len(sequence.private)
        if short > 0:
            more = self._catalog.take(Tier.DEVICE, short, sequence.request)
            sequence.private = np.concatenate([sequence.private, more])
        shared = self._catalog.state(sequence.nodes)[0][:, Tier.DEVICE]
        sequence.growing.put(0, np.concatenate([shared, sequence.private]))
        sequence.private = NO_IDS
        sequence.cached = blocks
        sequence.state = State.RUNNING
        self._running.begin(sequence.request_id, sequence.growing)
        self._policy.ended(sequence, blocks)
        if sequence.tail is not None:
            self._tails.start(sequence)
        self._counts.tokens_found.update(sequence.tokens_by_tier(blocks, self._block))
        self._placement.on_hit(sequence.nodes)

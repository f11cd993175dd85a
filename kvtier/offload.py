"""OffloadManager: the prefix cache below an engine that owns its device blocks. The engine's tables stay the engine's.

The device is foreign: its blocks are endpoints of transfers and never in the catalog, which owns host and disk. Blocks
are named by the engine's own hashes, 32 bytes each, which must say everything that precedes a block.

Who calls what, for one request, all from the scheduler's thread:

    match → load (into blocks that the engine allocated) → poll until it ended → (compute) → store … → free

``match`` may be repeated until ``load``; ``preempt`` puts a request back to its beginning; ``poll`` once a step. No
call waits. ``free`` is legal in every state and for ids that are not known. Whoever owns the blocks asks
:meth:`OffloadManager.reading` before they are written again: a store may still be reading them.
"""

from __future__ import annotations

import time
from math import inf
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier.catalog import Catalog, Match, PageStatus, Tier, TierSpec
from kvtier.choice import Choice, choose, first_review, next_review, weigh
from kvtier.config import ConfigError
from kvtier.costmodel import CostModel
from kvtier.foreign import Blocks, ForeignRequest, Found, Hashes, Loaded, Loading
from kvtier.lookup import Lookup
from kvtier.placement import Placement
from kvtier.probe import Probes
from kvtier.stats import CacheStats, Counts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvtier.config import CacheConfig
    from kvtier.messages import Completion, DataPlane
    from kvtier.namespace import Namespace

__all__ = ["Found", "Loaded", "Loading", "OffloadManager"]


class OffloadManager:
    """A prefix cache in host memory and on disk under an engine's own device blocks, sized by what ``plane`` has.

    Raises :class:`kvtier.config.ConfigError` for a write policy that needs a device of kvtier's own.
    """

    def __init__(
        self,
        config: CacheConfig,
        namespace: Namespace,
        plane: DataPlane,
        *,
        max_nodes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if config.host.write == "ahead":
            raise ConfigError(
                "host.write: 'ahead': the engine does not say which of its blocks it will give up next; "
                "expected 'at_once', 'second_use' or 'never'"
            )
        self.config, self.namespace, self.plane = config, namespace, plane
        self._clock = clock
        hello = plane.hello()
        policies = {Tier.HOST: config.host.policy, Tier.DISK: config.disk.policy}
        self._tiers = sorted(set(hello.capacity) - {Tier.DEVICE})
        self.device_blocks = hello.capacity.get(Tier.DEVICE, 0)
        self.catalog = Catalog(
            [TierSpec(tier, hello.capacity[tier], policies[tier]) for tier in self._tiers],
            block_size=config.block_size,
            labels="hash",
            max_nodes=max_nodes,
        )
        self.costs = CostModel(hello.page_bytes, bytes_in_flight=config.mover.bytes_in_flight)
        self.placement = Placement(config, self.catalog, plane, self._tiers, hello.page_bytes, self.costs, clock)
        self.probes = Probes(self.placement, self.costs, config.load_timeout_seconds)
        self.cuts = 0
        """Loads that were given up because computing the rest was faster than waiting for it."""
        self._lookup = Lookup(self.catalog, plane, namespace, config.block_size)
        self.adopted = self.placement.adopt(hello)
        self._requests: dict[str, ForeignRequest] = {}
        self._loads: dict[
            int, tuple[str, ForeignRequest, int]
        ] = {}  # ticket → whose, from which of its promised blocks on
        self._reading: dict[int, Blocks] = {}  # ticket of a store → the engine's blocks that it reads
        self._next = 2  # 1 is Lookup's
        self._counts = Counts()

    # ---- a request's life ----------------------------------------------------------------------------------------

    def match(
        self,
        request_id: str,
        hashes: Hashes,
        start: int = 0,
        *,
        tokens: int | None = None,
        salt: str | None = None,
        adapter: bytes | None = None,
    ) -> Found:
        """How many blocks behind the first ``start`` to load, and hold them for this request.

        ``hashes``: uint8 [n, 32], of the blocks that the request could use, from its first on; ``start`` of them are in
        the engine's own cache. ``tokens``: of the whole prompt, if it is longer than those blocks. Asking again
        replaces the answer. ValueError while the request loads.
        """
        request = self._requests.get(request_id)
        if request is not None and request.state == "loading":
            raise ValueError(f"request_id: {request_id!r} is loading; wait for its end, or free it")
        if request is not None and request.state == "running":
            request = self._restart(request_id)
        space = self._lookup.space(salt, adapter)
        if request is None or request.space != space:
            self.free(request_id)
            request = self._requests[request_id] = ForeignRequest(self._next, space)
            self._next += 1
            self._counts.requests += 1
            self._counts.tokens_asked += len(hashes) * self.config.block_size
            request.patience = self._clock() + self.config.load_timeout_seconds
        request.start, request.expires = start, self._clock() + self.config.lease_seconds
        return self._find(request, hashes, len(hashes) * self.config.block_size if tokens is None else tokens)

    def _find(self, request: ForeignRequest, hashes: Hashes, tokens: int) -> Found:
        request.nodes, request.origin = np.empty(0, np.uint32), np.empty(0, np.uint8)
        root = self._lookup.root(request.space)
        if root is None or request.failed or not request.cacheable:
            self.catalog.release(request.number)
            return Found(0, {})
        match = self.catalog.match([root], hashes, request.start, request.number)
        request.choice = self._choose(match, request.start, tokens)
        reach = request.choice.blocks - request.start
        coming = (match.tiers == Tier.DISK) & (match.filling != 0)  # others are bringing these to the host
        waits = bool(coming[:reach].any())
        if waits:
            reach = int(np.argmax(coming))
        if reach < len(match.nodes):  # a lease on what is not promised would end with the request only
            match = self.catalog.match([root], hashes, request.start, request.number, limit=request.start + reach)
        request.nodes, request.origin = match.nodes, match.tiers
        return Found(len(match.nodes), self._by_tier(match.tiers), waits and self._clock() < request.patience)

    def _choose(self, match: Match, start: int, tokens: int) -> Choice:
        """How many of the blocks found to load, the engine's own ``start`` included, as ``load_policy`` says."""
        reach = self.placement.within_reach(match.tiers)
        if self.config.load_policy != "cost" or not reach:
            blocks = start + (reach if self.config.load_policy == "always" else 0)
            return Choice(blocks, start + reach, None, None, None, None, f"the policy is {self.config.load_policy}")
        tiers = np.concatenate([np.full(start, Tier.DEVICE, np.uint8), match.tiers[:reach]])
        filling = np.concatenate([np.zeros(start, np.uint64), match.filling[:reach]])
        now = self._clock()
        choice = choose(self.costs, tiers, filling, tokens, self.config.block_size, now)
        if choice.slower:
            self.probes.ask(match, choice.blocks - start, now)
        return choice

    def observe_prefill(self, tokens: int, context: int, seconds: float) -> None:
        """One pass of the model computed ``tokens`` of one request behind ``context``: what loading is weighed with."""
        self.costs.observe_prefill(tokens, context, seconds)

    def load(self, request_id: str, blocks: Blocks) -> Loading:
        """Start filling the engine's ``blocks``, uint32, with the first as many of the blocks that were promised.

        The engine must neither read nor write them before ``poll`` reports the request, nor give them away before the
        data plane has said that nothing can write them any more.
        """
        request = self._known(request_id)
        if request.state != "matched" or len(blocks) > len(request.nodes):
            raise ValueError(
                f"blocks: {len(blocks)} for request {request_id!r}, which is {request.state} and was promised "
                f"{len(request.nodes)}"
            )
        request.nodes, request.origin = request.nodes[: len(blocks)], request.origin[: len(blocks)]
        request.started = request.came = self._clock()
        deadline = request.started + self.config.load_timeout_seconds
        if self.config.load_policy == "cost" and request.choice is not None:
            request.review = first_review(request.choice, request.started)
        brought = self.placement.bring(request.nodes, request.number, deadline, device=blocks)
        first = 0
        for ticket, count in zip(brought.tickets, brought.counts, strict=True):
            self._loads[ticket] = (request_id, request, first)
            first += count
        request.arrived = np.zeros(len(blocks), np.bool_)
        request.tickets = set(brought.tickets)
        request.state = "loading"
        if not brought.tickets:
            self._finish_load(request)
        return Loading(brought.blocks, brought.tickets)

    def store(self, request_id: str, hashes: Hashes, blocks: Blocks) -> tuple[int, ...]:
        """The next of the request's full blocks are computed, or will be when the order is carried out.

        ``hashes`` and ``blocks`` continue where the last call ended: see :meth:`stored`. What host memory has or is
        getting already is not copied again. Returns the tickets of what was ordered.
        """
        request = self._known(request_id)
        if request.state == "loading":
            raise ValueError(f"request_id: {request_id!r} is loading; nothing of it is computed yet")
        if request.state == "matched":  # it runs, with or without what it was promised
            self.catalog.release(request.number)
            request.state = "running"
        if not len(hashes) or not request.cacheable:
            return ()
        parent = request.tail if request.tail is not None else self._lookup.root(request.space)
        nodes = np.empty(0, np.uint32)
        if parent is not None:
            nodes = self.catalog.insert(parent, hashes, request.number)
        if len(nodes) < len(hashes):  # no room for more names: what follows could not be found either
            request.cacheable = False
        if not len(nodes):
            return ()
        used = max(0, request.start - request.stored)
        request.stored += len(nodes)
        request.tail = int(nodes[-1])
        used = min(used, len(nodes))
        computed = self.placement.on_computed(nodes, blocks[: len(nodes)])
        again = self.placement.on_hit(nodes[:used], blocks[:used])
        tickets = tuple(ticket for ticket in (computed, again) if ticket)
        self._reading.update(dict.fromkeys(tickets, blocks[: len(nodes)]))
        return tickets

    def stored(self, request_id: str) -> int | None:
        """How many of the request's first blocks were offered by ``store``; None: none of it can be stored (now)."""
        request = self._requests.get(request_id)
        if request is None or not request.cacheable or request.state == "loading":
            return None
        return request.stored

    def preempt(self, request_id: str) -> None:
        """The engine took the request's blocks away: it is as before its first ``match``. Its stores go on."""
        if request_id in self._requests:
            self._restart(request_id)

    def _restart(self, request_id: str) -> ForeignRequest:
        request = self._requests[request_id]
        self._let_go(request)
        fresh = ForeignRequest(self._next, request.space, cacheable=request.cacheable, failed=request.failed)
        fresh.patience = request.patience
        self._next += 1
        self._requests[request_id] = fresh
        return fresh

    def free(self, request_id: str) -> None:
        """End the request, in whatever state it is. What was ordered to be stored still arrives."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._let_go(request)

    def _let_go(self, request: ForeignRequest) -> None:
        self.placement.cancel(request.tickets)
        for ticket in request.tickets:
            self._loads.pop(ticket, None)
        request.tickets.clear()
        self.catalog.release(request.number)

    # ---- what happened -------------------------------------------------------------------------------------------

    def poll(self) -> list[Loaded]:
        """Take note of what the data plane finished; returns the requests whose loads have ended since last time."""
        completions = self.plane.poll()
        ended = self.placement.settle(completions)
        for done in completions:
            self._note_arrivals(done)
        loaded = [result for ticket in ended if (result := self._end(ticket)) is not None]
        now = self._clock()
        for request in self._requests.values():
            if request.state == "matched" and len(request.nodes) and request.expires <= now:
                self._counts.expired += 1
                request.nodes = np.empty(0, np.uint32)
                self.catalog.release(request.number)
            elif request.state == "loading" and request.review <= now:
                self._reconsider(request, now)
        self.placement.maintain()
        return loaded

    def _note_arrivals(self, done: Completion) -> None:
        known = self._loads.get(done.ticket)
        if known is not None:
            _, request, first = known
            request.came = self._clock()
            request.arrived[first : first + done.status.shape[1]] = (done.status == PageStatus.OK).all(axis=0)

    def _end(self, ticket: int) -> Loaded | None:
        if not self.placement.runs(ticket):
            self._reading.pop(ticket, None)
        known = self._loads.pop(ticket, None)
        if known is None:
            return None
        request_id, request, _ = known
        request.tickets.discard(ticket)
        return None if request.tickets else Loaded(request_id, self._finish_load(request), len(request.arrived))

    def _reconsider(self, request: ForeignRequest, now: float) -> None:
        """A load takes longer than it should: go on with what has arrived, where computing the rest is faster."""
        elapsed, end = now - request.started, request.start + len(request.arrived)
        arrived = request.start + request.prefix
        come, orders = int(request.arrived.sum()), len(request.tickets)
        weighed = weigh(
            self.costs, elapsed, request.came - request.started, come, orders, arrived, end, self.config.block_size
        )
        if not weighed.computing_wins:
            request.review = next_review(elapsed, now)
            return
        self.cuts += 1
        request.review = inf
        self.costs.overran(request.tickets, now)
        self.placement.cancel(request.tickets)

    def _finish_load(self, request: ForeignRequest) -> int:
        """All that will come is in place; returns how many blocks, from the first, that is."""
        arrived = request.prefix
        request.failed = arrived < len(request.arrived)
        request.state = "running"
        self.catalog.release(request.number)
        found = self._by_tier(request.origin[:arrived])
        self._counts.tokens_found.update({tier: n * self.config.block_size for tier, n in found.items()})
        return arrived

    def reading(self, blocks: Iterable[int]) -> tuple[int, ...]:
        """The tickets of stores that may still be reading one of the engine's ``blocks``."""
        if not self._reading:
            return ()
        wanted = np.fromiter(blocks, np.uint32)
        return tuple(ticket for ticket, sources in self._reading.items() if np.isin(sources, wanted).any())

    def begins(self, request_id: str) -> int:
        """How many of its first blocks the engine had itself when the request matched: behind them it loads."""
        return self._known(request_id).start

    def origin(self, request_id: str) -> dict[str, int]:
        """Where the blocks that the request loads, or loaded, come from."""
        request = self._requests.get(request_id)
        return self._by_tier(request.origin) if request is not None else {}

    # ---- invalidation, the rest ----------------------------------------------------------------------------------

    def reset(self) -> tuple[str, ...]:
        """Forget every page in every tier and for ever, as after a change of weights; durable on return.

        What requests that have begun compute is not stored. Returns those that were loading: what they get is void.
        OSError: in force in this process, but not durable.
        """
        space = self.namespace.fingerprint
        try:
            generation = self.plane.invalidate(None)
        except OSError:
            self._forget(self.plane.generation(space))
            raise
        return self._forget(generation)

    def _forget(self, generation: int) -> tuple[str, ...]:
        self.catalog.invalidate(None, generation)
        void = []
        for request_id, request in self._requests.items():
            request.cacheable = False
            if request.state == "loading":
                void.append(request_id)
                self.placement.cancel(request.tickets)
            else:
                request.nodes = np.empty(0, np.uint32)
                self.catalog.release(request.number)
        return tuple(void)

    @property
    def busy(self) -> bool:
        """Whether the data plane still has something to report that can be expected to come."""
        return bool(self.placement.moving)

    def stats(self) -> CacheStats:
        return CacheStats.gather(self._counts, self.catalog, self.placement, self._tiers, loads_cut=self.cuts)

    def describe(self) -> str:
        """One line: what was really built."""
        writes = f"writes: host {self.config.host.write}"
        if Tier.DISK in self._tiers:
            writes += f", disk {self.config.disk.write}; {self.adopted} pages adopted from disk"
        return "; ".join([self.plane.describe(), writes, *(f"WARNING {text}" for text in self.plane.warnings())])

    def close(self) -> None:
        self.plane.close()

    # ---- private -------------------------------------------------------------------------------------------------

    def _known(self, request_id: str) -> ForeignRequest:
        request = self._requests.get(request_id)
        if request is None:
            raise ValueError(f"request_id: {request_id!r} is not known; call match first")
        return request

    @staticmethod
    def _by_tier(tiers: npt.NDArray[np.uint8]) -> dict[str, int]:
        counts = np.bincount(tiers, minlength=len(Tier))
        return {tier.name.lower(): int(counts[tier]) for tier in Tier if counts[tier]}

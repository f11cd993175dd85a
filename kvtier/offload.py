"""OffloadManager: the prefix cache below an engine that owns its device blocks. The engine's tables stay the engine's.

The device is foreign: its blocks are endpoints of transfers and never in the catalog, which owns host and disk. Blocks
are named by the engine's own hashes, 32 bytes each, which must say everything that precedes a block.

Who calls what, for one request, all from the scheduler's thread:

    match → load (into blocks that the engine allocated) → poll until it ended → (compute) → store … → free

``match`` may be repeated until ``load``; ``preempt`` puts a request back to its beginning; ``poll`` once a step. No
call waits. ``free`` is legal in every state and for ids that are not known. Whoever owns the blocks asks
:meth:`OffloadManager.reading` before they are written again: a store may still be reading them.

A request that waits in the engine's queue may be announced (``expect``, ``reorder``, ``dismiss``): what of it is on
disk comes up to host memory meanwhile.

Of a *synchronous* load the engine's step waits, and the request computes in it behind what is loaded. What it computes
is offered by ``store`` at once, in transfers that the data plane refuses where the load fails; then ``recompute`` says
that it was worth nothing.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from kvtier import arguments
from kvtier.catalog import Catalog, Match, Tier
from kvtier.choice import ONBOARD, Choice, choose, is_synchronous
from kvtier.config import ConfigError
from kvtier.costmodel import CostModel
from kvtier.foreign import Blocks, ForeignRequest, Found, Hashes, Loaded, Loading
from kvtier.foreign_loads import ForeignLoads
from kvtier.foreign_waits import ForeignWaits
from kvtier.lookup import SCRATCH, Lookup
from kvtier.placement import Placement, tier_specs
from kvtier.prefetch import Prefetcher
from kvtier.probe import Probes
from kvtier.profile import Profile
from kvtier.sequence import tokens_by_tier
from kvtier.stats import CacheStats, Counts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from kvtier.config import CacheConfig
    from kvtier.layers import Layers
    from kvtier.messages import DataPlane
    from kvtier.namespace import Namespace

__all__ = ["Found", "LoadMode", "Loaded", "Loading", "OffloadManager"]

LoadMode = Literal["auto", "async", "sync"]


class OffloadManager:
    """A prefix cache in host memory and on disk under an engine's own device blocks, sized by what ``plane`` has.

    ``load_mode``: whether loads from host memory may be synchronous, "auto" as
    :func:`kvtier.choice.is_synchronous` says, "sync" all of them. ``layers``: of a page, for synchronous loads to come
    layer by layer. Raises :class:`kvtier.config.ConfigError` for a write policy that needs a device of kvtier's own.
    """

    def __init__(
        self,
        config: CacheConfig,
        namespace: Namespace,
        plane: DataPlane,
        *,
        load_mode: LoadMode = "async",
        layers: Layers | None = None,
        max_nodes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if config.host.write == "ahead":
            raise ConfigError(
                "host.write: 'ahead': the engine does not say which of its blocks it will give up next; "
                "expected 'at_once', 'second_use' or 'never'"
            )
        self.config, self.namespace, self.plane = config, namespace, plane
        self._mode, self._clock = load_mode, clock
        hello = plane.hello()
        self._tiers = sorted(set(hello.capacity) - {Tier.DEVICE})
        self.device_blocks = hello.capacity.get(Tier.DEVICE, 0)
        self.catalog = Catalog(
            tier_specs(config, hello.capacity, self._tiers),
            block_size=config.block_size,
            labels="hash",
            max_nodes=max_nodes,
        )
        self.costs = CostModel(hello.page_bytes, bytes_in_flight=config.mover.bytes_in_flight)
        if config.profile is not None:
            Profile.load(config.profile).seed(self.costs)
        self.placement = Placement(config, self.catalog, plane, self._tiers, hello.page_bytes, self.costs, clock)
        self.probes = Probes(self.placement, self.costs, config.load_timeout_seconds, foreign=True)
        self._lookup = Lookup(self.catalog, plane, namespace, config.block_size)
        self.adopted = self.placement.adopt(hello)
        self._requests: dict[str, ForeignRequest] = {}
        self._reading: dict[int, Blocks] = {}  # ticket of a store → the engine's blocks that it reads
        self._numbers = count(SCRATCH + 1)  # the catalog's request ids
        self._counts = Counts()
        self._loads = ForeignLoads(config, self.catalog, self.placement, self.costs, self._counts, layers, clock)
        self._waits = ForeignWaits(config, self.placement, self.costs, clock)
        self._prefetcher = Prefetcher(
            config, self.catalog, self.placement, self._lookup, self.costs, self._numbers.__next__, clock
        )

    # ---- a request's life ----------------------------------------------------------------------------------------

    def match(
        self,
        request_id: str,
        hashes: Hashes,
        start: int = 0,
        *,
        tokens: int | None = None,
        others: int = 0,
        salt: str | None = None,
        adapter: bytes | None = None,
    ) -> Found:
        """How many blocks behind the first ``start`` to load, and hold them for this request.

        ``hashes``: uint8 [n, 32], of the blocks that the request could use, from its first on; ``start`` of them are in
        the engine's own cache. ``tokens``: of the whole prompt, if it is longer than those blocks. ``others``: requests
        that would wait for a synchronous load too. Asking again replaces the answer. ValueError while the request
        loads.
        """
        arguments.digests("hashes", hashes)
        request = self._requests.get(request_id)
        if request is not None and request.state == "loading":
            raise ValueError(f"request_id: {request_id!r} is loading; wait for its end, or free it")
        if request is not None and request.state == "running":
            request = self._restart(request_id)
        space = self._lookup.space(salt, adapter)
        if request is not None and request.space != space:
            self._let_go(request)
            request = None
        if request is None:
            request = self._requests[request_id] = self._fresh(space)
            self._counts.requests += 1
            self._counts.tokens_asked += len(hashes) * self.config.block_size
        soon = self._prefetcher.rest(request_id)  # what is not on its way yet comes faster with the load
        request.start, request.expires = start, self._clock() + self.config.lease_seconds
        tokens = len(hashes) * self.config.block_size if tokens is None else tokens
        found = self._find(request, hashes, tokens, others)
        return replace(found, soon=True) if soon and found.waits else found

    def _fresh(self, space: bytes) -> ForeignRequest:
        return ForeignRequest(next(self._numbers), next(self._numbers), space)

    def _find(self, request: ForeignRequest, hashes: Hashes, tokens: int, others: int) -> Found:
        request.nodes, request.origin = np.empty(0, np.uint32), np.empty(0, np.uint8)
        request.synchronous = False
        root = self._lookup.root(request.space)
        if root is None or request.failed or not request.cacheable:
            self.catalog.release(request.number)
            return Found(0, {})
        match = self.catalog.match([root], hashes, request.start, request.number)
        request.choice = self._choose(match, request.start, tokens)
        reach = request.choice.blocks - request.start
        whole = reach
        reach, waits = self._waits.look(request, match, reach)
        if reach < len(match.nodes):  # a lease on what is not promised would end with the request only
            match = self.catalog.match([root], hashes, request.start, request.number, limit=request.start + reach)
        request.nodes, request.origin = match.nodes, match.tiers
        request.synchronous = not request.choice.trial and self._is_synchronous(match.tiers, others)
        coming = whole - reach if waits else 0
        return Found(len(match.nodes), tokens_by_tier(match.tiers), waits, request.synchronous, coming=coming)

    def _is_synchronous(self, tiers: npt.NDArray[np.uint8], others: int) -> bool:
        if self._mode == "async":
            return False
        if self._mode == "sync":
            return is_synchronous(tiers, 0.0, 0)
        return is_synchronous(tiers, self.costs.load(ONBOARD, len(tiers), self._clock()), others)

    def _choose(self, match: Match, start: int, tokens: int) -> Choice:
        """How many of the blocks found to load, the engine's own ``start`` included, as ``load_policy`` says."""
        reach = self.placement.within_reach(match.tiers)
        if self.config.load_policy != "cost" or not reach:
            blocks = start + (reach if self.config.load_policy == "always" else 0)
            return Choice(blocks, start + reach, None, None, None, None, f"the policy is {self.config.load_policy}")
        tiers = np.concatenate([np.full(start, Tier.DEVICE, np.uint8), match.tiers[:reach]])
        filling = np.concatenate([np.zeros(start, np.uint64), match.filling[:reach]])
        now = self._clock()
        choice = choose(self.costs, tiers, filling, tokens, self.config.block_size, now, foreign=True)
        if choice.slower:
            choice = self.probes.trial(choice, match, start, tokens, self.config.block_size, now)
            self.probes.ask(match, choice.blocks - start, now)
        return choice

    def observe_prefill(self, tokens: int, context: int, seconds: float) -> None:
        """One pass of the model computed ``tokens`` of one request behind ``context``: what loading is weighed with."""
        self.costs.observe_prefill(tokens, context, seconds)

    def load(self, request_id: str, blocks: Blocks) -> Loading:
        """Start filling the engine's ``blocks``, uint32, with the first as many of the blocks that were promised.

        The engine must neither read nor write them before ``poll`` reports the request, or the data plane that they are
        there, nor give them away before the data plane has said that nothing can write them any more.
        """
        request = self._known(request_id)
        if request.state != "matched" or len(blocks) > len(request.nodes):
            raise ValueError(
                f"blocks: {len(blocks)} for request {request_id!r}, which is {request.state} and was promised "
                f"{len(request.nodes)}"
            )
        self._prefetcher.started(request_id)
        if request.choice is not None and request.choice.trial:
            self.probes.tried(self._clock())
        return self._loads.start(request_id, request, blocks)

    def store(self, request_id: str, hashes: Hashes, blocks: Blocks) -> tuple[int, ...]:
        """The next of the request's full blocks are computed, or will be when the order is carried out.

        ``hashes`` and as many ``blocks`` continue where the last call ended: see :meth:`stored`. What host memory has
        or is getting already is not copied again. Returns the tickets of what was ordered.
        """
        request = self._known(request_id)
        if len(arguments.digests("hashes", hashes)) != len(blocks):
            raise ValueError(
                f"blocks: {len(blocks)} for {len(hashes)} hashes of request {request_id!r}; accepted: as many"
            )
        if request.state == "loading" and not request.synchronous:
            raise ValueError(f"request_id: {request_id!r} is loading; nothing of it is computed yet")
        if request.state == "matched":  # it runs, with or without what it was promised
            self._prefetcher.started(request_id)
            self.catalog.release(request.number)
            request.state = "running"
        if not len(hashes) or not request.cacheable:
            return ()
        parent = request.tail if request.tail is not None else self._lookup.root(request.space)
        nodes = np.empty(0, np.uint32)
        if parent is not None:
            nodes = self.catalog.insert(parent, hashes, request.offers)
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
        if request is None or not request.cacheable or (request.state == "loading" and not request.synchronous):
            return None
        return request.stored

    def recompute(self, request_id: str) -> None:
        """What the request computed beside its synchronous load is void: of it everything is to be offered again."""
        request = self._requests.get(request_id)
        if request is not None:
            self.catalog.release(request.offers)
            request.stored, request.tail, request.failed = 0, None, True

    def preempt(self, request_id: str) -> None:
        """The engine took the request's blocks away: it is as before its first ``match``. Its stores go on."""
        if request_id in self._requests:
            self._restart(request_id)

    def _restart(self, request_id: str) -> ForeignRequest:
        request = self._requests[request_id]
        self._let_go(request)
        fresh = self._requests[request_id] = self._fresh(request.space)
        fresh.cacheable, fresh.failed = request.cacheable, request.failed
        return fresh

    def free(self, request_id: str) -> None:
        """End the request, in whatever state it is. What was ordered to be stored still arrives."""
        self._prefetcher.dismiss(request_id)
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._let_go(request)

    def _let_go(self, request: ForeignRequest) -> None:
        self._loads.withdraw(request)
        self.catalog.release(request.offers)

    # ---- hints ---------------------------------------------------------------------------------------------------

    def expect(
        self,
        request_id: str,
        hashes: Hashes,
        within: float,
        *,
        salt: str | None = None,
        adapter: bytes | None = None,
    ) -> None:
        """A request that waits in the engine's queue will begin in about ``within`` seconds, with these ``hashes`` or
        more. Only noted here; the next ``poll`` begins to bring up what of them is on disk.

        Said again it replaces what was said before. The request's ``load``, or its first ``store``, ends it. ``within``
        may be negative: it is late already.
        """
        due = self._clock() + arguments.seconds("within", within)
        arguments.digests("hashes", hashes)
        foresee = partial(self._lookup.foresee, self._lookup.space(salt, adapter), hashes, 0, None)
        self._prefetcher.expect(request_id, foresee, due)

    def reorder(self, within: Mapping[str, float]) -> None:
        """Requests that were announced will begin in so many seconds now; those that were not are passed over."""
        self._prefetcher.reorder(within)

    def dismiss(self, request_id: str) -> None:
        """A request that was announced will not begin soon. One that was not is no error."""
        self._prefetcher.dismiss(request_id)

    # ---- what happened -------------------------------------------------------------------------------------------

    def poll(self) -> list[Loaded]:
        """Take note of what the data plane finished; returns the requests whose loads have ended since last time."""
        completions = self.plane.poll()
        ended = self.placement.settle(completions)
        loaded = self._loads.advance(completions, ended)
        for ticket in ended:
            if not self.placement.runs(ticket):
                self._reading.pop(ticket, None)
        now = self._clock()
        for request in self._requests.values():
            if request.state == "matched" and len(request.nodes) and request.expires <= now:
                self._counts.expired += 1
                request.nodes = np.empty(0, np.uint32)
                self.catalog.release(request.number)
            elif request.state == "loading" and request.watch.review <= now:
                self._loads.reconsider(request, now)
        if self._prefetcher.expected or self._prefetcher.leaving:
            self._prefetcher.pump(ended, spent=1 if completions else 0)
        self.placement.maintain()
        return loaded

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
        return tokens_by_tier(request.origin) if request is not None else {}

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
        self._prefetcher.forgotten()
        void = []
        for request_id, request in self._requests.items():
            request.cacheable = False
            if request.state == "loading":
                void.append(request_id)
                self.placement.cancel(request.tickets)
            else:
                request.nodes = np.empty(0, np.uint32)
                self.catalog.release(request.number)
            self.catalog.release(request.offers)
        return tuple(void)

    @property
    def busy(self) -> bool:
        """Whether the data plane still has something to report that can be expected to come."""
        return bool(self.placement.moving)

    def stats(self) -> CacheStats:
        cuts = self._loads.cuts + self._waits.cuts
        ahead = self._prefetcher
        return CacheStats.gather(
            self._counts, self.catalog, self.placement, self._tiers, ahead.blocks, ahead.refused, cuts
        )

    def describe(self) -> str:
        """One line: what was really built."""
        writes = f"writes: host {self.config.host.write}"
        if Tier.DISK in self._tiers:
            writes += f", disk {self.config.disk.write}; {self.adopted} pages adopted from disk"
        warnings = [*self.plane.warnings(), *self._prefetcher.warnings]
        return "; ".join([self.plane.describe(), writes, *(f"WARNING {text}" for text in warnings)])

    def close(self) -> None:
        self.plane.close()

    # ---- private -------------------------------------------------------------------------------------------------

    def _known(self, request_id: str) -> ForeignRequest:
        request = self._requests.get(request_id)
        if request is None:
            raise ValueError(f"request_id: {request_id!r} is not known; call match first")
        return request

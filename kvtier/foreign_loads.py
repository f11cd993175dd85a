"""ForeignLoads: from what a match promised a request to what is in the engine's own blocks.

Here is decided what is ordered to fill them, how long that may take, and what of it counts in the end. OffloadManager
drives it, from the engine's one thread:

    start → advance after each batch of completions, reconsider when it takes longer than predicted … → (running)

``withdraw`` ends it in any state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtier.catalog import PageStatus
from kvtier.choice import Progress, Watch
from kvtier.foreign import Loaded, Loading
from kvtier.sequence import tokens_by_tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvtier.catalog import Catalog
    from kvtier.config import CacheConfig
    from kvtier.costmodel import CostModel
    from kvtier.foreign import Blocks, ForeignRequest
    from kvtier.layers import Layers
    from kvtier.messages import Completion
    from kvtier.placement import Bringing, Placement
    from kvtier.stats import Counts

__all__ = ["ForeignLoads"]

STEP_PATIENCE = 1.0  # seconds that a step is held for a load whose prediction was wrong


class ForeignLoads:
    """``layers``: of a page, where synchronous loads shall come layer by layer. ``clock`` is in monotonic seconds."""

    def __init__(
        self,
        config: CacheConfig,
        catalog: Catalog,
        placement: Placement,
        costs: CostModel,
        counts: Counts,
        layers: Layers | None,
        clock: Callable[[], float],
    ) -> None:
        self._config, self._catalog, self._placement, self._costs = config, catalog, placement, costs
        self._counts, self._layers, self._clock = counts, layers, clock
        self._tickets: dict[int, tuple[str, ForeignRequest, int]] = {}  # whose, from which of its promised blocks on
        self.cuts = 0
        """Loads that were given up because computing the rest was faster than waiting for it."""

    def start(self, request_id: str, request: ForeignRequest, blocks: Blocks) -> Loading:
        """Order that the engine's ``blocks`` are filled with the first of what the request was promised."""
        request.nodes, request.origin = request.nodes[: len(blocks)], request.origin[: len(blocks)]
        weighed = self._config.load_policy == "cost" and not request.synchronous
        choice = request.choice if weighed else None
        request.watch = Watch(self._costs, self._config.block_size, self._clock(), choice)
        self._counts.loads_synchronous += request.synchronous
        brought = self._bring(request, blocks)
        first = 0
        for ticket, count in zip(brought.tickets, brought.counts, strict=True):
            self._tickets[ticket] = (request_id, request, first)
            first += count
        request.arrived = np.zeros(len(blocks), np.bool_)
        request.tickets = set(brought.tickets)
        request.state = "loading"
        if not brought.tickets:
            self._finish(request)
        return Loading(brought.blocks, brought.tickets, request.synchronous)

    def _bring(self, request: ForeignRequest, blocks: Blocks) -> Bringing:
        """Order it; what is synchronous layer by layer, where that is worth it."""
        deadline = request.watch.since + self._config.load_timeout_seconds
        if not request.synchronous:
            return self._placement.bring(request.nodes, request.number, deadline, device=blocks)
        deadline = min(deadline, request.watch.since + STEP_PATIENCE)
        brought, plan = None, self._placement.plan(request.nodes)
        if self._layers is not None:
            held = np.zeros(len(blocks), np.bool_)
            brought = self._placement.bring_by_layer(
                request.nodes, plan, held, request.number, deadline, self._layers, blocks
            )
        return brought or self._placement.bring(request.nodes, request.number, deadline, device=blocks, plan=plan)

    def advance(self, completions: Iterable[Completion], ended: Iterable[int]) -> list[Loaded]:
        """Note what arrived by ``completions``, of which ``ended`` are the tickets; returns who has loaded now."""
        for done in completions:
            known = self._tickets.get(done.ticket)
            if known is not None:
                _, request, first = known
                request.arrived[first : first + done.status.shape[1]] = (done.status == PageStatus.OK).all(axis=0)
                request.watch.note(int(request.arrived.sum()), self._clock())
        return [loaded for ticket in ended if (loaded := self._end(ticket)) is not None]

    def _end(self, ticket: int) -> Loaded | None:
        known = self._tickets.pop(ticket, None)
        if known is None:
            return None
        request_id, request, _ = known
        request.tickets.discard(ticket)
        return None if request.tickets else Loaded(request_id, self._finish(request), len(request.arrived))

    def _finish(self, request: ForeignRequest) -> int:
        """All that will come is in place; returns how many blocks, from the first, that is."""
        arrived = request.prefix
        request.failed = arrived < len(request.arrived)
        request.state = "running"
        self._catalog.release(request.number)
        self._counts.tokens_found.update(tokens_by_tier(request.origin[:arrived], self._config.block_size))
        return arrived

    def reconsider(self, request: ForeignRequest, now: float) -> None:
        """A load takes longer than it should: go on with what has arrived, where computing the rest is faster."""
        start, come, count = request.start, int(request.arrived.sum()), len(request.arrived)
        progress = Progress(start + request.prefix, start + count, come, count - come, len(request.tickets))
        if request.watch.overtaken(progress, now) is None:
            return
        self.cuts += 1
        self._costs.overran(request.tickets, now)
        self._placement.cancel(request.tickets)

    def withdraw(self, request: ForeignRequest) -> None:
        """Stop what can be stopped; nobody waits for the rest."""
        self._placement.cancel(request.tickets)
        for ticket in request.tickets:
            self._tickets.pop(ticket, None)
        request.tickets.clear()
        self._catalog.release(request.number)

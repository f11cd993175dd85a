"""ForeignWaits: how long a request waits for pages that are coming up from disk already, for others or by a look-ahead.

They come to host memory whether or not it waits. So it waits as it would for a load of its own: weighed again when that
takes longer than predicted, and given up where computing what is missing is faster (:class:`kvtier.choice.Watch`);
then it goes on with the prefix that is there. From one beginning to the next nobody waits for longer than
``load_timeout_seconds`` in all.

An engine asks for a request in the steps in which it has a place for it, and may not for a long while. So a wait goes
on as long as something of what it was for is still coming; where all that comes is something else, the request begins
to wait anew, and of the time since it was asked for last no more counts than a step may take.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import numpy as np

from kvtier.catalog import Match, Tier
from kvtier.choice import Progress, Watch
from kvtier.foreign import Awaited, ForeignRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from kvtier.config import CacheConfig
    from kvtier.costmodel import CostModel
    from kvtier.placement import Placement

__all__ = ["ForeignWaits"]

_STEP = 1.0  # seconds that one of an engine may take


class ForeignWaits:
    """``clock`` is in monotonic seconds. A request is looked at in each step in which the engine asks for it."""

    def __init__(self, config: CacheConfig, placement: Placement, costs: CostModel, clock: Callable[[], float]) -> None:
        self._config, self._placement, self._costs, self._clock = config, placement, costs, clock
        self.cuts = 0
        """Waits that were given up because computing the rest was faster."""

    def look(self, request: ForeignRequest, match: Match, reach: int) -> tuple[int, bool]:
        """Of the first ``reach`` blocks of ``match``, which it should load: how many it can have now, and whether it
        should rather wait for what is coming behind them."""
        tiers, filling = match.tiers[:reach], match.filling[:reach]
        coming = (tiers == Tier.DISK) & (filling != 0)
        if not coming.any():
            request.awaits = None
            return reach, False
        there, now, tickets = int(np.argmax(coming)), self._clock(), set(filling[coming].tolist())
        awaits = self._go_on(request, tickets, now) or self._begin(request, tiers, there, now)
        left = self._config.load_timeout_seconds - request.waited
        if left <= 0:
            return there, False
        self._hurry(awaits, tickets, now + left)
        if awaits.watch.overtaken(self._progress(request, awaits, tiers, there, len(tickets)), now) is not None:
            self.cuts += 1
            self._costs.overran(tickets, now)
            request.waited = inf
            return there, False
        return there, True

    def _go_on(self, request: ForeignRequest, tickets: set[int], now: float) -> Awaited | None:
        """The wait that goes on, if one of those that it was for is still among ``tickets``."""
        awaits = request.awaits
        if awaits is None:
            return None
        goes_on = not awaits.tickets.isdisjoint(tickets)
        request.waited += now - awaits.asked if goes_on else min(now - awaits.asked, _STEP)
        awaits.asked = now
        return awaits if goes_on else None

    def _begin(self, request: ForeignRequest, tiers: npt.NDArray[np.uint8], there: int, now: float) -> Awaited:
        choice = request.choice if self._config.load_policy == "cost" else None
        watch = Watch(self._costs, self._config.block_size, now, choice)
        had = int(np.count_nonzero(tiers[there:] == Tier.HOST))
        request.awaits = Awaited(watch, request.start + there, had, set(), now)
        return request.awaits

    def _hurry(self, awaits: Awaited, tickets: set[int], deadline: float) -> None:
        """Somebody waits for what these bring: a look-ahead is behind everything that somebody waits for."""
        self._placement.promote(tickets - awaits.tickets, deadline)
        awaits.tickets |= tickets

    def _progress(
        self, request: ForeignRequest, awaits: Awaited, tiers: npt.NDArray[np.uint8], there: int, orders: int
    ) -> Progress:
        host = int(np.count_nonzero(tiers[max(0, awaits.first - request.start) :] == Tier.HOST))
        left = int(np.count_nonzero(tiers == Tier.DISK))  # the request's own load brings some of it, at the same pace
        return Progress(request.start + there, request.start + len(tiers), max(0, host - awaits.had), left, orders)

"""ForeignWaits: how long a request waits for pages that are coming up from disk already, for others or by a look-ahead.

They come to host memory whether or not it waits. So it waits as it would for a load of its own: weighed again when that
takes longer than predicted, and given up where computing what is missing is faster (:class:`kvtier.choice.Watch`);
then it goes on with the prefix that is there. Nobody waits for longer than ``load_timeout_seconds`` in all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtier.catalog import Match, Tier
from kvtier.foreign import Awaited, ForeignRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from kvtier.config import CacheConfig
    from kvtier.costmodel import CostModel
    from kvtier.placement import Placement

__all__ = ["ForeignWaits"]


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
        if now >= request.patience:
            return there, False
        if request.awaits is None:
            self._begin(request, tiers, there, now)
        self._hurry(request, tickets)
        if self._is_overtaken(request, tiers, there, tickets, now):
            self.cuts += 1
            self._costs.overran(tickets, now)
            request.patience = now
            return there, False
        return there, True

    def _begin(self, request: ForeignRequest, tiers: npt.NDArray[np.uint8], there: int, now: float) -> None:
        request.awaits = Awaited(request.start + there, int(np.count_nonzero(tiers[there:] == Tier.HOST)))
        request.watch.begin(now, request.choice if self._config.load_policy == "cost" else None)

    def _hurry(self, request: ForeignRequest, tickets: set[int]) -> None:
        """Somebody waits for what these bring: a look-ahead is behind everything that somebody waits for."""
        new = tickets - request.hurried
        request.hurried |= new
        self._placement.promote(new, request.patience)

    def _is_overtaken(
        self, request: ForeignRequest, tiers: npt.NDArray[np.uint8], there: int, tickets: set[int], now: float
    ) -> bool:
        awaits, watch = request.awaits, request.watch
        assert awaits is not None
        host = tiers[max(0, awaits.first - request.start) :] == Tier.HOST
        come = max(0, int(np.count_nonzero(host)) - awaits.had)
        if come > awaits.come:
            awaits.come, watch.came = come, now
        if now < watch.review:
            return False
        left = int(np.count_nonzero(tiers == Tier.DISK))  # the request's own load brings some of it, at the same pace
        arrived, end = request.start + there, request.start + len(tiers)
        weighed = watch.overtaken(
            self._costs, now, awaits.come, len(tickets), arrived, end, self._config.block_size, left=left
        )
        return weighed is not None

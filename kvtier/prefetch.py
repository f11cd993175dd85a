"""Prefetcher: what will be needed, by when → transfers that bring it into host memory ahead of the request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtier.catalog import Catalog, Tier
from kvtier.choice import STAGE
from kvtier.messages import Priority
from kvtier.placement import Placement

if TYPE_CHECKING:
    from kvtier.sequence import TokenIds

__all__ = ["Prefetched", "Prefetcher"]


@dataclass(frozen=True, slots=True)
class Prefetched:
    """What a hint led to, in blocks of the prefix that was found."""

    found: int
    staged: int
    """How many of them have been sent on their way from disk to host memory."""
    ticket: int


class Prefetcher:
    """Brings pages up as far as host memory. It may take a page's place only where a lower tier has that page too,
    so a wrong hint costs bandwidth and never the only copy of anything."""

    def __init__(self, catalog: Catalog, placement: Placement, request: int):
        self._catalog = catalog
        self._placement = placement
        self._request = request  # the catalog's name for hints: a lease lives only inside one call

    def hint(self, root: int, labels: TokenIds, deadline: float) -> Prefetched:
        """``labels`` are the token ids of whole blocks; ``deadline`` is in monotonic seconds, 0 for none."""
        match = self._catalog.match([root], labels, 0, self._request)
        try:
            # Of a disk out of service nothing comes, and host pages that it holds too are no backed ones to give up.
            found = self._placement.within_reach(match.tiers)
            on_disk = match.nodes[:found][((match.tiers == Tier.DISK) & (match.filling == 0))[:found]]
            ticket, count = 0, 0
            if len(on_disk):
                ticket, count = self._placement.load(
                    STAGE, np.ascontiguousarray(on_disk), 0, Priority.PREFETCH, deadline
                )
            return Prefetched(found, count, ticket)
        finally:
            self._catalog.release(self._request)

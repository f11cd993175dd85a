"""Probes: a disk that was left for being slow is asked again, and no request pays for it.

A few of the pages that are computed instead are staged in host memory at prefetch priority, and nobody waits for them.
What they take is learnt like any load's, so that a disk which has recovered is used again.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import numpy as np

from kvtier.catalog import Match, Tier
from kvtier.choice import STAGE
from kvtier.messages import Priority

if TYPE_CHECKING:
    from kvtier.costmodel import CostModel
    from kvtier.placement import Placement

__all__ = ["Probes"]

_BYTES = 1 << 20
_BLOCKS = 8
_AT_A_TIME = 2  # so many surprises it takes to believe that a lane has changed; the second tells of its rate alone


class Probes:
    """``timeout``: seconds after which a probe counts as failed."""

    def __init__(self, placement: Placement, costs: CostModel, timeout: float) -> None:
        self.sent = 0
        self._placement = placement
        self._costs = costs
        self._timeout = timeout
        self._blocks = max(_AT_A_TIME, min(_BLOCKS, _BYTES // costs.page_bytes))
        self._tickets: list[int] = []  # of the last ones
        self._sent_at = -inf

    def ask(self, match: Match, first: int, now: float) -> None:
        """Stage a few of the found pages from ``first`` on, which nobody loads, unless probes are under way or took as
        long as has passed since they ended. ``match`` must still be leased."""
        if any(self._placement.runs(ticket) for ticket in self._tickets):
            return
        if now < self._sent_at + 2 * (self._costs.last_end("stage") - self._sent_at):
            return
        nodes = match.nodes[first:][(match.tiers[first:] == Tier.DISK) & (match.filling[first:] == 0)]
        self._tickets, self._sent_at = [], now
        for part in np.array_split(nodes[: self._blocks], _AT_A_TIME):
            if len(part):
                ticket, _ = self._placement.load(
                    STAGE, np.ascontiguousarray(part), 0, Priority.PREFETCH, now + self._timeout
                )
                if ticket:
                    self._tickets.append(ticket)
        self.sent += len(self._tickets)

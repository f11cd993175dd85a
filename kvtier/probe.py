"""Probes: a lane that was left for being slow is asked again.

A few of the pages that are computed instead are brought along it at prefetch priority, and nobody waits for them. What
they take is learnt like any load's, so that a lane which has recovered, or was misjudged, is used again.

Onto a device whose slots are the engine's own nothing can be brought for nobody. There a request loads two blocks
itself: it waits for them no longer than computing them would take, and so rarely that it costs a hundredth of the time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from kvtier.catalog import Match, Tier
from kvtier.choice import ONBOARD, STAGE, STAGE_ONBOARD, Choice
from kvtier.costmodel import lanes_of
from kvtier.messages import Priority

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvtier.costmodel import CostModel
    from kvtier.placement import Placement

__all__ = ["Probes"]

_BYTES = 1 << 20
_BLOCKS = 8
_AT_A_TIME = 2  # so many surprises it takes to believe that a lane has changed; the second tells of its rate alone
_PAUSE = 0.5  # seconds until the next at most, however long the last one hung
_RARELY = 100  # times what a trial may cost, until the next


@dataclass(slots=True)
class _Asked:
    """The last probe of the pages of a tier."""

    tickets: list[int] = field(default_factory=list)
    lane: str = ""
    at: float = -inf


class Probes:
    """``timeout``: seconds after which a probe counts as failed. ``foreign``: the device is the engine's own."""

    def __init__(self, placement: Placement, costs: CostModel, timeout: float, *, foreign: bool = False) -> None:
        self.sent = 0
        self._placement = placement
        self._costs = costs
        self._timeout = timeout
        self._foreign = foreign
        self._blocks = max(_AT_A_TIME, min(_BLOCKS, _BYTES // costs.page_bytes))
        self._asked = {Tier.HOST: _Asked(), Tier.DISK: _Asked()}
        self._tried_at = -inf

    def ask(self, match: Match, first: int, now: float) -> None:
        """Bring up a few of the found pages from ``first`` on, which nobody loads, unless probes of their tier are
        under way, or ended no longer ago than they took or half a second. ``match`` must still be leased."""
        tiers, still = match.tiers[first:], match.filling[first:] == 0
        for tier, asked in self._asked.items():
            nodes = match.nodes[first:][(tiers == tier) & still]
            if len(nodes) and not (self._foreign and tier == Tier.HOST) and self._rests(asked, now):
                self._send(asked, nodes, ONBOARD if tier == Tier.HOST else self._way_up(len(nodes)), now)

    def _rests(self, asked: _Asked, now: float) -> bool:
        if not asked.tickets or any(self._placement.runs(ticket) for ticket in asked.tickets):
            return not asked.tickets
        ended = self._costs.last_end(asked.lane)
        return now >= ended + min(ended - asked.at, _PAUSE)

    def _way_up(self, blocks: int) -> tuple[Tier, ...]:
        """From disk, as far as the slower lane."""
        disk, device = self._idle("stage", blocks), self._idle("onboard", blocks)
        return STAGE_ONBOARD if not self._foreign and disk is not None and (device or 0.0) > disk else STAGE

    def _idle(self, lane: str, blocks: int) -> float | None:
        """Seconds that so many blocks take on the lane where nothing is before them."""
        speed = self._costs.lane_speed(lane)
        return None if speed is None else speed[0] + blocks * self._costs.page_bytes / speed[1]

    def _send(self, asked: _Asked, nodes: npt.NDArray[np.uint32], path: tuple[Tier, ...], now: float) -> None:
        asked.tickets, asked.lane, asked.at = [], lanes_of(path)[-1], now
        for part in np.array_split(nodes[: self._blocks], _AT_A_TIME):
            if len(part):
                nodes = np.ascontiguousarray(part)
                ticket, _ = self._placement.load(path, nodes, 0, Priority.PREFETCH, now + self._timeout)
                if ticket:
                    asked.tickets.append(ticket)
        self.sent += len(asked.tickets)

    def trial(self, choice: Choice, match: Match, start: int, tokens: int, block: int, now: float) -> Choice:
        """``choice``, or to load two blocks behind the engine's own ``start`` where nothing is to be loaded and the
        lane to the device alone is to blame. Of a prompt of ``tokens`` tokens, in blocks of ``block``."""
        blocks = min(_AT_A_TIME, choice.found - start)
        idle, wins = self._idle("onboard", choice.found - start), self._computing(start, choice.found, block)
        if choice.blocks > start or match.filling[:blocks].any() or idle is None or wins is None or idle <= wins:
            return choice
        most = self._computing(start, start + blocks, block)
        if most is None or now < self._tried_at + _RARELY * most:
            return choice
        end = start + blocks
        rest = self._costs.recompute(tokens - end * block, end * block)
        why = "the lane to the device was slow, and is tried again"
        return choice._replace(blocks=end, load_s=most, compute_s=rest, why=why, trial=True)

    def _computing(self, first: int, end: int, block: int) -> float | None:
        return self._costs.recompute((end - first) * block, first * block)

    def tried(self, now: float) -> None:
        """A trial has begun."""
        self._tried_at = now

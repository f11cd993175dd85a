"""Transfers under way in a simulated data plane, and which slots they claim."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.catalog import PageStatus, Tier
from kvtier.sim.plane import ViolationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.messages import Transfer
    from kvtier.sim.disk import Content

__all__ = ["PENDING", "Claims", "Lane", "Running"]

Lane = tuple[Tier, Tier]

PENDING = int(PageStatus.PENDING)


class Running:
    """A transfer from its submission to the delivery of its last report."""

    __slots__ = (
        *("claimed", "deadline", "early", "ended", "flying", "hop", "open", "path", "slots", "status", "ticket"),
        *("submitted", "wanted"),
    )

    def __init__(self, transfer: Transfer, submitted: float) -> None:
        hops, pages = len(transfer.path) - 1, transfer.slots.shape[1]
        raw, size = transfer.identities.tobytes(), transfer.identities.shape[1]
        self.ticket = transfer.ticket
        self.submitted = submitted
        self.path = transfer.path
        self.slots: list[list[int]] = transfer.slots.tolist()
        self.deadline = transfer.deadline
        self.wanted = [raw[at : at + size] for at in range(0, pages * size, size)]
        self.status = [[PENDING] * pages for _ in range(hops)]
        self.hop = [0] * pages
        self.flying: list[Content] = [None] * pages
        self.open = list(range(pages))
        self.claimed = [[True] * pages for _ in transfer.path]
        self.ended = 0
        self.early = False

    def lane(self, page: int) -> Lane:
        return self.path[self.hop[page]], self.path[self.hop[page] + 1]


@dataclass(slots=True)
class _Claim:
    """Who may still touch a slot, as far as the control plane has been told."""

    writer: int = 0
    readers: int = 0


class Claims:
    """A slot that is written belongs to one transfer alone, from its submission until the control plane was told of the
    end of all that may touch it."""

    def __init__(self) -> None:
        self._claims: dict[tuple[Tier, int], _Claim] = {}

    def take(self, running: Running) -> None:
        last = len(running.path) - 1
        for index, tier in enumerate(running.path):
            for slot in running.slots[index]:
                claim = self._claims.setdefault((tier, slot), _Claim())
                if claim.writer or (index and claim.readers):
                    raise ViolationError(
                        f"{tier.name} slot {slot} given to transfer {running.ticket}, and {self.user(tier, slot)} it"
                    )
                if index:
                    claim.writer = running.ticket
                claim.readers += index < last

    def user(self, tier: Tier, slot: int) -> str:
        """Who uses a slot, in words; empty: nobody."""
        claim = self._claims.get((tier, slot))
        if claim is None:
            return ""
        return f"transfer {claim.writer} fills" if claim.writer else "a transfer still reads"

    def let_go(self, running: Running, status: Sequence[Sequence[int]]) -> None:
        """The control plane was told ``status``, by hop and page."""
        last = len(running.path) - 1
        for index, claimed in enumerate(running.claimed):
            for page, held in enumerate(claimed):
                written = index == 0 or status[index - 1][page] != PENDING
                read = index == last or status[index][page] != PENDING
                if not (held and written and read):
                    continue
                claimed[page] = False
                place = running.path[index], running.slots[index][page]
                claim = self._claims[place]
                claim.readers -= index < last
                if index:
                    claim.writer = 0
                if not claim.writer and not claim.readers:
                    del self._claims[place]

"""What OffloadManager knows of a request whose blocks are the engine's, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from kvtier.choice import Watch

if TYPE_CHECKING:
    from kvtier.choice import Choice

__all__ = ["Awaited", "Blocks", "ForeignRequest", "Found", "Hashes", "Loaded", "Loading"]

Blocks = npt.NDArray[np.uint32]
Hashes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Found:
    """What ``match`` found behind the blocks that the engine has itself; leased until ``load`` or the request's end."""

    blocks: int
    blocks_by_tier: dict[str, int]
    """Where they would come from; the values sum to ``blocks``."""
    waits: bool = False
    """More could be had, but it is being brought up from disk just now: ask again, as long as that is said."""
    synchronous: bool = False
    """The step in which the request begins to compute should wait for its load; else the request does, beside the
    steps."""
    soon: bool = False
    """What it waits for was ordered because it had been announced, and comes in a moment: nobody should pass it."""
    coming: int = 0
    """How many more there would be after the wait."""


@dataclass(frozen=True, slots=True)
class Loading:
    """What ``load`` ordered. Blocks from ``blocks`` on were promised but nothing can bring them now."""

    blocks: int
    tickets: tuple[int, ...]
    synchronous: bool = False
    """As :class:`Found` said."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A request whose loads have ended: the first ``blocks`` of those it asked for are in place, the rest is not."""

    request_id: str
    blocks: int
    wanted: int


@dataclass(slots=True)
class Awaited:
    """What a request waits for while others bring it, from its block ``first`` on."""

    watch: Watch
    first: int
    had: int  # of these, in host memory when it began to wait
    tickets: set[int]  # that bring it, or did; it has told them that somebody waits
    asked: float  # when the engine asked for the request last


@dataclass(slots=True)
class ForeignRequest:
    """One request.

    blocks     |<- start: the engine's own ->|<- nodes: promised ->|<- to compute ->|
    blocks     |<-------------- stored: offered to the catalog ------------>|
    """

    number: int  # of the lease on what was promised
    offers: int  # of the lease on what it offered itself
    space: bytes
    state: Literal["matched", "loading", "running"] = "matched"
    start: int = 0
    nodes: Blocks = field(default_factory=lambda: np.empty(0, np.uint32))
    origin: npt.NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    arrived: npt.NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    tickets: set[int] = field(default_factory=set)
    expires: float = 0.0
    choice: Choice | None = None
    synchronous: bool = False
    watch: Watch = field(init=False, repr=False)  # of its load, from its beginning on
    awaits: Awaited | None = None
    waited: float = 0.0  # seconds for what others brought; infinite: it has given up waiting
    stored: int = 0
    tail: int | None = None  # node of the last block offered
    cacheable: bool = True
    failed: bool = False  # a load failed: what cannot be had once is not tried again for this request

    @property
    def prefix(self) -> int:
        """How many of the blocks that it loads have arrived, from the first."""
        return len(self.arrived) if self.arrived.all() else int(np.argmin(self.arrived))

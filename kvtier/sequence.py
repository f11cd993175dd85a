"""What the manager knows of one request: its tokens, its block table and where in its life it is."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier import _core
from kvtier.catalog import NO_IDS, NO_TIERS, Tier
from kvtier.choice import Watch
from kvtier.content import Content
from kvtier.enums import direct

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from kvtier.choice import Choice

__all__ = ["ComputedBlocks", "Loaded", "Sequence", "State", "Tail", "tokens_by_tier"]

Slots = npt.NDArray[np.uint32]


@direct
class State(enum.Enum):
    """The life of a sequence. Every state may end by ``free``.

    MATCHED ──allocate_slots──► LOADING ──poll──► RUNNING ──preempt──► PREEMPTED ──resume──► MATCHED
        └────────(nothing to load)───────────────────▲
    """

    MATCHED = "matched"
    LOADING = "loading"
    RUNNING = "running"
    PREEMPTED = "preempted"


@dataclass(frozen=True, slots=True)
class ComputedBlocks:
    """What ``get_computed_blocks`` found: the prefix that need not be computed again.

    A lease holds every page of it until ``free``, or until ``lease_seconds`` pass without ``allocate_slots``. As a
    context manager it frees the request on leaving, unless slots have been allocated for it by then.
    """

    request_id: str
    num_tokens: int
    """Tokens found and promised, a multiple of the block size and less than the prompt's length. What of them really
    arrives is said by ``CacheManager.num_computed_tokens`` once the request is ready."""
    tokens_by_tier: dict[str, int]
    """How many of them come from each tier; the values sum to ``num_tokens``."""
    _let_go: Callable[[str], None] = field(repr=False)

    def __enter__(self) -> ComputedBlocks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._let_go(self.request_id)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A request whose loads have ended: its table is final, and all past ``num_computed_tokens`` is to be computed."""

    request_id: str
    num_computed_tokens: int
    """May be less than promised: a page that failed, and all behind it, count as never found."""
    tokens_by_tier: dict[str, int]
    """Where each token's page was read from; the values sum to ``num_computed_tokens``."""


@dataclass(slots=True)
class Tail:
    """Of one request: ``nodes`` of all blocks that were found, of which those from ``begin`` on are on order."""

    nodes: Slots
    begin: int = 0
    part: int = 1
    seen: int = 0
    """Blocks computed when it was looked at last."""
    tickets: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Sequence:
    """One request. The table is ``shared`` (slots of blocks in the catalog or on their way into it) then ``private``.

    tokens     |<--- num_computed --->|<--- to compute --->|
    blocks     |<- promised ->|                                  promised: matched, maybe still loading
    blocks     |<-- offered -->|                                 offered: what the engine was told when it was matched
    blocks     |<------ cached ------>|                          cached: offered to the catalog
    table      |<-------------------- table ------------------>|
    """

    request_id: str
    request: int
    space: bytes
    content: Content
    expires: float = 0.0
    state: State = State.MATCHED
    origin: npt.NDArray[np.uint8] = field(init=False)
    growing: _core.Growing = field(init=False)
    """Its tokens, once RUNNING its table, and the nodes that follow ``_nodes`` and are not joined with them yet."""
    private: Slots = field(init=False)
    tickets: set[int] = field(default_factory=set)
    cuts: tuple[int, ...] = ()
    waits: bool = False
    wanted: int = 0
    deadline: float = 0.0
    broken: bool = False
    failed: bool = False
    offered: int = 0
    chosen_at: float = 0.0
    chosen_after: int = 0
    choice: Choice | None = None
    fetched: frozenset[int] = frozenset()
    watch: Watch = field(init=False, repr=False)  # of its load, from its beginning on
    tail: Tail | None = None
    _nodes: Slots = field(init=False)

    def __post_init__(self) -> None:
        self._nodes = self.private = NO_IDS
        self.origin = NO_TIERS
        self.growing = _core.Growing(self.content.native, self.request)

    @property
    def nodes(self) -> Slots:
        """Of its blocks in the catalog, or promised, in order."""
        later = self.growing.take_later()
        if later:
            self._nodes = np.concatenate([self._nodes, np.array(later, np.uint32)])
        return self._nodes

    @nodes.setter
    def nodes(self, nodes: Slots) -> None:
        self._nodes = nodes
        self.growing.leaf = int(nodes[-1]) if len(nodes) else None

    @property
    def cached(self) -> int:
        """Its first blocks, those that were offered to the catalog."""
        return self.growing.cached

    @cached.setter
    def cached(self, blocks: int) -> None:
        self.growing.cached = blocks

    @property
    def cacheable(self) -> bool:
        """Whether others may have its blocks."""
        return self.growing.cacheable

    @cacheable.setter
    def cacheable(self, may: bool) -> None:
        self.growing.cacheable = may

    @property
    def promised(self) -> int:
        """Blocks whose pages the lease holds, ready or on their way, before it runs."""
        return len(self._nodes)

    @property
    def table(self) -> Slots:
        """A copy of its table, uint32 [blocks]."""
        return self.growing.slots()

    @property
    def num_tokens(self) -> int:
        return len(self.content)

    def take_nothing(self) -> None:
        """Nothing was found for it."""
        if len(self._nodes):
            self.nodes = NO_IDS
        self.origin, self.tail = NO_TIERS, None

    def forfeit(self) -> None:
        """The promise is gone: whatever the lease still holds, nothing of it may be read."""
        self.nodes = NO_IDS
        self.broken = True

    def tokens_by_tier(self, blocks: int, block_size: int) -> dict[str, int]:
        """Tokens of the first ``blocks`` blocks by the tier that the match found them in."""
        return tokens_by_tier(self.origin[:blocks], block_size) if blocks else {}


def tokens_by_tier(tiers: npt.NDArray[np.uint8], block_size: int = 1) -> dict[str, int]:
    """Tokens of blocks that come from these ``tiers``, by the tier's name."""
    if not len(tiers):
        return {}
    counts = np.bincount(tiers, minlength=len(Tier))
    return {tier.name.lower(): int(counts[tier]) * block_size for tier in Tier if counts[tier]}

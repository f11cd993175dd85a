"""What a cache has done since it started, in the numbers that an operator asks for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvtier.catalog import Catalog, Tier
    from kvtier.placement import Placement

__all__ = ["CacheStats", "Counts"]


@dataclass(slots=True)
class Counts:
    """What the manager counts as requests come and go."""

    requests: int = 0
    tokens_asked: int = 0
    tokens_found: Counter[str] = field(default_factory=Counter)
    expired: int = 0
    loads_synchronous: int = 0


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts since start, and the slots as they are now."""

    requests: int
    tokens_asked: int
    """Prompt tokens that requests came with."""
    tokens_found: dict[str, int]
    """Of those the ones that were not computed again, by the tier they were found in."""
    expired: int
    """Promises that ended because the request did not come back in time."""
    bytes_moved: dict[str, int]
    """By lane: ``device_to_host`` and so on."""
    failures: dict[str, int]
    """Pages that did not arrive, by cause."""
    stores_dropped: int
    """Pages that were to go down and found no room or no place in the queue."""
    stores_put_off: int
    """Pages that were to go down and were left where they are, because the lane was too far behind or a request needed
    their room. They go down later if they are still there."""
    prefetched: dict[str, int]
    """Blocks that were expected, by what became of them: used, late (the request came first), wasted (nobody came) or
    cancelled."""
    hints_refused: int
    """Announced requests whose tokens could not be read when they were looked at."""
    loads_cut: int
    """Loads that were given up at what had arrived, because computing the rest was faster than waiting for it."""
    loads_synchronous: int
    """Loads that a step of the engine waited for; only engines with device blocks of their own have any."""
    slots: dict[str, dict[str, int]]
    """By tier: capacity, free, filling, ready, draining, private, pinned; evictions and dropped pages since start."""

    @classmethod
    def gather(
        cls,
        counts: Counts,
        catalog: Catalog,
        placement: Placement,
        tiers: Iterable[Tier],
        prefetched: Mapping[str, int] | None = None,
        hints_refused: int = 0,
        loads_cut: int = 0,
    ) -> CacheStats:
        return cls(
            requests=counts.requests,
            tokens_asked=counts.tokens_asked,
            tokens_found=dict(counts.tokens_found),
            expired=counts.expired,
            bytes_moved=dict(placement.bytes_moved),
            failures=dict(placement.failures),
            stores_dropped=placement.stores_dropped,
            stores_put_off=placement.stores_put_off,
            prefetched=dict(prefetched or {}),
            hints_refused=hints_refused,
            loads_cut=loads_cut,
            loads_synchronous=counts.loads_synchronous,
            slots={tier.name.lower(): catalog.usage(tier)._asdict() for tier in tiers},
        )

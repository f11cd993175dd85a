"""Figures: a measured value beside the limit that this machine set for it in the same run.

A value alone says little on a shared machine, so a figure is measured in pairs: ours, then the limit, then the other
way round, and so on; the ratio is the median of the pairs' ratios and survives a machine whose speed drifts.
"""

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of a benchmark's answer."""

    name: str  # what was measured, with its setting: "page copy with checksum, 64 KiB"
    value: float  # median of our measurements
    unit: str  # of value and limit: "GB/s", "ms", ...
    limit: float | None = None  # what the machine allows, measured in the same run; None: no limit is meaningful
    limit_is: str | None = None  # in words: "memcpy of the same bytes"
    ratio: float | None = None  # median over pairs of ours / limit (so below 1 is good for times, above 1 for speeds)

    def to_json(self) -> str:
        """The figure as one JSON object on one line."""
        return json.dumps(asdict(self), allow_nan=False)


@dataclass(frozen=True, slots=True)
class Paired:
    """What `paired` measured: medians, and the median of the pairs' ratios."""

    value: float
    limit: float
    ratio: float
    pairs: tuple[tuple[float, float], ...]  # (ours, limit) as measured, warm-up left out

    def figure(self, name: str, unit: str, limit_is: str) -> Figure:
        """The same as a line to print."""
        return Figure(name, self.value, unit, self.limit, limit_is, self.ratio)


def paired(ours: Callable[[], float], limit: Callable[[], float], pairs: int = 5, warmup: int = 1) -> Paired:
    """Measure `ours` and `limit` by turns, `pairs` times after `warmup` pairs that do not count.

    Each callable does one measurement and returns it as a positive number in the figure's unit; the order within a pair
    alternates, so that neither side always runs on the caches that the other one left.

    Raises ValueError when `pairs` is below 1 or a measurement is not positive.
    """
    if pairs < 1 or warmup < 0:
        raise ValueError(f"pairs={pairs}, warmup={warmup}: expected at least one pair and no negative warm-up")
    measured: list[tuple[float, float]] = []
    for index in range(warmup + pairs):
        if index % 2:
            other, own = limit(), ours()
        else:
            own, other = ours(), limit()
        if not (own > 0 and other > 0):
            raise ValueError(f"measured {own} against {other}: both must be positive")
        if index >= warmup:
            measured.append((own, other))
    return Paired(
        value=statistics.median(own for own, _ in measured),
        limit=statistics.median(other for _, other in measured),
        ratio=statistics.median(own / other for own, other in measured),
        pairs=tuple(measured),
    )

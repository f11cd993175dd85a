"""Ranges: of an announced request, parts that are read at different times: chunks of a long prompt, or what is read
again after a preemption. Each part is a hint of its own, so others may come between; and they are moved, taken back and
ended together."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtier.lookup import Foresee
    from kvtier.prefetch import Prefetcher

__all__ = ["Ranges"]

_FEW = 64  # requests that are not worth sweeping


class Ranges:
    """Hints by request; the first part's has the request's own name."""

    def __init__(self, prefetcher: Prefetcher) -> None:
        self._prefetcher = prefetcher
        self._parts: dict[str, dict[str, float]] = {}  # of those with several: seconds after the start, by hint

    def expect(self, name: str, parts: Sequence[tuple[Foresee, float]], start: float) -> None:
        """The request starts at about ``start``, and reads what each part finds so many seconds after that. Said again
        it replaces what was said before."""
        names = [name, *(f"{name}\0{number}" for number in range(1, len(parts)))]
        for gone in self._parts.pop(name, {}).keys() - set(names):
            self._prefetcher.dismiss(gone)
        if len(parts) > 1 or parts[0][1]:
            self._sweep()
            self._parts[name] = {each: after for each, (_, after) in zip(names, parts, strict=True)}
        for each, (foresee, after) in zip(names, parts, strict=True):
            self._prefetcher.expect(each, foresee, start + after)

    def _sweep(self) -> None:
        """Forget of requests that nobody came for."""
        expected = self._prefetcher.expected
        if len(self._parts) > _FEW + 2 * len(expected):
            self._parts = {name: parts for name, parts in self._parts.items() if not expected.keys().isdisjoint(parts)}

    def reorder(self, within: Mapping[str, float]) -> None:
        """They start in so many seconds from now, as for :meth:`kvtier.prefetch.Prefetcher.reorder`."""
        if self._parts:
            within = self._prefetcher.checked(within)
            moved = {part: within[name] + after for name in self._parts.keys() & within.keys()
                     for part, after in self._parts[name].items()}  # fmt: skip
            within = {**within, **moved}
        self._prefetcher.reorder(within)

    def dismiss(self, name: str) -> None:
        """It will not come."""
        for part in self._parts.pop(name, (name,)):
            self._prefetcher.dismiss(part)

    def started(self, name: str) -> None:
        """The request has come, and holds itself what it needs."""
        for part in self._parts.pop(name, (name,)):
            self._prefetcher.started(part)

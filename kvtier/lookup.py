"""Lookup: from what a request names to its place in the catalog — salt and adapter to a namespace, that to a root, and
content to the blocks below it."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from kvtier.arguments import seconds, whole
from kvtier.catalog import DEVICE, DISK, Catalog, Match, Residency, Tier
from kvtier.content import Content
from kvtier.sequence import Sequence, Slots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import numpy.typing as npt

    from kvtier.content import Media
    from kvtier.foreign import Hashes
    from kvtier.messages import DataPlane
    from kvtier.namespace import Namespace

__all__ = ["SCRATCH", "Foresee", "Lookup", "Positions"]

Positions: TypeAlias = "tuple[int, int] | list[tuple[int, int, float]]"
"""Of a prompt's tokens [first, last), or several such, each with the seconds after the start at which it is read."""

Foresee: TypeAlias = "Callable[[int, bool, float, float], tuple[list[int], list[int]]]"
"""Looks for what a request will read: :meth:`Lookup.foresee` of its blocks, for a catalog's request id, the disk being
lost or not, now, by when."""

SCRATCH = 1
"""The catalog's request id for what no request asks, such as hints: a lease of its lives only inside one call."""


class Lookup:
    """The one way from names to nodes, so that no path can leave a salt, an adapter or an image out."""

    def __init__(self, catalog: Catalog, plane: DataPlane, namespace: Namespace, block_size: int) -> None:
        self._catalog = catalog
        self._plane = plane
        self._block = block_size
        # Not a method: a cache of a bound method is a cycle, which would keep the tiers' memory past the last use.
        self.space = lru_cache(maxsize=4096)(partial(_space, namespace))

    def root(self, space: bytes) -> int | None:
        """None: more namespaces hold pages than the catalog can tell apart; this one has to do without."""
        try:
            return self._catalog.native.root(space, 0, self._plane.generation(space))
        except OverflowError:
            return None

    def match(self, sequence: Sequence, limit: int | None = None) -> Match:
        """Lease to the sequence the cached prefix of its tokens, of at most ``limit`` blocks, the last token never in
        it: that one is always left to compute."""
        space = sequence.space
        return self._catalog.find(space, self._plane.generation(space), sequence.growing, limit)

    def index(self, computed: Iterable[Sequence]) -> list[int]:
        """Offer the catalog the first ``growing.noted`` blocks of each sequence, computed and in its slots; returns the
        nodes whose pages are new there."""
        parts = []
        for sequence in computed:
            if sequence.cacheable:
                growing = sequence.growing
                # A root is not leased: ask for it again rather than keep its number.
                root = self.root(sequence.space) if growing.leaf is None else None
                parts.append((growing, growing.noted, root))
        return self._catalog.extend(parts, DEVICE) if parts else []

    def foresee(
        self,
        space: bytes,
        labels: Content | Hashes,
        first: int,
        last: int | None,
        request: int,
        lost: bool,
        now: float = 0.0,
        due: float = 0.0,
    ) -> tuple[list[int], list[int]]:
        """Of what ``labels`` name the nodes of the cached blocks [first, last), kept alive for ``request``, and those
        of them that only the disk holds and that nobody is bringing up. ``lost``: what is on disk cannot be had.

        Nothing is pinned for it, and it is no use of what is in host memory: a wrong hint would keep that there in the
        place of others. Only what is brought ahead for a later time than ``due`` does not take its place.
        """
        root = self.root(space)
        if root is None:
            return [], []
        return self._catalog.foresee(root, labels, first, last, DISK, lost, request, now, due)

    def reading(
        self,
        space: bytes,
        tokens: Iterable[int] | npt.NDArray[np.integer],
        media: list[Media],
        positions: Positions | None,
    ) -> list[tuple[Foresee, float]]:
        """How to :meth:`foresee` what a request with these tokens will read, each part so many seconds after its start:
        all of it, or what lies at ``positions``. The tokens are looked at then. ValueError for positions that make no
        sense."""
        read: list[Content] = []  # once, however often it is looked for: of a long prompt that takes a while

        def part(first: int, last: int | None) -> Foresee:
            def foresee(request: int, lost: bool, now: float, due: float) -> tuple[list[int], list[int]]:
                if not read:
                    read.append(Content(tokens, media))
                return self.foresee(space, read[0], first, last, request, lost, now, due)

            return foresee

        return [(part(first, last), after) for first, last, after in self._ranges(positions)]

    def _ranges(self, positions: Positions | None) -> list[tuple[int, int | None, float]]:
        """Blocks [first, last) and seconds."""
        if positions is None:
            return [(0, None, 0.0)]
        try:
            several = [(*positions, 0.0)] if isinstance(positions, tuple) else list(positions)
            ranges: list[tuple[int, int | None, float]] = []
            for first, last, after in several:
                first, last = whole("first", first), whole("last", last, first + 1)
                ranges.append((first // self._block, -(-last // self._block), seconds("after", after, least=0.0)))
            if ranges:
                return ranges
        except (TypeError, ValueError):
            pass
        raise ValueError(
            f"positions: {positions!r}; accepted: whole numbers with 0 <= first < last, or a list of (first, last, "
            f"seconds after the start, 0 or more)"
        )

    def locate(self, space: bytes, content: Content) -> dict[str, int]:
        """Tokens of the cached prefix by the fastest tier that would serve them now. Holds and touches nothing."""
        root = self.root(space)
        counts = self._catalog.peek([root], content.whole(self._block)) if root is not None else (0,) * len(Tier)
        return {tier.name.lower(): counts[tier] * self._block for tier in Tier if counts[tier]}

    def evict(self, tier: Tier, space: bytes, content: Content) -> Slots:
        """Drop the cached prefix's pages that nobody uses from ``tier``; returns the slots that are free by it."""
        root, labels = self.root(space), content.whole(self._block)
        if root is None:
            return np.empty(0, np.uint32)
        found = self._catalog.match([root], labels, 0, SCRATCH).hit
        self._catalog.release(SCRATCH)  # a match pins its pages; an insert keeps no more than the nodes alive
        with self._catalog.lease(SCRATCH):
            nodes = self._catalog.insert(root, labels[:found], SCRATCH)
            slots, before = self._catalog.state(nodes)
            self._catalog.drop(tier, nodes)
            after = self._catalog.state(nodes)[1]
        gone = (before[:, tier] == Residency.READY) & (after[:, tier] == Residency.ABSENT)
        return np.ascontiguousarray(slots[gone, tier])


def _space(namespace: Namespace, salt: str | None, adapter: bytes | None) -> bytes:
    """The fingerprint of a request's namespace; what it does not name is the whole manager's own."""
    given = {name: value for name, value in (("salt", salt), ("adapter", adapter)) if value is not None}
    return namespace.with_(**given).fingerprint if given else namespace.fingerprint

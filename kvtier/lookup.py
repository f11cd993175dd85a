"""Lookup: from what a request names to its place in the catalog — salt and adapter to a namespace, that to a root, and
content to the blocks below it."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np

from kvtier.catalog import DEVICE, Catalog, Match, Residency, Tier
from kvtier.sequence import Sequence, Slots

if TYPE_CHECKING:
    from kvtier.content import Content
    from kvtier.messages import DataPlane
    from kvtier.namespace import Namespace

__all__ = ["SCRATCH", "Lookup"]

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
            return self._catalog.root(space, 0, self._plane.generation(space))
        except OverflowError:
            return None

    def match(self, sequence: Sequence, limit: int | None = None) -> Match:
        """Lease to the sequence the cached prefix of its tokens, of at most ``limit`` blocks, the last token never in
        it: that one is always left to compute."""
        root = self.root(sequence.space)
        sequence.cacheable = root is not None
        if root is None:
            return Match.nothing()
        labels = sequence.content.labels(0, (sequence.num_tokens - 1) // self._block, self._block)
        return self._catalog.match([root], labels, 0, sequence.request, limit)

    def index(self, sequence: Sequence, last: int) -> list[int]:
        """Offer the catalog the sequence's blocks up to ``last``, computed and in its slots; returns the nodes whose
        pages are new there."""
        first = sequence.cached
        if last <= first or not sequence.cacheable:
            return []
        # A root is not leased: ask for it again rather than keep its number.
        parent = sequence.leaf
        if parent is None:
            parent = self.root(sequence.space)
            if parent is None:
                return []
        nodes, fresh = self._catalog.extend(parent, sequence.growing, first, last, DEVICE)
        sequence.cached += len(nodes)
        sequence.later += nodes
        return fresh

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

"""Two catalogs in step: what only asks may change nothing, not even which page goes next."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import astuple, is_dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvtier._core import Growing
from kvtier.catalog import Catalog, Tier, TierSpec
from kvtier.content import Content

_ASKS = frozenset(
    (
        *("peek", "foresee", "cold", "lacking", "identities", "state"),
        *("contents", "count_ready", "evictable", "usage", "stats", "check"),
    )
)


class Twins:
    """Speaks as the one; the other hears whatever changes something, and must say the same to it. It is asked nothing:
    so equal decisions follow from equal calls, and what a question makes hotter stays longer in the one alone.
    """

    def __init__(self, tiers: Sequence[TierSpec], **options: Any) -> None:
        self.one, self.other = Catalog(tiers, **options), Catalog(tiers, **options)

    def __getattr__(self, name: str) -> Any:
        said = getattr(self.one, name)
        asks = name in _ASKS or not callable(said)
        return said if asks else self._of_both(said, getattr(self.other, name))

    def _of_both(self, one: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            try:
                said = one(*args, **options)
            except ValueError as error:
                with pytest.raises(ValueError, match=re.escape(str(error))):
                    other(*args, **options)
                raise
            np.testing.assert_equal(_plain(other(*args, **options)), _plain(said), f"the twins part in {one}")
            return said

        return call

    def extend(
        self, parent: int, content: Content, table: NDArray[np.uint32], first: int, last: int, tier: Tier, request: int
    ) -> tuple[list[int], list[int]]:
        """A request of this content and table goes on below ``parent``: its new nodes, and those with a new page."""

        def of(catalog: Catalog) -> tuple[list[int], list[int]]:
            growing = Growing(content.native, request)
            growing.put(0, table)
            growing.cached, growing.noted, growing.leaf = first, last, parent if first else None
            fresh = catalog.extend([(growing, last, parent)], tier)
            nodes = growing.take_later()
            assert growing.cached == growing.noted == first + len(nodes)
            return nodes, fresh

        said: tuple[list[int], list[int]] = self._of_both(partial(of, self.one), partial(of, self.other))()
        return said

    def lengthen(self, table: Sequence[int], tier: Tier, n: int, request: int) -> tuple[bool, list[int]]:
        """A request's ``table`` takes ``n`` slots more: whether there was room, and what it is then."""
        said = []
        for catalog in (self.one, self.other):
            growing = Growing(Content().native, request)
            growing.put(0, np.array(table, np.uint32))
            said.append((growing.lengthen(catalog.native, tier, n), growing.slots().tolist()))
        assert said[0] == said[1], "the twins part in lengthen"
        return said[0]

    def compare(self, nodes: Sequence[int]) -> None:
        """Both have the same pages of ``nodes``, in the same slots."""
        np.testing.assert_equal(self.other.state(nodes), self.one.state(nodes), "the twins have other pages")


def _plain(said: Any) -> Any:
    return astuple(said) if is_dataclass(said) and not isinstance(said, type) else said

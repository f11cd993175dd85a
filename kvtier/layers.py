"""Layers: where each layer's KV lies in a page, and how a load is cut so that the first layers come first.

    page       | layer 0 | layer 1 | layer 2 | layer 3 | padding |      all layers alike, in the order of the model
    slices     |--------- 0 -------|--------- 1 -------|                of a load; the second of any page comes after
                                                                        the first of all

An engine computes layer 0 once slice 0 of all its pages is there, while the data plane brings slice 1. A slice is as
many layers as make it worth a copy of its own.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

__all__ = ["Layers"]

_SLICE_BYTES = 256 << 10  # of all pages together, at least
_LANE_BYTES = 16  # a slice begins on one: see csrc/copy/checksum.hpp


@dataclass(frozen=True, slots=True)
class Layers:
    """``count`` layers in the ``payload_bytes`` of a page."""

    count: int
    payload_bytes: int

    def cuts(self, blocks: int) -> tuple[int, ...]:
        """Where within a page each slice of a load of so many blocks ends, in bytes; of one slice nothing."""
        slices = min(self.count, blocks * self.payload_bytes // _SLICE_BYTES)
        if slices < 2 or self.payload_bytes % (self.count * _LANE_BYTES):
            return ()
        each = self.payload_bytes // self.count
        return tuple((slice + 1) * self.count // slices * each for slice in range(slices))

    def slices_until(self, layer: int, cuts: tuple[int, ...]) -> int:
        """How many slices hold the layers up to this one. ValueError for one that there is not."""
        if not 0 <= layer < self.count:
            raise ValueError(f"layer: {layer}; accepted: 0 to {self.count - 1}")
        last = (layer + 1) * self.payload_bytes // self.count
        return bisect_left(cuts, last) + 1

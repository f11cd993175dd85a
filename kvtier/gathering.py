"""Gathering: new blocks wait for others before they are copied down, a few steps at most.

An order costs the engine's thread about as much for one block as for many, and a batch that decodes completes one block
at a time. What waits is on the device as before; should it be evicted there meanwhile, it is not stored.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["Gathering"]

Nodes = npt.NDArray[np.uint32]

_NONE = np.empty(0, np.uint32)
_BLOCKS = 8  # or fewer, of so many bytes: then an order is small beside the copy
_BYTES = 4 << 20
_STEPS = 8  # that any of them waits


class Gathering:
    """Of blocks of ``page_bytes``."""

    def __init__(self, page_bytes: int) -> None:
        self._most = max(1, min(_BLOCKS, _BYTES // page_bytes))
        self._waiting: list[Nodes] = []
        self._count = self._steps = 0

    def add(self, nodes: Nodes) -> Nodes:
        """These were computed. Returns what is to be ordered now: nothing, or all."""
        self._waiting.append(nodes)
        self._count += len(nodes)
        return self.take() if self._count >= self._most else _NONE

    def step(self) -> Nodes:
        """A step of the engine has ended; returns as ``add`` does."""
        if not self._waiting:
            return _NONE
        self._steps += 1
        return self.take() if self._steps >= _STEPS else _NONE

    def take(self) -> Nodes:
        """All that wait."""
        nodes = np.concatenate(self._waiting) if self._waiting else _NONE
        self._waiting.clear()
        self._count = self._steps = 0
        return nodes

"""A pass over a prefix that is still on its way: before each layer is read, the cache is asked whether it is there."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.manager import CacheManager

__all__ = ["Arrival", "NotThereError"]


class NotThereError(Exception):
    """A layer of the prefix will not come: the pass is of no use."""


class Arrival:
    """Of one request and one pass. Called with each layer in order, before its K/V is read."""

    def __init__(self, manager: CacheManager, request_id: str, clock: Callable[[], float]) -> None:
        self._manager, self._request_id, self._clock = manager, request_id, clock
        self.waited = 0.0
        """Seconds in which the pass had nothing to do but wait for the cache."""

    def __call__(self, layer: int) -> None:
        began = self._clock()
        there = self._manager.wait_for_layer(self._request_id, layer)
        self.waited += self._clock() - began
        if not there:
            raise NotThereError(f"{self._request_id}: layer {layer}")

"""Loads that a step waits for, on one rank: each layer of the pass for its own part, or the pass for all of it.

    before the pass       begin → before_pass             waits for what does not come layer by layer
    in the pass           wait_for_layer, by each layer
    behind it             end                             says which requests read what had not come

An engine that replays a recorded pass, or computes in some other way beside its layers' calls, does not ask for each
layer. So loads come layer by layer only after a pass in which every layer asked, and where in the pass that used them
one did not, the request is among those that :meth:`StepLoads.end` names.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.messages import Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from kvtier.connectors.vllm.metadata import Load
    from kvtier.layers import Layers
    from kvtier.messages import Order
    from kvtier.relay import RankPlane

__all__ = ["StepLoads"]


@dataclass(slots=True)
class _Waited:
    request: str
    tickets: tuple[int, ...]
    cuts: tuple[int, ...]  # of its one ticket; none: it comes whole
    until: float
    ended: bool = False  # before the pass
    there: int = 0  # slices that were waited for
    in_time: bool = True


class StepLoads:
    """Every call comes from the worker's own thread. ``names``: of the layers in a page, in its order."""

    def __init__(
        self, rank: RankPlane, layers: Layers, names: Iterable[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rank, self._layers, self._clock = rank, layers, clock
        self._places = {name: place for place, name in enumerate(names)}
        self._loads: list[_Waited] = []
        self._asked: set[str] = set()  # layers, in this pass
        self._every_layer_asks = False  # as was seen in the last pass that was looked at
        self._by_layer = False  # whether this pass may wait layer by layer
        self._passed = True
        self.asks = True
        """Whether a layer of this step has anything to ask for: so that it need not be asked where there is nothing."""

    def begin(self, loads: Mapping[str, Load], orders: Iterable[Order]) -> None:
        """Of a step; ``loads`` are its synchronous ones, and their orders are carried out already."""
        self._asked.clear()
        self._by_layer = self._passed = False
        known = {order.ticket: order for order in orders if isinstance(order, Transfer)} if loads else {}
        for request, load in loads.items():
            mine = [known[ticket] for ticket in load.tickets if ticket in known]
            cuts = mine[0].cuts if len(mine) == 1 else ()
            until = self._clock() + max((order.deadline for order in mine), default=0.0)
            self._loads.append(_Waited(request, load.tickets, cuts, until))
        self.asks = bool(self._loads) or not self._every_layer_asks

    def before_pass(self) -> None:
        """Return when all is there, or will not come, that no layer waits for."""
        self._by_layer = self._every_layer_asks
        for load in self._loads:
            if not (self._by_layer and load.cuts):
                self._drain(load)
                load.ended = True

    def wait_for_layer(self, name: str) -> None:
        """Return when this layer of all that is loaded is there, or will not come."""
        if not self.asks:
            return
        self._asked.add(name)
        if not self._by_layer:
            return
        place = self._places.get(name, self._layers.count - 1)
        for load in self._loads:
            if load.in_time and not load.ended:
                self._wait(load, self._layers.slices_until(place, load.cuts))

    def _wait(self, load: _Waited, slices: int) -> None:
        if slices > load.there:
            left = max(0.0, load.until - self._clock())
            load.in_time = self._rank.wait_for_slices(load.tickets[0], slices, left)
            load.there = slices

    def end(self, *, computed: bool) -> frozenset[str]:
        """Return when nothing of the loads can touch a block any more: the requests whose pass read what was not there
        yet. ``computed``: whether there was a pass."""
        if computed and not self._passed and (self._loads or not self._every_layer_asks):
            self._every_layer_asks = self._asked >= self._places.keys()
        self._passed = True
        for load in self._loads:
            self._drain(load)
        late = frozenset(
            load.request
            for load in self._loads
            if not load.ended and not (self._by_layer and self._every_layer_asks and load.in_time)
        )
        self._loads.clear()
        return late

    def _drain(self, load: _Waited) -> None:
        self._rank.drain(load.tickets, max(0.0, load.until - self._clock()))

"""CostModel: measured lane speeds and prefill speed → how long a load and a recompute will take, as things stand.

Pure arithmetic: no thread, no clock and no bytes. Who calls what: whoever issues transfers says ``submitted`` and
``completed``; the engine's prefill timings come by ``observe_prefill``; whoever decides asks ``load`` and
``recompute``. Both answer None while they know nothing, and never guess.

    load      = wait for what the lanes have to do first + fixed cost + bytes / rate        (each lane learns both)
    recompute = passes · fixed + tokens · each + Σ (token, all it attends to) · each         (a pass: one prefill chunk)

A lane's seconds are those that it was *occupied* by a transfer: from its first page being taken, or the end of the
transfer before it, to its last page's end. So transfers that overlap are not counted twice, and the fixed cost is
learnt from those that found the lane idle. Of a hop that is fed by another, only the time in which it moved something.
How a coefficient is learnt from that: :class:`kvtier.fit.Fit`.
"""

from __future__ import annotations

from functools import cache
from itertools import product

from kvtier import _core
from kvtier._core import Tier

__all__ = ["LANES", "CostModel", "lanes_of"]

LANES = {
    (source, target): lane
    for source, target in product(Tier, Tier)
    if (lane := _core.lane_between(source, target)) is not None
}
"""By the tiers that each joins."""


@cache
def lanes_of(path: tuple[Tier, ...]) -> tuple[str, ...]:
    """The lanes of a path through tiers, e.g. stage, onboard."""
    return tuple(LANES[path[hop], path[hop + 1]] for hop in range(len(path) - 1))


class CostModel(_core.CostModel):
    """Predicts loads of blocks of ``page_bytes`` and prefills, in seconds. Native (csrc/costs/cost_model.hpp), since it
    hears of every transfer in the engine's thread.

    ``bytes_in_flight``: of less urgent work a lane may have taken before it looks at what is more urgent.
    """

    def describe(self) -> str:
        """One line: what is known of every lane and of the engine's prefill."""
        parts = []
        for name in LANES.values():
            speed = self.lane_speed(name)
            if speed is not None:
                parts.append(f"{name} {speed[1] / 1e9:.3g} GB/s + {1e3 * speed[0]:.2g} ms")
        prefill = self.prefill_speed()
        if prefill is not None:
            alone = self.recompute(prefill[1], 0)
            assert alone is not None
            parts.append(f"prefill {prefill[1] / max(alone, 1e-12):,.0f} tokens/s")
        return ", ".join(parts) or "nothing measured yet"

"""How the end of a GPU's copy is noticed: measured on this machine, or a default that says so.

    poll   a thread of the mover's looks at the event of each batch, every 20 microseconds while one is under way
    call   a thread of the driver's tells the mover's, which sleeps until then

Looking takes processor time for as long as copies run; being told takes two threads' waking up for each batch. Which of
the two a load waits for longer depends on the driver and the machine.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier import _core

__all__ = ["ENDS", "Noticing", "better", "measure_ends"]

ENDS = ("poll", "call")
ALIKE = 1.05  # waits that differ by no more than this are alike
SINGLES = 32  # loads of one page, one after the other, in a round
MOST_PAGES = 4096  # of the long load of a round
PATIENCE_S = 30.0
_kept: list[_core.Mover] = []  # of loads that never ended, whose memory the device may still touch
_IDENTITY_BYTES = 112  # the least that a mover takes; nothing here looks at what they say


@dataclass(frozen=True, slots=True)
class Noticing:
    """What one way costs: seconds from the submission of one page's load to its report, and seconds of the processor
    for each second in which a long load runs."""

    wait_s: float
    processor: float


def better(measured: dict[str, Noticing]) -> str:
    """The way by which a load is told sooner; of ways that are alike, the one that takes less of the processor."""
    shortest = min(each.wait_s for each in measured.values())
    alike = {way: each.processor for way, each in measured.items() if each.wait_s <= ALIKE * shortest}
    return min(alike, key=alike.__getitem__)


def measure_ends(
    device: _core.CudaDevice,
    pool: _core.DevicePool,
    arena: _core.HostArena,
    pinned: _core.PinnedArena,
    *,
    path: str,
    rounds: int = 5,
    pages: int = MOST_PAGES,
    processor_share: float = 0.08,
) -> dict[str, Noticing]:
    """Both ways through movers as in service, onboard by ``path``, interleaved: medians. Overwrites the pool.

    ``pages`` is how many the long load of a round has at most. Raises CudaError when a copy fails or does not end.
    """
    count = min(pages, pool.slots, pinned.pinned, MOST_PAGES)
    spread = np.random.default_rng(1)
    slots = np.stack([spread.permutation(n)[:count].astype(np.uint32) for n in (pinned.pinned, pool.slots)])
    waits: dict[str, list[float]] = {way: [] for way in ENDS}
    shares: dict[str, list[float]] = {way: [] for way in ENDS}
    for turn in range(rounds + 1):  # the first warms up
        for way in ENDS:
            copies = _core.CudaCopies(
                device, pinned, onboard=path, processor_share=processor_share, host_calls=way == "call"
            )
            loads = _Loads(pool, arena, copies)
            try:
                singles = [loads.run(slots[:, [i % count]])[0] for i in range(SINGLES)]
                elapsed, busy = loads.run(slots)
            finally:
                if not loads.mover.close():
                    _kept.append(loads.mover)
            if turn:
                waits[way].append(statistics.median(singles))
                shares[way].append(busy / elapsed)
    return {way: Noticing(statistics.median(waits[way]), statistics.median(shares[way])) for way in ENDS}


class _Loads:
    """Loads through a mover of their own, each waited for."""

    def __init__(self, pool: _core.DevicePool, arena: _core.HostArena, copies: _core.CudaCopies) -> None:
        self.mover = _core.Mover(pool, arena, None, cuda=copies)
        self._ticket = 0

    def run(self, slots: npt.NDArray[np.uint32]) -> tuple[float, float]:
        """Load pages slots[0] of the host into slots[1] of the device: seconds, and seconds of the processor."""
        self._ticket += 1
        identities = np.zeros((slots.shape[1], _IDENTITY_BYTES), np.uint8)
        path, limit = [_core.Tier.HOST, _core.Tier.DEVICE], time.monotonic() + PATIENCE_S
        busy = time.process_time()
        if not self.mover.submit(self._ticket, path, np.ascontiguousarray(slots), identities):
            raise _core.CudaError(f"a load that was to be measured was refused: {self._note()}")
        while not (done := self.mover.poll()):
            if time.monotonic() > limit:
                raise _core.CudaError(f"a load that was measured did not end within {PATIENCE_S:.0f} s")
            self.mover.wait(1.0)
        busy = time.process_time() - busy
        _, _, _, submitted, finished, whole = done[0].told()
        if not whole:
            raise _core.CudaError(f"a load that was measured failed: {self._note()}")
        return finished - submitted, busy

    def _note(self) -> str:
        return str(self.mover.stats()["device_note"]) or "nothing is known about why"
